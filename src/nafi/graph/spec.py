"""The nouns: which axes of a network's tensors carry which neurons.

Promises: plain data that can be written by hand, printed and saved. Stated in one direction, from
tensors to groups; everything else is derived from it, so no two tables can disagree. Offsets
follow from sizes, so they survive a change of widths.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from nafi.errors import SpecError, few
from nafi.graph.blocks import Block, blocks
from nafi.graph.inputs import Inputs
from nafi.graph.tensors import (
    UNIT,
    Axis,
    Segment,
    TensorSpec,
    merge_fixed,
    tensors_from_dict,
    tensors_to_dict,
)


@dataclass(frozen=True)
class NeuronGroup:
    """Neurons that may be permuted without changing the network.

    parent: the group within each of whose members this one has an order of its own (the inner
        axis of attention heads); None for a group with one order
    rigid: the operation for which a change of width would change the function, even if the new
        neurons are zero (a mean over the neurons); None where the width is free
    """

    name: str
    width: int
    parent: str | None = None
    rigid: str | None = None


@dataclass(frozen=True)
class Pinned:
    """An axis, or part of one, that stays as it is. `op` is set where a rule gave up."""

    tensor: str
    axis: int
    size: int
    reason: str
    op: str | None = None


@dataclass(frozen=True)
class Place:
    """A group within one axis of a tensor."""

    tensor: str
    axis: int


@dataclass(frozen=True)
class ModelSpec:
    """Every parameter and buffer of a network, and the neurons that they are made of.

    groups: by name, in the order in which data flow through them
    tensors: by name, what each is; tensors with several names appear once
    pinned: what cannot be permuted, and why
    batchnorms: (layer, batchnorm) module names that can be folded into one
    folded: those that were
    aliases: other names of tensors in `tensors`
    example_inputs: what the spec was derived with; not saved
    """

    groups: Mapping[str, NeuronGroup]
    tensors: Mapping[str, TensorSpec]
    pinned: tuple[Pinned, ...] = ()
    batchnorms: tuple[tuple[str, str], ...] = ()
    folded: tuple[tuple[str, str], ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    example_inputs: Inputs | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        tensors = {name: self._with_parents(tensor) for name, tensor in self.tensors.items()}
        object.__setattr__(self, "tensors", tensors)

    def _with_parents(self, tensor: TensorSpec) -> TensorSpec:
        """The tensor, told whether the parents of its rows are among them."""
        held = tensor.groups_on(tensor.rows)
        parents = {self.groups[g].parent for g in held if g in self.groups} - {None}
        whole = parents <= held
        return tensor if whole == tensor.whole_rows else replace(tensor, whole_rows=whole)

    # ------------------------------------------------------------------ derived from the tensors

    @cached_property
    def widths(self) -> dict[str, int]:
        """Group -> width."""
        return {name: group.width for name, group in self.groups.items()}

    @cached_property
    def axes(self) -> Mapping[str, tuple[Axis, ...]]:
        """Tensor -> its axes."""
        return {name: tensor.axes for name, tensor in self.tensors.items()}

    @cached_property
    def consumed(self) -> frozenset[Place]:
        """All axes whose neurons a tensor reads."""
        tensors = self.tensors.items()
        return frozenset(Place(name, axis) for name, tensor in tensors for axis in tensor.reads)

    @cached_property
    def _places(self) -> dict[str, list[Place]]:
        places: dict[str, list[Place]] = {}
        for name, tensor in self.tensors.items():
            for index in range(len(tensor.axes)):
                for group in tensor.groups_on([index]):
                    places.setdefault(group, []).append(Place(name, index))
        return places

    @cached_property
    def _children(self) -> dict[str, list[str]]:
        children: dict[str, list[str]] = {}
        for name, group in self.groups.items():
            if group.parent is not None:
                children.setdefault(group.parent, []).append(name)
        return children

    @cached_property
    def blocks(self) -> Mapping[str, tuple[Block, ...]]:
        """Tensor -> its blocks, in the order of its memory."""
        return {name: tuple(blocks(t.axes, self.widths)) for name, t in self.tensors.items()}

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape(self.widths) for name, tensor in self.tensors.items()}

    def __str__(self) -> str:
        """A line a group: its name, its width and the tensors that hold it."""
        lines = [
            f"{name}: {group.width} in {', '.join(self.tensors_of(name))}"
            for name, group in self.groups.items()
        ]
        return "\n".join(lines) or "no groups"

    def places(self, group: str) -> tuple[Place, ...]:
        """Every axis that carries neurons of the group."""
        return tuple(self._places.get(group, ()))

    def tensors_of(self, group: str) -> list[str]:
        """Every tensor with neurons of the group."""
        return list(dict.fromkeys(place.tensor for place in self.places(group)))

    def children(self, group: str) -> list[str]:
        """The groups that have an order of their own within each member of this one."""
        return list(self._children.get(group, ()))

    def tensor(self, name: str) -> TensorSpec:
        """What the tensor of this name is, be it one of several names."""
        return self.tensors[self.aliases.get(name, name)]

    def bias_of(self, name: str) -> str | None:
        """The bias that has a number for each row of a tensor, if there is one.

        Narrower than `TensorSpec.bias`: the output layer has no rows, and the rows of a transposed
        convolution in groups are not whole.
        """
        tensor = self.tensors[name]
        bias = self.tensors.get(tensor.bias) if tensor.bias is not None else None
        if bias is None or not tensor.rows:
            return None
        wide = tuple(axis for axis in bias.axes if axis != UNIT)
        return tensor.bias if wide == tensor.row_axes else None

    @cached_property
    def biases(self) -> frozenset[str]:
        """The tensors that are the bias of another one's rows."""
        return frozenset(bias for bias in map(self.bias_of, self.tensors) if bias is not None)

    @property
    def foldable(self) -> dict[tuple[str, str], str]:
        """For each pair of `batchnorms`, the weight of the layer that it would be folded into."""
        return {(layer, norm): f"{layer}.weight" for layer, norm in self.batchnorms}

    def shape(self, tensor: str, widths: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """The shape of a tensor at the given widths, or at those of the spec."""
        if not widths:
            return self._shapes[tensor]
        return self.tensors[tensor].shape(self.widths | dict(widths))

    def resized(self, widths: Mapping[str, int]) -> ModelSpec:
        """The same spec at other widths."""
        if not isinstance(widths, Mapping):
            raise SpecError(f"widths: found {type(widths).__name__}, expected group -> width")
        for name, width in widths.items():
            self.group(name)
            if isinstance(width, bool) or not isinstance(width, Integral) or width < 1:
                raise SpecError(
                    f"width of group {name}: found {width!r}, expected a whole number of at least 1"
                )
        groups = {
            name: replace(group, width=int(widths.get(name, group.width)))
            for name, group in self.groups.items()
        }
        return replace(self, groups=groups)

    def fitted(self, state: Mapping[str, Tensor]) -> ModelSpec:
        """The spec at the widths that a state dict of the same architecture has.

        Where only a product of widths is known, such as heads times head width, those that are
        least likely to differ keep the width of the spec: rigid groups, then groups within others.
        """
        known: dict[str, int] = {}
        if not all(name in state and self.shape(name) == state[name].shape for name in self.axes):
            sizes = self._axis_sizes(state)
            for group in sorted(self.groups.values(), key=_may_differ):
                _solve_widths(sizes, known)
                known.setdefault(group.name, group.width)
        fitted = self.resized(known)
        fitted.check_shapes(state)
        return fitted

    def _axis_sizes(self, state: Mapping[str, Tensor]) -> list[tuple[Axis, int]]:
        """Every axis with groups, and how long it is in a state dict."""
        return [
            (axis, state[name].shape[index])
            for name, axes in self.axes.items()
            if name in state and state[name].ndim == len(axes)
            for index, axis in enumerate(axes)
            if any(segment.groups for segment in axis)
        ]

    def group(self, name: str) -> NeuronGroup:
        """Look a group up, or say which there are."""
        if name not in self.groups:
            known = ", ".join(self.groups) or "none"
            raise SpecError(f"there is no group {name!r}; groups: {known}")
        return self.groups[name]

    def pin(self, *names: str, reason: str = "pinned by hand") -> ModelSpec:
        """The spec without some groups, which stay as they are; children of theirs go with them."""
        gone = {name for name in names if self.group(name)}
        gone |= {child for name in gone for child in self.children(name)}
        pinned = list(self.pinned)
        tensors = {}
        for name, tensor in self.tensors.items():
            axes: list[Axis] = []
            for index, axis in enumerate(tensor.axes):
                pinned += [
                    Pinned(name, index, segment.size(self.widths), reason)
                    for segment in axis
                    if gone & set(segment.groups)
                ]
                axes.append(tuple(self._without(segment, gone) for segment in axis))
            tensors[name] = replace(tensor, axes=tuple(axes))
        groups = {name: group for name, group in self.groups.items() if name not in gone}
        return replace(self, groups=groups, tensors=tensors, pinned=tuple(pinned))

    def _without(self, segment: Segment, gone: Collection[str]) -> Segment:
        """A segment in which some groups are fixed sizes."""
        fixed = [self.widths[f] if isinstance(f, str) and f in gone else f for f in segment.factors]
        return Segment(merge_fixed(fixed))

    def coverage(self, state: Mapping[str, Tensor]) -> float:
        """The share of all parameters in tensors with a group, of which nothing was given up."""
        total = covered = 0
        gaps = {pin.tensor for pin in self.pinned if pin.op is not None}
        for name, tensor in self.tensors.items():
            if holds_numbers(state[name]):
                total += state[name].numel()
                covered += state[name].numel() if tensor.groups and name not in gaps else 0
        return covered / total if total else 0.0

    def check_shapes(self, state: Mapping[str, Tensor]) -> None:
        """Refuse a state dict whose tensors are not those of the spec."""
        if not isinstance(state, Mapping):
            kind = type(state).__name__
            raise SpecError(f"expected a state dict, found {kind}; write model.state_dict()")
        missing = [name for name in self.axes if name not in state]
        if missing:
            raise SpecError(f"the state dict lacks {few(missing)}, which the network has")
        extra = [name for name in state if name not in self.axes and name not in self.aliases]
        if extra:
            raise SpecError(f"the network has no {few(extra)}")
        for name in self.axes:
            shape, expected = tuple(state[name].shape), self.shape(name)
            if shape != expected:
                raise SpecError(f"{name}: found shape {shape}, the network has {expected}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back."""
        return {
            "groups": {
                name: {"width": g.width, "parent": g.parent, "rigid": g.rigid}
                for name, g in self.groups.items()
            },
            **tensors_to_dict(self.tensors),
            "pinned": [[p.tensor, p.axis, p.size, p.reason, p.op] for p in self.pinned],
            "batchnorms": [list(pair) for pair in self.batchnorms],
            "folded": [list(pair) for pair in self.folded],
            "aliases": dict(self.aliases),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelSpec:
        """The inverse of `to_dict`, and the way to write a spec by hand.

        Without `kinds` and `biases`, as in version 0.1.0, these are taken from torch's names.
        """
        try:
            groups = {name: NeuronGroup(name, **fields) for name, fields in data["groups"].items()}
            tensors = tensors_from_dict(data)
            _check_groups(groups, tensors)
            return cls(
                groups,
                tensors,
                tuple(Pinned(*p) for p in data.get("pinned", [])),
                tuple((layer, norm) for layer, norm in data.get("batchnorms", [])),
                tuple((layer, norm) for layer, norm in data.get("folded", [])),
                dict(data.get("aliases", {})),
            )
        except KeyError as error:
            raise SpecError(f"this is not a ModelSpec: it lacks {error}") from None
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise SpecError(f"this is not a ModelSpec: {error}") from None


def _check_groups(groups: Mapping[str, NeuronGroup], tensors: Mapping[str, TensorSpec]) -> None:
    """Refuse what refers to groups, axes and tensors that there are not."""
    for group in groups.values():
        if not _is_size(group.width):
            raise SpecError(f"group {group.name} has the width {group.width!r}")
        if group.parent is not None and group.parent not in groups:
            raise SpecError(f"group {group.name} has an unknown parent {group.parent!r}")
    for name, tensor in tensors.items():
        unknown = tensor.groups - set(groups)
        if unknown:
            raise SpecError(f"{name} refers to unknown groups {sorted(unknown)}")
        factors = [f for axis in tensor.axes for segment in axis for f in segment.factors]
        if not all(isinstance(factor, str) or _is_size(factor) for factor in factors):
            raise SpecError(f"{name} has axes of {factors}, expected groups and sizes from 1 on")
        if any(not 0 <= axis < len(tensor.axes) for axis in tensor.reads):
            raise SpecError(f"{name} reads axes {list(tensor.reads)}, but has {len(tensor.axes)}")
        if tensor.bias is not None and tensor.bias not in tensors:
            raise SpecError(f"{name} has an unknown bias {tensor.bias!r}")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _may_differ(group: NeuronGroup) -> tuple[bool, bool]:
    """Ranks groups by how likely their width differs between networks of one architecture."""
    return group.rigid is None, group.parent is None


def _solve_widths(sizes: Sequence[tuple[Axis, int]], known: dict[str, int]) -> None:
    """Add all widths that follow from those known and from the sizes of axes."""
    progress = True
    while progress:
        progress = False
        for axis, size in sizes:
            unknown = {group for segment in axis for group in segment.groups} - set(known)
            if len(unknown) == 1:
                (group,) = unknown
                width = _solve(axis, group, known, size)
                if width is not None:
                    known[group] = width
                    progress = True


def _solve(axis: Axis, group: str, known: Mapping[str, int], size: int) -> int | None:
    """The width of a group that gives an axis this size, if there is one."""
    rest = sum(segment.size(known) for segment in axis if group not in segment.groups)
    block = sum(segment.size({**known, group: 1}) for segment in axis if group in segment.groups)
    width, remainder = divmod(size - rest, block)
    return width if width >= 1 and not remainder else None


def holds_numbers(tensor: Tensor) -> bool:
    """Whether a tensor holds weights or statistics, and not counters or positions."""
    return tensor.is_floating_point() or tensor.is_complex()


def widened(tensor: Tensor) -> Tensor:
    """A tensor of numbers in double precision."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
