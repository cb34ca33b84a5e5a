"""Fused tensors from the clients' tensors and the places of their neurons.

Hides: that clients own different neurons. Promises: every number is the weighted mean over the
clients that own the neuron it is part of, where an input that such a client does not have counts
as a true zero: the client's function has no such path.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nafi.errors import InputError
from nafi.fusion.clients import Array, Clients
from nafi.fusion.networks import Networks
from nafi.graph.lift import Placements, lift, lifted_rows, row_axes, whole_rows
from nafi.graph.spec import ModelSpec, Place, holds_numbers


def merge(
    networks: Networks,
    placements: Sequence[Placements],
    *,
    restore_norm: bool,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Average all clients' tensors where their neurons went.

    Tensors that end in the classes are weighted by class shares, all others by model weights.
    restore_norm: scale every merged neuron's incoming weights, and the bias that goes with them, so
        that their norm is the mean norm of its members: averaging vectors that differ shrinks them.
    names: the tensors to average; all of them by default

    Cost: every tensor once for each client; memory: a few copies of the largest tensor.
    """
    spec, clients = networks.spec, networks.clients
    check_classes(clients, spec)
    merged: dict[str, Tensor] = {}
    shrunk: dict[str, Tensor] = {}
    for name in spec.axes if names is None else names:
        dtype = networks.states[0][name].dtype
        if not holds_numbers(networks.states[0][name]):
            merged[name] = _first_owner(networks, placements, name)
            continue
        sums = _Sums()
        for s, weight in enumerate(weights_of(clients, name, spec)):
            sums.add(networks, placements[s], name, s, torch.as_tensor(weight))
        mean = sums.mean(neutral=1.0 if name.endswith("running_var") else 0.0)
        if restore_norm and sums.rest:
            factor = sums.shrinkage(mean)
            mean /= factor
            bias = bias_of(name, spec)
            shrunk |= {bias: factor} if bias is not None else {}
        merged[name] = mean.to(dtype)
    for bias, factor in shrunk.items():
        if bias not in merged:
            continue
        scaled = merged[bias] / factor.reshape(merged[bias].shape)
        merged[bias] = scaled.to(merged[bias].dtype)
    return merged


@dataclass
class _Sums:
    """Weighted sums over clients of one tensor, of who owns its rows, and of the rows' norms."""

    values: Tensor | None = None
    owners: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    norms: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    rest: list[int] = field(default_factory=list)

    def add(
        self, networks: Networks, placements: Placements, name: str, index: int, weight: Tensor
    ) -> None:
        spec, tensor = networks.specs[index], networks.states[index][name]
        wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
        lifted = lift(wide, name, spec, placements)
        rest = columns_of(name, spec)
        if rest:
            self.norms = self.norms + weight * _norm(lifted, rest)
        lifted *= weight
        self.values = lifted if self.values is None else self.values.add_(lifted)
        self.owners = self.owners + weight * lifted_rows(name, spec, placements)
        self.rest = rest

    def mean(self, neutral: float) -> Tensor:
        owned = self.owners > 0
        assert self.values is not None
        found = self.values.div_(torch.where(owned, self.owners, 1.0))
        return torch.where(owned, found, neutral) if neutral else found

    def shrinkage(self, mean: Tensor) -> Tensor:
        """Each merged row's norm, relative to the mean norm of its members."""
        members = self.norms / torch.where(self.owners > 0, self.owners, 1.0)
        found = _norm(mean, self.rest)
        return torch.where((members > 0) & (found > 0), found / members, 1.0)


def _norm(tensor: Tensor, axes: list[int]) -> Tensor:
    return tensor.abs().square().sum(dim=axes, keepdim=True).sqrt()


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


def _first_owner(networks: Networks, placements: Sequence[Placements], name: str) -> Tensor:
    """Counters and positions are not averaged: each comes from the first client that has it."""
    found: Tensor | None = None
    for index in reversed(range(len(placements))):
        spec = networks.specs[index]
        lifted = lift(networks.states[index][name], name, spec, placements[index])
        owned = lifted_rows(name, spec, placements[index]) > 0
        found = lifted if found is None else torch.where(owned, lifted, found)
    assert found is not None
    return found


def class_axis(name: str, spec: ModelSpec, classes: int) -> int | None:
    """The axis of a tensor that is the classes, for the layer that a network ends in."""
    if row_axes(name, spec):
        return None
    for index, axis in enumerate(spec.axes[name]):
        fixed = not any(segment.groups for segment in axis)
        size = sum(segment.size({}) for segment in axis) if fixed else 0
        if fixed and size == classes and Place(name, index) not in spec.consumed:
            return index
    return None


def check_classes(clients: Clients, spec: ModelSpec) -> None:
    """Refuse class counts that no layer of the network ends in."""
    if clients.class_counts is not None:
        check_class_axis(clients.class_counts.shape[1], spec)


def check_class_axis(classes: int, spec: ModelSpec) -> None:
    """Refuse a number of classes that no layer of the network has."""
    if not any(class_axis(name, spec, classes) is not None for name in spec.axes):
        raise InputError(
            f"class_counts: found {classes} classes, but no layer of the network has as many "
            "outputs; give a column for every output, in their order"
        )


def weights_of(clients: Clients, name: str, spec: ModelSpec) -> Array:
    """(S, ...) the weight of each client's tensor, broadcast along the classes if it has them."""
    shares = clients.class_weights
    axis = None if shares is None else class_axis(name, spec, shares.shape[1])
    form = [len(clients)] + [1] * len(spec.axes[name])
    if shares is None or axis is None:
        return clients.model_weights.reshape(form)
    form[axis + 1] = shares.shape[1]
    return shares.reshape(form)
