"""Sums of products.

Hides: the many names of a matrix product. Promises: one rule, `contract`, by labels; what is summed
over is consumed by the parameter that holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nafi.graph.atoms import Axis, fresh, product, size_of
from nafi.graph.rules.calls import Call, Product, UnsupportedError, Value, rule
from nafi.graph.rules.pointwise import add_bias, broadcast
from nafi.graph.tensors import Layer


def contract(
    call: Call, operands: Sequence[tuple[Value, Sequence[Any]]], out: Sequence[Any]
) -> Value:
    """A sum of products: axes with one label are the same, those not in `out` are summed over."""
    labelled: dict[Any, Axis] = {}
    holders: dict[Any, list[tuple[Value, Axis]]] = {}
    for value, labels in operands:
        for label, axis in zip(labels, value.axes, strict=True):
            if label not in labelled or size_of(labelled[label]) == 1:
                labelled[label] = axis
            elif size_of(axis) != 1:
                call.same(labelled[label], axis)
            holders.setdefault(label, []).append((value, axis))
    for label, factors in holders.items():
        if label not in out:
            _sum_over(call, factors)
    fed = any(value.fed for value, _ in operands)
    result = Value([labelled[label] for label in out], fed=fed)
    weights = [(value, labels) for value, labels in operands if value.parameter is not None]
    if len(weights) == 1 and fed:
        weight, labels = weights[0]
        _state_layer(call, weight, labels, out, last=weight is operands[-1][0])
        made = frozenset(d - len(out) for d, label in enumerate(out) if label in labels)
        result.product = Product((str(weight.parameter),), made & result.wide_dims)
    return result


def _sum_over(call: Call, factors: Sequence[tuple[Value, Axis]]) -> None:
    """One of the factors reads the neurons that a product sums over.

    Where none does, as in the product of queries and keys, neurons of two networks side by side
    would give the sum of what the networks compute, and not a mean.
    """
    readers = [(value, axis) for value, axis in factors if call.reader(value, axis) is not None]
    if readers:
        call.consume(*readers[0])
    else:
        call.rigid(factors[0][1])


def _state_layer(
    call: Call, weight: Value, labels: Sequence[Any], out: Sequence[Any], last: bool
) -> None:
    """Inputs are multiplied with a weight, which is a layer's if it is a matrix on the right."""
    read = [axis for axis, label in zip(weight.axes, labels, strict=True) if label not in out]
    plain = call.op.name in _PLAIN and last and len(read) == 1
    call.layer(weight, layer=_linear_layer(call, weight, read[0]) if plain else None)


# Products of inputs, on the left, and a matrix.
_PLAIN = ("linear", "matmul", "mm", "addmm")


def _linear_layer(call: Call, weight: Value, read: Axis) -> Layer | None:
    """The layer of a matrix that reads its inputs along an axis, if it is one of the parameter."""
    axis = call.axis_of(weight, read) if len(weight.axes) == 2 else None
    return None if axis is None else Layer("linear", transposed=axis == 0)


@rule("linear")
def linear(call: Call) -> Value:
    x: Value = call["input"]
    batch = list(range(len(x.axes) - 1))
    result = contract(call, [(x, [*batch, "in"]), (call["weight"], ["out", "in"])], [*batch, "out"])
    weight: Value = call["weight"]
    call.layer(weight, call["bias"], _linear_layer(call, weight, weight.axes[1]))
    return _with_bias(call, result)


def _with_bias(call: Call, result: Value) -> Value:
    """Add the bias along the last axis, if there is one."""
    bias: Value | None = call["bias"]
    if bias is not None:
        call.same(result.axes[-1], bias.axes[0])
        result.product = None
    return result


@rule("matmul", "mm", "bmm", "mv", "dot", "vdot")
def matmul(call: Call) -> Value:
    one: Value = call["self"]
    two: Value = call.get("other") or call.get("mat2") or call.get("vec") or call["tensor"]
    rank = max(len(one.axes), len(two.axes))
    batch = [f"batch{back}" for back in range(rank, 2, -1)]
    left = ["k"] if len(one.axes) == 1 else ([*batch, "row", "k"])[-len(one.axes) :]
    right = ["k"] if len(two.axes) == 1 else ([*batch, "k", "column"])[-len(two.axes) :]
    out = [*batch] + ["row"] * (len(one.axes) > 1) + ["column"] * (len(two.axes) > 1)
    return contract(call, [(one, left), (two, right)], out)


