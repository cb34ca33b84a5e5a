"""Labelled sums of clients of which some may lie, as those of all together.

Hides: that sums say class means, scatter within classes and counts at once. Promises: with no more
liars than `trim` allows, every number of a class's mean lies within what honest clients sent, where
most of those that claim the class are honest; nobody's count of a class is above the largest that
must be honest; scatter is that of clients whose trace is usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nafi.fusion.head import HeadStatistics
from nafi.fusion.screen import Screen


def screened_statistics(parts: Sequence[HeadStatistics], screen: Screen) -> HeadStatistics:
    """The sums of all clients; `gram` and `cross` are made up of robust means, class by class.

    A mean is the trimmed one over the clients that claim the class, weighted by what is believed of
    their claims; scatter is the mean over clients, those left out at either end whose trace is
    largest or smallest.
    """
    counts = torch.stack([part.class_counts for part in parts])
    believed = torch.from_numpy(screen.claims(counts.numpy().astype(np.float64)))
    totals = believed.sum(dim=0)
    apart = torch.stack([part.cross for part in parts]) / counts.clamp(min=1)[:, None]
    weights = believed[:, None]
    means = screen.mean(apart, weights > 0, weights)
    within = _usual_scatter([_scatter(part) for part in parts], screen.cut(len(parts)))
    return replace(
        parts[0],
        gram=(means * totals) @ means.T + totals.sum() * within,
        cross=means * totals,
        class_counts=totals,
        losses=_usual_losses(parts),
    )


def _scatter(part: HeadStatistics) -> Tensor:
    """(K, K) of a client's samples about the means of their classes, per sample."""
    shares = part.class_counts.clamp(min=1)
    between = (part.cross / shares) @ part.cross.T
    return (part.gram - between) / part.class_counts.sum().clamp(min=1)


def _usual_scatter(scatter: Sequence[Tensor], cut: int) -> Tensor:
    order = torch.stack([each.trace() for each in scatter]).argsort(stable=True).tolist()
    return torch.stack([scatter[s] for s in order[cut : len(order) - cut]]).mean(dim=0)


def _usual_losses(parts: Sequence[HeadStatistics]) -> Tensor:
    """The median over clients that know them, of a sample."""
    known = [part.losses / part.class_counts.sum() for part in parts if bool(part.losses.any())]
    return torch.stack(known).quantile(0.5, dim=0) if known else torch.zeros_like(parts[0].losses)
