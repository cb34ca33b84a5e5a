"""Whose word counts for an input: distances against plain loops, and what follows from them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nafi
from nafi.errors import InputError
from nafi.fusion import EnsembleNetwork
from nafi.fusion.ensemble import weighted_sum
from nafi.fusion.familiarity import familiarity, watched_distances
from nafi.fusion.held_out import held_out
from tests.fusion.networks import NormNet, gap, seeded, trained_norms

EXAMPLE = (torch.zeros(2, 3, 8, 8),)
COUNTS = [30, 10]


def pictures(brightness: float, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return brightness + 0.3 * torch.randn(count, 3, 8, 8, generator=generator)


def dark_and_bright() -> list[NormNet]:
    """Two clients that were trained on pictures of different brightness."""
    networks = [trained_norms(seed) for seed in range(2)]
    for network, brightness in zip(networks, (-1.0, 2.0), strict=True):
        nafi.calibrate(network, [pictures(brightness, 100, 0)])
    return networks


def both_kinds() -> Tensor:
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    return torch.cat([pictures(-1.0, 20, 1), pictures(2.0, 20, 2)])[order]


def test_the_distance_is_the_divergence_of_plain_loops_at_the_first_normalisation() -> None:
    model, inputs = trained_norms(3), pictures(0.5, 4, 0)
    with torch.no_grad(), watched_distances(model) as found:
        values = model.stem(inputs)
        model(inputs)
    (distances,) = found
    norm = model.norm
    for n in range(4):
        parts = []
        for c in range(values.shape[1]):
            variance = float(values[n, c].var(correction=0)) + norm.eps
            expected = float(norm.running_var[c]) + norm.eps
            shift = float(values[n, c].mean() - norm.running_mean[c])
            ratio = variance / expected
            parts.append(0.5 * (ratio - 1 - math.log(ratio) + shift**2 / expected))
        assert float(distances[n]) == pytest.approx(sum(parts) / len(parts), rel=1e-4)


def test_inputs_of_one_place_have_no_variance() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).eval()
    inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), watched_distances(model) as found:
        model(inputs)
        expected = model[0](inputs).square().mean(dim=1) / 2  # as new: mean 0, variance 1
    torch.testing.assert_close(found[0].float(), expected, rtol=1e-4, atol=0)


def test_scales_and_order_of_neurons_mean_nothing() -> None:
    """So the distances of clients whose first layers differ can be compared."""
    inputs = pictures(0.0, 6, 0)
    model, other = dark_and_bright()[0], dark_and_bright()[0]
    order, scale = torch.tensor([3, 1, 5, 0, 2, 4]), 7.0
    with torch.no_grad():
        other.stem.weight.copy_(scale * model.stem.weight[order])
        other.norm.running_mean.copy_(scale * model.norm.running_mean[order])
        other.norm.running_var.copy_(scale**2 * model.norm.running_var[order])
        model.norm.eps = other.norm.eps = 0.0
        with watched_distances(model) as one, watched_distances(other) as two:
            model(inputs), other(inputs)
    torch.testing.assert_close(one[0], two[0], rtol=1e-4, atol=1e-6)


def test_whoever_knows_an_inputs_like_counts_most() -> None:
    found = familiarity(
        dark_and_bright(), (torch.cat([pictures(-1.0, 9, 1), pictures(2.0, 9, 2)]),)
    )
    assert found is not None
    dark, bright = found[:, :9], found[:, 9:]
    assert bool((dark[0] == 1).all())
    assert bool((bright[1] == 1).all())
    assert float(dark[1].max()) < 0.2
    assert float(bright[0].max()) < 0.2


def test_networks_that_remember_nothing_are_not_weighed() -> None:
    models = [seeded(s, 7, 9, 4) for s in range(2)]
    assert familiarity(models, (torch.zeros(3, 7),)) is None
    with pytest.raises(InputError, match=r"weigh_by: model 0 has no batch normalisation"):
        nafi.fuse(models, (torch.zeros(3, 7),), method="ensemble", weigh_by="inputs")


def test_weights_add_up_to_one_even_if_only_a_stranger_knows_a_class() -> None:
    outputs = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).double()
    class_shares = torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]])
    by_input = torch.tensor([[1.0], [1e-12]]).expand(2, 5)
    found = weighted_sum(outputs, torch.ones(2) / 2, class_shares, by_input)
    torch.testing.assert_close(found[:, 0], outputs[0, :, 0])
    torch.testing.assert_close(found[:, 1], outputs[0, :, 1])
    torch.testing.assert_close(found[:, 2], outputs[1, :, 2])
    ones = weighted_sum(torch.ones(2, 5, 3), torch.tensor([0.9, 0.1]), None, torch.rand(2, 5) + 0.1)
    torch.testing.assert_close(ones, torch.ones(5, 3))


def test_an_ensemble_by_input_says_what_weights_and_shares_say(tmp_path: Path) -> None:
    models, inputs = dark_and_bright(), both_kinds()
    result = nafi.fuse(models, EXAMPLE, method="ensemble", weigh_by="inputs", sample_counts=COUNTS)
    by_input = familiarity(models, (inputs,))
    assert by_input is not None
    with torch.no_grad():
        said = torch.stack([model(inputs) for model in models]).double()
        found = result.model(inputs)
        alone = torch.cat([result.model(inputs[n : n + 1]) for n in range(len(inputs))])
    weights = torch.tensor(COUNTS)[:, None] * by_input
    weights = (weights / weights.sum(dim=0))[:, :, None]
    torch.testing.assert_close(found.double(), (weights * said).sum(dim=0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)  # whatever else is in a batch
    nafi.save(result, tmp_path / "e.safetensors")
    read = nafi.load(tmp_path / "e.safetensors", NormNet)
    assert gap(read, result.model, (inputs,)) < 1e-6


def test_distillation_is_towards_the_ensemble_by_input() -> None:
    models, probe = dark_and_bright(), both_kinds()
    merged = nafi.fuse(models, EXAMPLE, probe=probe, sample_counts=COUNTS)
    shares = torch.tensor(COUNTS) / sum(COUNTS)
    held = probe[held_out(torch.arange(len(probe)))]
    for weighs in (True, False):
        found = nafi.distill(
            merged, models, probe, sample_counts=COUNTS, steps=5, weigh_inputs=weighs
        ).diagnostics["distilled"]
        teacher = EnsembleNetwork(models, shares, by_input=weighs).eval()
        with torch.no_grad():
            expected = float((merged.model(held) - teacher(held)).square().mean())
        assert found["before"] == pytest.approx(expected, rel=1e-3)
        assert found["weighed_by_input"] is weighs


def test_inputs_that_are_made_up_are_nobodys() -> None:
    result = nafi.fuse(dark_and_bright(), EXAMPLE, probe="noise", distill=2)
    assert result.diagnostics["distilled"]["weighed_by_input"] is False


def test_layers_are_refitted_to_those_who_know_an_inputs_like() -> None:
    """Two clients that differ in their last layers alone: what they are fitted to is linear."""
    dark, bright = dark_and_bright()
    bright.load_state_dict({**dark.state_dict(), **_of_last_layer(bright)})
    for model, brightness in ((dark, -1.0), (bright, 2.0)):
        nafi.calibrate(model, [pictures(brightness, 100, 0)])
    models, probe = [dark, bright], both_kinds()
    teacher = nafi.fuse(models, EXAMPLE, method="ensemble", weigh_by="inputs").model
    errors = []
    for weighs in (True, False):
        fused = nafi.fuse(models, EXAMPLE, probe=probe, max_width=2.0, weigh_inputs=weighs).model
        with torch.no_grad():
            errors.append(float((fused(probe) - teacher(probe)).square().mean()))
    assert errors[0] < errors[1] / 2


def test_equal_weights_change_nothing() -> None:
    """Clients that remember the same count the same: the refit is bit for bit the plain one."""
    models = [trained_norms(seed) for seed in range(2)]
    with torch.no_grad():
        for model in models:
            model.stem.weight.copy_(models[0].stem.weight)
            model.norm.load_state_dict(models[0].norm.state_dict())
    probe = pictures(0.0, 30, 0)
    weighed, plain = (
        nafi.fuse(models, EXAMPLE, probe=probe, weigh_inputs=weighs).model
        for weighs in (True, False)
    )
    assert gap(weighed, plain, (probe,)) == 0


def _of_last_layer(model: nn.Module) -> dict[str, Tensor]:
    names = list(model.state_dict())
    last = names[-1].rsplit(".", 1)[0]
    return {name: t.clone() for name, t in model.state_dict().items() if name.startswith(last)}
