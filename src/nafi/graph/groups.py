"""From a network to its neuron groups.

Hides: the walk over the traced operations, and how atoms become named groups.
Promises: a `ModelSpec` that holds for the network (the self-test has seen it), with inputs and
outputs left alone and a warning for every parameter that an operation without a rule pinned.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import nn

from nafi.errors import few
from nafi.graph import atoms
from nafi.graph.atoms import (
    Atom,
    Pin,
    atoms_of,
    fixed,
    fresh,
    is_unsaved,
    pin_axis,
    resolve,
    unsaved,
)
from nafi.graph.check import check_spec
from nafi.graph.composites import taken_apart
from nafi.graph.inputs import Inputs, check_inputs
from nafi.graph.rules import KEEPS_STACKS, RULES, Call, Findings, Value, apply
from nafi.graph.spec import ModelSpec, NeuronGroup, Pinned, holds_numbers
from nafi.graph.tensors import Axis, Factor, Kind, Segment, TensorSpec, merge_fixed
from nafi.graph.trace import Op, Trace, named_tensors, part_of, trace, unwrapped

_FOLDABLE = {"conv1d", "conv2d", "conv3d", "linear"} | {f"conv_transpose{d}d" for d in (1, 2, 3)}


class SpecWarning(UserWarning):
    """Something could be left unmatched that a better rule would match."""


def groups(model: nn.Module, example_inputs: Inputs, *, check: bool = True) -> ModelSpec:
    """Find which axes of the parameters and buffers carry the same neurons.

    model: any module that torch can trace; left unchanged
    example_inputs: the arguments of its forward: a tuple, or a dict of keyword arguments; only
        their shapes matter, unless values decide what the network does
    check: permute every group at random in float64 and compare the outputs (`check_spec`)
    """
    model = unwrapped(model)
    traced = trace(model, example_inputs)
    spec = _spec_of(model, traced, example_inputs)
    _warn_of_decisions(traced)
    _warn_of_gaps(spec)
    if check:
        check_spec(model, example_inputs, spec)
    return spec


def analyse(model: nn.Module, example_inputs: Inputs) -> ModelSpec:
    """What `groups` finds, without warnings and without the self-test."""
    return _spec_of(model, trace(model, example_inputs), example_inputs)


def _spec_of(model: nn.Module, traced: Trace, example_inputs: Inputs) -> ModelSpec:
    return replace(_Walk(model, traced).spec(), example_inputs=check_inputs(example_inputs))


def _warn_of_decisions(traced: Trace) -> None:
    if traced.decisions:
        text = f"values decide what the network does in {few(traced.decisions)}: its groups are"
        text += " those of what it does on the example inputs, and other inputs may go other ways"
        warnings.warn(text, SpecWarning, stacklevel=3)


_UNUSED = "the network does not use it"
_UNTOUCHED = "the network does not use it on the example inputs"


def _warn_of_gaps(spec: ModelSpec) -> None:
    unused = {pin.tensor for pin in spec.pinned if pin.reason == _UNUSED}
    weights = [name for name in spec.tensors if name in unused and _is_learnt(spec.tensors[name])]
    if weights:
        text = f"the network uses {few(weights)} neither in eval nor in training mode: they keep"
        warnings.warn(f"{text} the order of their neurons", SpecWarning, stacklevel=3)
    by_op: dict[str, list[str]] = {}
    for pin in spec.pinned:
        if pin.op is not None or _keeps_rows(spec, pin):
            by_op.setdefault(pin.reason, []).append(f"{pin.tensor} axis {pin.axis}")
    for reason, places in by_op.items():
        shown = ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")
        warnings.warn(f"{reason}: left unmatched {shown}", SpecWarning, stacklevel=3)


def _keeps_rows(spec: ModelSpec, pin: Pinned) -> bool:
    """Whether a constant keeps neurons in their order that a tensor makes, not only reads."""
    return is_unsaved(pin.reason) and pin.axis not in spec.tensors[pin.tensor].reads


def _is_learnt(tensor: TensorSpec) -> bool:
    return tensor.kind in (Kind.WEIGHT, Kind.BIAS, Kind.GAIN) and bool(tensor.axes)


def sized_ops(
    model: nn.Module, example_inputs: Inputs, names: Collection[str]
) -> list[tuple[Op, int, str]]:
    """Operations that were given a size, in numbers, for an axis with one of these groups.

    Returns (operation, size, group); the size may be written in the code or computed by it.
    """
    walk = _Walk(model, trace(model, example_inputs))
    walk.spec()
    sized = []
    for op in walk.traced.ops:
        for size, axis in _given_sizes(op, walk.values):
            held = {walk.names.get(atom) for atom in atoms_of([axis])}
            group = next((name for name in names if name in held), None)
            if isinstance(size, int) and size > 0 and group is not None:
                sized.append((op, size, group))
    return sized


def _given_sizes(op: Op, values: Mapping[torch.fx.Node, Any]) -> list[tuple[Any, atoms.Axis]]:
    """Sizes among the arguments of an operation, with the axis that each is a size or place of."""
    arguments, made = op.arguments, values.get(op.node)
    sizes = next((arguments[k] for k in ("size", "shape") if k in arguments), None)
    if isinstance(sizes, list | tuple) and isinstance(made, Value):
        return list(zip(sizes, made.axes, strict=False))
    cut = next((arguments[k] for k in ("split_size", "split_sizes", "end") if k in arguments), None)
    source = arguments.get("self")
    read = values.get(source) if isinstance(source, torch.fx.Node) else None
    if cut is None or not isinstance(read, Value) or not isinstance(arguments.get("dim"), int):
        return []
    axis = read.axes[arguments["dim"]]
    return [(size, axis) for size in (cut if isinstance(cut, list | tuple) else [cut])]


class _Walk:
    """One pass over the operations, then a reading of what was learnt."""

    def __init__(self, model: nn.Module, traced: Trace) -> None:
        self.traced = traced
        self.ops = {op.node: op for op in traced.ops}
        self.findings = Findings()
        self.names: dict[Atom, str] = {}
        self.values: dict[torch.fx.Node, Any] = {}
        self.tensors: dict[str, Value] = {}
        self.stored = named_tensors(model)
        for name, tensor in self.stored.items():
            if name not in traced.aliases:
                axes = [fresh(n) for n in tensor.shape]
                self.tensors[name] = Value(axes, source=name, parameters=frozenset([name]))
        self.trained = {n for n, t in self.stored.items() if isinstance(t, nn.Parameter)}
        for node, name in traced.tensors.items():
            self.values[node] = self.tensors[name]
        for node in traced.inputs:
            self.values[node] = _fixed_value(node, Pin("model input"))
        for node, constant in traced.constants.items():
            self.values[node] = _constant_value(node, constant)
        for op in traced.ops:
            self._apply(op)
        for node in traced.outputs:
            self._pin_output(self.values.get(node))

    def _apply(self, op: Op) -> None:
        known = op.name in RULES or op.pointwise
        graph = None if known else taken_apart(op)
        if graph is None:
            self._apply_rule(op)
        else:
            self._apply_parts(op, graph)

    def _apply_parts(self, op: Op, graph: torch.fx.Graph) -> None:
        """What an operation without a rule does, as the operations that it consists of."""
        sources = iter(op.node.all_input_nodes)
        for node in graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.values.get(next(sources))
            elif node.op == "call_function":
                self._apply(part_of(op, node))
            else:
                self.values[op.node] = self._lift(node.args[0])

    def _apply_rule(self, op: Op) -> None:
        arguments = {name: self._lift(value) for name, value in op.arguments.items()}
        call = Call(op, arguments, self.findings, self.tensors, self.trained)
        if op.name not in KEEPS_STACKS:
            for value in call.values():
                if value.stack is not None:
                    value.stack.join()
        results, read = apply(call), call.values()
        for value, tensor in zip(results, op.tensors, strict=True):
            value.boolean = tensor.dtype == torch.bool
            if all(value is not other for other in read):  # one that is passed on is known already
                value.fed = any(other.fed for other in read)
                value.parameters = frozenset(p for other in read for p in other.parameters)
        for node in op.writes:
            self._written(node, call)
        many = isinstance(op.node.meta.get("val"), list | tuple)
        self.values[op.node] = results if many else results[0] if results else None

    def _lift(self, argument: Any) -> Any:
        """Nodes become values, also within lists."""
        if isinstance(argument, torch.fx.Node):
            if argument.op == "get_attr" and argument not in self.values:
                self.values[argument] = _fixed_value(argument, unsaved(argument.name))
            return self.values.get(argument)
        if isinstance(argument, list | tuple):
            return [self._lift(item) for item in argument]
        return argument

    def _written(self, node: torch.fx.Node, call: Call) -> None:
        """Writing into a view writes into all that it views, which is no constant then."""
        read = call.values()
        for link in [node, *self._viewed(node)]:
            value = self.values.get(link)
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Value):
                    part.constant = False
                    part.fed = part.fed or any(other.fed for other in read)
                    part.parameters |= {name for other in read for name in other.parameters}
        for link in [node, *self._viewed(node)]:
            self._tell_apart(link, call)

    def _viewed(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """All nodes whose memory a node shares as a view, the nearest first."""
        chain: list[torch.fx.Node] = []
        link: Any = node
        while link in self.ops:
            op = self.ops[link]
            link = op.arguments["self"] if op.name == "getitem" else op.views
            chain += [link] if link is not None else []
        return chain

    def _tell_apart(self, view: torch.fx.Node, call: Call) -> None:
        """One position of what was a constant may now differ; its rule took them for equal."""
        op = self.ops.get(view)
        if op is None or op.name not in ("select", "unbind"):
            return
        value = self.values.get(op.arguments["self"])
        if isinstance(value, Value) and value.stack is None:
            call.fix(value.axes[op.arguments["dim"]])

    def _pin_output(self, value: Any) -> None:
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Value):
                if part.stack is not None:
                    part.stack.join()
                for axis in part.axes:
                    pin_axis(axis, Pin("model output"))

    # ------------------------------------------------------------------ reading the result

    def spec(self) -> ModelSpec:
        order = self._data_flow()
        members = self._free_atoms(order)
        names = self.names = self._names(members)
        rigid = {atom: why for axis, why in self.findings.rigid for atom in atoms_of([axis])}
        parents = self._parents(members)
        groups = {
            names[atom]: NeuronGroup(
                names[atom],
                atom.size,
                names[parents[atom]] if atom in parents else None,
                rigid.get(atom),
            )
            for atom in members
        }
        tensors = {
            name: self._tensor_spec(name, value, names) for name, value in self.tensors.items()
        }
        return ModelSpec(
            groups,
            tensors,
            self._pinned(names),
            self._batchnorms(),
            aliases=self.traced.aliases,
        )

    def _consumed(self) -> set[tuple[str, Atom]]:
        """(tensor, atom) for all neurons that a tensor reads."""
        return {
            (source, atom) for source, axis in self.findings.consumed for atom in atoms_of([axis])
        }

    def _tensor_spec(
        self,
        name: str,
        value: Value,
        names: dict[Atom, str],
    ) -> TensorSpec:
        """What the rules said of a tensor. One with several biases, or layers, has none."""
        findings = self.findings
        kind = findings.kinds.get(name, Kind.WEIGHT)
        biases, layers = findings.biases.get(name, set()), findings.layers.get(name, set())
        return TensorSpec(
            tuple(_spec_axis(axis, names) for axis in value.axes),
            self._reads(name, value),
            kind if holds_numbers(self.stored[name]) else Kind.COUNTER,
            next(iter(biases)) if len(biases) == 1 else None,
            next(iter(layers)) if len(layers) == 1 else None,
        )

    def _reads(self, name: str, value: Value) -> tuple[int, ...]:
        """The axes of a tensor that products sum over.

        An axis is known by identity, so that a weight with one group on both of its axes, as in a
        recurrent layer, reads along one of them. An axis that was cut or joined on the way is known
        by its neurons.
        """
        reads: set[int] = set()
        for source, summed in self.findings.consumed:
            if source == name:
                same = {i for i, axis in enumerate(value.axes) if axis is summed}
                atoms = atoms_of([summed])
                alike = {i for i, axis in enumerate(value.axes) if atoms & atoms_of([axis])}
                reads |= same or alike
        return tuple(sorted(reads))

    def _data_flow(self) -> list[Atom]:
        """Every atom in the order of the first operation that has it, in a tensor or its result."""
        seen: dict[Atom, None] = {}
        for op in self.traced.ops:
            read = [self.values[n] for n in op.node.all_input_nodes if n in self.traced.tensors]
            made = self.values.get(op.node)
            for value in [*read, *(made if isinstance(made, list) else [made])]:
                for axis in value.axes if isinstance(value, Value) else []:
                    for segment in resolve(axis):
                        seen.update(dict.fromkeys(segment))
        return list(seen)

    def _free_atoms(self, order: list[Atom]) -> list[Atom]:
        """Atoms that may be permuted and that some used tensor has."""
        used = set(self.traced.used)
        in_tensors: set[Atom] = set()
        for name, value in self.tensors.items():
            if name in used:
                in_tensors |= atoms_of(value.axes)
            else:
                for axis in value.axes:
                    pin_axis(axis, Pin(_UNUSED))
        for atom in in_tensors - self._touched():
            # As the places of a table that are beyond the length of the example inputs.
            atom.pin(Pin(_UNTOUCHED))
        return [a for a in order if a in in_tensors and a.pinned is None and a.size > 1]

    def _touched(self) -> set[Atom]:
        """Atoms that some operation sums over or has in its result: nothing is known of others."""
        touched = {atom for _, atom in self._consumed()}
        for op in self.traced.ops:
            made = self.values.get(op.node)
            for value in made if isinstance(made, list) else [made]:
                if isinstance(value, Value):
                    touched |= atoms_of(value.axes)
        return touched

    def _names(self, members: list[Atom]) -> dict[Atom, str]:
        """After the layer that makes the neurons; several groups of one layer are numbered."""
        names: dict[Atom, str] = {}
        taken: set[str] = set()
        consumed = self._consumed()
        held = [(name, atoms_of(self.tensors[name].axes)) for name in self.traced.used]
        matrices = {name for name, v in self.tensors.items() if sum(n > 1 for n in v.shape) > 1}
        for atom in members:
            holders = [name for name, atoms_held in held if atom in atoms_held]
            made = [name for name in holders if (name, atom) not in consumed] or holders
            first = next((name for name in made if name in matrices), made[0])
            base = first.rpartition(".")[0] or first
            name, number = base, 2
            while name in taken:
                name, number = f"{base}/{number}", number + 1
            names[atom] = name
            taken.add(name)
        return names

    def _parents(self, members: list[Atom]) -> dict[Atom, Atom]:
        """Groups that appear nowhere without another one have an order within each of its members.

        Wherever the outer axis is summed out while the inner one stays, all members must agree on
        one order; such tensors, also those inside an operation, are among the ones looked at. So
        must they where the outer group is on two axes, since its members there differ.
        """
        free = set(members)
        tensors = [value.axes for value in self.tensors.values()] + self.findings.reduced
        for value in self.values.values():
            parts = value if isinstance(value, list) else [value]
            tensors += [part.axes for part in parts if isinstance(part, Value)]
        together: dict[Atom, set[Atom]] = {}
        for axes in tensors:
            for block in product(*(resolve(axis) for axis in axes)):
                counts = Counter(atom for segment in block for atom in segment if atom in free)
                once = {atom for atom, count in counts.items() if count == 1}
                for atom in counts:
                    together[atom] = together.get(atom, once) & once
        parents: dict[Atom, Atom] = {}
        for atom in members:
            others = [o for o in members if o is not atom and o in together.get(atom, set())]
            outer = [o for o in others if o not in parents and self._outside(o, atom, together)]
            if outer and atom not in parents.values():
                parents[atom] = outer[0]
        return parents

    def _outside(self, outer: Atom, inner: Atom, together: dict[Atom, set[Atom]]) -> bool:
        """Whether `outer` can be the parent: it also occurs alone, or stands further outside."""
        if inner not in together[outer]:
            return True
        for value in self.tensors.values():
            flat = [atom for axis in value.axes for segment in resolve(axis) for atom in segment]
            if outer in flat and inner in flat:
                return flat.index(outer) < flat.index(inner)
        return False

    def _pinned(self, names: dict[Atom, str]) -> tuple[Pinned, ...]:
        sizes: dict[tuple[str, int, Pin], int] = {}
        for name, value in self.tensors.items():
            for index, axis in enumerate(value.axes):
                for segment in resolve(axis):
                    held = [atom for atom in segment if atom not in names]
                    if held:
                        key = (name, index, held[0].pinned or Pin("nothing depends on it"))
                        sizes[key] = sizes.get(key, 0) + prod(atom.size for atom in held)
        return tuple(
            Pinned(name, index, size, pin.reason, pin.op)
            for (name, index, pin), size in sizes.items()
        )

    def _batchnorms(self) -> tuple[tuple[str, str], ...]:
        """(layer, batchnorm) pairs that can be folded, also of what only training uses."""
        in_eval = self._batchnorms_among([op for op in self.traced.ops if not op.training])
        in_training = self._batchnorms_among([op for op in self.traced.ops if op.training])
        evaluated = {norm for _, norm in in_eval} | self._modules_in_eval()
        return (*in_eval, *(pair for pair in in_training if pair[1] not in evaluated))

    def _modules_in_eval(self) -> set[str]:
        """The modules whose tensors are used in eval mode."""
        nodes = (n for op in self.traced.ops if not op.training for n in op.node.all_input_nodes)
        names = (self.traced.tensors[node] for node in nodes if node in self.traced.tensors)
        return {name.rpartition(".")[0] for name in names}

    def _batchnorms_among(self, ops: Sequence[Op]) -> tuple[tuple[str, str], ...]:
        """Batch normalisations that directly follow a layer, all of whose tensors are used once."""
        pairs: list[tuple[str, str]] = []
        by_node = {op.node: op for op in ops}
        uses = Counter(
            name
            for op in ops
            for name in {self.traced.tensors.get(node) for node in op.node.all_input_nodes}
        )
        for op in ops:
            if op.name != "batch_norm" or op.arguments["training"]:
                continue
            layer = by_node.get(op.arguments["input"])
            if layer is None or layer.name not in _FOLDABLE or len(layer.node.users) != 1:
                continue
            if layer.name == "linear" and len(op.shapes[0]) != 2:
                continue  # it normalises another axis than the layer's outputs
            owned = [layer.arguments[n] for n in ("weight", "bias")]
            owned += [op.arguments[n] for n in ("running_mean", "running_var", "weight", "bias")]
            names = [self.traced.tensors.get(node) for node in owned if node is not None]
            if all(name is not None and uses[name] == 1 for name in names):
                paths = [
                    str(self.traced.tensors[n]).rpartition(".")[0] for n in (owned[0], owned[2])
                ]
                pairs.append((paths[0], paths[1]))
        return tuple(pairs)


def _fixed_value(node: torch.fx.Node, pin: Pin) -> Any:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        axes = [fixed(int(n), pin) for n in value.shape]
        return Value(axes, boolean=value.dtype == torch.bool, fed=True)
    return value


def _constant_value(node: torch.fx.Node, constant: torch.Tensor) -> Value:
    """A tensor that is not saved. An axis along which it does not change tells nothing apart."""
    pin = unsaved(node.name.removeprefix("c_").removeprefix("b_"))
    first = [constant.narrow(d, 0, min(n, 1)) for d, n in enumerate(constant.shape)]
    axes = [
        fresh(n) if slice_.expand_as(constant).equal(constant) else fixed(n, pin)
        for slice_, n in zip(first, constant.shape, strict=True)
    ]
    even = bool(constant.numel()) and bool((constant == constant.flatten()[0]).all())
    return Value(axes, constant=even, boolean=constant.dtype == torch.bool)


def _spec_axis(axis: atoms.Axis, names: dict[Atom, str]) -> Axis:
    """Segments with group names; neighbouring fixed stretches become one."""
    segments: list[Segment] = []
    for segment in resolve(axis):
        factors: Sequence[Factor] = [names.get(atom, atom.size) for atom in segment]
        merged = Segment(merge_fixed(list(factors)))
        if segments and not merged.groups and not segments[-1].groups:
            segments[-1] = Segment(merge_fixed([segments[-1].size({}) + merged.size({})]))
        else:
            segments.append(merged)
    return tuple(segments)
