"""The Beta-Bernoulli process: the cost of sharing a global neuron or opening a new one.

Hides: the popularity terms and the number of new neurons that a model may open.
Promises: costs on the scale of twice a negative log probability, as in `pfnm_cost`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import gammaln

from nafi.errors import InputError
from nafi.matching.columns import Array


@dataclass(frozen=True)
class BetaBernoulli:
    """The popularity terms of the paper (`pfnm_cost`), for S models and mass gamma."""

    models: int
    mass: float

    def shared(self, counts: Array) -> Array:
        """(I,) `2 log((S - n_i) / n_i)` for joining a neuron that n_i other models own."""
        return 2.0 * np.log((self.models - counts) / counts)

    def joined(self, counts: Array, owners: Array) -> Array:
        """(I, J) the same for neurons that stand for `owners` models: as if one joined after
        the other."""
        total = self._sums
        at = counts.astype(np.intp)[:, None] - 1
        return total[at + owners.astype(np.intp)] - total[at]

    def gathered(self, owners: Array) -> Array:
        """(J,) what it takes to make a new neuron one of `owners` models."""
        return self._sums[owners.astype(np.intp) - 1]

    @cached_property
    def _sums(self) -> Array:
        """(S,) at n - 1: what n models pay to join one after the other."""
        return np.concatenate([[0.0], np.cumsum(self.shared(np.arange(1.0, self.models)))])

    def opened(self, count: int) -> Array:
        """(count,) `2 log(k S / gamma)` for the k-th new neuron."""
        readiness = math.log(self.models) - math.log(self.mass)
        cost: Array = 2.0 * (np.log(np.arange(1, count + 1)) + readiness)
        return cost

    def room(self, width: int, local: int) -> int:
        """How many new neurons a model of `local` neurons may open next to `width` existing."""
        return local

    def negative_log_probability(self, counts: Array) -> float:
        """Twice the negative log probability of all assignments, up to a constant.

        `2 sum_i [ log S! - log (S-n_i)! - log (n_i-1)! - log gamma ]`. Adding a model changes it
        by the sum of `shared` and of `opened` without their `log k`: the paper counts the orders
        in which a model's new neurons can be numbered, which is no part of a joint probability.
        """
        total = gammaln(self.models + 1) - gammaln(self.models - counts + 1) - gammaln(counts)
        return float(2.0 * np.sum(total - np.log(self.mass)))


@dataclass(frozen=True)
class PublicCodeBetaBernoulli(BetaBernoulli):
    """What the public PFNM code computes instead of `pfnm_cost`.

    It omits the factor 2 for shared neurons, counts at most 10 owners, and opens new neurons only
    up to a width of 700 (beyond it one at a time, or as many as the model needs).
    """

    largest_count = 10
    largest_width = 700

    def shared(self, counts: Array) -> Array:
        return super().shared(np.minimum(counts, self.largest_count)) / 2.0

    def room(self, width: int, local: int) -> int:
        return min(local, max(self.largest_width - width, local - width, 1))


POPULARITY: dict[str, type[BetaBernoulli]] = {
    "paper": BetaBernoulli,
    "pfnm-code": PublicCodeBetaBernoulli,
}


def popularity_named(name: str, models: int, mass: float) -> BetaBernoulli:
    """The popularity terms by their public name, the `compat` of `nafi.match`."""
    if not isinstance(name, str) or name not in POPULARITY:
        raise InputError(f"compat: found {name!r}, expected one of {', '.join(POPULARITY)}")
    return POPULARITY[name](models, mass)
