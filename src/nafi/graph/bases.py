"""Bases: what may be done to neurons, beyond changing their order, without changing the network.

A group of neurons on which nothing acts one by one has no neurons to speak of, only a basis: the
residual stream of a transformer, once the gains of its normalisation are folded, and what queries
and keys, or values and outputs, exchange within a head.
Hides: how that is found out, by trying it on a disturbed copy in double precision, as specs are
checked. Promises: a map of a group's `Freedom` leaves the network's function as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor, nn

from nafi.graph.check import TOLERANCE, difference, probe_of, run
from nafi.graph.gains import Gain, fold_gains, foldable_gains
from nafi.graph.inputs import Inputs
from nafi.graph.lift import Placements, Rotated, lift
from nafi.graph.neurons import Role, Stretch, rows_first, stretches
from nafi.graph.spec import ModelSpec, holds_numbers
from nafi.graph.trace import named_tensors, with_tensors


class Freedom(StrEnum):
    """The maps of a group that leave the function as it is; each kind includes those before.

    ORDER: permutations
    MEAN: orthogonal maps that keep the mean of all neurons, as LayerNorm asks
    ROTATION: all orthogonal maps
    PAIR: all invertible maps A of one of the two sides that meet, with A^-T of the other
    """

    ORDER = "order"
    MEAN = "mean"
    ROTATION = "rotation"
    PAIR = "pair"


@dataclass(frozen=True)
class Side:
    """One of the layers that meet in a group: its weight and bias, or what reads the neurons."""

    parts: tuple[Stretch, ...]

    def rows(self, state: Mapping[str, Tensor], spec: ModelSpec) -> Tensor:
        """(P, J, K) all numbers of the group's neurons here; P = 1 for a group without a parent."""
        width = spec.widths[str(self.parts[0].block.factors[self.parts[0].rows[-1]])]
        blocks = [part.block.unfold(state[part.tensor], spec.widths) for part in self.parts]
        rows = [
            rows_first(block, part.rows).reshape(-1, width, block.numel() // _count(block, part))
            for block, part in zip(blocks, self.parts, strict=True)
        ]
        return torch.cat([part.double() for part in rows], dim=-1)

    def put(self, state: dict[str, Tensor], spec: ModelSpec, rows: Tensor) -> None:
        """Write rows (P, J, K) back into a state dict whose tensors may be changed."""
        start = 0
        for part in self.parts:
            tensor = state[part.tensor]
            block = part.block.unfold(tensor, spec.widths)
            size = block.numel() // _count(block, part)
            piece = rows[..., start : start + size]
            start += size
            rest = [n for dim, n in enumerate(block.shape) if dim not in part.rows]
            outside = [block.shape[dim] for dim in part.rows]
            back = piece.reshape([*outside, *rest])
            back = back.movedim(list(range(len(outside))), list(part.rows))
            tensor[part.block.where] = back.reshape(part.block.size(spec.widths)).to(tensor.dtype)


@dataclass(frozen=True)
class Bases:
    """What is free in a network.

    gains: those to fold before anything is rotated
    freedoms: group -> what may be done to it; groups that are not here have an order
    """

    gains: tuple[Gain, ...] = ()
    freedoms: Mapping[str, Freedom] = field(default_factory=dict)

    def canonical(self, state: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
        """The tensors of a network that does the same, as far as possible without a free choice.

        Gains are one, and both sides of a pair are as large: what is left is a rotation.
        """
        fixed = fold_gains(state, spec, self.gains)
        for group, freedom in self.freedoms.items():
            if freedom is Freedom.PAIR:
                fixed = _balanced(fixed, spec, group)
        return fixed | {other: fixed[name] for other, name in spec.aliases.items()}


def free_bases(model: nn.Module, spec: ModelSpec, inputs: Inputs) -> Bases:
    """What is free in a network beyond the order of its neurons.

    Only groups are tried that a normalisation runs over and those within others: elsewhere there is
    an activation function. Cost: three runs, and up to three for each group that is tried by
    itself; those within heads are first tried all at once.
    """
    candidates = [n for n, g in spec.groups.items() if g.parent is not None or g.rigid]
    if not candidates:
        return Bases()
    generator = torch.Generator().manual_seed(0)
    probe, arguments, dtype = probe_of(model, inputs, generator)
    gains = foldable_gains(probe, spec, arguments)
    plain = named_tensors(probe)
    trial = _Trial(probe, spec, arguments, TOLERANCE[dtype], generator)
    folded = fold_gains(plain, spec, gains)
    if trial.fails(folded):
        gains, folded = (), dict(plain)
    trial.probe = with_tensors(probe, folded, spec.aliases)
    del plain, probe  # so that what was folded is not held twice
    freedoms = trial.freedoms(folded, candidates)
    free = {name: freedom for name, freedom in freedoms.items() if freedom is not Freedom.ORDER}
    needed = tuple(gain for gain in gains if spec.tensors[gain.name].groups & set(free))
    return Bases(needed, free)


@dataclass
class _Trial:
    probe: nn.Module
    spec: ModelSpec
    inputs: Inputs
    tolerance: float
    generator: torch.Generator

    def __post_init__(self) -> None:
        self.expected = run(self.probe, self.inputs)

    def fails(self, state: Mapping[str, Tensor]) -> bool:
        """Whether a network with these tensors does something else."""
        twin = with_tensors(self.probe, dict(state), self.spec.aliases)
        return difference(run(twin, self.inputs), self.expected) > self.tolerance

    def freedoms(self, state: Mapping[str, Tensor], groups: Sequence[str]) -> dict[str, Freedom]:
        """The most that may be done to each of some groups."""
        inner = [name for name in groups if self.spec.groups[name].parent is not None]
        mapped = dict(state)
        for name in inner:
            if self._is_pair(state, name):
                mapped = _mapped(mapped, self.spec, name, _stretched(self._orthogonal(name)))
        pairs = all(self._is_pair(state, name) for name in inner) and not self.fails(mapped)
        del mapped  # not held while others are tried
        together = dict.fromkeys(inner if pairs else [], Freedom.PAIR)
        return {n: together[n] if n in together else self.freedom(state, n) for n in groups}

    def _orthogonal(self, group: str) -> Tensor:
        """(P, J, J) random maps of a group, one for each member of its parent."""
        parent, width = self.spec.groups[group].parent, self.spec.widths[group]
        count = 1 if parent is None else self.spec.widths[parent]
        normal = torch.randn(count, width, width, generator=self.generator, dtype=torch.float64)
        orthogonal: Tensor = torch.linalg.qr(normal).Q
        return orthogonal

    def _is_pair(self, state: Mapping[str, Tensor], group: str) -> bool:
        """Whether two layers meet in a group, each with as many columns as it has neurons."""
        width = self.spec.widths[group]
        wide = [s.rows(state, self.spec).shape[-1] >= width for s in sides(self.spec, group, state)]
        return wide == [True, True]

    def freedom(self, state: Mapping[str, Tensor], group: str) -> Freedom:
        """The most that may be done to a group, of what was tried."""
        width, orthogonal = self.spec.widths[group], self._orthogonal(group)
        if self.fails(self._rotated(state, group, keeping_mean(orthogonal))):
            return Freedom.ORDER
        if self.fails(self._rotated(state, group, orthogonal)):
            # Of two neurons, or one, there is no such map but an order.
            return Freedom.MEAN if width > 2 else Freedom.ORDER
        stretched = _stretched(orthogonal)
        if not self._is_pair(state, group) or self.fails(
            _mapped(state, self.spec, group, stretched)
        ):
            return Freedom.ROTATION
        return Freedom.PAIR

    def _rotated(
        self, state: Mapping[str, Tensor], group: str, matrices: Tensor
    ) -> dict[str, Tensor]:
        within = self.spec.groups[group].parent is not None
        return rotate(state, self.spec, {group: Rotated(matrices if within else matrices[0])})


def rotate(
    state: Mapping[str, Tensor], spec: ModelSpec, placements: Placements
) -> dict[str, Tensor]:
    """A state dict with the bases of some groups changed."""
    result = {
        name: lift(state[name], name, spec, placements) if holds_numbers(state[name]) else tensor
        for name, tensor in ((name, state[name]) for name in spec.tensors)
    }
    return result | {other: result[name] for other, name in spec.aliases.items()}


def keeping_mean(matrix: Tensor) -> Tensor:
    """The orthogonal map (..., J, J) closest to a matrix that leaves the mean of all rows alone."""
    width = matrix.shape[-1]
    one = torch.full((width, 1), width**-0.5, dtype=matrix.dtype)
    without = torch.eye(width, dtype=matrix.dtype) - one @ one.T
    inner = without @ matrix @ without
    # The mean comes first by far, so it is mapped to itself.
    scale = 10 * torch.linalg.matrix_norm(inner, 2)[..., None, None] + 1
    return closest_rotation(inner + scale * (one @ one.T))


def closest_rotation(matrix: Tensor) -> Tensor:
    """The orthogonal map (..., J, J) closest to a matrix: Procrustes."""
    left, _, right = torch.linalg.svd(matrix)
    closest: Tensor = left @ right
    return closest


def sides(spec: ModelSpec, group: str, state: Mapping[str, Tensor]) -> list[Side]:
    """The layers that meet in a group, each with its bias; all of what they say of it."""
    weight_of = {t.bias: name for name, t in spec.tensors.items() if t.bias is not None}
    found: dict[tuple[str, int, bool], list[Stretch]] = {}
    numbers = [name for name in spec.tensors if holds_numbers(state[name])]
    for part in stretches(spec, group, numbers):
        axis = part.block.axes[part.rows[-1]]
        start = int(part.block.where[axis].start)
        key = (weight_of.get(part.tensor, part.tensor), start, part.role is Role.OUTGOING)
        found.setdefault(key, []).append(part)
    return [Side(tuple(parts)) for parts in found.values()]


def _stretched(orthogonal: Tensor) -> Tensor:
    """Maps far from orthogonal, but well conditioned."""
    width = orthogonal.shape[-1]
    return orthogonal * torch.linspace(0.5, 2.0, width, dtype=orthogonal.dtype)


def _mapped(
    state: Mapping[str, Tensor], spec: ModelSpec, group: str, matrices: Tensor
) -> dict[str, Tensor]:
    """A state dict with A = (P, J, J) on one side of a pair and A^-T on the other."""
    one, two = sides(spec, group, state)
    mapped = _writable(state, (one, two))
    one.put(mapped, spec, matrices @ one.rows(state, spec))
    two.put(mapped, spec, torch.linalg.inv(matrices).mT @ two.rows(state, spec))
    return mapped


def _writable(state: Mapping[str, Tensor], written: Sequence[Side]) -> dict[str, Tensor]:
    """The same, with copies of those tensors that some sides write to."""
    touched = {part.tensor for side in written for part in side.parts}
    return {name: t.clone() if name in touched else t for name, t in state.items()}


def _balanced(state: Mapping[str, Tensor], spec: ModelSpec, group: str) -> dict[str, Tensor]:
    """A state dict in which both sides of a pair have the same singular values.

    With rows Q and K (J, ...) and their circuit Q^T K = U S V^T, they become S^1/2 U^T, S^1/2 V^T.
    """
    one, two = sides(spec, group, state)
    left, right = (torch.linalg.qr(side.rows(state, spec).mT) for side in (one, two))
    u, s, v = torch.linalg.svd(left.R @ right.R.mT)
    root = s.sqrt()[..., None]
    balanced = _writable(state, (one, two))
    one.put(balanced, spec, root * (left.Q @ u).mT)
    two.put(balanced, spec, root * (right.Q @ v.mT).mT)
    return balanced


def _count(block: Tensor, part: Stretch) -> int:
    """How many neurons a block has."""
    count = 1
    for dim in part.rows:
        count *= block.shape[dim]
    return count
