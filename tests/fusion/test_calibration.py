"""Statistics measured anew: against their definition, and on networks that averaging has broken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nafi
from nafi.errors import InputError
from tests.fusion.networks import seeded, trained_norms

IMAGES = torch.randn(12, 3, 6, 6, generator=torch.Generator().manual_seed(2))


def test_statistics_are_those_of_the_batches() -> None:
    model = trained_norms(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert nafi.calibrate(model, [IMAGES[:6], (IMAGES[6:], "labels")]) is model
    with torch.no_grad():
        stem = [model.stem(part) for part in (IMAGES[:6], IMAGES[6:])]
    for name, found in (
        ("running_mean", [part.mean((0, 2, 3)) for part in stem]),
        ("running_var", [part.var((0, 2, 3)) for part in stem]),
    ):
        torch.testing.assert_close(model.state_dict()[f"norm.{name}"], sum(found) / 2)
    changed = {n for n, t in model.state_dict().items() if not t.equal(before[n])}
    kinds = ("running_mean", "running_var", "num_batches_tracked")
    assert changed == {n for n in before if n.endswith(kinds)}
    assert (model.norm.momentum, model.inner_norm.momentum) == (0.1, 0.2)
    assert not model.training
    assert not model.norm.training


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.9), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.drop(x))
        return found


def test_nothing_is_dropped_while_measuring() -> None:
    x = torch.randn(50, 3)
    model = nafi.calibrate(Dropping(), [x])
    assert isinstance(model, Dropping)
    torch.testing.assert_close(model.norm.running_var, x.var(0))


def test_neurons_get_back_the_variance_that_averaging_took() -> None:
    """The mean of networks that have nothing in common: small outputs, small differences."""
    models = [trained_norms(s) for s in range(4)]
    for model in models:
        nafi.calibrate(model, [IMAGES])
    found = nafi.fuse(models, (IMAGES[:2],), method="ot", batchnorm="average")

    def spread(model: nn.Module) -> float:
        """Of the last normalised layer: its statistics promise the size of its scale."""
        seen: list[Tensor] = []
        handle = model.get_submodule("back_norm").register_forward_hook(
            lambda _module, _inputs, output: seen.append(output)
        )
        with torch.no_grad():
            model(IMAGES)
        handle.remove()
        scale = model.get_parameter("back_norm.weight").detach().abs()
        return float((seen[0].std((0, 2, 3)) / scale).mean())

    assert all(spread(model) == pytest.approx(1.0, abs=0.01) for model in models)
    assert spread(found.model) < 0.8
    assert spread(nafi.calibrate(found.model, [IMAGES])) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("batches", "told"),
    [
        ([], "no batch"),
        ([torch.zeros(2, 5, 6, 6)], "does not run"),
        ([IMAGES, "x"], "does not run"),
        ([[]], "does not run"),
    ],
)
def test_bad_batches_leave_the_network_as_it_was(batches: list[Any], told: str) -> None:
    model = trained_norms(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InputError, match=f"calibrate: .*{told}"):
        nafi.calibrate(model, batches)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert model.norm.momentum == 0.1


def test_a_network_without_normalisation_stays() -> None:
    model = seeded(0, 3, 4, 2)
    before = [p.clone() for p in model.parameters()]
    nafi.calibrate(model, [torch.randn(5, 3)])
    assert all(a.equal(b) for a, b in zip(model.parameters(), before, strict=True))


def test_clipping_is_refused_where_it_says_nothing() -> None:
    models = [trained_norms(s) for s in range(3)]
    with pytest.raises(InputError, match="clip: "):
        nafi.fuse(models, (IMAGES[:2],), batchnorm="average", clip=2.0)
