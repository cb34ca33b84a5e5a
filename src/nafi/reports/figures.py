"""Pictures of results.

Hides: matplotlib. Promises: each function draws one figure into one file, atomically.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from nafi.errors import InputError
from nafi.reports.files import atomic_path

Array = npt.NDArray[np.float64]


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's suffix."""
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise InputError(
            f"cannot write {path}: unknown picture format {path.suffix or '(none)'!r}, "
            "use .png, .svg or .pdf"
        )
    with atomic_path(path) as partial:
        figure.savefig(partial, dpi=150)


def draw_neurons(rows: Sequence[tuple[str, Array]], side: int, title: str, path: Path) -> None:
    """Rows of neurons, each neuron a small square picture.

    rows: (label, (n, side * side) neurons); a row of NaN leaves a gap, for an absent neuron.
    """
    columns = max(len(neurons) for _, neurons in rows)
    scale = max(float(np.nanmax(np.abs(neurons))) for _, neurons in rows)
    figure = Figure(figsize=(0.36 * columns + 2.4, 0.42 * len(rows) + 0.8), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    for index, (label, neurons) in enumerate(rows):
        # One picture per row keeps hundreds of neurons quick to draw.
        gap = np.full((side, 1), np.nan)
        tiles = [tile for w in neurons for tile in (w.reshape(side, side), gap)]
        missing = [np.full((side, side + 1), np.nan)] * (columns - len(neurons))
        axes = figure.add_subplot(len(rows), 1, index + 1)
        axes.imshow(
            np.concatenate([*tiles, *missing], axis=1), cmap="RdBu_r", vmin=-scale, vmax=scale
        )
        axes.set_ylabel(label, rotation=0, ha="right", va="center")
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_visible(False)
    save(figure, path)
