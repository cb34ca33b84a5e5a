"""Pictures of results.

Hides: matplotlib. Promises: each function draws one figure into one file, atomically.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from nafi.errors import InputError, require
from nafi.files import atomic_path

require("matplotlib")

from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402


def check_picture(path: Path) -> None:
    """Refuse a file whose suffix is no picture format."""
    if path.suffix.lstrip(".").lower() not in Figure().canvas.get_supported_filetypes():
        raise InputError(
            f"cannot write {path}: unknown picture format {path.suffix or '(none)'!r}, "
            "use .png, .svg or .pdf"
        )


def draw(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's suffix."""
    check_picture(path)
    with atomic_path(path) as partial:
        figure.savefig(partial, dpi=150)


def samples_figure(counts: npt.NDArray[np.int64]) -> Figure:
    """What each client has seen; counts: (clients, classes) samples."""
    figure, axes = _figure(4.8, 3.4)
    axes.imshow(counts, cmap="Blues", aspect="auto")
    for (row, column), count in np.ndenumerate(counts):
        dark = count > counts.max() / 2
        colour = "white" if dark else "#1b2430"
        axes.text(column, row, count, ha="center", va="center", color=colour, fontsize=9)
    axes.set_xlabel("digit")
    axes.set_ylabel("client")
    axes.set_xticks(range(counts.shape[1]))
    axes.set_yticks(range(len(counts)), [str(s + 1) for s in range(len(counts))])
    return figure


def sizes_figure(
    alone: tuple[float, float],
    points: Sequence[tuple[str, float, float]],
    curves: Mapping[str, Sequence[tuple[float, float]]],
    ensemble: tuple[float, float],
) -> Figure:
    """Accuracy over parameters: clients alone, methods at one size, some at several, the ensemble.

    alone: the worst and the best client; points: (method, size, accuracy), without those of curves
    curves: method -> (size, accuracy); sizes are parameters, times one client's. What lies far
        below everything else stands at the lower end, with its number.
    """
    figure, axes = _figure(4.8, 4.0)
    known = [accuracy for places in curves.values() for _, accuracy in places]
    low, high = min([*alone, *known]) - 8, max([*alone, *known, ensemble[1]])
    axes.axhspan(*alone, color="#dbe3ec", label="clients alone")
    for name, places in curves.items():
        axes.plot(*zip(*places, strict=True), "o-", color=_colour(name), label=name, linewidth=1.8)
    for name, size, accuracy in points:
        shape = "s" if accuracy > low else "v"  # further down than the axis reaches
        axes.plot(size, max(accuracy, low + 2), shape, color=_colour(name), markersize=6)
    _label_points(axes, points, low + 2, known)
    axes.plot(*ensemble, "D", color=_GREY, markersize=7, label="ensemble")
    sizes = [0.5, 1, 2, 4, 8]
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:g}x" for size in sizes])
    axes.set_xlim(0.42, max(10, 1.2 * ensemble[0]))
    axes.minorticks_off()
    axes.set_ylim(low, high + 3)
    axes.set_xlabel("parameters, times one client's")
    axes.set_ylabel("accuracy on test digits, %")
    axes.legend(loc="lower right", facecolor="white", framealpha=1, edgecolor="white")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _label_points(
    axes: Any, points: Sequence[tuple[str, float, float]], low: float, curves: Sequence[float]
) -> None:
    """Names and numbers to the left of the points, clear of each other and of the curves."""
    gap, below = 2.8, inf
    for name, size, accuracy in sorted(points, key=lambda point: -point[2]):
        beside = [height for height in curves if abs(height - accuracy) < gap]
        below = min(max(min([accuracy, *(h - gap for h in beside)]), low), below - gap)
        where = "" if accuracy > low else " ↓"  # further down than the axis reaches
        text = f"{name} {accuracy:.1f}{where}  "
        axes.annotate(text, (size, below), ha="right", va="center", fontsize="small")


