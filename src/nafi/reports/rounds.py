"""Tables and figure of an experiment in rounds.

Hides: which of a run's rounds a table looks at. Promises: every number is a function of the
records; the last round counts, unless a heading says best.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

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
    metric_of,
    paper_carvana,
    paper_cifar10,
    width_table,
)

Picture = npt.NDArray[np.uint8]


def round_tables(records: Sequence[Record]) -> list[Table]:
    """What a run in rounds came to: last and best round, widths, bytes."""
    metric = metric_of(records)
    tables = [
        accuracy_table(records, f"{metric.capitalize()} after the last round"),
        compared_table(
            [r for r in records if not _is_one_shot(r)],
            paper_carvana() if "dice" in metric else paper_cifar10(),
        ),
        _best_round(records, metric),
        width_table(records),
        _bytes_table(records),
        accuracy_table(records, "test-picked: chosen on test data, not comparable", "test_picked"),
    ]
    return [table for table in tables if table.rows]


def _is_one_shot(record: Record) -> bool:
    """Whether a method had one round, among others that have more: it has no curve and no best."""
    return len(record.get("rounds") or []) == 1 < int(record["config"].get("rounds", 1))


def round_figure(records: Sequence[Record]) -> str:
    """The mean over trials of every round: a panel for each number of clients."""
    panels: dict[str, dict[str, list[float]]] = {}
    timed = [r for r in records if r.get("rounds") and not _is_one_shot(r)]
    for clients in sorted({r["clients"] for r in timed}):
        of_cell = [r for r in timed if r["clients"] == clients]
        curves = {}
        for method in in_order({r["method"] for r in of_cell}):
            runs = [
                [entry["test"] for entry in r["rounds"]] for r in of_cell if r["method"] == method
            ]
            curves[method] = [fmean(values) for values in zip(*runs, strict=False)]
        panels[f"{clients} clients"] = curves
    return figures.svg(figures.rounds_figure(panels, f"{metric_of(records)}, %"))


# (sample, settings of the experiment) -> photo (height, width, 3) and mask (height, width)
Photos = Callable[[int, Mapping[str, Any]], tuple[Picture, Picture]]


def pictures_figure(records: Sequence[Record], photos: Photos | None) -> str | None:
    """What each method makes of a few samples, of the first trial with the fewest clients."""
    with_pictures = [r for r in records if r.get("pictures")]
    if not with_pictures:
        return None
    fewest = min(r["clients"] for r in with_pictures)
    shown = [r for r in with_pictures if r["clients"] == fewest and r["trial"] == 0]
    if not shown:
        return None
    samples = [picture["sample"] for picture in shown[0]["pictures"]]
    columns: dict[str, Sequence[Picture | None]] = {}
    if photos is not None:
        found = [photos(sample, shown[0]["config"]) for sample in samples]
        columns = {"photo": [p for p, _ in found], "mask": [m for _, m in found]}
    by_method = {r["method"]: r["pictures"] for r in shown}
    for method in in_order(by_method):
        columns[method] = [_unpacked(picture) for picture in by_method[method]]
    return figures.svg(figures.pictures_figure(columns, len(samples)))


def _unpacked(picture: Mapping[str, Any]) -> Picture:
    height, width = picture["shape"]
    bits = np.frombuffer(base64.b64decode(picture["bits"]), dtype=np.uint8)
    return np.unpackbits(bits)[: height * width].reshape(height, width)


def _best_round(records: Sequence[Record], metric: str) -> Table:
    """The round that did best on validation data, for methods that go up and down."""
    chosen = [
        {**r, "best": max(r["rounds"], key=lambda entry: entry["validation"])["test"]}
        for r in records
        if r.get("rounds") and not _is_one_shot(r)
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
