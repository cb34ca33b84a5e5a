"""Inner products of global and local neurons, most of the work of a matching.

Hides: whether they are computed directly or summed from known products.
Promises: the same numbers in both cases, up to rounding.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csc_array

from nafi.matching.columns import Array
from nafi.matching.gaussian import Gaussian
from nafi.matching.inputs import LocalModel, MatchingInput
from nafi.matching.posterior import Posterior


def direct_products(gaussian: Gaussian, model: LocalModel) -> list[Array]:
    """For each wide block of columns the (I, J) products of `eta` and the neurons.

    Cost: O(I J D) time, nothing kept.
    """
    return [gaussian.eta[:, block] @ model.neurons[:, block].T for block in gaussian.columns.wide]


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
