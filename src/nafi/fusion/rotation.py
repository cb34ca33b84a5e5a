"""Groups with a basis instead of an order: clients' bases are turned into a common one.

Hides: what two bases can be compared by. Promises: orthogonal maps of the group's `Freedom`, so no
client's function changes; attention heads are compared by their circuits, the products of their
layers, which do not depend on any basis within a head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nafi.fusion.features import NeuronTable, comparable_columns, lifted_columns
from nafi.fusion.networks import Networks
from nafi.fusion.responses import plain_responses
from nafi.graph import (
    Freedom,
    Placements,
    Rotated,
    closest_rotation,
    keeping_mean,
    rows_first,
    sides,
)

# How often each basis is turned towards the mean of the others.
SWEEPS = 3


def common_bases(
    networks: Networks,
    group: str,
    placements: Sequence[Placements],
    heads: Sequence[Sequence[int]] | None,
    by_responses: bool,
) -> list[Rotated]:
    """How each client's basis is turned (generalised Procrustes).

    heads: for a group with a parent, where each client's heads went
    by_responses: compare what layers read on the probe, where a group has no parent
    Cost: a singular value decomposition of width^2 numbers for each client and sweep.
    """
    rows = plain_responses(networks, group) if by_responses and heads is None else None
    tables = _rows(networks, group, placements) if rows is None else [one[None] for one in rows]
    places = [[0]] * len(tables) if heads is None else heads
    maps = _turned(tables, places, networks.ranking, networks.freedom(group))
    return [Rotated(matrices[0] if heads is None else matrices) for matrices in maps]


def _rows(networks: Networks, group: str, placements: Sequence[Placements]) -> Sequence[Tensor]:
    """(P, J, D) for each client what can be compared of a group; nothing, where nothing can be."""
    table = comparable_columns(networks, group, placements)
    width = networks.spec.widths[group]
    if table is None:
        parent = networks.spec.groups[group].parent
        counts = networks.local_widths(parent) if parent is not None else [1] * len(placements)
        return [torch.zeros(count, width, 1, dtype=torch.float64) for count in counts]
    neurons = table.neurons

    def read(s: int) -> Tensor:
        rows = torch.from_numpy(neurons[s])
        return rows.reshape(-1, width, rows.shape[-1])

    return networks.clients.each(read)


def _turned(
    tables: Sequence[Tensor],
    places: Sequence[Sequence[int]],
    order: Sequence[int],
    freedom: Freedom,
) -> list[Tensor]:
    """(P, J, J) for each of several (P, J, D), such that rows of one place are alike once turned.

    places: for each client those of its P heads
    order: the clients, one after the other; each is read once, and once for each sweep
    Of each place, the first one stays as it is; each other one is turned towards the mean of those
    before it, and then some times towards that of all others.
    """
    closest = keeping_mean if freedom is Freedom.MEAN else closest_rotation
    first: set[tuple[int, int]] = set()
    counts = Counter(place for client in places for place in client)
    totals: dict[int, Tensor] = {}
    maps: dict[tuple[int, int], Tensor] = {}

    def turn(s: int, head: int, one: Tensor) -> None:
        place = places[s][head]
        if place not in totals:
            maps[s, head], totals[place] = torch.eye(len(one), dtype=torch.float64), one.clone()
            first.add((s, head))
            return
        if (s, head) in maps:
            if (s, head) in first or counts[place] <= 2:
                return
            totals[place] -= maps[s, head].T @ one
        maps[s, head] = closest(one @ totals[place].T)
        totals[place] += maps[s, head].T @ one

    for _ in range(1 + SWEEPS if max(counts.values()) > 2 else 1):
        for s in order:
            table = tables[s]
            for head, one in enumerate(table):
                turn(s, head, one)
    return [
        torch.stack([maps[s, head] for head in range(len(of_client))])
        for s, of_client in enumerate(places)
    ]


def circuit_table(
    networks: Networks, group: str, placements: Sequence[Placements]
) -> NeuronTable | None:
    """Heads as rows whose distances are those of their circuits; None for other groups.

    A circuit is the product of the two layers that meet within a head: queries with keys, values
    with outputs. Each has norm one. What a head has besides counts as one circuit.

    Cost: a product of all heads' rows with each other, and an eigendecomposition of a matrix as
    large as there are heads.
    """
    inside = networks.spec.children(group)
    if not inside or any(networks.freedom(name) is not Freedom.PAIR for name in inside):
        return None
    likeness = sum(_circuits(networks, name, placements) for name in inside)
    own = comparable_columns(networks, group, placements)
    if own is not None:
        rows = torch.nn.functional.normalize(
            torch.from_numpy(np.concatenate(list(own.neurons))), dim=1
        )
        likeness = likeness + rows @ rows.T
    assert isinstance(likeness, Tensor)
    values, vectors = torch.linalg.eigh(likeness)
    rows = vectors * values.clamp(min=0).sqrt()
    parts = torch.split(rows, networks.local_widths(group))
    return NeuronTable([part.numpy() for part in parts], [np.ones(rows.shape[1])] * len(parts))


def _circuits(networks: Networks, group: str, placements: Sequence[Placements]) -> Tensor:
    """(H, H) cosines of the circuits of all heads of all clients, two clients at a time.

    <Q^T K, Q'^T K'> is the sum over (Q Q'^T) * (K K'^T).
    """

    def read(s: int) -> list[Tensor]:
        spec, both = networks.specs[s], []
        for side in sides(spec, group, networks.states[s]):
            lifted = [
                rows_first(lifted_columns(networks, s, part, placements[s]), part.rows)
                for part in side.parts
            ]
            table = torch.cat([part.double() for part in lifted], dim=1)
            both.append(table.reshape(-1, spec.widths[group], table.shape[1]))
        return both

    rows = networks.clients.each(read)
    parent = str(networks.spec.groups[group].parent)
    ends = np.cumsum([0, *networks.local_widths(parent)])
    inner = torch.zeros(ends[-1], ends[-1], dtype=torch.float64)
    for s in range(len(rows)):
        mine = rows[s]
        for t in range(s + 1):
            products = [
                torch.einsum("hjd,gkd->hgjk", one, two)
                for one, two in zip(mine, mine if t == s else rows[t], strict=True)
            ]
            block = (products[0] * products[1]).sum(dim=(2, 3))
            inner[ends[s] : ends[s + 1], ends[t] : ends[t + 1]] = block
            inner[ends[t] : ends[t + 1], ends[s] : ends[s + 1]] = block.T
    norms = inner.diagonal().clamp(min=1e-30).sqrt()
    return inner / torch.outer(norms, norms)
