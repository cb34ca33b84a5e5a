"""Groups that hold others: attention heads, and the channels within each.

Hides: that two heads can be compared only once the orders within them agree. Promises: for every
head of every client a row of numbers in which equal heads are equal, whatever their inner orders.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from nafi.fusion.clients import Array
from nafi.fusion.features import Moments, NeuronTable, comparable_columns, summary, table_rows
from nafi.fusion.networks import Networks
from nafi.graph import Placements, Role
from nafi.matching import Index


def comparable(
    networks: Networks,
    group: str,
    placements: Sequence[Placements],
    moments: Moments | None = None,
    roles: Collection[Role] = tuple(Role),
) -> NeuronTable:
    """The best that there is to compare a group's neurons by, whatever it holds.

    Columns in a common order, also of the groups within; else outgoing ones; else sums.
    """
    inside = networks.spec.children(group)
    heads = comparable_columns(networks, group, placements, moments, roles)
    tables = {n: comparable_columns(networks, n, placements, moments, roles) for n in inside}
    within = {name: rows for name, rows in tables.items() if rows is not None}
    if within:
        return comparable_heads(networks, group, heads, within)
    return (
        heads
        or comparable_columns(networks, group, placements, moments)
        or summary(networks, group, placements)
    )


def comparable_heads(
    networks: Networks, group: str, heads: NeuronTable | None, inside: Mapping[str, NeuronTable]
) -> NeuronTable:
    """Heads as rows, the neurons within each in the order of the reference head it resembles.

    heads: columns of the heads themselves; inside: a table for each group within them.
    The client with the most heads is the reference.

    Cost: H^2 assignment problems for each client and group, whenever a client is read.
    """
    counts = networks.local_widths(group)
    most = {name: max(networks.local_widths(name)) for name in inside}

    def parts_of(s: int) -> tuple[Array | None, list[Array]]:
        padded = [_padded(table.neurons[s], most[name]) for name, table in inside.items()]
        return None if heads is None else heads.neurons[s], padded

    their_outer, their_inside = parts_of(int(np.argmax(counts)))

    def read(s: int) -> Array:
        outer, padded = parts_of(s)
        partners, orders = pair_heads(outer, padded, their_outer, their_inside)
        parts = [] if outer is None else [outer]
        for rows, order in zip(padded, orders, strict=True):
            chosen = order[np.arange(len(partners)), partners]
            aligned = np.take_along_axis(rows, chosen[:, :, None], axis=1)
            parts.append(aligned.reshape(len(aligned), -1))
        return np.concatenate(parts, axis=1)

    weights = [
        np.concatenate(
            [
                *([] if heads is None else [heads.weights[s]]),
                *(np.tile(table.weights[s], most[name]) for name, table in inside.items()),
            ]
        )
        for s in range(len(counts))
    ]
    return NeuronTable(table_rows(networks, group, read, len(weights[0])), weights)


def pair_heads(
    mine_outer: Array | None,
    inside: list[Array],
    their_outer: Array | None,
    other_inside: list[Array],
) -> tuple[Index, list[Index]]:
    """For each head its partner, and for each pair of heads the best order within.

    mine_outer, their_outer: (H, D), (G, D) with H <= G; inside, other_inside: (H, d, D') and
        (G, d, D') for each inner group.
    Returns (H,) partners and for each inner group (H, G, d) orders: order[a, b, i] is the neuron of
    head a that is closest to neuron i of head b.
    """
    heads, others = len(inside[0]), len(other_inside[0])
    likeness = np.zeros((heads, others))
    if mine_outer is not None and their_outer is not None:
        likeness += mine_outer @ their_outer.T - 0.5 * _sizes(mine_outer, their_outer)
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


def _padded(neurons: Array, most: int) -> Array:
    """The neurons within each head, with zeros up to the most that any client has."""
    return np.pad(neurons, ((0, 0), (0, most - neurons.shape[1]), (0, 0)))