@rule("addmm", "baddbmm", "addmv")
def add_matmul(call: Call) -> Value:
    names = [("mat1", "mat2"), ("batch1", "batch2"), ("mat", "vec")]
    one, two = next((call[a], call[b]) for a, b in names if call.get(a) is not None)
    batch = list(range(len(one.axes) - 2))
    right = ["k", "column"] if len(two.axes) > 1 else ["k"]
    result = contract(
        call,
        [(one, [*batch, "row", "k"]), (two, [*batch, *right] if len(two.axes) > 2 else right)],
        [*batch, "row", *right[1:]],
    )
    add_bias(call, result, call["self"])
    return broadcast(call, [result, call["self"]])


@rule("outer", "ger")
def outer(call: Call) -> Value:
    return contract(call, [(call["self"], ["row"]), (call["vec2"], ["column"])], ["row", "column"])


@rule("_grouped_mm", "grouped_mm", "grouped_mm_fallback")
def grouped_product(call: Call) -> Value:
    """Rows in stretches, each of which is multiplied with a matrix of its own: experts."""
    x, weight = call.values()[:2]
    if (len(x.axes), len(weight.axes)) != (2, 3) or call.get("bias") is not None:
        raise UnsupportedError
    for axis in (x.axes[0], weight.axes[0]):
        call.fix(axis, f"{call.op} counts them")
    call.same(x.axes[1], weight.axes[1])
    call.consume(weight, weight.axes[1])
    call.layer(weight)
    return Value([x.axes[0], weight.axes[2]])


@rule("einsum")
def einsum(call: Call) -> Value:
    equation = call["equation"].replace(" ", "")
    values: list[Value] = call["tensors"]
    left, arrow, right = equation.partition("->")
    if not arrow:
        letters = sorted(set(left) - set(",."))
        right = "..." * ("." in left) + "".join(c for c in letters if left.count(c) == 1)
    ranks = [
        len(v.axes) - len(t.replace("...", ""))
        for v, t in zip(values, left.split(","), strict=True)
    ]
    operands = [
        (value, _labels(term, rank))
        for value, term, rank in zip(values, left.split(","), ranks, strict=True)
    ]
    if any(len(set(labels)) < len(labels) for _, labels in operands):
        raise UnsupportedError
    return contract(call, operands, _labels(right, max(ranks)))


def _labels(term: str, rank: int) -> list[str]:
    """One label per axis; those of an ellipsis are counted from the back."""
    before, dots, after = term.partition("...")
    return [*before, *(f"...{back}" for back in range(rank, 0, -1) if dots), *after]


@rule("tensordot")
def tensordot(call: Call) -> Value:
    one, two = call["self"], call["other"]
    left = [("left", d) for d in range(len(one.axes))]
    right = [("right", d) for d in range(len(two.axes))]
    for a, b in zip(call["dims_self"], call["dims_other"], strict=True):
        right[b] = left[a]
    out = [label for label in left if label not in right]
    return contract(call, [(one, left), (two, right)], [*out, *(r for r in right if r not in left)])


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Value:
    """softmax(q k^T scale) v; the scale follows from the width of a head unless it is given."""
    query, key, value = call["query"], call["key"], call["value"]
    if call.get("enable_gqa"):
        # Each head of keys and values serves several queries, whose order among them is free.
        copies = fresh(size_of(query.axes[-3]) // size_of(key.axes[-3]))
        key, value = (
            Value([*v.axes[:-3], product(v.axes[-3], copies), *v.axes[-2:]], v.source)
            for v in (key, value)
        )
    batch = list(range(len(query.axes) - 2))
    scores = contract(
        call,
        [(query, [*batch, "row", "k"]), (key, [*batch, "column", "k"])],
        [*batch, "row", "column"],
    )
    if call.get("scale") is None:
        call.rigid(query.axes[-1])
    if call.get("is_causal"):
        call.fix(scores.axes[-1])
        call.fix(scores.axes[-2])
    if call.get("attn_mask") is not None:
        scores = broadcast(call, [scores, call["attn_mask"]])
    call.findings.reduced.append(scores.axes)
    call.findings.reduced.append(scores.axes[:-1])
    return contract(
        call,
        [(scores, [*batch, "row", "k"]), (value, [*batch, "k", "out"])],
        [*batch, "row", "out"],
    )


@rule("bilinear")
def bilinear(call: Call) -> Value:
    one, two = call["input1"], call["input2"]
    batch = list(range(len(one.axes) - 1))
    result = contract(
        call,
        [(one, [*batch, "i"]), (two, [*batch, "j"]), (call["weight"], ["out", "i", "j"])],
        [*batch, "out"],
    )
    call.layer(call["weight"], call["bias"])
    return _with_bias(call, result)
