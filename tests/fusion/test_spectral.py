"""Spectral normalisation: the fused weights have the norm that the clients' had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

import nafi
from nafi.graph import permute
from nafi.graph.permute import random_permutations
from tests.fusion.networks import gap

Normalise = Callable[[nn.Module], nn.Module]
INPUTS = (torch.randn(6, 5, generator=torch.Generator().manual_seed(0)),)


def network(seed: int, normalise: Normalise, scale: float) -> nn.Sequential:
    """A network whose stored weights have any scale, and whose vectors have settled."""
    torch.manual_seed(seed)
    layers = [nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3)]
    with torch.no_grad():
        for layer in layers[::2]:
            layer.weight.mul_(scale)
    model = nn.Sequential(*(normalise(m) if isinstance(m, nn.Linear) else m for m in layers))
    for _ in range(200):
        model.train()(*INPUTS)
    return model.eval()


@pytest.mark.parametrize("normalise", [parametrizations.spectral_norm, spectral_norm])
def test_fused_weights_have_the_norm_one(normalise: Normalise) -> None:
    models = [network(s, normalise, scale) for s, scale in enumerate((0.5, 4.0, 30.0))]
    result = nafi.fuse(models, INPUTS, method="nafi", max_width=1.5)
    with torch.no_grad():
        result.model(*INPUTS)
    for layer in (module for module in result.model if isinstance(module, nn.Linear)):
        assert float(torch.linalg.matrix_norm(layer.weight, 2)) == pytest.approx(1.0, abs=1e-5)
    assert set(result.model.state_dict()) == set(models[0].state_dict())


@pytest.mark.parametrize("method", ["nafi", "ot", "rebasin"])
@pytest.mark.parametrize("normalise", [parametrizations.spectral_norm, spectral_norm])
def test_permuted_copies_fuse_back(method: str, normalise: Normalise) -> None:
    model = network(0, normalise, 3.0)
    spec = nafi.groups(model, INPUTS)
    generator = torch.Generator().manual_seed(0)
    copies = [permute(model, spec, random_permutations(spec, generator)) for _ in range(3)]
    result = nafi.fuse(copies, INPUTS, method=method, spec=spec)
    assert gap(result.model, model, INPUTS) < 1e-4


def test_the_scale_of_stored_weights_does_not_matter() -> None:
    """Only `W / |W|` is ever used, so a client that stores 100 W says the same."""
    small, large = (
        [
            network(0, parametrizations.spectral_norm, 1.0),
            network(1, parametrizations.spectral_norm, scale),
        ]
        for scale in (1.0, 100.0)
    )
    assert gap(large[1], small[1], INPUTS) < 1e-4
    fused = [nafi.fuse(models, INPUTS, max_width=1.0).model for models in (small, large)]
    assert gap(*fused, INPUTS) < 1e-3
