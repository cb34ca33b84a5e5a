"""Inner products of global and local neurons, most of the work of a matching.

Hides: whether they are computed directly, in which precision, or summed from known products.
Promises: the same numbers in all cases, up to rounding.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.sparse import csc_array

from nafi.errors import InputError
from nafi.matching.columns import Array, ColumnBlocks
from nafi.matching.gaussian import Gaussian
from nafi.matching.inputs import LocalModel, MatchingInput
from nafi.matching.posterior import Posterior

Single = npt.NDArray[np.float32]
# Columns whose products are summed in float32: more are faster, fewer are closer to float64.
_RUN = 1024


def direct_products(gaussian: Gaussian, model: LocalModel) -> list[Array]:
    """For each wide block of columns the (I, J) products of `eta` and the neurons.

    Cost: O(I J D) time, nothing kept.
    """
    return DoubleProducts(model, gaussian.columns)(gaussian)


class DoubleProducts:
    """The products with one model's neurons, in float64."""

    def __init__(self, model: LocalModel, columns: ColumnBlocks) -> None:
        self._neurons = [model.neurons[:, block] for block in columns.wide]

    def __call__(self, gaussian: Gaussian) -> list[Array]:
        """For each wide block of columns (I, J)."""
        wide = gaussian.columns.wide
        return [
            gaussian.eta[:, block] @ neurons.T
            for block, neurons in zip(wide, self._neurons, strict=True)
        ]


class SingleProducts:
    """The same, multiplied in float32 and summed in float64 over runs of columns.

    A product is off by at most `(n + 2) 2^-24 |eta_i| |w_j|`, n = 1024 or the width of the block if
    that is less: rows are scaled to norm 1, so that nothing leaves the range of float32.
    """

    def __init__(self, model: LocalModel, columns: ColumnBlocks) -> None:
        self._norms = _norms(model.squares)
        self._units = [
            _unit(model.neurons[:, block], self._norms[:, number])
            for number, block in enumerate(columns.wide)
        ]

    def __call__(self, gaussian: Gaussian) -> list[Array]:
        """For each wide block of columns (I, J)."""
        norms = _norms(gaussian.energy)
        products = []
        for number, block in enumerate(gaussian.columns.wide):
            units = _unit(gaussian.eta[:, block], norms[:, number])
            product = _summed(units, self._units[number])
            product *= norms[:, number, None]
            product *= self._norms[:, number]
            products.append(product)
        return products


PRODUCTS: dict[str, type[DoubleProducts] | type[SingleProducts]] = {
    "float64": DoubleProducts,
    "float32": SingleProducts,
}


def products_named(name: str) -> type[DoubleProducts] | type[SingleProducts]:
    """How products are computed, by the public name: the `products` of `nafi.match`."""
    if not isinstance(name, str) or name not in PRODUCTS:
        raise InputError(f"products: found {name!r}, expected one of {', '.join(PRODUCTS)}")
    return PRODUCTS[name]


def _norms(squares: Array) -> Array:
    """(..., B) norms from their squares, 1 in place of 0: to divide by."""
    return np.sqrt(np.where(squares > 0, squares, 1.0))


def _unit(rows: Array, norms: Array) -> Single:
    """(N, n) rows of norm 1 in float32."""
    scaled: Single = np.divide(rows, norms[:, None], dtype=np.float64).astype(np.float32)
    return scaled


def _summed(left: Single, right: Single) -> Array:
    """(I, J) the products of rows, runs of columns in float32 and their sum in float64."""
    total = np.zeros((len(left), len(right)))
    for start in range(0, left.shape[1], _RUN):
        run = slice(start, start + _RUN)
        total += left[:, run] @ right[:, run].T
    return total


class GramProducts:
    """The same, summed from the pairwise products of all N local neurons.

    `eta_i . w_j = t0 m0 . w_j + sum over members n of i of t_n w_n . w_j`: O(N J) per step once the
    N x N matrix is computed, which is faster if several descents share it.
    """

    def __init__(self, inputs: MatchingInput) -> None:
        widths = inputs.widths
        blocks = len(inputs.columns.sizes)
        precision = np.concatenate(
            [np.broadcast_to(model.precision, (model.width, blocks)) for model in inputs.models]
        )
        neurons = np.concatenate([model.neurons for model in inputs.models])
        self._offsets = np.concatenate([[0], np.cumsum(widths)])
        self._gram: list[list[Array]] = []  # per model and wide block (N, J): t_n w_n . w_j
        self._prior: list[list[Array]] = []  # per model and wide block (J,): t0 m0 . w_j
        for model in inputs.models:
            self._gram.append([])
            self._prior.append([])
            for number, block in enumerate(inputs.columns.wide):
                gram = neurons[:, block] @ model.neurons[:, block].T
                gram *= precision[:, number, None]
                self._gram[-1].append(gram)
                self._prior[-1].append(model.neurons[:, block] @ inputs.prior.eta[0, block])

    @staticmethod
    def bytes_needed(inputs: MatchingInput) -> int:
        """The memory of the matrices."""
        return 8 * sum(inputs.widths) ** 2 * len(inputs.columns.wide)

    def __call__(self, posterior: Posterior, slots: int, model: LocalModel) -> list[Array]:
        """As `direct_products`, for the global neurons in the first `slots` slots."""
        members = self._members(posterior, slots)
        return [
            members @ gram + prior
            for gram, prior in zip(self._gram[model.index], self._prior[model.index], strict=True)
        ]

    def _members(self, posterior: Posterior, slots: int) -> csc_array:
        """(slots, N) 1 where local neuron n belongs to the global neuron in a slot."""
        row = np.zeros(self._offsets[-1], dtype=np.intp)
        present = np.zeros(self._offsets[-1])
        for s, assigned in enumerate(posterior.assignments):
            if assigned is not None:
                local = slice(self._offsets[s], self._offsets[s + 1])
                row[local] = assigned
                present[local] = 1.0
        starts = np.arange(self._offsets[-1] + 1)
        return csc_array((present, row, starts), shape=(slots, self._offsets[-1]))
