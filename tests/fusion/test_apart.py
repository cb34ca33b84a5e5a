"""Neurons that are kept apart: the fused network is then the mean of the models.

Permuted copies share every neuron, so they cannot show what becomes of a neuron that one model owns
and another does not. Here no neuron is shared: every tensor of the fused network holds the models
side by side, and whatever reads hidden neurons must read a share of each model.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nafi.fusion import FusionWarning, Networks, check_clients, prepare_networks
from nafi.fusion.merge import finished_network, merged_network
from nafi.graph import ModelSpec, Positions, SpecWarning, groups
from nafi.graph.check import in_general_position
from tests.graph import zoo

NAMES = [entry.name for entry in zoo.OURS + zoo.FOREIGN]
# The weights that make these neurons also read them, transposed. A model must keep its own whole as
# what makes neurons and give a share of it as what reads them: no single number can be both.
TIED = {"tied_autoencoder", "tied_language_model"}
# Some hidden numbers are in no group, so that they are averaged: channels that are cut in two ways,
# hidden states that the network returns, one slope for all neurons, where to look, which expert.
AVERAGED = {"grouped_conv", "dict_outputs", "monai_unet", "spatial_transformer", "experts"}
AVERAGED |= {"bert_eager", "bert_sdpa", "gpt2"}


def apart(networks: Networks, shared: Sequence[str]) -> list[dict[str, Positions]]:
    """Each model's neurons behind those of the models before; groups in `shared` in one place."""
    count = len(networks.specs)
    placements = []
    for s, spec in enumerate(networks.specs):
        places = {}
        for name, group in spec.groups.items():
            together = name in shared or group.parent is not None
            index = torch.arange(group.width) + (0 if together else s * group.width)
            if group.parent is not None:
                index = index.expand(spec.groups[group.parent].width, -1)
            places[name] = Positions(index, group.width * (1 if together else count))
        placements.append(places)
    return placements


def outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.no_grad():
        result = model(*inputs)
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def fuse_apart(
    models: list[nn.Module], inputs: tuple[Tensor, ...], spec: ModelSpec
) -> tuple[nn.Module, list[str]]:
    """The models side by side, and the groups that had to be shared: their width cannot change."""
    clients = check_clients(models, None, None, None)
    networks = prepare_networks(clients, inputs, spec, "attach")
    shared = list(networks.fixed_widths)
    shared += [name for name, g in networks.spec.groups.items() if g.parent in shared]
    placements = apart(networks, shared)
    widths = {name: place.width for name, place in placements[0].items()}
    model = merged_network(networks, placements, widths, restore_norm=False)
    model, _, _ = finished_network(networks, placements, widths, model)
    return model, shared


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
        spec = replace(groups(model, inputs, check=False), example_inputs=doubles)
        other = in_general_position(model.eval(), torch.float64, generator)
        fused, shared = fuse_apart([one, other], doubles, spec)
        if shared or name in AVERAGED:
            # Neurons whose width cannot change are averaged, too: equal models, all else apart.
            fused, _ = fuse_apart([one, one], doubles, spec)
            other = one
    expected = [
        (a + b) / 2 for a, b in zip(outputs(one, doubles), outputs(other, doubles), strict=True)
    ]
    for found, wanted in zip(outputs(fused, doubles), expected, strict=True):
        scale = float(wanted.abs().max())
        assert float((found - wanted).abs().max()) < 1e-5 * scale
