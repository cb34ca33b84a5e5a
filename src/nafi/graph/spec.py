"""The nouns: which axes of a network's tensors carry which neurons.

Hides: nothing; plain data that can be written by hand, printed and saved.
Promises: stated in one direction, from tensors to groups; everything else is derived from it, so
no two tables can disagree. Offsets follow from sizes, so they survive a change of widths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from nafi.errors import SpecError

# The name of a group, or the size of something that stays in its order.
Factor = str | int


@dataclass(frozen=True)
class Segment:
    """A stretch of an axis: a product of groups and fixed sizes, the outermost first.

    Channels flattened with 5 x 5 places are ("conv2", 25); heads of 8 are ("heads", 8).
    """

    factors: tuple[Factor, ...]

    def size(self, widths: Mapping[str, int]) -> int:
        return prod(widths[f] if isinstance(f, str) else f for f in self.factors)

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(f for f in self.factors if isinstance(f, str))

    def __str__(self) -> str:
        return "*".join(str(f) for f in self.factors) or "1"


# An axis is a sequence of segments: several of them where tensors were concatenated.
Axis = tuple[Segment, ...]


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
    """For every parameter and buffer the segments of every axis.

    groups: by name, in the order in which data flow through them
    axes: tensor -> its axes; tensors with several names appear once
    consumed: axes that a product sums over: the tensor reads the neurons of that axis
    pinned: what cannot be permuted, and why
    batchnorms: (layer, batchnorm) module names that can be folded into one
    folded: those that were
    aliases: other names of tensors in `axes`
    example_inputs: what the spec was derived with; not saved
    """

    groups: Mapping[str, NeuronGroup]
    axes: Mapping[str, tuple[Axis, ...]]
    consumed: frozenset[Place] = frozenset()
    pinned: tuple[Pinned, ...] = ()
    batchnorms: tuple[tuple[str, str], ...] = ()
    folded: tuple[tuple[str, str], ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    example_inputs: tuple[Any, ...] | None = field(default=None, compare=False, repr=False)

    @property
    def widths(self) -> dict[str, int]:
        return {name: group.width for name, group in self.groups.items()}

    def __str__(self) -> str:
        """A line a group: its name, its width and the tensors that hold it."""
        lines = [
            f"{name}: {group.width} in {', '.join(self.tensors(name))}"
            for name, group in self.groups.items()
        ]
        return "\n".join(lines) or "no groups"

    def places(self, group: str) -> Iterator[Place]:
        """Every axis that carries neurons of the group."""
        for tensor, axes in self.axes.items():
            for index, axis in enumerate(axes):
                if any(group in segment.groups for segment in axis):
                    yield Place(tensor, index)

    def tensors(self, group: str) -> list[str]:
        """Every tensor with neurons of the group."""
        return list(dict.fromkeys(place.tensor for place in self.places(group)))

    def shape(self, tensor: str, widths: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """The shape of a tensor at the given widths, or at those of the spec."""
        known = self.widths | dict(widths or {})
        return tuple(sum(segment.size(known) for segment in axis) for axis in self.axes[tensor])

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
        """The spec at the widths that a state dict of the same architecture has."""
        known: dict[str, int] = {}
        sizes = [
            (axis, state[name].shape[index])
            for name, axes in self.axes.items()
            if name in state and state[name].ndim == len(axes)
            for index, axis in enumerate(axes)
        ]
        found = True
        while found and len(known) < len(self.groups):
            found = False
            for axis, size in sizes:
                unknown = {g for segment in axis for g in segment.groups} - set(known)
                if len(unknown) == 1:
                    (group,) = unknown
                    width = _solve(axis, group, known, size)
                    if width is not None:
                        known[group] = width
                        found = True
        fitted = self.resized(known)
        fitted.check_shapes(state)
        return fitted

    def group(self, name: str) -> NeuronGroup:
        """Look a group up, or say which there are."""
        if name not in self.groups:
            known = ", ".join(self.groups) or "none"
            raise SpecError(f"there is no group {name!r}; groups: {known}")
        return self.groups[name]

    def pin(self, *names: str, reason: str = "pinned by hand") -> ModelSpec:
        """The spec without some groups, which stay as they are; children of theirs go with them."""
        gone = {name for name in names if self.group(name)}
        gone |= {name for name, group in self.groups.items() if group.parent in gone}
        widths = self.widths
        pinned = list(self.pinned)
        axes: dict[str, tuple[Axis, ...]] = {}
        for tensor, old in self.axes.items():
            new: list[Axis] = []
            for index, axis in enumerate(old):
                segments = []
                for segment in axis:
                    if gone & set(segment.groups):
                        pinned.append(Pinned(tensor, index, segment.size(widths), reason))
                    fixed = [widths[f] if f in gone else f for f in segment.factors]
                    segments.append(Segment(merge_fixed(fixed)))
                new.append(tuple(segments))
            axes[tensor] = tuple(new)
        groups = {name: group for name, group in self.groups.items() if name not in gone}
        return replace(self, groups=groups, axes=axes, pinned=tuple(pinned))

    def coverage(self, state: Mapping[str, Tensor]) -> float:
        """The share of all parameters that lie in tensors with at least one group."""
        total = covered = 0
        for tensor, axes in self.axes.items():
            if not holds_numbers(state[tensor]):
                continue
            total += state[tensor].numel()
            if any(segment.groups for axis in axes for segment in axis):
                covered += state[tensor].numel()
        return covered / total if total else 0.0

    def check_shapes(self, state: Mapping[str, Tensor]) -> None:
        """Refuse a state dict whose tensors are not those of the spec."""
        if not isinstance(state, Mapping):
            found = type(state).__name__
            raise SpecError(f"expected a state dict, found {found}; write model.state_dict()")
        missing = [name for name in self.axes if name not in state]
        if missing:
            raise SpecError(f"the state dict lacks {', '.join(missing)}, which the spec describes")
        extra = [name for name in state if name not in self.axes and name not in self.aliases]
        if extra:
            raise SpecError(f"the spec says nothing of {', '.join(extra)}")
        for name in self.axes:
            shape, expected = tuple(state[name].shape), self.shape(name)
            if shape != expected:
                raise SpecError(f"{name}: found shape {shape}, expected {expected} from the spec")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back."""
        return {
            "groups": {
                name: {"width": g.width, "parent": g.parent, "rigid": g.rigid}
                for name, g in self.groups.items()
            },
            "axes": {
                tensor: [[list(segment.factors) for segment in axis] for axis in axes]
                for tensor, axes in self.axes.items()
            },
            "consumed": sorted([place.tensor, place.axis] for place in self.consumed),
            "pinned": [[p.tensor, p.axis, p.size, p.reason, p.op] for p in self.pinned],
            "batchnorms": [list(pair) for pair in self.batchnorms],
            "folded": [list(pair) for pair in self.folded],
            "aliases": dict(self.aliases),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelSpec:
        """The inverse of `to_dict`, and the way to write a spec by hand."""
        try:
            groups = {name: NeuronGroup(name, **fields) for name, fields in data["groups"].items()}
            axes = {
                tensor: tuple(tuple(Segment(tuple(f)) for f in axis) for axis in axes)
                for tensor, axes in data["axes"].items()
            }
            spec = cls(
                groups,
                axes,
                frozenset(Place(t, a) for t, a in data.get("consumed", [])),
                tuple(Pinned(*p) for p in data.get("pinned", [])),
                tuple((layer, norm) for layer, norm in data.get("batchnorms", [])),
                tuple((layer, norm) for layer, norm in data.get("folded", [])),
                dict(data.get("aliases", {})),
            )
            for group in groups.values():
                if group.parent is not None and group.parent not in groups:
                    raise SpecError(f"group {group.name} has an unknown parent {group.parent!r}")
        except KeyError as error:
            raise SpecError(f"this is not a ModelSpec: it lacks {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise SpecError(f"this is not a ModelSpec: {error}") from None
        for tensor, tensor_axes in axes.items():
            for axis in tensor_axes:
                for segment in axis:
                    unknown = set(segment.groups) - set(groups)
                    if unknown:
                        raise SpecError(f"{tensor} refers to unknown groups {sorted(unknown)}")
        return spec


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


def merge_fixed(factors: list[Factor]) -> tuple[Factor, ...]:
    """Neighbouring fixed sizes become one; those of 1 go."""
    merged: list[Factor] = []
    for factor in factors:
        if isinstance(factor, int):
            if factor == 1:
                continue
            if merged and isinstance(merged[-1], int):
                merged[-1] *= factor
                continue
        merged.append(factor)
    return tuple(merged)
