"""The linear sum assignment of one model's neurons to global neurons, or to new ones.

Hides: the solver, and that it never sees most pairs of neurons.
Promises: the cheapest one-to-one assignment of neurons to places.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from nafi.errors import InputError
from nafi.matching.columns import Array, Index


def assign(joining: Array, opening: Array, prices: Array) -> Index:
    """Minimise the sum of costs over all one-to-one assignments of J neurons to I + K places.

    joining: (I, J) cost of global neuron i for neuron j
    opening: (J,), prices: (K,) ascending: neuron j as the k-th new one costs `opening_j + price_k`
    Returns (J,): i, or I and above for a new one. Cost: O(J^2 (I + K)) at worst.
    """
    existing, neurons = joining.shape
    if existing + len(prices) < neurons:
        raise ValueError(f"{neurons} neurons cannot have {existing + len(prices)} places")
    gain = joining - opening  # a constant per neuron does not change the optimum
    if not np.isfinite(gain).all():
        raise InputError(
            "the matching costs overflow: neurons, precisions or the penalty are too large for "
            "float64; rescale the weights or lower the precisions"
        )
    rows, columns = np.arange(neurons), np.arange(existing)
    if len(prices) == neurons:
        # Each neuron can have a new place, for the last price at most: a pair that costs more is
        # never part of an optimum, and a neuron with only such pairs opens a new place.
        useful = gain < prices[-1]
        rows, columns = np.flatnonzero(useful.any(axis=0)), np.flatnonzero(useful.any(axis=1))
    result = np.arange(existing, existing + neurons)
    cost = np.empty((len(rows), len(columns) + len(prices) - neurons + len(rows)))
    cost[:, : len(columns)] = gain[columns[:, None], rows].T
    cost[:, len(columns) :] = prices[neurons - len(rows) :]
    _, chosen = linear_sum_assignment(cost)
    shared = chosen < len(columns)
    result[rows[shared]] = columns[chosen[shared]]
    return result
