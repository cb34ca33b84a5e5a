"""The first picture of the README: one shot on deep networks, from the records of the experiment.

python benchmarks/oneshot_figure.py    # reads results/, writes docs/oneshot.png
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent.parent
RECORDS = HERE / "results" / "oneshot-deep-scaled.jsonl"
BARS = {  # record -> what the picture calls it, and its colour
    "local best": ("best client", "#9aa5b1"),
    "ensemble": ("ensemble of all clients", "#cbd2d9"),
    "nafi 2x": ("fused, no data", "#f5c6a5"),
    "nafi 2x probe 256": ("fused, 256 unlabelled inputs", "#4c8dd6"),
    "nafi 2x probe 256 head": ("and the head from clients' statistics", "#1f4e8c"),
}


def scores() -> dict[str, dict[str, list[float]]]:
    """Problem -> method -> test scores of all trials."""
    found: dict[str, dict[str, list[float]]] = {}
    for line in RECORDS.read_text().splitlines():
        record = json.loads(line)
        found.setdefault(record["problem"], {}).setdefault(record["method"], []).append(
            record["test"]
        )
    return found


def main() -> None:
    found = scores()
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    axes = figure.subplots(1, 1)
    width = 0.8 / len(BARS)
    for place, (method, (label, colour)) in enumerate(BARS.items()):
        at = np.arange(len(found)) + (place - (len(BARS) - 1) / 2) * width
        values = [methods[method] for methods in found.values()]
        means, spreads = [np.mean(v) for v in values], [np.std(v) for v in values]
        axes.bar(at, means, width * 0.92, color=colour, label=label, yerr=spreads, ecolor="#52606d")
        for x, mean, spread in zip(at, means, spreads, strict=True):
            axes.text(x, mean + spread + 1, f"{mean:.0f}", ha="center", fontsize=8, color="#323f4b")
    axes.set_xticks(range(len(found)), [name.replace(", ", "\n", 1) for name in found])
    axes.set_ylabel("test accuracy, or dice, in percent")
    axes.set_ylim(0, 112)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(HERE / "docs" / "oneshot.png", dpi=110)


if __name__ == "__main__":
    main()
