"""Operations that work on each position by itself, and reductions of whole axes.

Hides: broadcasting. Promises: axes that meet are the same axis; one that is summed out may be
permuted, one whose positions are compared or counted may not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from nafi.graph.atoms import Axis, fixed, fresh, product, size_of, unsaved
from nafi.graph.rules.calls import Call, Product, UnsupportedError, Value, rule
from nafi.graph.tensors import Kind


# Most such operations carry torch's tag for it; these do not.
@rule("dropout", "alpha_dropout", "feature_dropout", "relu6", "hardswish", "rrelu", "copy")
@rule("where", "log_sigmoid", "masked_fill", "fill", "zero", "negative", "absolute", "arctan2")
@rule("__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "floor_divide", "true_divide")
@rule("greater", "greater_equal", "less", "less_equal", "not_equal", "fix", "special_expit")
@rule("complex", "polar", "real", "imag", "conj", "_conj", "resolve_conj", "resolve_neg", "isclose")
@rule("fake_quantize_per_tensor_affine")
def elementwise(call: Call) -> Value:
    """Axes that meet are the same; those of size 1 are repeated."""
    # Dropout in eval mode: which neuron is dropped depends on its place, and that is the result.
    if call.get("train") and not call.op.training:
        raise UnsupportedError
    return broadcast(call, call.values())


@rule("add")
def add(call: Call) -> Value:
    """A parameter that is added to what depends on the inputs is a bias."""
    one, two = call.get("self"), call.get("other")
    result = elementwise(call)
    if call.get("alpha", 1) == 1:
        add_bias(call, one, two)
        add_bias(call, two, one)
    return result


def add_bias(call: Call, value: object, bias: object) -> None:
    """State that one of two tensors is the bias of the other, if it is."""
    if isinstance(value, Value) and isinstance(bias, Value) and value.fed:
        made = value.product
        fits = made is not None and bias.wide_dims == made.dims
        call.bias(bias, made.weights if made is not None and fits else ())


@rule("sub", "subtract")
def subtract(call: Call) -> Value:
    """A statistic that is subtracted from what depends on the inputs is a mean."""
    one, two = call.get("self"), call.get("other")
    if isinstance(one, Value) and one.fed and isinstance(two, Value):
        call.kind(two, Kind.MEAN if call.is_statistic(two) else Kind.BIAS)
    return elementwise(call)


@rule("mul", "div", "multiply", "divide")
def multiply(call: Call) -> Value:
    """A parameter that multiplies what depends on the inputs is a gain."""
    one, two = call.get("self"), call.get("other")
    result = elementwise(call)
    for value, gain in ((one, two), (two, one)):
        if isinstance(value, Value) and value.fed and isinstance(gain, Value):
            call.gain(gain)
            if call.kind_of(gain) is Kind.GAIN:
                result.product = _scaled(value.product, gain)
    return result


def _scaled(before: Product | None, gain: Value) -> Product:
    """What was multiplied before, if it was along the same dimensions, now with a gain as well."""
    dims = gain.wide_dims
    weights = before.weights if before is not None and before.dims == dims else ()
    return Product((*weights, str(gain.parameter)), dims)


@rule("sqrt", "rsqrt")
def root(call: Call) -> Value:
    """A statistic under a root is a variance, also where a normalisation is written by hand."""
    if call.is_statistic(call["self"]):
        call.kind(call["self"], Kind.VARIANCE)
    return elementwise(call)


def broadcast(call: Call, values: Sequence[Value]) -> Value:
    rank = max((len(value.axes) for value in values), default=0)
    axes: list[Axis] = []
    for back in range(rank, 0, -1):
        meeting = [value.axes[-back] for value in values if len(value.axes) >= back]
        wide = [axis for axis in meeting if size_of(axis) != 1]
        for other in wide[1:]:
            call.same(wide[0], other)
        axes.append(wide[0] if wide else meeting[0])
    return Value(axes, constant=bool(values) and all(value.constant for value in values))


@rule("contiguous", "clone", "detach", "alias", "to", "_to_copy", "type_as", keeps_stacks=True)
@rule("lift_fresh_copy", "lift_fresh", keeps_stacks=True)
def unchanged(call: Call) -> Value:
    value: Value = call["self"] if isinstance(call.get("self"), Value) else call.values()[0]
    return replace(value)


@rule("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones")
@rule("new_full", "scalar_tensor", "empty", "empty_like", "new_empty")
def constant(call: Call) -> Value:
    return Value([fresh(n) for n in call.out_shape()], constant=True)


@rule("mean", "sum", "amax", "amin", "logsumexp", "var", "std", "norm", "linalg_vector_norm")
@rule("max", "min", "prod", "all", "any", "nansum", "argmax", "argmin", "var_mean", "median")
@rule("std_mean", "linalg_norm", "linalg_matrix_norm", "nanmean", "nanmedian", "aminmax", "mode")
@rule("frobenius_norm", "nuclear_norm", "count_nonzero")
def reduce(call: Call) -> list[Value]:
    """Symmetric in the positions of the axis, which therefore may be permuted and goes away."""
    value: Value = call["self"]
    rank = len(value.axes)
    if len(call.values()) > 1:  # the maximum or minimum of two tensors
        return [broadcast(call, call.values())]
    dims = call.get("dim")
    dims = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    gone = {d % rank for d in dims}
    for d in gone:
        call.rigid(value.axes[d])
        if _returns_positions(call):
            call.fix(value.axes[d])
    kept = [
        fresh(1) if d in gone else axis
        for d, axis in enumerate(value.axes)
        if d not in gone or call.get("keepdim")
    ]
    return [Value(kept) for _ in call.op.shapes]


# Operations that return values and, second, where they were found.
_FIND = ("max", "min", "median", "nanmedian", "mode", "sort", "topk", "kthvalue")


def _returns_positions(call: Call) -> bool:
    """Whether positions along the axis are part of what anything depends on."""
    found = call.op.name in _FIND and len(call.op.shapes) > 1
    return call.op.name in ("argmax", "argmin", "argsort") or (found and call.uses(1))


@rule("cumsum", "cumprod", "logcumsumexp", "flip", "roll", "cummax", "cummin", "diff")
@rule("index_select", "rot90")
def along(call: Call) -> list[Value]:
    """Told apart along some axes, each slice by itself."""
    value: Value = call["self"]
    dims = call.get("dim", call.get("dims"))
    others = [v for v in call.values() if v is not value]
    if dims is None or dims == [] or len(others) > (call.op.name == "index_select"):
        raise UnsupportedError  # without axes, `roll` goes along all of them at once
    return told_apart(call, value, [dims] if isinstance(dims, int) else dims)


def told_apart(call: Call, value: Value, dims: Iterable[int]) -> list[Value]:
    """Positions along some axes are told apart, and so are those of the results."""
    for d in dims:
        call.fix(value.axes[d])
    return _slice_by_slice(call, value, {d % len(value.axes) for d in dims})


@rule("sort", "argsort", "topk", "kthvalue")
def sort(call: Call) -> list[Value]:
    """Sorted values stand at certain places, in whatever order they were before."""
    value: Value = call["self"]
    if not value.axes:
        raise UnsupportedError
    dim = call["dim"] % len(value.axes)
    call.rigid(value.axes[dim])
    if _returns_positions(call):
        call.fix(value.axes[dim])
    if call.op.name == "kthvalue":
        return reduce(call)
    return _slice_by_slice(call, value, {dim})


def _slice_by_slice(call: Call, value: Value, dims: Collection[int]) -> list[Value]:
    """What stands along some axes is made anew, for each slice by itself."""
    for d in dims:
        call.findings.reduced.append([a for e, a in enumerate(value.axes) if e != d])
    return [
        Value(
            [
                call.fixed(n) if d in dims else a
                for d, (a, n) in enumerate(zip(value.axes, shape, strict=True))
            ]
        )
        for shape in call.op.shapes
    ]


@rule("cosine_similarity", "cdist", "pairwise_distance")
def compare(call: Call) -> Value:
    """Two tensors are compared along an axis, which goes away; `cdist` takes all pairs."""
    one, two = (call[name] for name in ("x1", "x2"))
    if call.op.name == "cdist":
        one, two = (
            replace(value, axes=[*value.axes[:-2], *rows, value.axes[-1]])
            for value, rows in ((one, [one.axes[-2], fresh(1)]), (two, [fresh(1), two.axes[-2]]))
        )
    joined = broadcast(call, [one, two])
    dim = call.get("dim", -1) % len(joined.axes)
    call.rigid(joined.axes[dim])
    rest = [axis for d, axis in enumerate(joined.axes) if d != dim]
    call.findings.reduced.append(rest)
    return Value([*rest, fresh(1)] if call.get("keepdim") else rest)


@rule("arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices", "hann_window")
@rule("hamming_window", "kaiser_window", "blackman_window", "bartlett_window")
def counted(call: Call) -> Value:
    """Numbers that tell positions apart."""
    return Value([fixed(n, unsaved(str(call.op))) for n in call.out_shape()])


@rule("repeat_interleave")
def repeat_each(call: Call) -> Value:
    """Copies of one position are equal, so nothing is known of their order."""
    value: Value = call["self"]
    if call["dim"] is None or not isinstance(call["repeats"], int):
        raise UnsupportedError
    dim = call["dim"] % len(value.axes)
    axes = list(value.axes)
    axes[dim] = product(axes[dim], fresh(call["repeats"]))
    return Value(axes)


@rule("softmax", "log_softmax", "_softmax", "_log_softmax")
def softmax(call: Call) -> Value:
    value: Value = call["self"]
    dim = call["dim"] % len(value.axes)
    call.rigid(value.axes[dim])
    call.findings.reduced.append([axis for d, axis in enumerate(value.axes) if d != dim])
    return Value(value.axes)
