"""Normalisation and recurrent layers.

Hides: their parameter lists. Promises: scales, shifts and statistics belong to the axis that they
work on; gates of recurrent layers are blocks of the same units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from nafi.graph.atoms import Axis, fresh, product, size_of
from nafi.graph.rules.calls import Call, Ends, UnsupportedError, Value, rule
from nafi.graph.tensors import Kind


def _per_channel(call: Call, value: Value, names: Sequence[str]) -> None:
    for name in names:
        if call.get(name) is not None:
            call.same(value.axes[1], call[name].axes[0])


@rule("batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm", "instance_norm")
def batch_norm(call: Call) -> Value:
    value: Value = call["input"]
    _per_channel(call, value, ["weight", "bias", "running_mean", "running_var"])
    call.gain(call["weight"], call["bias"])
    call.kind(call["running_mean"], Kind.MEAN)
    call.kind(call["running_var"], Kind.VARIANCE)
    return Value(value.axes)


@rule("layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm(call: Call) -> Value:
    value: Value = call["input"]
    count = len(call["normalized_shape"])
    for axis in value.axes[-count:]:
        call.rigid(axis)
    call.findings.reduced.append(value.axes[:-count])
    for name in ["weight", "bias"]:
        if call.get(name) is not None:
            for one, two in zip(value.axes[-count:], call[name].axes, strict=True):
                call.same(one, two)
    call.gain(call.get("weight"), call.get("bias"))
    return Value(value.axes)


@rule("_weight_norm", "_weight_norm_interface")
def weight_norm(call: Call) -> Value:
    """`g v / |v|`, the norm over all axes but one."""
    value, gain = call["v"], call["g"]
    for one, two in zip(value.axes, gain.axes, strict=True):
        if size_of(two) != 1:
            call.same(one, two)
    call.kind(value, Kind.WEIGHT)
    call.gain(gain)
    if len(call.op.shapes) > 1:
        raise UnsupportedError
    return Value(value.axes, value.source)


@rule("group_norm")
def group_norm(call: Call) -> Value:
    value: Value = call["input"]
    groups: int = call["num_groups"]
    group, inner = fresh(groups), fresh(size_of(value.axes[1]) // groups)
    call.same(value.axes[1], product(group, inner))
    call.rigid(value.axes[1])
    call.findings.reduced.append([value.axes[0], group])
    _per_channel(call, value, ["weight", "bias"])
    call.gain(call["weight"], call["bias"])
    return Value(value.axes)


@rule("prelu")
def prelu(call: Call) -> Value:
    value: Value = call["self"]
    weight: Value = call["weight"]
    if size_of(weight.axes[0]) > 1:
        call.same(value.axes[1 if len(value.axes) > 1 else 0], weight.axes[0])
    call.gain(weight)
    return Value(value.axes)


@rule("getitem", keeps_stacks=True)
def getitem(call: Call) -> Value:
    chosen: Value = call["self"][call["index"]]
    return chosen


@rule("lstm")
def lstm(call: Call) -> list[Value]:
    return _recurrent(call, gates=4, states=list(call["hx"]))


@rule("gru", "rnn_tanh", "rnn_relu")
def gru(call: Call) -> list[Value]:
    return _recurrent(call, gates=3 if call.op.name == "gru" else 1, states=[call["hx"]])


@dataclass
class _Layer:
    """One layer of a recurrent network in one direction.

    weights: for inputs and for the state; biases: of these
    unit: its hidden units; written: what it passes on, which is those, or a projection of them
    """

    weights: list[Value]
    biases: list[Value]
    unit: Axis
    written: Axis

    def state(self, call: Call, gates: int, reads: Axis) -> None:
        """Gates are blocks of the units; weights read the inputs and what was passed on."""
        for parameter in [*self.weights, *self.biases]:
            call.same(parameter.axes[0], product(call.fixed(gates), self.unit))
        for weight, axis in zip(self.weights, (reads, self.written), strict=True):
            call.same(weight.axes[1], axis)
            call.consume(weight, weight.axes[1])
        for weight, bias in zip_longest(self.weights, self.biases):
            call.layer(weight, bias)


def _recurrent_layer(call: Call, parameters: list[Value], hidden: int) -> _Layer:
    """The parameters of one layer: weights, biases if it has any, a projection if it has one."""
    unit = fresh(hidden)
    written, rest = unit, parameters[2:]
    if len(parameters) % 2:
        projection = rest.pop()
        call.same(projection.axes[1], unit)
        call.consume(projection, projection.axes[1])
        call.layer(projection)
        written = projection.axes[0]
    return _Layer(parameters[:2], rest, unit, written)


def _recurrent(call: Call, gates: int, states: list[Value]) -> list[Value]:
    """Each layer and direction has hidden units of its own.

    states: what is passed on, and for an LSTM also its cells, which are never projected
    """
    x: Value = call["input"]
    directions = 2 if call["bidirectional"] else 1
    parameters: list[Value] = list(call["params"])
    each = len(parameters) // (call["num_layers"] * directions)
    reads = x.axes[-1]
    layers: list[_Layer] = []
    for start in range(0, len(parameters), each * directions):
        row = [
            _recurrent_layer(call, parameters[at : at + each], states[-1].shape[-1])
            for at in range(start, start + each * directions, each)
        ]
        for layer in row:
            layer.state(call, gates, reads)
        reads = [segment for layer in row for segment in layer.written]
        layers += row
    if len(x.axes) == 3:
        call.fix(x.axes[1 if call["batch_first"] else 0], "a recurrent layer goes along it")
    batch = x.axes[0 if call["batch_first"] else 1]
    kept = [[layer.written for layer in layers], [layer.unit for layer in layers]]
    ends = [
        _ends(call, state, batch, units)
        for state, units in zip(states, kept[: len(states)], strict=True)
    ]
    return [Value([*x.axes[:-1], reads]), *ends]


def _ends(call: Call, state: Value, batch: Axis, units: list[Axis]) -> Value:
    """The last states of all layers and directions; the first ones have the same units."""
    if not state.constant:
        call.fix(state.axes[0])
        for unit in units:
            call.same(state.axes[-1], unit)
    along, unit = call.fixed(len(units)), fresh(state.shape[-1])
    return Value([along, batch, unit], stack=Ends(along, unit, units, call.misfit))


@rule("gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell")
def recurrent_cell(call: Call) -> list[Value]:
    """One step: gates are blocks of the units of the state."""
    x: Value = call["input"]
    states: list[Value] = call["hx"] if isinstance(call["hx"], list) else [call["hx"]]
    unit = fresh(states[0].shape[-1])
    for state in states:
        call.same(state.axes[-1], unit)
    for name, reads in (("w_ih", x.axes[-1]), ("w_hh", unit)):
        weight: Value = call[name]
        gates = size_of(weight.axes[0]) // size_of(unit)
        call.same(weight.axes[0], product(call.fixed(gates), unit))
        call.same(weight.axes[1], reads)
        call.consume(weight, weight.axes[1])
        call.layer(weight, call[name.replace("w", "b")])
    for name in ("b_ih", "b_hh"):
        if call[name] is not None:
            call.same(call[name].axes[0], call["w_ih"].axes[0])
    return [Value([*x.axes[:-1], unit]) for _ in call.op.shapes]


@rule("_assert_tensor_metadata", "_assert_async", "sym_constrain_range_for_size")
def asserts(call: Call) -> list[Value]:
    return []
