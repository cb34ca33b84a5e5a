"""Columns of neuron vectors, sorted into blocks of equal precision.

Hides: which columns have the same precision in every model and in the prior, and their new order.
Promises: what depends only on precisions is computed once per block instead of once per column, and
each block that is wide enough has its own matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]

# For fewer columns, a separate matrix product takes longer than scaling each column.
WIDE = 32


@dataclass(frozen=True, eq=False)
class ColumnBlocks:
    """A partition of D columns into B blocks, the widest block first.

    order: (D,) the original column at each sorted position
    sizes: (B,) columns per block, descending
    """

    order: Index
    sizes: Index

    @classmethod
    def of_equal(cls, precisions: Array) -> ColumnBlocks:
        """Group the columns of a (models and prior) x D table that are equal in every row."""
        width = precisions.shape[1]
        if np.all(precisions == precisions[:, :1]):
            return cls(np.arange(width), np.array([width]))
        _, first, block, sizes = np.unique(
            precisions, axis=1, return_index=True, return_inverse=True, return_counts=True
        )
        block = block.reshape(-1)  # numpy 2.0 returned it two-dimensional here
        # Of equally wide blocks the caller's first: often nothing has to be sorted, nor copied.
        by_size = np.lexsort((first, -sizes))
        rank = np.empty_like(by_size)
        rank[by_size] = np.arange(len(by_size))
        return cls(np.argsort(rank[block], kind="stable"), sizes[by_size])

    @cached_property
    def starts(self) -> Index:
        """(B,) the sorted position at which each block begins."""
        return np.concatenate([[0], np.cumsum(self.sizes)[:-1]])

    @cached_property
    def wide(self) -> tuple[slice, ...]:
        """The sorted positions of each block with its own matrix product."""
        return tuple(
            slice(int(start), int(start + size))
            for start, size in zip(self.starts, self.sizes, strict=True)
            if size >= WIDE
        )

    @cached_property
    def narrow(self) -> slice:
        """The sorted positions of all other columns, which share one product."""
        return slice(self.wide[-1].stop if self.wide else 0, len(self.order))

    @cached_property
    def in_order(self) -> bool:
        """Whether the caller's order is already sorted, so that nothing needs to be copied."""
        return bool((self.order == np.arange(len(self.order))).all())

    def sort(self, values: Array) -> Array:
        """(..., D) in the caller's order -> the same in sorted order."""
        return values if self.in_order else values[..., self.order]

    def unsort(self, values: Array) -> Array:
        """(..., D) in sorted order -> the caller's order."""
        if self.in_order:
            return values
        restored = np.empty_like(values)
        restored[..., self.order] = values
        return restored

    def sum_of_squares(self, values: Array) -> Array:
        """(I, D) -> (I, B), the sum of squares within each block."""
        sums = np.empty((len(values), len(self.sizes)))
        for number, block in enumerate(self.wide):
            sums[:, number] = np.einsum("id,id->i", values[:, block], values[:, block])
        skip = len(self.wide)
        if skip < len(self.sizes):
            starts = self.starts[skip:] - self.narrow.start
            sums[:, skip:] = np.add.reduceat(values[:, self.narrow] ** 2, starts, axis=1)
        return sums

    def spread(self, values: Array) -> Array:
        """(..., B) -> one value per column, or (..., 1) if there is one block."""
        if len(self.sizes) == 1:
            return values
        return np.repeat(values, self.sizes, axis=-1)

    def spread_narrow(self, values: Array) -> Array:
        """(..., B) -> one value per narrow column, without the wide blocks."""
        skip = len(self.wide)
        return np.repeat(values[..., skip:], self.sizes[skip:], axis=-1)
