"""Positions that are looked up or written to by number: tables, gathering, scattering.

Hides: the many ways to index. Promises: an axis that is counted through by an index is told apart;
all others pass, for the index and for what is written as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nafi.graph.atoms import Axis, size_of
from nafi.graph.rules.calls import Call, UnsupportedError, Value, rule
from nafi.graph.rules.pointwise import broadcast
from nafi.graph.tensors import Kind


@rule("embedding")
def embedding(call: Call) -> Value:
    return Value([*call["indices"].axes, *_table(call)])


@rule("embedding_bag", "_embedding_bag")
def embedding_bag(call: Call) -> list[Value]:
    """Rows are summed in bags; what else it returns are positions."""
    others = [value for value in call.values() if value is not call["weight"]]
    for axis in (axis for value in others for axis in value.axes):
        call.fix(axis)
    bags, *places = call.op.shapes
    return [
        Value([call.fixed(bags[0]), *_table(call)]),
        *(Value([call.fixed(n) for n in shape]) for shape in places),
    ]


@rule("embedding_renorm")
def embedding_renorm(call: Call) -> Value:
    """Rows that are too long are shortened where they stand."""
    table: Value = call["self"]
    call.fix(table.axes[0], "rows are looked up by number")
    call.rigid(table.axes[1])
    return Value(table.axes, table.source)


@rule("bucketize")
def bucketize(call: Call) -> Value:
    call.fix(call["boundaries"].axes[0])
    return Value(call["self"].axes)


def _table(call: Call) -> list[Axis]:
    """The axes of what stands in each row of a table."""
    weight: Value = call["weight"]
    call.fix(weight.axes[0], "rows are looked up by number")
    call.kind(weight, Kind.WEIGHT)
    return weight.axes[1:]


@rule("one_hot")
def one_hot(call: Call) -> Value:
    value: Value = call["self"]
    return Value([*value.axes, call.fixed(call.out_shape()[-1])])


@rule("gather", "take_along_dim")
def gather(call: Call) -> Value:
    """One position of an axis for each position of the index."""
    value: Value = call["self"]
    index: Value = call.values()[1]
    if not isinstance(call["dim"], int) or not value.axes:
        raise UnsupportedError
    dim = call["dim"] % len(value.axes)
    call.fix(value.axes[dim])
    _meet(call, value, index, dim)
    return Value(index.axes)


@rule("scatter_add", "scatter_reduce", "scatter")
def scatter(call: Call) -> Value:
    """What is written stands at the places of the index, one for each of its positions."""
    value: Value = call["self"]
    index: Value = call["index"]
    dim = _written_dim(call)
    _meet(call, value, index, dim)
    if isinstance(call.get("src"), Value):
        _meet(call, index, call["src"], None)
    return Value(value.axes)


@rule("index_add", "index_copy", "index_reduce", "index_fill")
def index_add(call: Call) -> Value:
    """The index has an axis of its own, which is one of what is written."""
    value: Value = call["self"]
    dim = _written_dim(call)
    if isinstance(call.get("source"), Value):
        call.same(call["source"].axes[dim], call["index"].axes[0])
        _meet(call, value, call["source"], dim)
    return Value(value.axes)


def _written_dim(call: Call) -> int:
    value: Value = call["self"]
    if not value.axes:
        raise UnsupportedError
    dim: int = call["dim"] % len(value.axes)
    call.fix(value.axes[dim])
    return dim


def _meet(call: Call, one: Value, two: Value, but: int | None) -> None:
    """All axes but one are the same; where one is longer, its first positions are told apart."""
    for d, (first, second) in enumerate(zip(one.axes, two.axes, strict=True)):
        if d != but and size_of(first) == size_of(second):
            call.same(first, second)
        elif d != but:
            call.fix(first)
            call.fix(second)


@rule("index")
def index(call: Call) -> Value:
    """Axes that are looked up by number are told apart; the others pass."""
    value: Value = call["self"]
    entries = [entry for entry in call["indices"] if entry is not None]
    if len(entries) == 1 and entries[0].boolean:
        return _chosen(call, value, call["indices"].index(entries[0]), entries[0])
    return Value(_looked_up(call, value, call["indices"]))


def _chosen(call: Call, value: Value, at: int, mask: Value) -> Value:
    """A mask over some axes leaves one, the places where it is true; the others pass."""
    end = at + len(mask.axes)
    for one, two in zip(value.axes[at:end], mask.axes, strict=True):
        call.fix(one)
        call.fix(two)
    return Value([*value.axes[:at], call.fixed(call.op.shapes[0][at]), *value.axes[end:]])


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(call: Call) -> Value:
    """A mask with one number says where that number stands; else places are looked up."""
    value: Value = call["self"]
    written: Value = call["values"]
    masks = [entry for entry in call["indices"] if entry is not None and entry.boolean]
    if masks:
        if call["indices"] != masks or len(masks) > 1 or any(n != 1 for n in written.shape):
            raise UnsupportedError
        for one, two in zip(value.axes, masks[0].axes, strict=False):
            call.same(one, two)
    else:
        places = Value(_looked_up(call, value, call["indices"]))
        broadcast(call, [places, written])
    return Value(value.axes)


def _looked_up(call: Call, value: Value, indices: Sequence[Any]) -> list[Axis]:
    """The axes of what stands at some places."""
    looked_up = [*indices, *[None] * (len(value.axes) - len(indices))]
    dims = [d for d, entry in enumerate(looked_up) if entry is not None]
    if any(looked_up[d].boolean for d in dims):
        raise UnsupportedError
    for d in dims:
        call.fix(value.axes[d])
    positions = broadcast(call, [looked_up[d] for d in dims])
    for axis in positions.axes:
        call.fix(axis)
    kept = [axis for d, axis in enumerate(value.axes) if d not in dims]
    neighbours = dims == list(range(dims[0], dims[-1] + 1))
    at = dims[0] if neighbours else 0
    return [*kept[:at], *positions.axes, *kept[at:]]
