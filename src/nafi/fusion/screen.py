"""Models of strangers: how much of each is taken.

Hides: what is usual among clients. Promises: as long as most clients are honest, no client's neuron
is longer than a multiple of what is usual, and no number of the mean lies outside of those that
honest clients sent, where enough of them own it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nafi.errors import InputError
from nafi.fusion.clients import Array
from nafi.graph.lift import bias_of, columns_of
from nafi.graph.spec import ModelSpec, holds_numbers

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Screen:
    """What is done against clients that send harmful weights.

    clip: the longest neuron that is taken as it is, as a multiple of the median length of the
        clients' neurons in that layer; longer ones are shortened, with their bias. Tensors without
        neurons of their own, as the output layer, are shortened as a whole, and counts of samples
        are held to the same multiple of their median
    trim: the share of clients that are left out at either end of every number before the mean is
        taken over those that own it; a neuron that no more than this share of clients have is read
        by nobody, so neurons should be few enough to have several owners each (`max_width`)
    """

    clip: float | None = None
    trim: float = 0.0

    def __post_init__(self) -> None:
        if self.clip is not None and not _between(self.clip, 0, float("inf")):
            raise InputError(f"clip: found {self.clip!r}, expected a number above 0")
        if not (self.trim == 0 or _between(self.trim, 0, 0.5)):
            raise InputError(f"trim: found {self.trim!r}, expected a share from 0 to below 0.5")

    @property
    def active(self) -> bool:
        return self.clip is not None or self.trim > 0

    def clipped(self, states: Sequence[State], specs: Sequence[ModelSpec]) -> tuple[State, ...]:
        """The clients' tensors with neurons that are too long made shorter."""
        if self.clip is None:
            return tuple(states)
        found = [dict(state) for state in states]
        for name in specs[0].axes:
            bias = bias_of(name, specs[0])
            columns = columns_of(name, specs[0])
            alone = not columns and any(bias_of(o, specs[0]) == name for o in specs[0].axes)
            if alone or not holds_numbers(states[0][name]):
                continue
            lengths = [_lengths(state[name], columns) for state in states]
            # The median of medians: a client with many neurons has one vote.
            limit = self.clip * torch.stack([own.median() for own in lengths]).median()
            for state, own in zip(found, lengths, strict=True):
                share = torch.where(own > limit, limit / own, 1.0)
                for scaled in (name, *([bias] if bias is not None and columns else [])):
                    value = state[scaled]
                    factor = share if scaled == name else share.reshape(value.shape)
                    state[scaled] = (value * factor).to(value.dtype)
        return tuple(found)

    def counts(self, counts: Array | None) -> Array | None:
        """Sample or class counts, (S,) or (S, K), of which no client has too many: they are claims.

        With `clip`, no client's sum is more than that multiple of the median.
        """
        if counts is None or self.clip is None:
            return counts
        sums = counts.reshape(len(counts), -1).sum(axis=1)
        limit = self.clip * np.median(sums)
        share = np.where(sums > limit, limit / np.where(sums > 0, sums, 1.0), 1.0)
        return counts * share.reshape(-1, *[1] * (counts.ndim - 1))

    def mean(self, values: Tensor, present: Tensor, weights: Tensor) -> Tensor:
        """The weighted mean over clients of each number, without those at either end.

        values, present, weights: (S, ...) broadcast to one shape; present: who has the number
        """
        if values.is_complex():
            raise InputError("trim: complex numbers have no order; leave trim out")
        absent = ~present.expand(values.shape)
        ranked, order = values.masked_fill(absent, float("inf")).sort(dim=0)
        count = (~absent).sum(dim=0)
        cut = (self.trim * count + 1e-9).long()
        rank = torch.arange(len(values)).reshape(-1, *[1] * (values.ndim - 1))
        kept = (rank >= cut) & (rank < count - cut)
        weight = weights.expand(values.shape).gather(0, order) * kept
        total = weight.sum(dim=0)
        summed = (weight * ranked.masked_fill(~kept, 0.0)).sum(dim=0)
        return summed / torch.where(total > 0, total, 1.0)


def _lengths(tensor: Tensor, columns: list[int]) -> Tensor:
    axes = columns or list(range(tensor.ndim))
    return tensor.abs().double().square().sum(dim=axes, keepdim=True).sqrt()


def _between(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low < value < high
