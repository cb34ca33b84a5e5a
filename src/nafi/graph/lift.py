"""One network's tensors in the coordinates of another.

Hides: where the neurons of a group lie in a tensor. Promises: every number of the small network
is found where its neurons went, and a neuron that it does not have is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nafi.graph.blocks import Block, transform
from nafi.graph.spec import ModelSpec
from nafi.graph.tensors import UNIT, Axis, Kind, Segment, TensorSpec


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

    def __reduce__(self) -> tuple[Callable[..., Positions], tuple[list[Any], int]]:
        """As numbers: torch pickles each tensor as an archive, thirty times as slow."""
        return _positions, (self.index.tolist(), self.width)

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


def _positions(index: list[Any], width: int) -> Positions:
    return Positions(torch.tensor(index, dtype=torch.int64), width)


@dataclass(frozen=True, eq=False)
class Kept:
    """Some neurons are kept, in this order, and the others are gone.

    index: (I,) the neurons to keep
    """

    index: Tensor

    @property
    def width(self) -> int:
        return len(self.index)

    def spread(self, block: Tensor, dim: int, consumed: bool) -> Tensor:
        return block.index_select(dim, self.index)


@dataclass(frozen=True, eq=False)
class Thinned:
    """Neurons go to places of their own, of which some are kept and the others are gone."""

    positions: Positions
    kept: Kept

    @property
    def width(self) -> int:
        return self.kept.width

    @property
    def index(self) -> Tensor:
        """(J,) the place of each neuron; -1 if it is gone."""
        places = torch.full((self.positions.width,), -1)
        places[self.kept.index] = torch.arange(self.width)
        return places[self.positions.index]

    def spread(self, block: Tensor, dim: int, consumed: bool) -> Tensor:
        return self.kept.spread(self.positions.spread(block, dim, consumed), dim, consumed)


@dataclass(frozen=True, eq=False)
class Rotated:
    """Neurons that have no places of their own but only a basis: an orthogonal map mixes them.

    matrix: (J, J) row j says where neuron j goes; for a group with a parent (parent's width, J, J)
    """

    matrix: Tensor

    @property
    def width(self) -> int:
        return self.matrix.shape[-1]

    def spread(self, block: Tensor, dim: int, consumed: bool) -> Tensor:
        matrix = self.matrix.to(block.dtype)
        spread: Tensor = torch.tensordot(block, matrix, dims=([dim], [0])).movedim(-1, dim)
        return spread

    def spread_within(self, block: Tensor, dim: int, parent: int) -> Tensor:
        """The same with another map for each index along `parent`."""
        rows = block.movedim((parent, dim), (0, -1))
        mixed = torch.einsum("p...j,pji->p...i", rows, self.matrix.to(block.dtype))
        back: Tensor = mixed.movedim((0, -1), (parent, dim))
        return back

    @property
    def owned(self) -> Positions:
        """Whose neurons these are afterwards: whoever has one of them has all."""
        return Positions(torch.arange(self.width).expand(self.matrix.shape[:-1]), self.width)


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
    dims = [
        (dim, factor, axis in consumed)
        for dim, (factor, axis) in enumerate(zip(block.factors, block.axes, strict=True))
        if isinstance(factor, str) and factor in placements and dim not in fixed
    ]
    # Orders within a parent come first: they are counted by its old positions.
    for dim, group, _ in dims:
        parent, placement = spec.groups[group].parent, placements[group]
        if parent is not None:
            assert isinstance(placement, Positions | Rotated)
            unfolded = placement.spread_within(unfolded, dim, block.factors.index(parent))
    for dim, group, read in dims:
        if spec.groups[group].parent is None:
            unfolded = placements[group].spread(unfolded, dim, read)
    return unfolded


def lift(tensor: Tensor, name: str, spec: ModelSpec, placements: Placements) -> Tensor:
    """The tensor called `name` of a network with this spec, with its neurons where they go."""
    meaning = spec.tensors[name]
    if meaning.kind is Kind.GAIN:  # a basis can be turned only if its gains are one, and stay so
        placements = owned(placements)
    return _lifted(tensor, meaning.axes, meaning.reads, spec, placements)


def lifted_rows(name: str, spec: ModelSpec, placements: Placements) -> Tensor:
    """Which neurons a tensor is part of after `lift`: ones where the network has them, else zeros.

    The shape is that of the lifted tensor, with 1 for every axis that holds no neurons of its own.
    """
    meaning = spec.tensors[name]
    if meaning.whole_rows:
        axes = [axis if i in meaning.rows else UNIT for i, axis in enumerate(meaning.axes)]
        meaning = TensorSpec(tuple(axes))
    shape = meaning.shape(spec.widths)
    return _lifted(torch.ones(shape), meaning.axes, (), spec, owned(placements))


def owned(placements: Placements) -> Placements:
    """Where neurons go, for the question of whose they are: of a rotated basis, everything."""
    return {
        name: place.owned if isinstance(place, Rotated) else place
        for name, place in placements.items()
    }


def lift_axes(
    tensor: Tensor, axes: Sequence[Axis], spec: ModelSpec, placements: Placements
) -> Tensor:
    """(M, ...) rows of what neurons do, with the neurons of every further axis where they go."""
    rows: Axis = (Segment((len(tensor),)),)
    return _lifted(tensor, (rows, *axes), (), spec, placements)


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


def in_order(tensor: Tensor, name: str, spec: ModelSpec, placements: Placements) -> Tensor:
    """A client's tensor in the global order; neurons that it does not own are neutral."""
    lifted = lift(tensor, name, spec, placements)
    neutral = spec.tensors[name].neutral
    if not neutral:
        return lifted
    return torch.where(lifted_rows(name, spec, placements) > 0, lifted, neutral)
