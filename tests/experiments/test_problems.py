"""A data set is one entry of PROBLEMS; both ways to run experiments take it from there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

import nafi.experiments
import nafi.reports
from nafi.errors import InputError, NafiError
from nafi.experiments import PROBLEMS, Experiment, load_data, load_experiment, run_experiment
from nafi.experiments.cells import cells
from nafi.experiments.clients import population
from nafi.experiments.data import Dataset
from nafi.experiments.models import draw_weights, drawn_mlp
from nafi.experiments.problems import Network
from nafi.experiments.trials import load_trial
from nafi.federated import Samples, Training, train
from nafi.federated.randomness import seeded
from nafi.reports import experiments, figures


def blobs(count: int, seed: int) -> Samples:
    """Points around three corners, one for each class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=count)
    points = 3 * np.eye(3)[labels] + rng.normal(size=(count, 3))
    return Samples(torch.from_numpy(points).float(), torch.from_numpy(labels))


def normalised(widths: Sequence[int]) -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, widths[0]), nn.BatchNorm1d(widths[0]), nn.ReLU(), nn.Linear(widths[0], 3)
    )


@pytest.fixture(autouse=True)
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a new data set takes."""
    monkeypatch.setenv("NAFI_CACHE", str(tmp_path / "cache"))
    problem = replace(
        PROBLEMS["cifar10"],
        load=lambda size: Dataset("blobs", blobs(200, 0), blobs(100, 1)),
        networks={"normalised": Network(normalised, (4,))},
        classes=3,
        training=Training(epochs=2, batch=16, rate=0.1),
    )
    monkeypatch.setitem(PROBLEMS, "blobs", problem)


BLOBS: dict[str, Any] = {
    "name": "blobs",
    "title": "Blobs",
    "data": "blobs",
    "trials": 1,
    "clients": [3],
}


def run(experiment: Experiment, file: Path) -> dict[str, dict[str, Any]]:
    records = run_experiment(
        experiment, file, jobs=1, resume=False, progress=lambda step, done, total: None
    )
    return {record["method"]: record for record in records}


@pytest.mark.slow
def test_a_new_data_set_in_one_shot_and_in_rounds(tmp_path: Path) -> None:
    local = {"name": "local", "method": "local"}
    nafi = {"name": "nafi", "method": "nafi", "options": {"batchnorm": "average", "calibrate": 50}}
    shot = Experiment(**BLOBS, methods=[local, nafi])
    assert shot.training.model_dump() == {
        "epochs": 2, "batch": 16, "optimiser": "sgd", "rate": 0.1, "momentum": 0.0, "decay": 0.0
    }  # fmt: skip
    records = run(shot, tmp_path / "s.jsonl")
    assert records["nafi"]["local_width"] == [4]
    assert 4 <= records["nafi"]["widths"][0] <= 12
    assert "rounds" not in records["nafi"]
    average = {"name": "average", "method": "match-then-average"}
    rounds = run(Experiment(**BLOBS, rounds=2, methods=[local, average]), tmp_path / "r.jsonl")
    assert [entry["round"] for entry in rounds["average"]["rounds"]] == [1, 2]
    for record in [*records.values(), *rounds.values()]:
        assert record["metric"] == "test accuracy"
        assert 0 <= record["validation"] <= 100
        assert 0 <= record["test"] <= 100


def from_sites() -> Dataset:
    """Blobs of two sites, of which the second has but a tenth of the test samples."""
    sites = np.arange(200) % 2
    test_sites = (np.arange(100) % 10 == 9).astype(np.intp)
    return Dataset("blobs", blobs(200, 0), blobs(100, 1), sites, test_sites, ("north", "south"))


def hits(model: nn.Module, samples: Samples, chosen: Sequence[int]) -> float:
    """The percentage of right classes, sample by sample."""
    right = [
        int(model(samples.inputs[place][None]).argmax()) == int(samples.labels[place])
        for place in chosen
    ]
    return 100 * sum(right) / len(right)


def test_every_site_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(PROBLEMS["blobs"], load=lambda size: from_sites())
    monkeypatch.setitem(PROBLEMS, "sites", problem)
    names = ("local", "best", "ensemble", "fedavg")
    methods = [{"name": name, "method": name} for name in names]
    experiment = Experiment(**{**BLOBS, "data": "sites"}, rounds=2, methods=methods)
    records = run(experiment, tmp_path / "r.jsonl")
    test, south = from_sites().test, range(9, 100, 10)
    north = [place for place in range(100) if place not in south]
    models = population(cells(experiment)[0].recipe({}))
    by_hand = [(hits(m, test, north), hits(m, test, south)) for m in models]
    means = np.mean(by_hand, axis=0)
    assert records["local"]["sites"] == pytest.approx(
        {"north": means[0], "south": means[1]}, abs=1e-3
    )
    best = max(by_hand, key=lambda scores: 9 * scores[0] + scores[1])
    assert tuple(records["best"]["sites"].values()) == pytest.approx(best, abs=1e-3)
    for record in records.values():  # accuracy is a mean over samples
        mean = 0.9 * record["sites"]["north"] + 0.1 * record["sites"]["south"]
        assert record["test"] == pytest.approx(mean, abs=2e-3)


def test_sites_without_names_are_counted() -> None:
    data = replace(from_sites(), site_names=())
    assert {site: len(s) for site, s in data.test_by_site(count=25).items()} == {"0": 23, "1": 2}
    assert set(data.test_by_site(count=5)) == {"0"}  # the other has no sample among these
    assert replace(data, test_sites=None).test_by_site() == {}


def test_networks_with_statistics_train_one_after_the_other() -> None:
    """The population is what `federated.train` makes of each client alone."""
    cell = cells(Experiment(**BLOBS, methods=[{"name": "local", "method": "local"}]))[0]
    recipe = cell.recipe({})
    models = population(recipe)
    expected = []
    for s, start in enumerate(recipe.starts):
        with seeded(start):
            expected.append(normalised((4,)))
        samples = load_trial(recipe.trial).data[str(s)]
        train(expected[-1], samples, recipe.training, seed=recipe.trial.seed + s)
    for model, other in zip(models, expected, strict=True):
        assert all(
            torch.equal(tensor, other.state_dict()[name])
            for name, tensor in model.state_dict().items()
        )
    again = population(recipe)  # from the cache
    assert torch.equal(again[1][1].running_mean, models[1][1].running_mean)


def test_an_unknown_data_set_is_refused(tmp_path: Path) -> None:
    known = "known: mnist, digits, cifar10, carvana, nuclei"
    with pytest.raises(InputError, match=f"there is no data set 'fashion'; {known}"):
        load_data("fashion")
    with pytest.raises(ValidationError, match="there is no data set 'fashion'"):
        Experiment(**{**BLOBS, "data": "fashion"}, methods=[{"name": "a", "method": "nafi"}])
    file = tmp_path / "my.toml"
    for rounds in ("", "rounds = 2\n"):
        file.write_text(
            f'name = "a"\ntitle = "b"\ndata = "fashion"\nclients = [2]\n{rounds}'
            '[[methods]]\nname = "n"\nmethod = "fedavg"'
        )
        with pytest.raises(
            InputError, match=rf"my\.toml: data: there is no data set 'fashion'; {known}"
        ):
            load_experiment(str(file))


def test_first_weights_are_those_of_the_public_code() -> None:
    """N(0, 0.1^2) and biases of 0.1, from torch's random numbers alone."""
    with seeded(7):
        model = drawn_mlp(3, 2, [5])
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert torch.equal(parameter, torch.full_like(parameter, 0.1))
        else:
            expected = torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator)
            assert torch.equal(parameter, expected)


def test_biases_are_told_by_their_shape() -> None:
    model = nn.ParameterDict({"shift": torch.zeros(4), "unbias": torch.zeros(4, 3)})
    draw_weights(model)
    assert torch.equal(model["shift"], torch.full((4,), 0.1))
    assert model["unbias"].unique().numel() > 1


def test_a_missing_package_of_the_laboratory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hint = r"this needs {}, which is not installed: pip install 'nafi\[lab\]'"
    for package in ("pydantic", "sklearn", "pooch", "PIL"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, package, None)
            with pytest.raises(NafiError, match=hint.format(package)):
                importlib.reload(nafi.experiments)
    for package, module in (("matplotlib", figures), ("jinja2", experiments)):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, package, None)
            with pytest.raises(NafiError, match=hint.format(package)):
                importlib.reload(module)
            assert nafi.reports.fusion_table([], "tables need none of them").row_count == 0
