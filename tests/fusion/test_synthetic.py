"""Inputs that are made of the running statistics of batch normalisation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import nafi
from nafi.errors import InputError
from nafi.fusion import read_probe
from nafi.fusion.synthetic import statistics_distance, synthetic_probe
from tests.fusion.networks import NormNet, seeded, trained_norms

EXAMPLE = (torch.zeros(2, 3, 8, 8),)


def models() -> list[NormNet]:
    """Networks that remember dark pictures of little contrast."""
    pictures = torch.rand(200, 3, 8, 8, generator=torch.Generator().manual_seed(0)) ** 2 - 1
    networks = [trained_norms(seed) for seed in range(2)]
    for network in networks:
        nafi.calibrate(network, [pictures])
    return networks


def silent(step: str, done: int, total: int) -> None:
    pass


def test_the_distance_is_that_of_plain_loops() -> None:
    (model,) = networks = [trained_norms(3)]
    inputs = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first = model.stem(inputs)
        second = model.inner(model.norm(first).relu())
        third = model.back(model.inner_norm(second).relu())
    expected = 0.0
    norms = (model.norm, model.inner_norm, model.back_norm)
    for values, norm in zip((first, second, third), norms, strict=True):
        parts = []
        for c in range(values.shape[1]):
            deviation = float(norm.running_var[c] + norm.eps) ** 0.5
            own = float(values[:, c].var(correction=0) + norm.eps) ** 0.5
            shift = float(values[:, c].mean() - norm.running_mean[c])
            parts.append((shift / deviation) ** 2 + (own / deviation - 1) ** 2)
        expected += sum(parts) / len(parts) / 3
    assert statistics_distance(networks, (inputs,)) == pytest.approx(expected, rel=1e-4)


def test_synthetic_inputs_are_nearer_to_the_running_statistics_than_noise() -> None:
    networks = models()
    noise = read_probe("noise", networks[0], EXAMPLE)
    (found,) = synthetic_probe(networks, EXAMPLE, silent, steps=15)
    assert found.shape == (128, 3, 8, 8)
    assert not found.requires_grad
    distances = [statistics_distance(networks, inputs) for inputs in ((found,), noise)]
    assert distances[0] < 0.5 * distances[1]
    (again,) = synthetic_probe(networks, EXAMPLE, silent, steps=15)
    assert again.equal(found)


def test_without_steps_they_are_the_noise() -> None:
    networks = models()
    (noise,) = read_probe("noise", networks[0], EXAMPLE)
    (found,) = synthetic_probe(networks, EXAMPLE, silent, steps=0)
    assert found.equal(noise[:128])


def test_models_are_left_as_they_are() -> None:
    networks = [model.train() for model in models()]
    before = copy.deepcopy([model.state_dict() for model in networks])
    told: list[tuple[int, int]] = []
    synthetic_probe(networks, EXAMPLE, lambda step, done, total: told.append((done, total)), 2)
    assert told == [(0, 2), (1, 2), (2, 2)]
    for model, state in zip(networks, before, strict=True):
        assert all(value.equal(state[name]) for name, value in model.state_dict().items())
        assert all(p.grad is None and p.requires_grad for p in model.parameters())
        assert all(module.training for module in model.modules())
        assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_word_stands_for_them_in_a_fusion() -> None:
    networks = models()
    made = synthetic_probe(networks, EXAMPLE, silent)
    results = [
        nafi.fuse(networks, EXAMPLE, probe=probe, weigh_inputs=False)  # as those made up are
        for probe in ("synthetic", made)
    ]
    assert [r.diagnostics["probe"] for r in results] == ["synthetic", "inputs"]
    one, two = (result.model.state_dict() for result in results)
    assert all(value.equal(two[name]) for name, value in one.items())
    assert results[0].agreement is not None
    assert results[0].agreement.inputs == 128


def test_a_frontier_makes_them_once() -> None:
    told: list[tuple[str, int]] = []
    found = nafi.frontier(
        models(),
        EXAMPLE,
        validate=lambda model: 0.5,
        probe="synthetic",
        budgets=["1.0 params"],
        progress=lambda step, done, total: told.append((step, done)),
    )
    assert told.count(("making inputs of running statistics", 0)) == 1
    assert {point.method for point in found.points} >= {"stack", "nafi"}


def test_distilling_knows_the_word() -> None:
    networks = models()
    merged = nafi.fuse(networks, EXAMPLE)
    words, made = (
        nafi.distill(merged, networks, probe, steps=2, weigh_inputs=False)
        for probe in ("synthetic", synthetic_probe(networks, EXAMPLE, silent))
    )
    assert words.diagnostics["distilled"] == made.diagnostics["distilled"]


@pytest.mark.parametrize("case", ["none", "forgetful", "tokens"])
def test_networks_for_which_there_are_none(case: str) -> None:
    networks: list[nn.Module]
    example = EXAMPLE
    told = "which these networks do not have; probe='noise'"
    match case:
        case "none":
            networks, example = [seeded(s, 6, 8, 3) for s in range(2)], (torch.zeros(2, 6),)
        case "forgetful":  # statistics of the batch at hand, in eval mode, too
            networks = [
                nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
                for _ in range(2)
            ]
        case _:
            networks = [nn.Sequential(nn.Embedding(9, 4), nn.BatchNorm1d(5)) for _ in range(2)]
            example, told = (torch.zeros(2, 5, dtype=torch.long),), "noise stands for"
    with pytest.raises(InputError, match=told):
        synthetic_probe(networks, example, silent)
