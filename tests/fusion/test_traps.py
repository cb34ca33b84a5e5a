"""Odd networks and arguments that once went wrong."""

from __future__ import annotations

import copy
import sys
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nafi
from nafi.checkpoints import load_clients
from nafi.errors import InputError, NafiError
from nafi.fusion import (
    FusionWarning,
    Nafi,
    Scores,
    align_to_one,
    check_clients,
    make_method,
    prepare_networks,
)
from tests.fusion.networks import gap, seeded

IMAGES = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)
INPUTS = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),)


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def convolutional(seed: int = 0, **norm: Any) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 8, 3, bias=not norm), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)]
    if norm:
        layers.insert(1, nn.BatchNorm2d(8, **norm))
    return nn.Sequential(*layers).eval()


def test_moments_of_convolutions_are_accepted() -> None:
    models = [convolutional(s) for s in range(2)]
    batches = [(torch.rand(4, 3, 8, 8), torch.zeros(4))]  # as a loader gives them
    moments = [nafi.input_moments(model, batches) for model in models]
    assert set(moments[0]) == {"0.weight", "3.weight"}
    found = nafi.fuse(models, IMAGES, input_moments=moments)
    assert found.widths["0"] >= 8
    with pytest.raises(InputError, match=r"no layer has nope; known: 0\.weight, 3\.weight"):
        nafi.input_moments(models[0], batches, ["nope"])
    with pytest.raises(InputError, match="does not run on a batch"):
        nafi.input_moments(models[0], [torch.zeros(2, 5, 8, 8)])


def test_norms_without_weights_come_back(tmp_path: Path) -> None:
    models = [convolutional(s, affine=False) for s in range(2)]
    for model in models:
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
    result = nafi.fuse(models, IMAGES)
    assert set(result.model.state_dict()) == set(models[0].state_dict())
    nafi.save(result, tmp_path / "f.safetensors")
    loaded = nafi.load(tmp_path / "f.safetensors", lambda: convolutional(affine=False))
    assert gap(loaded, result.model, IMAGES) == 0
    same = nafi.fuse([models[0], copy.deepcopy(models[0])], IMAGES)
    assert gap(same.model, models[0], IMAGES) < 1e-5


def test_numbers_without_axes_are_averaged() -> None:
    models = []
    for s in range(2):
        model = small(s)
        model.register_parameter("temperature", nn.Parameter(torch.tensor(2.0 + s)))
        models.append(model)
    for method in ("nafi", "ot", "rebasin", "fedavg"):
        found = nafi.fuse(models, INPUTS, method=method).model
        assert float(found.temperature) == pytest.approx(2.5)


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, proj_size=4, batch_first=True)
        self.out = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


@pytest.mark.filterwarnings("ignore::nafi.graph.SpecWarning")
def test_projected_recurrent_layers_keep_their_sizes() -> None:
    torch.manual_seed(0)
    model = Projected().eval()
    x = (torch.randn(2, 7, 6),)
    found = nafi.fuse([model, copy.deepcopy(model)], x)
    assert found.model.lstm.hidden_size == 8
    assert gap(found.model, model, x) < 1e-5


@pytest.mark.parametrize("groups", [2, 4])
def test_transposed_convolutions_in_groups(groups: int) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 12, 3, groups=groups),
            nn.ReLU(),
            nn.Conv2d(12, 3, 1),
        ).eval()

    model = make(0)
    for method in ("nafi", "ot", "rebasin"):
        found = nafi.fuse([model, copy.deepcopy(model)], IMAGES, method=method)
        assert gap(found.model, model, IMAGES) < 1e-5
    different = nafi.fuse([make(0), make(1)], IMAGES, penalty=0.0)
    with torch.no_grad():
        assert different.model(*IMAGES).isfinite().all()


class Gained(nn.Module):
    """A buffer of ones, which changes nothing, and gains that are learnt."""

    def __init__(self, gain: float, learnt: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)
        if learnt:
            self.gain = nn.Parameter(torch.full((8,), gain))
        else:
            self.register_buffer("gain", torch.full((8,), gain))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu() * self.gain)


@pytest.mark.parametrize("learnt", [True, False])
def test_what_all_neurons_share_does_not_make_them_alike(learnt: bool) -> None:
    plain = nafi.fuse([small(s) for s in range(3)], INPUTS, penalty=0.05)
    models = []
    for s in range(3):
        model = Gained(1.0, learnt)
        weights = list(small(s).state_dict().values())
        names = ["a.weight", "a.bias", "b.weight", "b.bias"]
        model.load_state_dict(dict(zip(names, weights, strict=True)), strict=False)
        models.append(model)
    found = nafi.fuse(models, INPUTS, penalty=0.05)
    assert found.widths["a"] == plain.widths["0"]
    assert gap(found.model, plain.model, INPUTS) < 1e-5


def test_an_ensemble_leaves_models_alone() -> None:
    models = [small(s).train() for s in range(2)]
    found = nafi.fuse(models, INPUTS, method="ensemble").model
    assert all(model.training for model in models)
    with torch.no_grad():
        found.models[0][0].weight.zero_()
    assert float(models[0][0].weight.abs().sum()) > 0
    odd = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(InputError, match="side by side"):
        nafi.fuse([small(), odd], INPUTS, method="ensemble")


