"""How axes flow through each operation: one small rule per kind of operation.

Hides: the meaning of ATen arguments. Promises: a rule only states what is true of its operation
(these axes are the same, this one is fixed); an operation without a rule pins everything it
touches, so a gap costs coverage and never correctness.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nafi.graph.atoms import Axis, Pin, fixed, fresh, pin_axis, product, size_of, unify
from nafi.graph.trace import Op

# An axis of at most this many is worth considering as query, key and value side by side.
_FEW = 8


@dataclass
class Value:
    """What is known of a tensor.

    axes: one per dimension
    source: the parameter or buffer that it is a piece or a view of
    constant: all its entries are equal, so its axes restrict nothing
    stack: set while it is open whether what lies along one axis is told apart
    """

    axes: list[Axis]
    source: str | None = None
    constant: bool = False
    stack: Stack | None = None

    @property
    def shape(self) -> list[int]:
        return [size_of(axis) for axis in self.axes]


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
        own = {id(axis): part for axis, part in zip(self.run[1:], self.parts[index], strict=True)}
        return [own.get(id(axis), axis) for axis in axes]

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
    """

    consumed: list[tuple[str, Axis]] = field(default_factory=list)
    rigid: list[tuple[Axis, str]] = field(default_factory=list)
    reduced: list[list[Axis]] = field(default_factory=list)


class Call:
    """One operation with its arguments as values, and the verbs that rules are written in."""

    def __init__(self, op: Op, arguments: dict[str, Any], findings: Findings) -> None:
        self.op = op
        self.arguments = arguments
        self.findings = findings

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    @property
    def gave_up(self) -> Pin:
        return Pin(f"no rule for {self.op}", str(self.op))

    @property
    def misfit(self) -> Pin:
        return Pin(f"{self.op} joins axes that are cut differently", str(self.op))

    def fix(self, axis: Axis, why: str | None = None) -> Axis:
        """Forbid permuting an axis, because this operation tells its positions apart."""
        pin_axis(axis, Pin(why or f"{self.op} tells its positions apart"))
        return axis

    def fixed(self, size: int) -> Axis:
        return fixed(size, Pin(f"made by {self.op}"))

    def same(self, one: Axis, two: Axis) -> None:
        unify(one, two, self.misfit)

    def consume(self, value: Value, axis: Axis) -> None:
        if value.source is not None:
            self.findings.consumed.append((value.source, axis))

    def rigid(self, axis: Axis) -> None:
        self.findings.rigid.append((axis, self.op.name))

    def values(self) -> list[Value]:
        """Every tensor among the arguments."""
        found: list[Value] = []
        for argument in self.arguments.values():
            items = argument if isinstance(argument, list | tuple) else [argument]
            found += [item for item in items if isinstance(item, Value)]
        return found

    def out_shape(self, index: int = 0) -> tuple[int, ...]:
        return self.op.shapes[index]


Rule = Callable[[Call], "Value | list[Value]"]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations by their ATen name."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def apply(call: Call) -> list[Value]:
    """The values that an operation returns."""
    function = RULES.get(call.op.name)
    if function is None:
        function = pointwise if call.op.pointwise else unknown
    result = function(call)
    return result if isinstance(result, list) else [result]


def unknown(call: Call) -> list[Value]:
    """Without a rule, nothing that goes in may be permuted."""
    for value in call.values():
        for axis in value.axes:
            pin_axis(axis, call.gave_up)
    return [Value([fixed(n, call.gave_up) for n in shape]) for shape in call.op.shapes]


# ------------------------------------------------------------------------ element by element


@rule("where", "masked_fill", "lerp", "clamp", "addcmul", "addcdiv", "type_as", "isin", "dropout")
@rule("relu6", "hardswish", "softplus", "alpha_dropout", "feature_dropout", "rrelu", "gelu")
def pointwise(call: Call) -> Value:
    """Axes that meet are the same; those of size 1 are repeated."""
    return broadcast(call, call.values())


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


@rule("contiguous", "clone", "detach", "alias", "to", "_to_copy", "lift_fresh_copy", "identity")
@rule("native_dropout", "feature_alpha_dropout", "view_as_real_copy", "float", "double")
def unchanged(call: Call) -> Value:
    value: Value = call["self"] if isinstance(call.get("self"), Value) else call.values()[0]
    return replace(value)


