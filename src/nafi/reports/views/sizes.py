"""Views of how large fused networks are, and of scores over their size or penalty."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np

from nafi.reports import figures
from nafi.reports.records import (
    Record,
    Summary,
    TextTable,
    by_cell,
    cell_name,
    family,
    in_order,
    width_table,
)
from nafi.reports.views.material import Material, view

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@view("widths")
def _widths(material: Material) -> Iterator[TextTable | Figure]:
    """Widths of the fused networks."""
    yield width_table(material.records)


@view("parameters")
def _parameters(material: Material) -> Iterator[TextTable | Figure]:
    """How large the fused networks are."""
    yield _size_table(material, "parameters", 1e3, "Parameters, thousands")


@view("multiply-adds")
def _multiply_adds(material: Material) -> Iterator[TextTable | Figure]:
    """How much work one input is for the fused networks."""
    yield _size_table(material, "multiply_adds", 1e6, "Multiply-adds of one input, millions")


def _size_table(material: Material, name: str, unit: float, title: str) -> TextTable:
    cells = by_cell([r for r in material.records if r.get(name)], lambda r: r[name])
    methods = in_order({method for row in cells.values() for method in row})
    rows = tuple(
        (m, *(f"{row[m].mean / unit:.1f}" if m in row else "" for row in cells.values()))
        for m in methods
    )
    return TextTable(title, ("method", *map(cell_name, cells)), rows)


@view("frontier")
def _frontier(material: Material) -> Iterator[TextTable | Figure]:
    """Scores over the size of the fused network: a row of panels for each cell."""
    sized = [r for r in material.records if r.get("parameters") and r.get("multiply_adds")]
    scores = by_cell(sized, lambda r: r["test"])
    parameters = by_cell(sized, lambda r: r["parameters"])
    work = by_cell(sized, lambda r: r["multiply_adds"])
    panels = {
        cell_name(key): {
            m: (parameters[key][m].mean, work[key][m].mean, value.mean, value.spread or 0.0)
            for m, value in row.items()
        }
        for key, row in scores.items()
    }
    if panels:
        yield figures.frontier_figure(panels)


@view("size")
def _size(material: Material) -> Iterator[TextTable | Figure]:
    """ln(J / sum J_s), as the paper's figure has it."""
    records = [r for r in _of_one_width(material.records) if r["widths"]]
    if not records:
        return
    cells = by_cell(
        records,
        lambda r: log(sum(r["widths"]) / (r["clients"] * r["hidden"] * r["local_width"])),
    )
    methods = in_order({r["method"] for r in records})
    rows = [(str(k[0]), *(str(row.get(m, "")) for m in methods)) for k, row in cells.items()]
    yield TextTable("ln(J / sum of J_s)", ("clients", *methods), tuple(rows))
    series = {
        m: [(k[0], row[m].mean, row[m].spread or 0.0) for k, row in cells.items() if m in row]
        for m in methods
    }
    yield figures.size_figure(series)


@view("penalty")
def _penalty(material: Material) -> Iterator[TextTable | Figure]:
    """Accuracy over the penalty and the number of clients, for methods of one penalty each."""
    records = [r for r in material.records if isinstance(_penalty_of(r), int | float)]
    pairs = {(float(r["chosen"]["penalty"]), r["method"]) for r in records}
    names = dict(pairs)
    if len(names) < 2 or not len(pairs) == len(names) == len(set(names.values())):
        return
    cells = by_cell(records, lambda r: r["test"])
    penalties = sorted(names)
    rows = [
        (str(key[0]), *(str(row.get(names[p], "")) for p in penalties))
        for key, row in cells.items()
    ]
    headings = ("clients", *(f"{p:g}" for p in penalties))
    yield TextTable("Test accuracy by penalty", headings, tuple(rows))
    means = [
        [row[names[p]].mean if names[p] in row else np.nan for p in penalties]
        for row in cells.values()
    ]
    yield figures.sensitivity_figure(penalties, [key[0] for key in cells], np.array(means))


def _penalty_of(record: Record) -> object:
    return (record.get("chosen") or {}).get("penalty")


def _of_one_width(records: Sequence[Record]) -> list[Record]:
    """Records of clients whose hidden layers all have the same width."""
    return [r for r in records if isinstance(r["local_width"], int | float)]


@view("width")
def _width(material: Material) -> Iterator[TextTable | Figure]:
    """Accuracy against the global width that each method came to."""
    records = _of_one_width(material.records)
    if not records:
        return
    series: dict[str, list[tuple[float, float, float]]] = {}
    ceilings: dict[str, float] = {}
    rows = []
    for method in in_order({r["method"] for r in records}):
        runs = [r for r in records if r["method"] == method]
        accuracy = Summary.of([r["test"] for r in runs])
        kind = family(method)
        factor = float("nan") if kind == "ensemble" else _mean_factor(runs)
        if kind in ("ensemble", "all"):  # as wide as can be: what others fall short of
            ceilings[method] = accuracy.mean
        else:
            point = (factor, accuracy.mean, accuracy.spread or 0.0)
            series.setdefault(kind, []).append(point)
        rows.append((method, "" if np.isnan(factor) else f"{factor:.2f}x", str(accuracy)))
    headings = ("method", "width", "test accuracy")
    yield TextTable("Accuracy against width", headings, tuple(rows))
    yield figures.width_figure(series, ceilings)


def _mean_factor(records: Sequence[Record]) -> float:
    """Global over local width, over layers and trials; 1 for methods that keep the width."""
    factors: list[Any] = [
        np.mean(r["widths"]) / r["local_width"] if r["widths"] else 1.0 for r in records
    ]
    return float(np.mean(factors))
