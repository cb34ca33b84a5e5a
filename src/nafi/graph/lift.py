"""One network's tensors in the coordinates of another.

Hides: where the neurons of a group lie in a tensor. Promises: every number of the small network
is found where its neurons went, and a neuron that it does not have is zero.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nafi.graph.blocks import Block, transform
from nafi.graph.spec import Axis, ModelSpec, Place, Segment


class Placement(Protocol):
    """Where the neurons of one group of one network go."""

    @property
    def width(self) -> int:
        """The neurons that there are to go to."""
        ...

    def spread(self, block: Tensor, dim: int, consumed: bool) -> Tensor:
        """The block with its neurons along `dim` where they go.

        consumed: whether the tensor reads these neurons, rather than being part of them
        """
        ...


@dataclass(frozen=True, eq=False)
class Positions:
    """Each neuron goes to a place of its own.

    index: (J,) the place of each neuron; for a group with a parent (parent's width, J)
    """

    index: Tensor
    width: int

    def spread(self, block: Tensor, dim: int, consumed: bool) -> Tensor:
        shape = list(block.shape)
        shape[dim] = self.width
        return block.new_zeros(shape).index_copy_(dim, self.index, block)

    def spread_within(self, block: Tensor, dim: int, parent: int) -> Tensor:
        """The same with another order for each index along `parent`."""
        shape = list(block.shape)
        shape[dim] = self.width
        form = [1] * block.ndim
        form[parent], form[dim] = self.index.shape
        index = (self.index if parent < dim else self.index.T).reshape(form)
        return block.new_zeros(shape).scatter_(dim, index.expand(block.shape), block)


@dataclass(frozen=True, eq=False)
class Shares:
    """Each neuron is shared out, as optimal transport does.

    plan: (J, I) the mass that goes from each neuron to each place
    """

    plan: Tensor

    @property
    def width(self) -> int:
        return self.plan.shape[1]

    def spread(self, block: Tensor, dim: int, consumed: bool) -> Tensor:
        # A place is the mean of what comes to it; what a neuron gave its readers is divided up.
        mass = self.plan.sum(dim=1 if consumed else 0, keepdim=True)
        matrix = (self.plan / mass).to(block.dtype)
        spread: Tensor = torch.tensordot(block, matrix, dims=([dim], [0])).movedim(-1, dim)
        return spread


Placements = Mapping[str, Placement]


def lift_block(
    unfolded: Tensor,
    block: Block,
    spec: ModelSpec,
    placements: Placements,
    consumed: Collection[int] = (),
    fixed: Collection[int] = (),
) -> Tensor:
    """An unfolded block with every group that has a placement where it goes.

    consumed: axes of the tensor that it reads; fixed: dimensions of the block to leave alone.
    """
    found = [
        (dim, factor, axis in consumed)
        for dim, (factor, axis) in enumerate(zip(block.factors, block.axes, strict=True))
        if isinstance(factor, str) and factor in placements and dim not in fixed
    ]
    # Orders within a parent come first: they are counted by its old positions.
    for dim, group, _ in found:
        parent, placement = spec.groups[group].parent, placements[group]
        if parent is not None:
            assert isinstance(placement, Positions)
            unfolded = placement.spread_within(unfolded, dim, block.factors.index(parent))
    for dim, group, read in found:
        if spec.groups[group].parent is None:
            unfolded = placements[group].spread(unfolded, dim, read)
    return unfolded


def lift(tensor: Tensor, name: str, spec: ModelSpec, placements: Placements) -> Tensor:
    """The tensor called `name` of a network with this spec, with its neurons where they go."""
    return _lifted(tensor, spec.axes[name], consumed_axes(name, spec), spec, placements)


def lifted_rows(name: str, spec: ModelSpec, placements: Placements) -> Tensor:
    """Which neurons a tensor is part of after `lift`: ones where the network has them, else zeros.

    The shape is that of the lifted tensor, with 1 for every axis that holds no neurons of its own.
    """
    rows = row_axes(name, spec)
    axes = [axis if i in rows else (Segment(()),) for i, axis in enumerate(spec.axes[name])]
    if not whole_rows(name, spec):
        axes = list(spec.axes[name])
    shape = [sum(segment.size(spec.widths) for segment in axis) for axis in axes]
    return _lifted(torch.ones(shape), axes, (), spec, placements)


def consumed_axes(name: str, spec: ModelSpec) -> list[int]:
    """The axes of a tensor whose neurons it reads."""
    return [i for i in range(len(spec.axes[name])) if Place(name, i) in spec.consumed]


def row_axes(name: str, spec: ModelSpec) -> list[int]:
    """The axes of a tensor that hold neurons which it is part of, and does not read."""
    return [
        index
        for index, axis in enumerate(spec.axes[name])
        if Place(name, index) not in spec.consumed and any(segment.groups for segment in axis)
    ]


def whole_rows(name: str, spec: ModelSpec) -> bool:
    """Whether every parent of a tensor's rows is among the rows, too.

    A transposed convolution in groups has the parent on the axis that it reads.
    """
    held = {
        g for i in row_axes(name, spec) for segment in spec.axes[name][i] for g in segment.groups
    }
    return all(spec.groups[group].parent in {None, *held} for group in held)


def _lifted(
    tensor: Tensor,
    axes: Sequence[Axis],
    consumed: Collection[int],
    spec: ModelSpec,
    placements: Placements,
) -> Tensor:
    target = spec.widths | {group: place.width for group, place in placements.items()}

    def change(unfolded: Tensor, block: Block) -> Tensor:
        return lift_block(unfolded, block, spec, placements, consumed)

    return transform(tensor, axes, spec.widths, change, target)


def columns_of(name: str, spec: ModelSpec) -> list[int]:
    """The axes along which a tensor's rows run, if its rows are neurons."""
    rows = row_axes(name, spec)
    if not rows or not whole_rows(name, spec):
        return []
    return [axis for axis in range(len(spec.axes[name])) if axis not in rows]


def bias_of(name: str, spec: ModelSpec) -> str | None:
    """The tensor that is added to what this one makes, going by its name and its neurons."""
    path, _, attribute = name.rpartition(".")
    bias = f"{path}.{attribute.replace('weight', 'bias')}".removeprefix(".")
    rows = tuple(spec.axes[name][axis] for axis in row_axes(name, spec))
    return bias if bias != name and spec.axes.get(bias) == rows else None
