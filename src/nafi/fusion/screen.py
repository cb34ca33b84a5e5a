"""Byzantine-robust aggregation: what clients send is clipped and trimmed.

Hides: what is usual among clients. Promises: as long as most clients are honest, no client's neuron
is longer than a multiple of what is usual, and no number of the mean, before norms are restored,
lies outside of those that honest clients sent, where enough of them own it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nafi.errors import InputError
from nafi.fusion.clients import Array
from nafi.graph import ModelSpec, holds_numbers

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Screen:
    """What is done against clients that send harmful weights; it takes three clients or more.

    clip: the longest neuron that is taken as it is, weights and bias together, as a multiple of the
        median length of the clients' neurons in that layer; longer ones are shortened, unless half
        of the clients have neurons as long. Tensors without neurons of their own, as the output
        layer, are shortened as a whole, and counts of samples held to the same multiple
    trim: the share of clients that are left out at either end of every number before the mean is
        taken over those that own it; with fewer owners than that, their median is. A neuron that no
        more than this share of clients have is read by nobody, so neurons should be few enough to
        have several owners each (`max_width`)
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

    def cut(self, clients: int) -> int:
        """How many clients are left out at either end."""
        return int(self.trim * clients + 1e-9)

    def clipped(self, states: Sequence[State], specs: Sequence[ModelSpec]) -> tuple[State, ...]:
        """The clients' tensors with neurons that are too long made shorter."""
        if self.clip is None:
            return tuple(states)
        spec = specs[0]
        names = [name for name in spec.tensors if name in states[0]]
        with_weights = {spec.bias_of(name) for name in names if spec.tensors[name].columns}
        clipped_states = [dict(state) for state in states]
        for name in names:
            if name in with_weights or not holds_numbers(states[0][name]):
                continue
            columns = spec.tensors[name].columns
            parts = [name]
            bias = spec.bias_of(name) if columns else None
            parts += [bias] if bias in names else []
            lengths = [_lengths([state[part] for part in parts], columns) for state in states]
            limit = self._limit(lengths)
            for state, client_lengths in zip(clipped_states, lengths, strict=True):
                share = torch.where(client_lengths > limit, limit / client_lengths, 1.0)
                for part in parts:
                    value = state[part]
                    factor = share if part == name else share.reshape(value.shape)
                    state[part] = (value * factor).to(value.dtype)
        return tuple(clipped_states)

    def _limit(self, lengths: Sequence[Tensor]) -> Tensor:
        """The longest that is usual; a client has one vote, however many neurons it has.

        Neurons of length zero say nothing: clients lack them, or they died.
        """
        assert self.clip is not None
        alive = [client[client > 0] for client in lengths if bool((client > 0).any())]
        if not alive:
            return torch.tensor(float("inf"), dtype=torch.float64)
        usual = torch.stack([client.median() for client in alive]).median()
        longest = torch.stack([client.max() for client in alive]).median()
        return torch.maximum(self.clip * usual, longest)

    def counts(self, counts: Array | None) -> Array | None:
        """Sample or class counts, (S,) or (S, K), of which no client has too many: they are claims.

        No client's sum is more than `clip` times the median; ten times without it.
        """
        if counts is None or not self.active:
            return counts
        sums = counts.reshape(len(counts), -1).sum(axis=1)
        limit = (10.0 if self.clip is None else self.clip) * np.median(sums)
        share = np.where(sums > limit, limit / np.where(sums > 0, sums, 1.0), 1.0)
        return counts * share.reshape(-1, *[1] * (counts.ndim - 1))

    def mean(self, values: Tensor, present: Tensor, weights: Tensor) -> Tensor:
        """The weighted mean over clients of each number, without those at either end.

        values, present, weights: (S, ...) broadcast to one shape; present: who has the number. A
        client of weight 0 has no say. Where nobody has one, the mean is 0.
        """
        heard = (present & (weights > 0)).expand(values.shape)
        ranked, order = values.masked_fill(~heard, float("inf")).sort(dim=0)
        count = heard.sum(dim=0)
        cut = torch.clamp((count - 1) // 2, min=0, max=self.cut(len(values)))
        rank = torch.arange(len(values)).reshape(-1, *[1] * (values.ndim - 1))
        kept = (rank >= cut) & (rank < count - cut)
        weight = weights.expand(values.shape).gather(0, order) * kept
        total = weight.sum(dim=0)
        summed = (weight * ranked.masked_fill(~kept, 0.0)).sum(dim=0)
        return summed / torch.where(total > 0, total, 1.0)


def as_real(tensor: Tensor, name: str) -> Tensor:
    """A tensor in double precision, or an error for one that has no order to be trimmed by."""
    if tensor.is_complex():
        raise InputError(f"{name}: complex numbers have no order; leave trim out")
    return tensor.double()


def _lengths(parts: Sequence[Tensor], columns: Sequence[int]) -> Tensor:
    """Of each neuron, with its bias if that is the second part; else of a mean number."""
    squares = parts[0].abs().double().square()
    if not columns:
        return squares.mean().sqrt()
    total = squares.sum(dim=tuple(columns), keepdim=True)
    for bias in parts[1:]:
        total = total + bias.abs().double().square().reshape(total.shape)
    return total.sqrt()


def _between(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low < value < high
