"""Weight normalisation when networks are fused.

Hides: where torch keeps the gain and the direction that a weight is computed from.
Promises: `unit_directions` changes no function; after `gains_of_directions` every weight is what is
stored as its direction, and no direction is zero.

A weight is used as `g v / |v|`. Averaged apart, g and v are not those of any mean of weights, and a
neuron that nobody owns has a direction of zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from nafi.graph.trace import copy_network


def unit_directions(model: nn.Module) -> nn.Module:
    """A copy whose directions are the weights that are used, so that gains are their norms.

    Clients' weights can then be compared and averaged. A network without weight normalisation is
    returned as it is.
    """
    if not any(True for _ in _normalised(model)):
        return model
    twin = copy_network(model)
    with torch.no_grad():
        for gain, direction, dim in _normalised(twin):
            direction.copy_(torch._weight_norm(direction, gain, dim))
            gain.copy_(_norms(direction, dim))
    return twin


def gains_of_directions(model: nn.Module) -> nn.Module:
    """Set all gains to the norms of their directions, in place."""
    with torch.no_grad():
        for gain, direction, dim in _normalised(model):
            gain.copy_(_norms(direction, dim))
    return fill_directions(model)


def fill_directions(model: nn.Module) -> nn.Module:
    """Give directions of zero some other, in place: their gain is zero as well, but 0/0 is not."""
    with torch.no_grad():
        for _, direction, dim in _normalised(model):
            direction.add_((_norms(direction, dim) == 0).to(direction.dtype))
    return model


def _norms(direction: Tensor, dim: int) -> Tensor:
    return torch.norm_except_dim(direction, 2, dim)


def _normalised(model: nn.Module) -> Iterator[tuple[Tensor, Tensor, int]]:
    """(gain, direction, the axis that the gain runs along) of every normalised weight."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                gain, direction = (getattr(module, f"{hook.name}_{part}") for part in "gv")
                yield gain, direction, hook.dim
        chains: Any = getattr(module, "parametrizations", {})
        for chain in chains.values():
            if isinstance(chain[0], _WeightNorm):
                yield chain.original0, chain.original1, chain[0].dim
