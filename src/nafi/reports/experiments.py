"""The report of experiments: one page, and the same tables in Markdown.

Hides: which tables and figures an experiment's records give. Promises: one self-contained file that
needs no network; every number comes from the records.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from nafi.errors import InputError
from nafi.files import atomic_path
from nafi.reports import figures
from nafi.reports.records import (
    Record,
    Summary,
    Table,
    accuracy_table,
    by_cell,
    compared_table,
    in_order,
    markdown,
    paper_mnist,
    width_table,
)
from nafi.reports.rounds import Photos, pictures_figure, round_figure, round_tables
from nafi.version import __version__

_BEGIN, _END = "<!-- generated: begin -->", "<!-- generated: end -->"


@dataclass(frozen=True)
class Section:
    """One experiment: its tables, its figures as SVG, and how it was run."""

    title: str
    command: str
    tables: tuple[Table, ...]
    figures: tuple[str, ...]
    versions: str


def sections(runs: Mapping[str, Sequence[Record]], photos: Photos | None = None) -> list[Section]:
    """A section for each experiment, in the order of their names.

    photos: looks up what is not in records, for pictures of samples
    """
    return [_section(name, records, photos) for name, records in sorted(runs.items()) if records]


def write_page(path: Path, found: Sequence[Section]) -> None:
    """All sections as one HTML file."""
    environment = Environment(
        loader=PackageLoader("nafi.reports"), autoescape=True, undefined=StrictUndefined
    )
    template = environment.get_template("experiments.html")
    page = template.render(sections=found, version=__version__, enumerate=enumerate)
    with atomic_path(path) as partial:
        partial.write_text(page, encoding="utf-8")


def write_markdown(path: Path, found: Sequence[Section]) -> None:
    """All tables, between the marks of a Markdown file; what stands around them is kept."""
    lines = [_BEGIN, ""]
    for section in found:
        lines += [f"### {section.title}", "", f"`{section.command}`, {section.versions}", ""]
        lines += [text for table in section.tables for text in (markdown(table),)]
    body = "\n".join([*lines, _END])
    try:
        old = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if old.count(_BEGIN) != 1 or old.count(_END) != 1:
        raise InputError(f"{path} needs the lines {_BEGIN} and {_END} once each, for the tables")
    before, after = old[: old.index(_BEGIN)], old[old.index(_END) + len(_END) :]
    with atomic_path(path) as partial:
        partial.write_text(before + body + after, encoding="utf-8")


def _section(name: str, records: Sequence[Record], photos: Photos | None) -> Section:
    title = records[0]["config"]["title"]
    tables: list[Table] = []
    drawn: list[str | None] = []
    if name == "mnist-size":
        tables, drawn = _size(records)
    elif name == "mnist-sensitivity":
        tables, drawn = _sensitivity(records)
    elif name == "mnist-width":
        tables, drawn = _width(records)
    elif any("attack" in record for record in records):
        tables = [accuracy_table(records, "Test accuracy; nothing was chosen")]
    elif any(record.get("rounds") for record in records):
        tables = round_tables(records)
        drawn = [round_figure(records), pictures_figure(records, photos)]
    else:
        tables = [
            accuracy_table(records, "Test accuracy, chosen on validation data"),
            compared_table(records, paper_mnist()),
            width_table(records),
            accuracy_table(
                records, "test-picked: chosen on test data, not comparable", "test_picked"
            ),
        ]
    tables = [table for table in tables if table.rows]
    told = records[0]["versions"]
    versions = ", ".join(f"{package} {number}" for package, number in told.items())
    profile = records[0]["config"].get("profile")
    run = f"{name.removesuffix(f'-{profile}')} --profile {profile}" if profile else name
    command = f"nafi run {run} --trials {1 + max(r['trial'] for r in records)}"
    return Section(title, command, tuple(tables), tuple(d for d in drawn if d), versions)


def _size(records: Sequence[Record]) -> tuple[list[Table], list[str | None]]:
    """ln(J / sum J_s), as the paper's figure has it."""
    cells = by_cell(
        records, lambda r: log(sum(r["widths"]) / (r["clients"] * r["hidden"] * r["local_width"]))
    )
    methods = in_order({r["method"] for r in records})
    rows = [(str(k[0]), *(str(row.get(m, "")) for m in methods)) for k, row in cells.items()]
    table = Table("ln(J / sum of J_s)", ("clients", *methods), tuple(rows))
    series = {
        m: [(k[0], row[m].mean, row[m].spread or 0.0) for k, row in cells.items() if m in row]
        for m in methods
    }
    drawn = figures.svg(figures.size_figure(series))
    return [table, accuracy_table(records, "Test accuracy")], [drawn]


def _sensitivity(records: Sequence[Record]) -> tuple[list[Table], list[str | None]]:
    """Accuracy over the penalty and the number of clients."""
    cells = by_cell(records, lambda r: r["test"])
    penalties = sorted({float(r["chosen"]["penalty"]) for r in records})
    names = {float(r["chosen"]["penalty"]): r["method"] for r in records}
    clients = [key[0] for key in cells]
    values = np.array(
        [
            [row[names[p]].mean if names[p] in row else np.nan for p in penalties]
            for row in cells.values()
        ]
    )
    headings = ("clients", *(f"{p:g}" for p in penalties))
    rows = [
        (str(key[0]), *(str(row.get(names[p], "")) for p in penalties))
        for key, row in cells.items()
    ]
    table = Table("Test accuracy by penalty", headings, tuple(rows))
    drawn = figures.sensitivity_figure(penalties, clients, values)
    return [table], [figures.svg(drawn)]


def _width(records: Sequence[Record]) -> tuple[list[Table], list[str | None]]:
    """Accuracy against the global width that each method came to."""
    series: dict[str, list[tuple[float, float, float]]] = {}
    ceilings: dict[str, float] = {}
    rows = []
    for method in in_order({r["method"] for r in records}):
        own = [r for r in records if r["method"] == method]
        accuracy = Summary.of([r["test"] for r in own])
        family = re.split(r"[, ]", method)[0]
        if family in ("ensemble", "all"):
            ceilings[method] = accuracy.mean
            factor = float("nan") if family == "ensemble" else _mean_factor(own)
        else:
            factor = _mean_factor(own)
            point = (factor, accuracy.mean, accuracy.spread or 0.0)
            series.setdefault(family, []).append(point)
        rows.append((method, "" if np.isnan(factor) else f"{factor:.2f}x", str(accuracy)))
    table = Table("Accuracy against width", ("method", "width", "test accuracy"), tuple(rows))
    return [table], [figures.svg(figures.width_figure(series, ceilings))]


def _mean_factor(records: Sequence[Record]) -> float:
    """Global over local width, over layers and trials; 1 for methods that keep the width."""
    factors: list[Any] = [
        np.mean(r["widths"]) / r["local_width"] if r["widths"] else 1.0 for r in records
    ]
    return float(np.mean(factors))
