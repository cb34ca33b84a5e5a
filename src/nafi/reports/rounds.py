"""Tables and figure of an experiment in rounds.

Hides: which of a run's rounds a table looks at. Promises: every number is a function of the
records; the last round counts, unless a heading says best.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from nafi.reports import figures
from nafi.reports.records import (
    Record,
    Summary,
    Table,
    accuracy_table,
    by_cell,
    cell_name,
    compared_table,
    in_order,
    paper_cifar10,
    width_table,
)


def round_tables(records: Sequence[Record], metric: str = "test accuracy") -> list[Table]:
    """What a run in rounds came to: last and best round, widths, bytes."""
    tables = [
        accuracy_table(records, f"{metric.capitalize()} after the last round".strip()),
        compared_table(records, paper_cifar10()),
        _best_round(records, metric),
        width_table(records),
        _bytes_table(records),
        accuracy_table(records, "test-picked: chosen on test data, not comparable", "test_picked"),
    ]
    return [table for table in tables if table.rows]


def round_figure(records: Sequence[Record], metric: str = "test accuracy, %") -> str:
    """The mean over trials of every round: a panel for each number of clients."""
    panels: dict[str, dict[str, list[float]]] = {}
    timed = [r for r in records if r.get("rounds")]
    for clients in sorted({r["clients"] for r in timed}):
        of_cell = [r for r in timed if r["clients"] == clients]
        curves = {}
        for method in in_order({r["method"] for r in of_cell}):
            runs = [
                [entry["test"] for entry in r["rounds"]] for r in of_cell if r["method"] == method
            ]
            curves[method] = [fmean(values) for values in zip(*runs, strict=True)]
        panels[f"{clients} clients"] = curves
    return figures.svg(figures.rounds_figure(panels, metric))


def _best_round(records: Sequence[Record], metric: str) -> Table:
    """The round that did best on validation data, for methods that go up and down."""
    chosen = [
        {**r, "best": max(r["rounds"], key=lambda entry: entry["validation"])["test"]}
        for r in records
        if r.get("rounds")
    ]
    title = f"{metric.capitalize()} of the round that is best on validation data"
    return accuracy_table(chosen, title, "best") if chosen else Table(title, (), ())


def _bytes_table(records: Sequence[Record]) -> Table:
    """Megabytes of all rounds and clients, down and up."""
    timed = [r for r in records if r.get("rounds")]
    found = {
        way: by_cell(timed, lambda r, way=way: sum(e[f"bytes_{way}"] for e in r["rounds"]) / 1e6)  # type: ignore[misc]
        for way in ("down", "up")
    }
    cells = list(found["down"])

    def text(method: str, key: tuple[int, int]) -> str:
        both: list[Summary | None] = [found[way][key].get(method) for way in ("down", "up")]
        return " / ".join(f"{s.mean:.1f}" for s in both if s is not None)

    rows = tuple(
        (method, *(text(method, key) for key in cells))
        for method in in_order({r["method"] for r in timed})
    )
    headings = ("method", *map(cell_name, cells))
    return Table("Megabytes down / up, all rounds and clients", headings, rows)
