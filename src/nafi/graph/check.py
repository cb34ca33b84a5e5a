"""The self-test of a spec: permute, run, compare.

Hides: the copy in double precision with random weights. Promises: a spec that passes does not
change the network's function when its groups are permuted; one that fails names the group.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import SpecError
from nafi.graph.permute import permute, random_permutations
from nafi.graph.spec import ModelSpec
from nafi.graph.trace import Inputs, evaluating

TOLERANCE = 1e-7


def check_spec(
    model: nn.Module, example_inputs: Inputs, spec: ModelSpec, *, seed: int = 0
) -> float:
    """Permute all groups at random in float64 and compare the outputs.

    Returns the worst difference relative to the largest output. Raises `SpecError` with the group,
    the difference and its parameters if it is above `TOLERANCE`. Weights are disturbed first, so
    that constant ones (norms after initialisation) cannot hide a mistake.
    Cost: two forward passes, and one more per group only if something is wrong.
    """
    spec.check_shapes(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    probe = in_general_position(model, generator)
    inputs = to_double(example_inputs)
    expected = run(probe, inputs)
    orders = random_permutations(spec, generator)
    worst = difference(run(permute(probe, spec, orders), inputs), expected)
    if worst <= TOLERANCE:
        return worst
    for name, order in orders.items():
        gap = difference(run(permute(probe, spec, {name: order}), inputs), expected)
        if gap > TOLERANCE:
            raise SpecError(
                f"permuting group {name} changes the output by {gap:.2g} of its size; it holds "
                f"{', '.join(spec.tensors(name))}. Pin it with spec.pin({name!r})"
            )
    raise SpecError(f"permuting all groups together changes the output by {worst:.2g} of its size")


def in_general_position(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy in float64 whose weights are disturbed, in eval mode."""
    probe = copy.deepcopy(model).double().cpu().eval()
    with torch.no_grad():
        for tensor in dict.fromkeys(probe.state_dict(keep_vars=True).values()):
            if tensor.is_floating_point() and tensor.numel():
                noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
                scale = tensor.abs().mean().clamp(min=0.05)
                # Multiplying keeps variances positive; adding moves what is zero.
                disturbed = tensor * torch.exp(0.2 * noise) + 0.05 * scale * noise.abs()
                tensor.copy_(torch.where(torch.isfinite(disturbed), disturbed, tensor))
    return probe


def to_double(inputs: Inputs) -> tuple[Any, ...]:
    """Floating-point tensors among the inputs in float64 on the CPU."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().cpu().double() if leaf.is_floating_point() else leaf.detach().cpu()

    return tuple(pytree.tree_map(convert, tuple(inputs)))


def run(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """All tensors that the network returns in eval mode."""
    with evaluating(model), torch.no_grad():
        result = model(*inputs)
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference between outputs, relative to the largest value of each."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return float("inf")
    worst = 0.0
    for one, two in zip(found, expected, strict=True):
        if one.numel():
            scale = max(float(two.double().abs().max()), 1e-12)
            worst = max(worst, float((one.double() - two.double()).abs().max()) / scale)
    return worst
