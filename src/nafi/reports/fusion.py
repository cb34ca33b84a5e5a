"""What a fusion did, for people and for machines.

Hides: rich and HTML. Promises: what is known of how good the result is comes first, and that nobody
knows it if so; for every group the local widths, the fused width and how many models share its
neurons; for every weight how it was refitted, or why not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from nafi.reports.pages import write_html
from nafi.reports.terminal import terminal_table

Rows = Sequence[Mapping[str, Any]]
Fits = Mapping[str, Mapping[str, Any]]
_HEADINGS = ("group", "local width", "fused width", "factor", "shared by", "by one", "by all")
_AGREEMENTS = {
    "classes": "The share of {} unlabelled inputs that get the class which the ensemble of all "
    "clients gives them. It is no accuracy: the ensemble may be wrong.",
    "values": "The share of the variance of the clients' mean output that is explained "
    "(R squared), on {} unlabelled inputs. It says nothing of how good that mean is.",
}
# The drawing of a frontier, and what each kind of network is called in it.
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 628.0, 14.0, 236.0
_SIZE_AXES = (
    ("params", "parameters, times one client's"),
    ("flops", "multiply-adds of one input, times one client's"),
)
_DOTS = {
    "stack": "stack",
    "whole clients": "whole",
    "client": "alone",
    "ensemble": "together",
}
_FIT_HEADINGS = ("weight", "error before", "after", "ridge", "inputs", "samples")


def fusion_table(rows: Rows, title: str) -> Table:
    """A row a group; `rows` as `FusionResult.summary` gives them."""
    table = terminal_table(title, _HEADINGS)
    for row in rows:
        table.add_row(*map(escape, _cells(row)))
    return table


def judgement_table(scores: Mapping[str, Any]) -> Table:
    """The scores of clients, ensemble and fused model, as `Scores.to_dict` gives them."""
    table = terminal_table("Scores, the higher the better", ["model", "score"])
    for entry in _scored(scores):
        style = "bold" if entry["kind"] == "fused" else ""
        table.add_row(escape(entry["name"]), entry["told"], style=style)
    return table


def frontier_table(points: Rows) -> Table:
    """Every network that was tried, as `Frontier.to_dict` gives them; the best in bold."""
    headings = ("method", "budget", "parameters", "multiply-adds", "score")
    title = "Scores over sizes; sizes in those of one client"
    table = terminal_table(title, headings, texts=["budget"])
    best = max(point["score"] for point in points if point["score"] is not None)
    for point in points:
        numbers = [f"{point['params']:.2f}", f"{point['flops']:.2f}", _told(point["score"])]
        style = "bold" if point["score"] == best else ""
        table.add_row(point["method"], point["budget"], *numbers, style=style)
    return table


def fits_table(fits: Fits) -> Table:
    """How each weight was refitted: `fits` holds the fields of a `LayerFit` for each."""
    title = "Refitted on the probe; errors are shares of the variance"
    table = terminal_table(title, _FIT_HEADINGS)
    for name, fit in fits.items():
        table.add_row(*map(escape, _fit_cells(name, fit)))
    return table


def write_fusion_page(
    path: Path,
    rows: Rows,
    title: str,
    what: str,
    facts: Mapping[str, Any],
    *,
    verdict: Mapping[str, Any],
    scores: Mapping[str, Any] | None = None,
    agreement: Mapping[str, Any] | None = None,
    fits: Fits | None = None,
    kept: Mapping[str, str] | None = None,
    frontier: Rows = (),
) -> None:
    """One self-contained page: how good the result is, and who shares the neurons of each group.

    what: the page in a sentence; verdict: tone, text and advice
    scores, agreement: of clients, ensemble and fused model, as their `to_dict` gives them
    kept: weight -> why it was not refitted
    frontier: networks of other sizes, as `Frontier.to_dict` gives them
    """
    groups = [
        {"cells": _cells(row), "bars": _bars(row["shared"]), "name": row["group"]} for row in rows
    ]
    write_html(
        path,
        "fusion.html",
        title=title,
        what=what,
        verdict=verdict,
        charts=[*_score_chart(scores), *_agreement_chart(agreement, fitted=bool(fits))],
        fits=[_fit_row(name, fit) for name, fit in (fits or {}).items()],
        fit_headings=_FIT_HEADINGS,
        kept=_by_reason(kept or {}),
        headings=_HEADINGS,
        groups=groups,
        pictures=[_picture(frontier, *axis) for axis in _SIZE_AXES if frontier],
        facts=facts,
        models=len(rows[0]["local"]) if rows else 0,
    )


def _picture(points: Rows, size: str, title: str) -> dict[str, Any]:
    """Scores over sizes on a logarithmic axis: where dots and ticks lie in the drawing."""
    points = [point for point in points if point["score"] is not None]
    sizes = [float(point[size]) for point in points]
    known = [float(point["score"]) for point in points]
    low, high = min(known), max(known)
    room = 0.08 * (high - low) or abs(high) or 1.0
    low, high = low - room, high + room
    left, right = log(min(sizes)) - 0.15, log(max(sizes)) + 0.15

    def x(value: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * (log(value) - left) / (right - left), 1)

    def y(value: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low), 1)

    dots = [
        {
            "x": x(point[size]),
            "y": y(point["score"]),
            "kind": _DOTS.get(point["method"], "merged"),
            "told": f"{point['method']}, {point['budget']}: {point[size]:.2f} times one client, "
            f"{_told(point['score'])}",
        }
        for point in points
    ]
    ticks = [2.0**k for k in range(-6, 12) if left <= k * log(2) <= right]
    return {
        "title": title,
        "dots": dots,
        "lines": [_line(dots, kind) for kind in ("stack", "merged", "whole")],
        "ticks": [{"x": x(tick), "told": f"{tick:g}"} for tick in ticks],
        "scores": [{"y": y(value), "told": f"{value:.3g}"} for value in (min(known), max(known))],
        "kinds": dict.fromkeys(dot["kind"] for dot in dots),
    }


def _line(dots: Rows, kind: str) -> dict[str, str]:
    """The curve through all dots of a kind."""
    places = sorted((dot["x"], dot["y"]) for dot in dots if dot["kind"] == kind)
    return {"kind": kind, "points": " ".join(f"{x},{y}" for x, y in places)}


def _score_chart(scores: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Bars of scores with a title and a note, if there are any."""
    if scores is None:
        return []
    note = "The higher the better; the dashed line is the best client alone."
    if scores["ensemble"] is not None:
        note += " The ensemble is no single model: all clients, weighted as in the fusion."
    return [{"title": "Scores", "note": note, "bars": _score_bars(scores)}]


