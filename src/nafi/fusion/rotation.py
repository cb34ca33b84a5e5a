"""Groups with a basis instead of an order: clients' bases are turned into a common one.

Hides: what two bases can be compared by. Promises: orthogonal maps of the group's `Freedom`, so no
client's function changes; attention heads are compared by their circuits, the products of their
layers, which do not depend on any basis within a head.
"""

from __future__ import annotations

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

# For each member of a parent, which clients have it and which of theirs it is.
Owners = Sequence[Sequence[tuple[int, int]]]


def common_bases(
    networks: Networks,
    group: str,
    placements: Sequence[Placements],
    owners: Owners | None,
    by_responses: bool,
) -> list[Rotated]:
    """How each client's basis is turned (generalised Procrustes).

    owners: for a group with a parent
    by_responses: compare what layers read on the probe, where a group has no parent
    Cost: a singular value decomposition of width^2 numbers for each client and sweep.
    """
    freedom = networks.freedom(group)
    if owners is None:
        rows = plain_responses(networks, group) if by_responses else None
        if rows is None:
            rows = [table[0] for table in _rows(networks, group, placements)]
        order = networks.ranking
        turned = _turned([rows[s] for s in order], freedom)
        return [Rotated(turned[order.index(s)]) for s in range(len(order))]
    tables = _rows(networks, group, placements)
    width = networks.spec.widths[group]
    maps = [torch.eye(width, dtype=torch.float64).repeat(len(table), 1, 1) for table in tables]
    for members in owners:
        turned = _turned([tables[s][head] for s, head in members], freedom)
        for (s, head), matrix in zip(members, turned, strict=True):
            maps[s][head] = matrix
    return [Rotated(matrices) for matrices in maps]


def _rows(networks: Networks, group: str, placements: Sequence[Placements]) -> list[Tensor]:
    """(P, J, D) for each client what can be compared of a group; nothing, where nothing can be."""
    table = comparable_columns(networks, group, placements)
    width = networks.spec.widths[group]
    if table is None:
        parent = networks.spec.groups[group].parent
        counts = networks.local_widths(parent) if parent is not None else [1] * len(placements)
        return [torch.zeros(count, width, 1, dtype=torch.float64) for count in counts]
    return [torch.from_numpy(n).reshape(-1, width, n.shape[-1]) for n in table.neurons]


def _turned(rows: Sequence[Tensor], freedom: Freedom) -> list[Tensor]:
    """(J, J) for each of several (J, D), such that rows that were turned are alike.

    The first one stays as it is; each other one is turned towards the mean of those before it, and
    then some times towards that of all others.
    """
    closest = keeping_mean if freedom is Freedom.MEAN else closest_rotation
    maps = [torch.eye(len(rows[0]), dtype=torch.float64)]
    total = rows[0].clone()
    for one in rows[1:]:
        maps.append(closest(one @ total.T))
        total += maps[-1].T @ one
    for _ in range(SWEEPS if len(rows) > 2 else 0):
        for s, one in enumerate(rows[1:], start=1):
            total -= maps[s].T @ one
            maps[s] = closest(one @ total.T)
            total += maps[s].T @ one
    return maps


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
        rows = torch.nn.functional.normalize(torch.from_numpy(np.concatenate(own.neurons)), dim=1)
        likeness = likeness + rows @ rows.T
    assert isinstance(likeness, Tensor)
    values, vectors = torch.linalg.eigh(likeness)
    rows = vectors * values.clamp(min=0).sqrt()
    parts = torch.split(rows, networks.local_widths(group))
    return NeuronTable([part.numpy() for part in parts], [np.ones(rows.shape[1])] * len(parts))


def _circuits(networks: Networks, group: str, placements: Sequence[Placements]) -> Tensor:
    """(H, H) cosines of the circuits of all heads of all clients.

    <Q^T K, Q'^T K'> is the sum over (Q Q'^T) * (K K'^T).
    """
    both: list[list[Tensor]] = [[], []]
    for s, spec in enumerate(networks.specs):
        for rows, side in zip(both, sides(spec, group, networks.states[s]), strict=True):
            lifted = [
                rows_first(lifted_columns(networks, s, part, placements[s]), part.rows)
                for part in side.parts
            ]
            table = torch.cat([part.double() for part in lifted], dim=1)
            rows.append(table.reshape(-1, spec.widths[group], table.shape[1]))
    one, two = (torch.cat(rows) for rows in both)
    products = [torch.einsum("hjd,gkd->hgjk", side, side) for side in (one, two)]
    inner = (products[0] * products[1]).sum(dim=(2, 3))
    norms = inner.diagonal().clamp(min=1e-30).sqrt()
    return inner / torch.outer(norms, norms)
