"""Noise on what a client sends.

Hides: how a change is clipped and blurred. Promises: no change that leaves is longer than the clip
before the noise, and the noise cannot be foretold from anything that the server knows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import isfinite, prod

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from nafi.errors import NafiError
from nafi.federated.architecture import Tensors
from nafi.graph import holds_numbers, widened
from nafi.options import number, optional, whole


@dataclass(frozen=True)
class Noise:
    """The Gaussian mechanism on a client's change of weights in a round.

        sent = before + min(1, clip / |after - before|) (after - before) + clip scale N(0, 1)

    clip: the longest change, over all tensors together
    scale: the noise's standard deviation in each number, in units of `clip`
    seed: for tests alone; without it the noise is the operating system's
    """

    clip: float
    scale: float
    seed: int | None = None

    def __post_init__(self) -> None:
        number(above=0).check(self.clip, "clip")
        number(at_least=0).check(self.scale, "scale")
        optional(whole(0)).check(self.seed, "seed")

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
        drawn = _foretold(self.seed) if self.seed is not None else _unforeseeable
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