def _agreement_chart(agreement: Mapping[str, Any] | None, fitted: bool) -> list[dict[str, Any]]:
    """The same for what models have in common with the ensemble."""
    if agreement is None:
        return []
    note = _AGREEMENTS[agreement["of"]].format(agreement["inputs"])
    note += " The layers were fitted to the same inputs." if fitted else ""
    bars = _score_bars({"ensemble": None, **agreement})
    return [{"title": "Agreement with the ensemble", "note": note, "bars": bars}]


def _scored(scores: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every model with a score: name, score (None for NaN), how it is told, and its kind."""
    entries = [(client["name"], client["score"], "client") for client in scores["clients"]]
    if scores["ensemble"] is not None:
        entries.append(("ensemble", scores["ensemble"], "ensemble"))
    entries.append(("fused", scores["fused"], "fused"))
    return [
        {"name": name, "score": score, "told": _told(score), "kind": kind}
        for name, score, kind in entries
    ]


def _told(score: float | None) -> str:
    return "NaN" if score is None else f"{score:.4g}"


def _score_bars(scores: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A bar from zero for every model, and where the best client's ends, in percent."""
    entries = _scored(scores)
    known = [entry["score"] for entry in entries if entry["score"] is not None]
    low, high = min([0.0, *known]), max([0.0, *known])
    scale = 100 / (high - low) if high > low else 0.0
    clients = [c["score"] for c in scores["clients"] if c["score"] is not None]
    best = round((max(clients) - low) * scale, 2) if clients else None
    for entry in entries:
        ends = sorted([0.0, entry["score"] or 0.0])
        start, size = (ends[0] - low) * scale, (ends[1] - ends[0]) * scale
        entry |= {"start": round(start, 2), "size": round(size, 2), "best": best}
    return entries


def _fit_cells(name: str, fit: Mapping[str, Any]) -> list[str]:
    errors = [f"{max(0.0, fit[key]):.2g}" for key in ("before", "after")]  # but for rounding
    return [name, *errors, f"{fit['ridge']:.2g}", str(fit["inputs"]), str(fit["samples"])]


def _fit_row(name: str, fit: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the page: its cells, and both errors as lengths in percent."""
    before, after = (min(100.0, max(0.0, 100 * fit[key])) for key in ("before", "after"))
    cells = _fit_cells(name, fit)
    return {"cells": cells, "before": round(before, 2), "after": round(after, 2)}


def _by_reason(kept: Mapping[str, str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for name, reason in kept.items():
        reasons.setdefault(reason, []).append(name)
    return reasons


def _cells(row: Mapping[str, Any]) -> list[str]:
    local, shared, width = row["local"], row["shared"], row["width"]
    narrow, wide = min(local), max(local)
    total = sum(shared)
    mean = sum((k + 1) * n for k, n in enumerate(shared)) / total if total else 0.0
    return [
        row["group"],
        str(wide) if narrow == wide else f"{narrow}-{wide}",
        str(width),
        f"{width / wide:.2f}x",
        f"{mean:.1f} of {len(local)}",
        f"{shared[0] / total:.0%}" if total else "-",
        f"{shared[-1] / total:.0%}" if total else "-",
    ]


def _bars(shared: Sequence[int]) -> list[dict[str, Any]]:
    """The share of neurons that one, two, ... models own, from left to right."""
    total = sum(shared) or 1
    bars, start = [], 0.0
    for k, count in enumerate(shared):
        size = 100 * count / total
        shade = 92 - 62 * (k + 1) / len(shared)
        label = f"{count} neurons of {k + 1} model{'s' * (k > 0)}"
        bars.append(
            {"start": round(start, 2), "size": round(size, 2), "shade": round(shade), "told": label}
        )
        start += size
    return bars
