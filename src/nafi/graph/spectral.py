"""Spectral normalisation when networks are fused.

Hides: where torch keeps the singular vectors that a weight is divided by. Promises: `unit_spectral`
changes no function; after `estimate_spectral` every normalised weight has the spectral norm one.

A weight is used as `W / (u^T W v)`, with vectors u and v that training keeps near the leading
singular ones of W. They mean nothing for a mean of several weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from nafi.graph.trace import copy_network


def unit_spectral(model: nn.Module) -> nn.Module:
    """A copy whose weights are stored as they are used, divided by their norm.

    Clients' weights can then be compared and averaged. A network without spectral normalisation is
    returned as it is.
    """
    if not any(True for _ in _normalised(model)):
        return model
    twin = copy_network(model)
    with torch.no_grad():
        for weight, matrix, u, v in _normalised(twin):
            weight.div_(torch.dot(u, matrix @ v))
    return twin


def estimate_spectral(model: nn.Module) -> nn.Module:
    """Set the singular vectors of all normalised weights to the leading ones, in place.

    Cost: a singular value decomposition of each such weight.
    """
    with torch.no_grad():
        for _, matrix, u, v in _normalised(model):
            left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
            u.copy_(left[:, 0])
            v.copy_(right[0])
    return model


def _normalised(model: nn.Module) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(stored weight, the same as a matrix, u, v) of every weight under spectral normalisation."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                weight = getattr(module, f"{hook.name}_orig")
                u, v = (getattr(module, f"{hook.name}_{vector}") for vector in "uv")
                yield weight, hook.reshape_weight_to_matrix(weight), u, v
        chains: Any = getattr(module, "parametrizations", {})
        for chain in chains.values():
            # Behind another parametrisation the stored weight is not what is divided.
            if isinstance(chain[0], _SpectralNorm) and chain.original.ndim > 1:
                norm = chain[0]
                matrix = norm._reshape_weight_to_matrix(chain.original)
                yield chain.original, matrix, norm._u, norm._v
