"""Views of runs in which some clients attack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nafi.reports.records import CellKey, Record, Summary, TextTable, by_cell, cell_name, in_order
from nafi.reports.views.material import Material, view

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NOBODY = "nobody"
# (runs of a method under an attack, its runs without attackers) -> what is said of them
_Said = Callable[[Sequence[Record], Sequence[Record]], str]
_WANTED_IS = {"target_recall": "recall of the target class", "backdoor": "trigger taken for it"}
_WANTED = (
    ("target_recall", _NOBODY),
    ("target_recall", "erase-class"),
    ("backdoor", _NOBODY),
    ("backdoor", "backdoor"),
    ("backdoor", "quiet-backdoor"),
)


@view("attacks")
def _attacks(material: Material) -> Iterator[TextTable | Figure]:
    """Scores under attack; what the worst class loses by it; and what attackers wanted, if any."""
    records = [_attacked(r) for r in material.records if r.get("recalls")]
    for key in by_cell(records, lambda r: r["test"]):
        of_cell = [r for r in records if CellKey.of(r) == key]
        methods = in_order({r["method"] for r in of_cell})
        attacks = list(dict.fromkeys(r["attack"] for r in of_cell))
        runs = {
            (m, a): [r for r in of_cell if (r["method"], r["attack"]) == (m, a)]
            for m in methods
            for a in attacks
        }
        note = f"{1 + max(r['trial'] for r in of_cell)} trials"
        of_all: dict[str, _Said] = {
            f"{material.metric.capitalize()} under attack": lambda r, _: _mean_text(r, "test"),
            "Points of recall that the worst class loses": _recall_lost,
        }
        for title, text in of_all.items():
            rows = tuple(
                (m, *(text(runs[m, a], runs.get((m, _NOBODY), [])) for a in attacks))
                for m in methods
            )
            yield TextTable(f"{title}: {cell_name(key)}", ("method", *attacks), rows, note=note)
        wanted = [(field, a) for field, a in _WANTED if a in attacks]
        rows = tuple((m, *(_mean_text(runs[m, a], field) for field, a in wanted)) for m in methods)
        headings = tuple(f"{_WANTED_IS[field]}, {a}" for field, a in wanted)
        title = f"What attackers are after, percent: {cell_name(key)}"
        yield TextTable(title, ("method", *headings), rows, note=note)


def _attacked(record: Record) -> Record:
    """A record under the name of its method alone, with who attacks it."""
    attack = record.get("attack", _NOBODY)
    return {
        **record,
        "attack": attack,
        "method": record["method"].removesuffix(f" under {attack}"),
        "target_recall": record["recalls"][record["target"]],
    }


def _mean_text(records: Sequence[Record], field: str) -> str:
    if not records:
        return ""
    summary = Summary.of([r[field] for r in records])
    return f"{summary.mean:.1f}" + (f" ± {summary.spread:.1f}" if summary.spread else "")


def _recall_lost(records: Sequence[Record], without: Sequence[Record]) -> str:
    """The largest over classes of the mean over trials, against the same without attackers."""
    before = {r["trial"]: r["recalls"] for r in without}
    lost = [np.subtract(before[r["trial"]], r["recalls"]) for r in records if r["trial"] in before]
    return f"{max(0.0, float(np.mean(lost, axis=0).max())):.1f}" if lost else ""