# One colour for a family of methods in every figure; fedma is pfnm in rounds.
_COLOURS = {
    "nafi": "#1f5fa8",
    "pfnm": "#b4541f",
    "fedma": "#b4541f",
    "ot": "#3c7d3c",
    "rebasin": "#8a8f2f",
    "fedavg": "#7a4fa3",
    "fedprox": "#c2809b",
    "stack": "#c0392b",
}
_GREY = "#51606f"
_UNCOLOURED = ("local", "ensemble", "all")  # no method, or no single model
_OTHERS = ("#2a9d9d", "#c28f2c", "#6b6ecf", "#a05195", "#5c8f4f")


def _colour(method: str) -> str:
    """Of a method or a variant of it, like fedavg-wide; others' methods get one by their name."""
    family = re.split("[-, ]", method)[0]
    if family in _UNCOLOURED:
        return _GREY
    return _COLOURS.get(family, _OTHERS[crc32(family.encode()) % len(_OTHERS)])


def size_figure(series: Mapping[str, Sequence[tuple[int, float, float]]]) -> Figure:
    """ln(J / sum of J_s) over the number of clients: (clients, mean, spread) for each method."""
    figure, axes = _figure(5.6, 3.8)
    for method, points in series.items():
        clients, means, spreads = zip(*points, strict=True)
        style = {"marker": "o", "capsize": 3, "color": _colour(method)}
        axes.errorbar(clients, means, spreads, label=method, **style)
    axes.set_xlabel("clients")
    axes.set_ylabel("ln(global neurons / all local neurons)")
    axes.legend()
    return figure


