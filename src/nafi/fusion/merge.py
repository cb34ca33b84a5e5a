"""Fused tensors from the clients' tensors and the places of their neurons.

Hides: that clients own different neurons. Promises: every number is the weighted mean over the
clients that own the neuron it is part of, where an input that such a client does not have counts
as a true zero: the client's function has no such path.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from nafi.fusion.cluster import Run, in_turn
from nafi.fusion.networks import Networks
from nafi.fusion.screen import NETWORKS_AGREE, Screen, as_real
from nafi.graph import (
    ModelSpec,
    OutputMoments,
    Placements,
    claimed_moments,
    holds_numbers,
    lift,
    lift_axes,
    lifted_rows,
    measured_moments,
    owned,
    widened,
)


def merge_tensors(
    networks: Networks,
    placements: Sequence[Placements],
    *,
    restore_norm: bool,
    names: Collection[str] | None = None,
    screen: Screen | None = None,
    parts: Sequence[Sequence[int]] | None = None,
    run: Run = in_turn,
) -> dict[str, Tensor]:
    """Average all clients' tensors where their neurons went.

    Tensors that end in the classes are weighted by class shares, all others by model weights.
    restore_norm: scale every merged neuron's incoming weights so that their norm is the mean norm
        of its members: averaging vectors that differ shrinks them. A bias is a single number, which
        averaging does not shrink.
    names: the tensors to average; all of them by default
    screen: leave out what is unusual; its `clip` must have been applied before
    parts: clients that are summed apart, by `run`; the result depends on the parts, by rounding,
        but not on where they are summed. A screen that trims sees all clients at once

    Cost: every tensor once for each client; memory: a few copies of the largest tensor, with a
    screen that trims as many as there are clients.
    """
    spec, clients = networks.spec, networks.clients
    clients.check_classes(spec)
    merged: dict[str, Tensor] = {}
    chosen = list(spec.tensors if names is None else names)
    numbers = [name for name in chosen if holds_numbers(networks.states[0][name])]
    everyone = range(len(placements))
    all_sums: Iterator[_Sums | _Trimmed]
    if screen is not None and screen.trim:
        heard = _heard(networks, placements, chosen, screen)
        all_sums = (
            _summed(_Trimmed(screen, heard), networks, placements, name, everyone)
            for name in numbers
        )
    else:
        all_sums = _summed_by_parts(networks, placements, numbers, parts or [everyone], run)
    for name in chosen:
        if name not in numbers:
            merged[name] = _first_owner(networks, placements, name)
            continue
        dtype, sums = networks.states[0][name].dtype, next(all_sums)
        mean = sums.mean(spec.tensors[name].neutral)
        if restore_norm and sums.rest:
            mean /= sums.shrinkage(mean)
        merged[name] = mean.to(dtype)
    return merged


def _summed_by_parts(
    networks: Networks,
    placements: Sequence[Placements],
    names: Sequence[str],
    parts: Sequence[Sequence[int]],
    run: Run,
) -> Iterator[_Sums]:
    """The sums of each tensor over all clients, one tensor after the other."""
    tasks = [(name, part) for name in names for part in parts]
    found = run(_part_summed, (networks, placements), tasks)
    for _ in names:
        sums = next(found)
        for _ in parts[1:]:
            sums.include(next(found))
        yield sums


def _part_summed(
    shared: tuple[Networks, Sequence[Placements]], task: tuple[str, Sequence[int]]
) -> _Sums:
    return _summed(_Sums(), *shared, *task)


def _summed(
    sums: _Some, networks: Networks, placements: Sequence[Placements], name: str, s: Sequence[int]
) -> _Some:
    """Sums of one tensor with these clients added."""
    weights = networks.clients.weights_of(networks.spec.tensors[name])
    for index in s:
        sums.add(networks, placements[index], name, index, torch.as_tensor(weights[index]))
    return sums


def _heard(
    networks: Networks, placements: Sequence[Placements], names: Sequence[str], screen: Screen
) -> Tensor:
    """(S,) which clients are heard: those whose neurons are like the ones they were matched with.

    Every layer is asked, and a client that contradicts the others in one is not heard in any.
    """
    heard = torch.ones(len(placements), dtype=torch.bool)
    for name in names:
        if not holds_numbers(networks.states[0][name]) or not networks.spec.tensors[name].columns:
            continue
        values, present = [], []
        for state, spec, places in zip(networks.states, networks.specs, placements, strict=True):
            tensor = as_real(state[name], name)
            values.append(lift(tensor, name, spec, places).flatten())
            present.append(lift(torch.ones_like(tensor), name, spec, owned(places)).flatten() > 0)
        about = screen.heard(torch.stack(values), torch.stack(present), NETWORKS_AGREE)
        if int((~(heard & about)).sum()) <= screen.cut(len(heard)):
            heard &= about
    return heard


def merged_network(
    networks: Networks,
    placements: Sequence[Placements],
    widths: Mapping[str, int],
    *,
    restore_norm: bool,
    screen: Screen | None = None,
    parts: Sequence[Sequence[int]] | None = None,
    run: Run = in_turn,
) -> nn.Module:
    """The network of what `merge_tensors` gives, its normalisation as it was merged."""
    merging = networks.merging
    state = merge_tensors(
        merging, placements, restore_norm=restore_norm, screen=screen, parts=parts, run=run
    )
    return merging.build(state, widths)


def finished_network(
    networks: Networks,
    placements: Sequence[Placements],
    widths: Mapping[str, int],
    model: nn.Module,
) -> tuple[nn.Module, ModelSpec, ModelSpec]:
    """A merged network with its normalisation put back; see `Networks.finish`."""
    return networks.merging.finish(model, widths, _output_moments(networks, placements, model))


def _output_moments(
    networks: Networks, placements: Sequence[Placements], model: nn.Module
) -> OutputMoments:
    """Means and deviations of what the layers make whose normalisation was folded.

    Measured on the probe; without one, the mean over its owners of what a neuron's own shift and
    gain say they are.
    """
    pairs = networks.merging.spec.folded
    if networks.probe is not None:
        return measured_moments(model, pairs, networks.probe)
    if not pairs:
        return {}
    claims = [claimed_moments(client, pairs) for client in networks.clients.states]
    moments = {}
    for layer, norm in pairs:
        total, owners = torch.zeros(()), torch.zeros(())
        for claim, spec, places in zip(claims, networks.specs, placements, strict=True):
            axes = spec.tensors[f"{layer}.bias".removeprefix(".")].axes
            total = total + lift_axes(torch.stack(claim[norm]), axes, spec, places)
            one = torch.ones_like(claim[norm][0])[None]
            owners = owners + lift_axes(one, axes, spec, owned(places))
        mean, deviation = total / owners.clamp(min=1)
        moments[norm] = mean, deviation
    return moments


@dataclass
class _Sums:
    """Weighted sums over clients of one tensor, of who owns its rows, and of the rows' norms."""

    values: Tensor | None = None
    owners: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    norms: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    rest: tuple[int, ...] = ()

    def add(
        self, networks: Networks, placements: Placements, name: str, index: int, weight: Tensor
    ) -> None:
        spec, tensor = networks.specs[index], networks.states[index][name]
        lifted = lift(widened(tensor), name, spec, placements)
        rest = spec.tensors[name].columns
        if rest:
            self.norms = self.norms + weight * _norm(lifted, rest)
        lifted *= weight
        self.values = lifted if self.values is None else self.values.add_(lifted)
        self.owners = self.owners + weight * lifted_rows(name, spec, placements)
        self.rest = rest

    def include(self, others: _Sums) -> None:
        """Add the sums over other clients."""
        assert self.values is not None
        assert others.values is not None
        self.values += others.values
        self.owners = self.owners + others.owners
        self.norms = self.norms + others.norms

    def mean(self, neutral: float) -> Tensor:
        owned = self.owners > 0
        assert self.values is not None
        average = self.values.div_(torch.where(owned, self.owners, 1.0))
        return torch.where(owned, average, neutral) if neutral else average

    def shrinkage(self, mean: Tensor) -> Tensor:
        """Each merged row's norm, relative to the mean norm of its members."""
        members = self.norms / torch.where(self.owners > 0, self.owners, 1.0)
        norms_now = _norm(mean, self.rest)
        return torch.where((members > 0) & (norms_now > 0), norms_now / members, 1.0)


