"""A network that is fused wider than it may be, and pruned to its limit."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nafi
from nafi.errors import InputError
from nafi.federated import Architecture, Training, make_strategy
from nafi.fusion import FusionWarning, check_clients, make_method
from nafi.fusion.method import main_places
from nafi.graph import Kept, Positions, SpecWarning, Thinned, groups, permute, random_permutations
from tests.fusion.networks import gap, outputs, seeded, trained_norms
from tests.graph import zoo

INPUTS = (torch.randn(80, 7, generator=torch.Generator().manual_seed(3)),)
IMAGES = (torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)),)
PHOTOS = torch.randn(64, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def clients(count: int = 3) -> list[nn.Module]:
    return [seeded(s, 7, 9, 8, 4) for s in range(count)]


def fused(models: list[Any], **options: Any) -> nafi.FusionResult:
    return nafi.fuse(models, INPUTS, probe=INPUTS[0], **options)


def shuffled(model: nn.Module, seed: int) -> nn.Module:
    spec = groups(model, INPUTS)
    return permute(model, spec, random_permutations(spec, torch.Generator().manual_seed(seed)))


# ------------------------------------------------------------------------------ what is left


def test_copies_are_matched_so_that_nothing_is_pruned() -> None:
    model = seeded(0, 7, 9, 8, 4)
    result = fused([model, shuffled(model, 1)], max_width=1.0, prune_from=2.0)
    assert gap(result.model, model, INPUTS) < 1e-4
    assert list(result.widths.values()) == [9, 8]


def test_neurons_that_others_can_stand_for_are_what_goes() -> None:
    """Both clients have one network of 6 neurons, with 4 of its neurons a second time."""
    small = seeded(0, 7, 6, 4)
    wide = seeded(1, 7, 10, 4)
    with torch.no_grad():
        twice = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 3])
        (first, last), (few, last_of_few) = wide.layers, small.layers
        first.weight.copy_(few.weight[twice])
        first.bias.copy_(few.bias[twice])
        last.weight.copy_(last_of_few.weight[:, twice] * torch.where(twice < 4, 0.5, 1.0))
        last.bias.copy_(last_of_few.bias)
    assert gap(wide, small, INPUTS) < 1e-5
    size = sum(p.numel() for p in small.parameters()) / sum(p.numel() for p in wide.parameters())
    result = fused([wide, shuffled(wide, 1)], budget=f"{size} params")
    assert list(result.widths.values()) == [6]
    assert gap(result.model, small, INPUTS) < 2e-2 * float(small(*INPUTS).abs().max())


def test_it_depends_neither_on_the_order_of_clients_nor_on_that_of_neurons() -> None:
    models = clients()
    plain = fused(models, budget="1.2 params")
    other = fused([shuffled(models[s], s) for s in (2, 0, 1)], budget="1.2 params")
    assert plain.widths == other.widths
    assert gap(plain.model, other.model, INPUTS) < 1e-3


def test_a_budget_is_kept_and_used() -> None:
    one = sum(p.numel() for p in clients()[0].parameters())
    for budget in (0.5, 1.0, 1.7):
        result = fused(clients(), budget=f"{budget} params")
        assert 0.8 * budget < result.diagnostics["size"]["params_of_client"] <= budget
        assert sum(p.numel() for p in result.model.parameters()) <= budget * one
    assert list(fused(clients(), budget=1.0).widths.values()) != [9, 8]  # where least is lost


def test_a_limit_of_width_is_kept_in_every_group() -> None:
    result = fused(clients(), max_width=1.0, prune_from=3.0)
    assert list(result.widths.values()) == [9, 8]
    wider = fused(clients(), max_width=1.0)
    assert gap(result.model, wider.model, INPUTS) > 1e-3  # others were chosen


def test_it_is_nearer_to_the_clients_than_what_was_merged_at_once() -> None:
    """Over eight draws of random networks, in which no two neurons are alike: 0.57 of the error."""
    errors = {1.0: 0.0, 3.0: 0.0}
    for draw in range(8):
        models = [seeded(10 * draw + s, 7, 20, 20, 4) for s in range(3)]
        mean = torch.stack([model(*INPUTS) for model in models]).mean(dim=0)
        for wider in errors:
            result = fused(models, max_width=1.0, prune_from=wider)
            errors[wider] += float((result.model(*INPUTS) - mean).square().mean())
    assert errors[3.0] < 0.75 * errors[1.0]


def test_normalisation_is_put_back_at_the_widths_that_are_left() -> None:
    models = [trained_norms(s) for s in range(3)]
    result = nafi.fuse(models, IMAGES, probe=PHOTOS, budget="0.8 params")
    norms = [m for m in result.model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms
    assert result.diagnostics["size"]["params_of_client"] <= 0.8
    folded = nafi.fuse(models, IMAGES, probe=PHOTOS, budget="0.8 params", batchnorm="fold")
    assert gap(result.model, folded.model, (PHOTOS,)) < 1e-3


# ------------------------------------------------------------------------------ where neurons went


def test_neurons_that_are_gone_have_no_place() -> None:
    place = Thinned(Positions(torch.tensor([3, 0, 1]), 4), Kept(torch.tensor([1, 3])))
    assert main_places(place).tolist() == [1, -1, 0]
    block = torch.tensor([[1.0, 2.0, 3.0]])
    assert place.spread(block, 1, consumed=False).tolist() == [[3.0, 1.0]]


def test_every_neuron_that_is_left_is_some_clients() -> None:
    result = fused(clients(), budget=1.0)
    for group, width in result.widths.items():
        owners = result.owners(group)
        assert owners.shape == (width,)
        assert owners.min() >= 1
        places = np.concatenate(result.assignments[group])
        assert (places == -1).any()
        assert set(places[places >= 0]) == set(range(width))
    shared = [sum(row["shared"]) for row in result.summary()]
    assert shared == list(result.widths.values())


# In which matching keeps no neurons apart of the groups that could be pruned.
NOTHING_APART = {"grouped_conv_nested", "einsum"}
# Of the networks that take long, one of each kind.
DEEP = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("unet_bilinear", "resnet_bottleneck", "monai_densenet", "vit_fused", "gpt2")
]


@pytest.mark.parametrize("name", [name for name in zoo.tested() if isinstance(name, str)] + DEEP)
def test_networks_of_the_zoo_keep_their_limits(name: str) -> None:
    """Two networks that have little in common, so that much is pruned wherever it can be."""
    first, inputs = zoo.seeded(name)
    second, _ = zoo.seeded(name)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in second.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                parameter.std(correction=0) * noise if parameter.ndim > 1 else parameter
            )
    spec = zoo.traced(name)
    both = check_clients([first.eval(), second.eval()], None, None, None)
    options: dict[str, Any] = {"spec": spec, "probe": inputs, "evidence": 1e6}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecWarning)
        warnings.simplefilter("ignore", FusionWarning)
        prunable = make_method("nafi").prepare(both, inputs, spec).prunable
        result = nafi.fuse([first, second], inputs, max_width=1.0, prune_from=2.0, **options)
    assert result.widths == spec.widths
    assert all(bool(t.isfinite().all()) for t in outputs(result.model, inputs))
    gone = {g for g in spec.groups if any((places < 0).any() for places in result.assignments[g])}
    assert gone <= prunable
    assert gone or not prunable or name in NOTHING_APART
    for group in spec.groups:
        assert result.owners(group).min() >= 1


# ------------------------------------------------------------------------------ options


def test_what_pruning_needs_is_asked_for() -> None:
    with pytest.raises(InputError, match="prune_from: give max_width or budget"):
        fused(clients(), prune_from=2.0)
    with pytest.raises(InputError, match="prune_from: what is left is refitted"):
        fused(clients(), max_width=1.0, prune_from=2.0, refit=False)
    with pytest.raises(InputError, match="prune_from: what is left is refitted"):
        fused(clients(), max_width=1.0, prune_from=2.0, bases="learned")
    with pytest.raises(InputError, match="prune_from: which neurons matter is measured on a probe"):
        nafi.fuse(clients(), INPUTS, max_width=1.0, prune_from=2.0)
    with pytest.raises(InputError, match=r"prune_from: found 0\.5"):
        fused(clients(), max_width=1.0, prune_from=0.5)
    architecture = Architecture(lambda: clients()[0], INPUTS)
    options: dict[str, Any] = {"rounds": 1, "max_width": 1.0, "prune_from": 2.0}
    with pytest.raises(InputError, match="prune_from: which neurons matter"):
        make_strategy("match-refit", architecture, Training(), **options)


def test_made_up_inputs_are_as_good_as_others_to_prune_by() -> None:
    """Also with one hidden layer, where nothing else asks for a probe."""
    models = [seeded(s, 7, 20, 4) for s in range(3)]
    for options in ({"budget": 0.6}, {"max_width": 1.0, "prune_from": 2.0}):
        result = nafi.fuse(models, INPUTS, probe="auto", **options)
        assert result.diagnostics["probe"] == "noise"
        assert result.diagnostics["size"]["params_of_client"] <= options.get("budget", 1.0)
    plain = nafi.fuse(models, INPUTS, probe="auto", max_width=1.0)
    assert plain.diagnostics["probe"] == "none"


def test_a_budget_that_nothing_fits_is_refused_before_any_work() -> None:
    told: list[str] = []
    with pytest.raises(
        InputError, match=r"found 0\.01 params.* with the fewest neurons .*allow more"
    ):
        fused(clients(), budget="0.01 params", progress=lambda step, *_: told.append(step))
    assert told == ["running the clients on the probe"]  # which is said before it is done


def test_what_cannot_be_pruned_is_named() -> None:
    layers = (nn.Conv2d(1, 6, 3), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(24, 3))
    models = [nn.Sequential(*map(copy.deepcopy, layers)) for _ in range(2)]
    probe = torch.randn(32, 1, 4, 4)
    with pytest.raises(InputError, match=r"found 0\.5 params, but .* width of 0.* cannot change"):
        nafi.fuse(models, (probe[:2],), probe=probe, budget="0.5 params")


def test_without_pruning_a_budget_is_one_factor_for_all() -> None:
    by_factor = fused(clients(), budget="2.0 params", prune_from=1.0)
    first, second = by_factor.widths.values()
    assert first / 9 == pytest.approx(second / 8, abs=0.15)
    without_probe = nafi.fuse(clients(), INPUTS, budget="2.0 params", penalty=0.0)
    assert without_probe.diagnostics["size"]["params_of_client"] <= 2.0
    with pytest.raises(
        InputError,
        match=r"is as wide as its widest client.* prune_from is 1; method stack can be smaller",
    ):
        fused(clients(), budget="0.5 params", prune_from=1.0)
