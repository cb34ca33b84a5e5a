"""Views of methods that have rounds: curves, the last layer solved, leads and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from nafi.reports import figures
from nafi.reports.records import (
    CellKey,
    Record,
    Summary,
    TextTable,
    by_cell,
    cell_name,
    in_order,
    lead_table,
    score_table,
)
from nafi.reports.views.material import Material, view

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SOLVED = ", last layer solved"


@view("best-round")
def _best_round(material: Material) -> Iterator[TextTable | Figure]:
    """The round that did best on validation data, for methods that go up and down."""
    chosen = [
        {**r, "best": max(r["rounds"], key=lambda entry: entry["validation"])["test"]}
        for r in material.in_rounds
    ]
    title = f"{material.metric.capitalize()} of the round that is best on validation data"
    if chosen:
        yield score_table(chosen, title, "best")


@view("head")
def _head(material: Material) -> Iterator[TextTable | Figure]:
    """Scores with the last layer solved from all clients' labelled statistics."""
    records = [r for r in material.records if "head_test" in r]
    if records:
        title = f"{material.metric.capitalize()} with the last layer solved from statistics"
        yield score_table(records, title, "head_test")


@view("early")
def _early(material: Material) -> Iterator[TextTable | Figure]:
    """Scores after the epochs of two rounds, with the trained and with the solved last layer."""
    for label, early in _after_two_rounds(material):
        title = f"{material.metric.capitalize()} after two rounds{label}"
        yield score_table(early, title, "early")


def _after_two_rounds(material: Material) -> Iterator[tuple[str, list[Record]]]:
    """With the trained and with the solved last layer: what to call it, records with "early"."""
    lasts = [(record, _last_of_two_rounds(record)) for record in material.records]
    for name, label in (("test", ""), ("head_test", _SOLVED)):
        early: list[Record] = [
            {**record, "early": last[name]} for record, last in lasts if last and name in last
        ]
        if early:
            yield label, early


def _last_of_two_rounds(record: Record) -> Record | None:
    """The last round within the epochs of two, of experiments with more than two rounds.

    Methods may have other rounds than their experiment: one of six epochs instead of two of three.
    One that has trained for fewer by its end is left out.
    """
    config, chosen = record["config"], record.get("chosen") or {}
    if int(config.get("rounds") or 1) <= 2:
        return None
    usual = int(config.get("training", {}).get("epochs", 1))
    each = int(chosen.get("epochs", usual))
    rounds = list(record.get("rounds") or [])
    count = 2 * usual // each if each else 0
    return rounds[count - 1] if 0 < count <= len(rounds) else None


@view("leads")
def _leads(material: Material) -> Iterator[TextTable | Figure]:
    """How far methods are ahead of those that the experiment compares them with."""
    timed = any(r.get("rounds") for r in material.records)
    usual = "Leads" + (" after the last round" if timed else "")
    yield lead_table(material.records, material.leads, usual)
    solved = [r for r in material.records if "head_test" in r]
    yield lead_table(solved, material.leads, f"{usual}{_SOLVED}", "head_test")
    for label, early in _after_two_rounds(material):
        yield lead_table(early, material.leads, f"Leads after two rounds{label}", "early")


@view("bytes")
def _bytes(material: Material) -> Iterator[TextTable | Figure]:
    """Megabytes of all rounds and clients, down and up."""
    timed = [r for r in material.records if r.get("rounds")]
    sent = {
        way: by_cell(timed, lambda r, way=way: sum(e[f"bytes_{way}"] for e in r["rounds"]) / 1e6)  # type: ignore[misc]
        for way in ("down", "up")
    }
    cells = list(sent["down"])

    def text(method: str, key: CellKey) -> str:
        both: list[Summary | None] = [sent[way][key].get(method) for way in ("down", "up")]
        return " / ".join(f"{s.mean:.1f}" for s in both if s is not None)

    rows = tuple(
        (method, *(text(method, key) for key in cells))
        for method in in_order({r["method"] for r in timed})
    )
    headings = ("method", *map(cell_name, cells))
    yield TextTable("Megabytes down / up, all rounds and clients", headings, rows)


@view("curves")
def _curves(material: Material) -> Iterator[TextTable | Figure]:
    """The mean over trials of every round: a panel for each number of clients."""
    timed = material.in_rounds
    panels = {
        f"{clients} clients": _mean_curves([r for r in timed if r["clients"] == clients])
        for clients in sorted({r["clients"] for r in timed})
    }
    if panels:
        yield figures.rounds_figure(panels, f"{material.metric}, %")


def _mean_curves(records: Sequence[Record]) -> dict[str, list[float]]:
    """Method -> score of each round, the mean over trials."""
    curves = {}
    for method in in_order({r["method"] for r in records}):
        runs = [[entry["test"] for entry in r["rounds"]] for r in records if r["method"] == method]
        curves[method] = [fmean(values) for values in zip(*runs, strict=False)]
    return curves
