"""Neurons that are kept apart: the fused network is then the mean of the models.

Permuted copies share every neuron, so they cannot show what becomes of a neuron that one model owns
and another does not. Here no neuron is shared: every tensor of the fused network holds the models
side by side, and whatever reads hidden neurons must read a share of each model.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nafi.fusion import FusionWarning
from nafi.graph import SpecWarning
from nafi.graph.check import in_general_position
from tests.fusion.apart import prepared, shared_groups, side_by_side
from tests.graph import zoo

NAMES = [entry.name for entry in zoo.OURS + zoo.FOREIGN]
# The weights that make these neurons also read them, transposed. A model must keep its own whole as
# what makes neurons and give a share of it as what reads them: no single number can be both.
TIED = {"tied_autoencoder", "tied_language_model"}
# Some hidden numbers are in no group, so that they are averaged: channels that are cut in two ways,
# hidden states that the network returns, one slope for all neurons, where to look, which expert.
AVERAGED = {"grouped_conv", "dict_outputs", "monai_unet", "spatial_transformer", "experts"}
AVERAGED |= {"bert_eager", "bert_sdpa", "gpt2"}


def outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.no_grad():
        result = model(*inputs)
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


# One of each kind for the inner loop.
FAST = {"mlp_2", "lenet_flatten", "unet_bilinear", "resnet_basic", "self_attention", "gru"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in NAMES
        if name not in TIED
    ],
)
def test_models_apart_are_their_mean(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    model, inputs = zoo.seeded(name)
    doubles = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    one = in_general_position(model.eval(), torch.float64, generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecWarning)
        warnings.simplefilter("ignore", FusionWarning)
        spec = replace(zoo.traced(name), example_inputs=doubles)
        other = in_general_position(model.eval(), torch.float64, generator)
        networks = prepared([one, other], doubles, spec)
        shared = shared_groups(networks)
        if shared or name in AVERAGED:
            # Neurons whose width cannot change are averaged, too: equal models, all else apart.
            other, networks = one, prepared([one, one], doubles, spec)
        fused = side_by_side(networks, shared)
    expected = [
        (a + b) / 2 for a, b in zip(outputs(one, doubles), outputs(other, doubles), strict=True)
    ]
    for found, wanted in zip(outputs(fused, doubles), expected, strict=True):
        scale = float(wanted.abs().max())
        assert float((found - wanted).abs().max()) < 1e-5 * scale
