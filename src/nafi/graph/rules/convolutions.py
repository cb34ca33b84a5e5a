"""Convolutions and what else works on places: pooling, sampling, shuffling pixels.

Hides: groups of channels. Promises: channels flow through, places are told apart.
"""

from __future__ import annotations

from math import prod

from nafi.graph.atoms import fresh, product, size_of
from nafi.graph.rules.calls import Call, Product, Value, rule
from nafi.graph.tensors import Layer


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
    call.consume(weight, weight.axes[reads])
    places = []
    for d, size in zip(range(-spatial, 0), call.out_shape()[-spatial:], strict=True):
        if _one_by_one(call, d, spatial):
            places.append(x.axes[d])
            continue
        for axis in (weight.axes[d], x.axes[d]):
            call.fix(axis, f"position within {call.op}")
        places.append(call.fixed(size))
    channels = product(group, outer)
    if call["bias"] is not None:
        call.same(channels, call["bias"].axes[0])
    call.layer(weight, call["bias"], _geometry(call, spatial, transposed))
    result = Value([*x.axes[: -spatial - 1], channels, *places])
    if call["bias"] is None and weight.parameter is not None:
        result.product = Product((weight.parameter,), result.wide_dims & {-spatial - 1})
    return result


def _geometry(call: Call, spatial: int, transposed: bool) -> Layer:
    def along(name: str) -> tuple[int, ...]:
        value = call.get(name, 0)
        numbers = value if isinstance(value, list | tuple) else [value]
        return tuple(numbers) if len(numbers) == spatial else tuple(numbers) * spatial

    padding = call["padding"]
    return Layer(
        call.op.name,
        stride=along("stride"),
        padding=padding if isinstance(padding, str) else along("padding"),
        output_padding=along("output_padding") if transposed else (),
        dilation=along("dilation"),
        groups=call["groups"],
        transposed=transposed,
    )


def _one_by_one(call: Call, dim: int, spatial: int) -> bool:
    """Whether a convolution treats each place along a dimension by itself."""

    def along(name: str, default: int) -> object:
        value = call.get(name, default)
        return value if not isinstance(value, list) else value[dim] if len(value) > 1 else value[0]

    size = size_of(call["weight"].axes[dim])
    return size == 1 and along("stride", 1) == 1 and along("padding", 0) in (0, "valid", "same")


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(call: Call) -> Value:
    value: Value = call["self"]
    groups: int = call["groups"]
    outer, inner = fresh(groups), fresh(size_of(value.axes[1]) // groups)
    call.same(value.axes[1], product(outer, inner))
    return Value([value.axes[0], product(inner, outer), *value.axes[2:]])


@rule("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")
@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d")
@rule("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d")
@rule("upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "lp_pool2d")
@rule("_upsample_nearest_exact2d", "max_pool2d_with_indices", "_upsample_bilinear2d_aa")
@rule("_upsample_nearest_exact1d", "_upsample_nearest_exact3d", "_upsample_bicubic2d_aa")
@rule("lp_pool1d", "lp_pool3d", "max_pool1d_with_indices", "max_pool3d_with_indices")
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


@rule("max_unpool2d", "max_unpool3d")
def max_unpool(call: Call) -> list[Value]:
    """The indices are those of the same channels."""
    value: Value = call["self"]
    spatial = int(call.op.name[-2])
    for one, two in zip(value.axes[:-spatial], call["indices"].axes[:-spatial], strict=True):
        call.same(one, two)
    for axis in call["indices"].axes[-spatial:]:
        call.fix(axis)
    return resample(call)


@rule("im2col")
def patches(call: Call) -> Value:
    """Each channel with all places of a window, for all windows."""
    value: Value = call["self"]
    for axis in value.axes[-2:]:
        call.fix(axis, f"position within {call.op}")
    window = call.fixed(prod(call["kernel_size"]))
    channels = product(value.axes[-3], window)
    return Value([*value.axes[:-3], channels, call.fixed(call.out_shape()[-1])])


@rule("col2im")
def join_patches(call: Call) -> Value:
    value: Value = call["self"]
    window = prod(call["kernel_size"])
    channels = fresh(size_of(value.axes[-2]) // window)
    call.same(value.axes[-2], product(channels, call.fixed(window)))
    call.fix(value.axes[-1], f"position within {call.op}")
    return Value([*value.axes[:-2], channels, *(call.fixed(n) for n in call.out_shape()[-2:])])


@rule("affine_grid_generator")
def affine_grid(call: Call) -> Value:
    theta: Value = call["theta"]
    for axis in theta.axes[1:]:
        call.fix(axis)
    return Value([theta.axes[0], *(call.fixed(n) for n in call.out_shape()[1:])])


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def sample(call: Call) -> Value:
    """Each channel by itself, at the places that a grid names."""
    value, grid = call["input"], call["grid"]
    for axis in (*value.axes[2:], grid.axes[-1]):
        call.fix(axis, f"position within {call.op}")
    call.same(value.axes[0], grid.axes[0])
    return Value([value.axes[0], value.axes[1], *grid.axes[1:-1]])
