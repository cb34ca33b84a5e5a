"""What can be compared: the columns of a group's neurons that are in a common order.

Hides: which columns are known to mean the same in every client, and how they are brought there.
Promises: one table of rows for each client, with the weight of every column.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from nafi.fusion.clients import Array
from nafi.fusion.networks import Networks
from nafi.graph import (
    ModelSpec,
    Placements,
    Role,
    Stretch,
    lift_block,
    rows_first,
    stretches,
)
from nafi.matching import Owners, Streamed

# Inputs that are always zero say nothing of a column, but no column is left without any weight.
LEAST_MOMENT = 1e-3
# Of the weights of linear and convolutional layers, the only ones that have moments.
INPUT_AXIS = 1

Moments = Mapping[str, Sequence[Array]]


@dataclass(frozen=True, eq=False)
class NeuronTable:
    """The neurons of one group that can be compared.

    neurons: for each client (J_s, D), or (parent's width, J_s, D) for a group with a parent; read
        again whenever they are needed where the clients stay in files
    weights: for each client (D,) the weight of each column
    owners: for each client how many clients its neurons stand for, if that is not one
    """

    neurons: Sequence[Array]
    weights: Sequence[Array]
    owners: Sequence[Owners] | None = None

    def ranked(self, order: Sequence[int]) -> NeuronTable:
        """The same with the clients in another order."""
        neurons: Sequence[Array]
        if isinstance(self.neurons, Streamed):
            read, widths = self.neurons.read, [self.neurons.widths[s] for s in order]
            neurons = Streamed(widths, self.neurons.dimension, lambda k: read(order[k]))
        else:
            neurons = [self.neurons[s] for s in order]
        owners = None if self.owners is None else [self.owners[s] for s in order]
        return NeuronTable(neurons, [self.weights[s] for s in order], owners)


def usable(stretch: Stretch, matched: Collection[str]) -> bool:
    """Whether all that the columns stand for is in a common order."""
    return all(f in matched for f in stretch.factors if isinstance(f, str))


def known_share(networks: Networks, group: str, matched: Collection[str]) -> float:
    """The share of a group's own columns, incoming and bias, that can be compared."""
    spec = networks.spec
    inside = spec.children(group)
    known = total = 0
    for stretch in _stretches(networks, spec, group):
        # What a group reads of itself is never known before it is matched.
        if stretch.role is not Role.OUTGOING and group not in stretch.factors:
            size = prod(spec.widths[f] if isinstance(f, str) else f for f in stretch.factors)
            total += size
            known += size * usable(stretch, {*matched, *inside})
    return known / total if total else 0.0


def comparable_columns(
    networks: Networks,
    group: str,
    placements: Sequence[Placements],
    moments: Moments | None = None,
    roles: Collection[Role] = tuple(Role),
) -> NeuronTable | None:
    """The comparable columns of a group; None if there are none.

    placements: for each client the groups that were matched already
    moments: tensor -> for each client the mean squares of its inputs, to weigh columns by
    roles: which columns to look at
    """
    moments = moments or {}
    stretches_here = _stretches(networks, networks.spec, group)
    chosen = [
        k
        for k, stretch in enumerate(stretches_here)
        if stretch.role in roles and usable(stretch, placements[0])
    ]
    if not chosen:
        return None

    def parts_of(s: int) -> list[Array]:
        of_model = _stretches(networks, networks.specs[s], group)
        return [
            real_rows(rows_first(lifted_columns(networks, s, of_model[k], placements[s]), rows))
            for k in chosen
            for rows in [of_model[k].rows]
        ]

    sizes = [rows.shape[1] for rows in parts_of(0)]
    columns = [slice(end - size, end) for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
    weights = [
        [
            _column_weights(networks, s, of_model[k], placements[s], moments, size)
            for k, size in zip(chosen, sizes, strict=True)
        ]
        for s, spec in enumerate(networks.specs)
        for of_model in [_stretches(networks, spec, group)]
    ]
    weighed = [p for p, k in enumerate(chosen) if stretches_here[k].tensor in moments]
    gains = [p for p, k in enumerate(chosen) if _is_gain(stretches_here[k], networks.spec)]
    squares: list[list[Array]] = [[] for _ in chosen]
    means: list[list[Array]] = [[] for _ in chosen]
    neurons: list[Array] = []
    streamed = networks.clients.stored
    for s in range(len(networks.specs)) if weighed or gains or not streamed else ():
        parts = parts_of(s)
        for place in weighed:
            squares[place].append(np.einsum("jd,jd->d", parts[place], parts[place]))
        for place in gains:
            means[place].append(parts[place].mean(axis=0))
        if not streamed:
            neurons.append(np.concatenate(parts, axis=1))  # a copy, also of one part alone
    for place in weighed:
        _balance(squares[place], [of_client[place] for of_client in weights])
    # What all neurons have in common, such as gains of one, tells none of them apart.
    shared = {place: np.mean(means[place], axis=0) for place in gains}

    def centred(matrix: Array) -> Array:
        for place, mean in shared.items():
            matrix[:, columns[place]] -= mean
        return matrix

    def read(s: int) -> Array:
        return centred(np.concatenate(parts_of(s), axis=1))

    spread = _interned(np.concatenate(of_client) for of_client in weights)
    if streamed:
        widths = networks.local_widths(group)
        return NeuronTable(Streamed(widths, sum(sizes), read), spread)
    return _in_parents(networks, group, [centred(matrix) for matrix in neurons], spread)


def _interned(rows: Iterable[Array]) -> list[Array]:
    """The same, equal ones as one: most often, all clients weigh the same."""
    known: dict[bytes, Array] = {}
    return [known.setdefault(row.tobytes(), row) for row in rows]


def summary(networks: Networks, group: str, placements: Sequence[Placements]) -> NeuronTable:
    """What can be compared where nothing else can: sums and norms over columns of unknown order."""

    def read(s: int) -> Array:
        parts = []
        for stretch in _stretches(networks, networks.specs[s], group):
            block = stretch.block
            unknown = [
                dim
                for dim, factor in enumerate(block.factors)
                if isinstance(factor, str)
                and factor not in placements[s]
                and dim not in stretch.rows
            ]
            lifted = lifted_columns(networks, s, stretch, placements[s])
            sums = [lifted.sum(unknown, True), lifted.abs().square().sum(unknown, True).sqrt()]
            parts += [real_rows(rows_first(reduced, stretch.rows)) for reduced in sums]
        return np.concatenate(parts, axis=1)

    count = len(networks.specs)
    if networks.clients.stored:
        columns = read(0).shape[1]
        widths = networks.local_widths(group)
        return NeuronTable(Streamed(widths, columns, read), [np.ones(columns)] * count)
    neurons = [read(s) for s in range(count)]
    return _in_parents(networks, group, neurons, [np.ones(rows.shape[1]) for rows in neurons])


def _in_parents(
    networks: Networks, group: str, neurons: list[Array], weights: list[Array]
) -> NeuronTable:
    """A table of these rows, as a row of rows for each member of a parent."""
    parent = networks.spec.groups[group].parent
    if parent is not None:
        widths = networks.local_widths(parent)
        neurons = [m.reshape(p, -1, m.shape[1]) for m, p in zip(neurons, widths, strict=True)]
    return NeuronTable(neurons, weights)


def _stretches(networks: Networks, spec: ModelSpec, group: str) -> list[Stretch]:
    """What clients have learnt of a group; buffers only where there is nothing else."""
    numbers = [name for name in spec.tensors if name in networks.numbers]
    learnt = stretches(spec, group, [name for name in numbers if name in networks.learnt])
    return learnt or stretches(spec, group, numbers)


def lifted_columns(networks: Networks, s: int, stretch: Stretch, placements: Placements) -> Tensor:
    """A client's block with its columns, not its rows, where they go."""
    spec = networks.specs[s]
    unfolded = stretch.block.unfold(networks.states[s][stretch.tensor], spec.widths)
    reads = spec.tensors[stretch.tensor].reads
    return lift_block(unfolded, stretch.block, spec, placements, reads, fixed=stretch.rows)


def real_rows(matrix: Tensor) -> Array:
    """A matrix in double precision; a complex number becomes two columns."""
    if matrix.is_complex():
        matrix = torch.view_as_real(matrix.resolve_conj()).flatten(1)
    return np.asarray(matrix.double().numpy())


def _column_weights(
    networks: Networks,
    s: int,
    stretch: Stretch,
    placements: Placements,
    moments: Moments,
    columns: int,
) -> Array:
    """(D,) what the columns of a stretch weigh in one client: class shares, or input moments."""
    spec, name = networks.specs[s], stretch.tensor
    weights = torch.from_numpy(networks.clients.weights_of(spec.tensors[name])[s])
    if weights.numel() == 1 and name not in moments:
        return np.full(columns, float(weights))
    if name in moments:
        weights = weights * _along_inputs(moments[name][s], name, spec)
    unfolded = stretch.block.unfold(weights.expand(spec.shape(name)), spec.widths)
    lifted = lift_block(unfolded, stretch.block, spec, placements, fixed=stretch.rows)
    of_first = rows_first(lifted, stretch.rows)[0]
    if name in moments:
        # What a client does not have is a true zero, known as well as the rest of it.
        of_first = torch.where(of_first > 0, of_first, of_first[of_first > 0].mean())
    copies = columns // len(of_first)  # a complex number is two columns
    return np.asarray(of_first.repeat_interleave(copies).numpy())


def _along_inputs(moments: Array, name: str, spec: ModelSpec) -> Tensor:
    """Mean squares of a layer's inputs, floored, along the axis that reads them."""
    floored = np.maximum(moments, LEAST_MOMENT * moments.mean())
    form = [1] * len(spec.tensors[name].axes)
    form[INPUT_AXIS] = len(floored)
    return torch.from_numpy(floored).reshape(form)


def _is_gain(stretch: Stretch, spec: ModelSpec) -> bool:
    """Whether a column is a number of the neuron by itself and not the bias of its weights."""
    return stretch.role is Role.BIAS and stretch.tensor not in spec.biases


def _balance(squares: list[Array], weights: list[Array]) -> None:
    """Scale a stretch's weights, in place, so that it counts as much as it would unweighted.

    squares: for each client the sum of squares of each column
    """
    plain = sum(float(client.sum()) for client in squares)
    weighted = sum(float(client @ w) for client, w in zip(squares, weights, strict=True))
    for client in weights:
        client *= plain / weighted if weighted > 0 else 1.0
