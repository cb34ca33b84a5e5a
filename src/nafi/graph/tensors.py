"""What one tensor of a network is: its axes, whose neurons it reads, and what it is for.

Promises: plain data that can be written by hand, compared and saved. Everything else about a
tensor (rows, columns, its neutral value) is derived from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any

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

    @cached_property
    def groups(self) -> tuple[str, ...]:
        return tuple(f for f in self.factors if isinstance(f, str))

    def __str__(self) -> str:
        return "*".join(str(f) for f in self.factors) or "1"


# An axis is a sequence of segments: several of them where tensors were concatenated.
Axis = tuple[Segment, ...]
# An axis of size 1, which broadcasting adds and removes.
UNIT: Axis = (Segment(()),)


class Kind(StrEnum):
    """What a tensor is for.

    The names say it but for two: `weight` is also whatever no operation says more about, and
    `counter` stands for all whole numbers and masks, which are never averaged.
    """

    WEIGHT = "weight"
    BIAS = "bias"
    GAIN = "gain"
    MEAN = "mean"
    VARIANCE = "variance"
    COUNTER = "counter"


@dataclass(frozen=True)
class Layer:
    """The operation that multiplies its inputs with a weight, and how it walks over them.

    op: "linear" for all products of inputs and a matrix, else as ATen calls it: conv2d...
    stride, padding, output_padding, dilation: a number for each dimension of space; padding may
        also be "same" or "valid"
    transposed: inputs lie along axis 0 of the weight and outputs along axis 1, not the other way
    """

    op: str
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | str = ()
    output_padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Layer:
        """The inverse of `dataclasses.asdict`, from JSON's lists."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**fields)


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor is.

    axes: what each of its dimensions is made of
    reads: the axes that a product sums over: the tensor reads their neurons, and is part of those
        on its other axes
    kind: what it is for
    bias: the tensor that is added to what this one makes, if there is exactly one
    layer: how a weight meets its inputs, if one operation multiplies them with all of it
    whole_rows: whether every parent of its rows is among the rows, too. A transposed convolution
        in groups has the parent on the axis that it reads. Set by `ModelSpec`, which knows parents
    """

    axes: tuple[Axis, ...]
    reads: tuple[int, ...] = ()
    kind: Kind = Kind.WEIGHT
    bias: str | None = None
    layer: Layer | None = None
    whole_rows: bool = field(default=True, compare=False, repr=False)

    @cached_property
    def groups(self) -> frozenset[str]:
        """The groups of all its axes."""
        return self.groups_on(range(len(self.axes)))

    def groups_on(self, axes: Collection[int]) -> frozenset[str]:
        """The groups of some axes."""
        return frozenset(g for i in axes for segment in self.axes[i] for g in segment.groups)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The axes that hold neurons which it is part of, and does not read."""
        kept = (i for i in range(len(self.axes)) if i not in self.reads)
        return tuple(i for i in kept if self.groups_on([i]))

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """The axes along which its rows run, if its rows are whole neurons."""
        if not self.rows or not self.whole_rows:
            return ()
        return tuple(i for i in range(len(self.axes)) if i not in self.rows)

    @property
    def row_axes(self) -> tuple[Axis, ...]:
        """What its rows are made of."""
        return tuple(self.axes[i] for i in self.rows)

    @property
    def neutral(self) -> float:
        """What a neuron that nobody owns has here: a variance of zero would blow up its inputs."""
        return 1.0 if self.kind is Kind.VARIANCE else 0.0

    def class_axis(self, classes: int) -> int | None:
        """The axis that is the classes, if the tensor belongs to a layer that ends in them."""
        if self.rows:
            return None
        candidates = (
            i for i in range(len(self.axes)) if i not in self.reads and not self.groups_on([i])
        )
        sizes = ((i, sum(segment.size({}) for segment in self.axes[i])) for i in candidates)
        return next((index for index, size in sizes if size == classes), None)

    def shape(self, widths: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape at these widths."""
        return tuple(sum(segment.size(widths) for segment in axis) for axis in self.axes)


def tensors_to_dict(tensors: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Plain data for JSON, a table for each thing that is known of tensors.

    The first two tables are all that version 0.1.0 wrote, and it reads these.
    """
    items = tensors.items()
    return {
        "axes": {n: [[list(s.factors) for s in axis] for axis in t.axes] for n, t in items},
        "consumed": sorted([n, axis] for n, t in items for axis in t.reads),
        "kinds": {n: t.kind.value for n, t in items},
        "biases": {n: t.bias for n, t in items if t.bias is not None},
        "layers": {n: asdict(t.layer) for n, t in items if t.layer is not None},
    }


def tensors_from_dict(data: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """The inverse of `tensors_to_dict`; what is not known of kinds and biases is guessed."""
    axes = {
        n: tuple(tuple(Segment(tuple(f)) for f in a) for a in t) for n, t in data["axes"].items()
    }
    reads: dict[str, list[int]] = {}
    for name, axis in sorted(data.get("consumed", [])):
        reads.setdefault(name, []).append(int(axis))
    kinds = {name: Kind(kind) for name, kind in data.get("kinds", {}).items()}
    biases = data.get("biases", {name: bias_by_name(name, axes) for name in axes})
    layers = {name: Layer.from_dict(layer) for name, layer in data.get("layers", {}).items()}
    return {
        name: TensorSpec(
            axes_here,
            tuple(reads.get(name, ())),
            kinds.get(name, kind_by_name(name, len(axes_here))),
            biases.get(name),
            layers.get(name),
        )
        for name, axes_here in axes.items()
    }


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


# --------------------------------------------------------- where nothing is stated but axes

_BY_NAME = {
    "running_mean": Kind.MEAN,
    "running_var": Kind.VARIANCE,
    "num_batches_tracked": Kind.COUNTER,
    "position_ids": Kind.COUNTER,
    "weight_g": Kind.GAIN,
}


def kind_by_name(name: str, rank: int) -> Kind:
    """What a tensor of which only the axes are known is for, going by torch's names.

    For specs of version 0.1.0 and those written by hand; this and `bias_by_name` are the only
    places that look at names.
    """
    attribute = name.rpartition(".")[2]
    if attribute in _BY_NAME:
        return _BY_NAME[attribute]
    if attribute.startswith("bias") or attribute.endswith("bias"):
        return Kind.BIAS
    return Kind.GAIN if attribute == "weight" and rank == 1 else Kind.WEIGHT


def bias_by_name(name: str, tensors: Collection[str]) -> str | None:
    """The bias of a tensor, if there is one where torch has it."""
    path, _, attribute = name.rpartition(".")
    bias = f"{path}.{attribute.replace('weight', 'bias')}".removeprefix(".")
    return bias if bias != name and bias in tensors else None