@dataclass
class _Trimmed:
    """The same, without the clients at either end of each number."""

    screen: Screen
    heard: Tensor
    values: list[Tensor] = field(default_factory=list)
    present: list[Tensor] = field(default_factory=list)
    owners: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    rest: tuple[int, ...] = ()

    def add(
        self, networks: Networks, placements: Placements, name: str, index: int, weight: Tensor
    ) -> None:
        spec, tensor = networks.specs[index], networks.states[index][name]
        whole = torch.ones(tensor.shape, dtype=torch.float64)
        self.values.append(lift(as_real(tensor, name), name, spec, placements))
        self.present.append(lift(whole, name, spec, owned(placements)) > 0)
        self.owners.append(lifted_rows(name, spec, placements) > 0)
        self.weights.append(weight * self.heard[index])
        self.rest = spec.tensors[name].columns

    def mean(self, neutral: float) -> Tensor:
        """An input that an owner does not have is still a zero, but is no vote about the others.

        An input that hardly anyone has may be an attacker's own: nothing is read from it. Weights
        are claims, so that shares are counted by heads.
        """
        present, owners, weights = map(torch.stack, (self.present, self.owners, self.weights))
        average = self.screen.mean(torch.stack(self.values), present, weights, self._cut)
        say = owners & (weights > 0)
        rows = say.expand(present.shape).sum(dim=0)
        having = (present & say).sum(dim=0)
        rare = (having < rows) & (present.sum(dim=0) <= self.screen.cut(len(present)))
        share = having / rows.clamp(min=1)
        return torch.where(rows > 0, torch.where(rare, 0.0, average * share), neutral)

    def shrinkage(self, mean: Tensor) -> Tensor:
        norms = torch.stack([_norm(value, self.rest) for value in self.values])
        members = self.screen.mean(
            norms, torch.stack(self.owners), torch.stack(self.weights), self._cut
        )
        norms_now = _norm(mean, self.rest)
        return torch.where((members > 0) & (norms_now > 0), norms_now / members, 1.0)

    @property
    def _cut(self) -> int:
        """How many may still be harmful of those that are heard."""
        return max(0, self.screen.cut(len(self.heard)) - int((~self.heard).sum()))


_Some = TypeVar("_Some", _Sums, _Trimmed)


def _norm(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    return tensor.abs().square_().sum(dim=tuple(axes), keepdim=True).sqrt()


def _first_owner(networks: Networks, placements: Sequence[Placements], name: str) -> Tensor:
    """Counters and positions are not averaged: each comes from the first client that has it."""
    result: Tensor | None = None
    for index in reversed(range(len(placements))):
        spec = networks.specs[index]
        lifted = lift(networks.states[index][name], name, spec, placements[index])
        owned = lifted_rows(name, spec, placements[index]) > 0
        result = lifted if result is None else torch.where(owned, lifted, result)
    assert result is not None
    return result
