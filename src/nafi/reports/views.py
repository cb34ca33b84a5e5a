"""The tables and figures that a report can show, by name.

Hides: how each is made of records. Promises: every number is a function of the records; a view that
has nothing to show of them shows nothing, so any view goes with any experiment.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nafi.errors import InputError
from nafi.reports import figures
from nafi.reports.records import (
    CellKey,
    Paper,
    Record,
    Summary,
    TextTable,
    by_cell,
    cell_name,
    compared_table,
    family,
    in_order,
    lead_table,
    metric_of,
    score_table,
    site_tables,
    width_table,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = npt.NDArray[np.uint8]
# (sample, settings of the experiment) -> photo (height, width, 3) and mask (height, width)
Photos = Callable[[int, Mapping[str, Any]], tuple[Picture, Picture]]


@dataclass(frozen=True)
class Material:
    """What views are made of.

    photos: looks up what is not in records, for pictures of samples
    leads: (method, the one it is compared with)
    """

    records: Sequence[Record]
    paper: Paper = field(default_factory=Paper)
    photos: Photos | None = None
    leads: Sequence[tuple[str, str]] = ()

    @property
    def in_rounds(self) -> list[Record]:
        """Records of methods that have a curve over rounds."""
        return [r for r in self.records if r.get("rounds") and not _is_one_shot(r)]

    @property
    def metric(self) -> str:
        """What the numbers of the records are."""
        return metric_of(self.records)


_SOLVED = ", last layer solved"

View = Callable[[Material], "Iterator[TextTable | Figure]"]
VIEWS: dict[str, View] = {}
# What is shown of an experiment that does not say.
USUAL = ("score", "paper", "best-round", "widths", "bytes", "test-picked", "curves", "pictures")


def view(name: str) -> Callable[[View], View]:
    """Make a view known by its name."""

    def register(function: View) -> View:
        VIEWS[name] = function
        return function

    return register


def check_views(names: Sequence[str]) -> None:
    """Refuse names of views that there are not."""
    for name in names:
        if name not in VIEWS:
            raise InputError(f"report: there is no view {name!r}; known: {', '.join(VIEWS)}")


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
    yield compared_table([r for r in material.records if not _is_one_shot(r)], material.paper)


@view("widths")
def _widths(material: Material) -> Iterator[TextTable | Figure]:
    """Widths of the fused networks."""
    yield width_table(material.records)


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


def _is_one_shot(record: Record) -> bool:
    """Whether a method had one round, among others that have more: it has no curve and no best."""
    return len(record.get("rounds") or []) == 1 < int(record["config"].get("rounds") or 1)


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


@view("sites")
def _sites(material: Material) -> Iterator[TextTable | Figure]:
    """Scores on the test data of each lab, and of the one that is worst off."""
    records = [r for r in material.records if r.get("sites")]
    yield from site_tables(records, f"{material.metric.capitalize()} of each lab")


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
    """
    config, chosen = record["config"], record.get("chosen") or {}
    if int(config.get("rounds") or 1) <= 2:
        return None
    usual = int(config.get("training", {}).get("epochs", 1))
    last = 2 * usual // int(chosen.get("epochs", usual))
    return ((record.get("rounds") or [])[:last] or [None])[-1]


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


@view("pictures")
def _pictures(material: Material) -> Iterator[TextTable | Figure]:
    """What each method makes of a few samples, of the first trial with the fewest clients."""
    drawn = [r for r in material.records if r.get("pictures")]
    fewest = min((r["clients"] for r in drawn), default=0)
    shown = [r for r in drawn if r["clients"] == fewest and r["trial"] == 0]
    if not shown:
        return
    samples = [picture["sample"] for picture in shown[0]["pictures"]]
    columns: dict[str, Sequence[Picture | None]] = {}
    if material.photos is not None:
        pairs = [material.photos(sample, shown[0]["config"]) for sample in samples]
        columns = {"photo": [photo for photo, _ in pairs], "mask": [mask for _, mask in pairs]}
    by_method = {r["method"]: r["pictures"] for r in shown}
    for method in in_order(by_method):
        columns[method] = [_unpacked(picture) for picture in by_method[method]]
    yield figures.pictures_figure(columns, len(samples))


def _unpacked(picture: Mapping[str, Any]) -> Picture:
    height, width = picture["shape"]
    bits = np.frombuffer(base64.b64decode(picture["bits"]), dtype=np.uint8)
    return np.unpackbits(bits)[: height * width].reshape(height, width)
