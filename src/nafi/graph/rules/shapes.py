"""Operations that move, cut and join axes.

Hides: views, slices and paddings. Promises: a cut or a join of axes that the segments can express
is expressed; positions that are picked out one by one are told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import gcd

from nafi.graph.atoms import Axis, fresh, product, resolve, settled, size_of
from nafi.graph.rules.calls import Call, Unfolded, UnsupportedError, Value, rule
from nafi.graph.rules.pointwise import broadcast

# An axis of at most this many is worth considering as query, key and value side by side.
_FEW = 8


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "_reshape_alias", "view_copy")
@rule("view_as", "reshape_as", "ravel")
def reshape(call: Call) -> Value:
    """Cut both shapes into the smallest runs of equal size and unify their products."""
    value: Value = call["self"]
    result = Value([], value.source, value.constant)
    if 0 in call.out_shape():  # no number is in it, so nothing can be said of their order
        return Value([fresh(n) if n else [] for n in call.out_shape()])
    for whole, run in _runs(value.axes, call.out_shape()):
        if len(whole) == len(run) == 1:
            run = whole
        elif len(run) > 1 and 1 < size_of(run[0]) <= _FEW and result.stack is None:
            result.stack = Unfolded(product(*whole), run, call.misfit)
        else:
            call.same(product(*whole), product(*run))
        result.axes += run
    return result


def _runs(axes: list[Axis], shape: Sequence[int]) -> Iterator[tuple[list[Axis], list[Axis]]]:
    """The shortest stretches of axes and of new, unknown axes that have equal sizes."""
    i = j = 0
    sizes = [size_of(axis) for axis in axes]
    while i < len(sizes) or j < len(shape):
        start_i, start_j = i, j
        have, want = 1, 1
        while have != want or have == 1:
            if have == want == 1 and (i >= len(sizes) or j >= len(shape)):
                break
            if have <= want and i < len(sizes):
                have, i = have * sizes[i], i + 1
            else:
                want, j = want * shape[j], j + 1
        if i == start_i and j == start_j:  # only sizes of 1 are left on one side
            i, j = len(sizes), len(shape)
        yield axes[start_i:i], [fresh(n) for n in shape[start_j:j]]


@rule("permute", keeps_stacks=True)
def permute(call: Call) -> Value:
    value: Value = call["self"]
    return replace(value, axes=[value.axes[d] for d in call["dims"]])


@rule("movedim", "moveaxis", keeps_stacks=True)
def movedim(call: Call) -> Value:
    value: Value = call["self"]
    rank = len(value.axes)
    source, target = (
        [d % rank for d in ([dims] if isinstance(dims, int) else dims)]
        for dims in (call["source"], call["destination"])
    )
    rest = iter(axis for d, axis in enumerate(value.axes) if d not in source)
    moved = dict(zip(target, source, strict=True))
    axes = [value.axes[moved[d]] if d in moved else next(rest) for d in range(rank)]
    return replace(value, axes=axes)


@rule("transpose", "swapaxes", "swapdims", keeps_stacks=True)
def transpose(call: Call) -> Value:
    value: Value = call["self"]
    axes = list(value.axes)
    one, two = (call.get("dim0", call.get("axis0")), call.get("dim1", call.get("axis1")))
    axes[one], axes[two] = axes[two], axes[one]
    return replace(value, axes=axes)


@rule("t", "numpy_T", "mT", keeps_stacks=True)
def transpose_last(call: Call) -> Value:
    value: Value = call["self"]
    axes = list(value.axes)
    if len(axes) > 1:
        axes[-1], axes[-2] = axes[-2], axes[-1]
    return Value(axes, value.source, value.constant)


@rule("squeeze", keeps_stacks=True)
def squeeze(call: Call) -> Value:
    value: Value = call["self"]
    rank = len(value.axes)
    dims = call.get("dim")
    dims = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % rank for d in dims if size_of(value.axes[d]) == 1}
    axes = [axis for d, axis in enumerate(value.axes) if d not in gone]
    return replace(value, axes=axes)


@rule("unsqueeze", keeps_stacks=True)
def unsqueeze(call: Call) -> Value:
    value: Value = call["self"]
    axes = list(value.axes)
    axes.insert(call["dim"] % (len(axes) + 1), fresh(1))
    return replace(value, axes=axes)


@rule("expand", "expand_as", "broadcast_to", "expand_copy")
def expand(call: Call) -> Value:
    """A repeated axis is equal everywhere, so nothing is known of it."""
    value: Value = call["self"]
    shape = call.out_shape()
    axes: list[Axis] = [fresh(1)] * (len(shape) - len(value.axes)) + value.axes
    return Value(
        [a if size_of(a) == n else fresh(n) for a, n in zip(axes, shape, strict=True)],
        value.source,
        value.constant,
    )


@rule("repeat", "tile")
def repeat(call: Call) -> Value:
    value: Value = call["self"]
    shape = call.out_shape()
    axes: list[Axis] = [fresh(1)] * (len(shape) - len(value.axes)) + value.axes
    copies = [n // size_of(axis) for axis, n in zip(axes, shape, strict=True)]
    return Value(
        [fresh(n) if size_of(a) == 1 else a * n for a, n in zip(axes, copies, strict=True)]
    )


@rule("cat", "concat", "concatenate")
def concatenate(call: Call) -> Value:
    values: list[Value] = [v for v in call["tensors"] if v.shape != [0]]
    dim = call["dim"] % len(values[0].axes)
    for value in values[1:]:
        for d, axis in enumerate(value.axes):
            if d != dim:
                call.same(values[0].axes[d], axis)
    axes = list(values[0].axes)
    axes[dim] = [segment for value in values for segment in value.axes[dim]]
    return Value(axes)


@rule("stack")
def stack(call: Call) -> Value:
    values: list[Value] = call["tensors"]
    joined = broadcast(call, values)
    axes = list(joined.axes)
    axes.insert(call["dim"] % (len(axes) + 1), call.fixed(len(values)))
    return Value(axes)


def _pieces(call: Call, value: Value, dim: int, sizes: Sequence[int]) -> list[Value]:
    """Cut an axis into consecutive pieces; one without positions is an axis without segments."""
    dim %= len(value.axes)
    parts = [fresh(n) if n else [] for n in sizes]
    whole = value.axes[dim]
    if sum(n > 0 for n in sizes) <= 1:
        parts = [whole if n else [] for n in sizes]
    elif len(resolve(whole)) == 1 and not settled(whole) and call.is_within(whole):
        parts = _alike(call, whole, sizes)
    else:
        call.same(whole, [segment for part in parts for segment in part])
    return [
        Value([*value.axes[:dim], part, *value.axes[dim + 1 :]], value.source, value.constant)
        for part in parts
    ]


def _alike(call: Call, whole: Axis, sizes: Sequence[int]) -> list[Axis]:
    """Pieces of each neuron, made of equal stretches that have one order.

    A spec cannot say that each head is a query, a key and a value. That it is three times the same,
    it can, and so the heads may change places.
    """
    stretch = fresh(gcd(*sizes))
    count = size_of(whole) // size_of(stretch)
    call.same(whole, product(call.fixed(count), stretch))
    return [product(call.fixed(n // size_of(stretch)), stretch) if n else [] for n in sizes]


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def split(call: Call) -> list[Value]:
    value: Value = call["self"]
    dim = call.get("dim", 0)
    return _pieces(call, value, dim, [shape[dim] for shape in call.op.shapes])


@rule("slice", "narrow")
def take_slice(call: Call) -> Value:
    return _stretch(call, call["self"], call.out_shape())


def _stretch(call: Call, value: Value, shape: Sequence[int]) -> Value:
    """The stretch of an axis that the arguments name, for a result of this shape."""
    dim = call["dim"] % len(value.axes)
    total, length = size_of(value.axes[dim]), shape[dim]
    start = call.get("start") or 0
    if length in (0, total):
        axes = [*value.axes[:dim], value.axes[dim] if length else [], *value.axes[dim + 1 :]]
        return Value(axes, value.source, value.constant)
    if call.get("step", 1) != 1 or not isinstance(start, int):
        call.fix(value.axes[dim])
        axes = [*value.axes[:dim], call.fixed(length), *value.axes[dim + 1 :]]
        return Value(axes, value.source, value.constant)
    start = min(start % total if start < 0 else start, total)
    sizes = [n for n in (start, length, total - start - length) if n]
    return _pieces(call, value, dim, sizes)[1 if start else 0]


@rule("slice_scatter")
def write_slice(call: Call) -> Value:
    value, written = call["self"], call["src"]
    broadcast(call, [_stretch(call, value, written.shape), written])
    return Value(value.axes)


@rule("select_scatter")
def write_one(call: Call) -> Value:
    value, dim = call["self"], call["dim"] % len(call["self"].axes)
    call.fix(value.axes[dim])
    rest = [axis for d, axis in enumerate(value.axes) if d != dim]
    broadcast(call, [Value(rest), call["src"]])
    return Value(value.axes)


@rule("select", keeps_stacks=True)
def select(call: Call) -> Value:
    value: Value = call["self"]
    dim = call["dim"] % len(value.axes)
    return _parts(call, value, dim, [call["index"]])[0]


@rule("unbind", keeps_stacks=True)
def unbind(call: Call) -> list[Value]:
    value: Value = call["self"]
    dim = call["dim"] % len(value.axes)
    return _parts(call, value, dim, range(len(call.op.shapes)))


def _parts(call: Call, value: Value, dim: int, indices: Iterable[int]) -> list[Value]:
    """What lies at some positions of an axis, which are thereby told apart."""
    along = value.axes[dim]
    rest = [axis for d, axis in enumerate(value.axes) if d != dim]
    stack = value.stack
    if stack is not None and (stack.joined or along is not stack.along):
        stack.join()
        stack = None
    if stack is None and not value.constant:
        call.fix(along)
    return [
        Value(stack.part(rest, index) if stack else rest, value.source, value.constant)
        for index in indices
    ]


@rule("glu")
def glu(call: Call) -> Value:
    value: Value = call["self"]
    dim = call["dim"] % len(value.axes)
    half = size_of(value.axes[dim]) // 2
    one, two = _pieces(call, value, dim, [half, half])
    return broadcast(call, [one, two])


@rule("pad", "constant_pad_nd", "_pad_circular", "_pad_enum")
@rule(*(f"{kind}_pad{d}d" for kind in ("reflection", "replication") for d in (1, 2, 3)))
def pad(call: Call) -> Value:
    value: Value = call["self"]
    axes = list(value.axes)
    padding = call.get("pad", call.get("padding"))
    zeros = call.get("mode", "constant") == "constant" and call.op.name in (
        "pad",
        "constant_pad_nd",
    )
    for back, (before, after) in enumerate(zip(padding[::2], padding[1::2], strict=True), start=1):
        if before == after == 0:
            continue
        if zeros and before >= 0 and after >= 0:
            inner = axes[-back]
            around = [fresh(n) if n else [] for n in (before, after)]  # all zero, so free
            axes[-back] = [*around[0], *inner, *around[1]]
        else:
            call.fix(axes[-back])
            axes[-back] = call.fixed(size_of(axes[-back]) + before + after)
    return Value(axes)


@rule("unfold")
def windows(call: Call) -> Value:
    """Windows along an axis, whose positions become an axis of their own."""
    value: Value = call["self"]
    dim = call["dimension"] % len(value.axes)
    call.fix(value.axes[dim])
    axes = list(value.axes)
    axes[dim] = call.fixed(call.out_shape()[dim])
    return Value([*axes, call.fixed(call["size"])])


@rule("tril", "triu")
def triangle(call: Call) -> Value:
    value: Value = call["self"]
    for axis in value.axes[-2:]:
        call.fix(axis)
    return Value(value.axes)


@rule("diagonal")
def diagonal(call: Call) -> Value:
    value: Value = call["self"]
    dims = {call[name] % len(value.axes) for name in ("dim1", "dim2")}
    for d in dims:
        call.fix(value.axes[d])
    kept = [axis for d, axis in enumerate(value.axes) if d not in dims]
    return Value([*kept, call.fixed(call.out_shape()[-1])], value.source)


@rule("diag_embed")
def diagonal_matrix(call: Call) -> Value:
    """Rows and columns are the same neurons, in the same order."""
    value: Value = call["self"]
    if call["offset"] or (call["dim1"], call["dim2"]) != (-2, -1):
        raise UnsupportedError
    return Value([*value.axes, value.axes[-1]], value.source)


@rule("meshgrid")
def meshgrid(call: Call) -> list[Value]:
    """Every tensor lies along its own axis of the grid, and is the same along all others."""
    along = [value.axes[0] if value.axes else fresh(1) for value in call["tensors"]]
    if call.get("indexing") == "xy":
        along[:2] = along[1::-1]
    return [Value(list(along)) for _ in along]
