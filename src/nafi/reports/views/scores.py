"""Views of what methods score: tables, the loss, and ours beside the paper's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nafi.reports import figures
from nafi.reports.records import (
    CellKey,
    TextTable,
    by_cell,
    cell_name,
    compared_table,
    in_order,
    metric_of,
    score_table,
    site_tables,
)
from nafi.reports.views.material import Material, is_one_shot, view

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@view("score")
def _score(material: Material) -> Iterator[TextTable | Figure]:
    """The table of the chosen candidates; in rounds, after the last one."""
    timed = any(r.get("rounds") for r in material.records)
    usual = material.metric.capitalize()
    usual += " after the last round" if timed else ", chosen on validation data"
    yield score_table(material.records, usual)


@view("loss")
def _loss(material: Material) -> Iterator[TextTable | Figure]:
    """The mean loss on test data, the lower the better."""
    known = [r for r in material.records if "test_loss" in r]
    if known:
        yield score_table(known, "Loss on test data, the lower the better", "test_loss", min)


@view("barrier")
def _barrier(material: Material) -> Iterator[TextTable | Figure]:
    """The loss of fused networks above the mean loss of the clients they are made of."""
    known = [r for r in material.records if "test_loss" in r]
    ends = {(CellKey.of(r), r["trial"]): r["test_loss"] for r in known if r["method"] == "local"}
    above = [
        {**r, "barrier": r["test_loss"] - ends[CellKey.of(r), r["trial"]]}
        for r in known
        if r["method"] != "local" and (CellKey.of(r), r["trial"]) in ends
    ]
    if above:
        title = "Barrier: loss above the clients' mean loss, the lower the better"
        yield score_table(above, title, "barrier", min)


@view("test-picked")
def _test_picked(material: Material) -> Iterator[TextTable | Figure]:
    """What choosing on test data would have given."""
    title = "test-picked: chosen on test data, not comparable"
    yield score_table(material.records, title, "test_picked")


@view("paper")
def _paper(material: Material) -> Iterator[TextTable | Figure]:
    """Ours beside the paper's."""
    yield compared_table([r for r in material.records if not is_one_shot(r)], material.paper)


@view("methods")
def _methods(material: Material) -> Iterator[TextTable | Figure]:
    """Mean and spread of every method: a panel for each cell."""
    panels = {}
    for key, row in by_cell(material.records, lambda r: r["test"]).items():
        metric = metric_of([r for r in material.records if CellKey.of(r) == key])
        points = [(m, row[m].mean, row[m].spread or 0.0) for m in in_order(row)]
        panels[f"{cell_name(key)}: {metric}, %"] = points
    if panels:
        yield figures.methods_figure(panels)


@view("sites")
def _sites(material: Material) -> Iterator[TextTable | Figure]:
    """Scores on the test data of each lab, and of the one that is worst off."""
    records = [r for r in material.records if r.get("sites")]
    yield from site_tables(records, f"{material.metric.capitalize()} of each lab")
