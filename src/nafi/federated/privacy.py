"""Noise on what a client sends.

Hides: how a change is clipped and blurred. Promises: no change that leaves is longer than the clip
before the noise, and the noise cannot be foretold from anything that the server knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor

from nafi.errors import InputError
from nafi.federated.architecture import Tensors
from nafi.graph.spec import holds_numbers


@dataclass(frozen=True)
class Noise:
    """The Gaussian mechanism on a client's change of weights in a round.

        sent = before + min(1, clip / |after - before|) (after - before) + clip scale N(0, 1)

    clip: the longest change, over all tensors together
    scale: the noise's standard deviation in each number, in units of `clip`
    seed: for tests alone; without it the noise comes from the operating system's entropy
    """

    clip: float
    scale: float
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.clip < inf:
            raise InputError(f"clip: found {self.clip!r}, expected a number of more than 0")
        if not 0 <= self.scale < inf:
            raise InputError(f"scale: found {self.scale!r}, expected a number of at least 0")

    def applied(self, before: Tensors, after: Tensors) -> dict[str, Tensor]:
        """What leaves the client; tensors that hold no numbers, as counters, stay."""
        numbers = [name for name, tensor in after.items() if holds_numbers(tensor)]
        moved = {name: after[name].double() - before[name].double() for name in numbers}
        length = sum(float(change.square().sum()) for change in moved.values()) ** 0.5
        share = min(1.0, self.clip / length) if length else 1.0
        rng = np.random.default_rng(self.seed)
        sent = dict(after)
        for name, change in moved.items():
            blur = torch.from_numpy(rng.standard_normal(tuple(change.shape)))
            value = before[name].double() + share * change + self.clip * self.scale * blur
            sent[name] = _allowed(name, value).to(after[name].dtype)
        return sent


def _allowed(name: str, value: Tensor) -> Tensor:
    """Variances stay variances; looking at the sign of what leaves costs no privacy."""
    return value.clamp_min(0.0) if name.endswith("running_var") else value
