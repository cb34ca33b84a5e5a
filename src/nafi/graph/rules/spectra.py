"""Fourier transforms and complex numbers.

Hides: which axes a transform runs along, and how complex numbers are kept as pairs. Promises: an
axis that is transformed is told apart, all others pass.
"""

from __future__ import annotations

from dataclasses import replace

from nafi.graph.rules.calls import Call, Value, rule
from nafi.graph.rules.pointwise import told_apart

_KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


@rule(*(f"fft_{kind}{axes}" for kind in _KINDS for axes in ("", "2", "n")))
@rule("fft_fftshift", "fft_ifftshift")
def transform(call: Call) -> list[Value]:
    value: Value = call["self"]
    rank = len(value.axes)
    dims, sizes = call.get("dim"), call.get("s")
    if dims is None:  # the last ones, as many as sizes are given
        dims = range(rank) if sizes is None else range(rank - len(sizes), rank)
    return told_apart(call, value, [dims] if isinstance(dims, int) else dims)


@rule("view_as_real")
def view_as_real(call: Call) -> Value:
    value: Value = call["self"]
    return replace(value, axes=[*value.axes, call.fixed(2)], product=None)


@rule("view_as_complex")
def view_as_complex(call: Call) -> Value:
    value: Value = call["self"]
    call.fix(value.axes[-1])
    return replace(value, axes=value.axes[:-1], product=None)


@rule("stft")
def stft(call: Call) -> Value:
    """Frequencies and frames of each signal."""
    return _signals(call, 1)


@rule("istft")
def istft(call: Call) -> Value:
    """From complex numbers, for each signal by itself."""
    return _signals(call, 2)


def _signals(call: Call, count: int) -> Value:
    """The last axes of signals become others; windows are the same for all of them."""
    value, *windows = call.values()
    for axis in [*value.axes[-count:], *(axis for window in windows for axis in window.axes)]:
        call.fix(axis)
    kept = value.axes[:-count]
    return Value([*kept, *(call.fixed(n) for n in call.out_shape()[len(kept) :])])
