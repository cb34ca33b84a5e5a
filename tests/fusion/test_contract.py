"""What every method of fusion promises."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import nafi
from nafi.errors import InputError, NafiError
from nafi.fusion import FUSERS
from nafi.graph import permute
from nafi.graph.permute import random_permutations
from tests.fusion.networks import MLP, gap, outputs, seeded, trained_norms

METHODS = list(FUSERS)
# Averaging by position depends on the order of neurons; that is why it fails.
SEE_NEURONS = [method for method in METHODS if method != "fedavg"]
WIDTHS = (7, 9, 8, 4)
INPUTS = (torch.randn(5, 7, generator=torch.Generator().manual_seed(3)),)
COUNTS = [[5, 3, 0, 1], [2, 2, 8, 1], [0, 6, 1, 4]]


def clients() -> list[MLP]:
    return [seeded(s, *WIDTHS) for s in range(3)]


def fused(models: list[Any], method: str, **options: Any) -> nafi.FusionResult:
    return nafi.fuse(models, INPUTS, method=method, **options)


def test_all_methods_are_known() -> None:
    assert set(METHODS) == {"nafi", "pfnm", "fedavg", "ot", "rebasin", "ensemble"}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shape_and_type(method: str, dtype: torch.dtype) -> None:
    models = [model.to(dtype) for model in clients()]
    before = [{n: t.clone() for n, t in m.state_dict().items()} for m in models]
    found = nafi.fuse(
        models, (INPUTS[0].to(dtype),), method=method, class_counts=COUNTS, batchnorm="attach"
    )
    with torch.no_grad():
        result = found.model(INPUTS[0].to(dtype))
    assert result.shape == (5, 4)
    assert result.dtype == dtype
    assert result.isfinite().all()
    assert not found.model.training
    assert {t.dtype for t in found.model.parameters()} == {dtype}
    for model, state in zip(models, before, strict=True):
        for name, tensor in model.state_dict().items():
            assert tensor.equal(state[name]), "a client's model was changed"


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_decides(method: str) -> None:
    one, two = (fused(clients(), method, seed=4, class_counts=COUNTS) for _ in range(2))
    assert one.widths == two.widths
    for a, b in zip(outputs(one.model, INPUTS), outputs(two.model, INPUTS), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_models_does_not_matter(method: str) -> None:
    models = clients()
    plain = fused(models, method, class_counts=COUNTS)
    order = [2, 0, 1]
    turned = fused([models[s] for s in order], method, class_counts=[COUNTS[s] for s in order])
    assert gap(turned.model, plain.model, INPUTS) < 1e-5
    for group in plain.assignments:
        for place, s in enumerate(order):
            own, other = turned.assignments[group][place], plain.assignments[group][s]
            assert own.shape == other.shape


@pytest.mark.parametrize("method", SEE_NEURONS)
def test_the_order_of_neurons_does_not_matter(method: str) -> None:
    models = clients()
    spec = nafi.groups(models[0], INPUTS)
    generator = torch.Generator().manual_seed(0)
    shuffled = [permute(model, spec, random_permutations(spec, generator)) for model in models]
    plain, other = (fused(given, method, class_counts=COUNTS) for given in (models, shuffled))
    assert plain.widths == other.widths
    assert gap(other.model, plain.model, INPUTS) < 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_unequal_widths(method: str) -> None:
    models = [seeded(0, 7, 9, 8, 4), seeded(1, 7, 6, 8, 4), seeded(2, 7, 9, 5, 4)]
    if method in ("fedavg", "rebasin"):
        with pytest.raises(InputError, match=r"model 1.*needs equal widths, nafi does not"):
            fused(models, method)
        return
    found = fused(models, method, class_counts=COUNTS)
    assert outputs(found.model, INPUTS)[0].shape == (5, 4)
    for group, local in [("layers.0", [9, 6, 9]), ("layers.1", [8, 8, 5])]:
        if method != "ensemble":
            assert [len(own) for own in found.assignments[group]] == local
            assert found.widths[group] in range(max(local) if method != "ot" else 1, sum(local) + 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batchnorm", ["attach", "fold", "average"])
def test_batch_normalisation(method: str, batchnorm: str) -> None:
    """Two equal networks fuse into the same function, whatever becomes of the normalisation."""
    model = trained_norms(0)
    images: tuple[Tensor, ...] = (torch.randn(2, 3, 6, 6),)
    found = nafi.fuse([model, trained_norms(0)], images, method=method, batchnorm=batchnorm)
    assert gap(found.model, model, images) < 1e-5
    if method in ("nafi", "pfnm", "ot", "rebasin"):
        kept = set(found.model.state_dict()) == set(model.state_dict())
        assert kept == (batchnorm != "fold")


@pytest.mark.parametrize(
    ("method", "options"), [("ot", {}), ("rebasin", {}), ("nafi", {"max_width": 1.0}), ("pfnm", {})]
)
def test_normalisation_can_be_averaged_with_the_neurons_it_belongs_to(
    method: str, options: dict[str, Any]
) -> None:
    """Models that trained on from a common start, in other orders: the mean as if in the same."""
    images: tuple[Tensor, ...] = (torch.randn(2, 3, 6, 6),)
    start = trained_norms(0)
    near = [copy.deepcopy(start) for _ in range(3)]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for model in near:
            for tensor in (t for t in model.state_dict().values() if t.is_floating_point()):
                tensor.mul_(1 + 0.05 * torch.rand(tensor.shape, generator=generator))
    spec = nafi.groups(start, images)
    mixed = [permute(m, spec, random_permutations(spec, generator)) for m in near]
    found = nafi.fuse(
        mixed, images, method=method, batchnorm="average", restore_norm=False, spec=spec, **options
    )
    expected = nafi.fuse(near, images, method="fedavg")
    assert set(found.model.state_dict()) == set(start.state_dict())
    assert gap(found.model, expected.model, images) < 1e-5
    for name in ("norm.running_mean", "norm.running_var", "inner_norm.weight"):
        one, two = (r.model.state_dict()[name].sort().values for r in (found, expected))
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("method", METHODS)
def test_one_model_is_refused(method: str) -> None:
    with pytest.raises(InputError, match="found 1, expected at least two"):
        fused(clients()[:1], method)


@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_option_is_named(method: str) -> None:
    with pytest.raises(NafiError, match=f"method {method} has no option 'penaltee'"):
        fused(clients(), method, penaltee=1)
