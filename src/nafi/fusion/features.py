"""What can be compared: the columns of a group's neurons that are in a common order.

Hides: which columns are known to mean the same in every client, and how they are brought there.
Promises: one table of rows for each client, with the weight of every column.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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

    def parts_of(s: int) -> Iterator[Tensor]:
        of_model = _stretches(networks, networks.specs[s], group)
        for k in chosen:
            lifted = lifted_columns(networks, s, of_model[k], placements[s])
            yield _real(rows_first(lifted, of_model[k].rows))

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
    matrices = networks.clients.each(lambda s: _side_by_side(parts_of(s), sizes))
    for matrix in matrices if weighed or gains else ():
        for place in weighed:
            part = matrix[:, columns[place]]
            squares[place].append(np.einsum("jd,jd->d", part, part))
        for place in gains:
            means[place].append(matrix[:, columns[place]].mean(axis=0))
    for place in weighed:
        _balance(squares[place], [of_client[place] for of_client in weights])
    # What all neurons have in common, such as gains of one, tells none of them apart.
    shared = {place: np.mean(means[place], axis=0) for place in gains}

    def centred(s: int) -> Array:
        matrix = matrices[s]  # which nobody else uses
        for place, mean in shared.items():
            matrix[:, columns[place]] -= mean
        return matrix

    spread = _interned(np.concatenate(of_client) for of_client in weights)
    return NeuronTable(table_rows(networks, group, centred, sum(sizes)), spread)


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

    columns = read(0).shape[1]
    return NeuronTable(
        table_rows(networks, group, read, columns), [np.ones(columns)] * len(networks.specs)
    )


def table_rows(
    networks: Networks, group: str, read: Callable[[int], Array], columns: int
) -> Sequence[Array]:
    """What `read` says of each client, as a row of rows for each member of a parent.

    Of clients in files it is read again whenever it is asked for.
    """
    parent = networks.spec.groups[group].parent
    if parent is not None:
        widths = networks.local_widths(parent)
        return networks.clients.each(lambda s: read(s).reshape(widths[s], -1, columns))
    if networks.clients.stored:
        return Streamed(networks.local_widths(group), columns, read)
    return networks.clients.each(read)


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
    return np.asarray(_real(matrix).double().numpy())


def _real(matrix: Tensor) -> Tensor:
    """A matrix of real numbers; a complex number becomes two columns."""
    if not matrix.is_complex():
        return matrix
    return torch.view_as_real(matrix.resolve_conj()).flatten(1)


def _side_by_side(parts: Iterable[Tensor], sizes: Sequence[int]) -> Array:
    """Matrices of so many columns as one, in double precision; no two of them are held."""
    matrix: Tensor | None = None
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        if matrix is None:
            matrix = torch.empty(len(part), sum(sizes), dtype=torch.float64)
        matrix[:, start : start + size] = part
        start += size
    assert matrix is not None
    return np.asarray(matrix.numpy())


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
