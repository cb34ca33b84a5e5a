"""The demonstration as a table, a picture and a page.

Hides: how its story is told. Promises: every number comes from what the demonstration found, given
as plain data; a method that could not run has a row that says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from nafi.errors import require
from nafi.reports.figures import draw, samples_figure, sizes_figure, svg
from nafi.reports.pages import write_html
from nafi.reports.records import TextTable

require("jinja2")

# As `dataclasses.asdict` gives a `Demo`.
Found = Mapping[str, Any]

_HEADINGS = ("method", "accuracy, %", "no probe", "neurons", "parameters", "size")


def demo_table(found: Found) -> TextTable:
    """A row for the clients alone, their ensemble, and every method at the size of one client."""
    rows = [_row(row) for row in [*found["references"], *found["methods"]]]
    best = frozenset(
        (place, column)
        for place, row in enumerate(rows)
        if row[0] == _best(found)["method"]
        for column in range(len(row))
    )
    title = f"{len(found['counts'])} clients, trained apart, then fused without training on"
    return TextTable(title, _HEADINGS, tuple(rows), best)


def _best(found: Found) -> Found:
    """The method that came out highest."""
    tried = [row for row in found["methods"] if not row["missing"]]
    best: Found = max(tried, key=lambda row: row["accuracy"]["mean"])
    return best


def _row(row: Found) -> tuple[str, ...]:
    if row["missing"]:
        return (row["method"], "not installed", "", "", "", "")
    without = _accuracy(row["without_probe"])
    if row["uses_probe"] and not without:
        without = "needs one"
    numbers = f"{row['neurons']:,.0f}", f"{row['parameters']:,.0f}", f"{row['size']:.2f}x"
    return (row["method"], _accuracy(row["accuracy"]), without, *numbers)


def _accuracy(value: Found | None) -> str:
    if value is None:
        return ""
    spread = "" if value["spread"] is None else f" ± {value['spread']:.1f}"
    return f"{value['mean']:.1f}{spread}"


def demo_score(found: Found) -> str:
    """What came of it, in a sentence."""
    alone, best, ensemble = (row["accuracy"]["mean"] for row in found["references"])
    fused, first = next(row for row in found["methods"] if row["method"] == "nafi"), _best(found)
    ahead = f" The best at this size is {first['method']}: {first['accuracy']['mean']:.1f}%."
    return (
        f"nafi makes one network of {len(found['counts'])}, with the parameters of one: "
        f"{fused['accuracy']['mean']:.1f}% of the test digits are right. A client alone has "
        f"{alone:.1f}%, the best one {best:.1f}%; all of them side by side, "
        f"{found['references'][-1]['size']:.0f} times as large, have {ensemble:.1f}%."
        f"{ahead if first is not fused else ''}"
    )


def demo_notes(found: Found) -> list[str]:
    """What one needs to know to read the table; what is missing in it."""
    missing = [f"{row['method']}: {row['missing']}" for row in found["methods"] if row["missing"]]
    return [
        f"{_draws(found['trials'])}, {found['tested']} test digits each, which no client saw. All "
        "fused networks have the parameters of one client.",
        f"The probe is {found['probe']} digits without labels. Where a method can use it, neurons "
        "are matched and layers refitted by it; fedavg cannot. stack keeps the neurons of every "
        "client that matter most, side by side, which takes fewer parameters for each.",
        *missing,
    ]


def _draws(trials: int) -> str:
    if trials == 1:
        return "One draw of clients: some points are chance"
    return f"Mean ± standard deviation over {trials} draws of clients"


def draw_demo(found: Found, path: Path) -> None:
    """The picture: accuracy over parameters."""
    draw(_picture(found), path)


def _picture(found: Found) -> Any:
    ensemble = found["references"][-1]
    points = [
        (row["method"], row["size"], row["accuracy"]["mean"])
        for row in found["methods"]
        if row["method"] not in found["curves"] and not row["missing"]
    ]
    place = ensemble["size"], ensemble["accuracy"]["mean"]
    alone = fmean(map(min, found["local"])), fmean(map(max, found["local"]))
    return sizes_figure(alone, points, found["curves"], place)


def write_demo_page(path: Path, found: Found, command: str) -> None:
    """The whole story on one self-contained page."""
    clients, counts = len(found["counts"]), np.array(found["counts"])
    write_html(
        path,
        "demo.html",
        title=f"{clients} networks that never met, made one",
        what=f"{clients} clients each train a network with {_hidden(found['hidden'])} on "
        "handwritten digits of their own, and share no data. Then their networks are fused once, "
        "without training on, by every method that nafi has.",
        score=demo_score(found),
        picture=svg(_picture(found)),
        picture_note="Accuracy over the size of the network. All squares, and the points of both "
        "curves at 1x, have the parameters of one client. The grey band reaches from the worst "
        "client alone to the best, as means over all draws.",
        scores=demo_table(found),
        notes=demo_notes(found),
        samples=svg(samples_figure(counts)),
        samples_note="Digits of each kind that each client of the first draw trained on.",
        command=command,
    )


def _hidden(widths: Sequence[int]) -> str:
    layers = "layer" if len(widths) == 1 else "layers"
    return f"{len(widths)} hidden {layers} of {' and '.join(map(str, sorted(set(widths))))} neurons"
