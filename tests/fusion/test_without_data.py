"""Fusing checkpoints where nobody has inputs: what is made up, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nafi
from nafi.fusion import FusionResult, verdict
from nafi.fusion.probe import noise_inputs
from tests.fusion.networks import MLP, seeded, trained_norms

NUMBERS = (torch.zeros(2, 6),)
TOKENS = (torch.zeros(2, 5, dtype=torch.long),)
PICTURES = (torch.zeros(2, 3, 8, 8),)


def deep() -> list[MLP]:
    return [seeded(s, 6, 5, 4, 3) for s in range(2)]


class Roots(MLP):
    """A network that is for positive numbers only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sqrt())


def readers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), *seeded(s, 20, 5, 4, 3).layers)
        for s in range(2)
    ]


def same(one: FusionResult, two: FusionResult) -> bool:
    state = two.model.state_dict()
    return all(value.equal(state[name]) for name, value in one.model.state_dict().items())


def test_a_deep_network_without_a_probe_comes_with_advice() -> None:
    found = nafi.fuse(deep(), NUMBERS)
    assert found.diagnostics["probe"] == "none"
    advice = found.diagnostics["advice"]
    assert all(word in advice for word in ("probe=", 'probe="noise"', "rounds"))
    assert "\n" not in advice
    assert advice in verdict(found).advice


@pytest.mark.parametrize(
    ("models", "example", "options"),
    [
        (deep(), NUMBERS, {"probe": torch.randn(20, 6)}),
        (deep(), NUMBERS, {"method": "fedavg"}),
        (deep(), NUMBERS, {"method": "stack"}),
        (deep(), NUMBERS, {"refit": False}),
        ([seeded(s, 6, 5, 3) for s in range(2)], NUMBERS, {}),
        (readers(), TOKENS, {}),
    ],
    ids=["probe", "fedavg", "stack", "no refit", "one layer", "tokens"],
)
def test_where_nothing_is_missed_nothing_is_said(
    models: list[nn.Module], example: Any, options: dict[str, Any]
) -> None:
    assert "advice" not in nafi.fuse(models, example, **options).diagnostics


def test_auto_is_noise_where_a_probe_is_missed() -> None:
    found = nafi.fuse(deep(), NUMBERS, probe="auto")
    assert found.diagnostics["probe"] == "noise"
    assert "advice" not in found.diagnostics
    assert same(found, nafi.fuse(deep(), NUMBERS, probe="noise"))
    assert "256 inputs that were made up, to which" in verdict(found).text
    stack = nafi.fuse(deep(), NUMBERS, "stack", budget="1.5 params", probe="auto")
    assert stack.diagnostics["probe"] == "noise"


@pytest.mark.parametrize(
    ("models", "example", "options"),
    [
        ([seeded(s, 6, 5, 3) for s in range(2)], NUMBERS, {}),
        (readers(), TOKENS, {}),
        ([Roots(6, 5, 4, 3) for _ in range(2)], NUMBERS, {}),
        (deep(), NUMBERS, {"trim": 0.2}),
        (deep(), NUMBERS, {"method": "fedavg"}),
        ([trained_norms(s) for s in range(2)], PICTURES, {"batchnorm": "average"}),
    ],
    ids=["one layer", "tokens", "does not run", "trim", "fedavg", "average"],
)
def test_auto_is_none_where_noise_has_no_place(
    models: list[nn.Module], example: Any, options: dict[str, Any]
) -> None:
    found = nafi.fuse(models, example, probe="auto", **options)
    assert found.diagnostics["probe"] == "none"
    assert found.agreement is None
    assert same(found, nafi.fuse(models, example, **options))


@pytest.mark.parametrize(
    ("shape", "count"), [((3, 32, 32), 256), ((3, 224, 224), 55), ((784,), 256)]
)
def test_fewer_large_inputs_are_made_up(shape: tuple[int, ...], count: int) -> None:
    found = noise_inputs((torch.zeros(2, *shape),))
    assert found.shape == (count, *shape)
    assert abs(float(found.std()) - 1) < 0.1
