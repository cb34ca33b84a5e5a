"""Groups that hold others: attention heads, and the channels within each.

Hides: that two heads can be compared only once the orders within them agree. Promises: for every
head of every client a row of numbers in which equal heads are equal, whatever their inner orders.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.optimize import linear_sum_assignment

from nafi.fusion.clients import Array
from nafi.fusion.features import Table
from nafi.matching.columns import Index


def comparable_heads(own: Table | None, inside: list[Table]) -> Table:
    """Heads as rows, the neurons within each in the order of the reference head it resembles.

    own: columns of the heads themselves; inside: one table for each group within them. The client
    with the most heads is the reference. Cost: H^2 assignment problems for each client and group.
    """
    counts = [len(neurons) for neurons in (own or inside[0]).neurons]
    reference = int(np.argmax(counts))
    padded = [_padded(table) for table in inside]
    rows, weights = [], []
    for s in range(len(counts)):
        heads, orders = pair_heads(
            None if own is None else own.neurons[s],
            [table[s] for table in padded],
            None if own is None else own.neurons[reference],
            [table[reference] for table in padded],
        )
        parts = [] if own is None else [own.neurons[s]]
        spread = [] if own is None else [own.weights[s]]
        for table, order, given in zip(padded, orders, inside, strict=True):
            chosen = order[np.arange(len(heads)), heads]
            aligned = np.take_along_axis(table[s], chosen[:, :, None], axis=1)
            parts.append(aligned.reshape(len(aligned), -1))
            spread.append(np.tile(given.weights[s], aligned.shape[1]))
        rows.append(np.concatenate(parts, axis=1))
        weights.append(np.concatenate(spread))
    return Table(rows, weights)


def pair_heads(
    own: Array | None, inside: list[Array], other: Array | None, other_inside: list[Array]
) -> tuple[Index, list[Index]]:
    """For each head its partner, and for each pair of heads the best order within.

    own, other: (H, D), (G, D) with H <= G; inside: (H, d, D') and (G, d, D') for each inner group.
    Returns (H,) partners and for each inner group (H, G, d) orders: order[a, b, i] is the neuron of
    head a that is closest to neuron i of head b.
    """
    heads, others = len(inside[0]), len(other_inside[0])
    likeness = np.zeros((heads, others))
    if own is not None and other is not None:
        likeness += own @ other.T - 0.5 * _sizes(own, other)
    orders = []
    for mine, theirs in zip(inside, other_inside, strict=True):
        order = np.empty((heads, others, mine.shape[1]), dtype=np.intp)
        for a in range(heads):
            for b in range(others):
                closeness = theirs[b] @ mine[a].T - 0.5 * _sizes(theirs[b], mine[a])
                rows, order[a, b] = linear_sum_assignment(closeness, maximize=True)
                likeness[a, b] += closeness[rows, order[a, b]].sum()
        orders.append(order)
    if heads <= others:
        return linear_sum_assignment(likeness, maximize=True)[1], orders
    return likeness.argmax(axis=1), orders


def _sizes(one: Array, two: Array) -> Array:
    """Squared norms of all pairs, added."""
    return np.asarray(np.add.outer(np.square(one).sum(axis=1), np.square(two).sum(axis=1)))


def _padded(table: Table) -> list[Array]:
    """The neurons within each head, with zeros up to the most that any client has."""
    most = max(neurons.shape[1] for neurons in table.neurons)
    return [np.pad(n, ((0, 0), (0, most - n.shape[1]), (0, 0))) for n in table.neurons]


def places_of_heads(
    own: Table | None, inside: Mapping[str, Table], reference: int
) -> tuple[list[Index], dict[str, list[Index]]]:
    """One-to-one places of each client's heads, and of the neurons within, at those of one client.

    All clients have equal widths. Returns (H,) arrays, and for each inner group (H, d) arrays.
    """
    count = len((own or next(iter(inside.values()))).neurons)
    heads: list[Index] = []
    within: dict[str, list[Index]] = {name: [] for name in inside}
    for s in range(count):
        partners, orders = pair_heads(
            None if own is None else own.neurons[s],
            [found.neurons[s] for found in inside.values()],
            None if own is None else own.neurons[reference],
            [found.neurons[reference] for found in inside.values()],
        )
        heads.append(partners)
        for name, order in zip(inside, orders, strict=True):
            chosen = order[np.arange(len(partners)), partners]
            within[name].append(np.argsort(chosen, axis=1))
    return heads, within
