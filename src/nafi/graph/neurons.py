"""The neurons of one group as the rows of a matrix, and back.

Hides: that a neuron's numbers are scattered over several tensors. Promises: `gather` and `scatter`
are inverse to each other, and every column knows the tensor and the role that it came from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from nafi.graph.blocks import Block
from nafi.graph.spec import ModelSpec, holds_numbers
from nafi.graph.tensors import Factor


class Role(StrEnum):
    """What a stretch of columns is to the neuron; also the order of the columns."""

    INCOMING = "incoming"
    BIAS = "bias"
    OUTGOING = "outgoing"


@dataclass(frozen=True)
class Stretch:
    """What one block of one tensor says of a group's neurons.

    rows: the dimensions of the unfolded block that are the neurons, a parent first
    """

    tensor: str
    role: Role
    block: Block
    rows: tuple[int, ...]

    @property
    def factors(self) -> tuple[Factor, ...]:
        """What its columns are made of, the outermost first: groups and fixed sizes."""
        return tuple(f for dim, f in enumerate(self.block.factors) if dim not in self.rows)


@dataclass(frozen=True)
class Columns(Stretch):
    """A stretch with its place in the matrix."""

    where: slice


@dataclass(frozen=True, eq=False)
class Neurons:
    """One group's neurons.

    matrix: (width, D); for a group with a parent (parent's width * width, D), the parent outside
    """

    group: str
    matrix: Tensor
    columns: tuple[Columns, ...]

    def part(self, role: Role) -> Tensor:
        """The columns of one role, side by side."""
        parts = [self.matrix[:, c.where] for c in self.columns if c.role is role]
        return torch.cat(parts, dim=1) if parts else self.matrix[:, :0]


def gather(state: Mapping[str, Tensor], spec: ModelSpec, group: str) -> Neurons:
    """Collect all that belongs to the neurons of a group: incoming, bias, outgoing columns.

    A tensor that has the group on two axes (a layer that feeds itself) gives two stretches.
    """
    spec.check_shapes(state)
    parts_found = stretches(spec, group, [name for name in spec.axes if holds_numbers(state[name])])
    parts: list[Tensor] = []
    columns: list[Columns] = []
    start = 0
    for stretch in parts_found:
        part = rows_first(stretch.block.unfold(state[stretch.tensor], spec.widths), stretch.rows)
        where = slice(start, start + part.shape[1])
        start = where.stop
        parts.append(part)
        columns.append(Columns(**vars(stretch), where=where))
    return Neurons(group, torch.cat(parts, dim=1), tuple(columns))


def stretches(spec: ModelSpec, group: str, tensors: Collection[str]) -> list[Stretch]:
    """All that these tensors say of a group's neurons: incoming, bias, then outgoing columns."""
    spec.group(group)
    result = [
        Stretch(name, role, block, rows)
        for name in spec.tensors_of(group)
        if name in tensors
        for block in spec.blocks[name]
        for role, rows in _occurrences(spec, name, block, group)
    ]
    order = list(Role)
    return sorted(result, key=lambda stretch: order.index(stretch.role))


def scatter(neurons: Neurons, state: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """A copy of the state dict with the neurons written into it; the inverse of `gather`.

    Where two stretches hold the same number, the incoming one counts.
    """
    spec.check_shapes(state)
    touched = {columns.tensor for columns in neurons.columns}
    result = {name: t.clone() if name in touched else t for name, t in state.items()}
    for columns in reversed(neurons.columns):
        unfolded = columns.block.unfold(result[columns.tensor], spec.widths)
        rows = [unfolded.shape[dim] for dim in columns.rows]
        rest = [n for dim, n in enumerate(unfolded.shape) if dim not in columns.rows]
        part = neurons.matrix[:, columns.where].reshape(rows + rest)
        back = part.movedim(list(range(len(rows))), list(columns.rows))
        size = columns.block.size(spec.widths)
        result[columns.tensor][columns.block.where] = back.reshape(size).to(unfolded.dtype)
    return result | {other: result[name] for other, name in spec.aliases.items() if name in touched}


def _occurrences(
    spec: ModelSpec, tensor: str, block: Block, group: str
) -> list[tuple[Role, tuple[int, ...]]]:
    """Each dimension of a block that is the group, its role, and the dimensions of the rows."""
    parent = spec.groups[group].parent
    occurrences = []
    dim = 0
    for axis, segment in enumerate(block.segments):
        for factor in segment.factors:
            if factor == group:
                outside = (block.factors.index(parent),) if parent in block.factors else ()
                rest = [f for d, f in enumerate(block.factors) if d != dim and d not in outside]
                if axis in spec.tensors[tensor].reads:
                    role = Role.OUTGOING
                else:
                    role = Role.INCOMING if rest else Role.BIAS
                occurrences.append((role, (*outside, dim)))
            dim += 1
    return occurrences


def rows_first(block: Tensor, rows: tuple[int, ...]) -> Tensor:
    """An unfolded block as a matrix: these dimensions together are the rows."""
    moved = block.movedim(list(rows), list(range(len(rows))))
    count = 1
    for dim in rows:
        count *= block.shape[dim]
    return moved.reshape(count, -1)
