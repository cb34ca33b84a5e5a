"""Diagonal Gaussians in natural parameters.

Hides: that precisions are stored once per block of columns.
Promises: nothing is ever divided by the precision of an observation, which may be 0; there is no
field for a variance, so that variances and precisions cannot be confused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from nafi.matching.columns import Array, ColumnBlocks


@dataclass(frozen=True, eq=False)
class Gaussian:
    """I independent Gaussians over D columns, N(eta / precision, 1 / precision).

    eta: (I, D) precision times mean
    precision: (I, B) one per block of columns, positive
    """

    eta: Array
    precision: Array
    columns: ColumnBlocks

    @property
    def mean(self) -> Array:
        """(I, D) the means, in sorted column order."""
        return self.eta / self.columns.spread(self.precision)

    @cached_property
    def energy(self) -> Array:
        """(I, B) squared norm of `eta` within each block."""
        return self.columns.sum_of_squares(self.eta)

    def rows(self, chosen: slice) -> Gaussian:
        """Some of them; nothing is copied."""
        return Gaussian(self.eta[chosen], self.precision[chosen], self.columns)
