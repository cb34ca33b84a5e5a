"""The picture of docs/results.md: accuracy over size, from the records of the experiment.

python benchmarks/oneshot_figure.py    # reads results/, writes docs/frontier.png
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent.parent
RECORDS = HERE / "results" / "oneshot-deep-scaled.jsonl"
HEAD = "probe 256 head"
CURVES = {  # what the picture calls it -> records, from small to large, and how it is drawn
    "stack: clients cut down to a budget": (
        [f"stack 1x {HEAD}", f"stack 1.5x {HEAD}", f"stack 2x {HEAD}"],
        {"color": "#c0392b", "marker": "o"},
    ),
    "nafi: neurons matched, merged and pruned": (
        [f"nafi 1x pruned {HEAD}", f"nafi 2x pruned {HEAD}"],
        {"color": "#1f5fa8", "marker": "o"},
    ),
    "nafi without pruning": (
        [f"nafi 1x {HEAD}", f"nafi 2x {HEAD}"],
        {"color": "#8fb8e0", "marker": ".", "linestyle": "--"},
    ),
    "nafi without labels, by input, distilled": (
        ["nafi 1x probe 256 by input distilled", "nafi 2x probe 256 by input distilled"],
        {"color": "#1f8a8a", "marker": "^"},
    ),
    "1, 2, 4 whole clients side by side": (
        ["stack-1 head", "stack-2 head", "stack-4 head"],
        {"color": "#e08a1e", "marker": "s", "linestyle": "--"},
    ),
    "fedavg, one round from a common start": (["fedavg head"], {"color": "#7a4fa3", "marker": "D"}),
}
LEVELS = {
    "best client alone": ("local best", "#9aa5b1", "-"),
    "ensemble of all clients": ("ensemble", "#52606d", ":"),
}

Records = list[dict[str, Any]]


def by_problem() -> dict[str, Records]:
    found: dict[str, Records] = {}
    for line in RECORDS.read_text().splitlines():
        record = json.loads(line)
        found.setdefault(f"{record['problem']}, {record['clients']} clients", []).append(record)
    return found


def draw(axes: Any, title: str, records: Records) -> None:
    """One network: scores over parameters, in those of one client."""
    one = np.mean([r["parameters"] for r in records if r["method"] == "stack-1 head"])
    for label, (methods, style) in CURVES.items():
        points = []
        for method in methods:
            rows = [r for r in records if r["method"] == method]
            if rows:
                tests = [r["test"] for r in rows]
                size = np.mean([r["parameters"] for r in rows]) / one
                points.append((size, np.mean(tests), stdev(tests) if len(tests) > 1 else 0.0))
        if points:
            axes.errorbar(*zip(*points, strict=True), label=label, capsize=2, **style)
    for label, (method, colour, line) in LEVELS.items():
        tests = [r["test"] for r in records if r["method"] == method]
        if tests:
            axes.axhline(np.mean(tests), color=colour, linestyle=line, label=label, zorder=0)
    axes.set_title(title, fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.85, 4.7)
    axes.set_xticks([1, 2, 4], ["1", "2", "4"])
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    problems = by_problem()
    columns = 2 if len(problems) == 4 else 3
    rows = -(-len(problems) // columns)
    figure = Figure(figsize=(3.5 * columns + 1, 3.1 * rows + 0.9), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (title, records) in zip(grid.flatten(), problems.items(), strict=False):
        draw(axes, title, records)
    for axes in grid.flatten()[len(problems) :]:
        axes.set_visible(False)
    for row in grid:
        row[0].set_ylabel("test accuracy or dice, %", fontsize=9)
    figure.supxlabel("parameters of the fused network, times one client's", fontsize=9)
    known = {  # not every curve is in every panel
        label: handle
        for axes in grid.flatten()
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        known.values(),
        known.keys(),
        loc="outside upper center",
        ncols=columns,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(HERE / "docs" / "frontier.png", dpi=110)


if __name__ == "__main__":
    main()