@rule("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones")
@rule("new_full", "scalar_tensor", "empty", "empty_like", "new_empty")
def constant(call: Call) -> Value:
    return Value([fresh(n) for n in call.out_shape()], constant=True)


# ----------------------------------------------------------------------------------- shapes


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "_reshape_alias", "view_copy")
def reshape(call: Call) -> Value:
    """Cut both shapes into the smallest runs of equal size and unify their products."""
    value: Value = call["self"]
    result = Value([], value.source, value.constant)
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


@rule("permute", "movedim")
def permute(call: Call) -> Value:
    value: Value = call["self"]
    return replace(value, axes=[value.axes[d] for d in call["dims"]])


@rule("transpose", "swapaxes", "swapdims")
def transpose(call: Call) -> Value:
    value: Value = call["self"]
    axes = list(value.axes)
    one, two = (call.get("dim0", call.get("axis0")), call.get("dim1", call.get("axis1")))
    axes[one], axes[two] = axes[two], axes[one]
    return replace(value, axes=axes)


@rule("t", "numpy_T", "mT")
def transpose_last(call: Call) -> Value:
    value: Value = call["self"]
    axes = list(value.axes)
    if len(axes) > 1:
        axes[-1], axes[-2] = axes[-2], axes[-1]
    return Value(axes, value.source, value.constant)


@rule("squeeze")
def squeeze(call: Call) -> Value:
    value: Value = call["self"]
    rank = len(value.axes)
    dims = call.get("dim")
    dims = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % rank for d in dims if size_of(value.axes[d]) == 1}
    axes = [axis for d, axis in enumerate(value.axes) if d not in gone]
    return replace(value, axes=axes)


