"""The linear sum assignment of one model's neurons to global neurons, or to new ones.

Hides: the solver, and that it never sees most pairs of neurons, nor most global neurons.
Promises: the cheapest one-to-one assignment of neurons to places; memory for the global neurons
that somebody may join, not for all.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from nafi.errors import InputError
from nafi.matching.columns import Array, Index


class AssignmentProblem:
    """Minimise the sum of costs over all one-to-one assignments of J neurons to I + K places.

    existing: I; opening: (J,), prices: (K,) ascending: neuron j as the k-th new one costs
    `opening_j + price_k`. What the I global neurons cost is told by `add`, some rows at a time.
    """

    def __init__(self, existing: int, opening: Array, prices: Array) -> None:
        if existing + len(prices) < len(opening):
            raise ValueError(f"{len(opening)} neurons cannot have {existing + len(prices)} places")
        self._existing, self._opening, self._prices = existing, opening, prices
        self._columns: list[Index] = []
        self._gains: list[Array] = []

    def add(self, first: int, joining: Array) -> None:
        """joining: (R, J) the costs of global neurons `first` to `first + R - 1`; changed here."""
        gain = np.subtract(joining, self._opening, out=joining)  # the optimum stays the same
        if not np.isfinite(gain).all():
            raise InputError(
                "the matching costs overflow: neurons, precisions or the penalty are too large for "
                "float64; rescale the weights or lower the precisions"
            )
        columns = np.arange(len(gain))
        if self._limit is not None:
            columns = np.flatnonzero(gain.min(axis=1) < self._limit)
        if len(columns) < len(gain):
            gain = gain[columns]
        self._columns.append(first + columns)
        self._gains.append(gain)

    def solve(self) -> Index:
        """(J,) the global neuron of each neuron, or I and above for a new one.

        Cost: O(J^2 (I + K)) at worst.
        """
        neurons, prices = len(self._opening), self._prices
        result = np.arange(self._existing, self._existing + neurons)
        rows = np.arange(neurons)
        if self._limit is not None:  # a neuron with only such pairs opens a new place
            useful = np.zeros(neurons, dtype=np.bool_)
            for gain in self._gains:
                useful |= (gain < self._limit).any(axis=0)
            rows = np.flatnonzero(useful)
        columns = np.concatenate([np.arange(0), *self._columns])
        cost = np.empty((len(rows), len(columns) + len(prices) - neurons + len(rows)))
        done = 0
        for gain in self._gains:
            cost[:, done : done + len(gain)] = gain[:, rows].T
            done += len(gain)
        cost[:, done:] = prices[neurons - len(rows) :]
        _, chosen = linear_sum_assignment(cost)
        shared = chosen < len(columns)
        result[rows[shared]] = columns[chosen[shared]]
        return result

    @property
    def _limit(self) -> float | None:
        """The gain from which on a pair is never part of an optimum, if there is one.

        Where each neuron can have a new place, it can have one for the last price at most.
        """
        return float(self._prices[-1]) if len(self._prices) == len(self._opening) else None
