"""Byzantine-robust aggregation: what clients send is clipped, compared and trimmed.

Hides: what is usual among clients. Promises: as long as most clients are honest, no client's neuron
is longer than a multiple of what is usual, and no number of the mean, before norms are restored,
lies outside of those that honest clients sent, where enough of them own it. Clients that contradict
most others, and copies of one another, are not heard, but never more of them than `trim` allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
from torch import Tensor

from nafi.errors import InputError
from nafi.fusion.clients import Array
from nafi.graph import ModelSpec, TensorSpec, holds_numbers

State = Mapping[str, Tensor]

# A client is not heard if it agrees with the others less than this share of what is usual, by the
# median cosine. Changes of honest clients from a common start differ more than whole networks do
# whose neurons were matched: the least share seen among honest clients was 0.47, and 0.73.
CHANGES_AGREE = 1 / 3
NETWORKS_AGREE = 0.6
# Clients deviate from the others in the same way, so that they count as one, beyond this cosine:
# honest clients stayed below 0.54, attackers who agreed on what to send had 1.
SAME = 0.6
# Clients that agree less than this tell nothing of who is usual; honest ones had 0.2 and more.
LEAST_USUAL = 0.1


@dataclass(frozen=True)
class Screen:
    """What is done against clients that send harmful weights; it takes three clients or more.

    clip: the longest neuron that is taken as it is, weights and bias together, as a multiple of the
        median length of the clients' neurons in that layer; longer ones are shortened, unless half
        of the clients have neurons as long. Tensors without neurons of their own, as the output
        layer, are shortened as a whole, and counts of samples held to the same multiple
    trim: the share of clients that may be harmful, rounded up. As many that contradict the others
        are not heard; what is left of them is left out at either end of every number before the
        mean is taken over those that own it; with fewer owners than that, their median is. A neuron
        that no more than this share of clients have is read by nobody, so neurons should be few
        enough to have several owners each (`max_width`)
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
        """How many clients may be harmful: a share is never rounded to nobody."""
        return min(ceil(self.trim * clients - 1e-9), max(0, (clients - 1) // 2))

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

    def clipped_changes(
        self, changes: Mapping[str, Tensor], meanings: Mapping[str, TensorSpec]
    ) -> dict[str, Tensor]:
        """What clients changed of each tensor, (S, ...), with changes that are too large shortened.

        The longest change of a neuron, or of a tensor without neurons, is `clip` times the median
        over the clients that changed it.
        """
        if self.clip is None:
            return dict(changes)
        clipped = {}
        for name, change in changes.items():
            columns = meanings[name].columns or range(change.ndim - 1)
            axes = tuple(axis + 1 for axis in columns)
            lengths = change.square().sum(dim=axes, keepdim=True).sqrt() if axes else change.abs()
            moved = lengths.where(lengths > 0, torch.nan)
            limit = self.clip * moved.nanmedian(dim=0, keepdim=True).values.nan_to_num()
            clipped[name] = change * torch.where(lengths > limit, limit / lengths, 1.0)
        return clipped

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

    def claims(self, counts: Array) -> Array:
        """(S, K) class counts; nobody's claim is above the largest one that must be honest.

        With f clients that may lie, that is the one after the f largest of a class.
        """
        most = np.sort(counts, axis=0)[::-1][self.cut(len(counts))]
        limited: Array = np.minimum(counts, most)
        return limited

    def heard(self, values: Tensor, present: Tensor, agree: float) -> Tensor:
        """(S,) which clients are heard, as they agree with the others and copy none of them.

        values: (S, D) what clients send; present: (S, D) which of these numbers they have
        agree: the least share of the usual agreement, by the median cosine with the others

        Cost: two products of S x S x D.
        """
        clients = len(values)
        most = self.cut(clients)
        heard = torch.ones(clients, dtype=torch.bool)
        if not most:
            return heard
        agreement = _others(_cosines(values, present)).median(dim=1).values
        if agreement.median() < LEAST_USUAL:
            return heard
        order = agreement.argsort().tolist()
        contradict = [s for s in order if agreement[s] < agree * agreement.median()]
        heard[contradict[:most]] = False
        center = values.where(present & heard[:, None], torch.nan).nanmedian(dim=0).values
        alike = _cosines(values - center.nan_to_num(), present) > SAME
        for s in order:  # of clients that are alike, the one that agrees most is heard
            others = [t for t in range(clients) if t != s and heard[t] and alike[s, t]]
            if heard[s] and others and int((~heard).sum()) < most:
                heard[s] = False
        return heard

    def mean(
        self, values: Tensor, present: Tensor, weights: Tensor, cut: int | None = None
    ) -> Tensor:
        """The weighted mean over clients of each number, without those at either end.

        values, present, weights: (S, ...) broadcast to one shape; present: who has the number. A
        client of weight 0 has no say. Where nobody has one, the mean is 0.
        cut: how many are left out at either end, if not all that may be harmful
        """
        heard = (present & (weights > 0)).expand(values.shape)
        ranked, order = values.masked_fill(~heard, float("inf")).sort(dim=0)
        count = heard.sum(dim=0)
        most = self.cut(len(values)) if cut is None else cut
        left_out = torch.clamp((count - 1) // 2, min=0, max=most)
        rank = torch.arange(len(values)).reshape(-1, *[1] * (values.ndim - 1))
        kept = (rank >= left_out) & (rank < count - left_out)
        weight = weights.expand(values.shape).gather(0, order) * kept
        total = weight.sum(dim=0)
        summed = (weight * ranked.masked_fill(~kept, 0.0)).sum(dim=0)
        return summed / torch.where(total > 0, total, 1.0)


def _cosines(values: Tensor, present: Tensor) -> Tensor:
    """(S, S) cosines of what two clients both have; 0 where one of them has nothing."""
    known = values * present
    squares = known.square() @ present.to(values.dtype).T
    return known @ known.T / (squares * squares.T).sqrt().clamp(min=1e-30)


def _others(square: Tensor) -> Tensor:
    """(S, S - 1): a matrix without its diagonal."""
    count = len(square)
    return square[~torch.eye(count, dtype=torch.bool)].reshape(count, count - 1)


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
