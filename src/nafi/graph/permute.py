"""Permuting the neurons of a network.

Hides: where each group sits in which tensor. Promises: `permute` returns a network that computes
the same function, its neurons in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from nafi.errors import SpecError
from nafi.graph.blocks import Block, transform
from nafi.graph.spec import ModelSpec
from nafi.graph.trace import named_tensors, unwrapped, with_tensors

Permutations = Mapping[str, Tensor]


def permute(model: nn.Module, spec: ModelSpec, permutations: Permutations) -> nn.Module:
    """A copy of the network with neuron `permutations[group][i]` in place i of each group.

    permutations: (width,) for a group; for one with a parent also (parent's width, width), where
        row p belongs to the p-th member of the parent as the given network counts them.
    """
    model = unwrapped(model)
    with torch.no_grad():
        state = permute_state(named_tensors(model), spec, permutations)
    return with_tensors(model, state, spec.aliases)


def permute_state(
    state: Mapping[str, Tensor], spec: ModelSpec, permutations: Permutations
) -> dict[str, Tensor]:
    """The same for a state dict, which is left as it was; a shared tensor keeps all its names."""
    spec.check_shapes(state)
    change = _changes(spec, permutations)
    result = {
        name: transform(state[name], axes, spec.widths, change) for name, axes in spec.axes.items()
    }
    return result | {other: result[name] for other, name in spec.aliases.items()}


def permute_in_place(model: nn.Module, spec: ModelSpec, permutations: Permutations) -> None:
    """The same for a network itself: memory for a copy of its largest tensor is enough."""
    change, tensors = _changes(spec, permutations), named_tensors(model)
    with torch.no_grad():
        for name, tensor in spec.tensors.items():
            if tensor.groups & set(permutations):
                moved = transform(tensors[name], tensor.axes, spec.widths, change)
                tensors[name].copy_(moved)


def _changes(spec: ModelSpec, permutations: Permutations) -> Callable[[Tensor, Block], Tensor]:
    """What becomes of a block."""
    known = {name: _checked(spec, name, order) for name, order in permutations.items()}

    def change(unfolded: Tensor, block: Block) -> Tensor:
        factors = block.factors
        dims = [(dim, f) for dim, f in enumerate(factors) if isinstance(f, str) and f in known]
        # Orders within a parent first: they are counted by its old positions.
        for dim, name in dims:
            if known[name].ndim == 2:
                parent = factors.index(str(spec.groups[name].parent))
                unfolded = _permute_within(unfolded, dim, parent, known[name])
        for dim, name in dims:
            if known[name].ndim == 1:
                unfolded = unfolded.index_select(dim, known[name].to(unfolded.device))
        return unfolded

    return change


def _permute_within(block: Tensor, dim: int, parent: int, orders: Tensor) -> Tensor:
    """Another order along `dim` for each index along `parent`."""
    shape = [1] * block.ndim
    shape[parent], shape[dim] = orders.shape
    index = (orders if parent < dim else orders.T).reshape(shape).to(block.device)
    return torch.take_along_dim(block, index.expand(block.shape), dim)


def _checked(spec: ModelSpec, name: str, order: Tensor) -> Tensor:
    group = spec.group(name)
    try:
        indices = torch.as_tensor(order)
        rows = indices.long() if indices.ndim == 2 else indices.long()[None]
    except (TypeError, ValueError, RuntimeError, IndexError):
        raise SpecError(f"permutation of group {name}: found {order!r}, expected numbers") from None
    within = group.parent is not None and indices.ndim == 2
    fits = indices.ndim == 1 or (within and len(rows) == spec.groups[str(group.parent)].width)
    expected = torch.arange(group.width).expand(len(rows), -1)
    if (
        not fits
        or rows.shape[1] != group.width
        or indices.is_floating_point()
        or not rows.cpu().sort(dim=1).values.equal(expected)
    ):
        raise SpecError(
            f"permutation of group {name}: expected each of 0..{group.width - 1} once, found "
            f"{indices.dtype} of shape {tuple(indices.shape)}: {indices.flatten()[:8].tolist()}"
        )
    return rows if indices.ndim == 2 else rows[0]


def random_permutations(spec: ModelSpec, generator: torch.Generator) -> dict[str, Tensor]:
    """A random order for every group, its own within each member of a parent.

    No neuron keeps its place: a test must not be passed by drawing the order that was.
    """
    orders = {}
    for name, group in spec.groups.items():
        rows = 1 if group.parent is None else spec.groups[group.parent].width
        drawn = torch.empty(rows, group.width, dtype=torch.long)
        for row in drawn:
            cycle = torch.randperm(group.width, generator=generator)
            row[cycle] = cycle.roll(1)
        orders[name] = drawn[0] if group.parent is None else drawn
    return orders
