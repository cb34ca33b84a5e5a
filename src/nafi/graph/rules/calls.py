"""What rules are written with: values, calls and the register of rules.

Hides: how an operation's arguments were traced. Promises: a rule sees values with axes under the
names of the operation's schema, and says what it knows in a handful of verbs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

from nafi.graph.atoms import (
    Axis,
    Pin,
    atoms_of,
    fixed,
    fresh,
    pin_axis,
    product,
    resolve,
    size_of,
    unify,
)
from nafi.graph.tensors import Kind, Layer
from nafi.graph.trace import Op


@dataclass(frozen=True)
class Product:
    """What a value is while a bias may still be added to it.

    weights: the parameters that inputs were multiplied with to make it
    dims: the dimensions that these made, counted from the back
    """

    weights: tuple[str, ...]
    dims: frozenset[int]


@dataclass
class Value:
    """What is known of a tensor.

    axes: one per dimension
    source: the parameter or buffer that it is a piece or a view of
    constant: all its entries are equal, so its axes restrict nothing
    boolean: a mask, which picks positions in another way than numbers do
    stack: set while it is open whether what lies along one axis is told apart
    product: set while a bias may still be added to it
    parameters: all parameters and buffers that it is made of
    fed: it depends on the inputs of the network
    """

    axes: list[Axis]
    source: str | None = None
    constant: bool = False
    boolean: bool = False
    stack: Stack | None = None
    product: Product | None = None
    parameters: frozenset[str] = frozenset()
    fed: bool = False

    @property
    def shape(self) -> list[int]:
        return [size_of(axis) for axis in self.axes]

    @property
    def parameter(self) -> str | None:
        """The parameter or buffer that it is computed from, if from nothing else."""
        return next(iter(self.parameters)) if len(self.parameters) == 1 and not self.fed else None

    @property
    def wide_dims(self) -> frozenset[int]:
        """The dimensions of more than one position, counted from the back."""
        return frozenset(d - len(self.axes) for d, n in enumerate(self.shape) if n > 1)


class Stack(ABC):
    """Several tensors along one axis, each of which may turn out to have axes of its own.

    `qkv.view(batch, 3, heads, width)` is such a tensor if it is taken apart along the 3, and is not
    if it is used as one. An axis is known by identity, which survives a change of their order.
    """

    along: Axis
    joined: bool = False

    @abstractmethod
    def part(self, axes: list[Axis], index: int) -> list[Axis]:
        """The axes of the tensor at one index, for a value with these axes but for `along`."""

    @abstractmethod
    def join(self) -> None:
        """It is used as one tensor: whatever lies in it has the same axes."""


@dataclass
class Unfolded(Stack):
    """One axis that was viewed as several, the outermost of them few."""

    whole: Axis
    run: list[Axis]
    where: Pin
    parts: list[list[Axis]] | None = None

    def __post_init__(self) -> None:
        self.along = self.run[0]

    def part(self, axes: list[Axis], index: int) -> list[Axis]:
        if self.parts is None:
            self.parts = [
                [fresh(size_of(axis)) for axis in self.run[1:]] for _ in range(size_of(self.along))
            ]
            unify(self.whole, [s for part in self.parts for s in product(*part)], self.where)
        axes_of_part = {
            id(axis): part for axis, part in zip(self.run[1:], self.parts[index], strict=True)
        }
        return [axes_of_part.get(id(axis), axis) for axis in axes]

    def join(self) -> None:
        if not self.joined:
            unify(self.whole, product(*self.run), self.where)
        self.joined = True


@dataclass
class Ends(Stack):
    """The last states of a recurrent network, one for each layer and direction."""

    along: Axis
    unit: Axis
    units: list[Axis]
    where: Pin

    def part(self, axes: list[Axis], index: int) -> list[Axis]:
        return [self.units[index] if axis is self.unit else axis for axis in axes]

    def join(self) -> None:
        if not self.joined:
            for unit in self.units:
                unify(self.unit, unit, self.where)
        self.joined = True


@dataclass
class Findings:
    """What rules learn beside the axes, to be read when all is known.

    consumed: (parameter, axis) summed over in a product: the parameter reads these neurons
    rigid: (axis, why) a change of width would change the function even with zeros
    reduced: axes of tensors that an operation makes inside, after summing some axes out
    kinds: parameter -> what it is for; the first operation that says so is believed
    biases: parameter -> all that are added to what it makes
    layers: parameter -> all the ways in which inputs are multiplied with it
    """

    consumed: list[tuple[str, Axis]] = field(default_factory=list)
    rigid: list[tuple[Axis, str]] = field(default_factory=list)
    reduced: list[list[Axis]] = field(default_factory=list)
    kinds: dict[str, Kind] = field(default_factory=dict)
    biases: dict[str, set[str]] = field(default_factory=dict)
    layers: dict[str, set[Layer | None]] = field(default_factory=dict)


class Call:
    """One operation with its arguments as values, and the verbs that rules are written in."""

    def __init__(
        self,
        op: Op,
        arguments: dict[str, Any],
        findings: Findings,
        tensors: Mapping[str, Value],
        trained: Collection[str],
    ) -> None:
        """tensors: all parameters and buffers of the network; trained: the parameters"""
        self.op = op
        self.arguments = arguments
        self.findings = findings
        self.tensors = tensors
        self.trained = trained

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    @property
    def gave_up(self) -> Pin:
        return self.gap(f"no rule for {self.op}")

    @property
    def misfit(self) -> Pin:
        return self.gap(f"{self.op} joins axes that are cut differently")

    def gap(self, reason: str) -> Pin:
        """What is kept in its order though a better rule might let it go; users are told."""
        line = f" in {self.op.source}" if self.op.source is not None else ""
        return Pin(reason + line, str(self.op))

    def fix(self, axis: Axis, why: str | None = None) -> Axis:
        """Forbid permuting an axis, because this operation tells its positions apart."""
        pin_axis(axis, Pin(why or f"{self.op} tells its positions apart"))
        return axis

    def fixed(self, size: int) -> Axis:
        return fixed(size, Pin(f"made by {self.op}"))

    def same(self, one: Axis, two: Axis) -> None:
        """Two axes carry the same neurons, in the same order."""
        unify(one, two, self.misfit)

    def consume(self, value: Value, axis: Axis) -> None:
        """A parameter is summed over along one of its axes: it reads the neurons there."""
        reader = self.reader(value, axis)
        if reader is not None:
            self.findings.consumed.append((reader, axis))

    def reader(self, value: Value, axis: Axis) -> str | None:
        """The parameter that a value is a piece of, or the only one of its that has the axis."""
        if value.source is not None or value.fed:
            return value.source
        atoms = atoms_of([axis])
        holders = [p for p in value.parameters if atoms & atoms_of(self.tensors[p].axes)]
        return holders[0] if len(holders) == 1 else None

    def rigid(self, axis: Axis) -> None:
        """More neurons along an axis would change the result, even if they are all zero."""
        self.findings.rigid.append((axis, self.op.name))

    def kind(self, value: Value | None, kind: Kind) -> None:
        """What a parameter is for; says nothing of other values."""
        if value is not None and value.parameter is not None:
            self.findings.kinds.setdefault(value.parameter, kind)

    def kind_of(self, value: Value) -> Kind | None:
        """What a parameter is for, as far as it was said."""
        return self.findings.kinds.get(value.parameter) if value.parameter is not None else None

    def is_whole(self, value: Value) -> bool:
        """Whether a value has as many numbers as the parameter that it is computed from."""
        name = value.parameter
        return name is not None and prod(value.shape) == prod(self.tensors[name].shape)

    def is_within(self, axis: Axis) -> bool:
        """Whether an axis lies within each member of another one that may be permuted.

        Such are the widths of heads. Cutting one into pieces that differ would tie down the heads.
        """
        inner = {segment[0] for segment in resolve(axis) if segment}
        segments = (s for v in self.tensors.values() for a in v.axes for s in resolve(a))
        return any(
            atom in inner and any(outer.pinned is None for outer in segment[:place])
            for segment in segments
            for place, atom in enumerate(segment)
        )

    def uses(self, result: int) -> bool:
        """Whether anything depends on one of several results."""
        users = self.op.node.users
        return any(user.op == "output" or (user.args[1] == result and user.users) for user in users)

    def axis_of(self, value: Value, axis: Axis) -> int | None:
        """Which axis of a parameter an axis of a view of it is, if it is one as it stands."""
        axes = self.tensors[value.parameter].axes if value.parameter is not None else []
        return next((index for index, other in enumerate(axes) if other is axis), None)

    def is_statistic(self, value: Value) -> bool:
        """Whether a value is computed from a buffer, which is not trained, number by number."""
        return self.is_whole(value) and value.parameter not in self.trained

    def layer(self, weight: Value, bias: Value | None = None, layer: Layer | None = None) -> None:
        """Inputs are multiplied with a weight, and a bias is added.

        layer: how a refit of the weight would take the inputs apart, where that is known
        """
        self.kind(weight, Kind.WEIGHT)
        name, whole = weight.parameter, self.is_whole(weight)
        if name is not None:
            self.findings.layers.setdefault(name, set()).add(layer if whole else None)
        # A piece of a bias belongs to a piece of a weight.
        fits = bias is not None and self.is_whole(bias) == whole
        self.bias(bias, (name,) if name is not None and fits else ())

    def gain(self, gain: Value | None, bias: Value | None = None) -> None:
        """Each neuron is multiplied with a number of its own, and a bias is added."""
        self.kind(gain, Kind.GAIN)
        self.bias(bias, () if gain is None or gain.parameter is None else (gain.parameter,))

    def bias(self, bias: Value | None, weights: Sequence[str]) -> None:
        """A number for each neuron is added to what some parameters make."""
        self.kind(bias, Kind.BIAS)
        if bias is not None and bias.parameter is not None:
            for weight in weights:
                self.findings.biases.setdefault(weight, set()).add(bias.parameter)

    def values(self) -> list[Value]:
        """Every tensor among the arguments."""
        values: list[Value] = []
        for argument in self.arguments.values():
            items = argument if isinstance(argument, list | tuple) else [argument]
            values += [item for item in items if isinstance(item, Value)]
        return values

    def out_shape(self, index: int = 0) -> tuple[int, ...]:
        return self.op.shapes[index]


Rule = Callable[[Call], "Value | list[Value]"]
_Rule = TypeVar("_Rule", bound=Rule)
RULES: dict[str, Rule] = {}
# Operations that leave open whether a stack is one tensor or several.
KEEPS_STACKS: set[str] = set()


def rule(*names: str, keeps_stacks: bool = False) -> Callable[[_Rule], _Rule]:
    """Register a rule for operations by their names, without a namespace: "relu", "my_op".

    keeps_stacks: the operation leaves open whether a stack is one tensor or several
    """

    def register(function: _Rule) -> _Rule:
        for name in names:
            RULES[name] = function
        KEEPS_STACKS.update(names if keeps_stacks else ())
        return function

    return register


class UnsupportedError(Exception):
    """A variant of an operation that its rule was not written for; it is left unmatched."""


def unknown(call: Call, why: Pin | None = None) -> list[Value]:
    """Without a rule, nothing that goes in may be permuted."""
    pin = why or call.gave_up
    for value in call.values():
        for axis in value.axes:
            pin_axis(axis, pin)
    return [Value([fixed(n, pin) for n in shape]) for shape in call.op.shapes]
