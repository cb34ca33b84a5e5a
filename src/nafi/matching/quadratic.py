"""Functions of (global neuron i, local neuron j) that are quadratic in the local neuron.

Hides: how such a function becomes matrix products. Promises: a cost or a divergence with three
coefficients per block of columns gives the whole (I, J) matrix without a loop over neurons, and a
sum of such functions takes one evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nafi.matching.columns import Array
from nafi.matching.gaussian import Gaussian
from nafi.matching.inputs import LocalModel


@dataclass(frozen=True, eq=False)
class Quadratic:
    """`offset_i + sum_d energy_ib eta_id^2 + slope_ib eta_id w_jd + square_ib w_jd^2`.

    offset: (I,); energy, slope, square: (I, B), where b is the block of column d.
    """

    offset: Array
    energy: Array
    slope: Array
    square: Array

    def __add__(self, other: Quadratic) -> Quadratic:
        return Quadratic(
            self.offset + other.offset,
            self.energy + other.energy,
            self.slope + other.slope,
            self.square + other.square,
        )

    def scaled(self, factor: float) -> Quadratic:
        return Quadratic(
            factor * self.offset, factor * self.energy, factor * self.slope, factor * self.square
        )

    def evaluate(self, posterior: Gaussian, model: LocalModel, products: Sequence[Array]) -> Array:
        """(I, J) the values for all pairs.

        products: for each wide block the (I, J) inner products of `eta_i` and `w_j` within it.
        Cost: O(I J) per wide block, and one product over the narrow columns.
        """
        values = self.square @ model.squares.T
        values += (self.offset + (self.energy * posterior.energy).sum(axis=1))[:, None]
        for block, product in enumerate(products):
            values += self.slope[:, block, None] * product
        columns = posterior.columns
        if columns.narrow.start < columns.narrow.stop:
            scaled = posterior.eta[:, columns.narrow] * columns.spread_narrow(self.slope)
            values += scaled @ model.neurons[:, columns.narrow].T
        return values
