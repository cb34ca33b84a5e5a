"""Normalisation, look-ups and recurrent layers.

Hides: their parameter lists. Promises: scales, shifts and statistics belong to the axis that they
work on; gates of recurrent layers are blocks of the same units.
"""

from __future__ import annotations

from collections.abc import Sequence

from nafi.graph.atoms import Axis, fresh, product, size_of
from nafi.graph.rules.calls import Call, Ends, Value, rule, unknown
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
def weight_norm(call: Call) -> list[Value]:
    """`g v / |v|`, the norm over all axes but one."""
    value, gain = call["v"], call["g"]
    for one, two in zip(value.axes, gain.axes, strict=True):
        if size_of(two) != 1:
            call.same(one, two)
    call.kind(value, Kind.WEIGHT)
    call.gain(gain)
    result = Value(value.axes, value.source)
    return [result] if len(call.op.shapes) == 1 else unknown(call)


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


@rule("embedding")
def embedding(call: Call) -> Value:
    weight: Value = call["weight"]
    call.fix(weight.axes[0], "rows are looked up by number")
    call.kind(weight, Kind.WEIGHT)
    return Value([*call["indices"].axes, *weight.axes[1:]])


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


def _recurrent(call: Call, gates: int, states: list[Value]) -> list[Value]:
    """Each layer and direction has hidden units of its own; gates are blocks of them."""
    x: Value = call["input"]
    layers, directions = call["num_layers"], 2 if call["bidirectional"] else 1
    hidden = states[0].shape[-1]
    each = len(call["params"]) // (layers * directions)
    if each != (4 if call["has_biases"] else 2) or states[-1].shape[-1] != hidden:
        return unknown(call)  # an LSTM with projections
    reads, units = x.axes[-1], []
    parameters: list[Value] = list(call["params"])
    for layer in range(layers):
        writes: Axis = []
        for direction in range(directions):
            start = (layer * directions + direction) * each
            unit = fresh(hidden)
            units.append(unit)
            for parameter in parameters[start : start + each]:
                call.same(parameter.axes[0], product(call.fixed(gates), unit))
            for parameter, axis in zip(parameters[start : start + 2], (reads, unit), strict=True):
                call.same(parameter.axes[1], axis)
                call.consume(parameter, parameter.axes[1])
            for index in range(start, start + 2):
                call.layer(parameters[index], parameters[index + 2] if each == 4 else None)
            writes = writes + unit
        reads = writes
    for state in states:
        for unit in [] if state.constant else units:
            call.same(state.axes[-1], unit)
        if not state.constant:
            call.fix(state.axes[0])
    if len(x.axes) == 3:
        call.fix(x.axes[1 if call["batch_first"] else 0], "a recurrent layer goes along it")
    batch = x.axes[0 if call["batch_first"] else 1]
    along, unit = call.fixed(len(units)), fresh(hidden)
    ends = Value([along, batch, unit], stack=Ends(along, unit, units, call.misfit))
    return [Value([*x.axes[:-1], reads]), *[ends for _ in states]]


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
