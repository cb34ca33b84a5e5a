"""The formulas of the method with plain loops over numbers: slow, obvious, independent.

Nothing here uses the package; every quantity is a scalar computed from its textbook definition.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy.optimize import linear_sum_assignment


def normal_divergence(name: str, m0: float, p0: float, m1: float, p1: float) -> float:
    """Between N(m0, 1/p0) before and N(m1, 1/p1) after, in one dimension, per its definition.

    Hellinger is returned as the Bhattacharyya coefficient's negative logarithm, which adds up
    over dimensions.
    """
    v0, v1 = 1 / p0, 1 / p1

    def kl(ma: float, va: float, mb: float, vb: float) -> float:
        return 0.5 * (va / vb - 1 + (mb - ma) ** 2 / vb + math.log(vb / va))

    if name == "kl":
        return kl(m0, v0, m1, v1)
    if name == "reverse_kl":
        return kl(m1, v1, m0, v0)
    if name == "jeffreys":
        return kl(m0, v0, m1, v1) + kl(m1, v1, m0, v0)
    if name == "wasserstein2":
        return (m0 - m1) ** 2 + (math.sqrt(v0) - math.sqrt(v1)) ** 2
    if name == "hellinger":
        coefficient = math.sqrt(2 * math.sqrt(v0 * v1) / (v0 + v1)) * math.exp(
            -((m0 - m1) ** 2) / (4 * (v0 + v1))
        )
        return -math.log(coefficient)
    raise AssertionError(name)


def pair_cost(
    w: np.ndarray, t: np.ndarray, eta: np.ndarray, p: np.ndarray, penalty: float, divergence: str
) -> float:
    """The data term and the penalty of giving w to a global neuron, column by column."""
    cost = 0.0
    total = 0.0
    for d in range(len(w)):
        cost -= (eta[d] + t[d] * w[d]) ** 2 / (p[d] + t[d])
        cost += eta[d] ** 2 / p[d]
        after = p[d] + t[d]
        total += normal_divergence(
            divergence, eta[d] / p[d], p[d], (eta[d] + t[d] * w[d]) / after, after
        )
    if divergence == "hellinger":
        total = 1 - math.exp(-total)
    return cost + penalty * total


def cost_matrix(
    neurons: list[np.ndarray],
    precisions: list[np.ndarray],
    prior_mean: np.ndarray,
    prior_precision: np.ndarray,
    mass: float,
    penalty: float,
    divergence: str,
    assignments: list[np.ndarray | None],
    s: int,
) -> np.ndarray:
    """(J, I + J) for model s given the others' assignments to global neurons 0..I-1."""
    models = len(neurons)
    width = 1 + max((int(a.max()) for a in assignments if a is not None), default=-1)
    eta = np.tile(prior_precision * prior_mean, (width, 1))
    precision = np.tile(prior_precision, (width, 1))
    count = [0] * width
    for other, assigned in enumerate(assignments):
        if other == s or assigned is None:
            continue
        for j, i in enumerate(assigned):
            eta[i] += precisions[other] * neurons[other][j]
            precision[i] += precisions[other]
            count[i] += 1
    rows = []
    for w in neurons[s]:
        row = []
        for i in range(width):
            data = pair_cost(w, precisions[s], eta[i], precision[i], penalty, divergence)
            row.append(2 * math.log((models - count[i]) / count[i]) + data)
        new = pair_cost(
            w, precisions[s], prior_precision * prior_mean, prior_precision, penalty, divergence
        )
        row += [2 * math.log(k * models / mass) + new for k in range(1, len(neurons[s]) + 1)]
        rows.append(row)
    return np.array(rows)


def objective(
    neurons: list[np.ndarray],
    precisions: list[np.ndarray],
    prior_mean: np.ndarray,
    prior_precision: np.ndarray,
    mass: float,
    groups: list[dict[int, int]],
) -> float:
    """Twice the negative log of the joint posterior, up to a constant, neuron by neuron."""
    models = len(neurons)
    total = 0.0
    for members in groups:
        n = len(members)
        chance = math.factorial(models - n) * math.factorial(n - 1) / math.factorial(models)
        total -= 2 * math.log(mass * chance)
        top, bottom = prior_precision * prior_mean, prior_precision.copy()
        for s, j in members.items():
            top = top + precisions[s] * neurons[s][j]
            bottom = bottom + precisions[s]
        total -= float((top**2 / bottom - prior_precision * prior_mean**2).sum())
    return total


def reference_match(
    neurons: list[np.ndarray],
    precisions: list[np.ndarray],
    prior_mean: np.ndarray,
    prior_precision: np.ndarray,
    *,
    mass: float,
    penalty: float,
    divergence: str,
    sweeps: int,
    seed: int,
    public_code: bool,
    max_width: int | None,
) -> tuple[set[frozenset[tuple[int, int]]], list[int], list[float]]:
    """The whole algorithm on a list of global neurons, each a dictionary model -> neuron.

    Returns the final partition, and the width and the objective after each pass.
    """
    models = len(neurons)
    groups: list[dict[int, int]] = []
    limit = sum(len(w) for w in neurons) if max_width is None else max_width
    data = (neurons, precisions, prior_mean, prior_precision)

    def place(s: int) -> None:
        for members in groups:
            members.pop(s, None)
        groups[:] = [members for members in groups if members]
        width, local = len(groups), len(neurons[s])
        others: list[np.ndarray | None] = []
        for o in range(models):
            found = {members[o]: i for i, members in enumerate(groups) if o in members}
            others.append(np.array([found[j] for j in sorted(found)]) if found else None)
        cost = cost_matrix(*data, mass, penalty, divergence, others, s)
        room = local
        if public_code:
            room = min(local, max(700 - width, local - width, 1))
            for i, members in enumerate(groups):
                n = len(members)
                capped = min(n, 10)
                cost[:, i] -= 2 * math.log((models - n) / n)
                cost[:, i] += math.log((models - capped) / capped)
        cost = cost[:, : width + min(room, limit - width)]
        for j, i in zip(*linear_sum_assignment(cost), strict=True):
            if i < width:
                groups[i][s] = int(j)
            else:
                groups.append({s: int(j)})

    def state() -> tuple[int, float]:
        return len(groups), objective(*data, mass, groups)

    for s in sorted(range(models), key=lambda s: -len(neurons[s])):
        place(s)
    passes = [state()]
    rng = np.random.default_rng(seed)
    for _ in range(sweeps):
        for s in rng.permutation(models).tolist():
            place(s)
        passes.append(state())
    partition = {frozenset(members.items()) for members in groups}
    return partition, [width for width, _ in passes], [value for _, value in passes]


def cheapest(cost: np.ndarray) -> float:
    """The least sum over all ways to give each row a column of its own."""
    rows = range(len(cost))
    return min(
        sum(cost[r, c] for r, c in zip(rows, columns, strict=True))
        for columns in itertools.permutations(range(cost.shape[1]), len(cost))
    )
