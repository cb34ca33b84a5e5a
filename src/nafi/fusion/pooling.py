"""Merged layers whose members each know their neurons with a precision of their own.

Hides: how weights of any layer become matrices. Promises: what `refit` does with inputs that the
server has, from sums of clients over inputs that it has not: the posterior mean of METHOD's
section 6, about the merged weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nafi.fusion.layer_sums import owned_outputs
from nafi.fusion.networks import Networks
from nafi.fusion.recording import written_axes
from nafi.fusion.statistics import LayerStatistics, pooled_fit
from nafi.graph import (
    Inputs,
    ModelSpec,
    Placements,
    Product,
    copy_network,
    lift,
    named_tensors,
    watch,
)


def pool_layers(
    networks: Networks,
    placements: Sequence[Placements],
    model: nn.Module,
    spec: ModelSpec,
    inputs: Inputs,
    sums: Mapping[str, Sequence[LayerStatistics]],
    *,
    ridge: float,
) -> None:
    """Fit merged layers, in place, to what each member computes on its own inputs.

    model, spec: merged; below the layers to fit it is the same as every client's network
    inputs: any on which it runs; sums: weight -> of what its layer reads at each client; clients
    count as their sums do, times their weights in a merge

    Cost: K^3 / 3 for a layer with K inputs and every set of clients that own a neuron in it; memory
    8 S K^2 bytes.
    """
    members = [
        _matrices(networks, placements, s, model, spec, inputs, sums)
        for s in range(len(networks.states))
    ]

    def visit(product: Product) -> None:
        if product.name in sums:
            _pool(product, model, spec, [m[product.name] for m in members], sums, ridge)

    watch(model, inputs, visit)


@dataclass(frozen=True, eq=False)
class _Member:
    """A client's layer: weights (B, K, N), biases and who owns an output, (B, N); its weight."""

    weights: Tensor
    bias: Tensor
    owned: Tensor
    share: Tensor


def _matrices(
    networks: Networks,
    placements: Sequence[Placements],
    index: int,
    model: nn.Module,
    spec: ModelSpec,
    inputs: Inputs,
    names: Mapping[str, object],
) -> dict[str, _Member]:
    """A client's weights where its neurons went, as its layers multiply with them."""
    own, places, state = networks.specs[index], placements[index], networks.states[index]
    lifted = copy_network(model)
    tensors = named_tensors(lifted)
    for name in names:
        for part in filter(None, (name, own.tensors[name].bias)):
            tensors[part].detach().copy_(lift(state[part], part, own, places))
    members: dict[str, _Member] = {}

    def visit(product: Product) -> None:
        name = product.name
        where = written_axes(product, spec) if name in names else None
        if where is None:
            return
        positions, present = where[1], owned_outputs(where, own, places)
        bias = spec.tensors[name].bias
        shifts = (
            torch.zeros(positions.shape) if bias is None else tensors[bias].flatten()[positions]
        )
        share = networks.clients.weights_of(own.tensors[name])[index]
        members[name] = _Member(
            product.weights.double().clone(),
            shifts.detach().double(),
            present,
            torch.as_tensor(share, dtype=torch.float64).mean(),
        )

    watch(lifted, inputs, visit)
    return members


def _pool(
    product: Product,
    model: nn.Module,
    spec: ModelSpec,
    members: Sequence[_Member],
    sums: Mapping[str, Sequence[LayerStatistics]],
    ridge: float,
) -> None:
    """Fit one layer while the network runs."""
    name = product.name
    bias = spec.tensors[name].bias
    where = written_axes(product, spec)
    assert where is not None
    merged = product.weights.double()
    vector = None if bias is None else named_tensors(model)[bias].detach()
    shifts = torch.zeros(where[1].shape) if vector is None else vector.flatten()[where[1]]
    parts = [
        _lacking(of_client, member, merged, shifts.double())
        for of_client, member in zip(sums[name], members, strict=True)
    ]
    owned = torch.stack([member.owned for member in members])
    change, shift = pooled_fit(parts, owned, ridge=ridge, with_bias=bias is not None)
    product.replace((merged + change).to(product.weights.dtype))
    if vector is not None:
        vector.view(-1)[where[1].flatten()] += shift.flatten().to(vector.dtype)


def _lacking(
    sums: LayerStatistics, member: _Member, merged: Tensor, shifts: Tensor
) -> LayerStatistics:
    """What the merged layer lacks at a client, by the client's weight."""
    lacking = sums.towards(member.weights - merged, member.bias - shifts)
    return lacking.scaled(float(member.share))


def bounded_sums(sums: Sequence[LayerStatistics], most: float) -> list[LayerStatistics]:
    """Sums of clients of which none counts for more than it may.

    most: the largest second moment of an input, as a multiple of the median over clients; a client
    with larger ones counts for less
    """
    sizes = torch.stack([_size(each) for each in sums])
    limit = most * sizes.median()
    shares = torch.where(sizes > limit, limit / sizes.clamp(min=1e-300), 1.0)
    return [each.scaled(share) for each, share in zip(sums, shares.tolist(), strict=True)]


def _size(sums: LayerStatistics) -> Tensor:
    return sums.gram.diagonal(dim1=1, dim2=2).sum() / sums.count[0]
