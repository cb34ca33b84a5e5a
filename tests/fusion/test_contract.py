"""What every method of fusion promises."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nafi
from nafi.errors import InputError, NafiError
from nafi.fusion import METHODS as REGISTRY
from nafi.fusion import AligningMethod, FedAvg, make_method, option_names
from nafi.graph import permute
from nafi.graph.permute import random_permutations
from nafi.options import option, whole
from tests.fusion.networks import MLP, gap, outputs, seeded, trained_norms

METHODS = list(REGISTRY)
ALIGNING = [method for method in METHODS if issubclass(REGISTRY[method], AligningMethod)]
# Averaging by position depends on the order of neurons; that is why it fails.
SEE_NEURONS = [method for method in METHODS if method != "fedavg"]
WIDTHS = (7, 9, 8, 4)
INPUTS = (torch.randn(5, 7, generator=torch.Generator().manual_seed(3)),)
COUNTS = [[5, 3, 0, 1], [2, 2, 8, 1], [0, 6, 1, 4]]


def clients() -> list[MLP]:
    return [seeded(s, *WIDTHS) for s in range(3)]


def fused(models: list[Any], method: str, **options: Any) -> nafi.FusionResult:
    return nafi.fuse(models, INPUTS, method=method, **options)


def counted(models: list[Any], method: str, counts: Any = COUNTS, **options: Any) -> Any:
    """Fused with class counts, where the method uses them."""
    return fused(models, method, **REGISTRY[method]().used(class_counts=counts), **options)


def test_all_methods_are_known() -> None:
    assert set(METHODS) == {"nafi", "pfnm", "fedavg", "ot", "rebasin", "stack", "ensemble"}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shape_and_type(method: str, dtype: torch.dtype) -> None:
    models = [model.to(dtype) for model in clients()]
    before = [{n: t.clone() for n, t in m.state_dict().items()} for m in models]
    used = REGISTRY[method]().used(class_counts=COUNTS)
    found = nafi.fuse(models, (INPUTS[0].to(dtype),), method=method, **used)
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
    seed = {"seed": 4} if "seed" in option_names(method) else {}
    one, two = (counted(clients(), method, **seed) for _ in range(2))
    assert one.widths == two.widths
    for a, b in zip(outputs(one.model, INPUTS), outputs(two.model, INPUTS), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_models_does_not_matter(method: str) -> None:
    models = clients()
    plain = counted(models, method)
    order = [2, 0, 1]
    turned = counted([models[s] for s in order], method, [COUNTS[s] for s in order])
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
    plain, other = (counted(given, method) for given in (models, shuffled))
    assert plain.widths == other.widths
    assert gap(other.model, plain.model, INPUTS) < 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_unequal_widths(method: str) -> None:
    models = [seeded(0, 7, 9, 8, 4), seeded(1, 7, 6, 8, 4), seeded(2, 7, 9, 5, 4)]
    if method in ("fedavg", "rebasin"):
        with pytest.raises(InputError, match=r"model 1.*needs equal widths, nafi does not"):
            fused(models, method)
        return
    found = counted(models, method)
    assert outputs(found.model, INPUTS)[0].shape == (5, 4)
    for group, local in [("layers.0", [9, 6, 9]), ("layers.1", [8, 8, 5])]:
        if method != "ensemble":
            assert [len(own) for own in found.assignments[group]] == local
            assert found.widths[group] in range(max(local) if method != "ot" else 1, sum(local) + 1)


@pytest.mark.parametrize("method", ALIGNING)
@pytest.mark.parametrize("batchnorm", ["attach", "fold", "average"])
def test_batch_normalisation(method: str, batchnorm: str) -> None:
    """Two equal networks fuse into the same function, whatever becomes of the normalisation."""
    model = trained_norms(0)
    images: tuple[Tensor, ...] = (torch.randn(2, 3, 6, 6),)
    found = nafi.fuse([model, trained_norms(0)], images, method=method, batchnorm=batchnorm)
    assert gap(found.model, model, images) < 1e-5
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


@pytest.mark.parametrize("method", METHODS)
def test_what_a_method_does_not_use_is_refused(method: str) -> None:
    moments = [{"layers.0.weight": np.ones(7)}] * 3
    data = {"class_counts": COUNTS, "sample_counts": [1, 2, 3], "input_moments": moments}
    for name, value in data.items():
        if name in REGISTRY[method].uses:
            options = {"weigh_by": "counts"} if method == "ensemble" else {}
            model = fused(clients(), method, **{name: value}, **options).model
            assert outputs(model, INPUTS)[0].isfinite().all()
        else:
            with pytest.raises(InputError, match=f"{name}: method {method} does not use them"):
                fused(clients(), method, **{name: value})
    for name in {"seed", "batchnorm"} - set(option_names(method)):
        with pytest.raises(InputError, match=f"method {method} has no option '{name}'"):
            fused(clients(), method, **{name: "attach" if name == "batchnorm" else 0})


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        ("nafi", "divergence", "kll"),
        ("nafi", "penalty", -1),
        ("nafi", "penalty", []),
        ("nafi", "penalty", [0.1, "x"]),
        ("nafi", "penalty", float("nan")),
        ("nafi", "mass", -1),
        ("nafi", "mass", True),
        ("nafi", "sweeps", -1),
        ("nafi", "sweeps", 1.5),
        ("nafi", "compat", "x"),
        ("nafi", "seed", -1),
        ("nafi", "max_width", 0),
        ("nafi", "max_width", float("inf")),
        ("nafi", "max_width", 1e308),
        ("nafi", "max_width", {"layers.0": "x"}),
        ("nafi", "clip", 0.0),
        ("nafi", "trim", 0.5),
        ("pfnm", "evidence", 0.0),
        ("pfnm", "direction", "sideways"),
        ("ot", "metric", "manhattan"),
        ("ot", "reference", -1),
        ("rebasin", "sweeps", 0),
        ("rebasin", "restore_norm", "no"),
        ("ensemble", "average", "medians"),
        *[(method, "batchnorm", "folded") for method in ("nafi", "pfnm", "ot", "rebasin")],
    ],
)
def test_values_are_checked_when_a_method_is_made(method: str, option: str, value: Any) -> None:
    """Before any model is looked at: here there are none."""
    with pytest.raises(InputError, match=f"^{option}: found"):
        make_method(method, **{option: value})


@pytest.mark.parametrize("method", METHODS)
def test_a_method_prints_and_saves_itself(method: str) -> None:
    made = make_method(method)
    settings = json.loads(json.dumps(made.settings()))
    assert set(settings) == set(option_names(method))
    assert make_method(method, **settings) == made
    assert repr(made).startswith(type(made).__name__)
    assert fused(clients(), method).diagnostics["method"] == method


def test_a_method_that_is_made_takes_no_further_options() -> None:
    made = make_method("nafi", penalty=0.2)
    found = nafi.fuse(clients(), INPUTS, made)
    assert found.widths == nafi.fuse(clients(), INPUTS, penalty=0.2).widths
    assert found.diagnostics["options"]["penalty"] == 0.2
    with pytest.raises(InputError, match=r"pass mass to Nafi\(...\) itself"):
        nafi.fuse(clients(), INPUTS, made, mass=2.0)


@pytest.mark.parametrize("method", METHODS)
def test_every_result_can_be_scored(method: str) -> None:
    found = nafi.fuse(clients(), INPUTS, method, validate=lambda model: 7.0)
    assert found.diagnostics["score"] == 7.0


@dataclass(frozen=True, kw_only=True)
class Reporting(FedAvg):
    """A method with an option that must be given, and something to report."""

    name: ClassVar[str] = "reporting"
    share: int = option(whole(1))

    def fuse(self, prepared: Any, progress: Any) -> nafi.FusionResult:
        return replace(super().fuse(prepared, progress), diagnostics={"mine": self.share})


@pytest.mark.parametrize("validate", [None, lambda model: 1.0])
def test_what_a_method_reports_is_kept(validate: Any) -> None:
    found = nafi.fuse(clients(), INPUTS, Reporting(share=3), validate=validate)
    assert found.diagnostics["mine"] == 3
    assert found.diagnostics["options"] == {"share": 3}
    with pytest.raises(InputError, match="method reporting needs the option share"):
        Reporting.from_options({}, "method reporting")


def test_a_layer_of_one_neuron_may_come_first() -> None:
    """It is in no group; that of another client with more neurons is."""
    narrow, wide = seeded(0, 7, 1, 8, 4), seeded(1, 7, 5, 8, 4)
    one, two = fused([narrow, wide], "nafi"), fused([wide, narrow], "nafi")
    assert one.widths == two.widths
    assert gap(one.model, two.model, INPUTS) < 1e-5


def test_a_limit_of_one_tied_group_holds_for_all() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.LSTM(3, 4, num_layers=2, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x)[0][:, -1])

    torch.manual_seed(0)
    models = [Reader() for _ in range(3)]
    found = nafi.fuse(models, (torch.randn(2, 5, 3),), penalty=0.0, max_width={"body": 5})
    assert set(found.widths.values()) == {5}
