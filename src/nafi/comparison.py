"""Whether two networks do the same.

Hides: which inputs tell, and how far numbers may differ by rounding. Promises: networks that
compute something else on the example inputs are told apart; neither is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import CheckpointError, NafiError
from nafi.graph import Inputs, call, check_inputs, evaluating, first_line, returned_tensors


def check_same(model: nn.Module, other: nn.Module, inputs: Inputs) -> None:
    """Refuse a network whose outputs differ from another one's by more than rounding.

    inputs: of their forward; numbers among them get noise added where the network runs on that,
        since example inputs are often zeros, which tell of biases alone
    """
    for example in (check_inputs(inputs), _noisy(inputs)):
        try:
            expected = _outputs(other, example)
        except Exception:  # the network's own code, which may need inputs of some kind
            continue
        try:
            found = _outputs(model, example)
        except Exception as error:
            raise NafiError(f"it does not run: {first_line(error)}") from error
        _check_outputs(found, expected)


def check_written(
    written: Path,
    target: Path,
    load: Callable[[Path], nn.Module],
    model: nn.Module,
    inputs: Inputs,
) -> None:
    """Refuse a file from which another network is read than was written.

    written: where it is until it takes the name of the target; load: reads it
    """
    try:
        check_same(load(written), model, inputs)
    except NafiError as error:
        reason = str(error).replace(str(written), "it")
        raise CheckpointError(
            f"{target} is not written: read again, the network would not be the same: {reason}"
        ) from error


def _noisy(inputs: Inputs) -> Any:
    generator = torch.Generator().manual_seed(0)

    def add_noise(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        noise = torch.randn(leaf.shape, generator=generator)
        return leaf + noise.to(leaf.device, leaf.dtype)

    return pytree.tree_map(add_noise, check_inputs(inputs))


def _outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    with evaluating(model):
        return returned_tensors(call(model, inputs))


def _check_outputs(found: list[Tensor], expected: list[Tensor]) -> None:
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in expected]:
        raise NafiError("its outputs have other shapes")
    for one, two in zip(found, expected, strict=True):
        difference = _difference(one, two)
        if difference > _rounding(two):
            raise NafiError(f"its outputs differ by {difference:.1e} of the largest")


def _difference(one: Tensor, two: Tensor) -> float:
    """The largest difference relative to the largest number; NaN equals NaN."""
    if not two.numel():
        return 0.0
    wide = torch.complex128 if two.is_complex() else torch.float64
    one, two = one.detach().cpu().to(wide), two.detach().cpu().to(wide)
    same = (one == two) | (one.isnan() & two.isnan())
    apart = torch.where(same, 0.0, (one - two).abs())
    sizes = two.abs()
    largest = float(sizes[sizes.isfinite()].max()) if bool(sizes.isfinite().any()) else 1.0
    return float(apart.nan_to_num(nan=torch.inf).max()) / (largest or 1.0)


def _rounding(tensor: Tensor) -> float:
    """How far numbers may be apart that were computed in another order."""
    numbers = tensor.is_floating_point() or tensor.is_complex()
    return sqrt(torch.finfo(tensor.dtype).eps) if numbers else 0.0
