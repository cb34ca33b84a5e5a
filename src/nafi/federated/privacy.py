"""Noise on what a client sends.

Hides: how a change is clipped and blurred, and counts, too. Promises: no change that leaves is
longer than the clip before the noise, and the noise cannot be foretold from anything that the
server knows; an epsilon is an upper bound for what it says it covers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import inf, isfinite, prod
from typing import Literal

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from nafi.errors import NafiError
from nafi.federated.accountant import gaussian_epsilon
from nafi.federated.architecture import Tensors
from nafi.graph import holds_numbers, widened
from nafi.options import number, one_of, optional, whole


@dataclass(frozen=True)
class Noise:
    """The Gaussian mechanism on a client's change of weights in a round.

        sent = before + min(1, clip / |after - before|) (after - before) + clip scale N(0, 1)

    clip: the longest change, over all tensors together
    scale: the noise's standard deviation in each number, in units of `clip`
    seed: for tests alone; without it the noise is the operating system's
    counts: how many samples the client says it has, of each class or in all: "exact"; "noisy",
        with noise on each count; or "withheld", so that all clients and classes look alike
    count_scale: the standard deviation of that noise, in samples
    """

    clip: float
    scale: float
    seed: int | None = None
    counts: Literal["exact", "noisy", "withheld"] = "exact"
    count_scale: float = 10.0

    def __post_init__(self) -> None:
        number(above=0).check(self.clip, "clip")
        number(at_least=0).check(self.scale, "scale")
        optional(whole(0)).check(self.seed, "seed")
        one_of(("exact", "noisy", "withheld")).check(self.counts, "counts")
        number(above=0).check(self.count_scale, "count_scale")

    def epsilon(self, rounds: int, delta: float, rate: float = 1.0) -> float:
        """Of the weights that a client sends in so many rounds.

        Neighbours are runs in which one client sends its change and those in which it sends noise
        about no change; halve `scale` for runs in which it has other data. Counts are not covered.

        rate: see `gaussian_epsilon`; a server knows whom it asks, so for it the rate is 1
        """
        return gaussian_epsilon(self.scale, rounds, delta, rate)

    def count_epsilon(self, rounds: int, delta: float) -> float:
        """Of the counts that a client sends in so many rounds.

        Neighbours are data of this client with and without one sample.
        """
        if self.counts == "withheld":
            return 0.0
        return gaussian_epsilon(self.count_scale, rounds, delta) if self.counts == "noisy" else inf

    def disclosed(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """What the client says of its counts; their sum is at least 1."""
        if self.counts == "exact":
            return counts
        blurred = np.zeros(len(counts))
        if self.counts == "noisy":
            blurred = np.asarray(counts) + self.count_scale * self._draw()((len(counts),)).numpy()
        whole_ones = tuple(max(0, round(float(count))) for count in blurred)
        return whole_ones if sum(whole_ones) else (1,) * len(counts)

    def _draw(self) -> Callable[[tuple[int, ...]], Tensor]:
        return _unforeseeable if self.seed is None else _foretold(self.seed)

    def applied(
        self, before: Tensors, after: Tensors, variances: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """What leaves the client; tensors that hold no numbers, as counters, stay.

        variances: tensors in which no number may be below zero; looking at the sign of what leaves
            costs no privacy
        """
        moved = {
            name: widened(tensor) - widened(before[name])
            for name, tensor in after.items()
            if holds_numbers(tensor)
        }
        length = sum(float(change.abs().square().sum()) for change in moved.values()) ** 0.5
        if not isfinite(length):
            raise NafiError("training came to weights that are NaN or infinite; nothing is sent")
        share = min(1.0, self.clip / length) if length else 1.0
        drawn = self._draw()
        sent = dict(after)
        for name, change in moved.items():
            blur = drawn(tuple(change.shape))
            if change.is_complex():
                blur = torch.complex(blur, drawn(tuple(change.shape)))
            value = widened(before[name]) + share * change + self.clip * self.scale * blur
            if name in variances:
                value = value.clamp_min(0.0)
            sent[name] = value.to(after[name].dtype)
        return sent


def _unforeseeable(shape: tuple[int, ...]) -> Tensor:
    """Normal numbers from the operating system's random bytes.

    No generator of NumPy or PyTorch would do: from some of its numbers others can be computed.
    """
    bits = np.frombuffer(os.urandom(8 * prod(shape)), dtype=np.uint64)
    return torch.from_numpy(ndtri(((bits >> np.uint64(11)) + 0.5) * 2.0**-53)).reshape(shape)


def _foretold(seed: int) -> Callable[[tuple[int, ...]], Tensor]:
    rng = np.random.default_rng(seed)
    return lambda shape: torch.from_numpy(np.asarray(rng.standard_normal(shape)))