@rule("unsqueeze")
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
    return Value(
        [axis * (n // size_of(axis)) for axis, n in zip(axes, shape, strict=True)], value.source
    )


# --------------------------------------------------------------------- joining and splitting


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
    """Cut an axis into consecutive pieces."""
    dim %= len(value.axes)
    parts = [fresh(n) for n in sizes]
    if len(sizes) > 1:
        call.same(value.axes[dim], [segment for part in parts for segment in part])
    else:
        parts = [value.axes[dim]]
    return [
        Value([*value.axes[:dim], part, *value.axes[dim + 1 :]], value.source, value.constant)
        for part in parts
    ]


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def split(call: Call) -> list[Value]:
    value: Value = call["self"]
    dim = call.get("dim", 0)
    return _pieces(call, value, dim, [shape[dim] for shape in call.op.shapes])


@rule("slice", "narrow")
def take_slice(call: Call) -> Value:
    value: Value = call["self"]
    dim = call["dim"] % len(value.axes)
    total, length = size_of(value.axes[dim]), call.out_shape()[dim]
    start = call.get("start") or 0
    if length == total:
        return Value(value.axes, value.source, value.constant)
    if call.get("step", 1) != 1 or not isinstance(start, int):
        call.fix(value.axes[dim])
        axes = [*value.axes[:dim], call.fixed(length), *value.axes[dim + 1 :]]
        return Value(axes, value.source, value.constant)
    start = min(start % total if start < 0 else start, total)
    sizes = [n for n in (start, length, total - start - length) if n]
    return _pieces(call, value, dim, sizes)[1 if start else 0]


@rule("select")
def select(call: Call) -> Value:
    value: Value = call["self"]
    dim = call["dim"] % len(value.axes)
    return _parts(call, value, dim, [call["index"]])[0]


@rule("unbind")
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


@rule("pad", "constant_pad_nd", "reflection_pad2d", "replication_pad2d")
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
            around = [call.fixed(n) if n else [] for n in (before, after)]
            axes[-back] = [*around[0], *inner, *around[1]]
        else:
            call.fix(axes[-back])
            axes[-back] = call.fixed(size_of(axes[-back]) + before + after)
    return Value(axes)


# ------------------------------------------------------------------------------- reductions


@rule("mean", "sum", "amax", "amin", "logsumexp", "var", "std", "norm", "linalg_vector_norm")
@rule("max", "min", "prod", "all", "any", "nansum", "aminmax")
def reduce(call: Call) -> list[Value]:
    """Symmetric in the positions of the axis, which therefore may be permuted and goes away."""
    value: Value = call["self"]
    rank = len(value.axes)
    dims = call.get("dim")
    if len(call.values()) > 1:  # the binary max and min
        return [broadcast(call, call.values())]
    dims = list(range(rank)) if dims is None or dims == [] else dims
    gone = {d % rank for d in ([dims] if isinstance(dims, int) else dims)}
    kept = [axis for d, axis in enumerate(value.axes) if d not in gone]
    for d in gone:
        call.rigid(value.axes[d])
    results = [Value(kept) for _ in call.op.shapes]
    if call.get("keepdim"):
        results[0] = Value([fresh(1) if d in gone else a for d, a in enumerate(value.axes)])
    if len(results) > 1:  # the second result is a position
        for d in gone:
            call.fix(value.axes[d])
        results = [results[0]] * len(results)
    return results


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "softmin", "normalize")
def softmax(call: Call) -> Value:
    value: Value = call["self"]
    dim = call["dim"] % len(value.axes)
    call.rigid(value.axes[dim])
    call.findings.reduced.append([axis for d, axis in enumerate(value.axes) if d != dim])
    return Value(value.axes)


# --------------------------------------------------------------------------------- products


def contract(
    call: Call, operands: Sequence[tuple[Value, Sequence[Any]]], out: Sequence[Any]
) -> Value:
    """A sum of products: axes with one label are the same, those not in `out` are summed over."""
    labelled: dict[Any, Axis] = {}
    for value, labels in operands:
        for label, axis in zip(labels, value.axes, strict=True):
            if label not in labelled or size_of(labelled[label]) == 1:
                labelled[label] = axis
            elif size_of(axis) != 1:
                call.same(labelled[label], axis)
            if label not in out:
                call.consume(value, axis)
    return Value([labelled[label] for label in out])


@rule("linear")
def linear(call: Call) -> Value:
    x: Value = call["input"]
    batch = list(range(len(x.axes) - 1))
    result = contract(call, [(x, [*batch, "in"]), (call["weight"], ["out", "in"])], [*batch, "out"])
    if call["bias"] is not None:
        call.same(result.axes[-1], call["bias"].axes[0])
    return result


@rule("matmul", "mm", "bmm", "mv", "dot")
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
    return broadcast(call, [result, call["self"]])


@rule("einsum")
def einsum(call: Call) -> Value:
    equation = call["equation"].replace(" ", "")
    values: list[Value] = call["tensors"]
    if "." in equation:
        return unknown(call)[0]
    left, _, right = equation.partition("->")
    if "->" not in equation:
        letters = sorted(set(left) - {","})
        right = "".join(c for c in letters if left.count(c) == 1)
    operands = list(zip(values, left.split(","), strict=True))
    if any(len(set(labels)) < len(labels) for _, labels in operands):
        return unknown(call)[0]
    return contract(call, operands, right)


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Value:
    """softmax(q k^T scale) v; the scale follows from the width of a head unless it is given."""
    query, key, value = call["query"], call["key"], call["value"]
    if call.get("enable_gqa"):
        return unknown(call)[0]
    batch = list(range(len(query.axes) - 2))
    scores = contract(
        call,
        [(query, [*batch, "row", "k"]), (key, [*batch, "column", "k"])],
        [*batch, "row", "column"],
    )
    if call.get("scale") is None:
        call.rigid(query.axes[-1])
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
    if call["bias"] is not None:
        call.same(result.axes[-1], call["bias"].axes[0])
    return result


# ----------------------------------------------------------------------------- convolutions


@rule("conv1d", "conv2d", "conv3d")
def convolution(call: Call) -> Value:
    return _convolve(call, transposed=False)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(call: Call) -> Value:
    return _convolve(call, transposed=True)


def _convolve(call: Call, transposed: bool) -> Value:
    """Channels in groups: group g of the output reads group g of the input and nothing else."""
    x: Value = call["input"]
    weight: Value = call["weight"]
    spatial = len(weight.axes) - 2
    groups: int = call["groups"]
    reads, writes = (0, 1) if transposed else (1, 0)
    group = fresh(groups)
    inner = fresh(size_of(x.axes[-spatial - 1]) // groups)
    outer = fresh(call.out_shape()[-spatial - 1] // groups)
    call.same(x.axes[-spatial - 1], product(group, inner))
    # The axis of the weights that is not divided by the groups carries the group as well.
    call.same(weight.axes[reads], product(group, inner) if transposed else inner)
    call.same(weight.axes[writes], outer if transposed else product(group, outer))
    call.consume(weight, inner)
    for axis in [*weight.axes[2:], *x.axes[-spatial:]]:
        call.fix(axis, f"position within {call.op}")
    channels = product(group, outer)
    if call["bias"] is not None:
        call.same(channels, call["bias"].axes[0])
    places = [call.fixed(n) for n in call.out_shape()[-spatial:]]
    return Value([*x.axes[: -spatial - 1], channels, *places])


@rule("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")
@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d")
@rule("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d")
@rule("upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "lp_pool2d")
@rule("_upsample_nearest_exact2d", "max_pool2d_with_indices", "_upsample_bilinear2d_aa")
@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool3d")
def resample(call: Call) -> list[Value]:
    """Each channel by itself; the places, as many axes as the name says, are told apart."""
    value = call.values()[0]
    spatial = next(
        int(c) for c in reversed(call.op.name.replace("_with_indices", "")) if c in "123"
    )
    for axis in value.axes[-spatial:]:
        call.fix(axis, f"position within {call.op}")
    return [
        Value([*value.axes[:-spatial], *(call.fixed(n) for n in shape[-spatial:])])
        for shape in call.op.shapes
    ]


@rule("pixel_shuffle")
def pixel_shuffle(call: Call) -> Value:
    value: Value = call["self"]
    factor: int = call["upscale_factor"]
    channels = fresh(size_of(value.axes[-3]) // factor**2)
    call.same(value.axes[-3], product(channels, call.fixed(factor**2)))
    for axis in value.axes[-2:]:
        call.fix(axis)
    return Value([*value.axes[:-3], channels, *(call.fixed(n) for n in call.out_shape()[-2:])])


@rule("pixel_unshuffle")
def pixel_unshuffle(call: Call) -> Value:
    value: Value = call["self"]
    for axis in value.axes[-2:]:
        call.fix(axis)
    channels = product(value.axes[-3], call.fixed(call["downscale_factor"] ** 2))
    return Value([*value.axes[:-3], channels, *(call.fixed(n) for n in call.out_shape()[-2:])])


# ---------------------------------------------------------------------------- normalisation


def _per_channel(call: Call, value: Value, names: Sequence[str]) -> None:
    for name in names:
        if call.get(name) is not None:
            call.same(value.axes[1], call[name].axes[0])


@rule("batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm", "instance_norm")
def batch_norm(call: Call) -> Value:
    value: Value = call["input"]
    _per_channel(call, value, ["weight", "bias", "running_mean", "running_var"])
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
    return Value(value.axes)


@rule("group_norm")
def group_norm(call: Call) -> Value:
    value: Value = call["input"]
    groups: int = call["num_groups"]
    group, inner = fresh(groups), fresh(size_of(value.axes[1]) // groups)
    call.same(value.axes[1], product(group, inner))
    call.rigid(value.axes[1])
    call.findings.reduced.append([value.axes[0], group])
    _per_channel(call, value, ["weight", "bias"])
    return Value(value.axes)


@rule("prelu")
def prelu(call: Call) -> Value:
    value: Value = call["self"]
    weight: Value = call["weight"]
    if size_of(weight.axes[0]) > 1:
        call.same(value.axes[1 if len(value.axes) > 1 else 0], weight.axes[0])
    return Value(value.axes)


# --------------------------------------------------------------------- look-ups and recurrence


@rule("embedding")
def embedding(call: Call) -> Value:
    weight: Value = call["weight"]
    call.fix(weight.axes[0], "rows are looked up by number")
    return Value([*call["indices"].axes, *weight.axes[1:]])


@rule("getitem")
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
                call.consume(parameter, axis)
            writes = writes + unit
        reads = writes
    for state in states:
        for unit in [] if state.constant else units:
            call.same(state.axes[-1], unit)
    batch = x.axes[0 if call["batch_first"] else 1]
    along, unit = call.fixed(len(units)), fresh(hidden)
    ends = Value([along, batch, unit], stack=Ends(along, unit, units, call.misfit))
    return [Value([*x.axes[:-1], reads]), *[ends for _ in states]]


@rule("_assert_tensor_metadata", "_assert_async", "sym_constrain_range_for_size")
def asserts(call: Call) -> list[Value]:
    return []


# Operations that leave open whether a stack is one tensor or several.
KEEPS_STACKS = {"select", "unbind", "getitem", "permute", "transpose", "t", "squeeze", "unsqueeze"}
KEEPS_STACKS |= {name for name, function in RULES.items() if function is unchanged}