def test_scores_that_are_not_numbers_never_win() -> None:
    models = [small(s) for s in range(3)]
    alone = [0.1, float("nan"), 0.2, 0.3]  # clients and their ensemble
    scores = iter([*alone, float("nan"), 0.5, 0.4])
    found = nafi.fuse(models, INPUTS, penalty=[0.0, 0.3, 3.0], validate=lambda _: next(scores))
    assert found.diagnostics["penalty"] == 0.3
    assert found.scores == Scores((0.1, -inf, 0.2), 0.3, 0.5, ("model 0", "model 1", "model 2"))
    with pytest.raises(InputError, match="every score is NaN"):
        nafi.fuse(models, INPUTS, penalty=[0.0, 1.0], validate=lambda _: float("nan"))
    with pytest.raises(InputError, match="returned None"):
        nafi.fuse(models, INPUTS, penalty=[0.0, 1.0], validate=lambda _: None)


@pytest.mark.parametrize(
    "options",
    [
        {"max_width": float("nan")},
        {"max_width": float("inf")},
        {"names": ["a"]},
        {"names": "abc"},
        {"penalty": -0.1},
        {"penalty": []},
        {"evidence": None},
        {"validate": "acc"},
        {"spec": "a"},
        {"progress": 3},
        {"seed": -1},
        {"seed": 1.5},
        {"restore_norm": "x"},
        {"method": "ot", "reference": "a"},
        {"method": "ot", "reference": 7},
        {"method": "ot", "metric": "far"},
        {"method": "rebasin", "sweeps": 1.5},
        {"method": "ensemble", "average": "mode"},
        {"batchnorm": None},
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any]) -> None:
    culprit = next(name for name in reversed(options))
    with pytest.raises(NafiError, match=f"{culprit}: found"):
        nafi.fuse([small(s) for s in range(3)], INPUTS, **options)


def test_wrapped_names_and_half_precision_are_read(tmp_path: Path) -> None:
    model = seeded(0, 8, 12, 9, 5)
    for k, prefix in enumerate(["module.", "_orig_mod."]):
        state = {prefix + name: t for name, t in model.state_dict().items()}
        torch.save(state, tmp_path / f"{k}.pt")
        assert (
            gap(
                nafi.load(tmp_path / f"{k}.pt", "tests.architectures:mlp"),
                model,
                (torch.randn(2, 8),),
            )
            == 0
        )
    files = [tmp_path / f"h{s}.safetensors" for s in range(2)]
    for s, file in enumerate(files):
        nafi.save(seeded(s, 8, 12, 9, 5).half(), file)
    clients = load_clients(files, "tests.architectures:mlp")
    assert clients.example_inputs[0].dtype == torch.float16
    found = nafi.fuse(clients.models, clients.example_inputs)
    assert {p.dtype for p in found.model.parameters()} == {torch.float16}


def test_counts_that_only_some_files_have_are_told(tmp_path: Path) -> None:
    files = [tmp_path / f"{s}.safetensors" for s in range(2)]
    nafi.save(seeded(0, 8, 12, 9, 5), files[0], class_counts=[1] * 5)
    nafi.save(seeded(1, 8, 12, 9, 5), files[1])
    with pytest.warns(FusionWarning, match=r"class counts .* since .*1\.safetensors has none"):
        assert load_clients(files, "tests.architectures:mlp").class_counts is None


@pytest.mark.parametrize(
    "options",
    [
        {"factory": lambda: None},
        {"factory": "nocolon"},
        {"class_counts": "abc"},
        {"class_counts": [-1, 2]},
        {"sample_count": float("inf")},
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(options))}: found"):
        nafi.save(small(), tmp_path / "a.safetensors", **options)
    assert not list(tmp_path.iterdir())


def test_a_factory_that_needs_arguments(tmp_path: Path) -> None:
    nafi.save(small(), tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="called without arguments"):
        nafi.load(tmp_path / "a.safetensors", lambda width: small(width))


def test_double_precision_models_are_not_changed() -> None:
    """Arrays that share memory with the models must not be written to."""
    models = [Gained(1.0 + s, learnt=True).double() for s in range(2)]
    before = [copy.deepcopy(model.state_dict()) for model in models]
    for method in ("nafi", "ot", "rebasin", "pfnm"):
        nafi.fuse(models, (INPUTS[0].double(),), method=method)
    for model, state in zip(models, before, strict=True):
        for name, tensor in model.state_dict().items():
            assert np.array_equal(tensor.numpy(), state[name].numpy()), name


def test_transport_without_its_package_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(NafiError, match=r"pip install 'nafi\[ot\]'"):
        make_method("ot")


def test_slips_are_answered() -> None:
    models = [small(s) for s in range(2)]
    with pytest.raises(InputError, match=r"found a class, expected Nafi\(\) or a name"):
        nafi.fuse(models, INPUTS, Nafi)  # type: ignore[arg-type]
    networks = prepare_networks(check_clients(models, None, None, None), INPUTS, None, "attach")
    with pytest.raises(InputError, match="reference: found 7, expected a whole number from 0 to 1"):
        align_to_one(networks, 7, "euclidean", lambda costs: costs, lambda *_: None)
    with pytest.raises(NafiError, match=r"write \(x,\)"):
        nafi.save(models[0], "never.safetensors", example_inputs=INPUTS[0])
