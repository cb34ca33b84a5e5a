"""Bases that are learnt on a probe: closer to the ensemble, and no client's function changes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nafi
from nafi.errors import InputError
from nafi.fusion import learned_bases
from nafi.fusion.clients import check_clients
from nafi.fusion.held_out import held_out
from nafi.fusion.learned_bases import _rotation
from nafi.graph import Freedom, Rotated, keeping_mean, rotate
from nafi.graph.trace import with_tensors
from tests.fusion.test_rotation import gap, original, turned_copy
from tests.graph.zoo import named

PROBE = torch.randn(32, 3, 20, 28, generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_bases, "STEPS", 20)


def two_networks() -> tuple[list[nn.Module], Any]:
    model, inputs = original("vit_sdpa")
    torch.manual_seed(7)
    return [model, named("vit_sdpa").build()], inputs


def distance(model: nn.Module, models: list[nn.Module], inputs: Tensor) -> float:
    """From the ensemble."""
    with torch.no_grad():
        expected = torch.stack([one(inputs) for one in models]).mean(dim=0)
        return float((model(inputs) - expected).square().mean())


def test_the_mean_of_weights_comes_closer_to_the_ensemble() -> None:
    models, inputs = two_networks()
    known: dict[str, Any] = {"probe": PROBE, "max_width": 1.0}
    known |= {"refit": False, "restore_norm": False}
    rotated, learned = (
        nafi.fuse(models, inputs, bases=bases, **known).model for bases in ("rotated", "learned")
    )
    held = PROBE[held_out(torch.arange(len(PROBE)))]
    assert distance(learned, models, held) < 0.95 * distance(rotated, models, held)


def test_no_clients_function_changes() -> None:
    """What is learnt is a rotation for the stream and for each head, which keeps the mean."""
    models, inputs = two_networks()
    method = nafi.fusion.make_method("nafi", bases="learned", max_width=1.0)
    networks = method.prepare(check_clients(models, None, None, None), inputs, None)
    networks = replace(networks, probe=(PROBE,))
    before = nafi.fusion.make_method("nafi", max_width=1.0).align(networks, lambda *_: None)
    after = method.align(networks, lambda *_: None)
    moved = 0.0
    for s, (old, new) in enumerate(zip(before.placements, after.placements, strict=True)):
        rotations = {name: place for name, place in new.items() if isinstance(place, Rotated)}
        assert rotations
        state = {name: tensor.double() for name, tensor in networks.states[s].items()}
        plain, turned = (
            with_tensors(networks.template.double(), dict(each), networks.spec.aliases)
            for each in (state, rotate(state, networks.specs[s], rotations))
        )
        assert gap(plain, turned, tuple(x.double() for x in inputs)) < 1e-8
        moved = max(moved, *(_apart(old[name], place) for name, place in rotations.items()))
    assert moved > 0.01  # or nothing was learnt


def _apart(one: Any, two: Rotated) -> float:
    return float((one.matrix - two.matrix).abs().max())


def test_copies_in_other_bases_still_give_the_network_back() -> None:
    model, inputs = original("vit_sdpa")
    copies = [turned_copy(model, inputs, seed) for seed in (3, 4)]
    result = nafi.fuse(
        [model, *copies], inputs, probe=PROBE, bases="learned", refit=False, max_width=1.0
    )
    assert gap(model, result.model, inputs) < 1e-4


def test_a_network_without_free_bases_is_fused_as_ever() -> None:
    models: list[nn.Module] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)))
    probe = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
    one, two = (
        nafi.fuse(models, (probe[:2],), probe=probe, bases=bases, restore_norm=False).model(probe)
        for bases in ("rotated", "learned")
    )
    assert torch.equal(one, two)


def test_a_turn_of_a_plane_has_its_angle() -> None:
    angles = torch.tensor([[0.0, 0.3], [-0.1, 0.0]], dtype=torch.float64)
    expected = [[math.cos(0.4), math.sin(0.4)], [-math.sin(0.4), math.cos(0.4)]]
    found = _rotation(angles, Freedom.ROTATION)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_a_turn_that_keeps_the_mean_is_the_closest_that_does() -> None:
    angles = torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = _rotation(angles, Freedom.MEAN)
    torch.testing.assert_close(found, keeping_mean(found))
    assert float((found - torch.eye(5)).abs().max()) > 0.1


def test_without_a_probe_there_is_nothing_to_learn_on() -> None:
    models, inputs = two_networks()
    with pytest.raises(InputError, match="bases: 'learned' needs a probe"):
        nafi.fuse(models, inputs, bases="learned")