def sensitivity_figure(
    penalties: Sequence[float], clients: Sequence[int], accuracy: npt.NDArray[np.float64]
) -> Figure:
    """A heat map of accuracies, (clients, penalties)."""
    figure, axes = _figure(7.4, 3.2)
    image = axes.imshow(accuracy, cmap="viridis", aspect="auto")
    middle = (np.nanmin(accuracy) + np.nanmax(accuracy)) / 2
    for (row, column), value in np.ndenumerate(accuracy):
        colour = "black" if value > middle else "white"
        axes.text(column, row, f"{value:.1f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(penalties)), [f"{p:g}" for p in penalties])
    axes.set_yticks(range(len(clients)), [str(n) for n in clients])
    axes.set_xlabel("penalty")
    axes.set_ylabel("clients")
    figure.colorbar(image, label="accuracy, %")
    return figure


def width_figure(
    series: Mapping[str, Sequence[tuple[float, float, float]]], ceilings: Mapping[str, float]
) -> Figure:
    """Accuracy against width: (factor, mean, spread) for each method; ceilings as lines."""
    figure, axes = _figure(6.4, 4.2)
    for method, points in series.items():
        factors, means, spreads = zip(*sorted(points), strict=True)
        style = {"marker": "o", "capsize": 3, "color": _colour(method)}
        axes.errorbar(factors, means, spreads, label=method, **style)
    for name, mean in ceilings.items():
        axes.axhline(mean, color=_GREY, linestyle="--", linewidth=1)
        axes.annotate(name, (1, mean), va="bottom", fontsize="small", color=_GREY)
    axes.set_xscale("log")
    ticks = sorted({round(f, 2) for points in series.values() for f, _, _ in points})
    axes.set_xticks(ticks, [f"{t:g}x" for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel("global width, of the local width")
    axes.set_ylabel("accuracy, %")
    axes.legend(loc="lower right")
    return figure


def methods_figure(panels: Mapping[str, Sequence[tuple[str, float, float]]]) -> Figure:
    """Scores side by side: (method, mean, spread) from the top; a panel for each title."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    longest = max(len(points) for points in panels.values())
    size = (5.4 * columns, (0.26 * longest + 0.9) * rows)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (title, points) in zip(grid, panels.items(), strict=False):
        _draw_methods(axes, points)
        axes.set_title(title, fontsize="medium")
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    return figure


def _draw_methods(axes: Any, points: Sequence[tuple[str, float, float]]) -> None:
    """A bar for each method, with its spread and its mean in digits."""
    for place, (method, mean, spread) in enumerate(points):
        axes.barh(place, mean, xerr=spread, color=_colour(method), ecolor="#1b2430", height=0.7)
        axes.annotate(
            f" {mean:.1f}", (mean + spread, place), va="center", fontsize="small", color="#1b2430"
        )
    axes.set_yticks(range(len(points)), [method for method, _, _ in points], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(mean + spread for _, mean, spread in points) or 1)


# Methods that differ in nothing but their size: "nafi 2x head" and "stack-4 head".
_SIZES = re.compile(r"(?<= )\d+(\.\d+)?x ?|-\d+")


def frontier_figure(
    panels: Mapping[str, Mapping[str, tuple[float, float, float, float]]],
) -> Figure:
    """Scores over parameters and over multiply-adds; a row of two panels for each title.

    panels: title -> method -> (parameters, multiply-adds, mean score, spread). Methods that differ
    in size alone are one curve: filled with a solved head, hollow without; dashed for whole clients
    side by side.
    """
    figure = Figure(figsize=(10.5, 3.7 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), 2, squeeze=False, sharey="row")
    for row, (title, methods) in zip(grid, panels.items(), strict=True):
        curves: dict[str, list[tuple[float, float, float, float]]] = {}
        for method, point in methods.items():
            whole = " (whole clients)" if re.match(r"stack-\d", method) else ""
            curves.setdefault(_SIZES.sub("", method).strip() + whole, []).append(point)
        for which, (axes, size) in enumerate(zip(row, _FRONTIER_SIZES, strict=True)):
            for name, points in curves.items():
                x = sorted((point[which], *point[2:]) for point in points)
                axes.errorbar(*zip(*x, strict=True), label=name, **_frontier_style(name))
            axes.set_xscale("log")
            axes.set_xlabel(size)
            axes.set_title(title, fontsize="medium")
        row[0].set_ylabel("score, %")
        row[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize="small")
    return figure


_FRONTIER_SIZES = ("parameters", "multiply-adds of one input")


def _frontier_style(name: str) -> dict[str, Any]:
    colour, solved, whole = _colour(name), name.endswith("head"), "whole" in name
    return {
        "color": colour,
        "marker": "s" if whole else "o",
        "linestyle": "--" if whole else "-",
        "markerfacecolor": colour if solved or whole else "white",
        "capsize": 2,
        "markersize": 5,
        "linewidth": 1.2,
    }


def rounds_figure(panels: Mapping[str, Mapping[str, Sequence[float]]], metric: str) -> Figure:
    """A curve for each method over the rounds; a panel for each number of clients."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.8 * columns + 1.2, 3.6 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True).flatten()
    for axes, (title, curves) in zip(grid, panels.items(), strict=False):
        for method, values in curves.items():
            axes.plot(range(1, len(values) + 1), values, label=method, **_curve_style(method))
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(metric)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    handles, labels = grid[0].get_legend_handles_labels()
    # Long enough to tell dashes from a line.
    figure.legend(handles, labels, loc="outside right center", handlelength=4)
    return figure


def pictures_figure(
    columns: Mapping[str, Sequence[npt.NDArray[np.uint8] | None]], rows: int
) -> Figure:
    """Pictures side by side: a column for each name, a row for each sample."""
    figure = Figure(figsize=(1.5 * len(columns), 1.15 * rows + 0.3), layout="constrained")
    grid = figure.subplots(rows, len(columns), squeeze=False)
    for column, (name, pictures) in enumerate(columns.items()):
        grid[0][column].set_title(name, fontsize="small")
        for row in range(rows):
            axes = grid[row][column]
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_color("#c3ccd6")
            picture = pictures[row] if row < len(pictures) else None
            if picture is not None:
                axes.imshow(picture, cmap="gray", vmin=0, vmax=max(1, picture.max()))
    return figure


def _curve_style(method: str) -> dict[str, Any]:
    """nafi in bold; what was averaged at a matched width is dashed."""
    style = {"marker": "o", "markersize": 3, "color": _colour(method)}
    style["linewidth"] = 2.2 if method.startswith("nafi") else 1.2
    style["linestyle"] = "--" if method.endswith(("-wide", "-average")) else "-"
    return style


def svg(figure: Figure) -> str:
    """A figure as an SVG element, without the declarations that only a file needs."""
    stream = StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()
