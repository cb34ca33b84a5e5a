"""The self-test of a spec: permute, run, compare.

Hides: the copy in double precision with random weights. Promises: a spec that passes does not
change the network's function when its groups are permuted; one that fails names the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import SpecError
from nafi.graph.inputs import Inputs, call, check_inputs, first_line, returned_tensors
from nafi.graph.permute import permute, permute_in_place, random_permutations
from nafi.graph.precision import DoublePrecision
from nafi.graph.spec import ModelSpec
from nafi.graph.trace import copy_network, evaluating, named_tensors, train_paths, unwrapped

# Relative differences that rounding explains, in double and in single precision.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
ROUNDS = 2
# A network with more numbers is tested in single precision, to save memory.
_LARGE = 2**24
_STRETCH = 2**17 - 1  # a prime


def check_spec(
    model: nn.Module, example_inputs: Inputs, spec: ModelSpec, *, seed: int = 0
) -> float:
    """Permute all groups at random in float64 and compare the outputs.

    Returns the worst difference relative to the largest output. Raises `SpecError` with the group,
    the difference and its parameters if rounding does not explain it. Weights are disturbed first,
    so that constant ones (norms after initialisation) cannot hide a mistake, nor inputs that are
    all equal. A network that insists on single precision is tested in that.
    Cost: four forward passes, and one more per group only if something is wrong.
    """
    model = unwrapped(model)
    spec.check_shapes(named_tensors(model))
    generator = torch.Generator().manual_seed(seed)
    return max(_permuted_gap(model, example_inputs, spec, generator) for _ in range(ROUNDS))


def _permuted_gap(
    model: nn.Module, example_inputs: Inputs, spec: ModelSpec, generator: torch.Generator
) -> float:
    """How much one permutation of all groups changes the output; too much raises."""
    probe, inputs, dtype = probe_of(model, example_inputs, generator)
    orders = random_permutations(spec, generator)
    expected, trained = run(probe, inputs), _trained(probe, inputs)
    permute_in_place(probe, spec, orders)  # a large network is not held twice
    gap = difference(run(probe, inputs), expected)
    if gap > TOLERANCE[dtype]:
        _blame(probe, inputs, spec, orders, TOLERANCE[dtype], gap)
    gap = max(gap, _training_gap(probe, inputs, trained))
    if gap > TOLERANCE[dtype]:
        raise SpecError(
            f"permuting all groups changes the output in training mode by {gap:.2g} of its "
            "size; give check=False if the network is random there"
        )
    return gap


def _trained(probe: nn.Module, inputs: Inputs) -> list[Tensor] | None:
    """What a network returns in training mode, if it does something else there.

    Normalisation and dropout stay in eval mode. What is random all the same proves nothing, nor
    does what cannot be run without targets.
    """
    try:
        results = [run(probe, inputs, training=True, seed=seed) for seed in (0, 1)]
        same = difference(results[0], run(probe, inputs)) == 0
        return None if difference(*results) > 0 or same else results[0]
    except Exception:
        return None


def _training_gap(permuted: nn.Module, inputs: Inputs, expected: list[Tensor] | None) -> float:
    """The difference in training mode."""
    try:
        if expected is None:
            return 0.0
        return difference(run(permuted, inputs, training=True), expected)
    except Exception:
        return 0.0


def _blame(
    probe: nn.Module,
    inputs: Inputs,
    spec: ModelSpec,
    orders: dict[str, Tensor],
    tolerance: float,
    worst: float,
) -> None:
    """Find the group that changes the output and raise."""
    expected = run(probe, inputs)
    if difference(run(probe, inputs), expected) > tolerance:
        raise SpecError(
            "the network returns something else each time that it runs on the same inputs, so its "
            "groups cannot be checked; let it draw random numbers from torch, or give check=False"
        )
    for name, order in orders.items():
        gap = difference(run(permute(probe, spec, {name: order}), inputs), expected)
        if gap > tolerance:
            raise SpecError(
                f"permuting group {name} changes the output by {gap:.2g} of its size; it holds "
                f"{', '.join(spec.tensors_of(name))}. Pin it with spec.pin({name!r})"
            )
    raise SpecError(f"permuting all groups together changes the output by {worst:.2g} of its size")


def probe_of(
    model: nn.Module, example_inputs: Inputs, generator: torch.Generator
) -> tuple[nn.Module, Inputs, torch.dtype]:
    """A disturbed copy on the CPU, inputs for it, and the precision in which the two run."""
    failure: Exception | None = None
    for dtype in _precisions(model):
        try:
            probe = in_general_position(model, dtype, generator)
            inputs = convert_inputs(example_inputs, dtype, generator)
            outputs = run(probe, inputs)
        except Exception as error:
            failure = failure or error
            continue
        if not any(torch.isfinite(t).any() for t in outputs if t.is_floating_point()) and outputs:
            raise SpecError(
                "the network returns nothing finite on the example inputs, so its groups cannot be "
                "checked; give other inputs, or check=False"
            )
        return probe, inputs, dtype
    raise SpecError(
        f"{type(model).__name__} does not run on the example inputs: {first_line(failure)}"
    ) from failure


def _precisions(model: nn.Module) -> Sequence[torch.dtype]:
    """Those to try, the best first."""
    count = sum(tensor.numel() for tensor in named_tensors(model).values())
    return [torch.float32] if count > _LARGE else list(TOLERANCE)


def in_general_position(
    model: nn.Module, dtype: torch.dtype, generator: torch.Generator
) -> nn.Module:
    """A copy on the CPU whose weights are disturbed, in eval mode."""
    probe = converted(model, dtype).eval()
    with torch.no_grad():
        for tensor in dict.fromkeys(named_tensors(probe).values()):
            if tensor.is_floating_point() and tensor.numel():
                _disturb(tensor, generator)
    return probe


def _disturb(tensor: Tensor, generator: torch.Generator) -> None:
    """Change all numbers of a tensor.

    Noise is drawn once for a stretch that is as long as no row, for drawing that of all numbers
    takes longer than the network: no two rows get the same.
    """
    count = min(tensor.numel(), _STRETCH)
    drawn = torch.randn(count, generator=generator, dtype=tensor.dtype)
    scale = tensor.abs().mean().clamp(min=0.05)
    # Multiplying keeps variances positive; adding moves what is zero.
    factors, added = drawn.mul(0.2).exp_(), drawn.abs().mul_(0.05 * scale)
    flat = tensor.reshape(-1)
    for stretch in torch.split(flat, _STRETCH):
        disturbed = factors[: len(stretch)].mul(stretch).add_(added[: len(stretch)])
        stretch.copy_(torch.where(torch.isfinite(disturbed), disturbed, stretch))
    if flat.data_ptr() != tensor.data_ptr():  # memory in another order than that of its axes
        tensor.copy_(flat.reshape(tensor.shape))


def converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy on the CPU in this precision, complex numbers too."""

    def convert(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to("cpu", dtype.to_complex())
        return tensor.to("cpu", dtype) if tensor.is_floating_point() else tensor.cpu()

    twin: nn.Module = copy_network(model)._apply(convert)  # type: ignore[no-untyped-call]
    return twin


def convert_inputs(inputs: Inputs, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Inputs on the CPU, floating-point ones in this precision; constant ones become random."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensor = leaf.detach().cpu()
        if not tensor.is_floating_point():
            return tensor
        tensor = tensor.to(dtype)
        if _is_constant(tensor):
            tensor = tensor + torch.rand(tensor.shape, generator=generator, dtype=dtype)
        return tensor

    result: Inputs = pytree.tree_map(convert, check_inputs(inputs))
    return result


def _is_constant(tensor: Tensor) -> bool:
    """Whether all of several values are equal; those of sparse tensors are not looked at."""
    if tensor.layout is not torch.strided or tensor.numel() < 2:
        return False
    return bool((tensor == tensor.flatten()[0]).all())


def run(model: nn.Module, inputs: Inputs, *, training: bool = False, seed: int = 0) -> list[Tensor]:
    """All tensors that the network returns in eval mode, or along the paths of training mode.

    A network in double precision computes nothing in less, whatever its code says.
    """
    with evaluating(model), _precision_of(model):
        if training:
            train_paths(model)
            torch.manual_seed(seed)
        return [tensor.clone() for tensor in returned_tensors(call(model, inputs))]


def _precision_of(model: nn.Module) -> AbstractContextManager[Any]:
    tensors = named_tensors(model).values()
    is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return DoublePrecision() if is_double else nullcontext()  # type: ignore[no-untyped-call]


def difference(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference between outputs, relative to the largest value of each."""
    if [t.shape for t in outputs] != [t.shape for t in expected]:
        return float("inf")
    worst = 0.0
    for one, two in zip(outputs, expected, strict=True):
        if not one.numel():
            continue
        kind = torch.complex128 if two.is_complex() else torch.float64
        one, two = one.to(kind), two.to(kind)
        finite = torch.isfinite(two)
        if not torch.isfinite(one).equal(finite):
            return float("inf")
        if finite.any():
            scale = max(float(two[finite].abs().max()), 1e-12)
            worst = max(worst, float((one - two)[finite].abs().max()) / scale)
    return worst
