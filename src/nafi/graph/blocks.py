"""A tensor as blocks in which every group has a dimension of its own.

Hides: offsets of concatenations and the unfolding of products. Promises: whoever can say what to
do with a block whose dimensions are named has said it for the whole tensor. Permuting, resizing
and gathering neurons are all written on top of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from nafi.graph.tensors import Axis, Factor, Segment


@dataclass(frozen=True)
class Block:
    """A rectangular part of a tensor.

    where: the stretch of each axis of the tensor that it takes
    segments: one for each axis
    """

    where: tuple[slice, ...]
    segments: tuple[Segment, ...]

    @cached_property
    def factors(self) -> tuple[Factor, ...]:
        """The unfolded dimensions, axis by axis."""
        return tuple(factor for segment in self.segments for factor in segment.factors)

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The axis of the tensor that each unfolded dimension belongs to."""
        return tuple(axis for axis, segment in enumerate(self.segments) for _ in segment.factors)

    def unfold(self, tensor: Tensor, widths: Mapping[str, int]) -> Tensor:
        """The block with one dimension per factor; a view where the memory allows it."""
        shape = [widths[f] if isinstance(f, str) else f for f in self.factors]
        return tensor[self.where].reshape(shape)

    def size(self, widths: Mapping[str, int]) -> list[int]:
        """The size of the block along each axis of the tensor."""
        return [segment.size(widths) for segment in self.segments]


def blocks(axes: Sequence[Axis], widths: Mapping[str, int]) -> Iterator[Block]:
    """All blocks of a tensor with these axes, in the order of its memory."""
    stretches: list[list[tuple[slice, Segment]]] = []
    for axis in axes:
        start, row = 0, []
        for segment in axis:
            size = segment.size(widths)
            row.append((slice(start, start + size), segment))
            start += size
        stretches.append(row)
    for combination in product(*stretches):
        yield Block(tuple(s for s, _ in combination), tuple(g for _, g in combination))


def transform(
    tensor: Tensor,
    axes: Sequence[Axis],
    widths: Mapping[str, int],
    change: Callable[[Tensor, Block], Tensor],
    new_widths: Mapping[str, int] | None = None,
) -> Tensor:
    """Put every unfolded block through `change` and assemble the results, at other widths if asked.

    change: (unfolded block, the block) -> the same, each group at its new width
    """
    target = widths if new_widths is None else new_widths
    shape = [sum(segment.size(target) for segment in axis) for axis in axes]
    result = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    pairs = list(zip(blocks(axes, widths), blocks(axes, target), strict=True))
    for old, new in pairs:
        unfolded = old.unfold(tensor, widths)
        changed = change(unfolded, old)
        if len(pairs) == 1 and changed is not unfolded:
            return changed.reshape(shape)  # large tensors need not be copied once more
        result[new.where] = changed.reshape(new.size(target))
    return result
