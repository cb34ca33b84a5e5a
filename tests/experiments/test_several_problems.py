"""An experiment on several problems: one file, one table of methods, one report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nafi
from nafi.errors import InputError
from nafi.experiments import (
    Experiment,
    load_experiment,
    read_records,
    report_of,
    run_experiment,
)
from nafi.experiments.cells import Cell, cells
from nafi.experiments.clients import population
from nafi.experiments.models import VGG, ResNet, resnet_widths
from nafi.experiments.trials import load_trial
from nafi.federated import Samples, Trainer, Update, as_numbers, make_strategy
from nafi.graph import groups
from nafi.reports import score_table, sections

TWO: dict[str, Any] = {
    "name": "two",
    "title": "Two",
    "data": "digits",
    "trials": 1,
    "clients": [3],
    "width": 8,
    "training": {"epochs": 1},
    "methods": [
        {"name": "local", "method": "local"},
        {"name": "local best", "method": "best"},
        {"name": "nafi 2x", "method": "nafi", "options": {"max_width": 2.0}},
    ],
    "problems": {"flat": {}, "deep": {"hidden": [2]}},
}
Records = list[dict[str, Any]]


def quiet(*_: object) -> None:
    """No progress."""


@pytest.fixture(scope="module", autouse=True)
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Records of both problems, of clients in a cache of their own."""
    folder = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NAFI_CACHE", str(folder / "cache"))
        experiment, file = Experiment(**TWO), folder / "two.jsonl"
        run_experiment(experiment, file, jobs=1, resume=False, progress=quiet)
        yield file


@pytest.fixture
def records(file: Path) -> Records:
    return read_records(file)


def cell_of(experiment: Experiment, problem: str, method: str) -> Cell:
    found = (c for c in cells(experiment) if c.key[0] == problem and c.method.name == method)
    return next(found)


def test_a_problem_has_what_it_does_not_say_from_the_experiment_or_the_data() -> None:
    deep = load_experiment("oneshot-deep", "scaled")
    mnist, convnet, vgg, unet, *_ = deep.parts
    networks = ["mlp", "convnet", "vgg", "unet", "unet", "resnet", "vgg", "resnet"]
    assert [part.network for part in deep.parts] == networks
    clients = [[5], [5, 10], [5, 10], [8, 16], [6], [5], [2, 4], [2]]
    assert [part.clients for part in deep.parts] == clients
    samples = [10000, 10000, 10000, 600, 529, 10000, 50000, 20000]
    assert [part.samples for part in deep.parts] == samples
    assert mnist.training.decay == 1e-6
    assert vgg.training.decay == 0.0
    assert (convnet.widths, vgg.widths) == ([6, 16, 120, 84], [16, 16, 32, 32, 64, 64])
    assert unet.methods == deep.methods
    assert {part.label for part in deep.parts} == {"oneshot-deep-scaled"}
    populations = sum(map(len, clients))
    # Without normalisation, 6 methods make no sense; of two clients nobody can keep four.
    left_out = 6 * (1 + 2) + 2
    assert len(cells(deep)) == 3 * (populations * len(deep.methods) - left_out)


def test_changes_and_a_choice_of_methods_are_for_all_problems() -> None:
    deep = load_experiment("oneshot-deep", "scaled", trials=1, clients=[2])
    assert {(part.trials, *part.clients) for part in deep.parts} == {(1, 2)}
    two = deep.only(["fedavg", "local best"])
    assert {cell.method.name for cell in cells(two)} == {"fedavg", "local best"}
    assert len(cells(two)) == 8 * 2
    resnet = deep.only_problems(["CIFAR-10, ResNet"])
    assert {cell.key[0] for cell in cells(resnet)} == {"CIFAR-10, ResNet"}
    with pytest.raises(InputError, match="there is no 'VGG'; known: MNIST, 3 hidden layers; CIFAR"):
        deep.only_problems(["VGG"])
    with pytest.raises(InputError, match="there is no 'fedma'; known: local, local best, ensemble"):
        deep.only(["fedma"])


def test_records_tell_problems_apart(records: Records, file: Path, tmp_path: Path) -> None:
    """The same trial, clients and method, once for each problem."""
    assert [r["problem"] for r in records] == 3 * ["flat"] + 3 * ["deep"]
    assert [len(r["widths"]) for r in records if r["method"] == "nafi 2x"] == [1, 2]
    half = tmp_path / "half.jsonl"
    half.write_text("".join(file.read_text().splitlines(keepends=True)[:4]))
    seen: list[int] = []
    again = run_experiment(
        Experiment(**TWO),
        half,
        jobs=1,
        resume=True,
        progress=lambda _, done, total: seen.append(total),
    )
    assert seen[-1] == 2
    assert [r["test"] for r in again] == [r["test"] for r in records]


def test_records_of_other_problems_are_not_mixed(file: Path) -> None:
    problems = {"flat": {}, "deep": {"hidden": [2], "alpha": 9.0}}
    other = Experiment(**{**TWO, "problems": problems})
    with pytest.raises(InputError, match="line 4 is of another experiment or other settings"):
        run_experiment(other, file, jobs=1, resume=True, progress=quiet)


def test_a_report_has_a_column_for_each_problem(records: Records) -> None:
    table = score_table(records, "t")
    assert table.headings == ("method", "deep, 3 clients", "flat, 3 clients")
    assert [row[0] for row in table.rows] == ["local", "local best", "nafi 2x"]
    views = {"views": ["methods", "score", "parameters"]}
    (section,) = sections({"two": [{**r, "report": views} for r in records]}, report_of)
    assert [t.title for t in section.tables] == [
        "Test accuracy, chosen on validation data",
        "Parameters, thousands",
    ]
    # 64 inputs, twice 8 hidden, 10 classes.
    assert float(section.tables[1].rows[0][2]) <= (65 * 16 + 17 * 10) / 1000
    (figure,) = section.figures
    assert "deep, 3 clients: test accuracy, %" in figure
    assert "nafi 2x" in figure


def test_scores_are_drawn_over_both_sizes(records: Records) -> None:
    views = {"views": ["frontier", "multiply-adds"]}
    (section,) = sections({"two": [{**r, "report": views} for r in records]}, report_of)
    (figure,) = section.figures
    for text in ("parameters", "multiply-adds of one input", "flat, 3 clients", "nafi"):
        assert text in figure
    # A multiplication for each weight, and none for a bias.
    nafi = next(r for r in records if r["method"] == "nafi 2x" and r["problem"] == "flat")
    (width,) = nafi["widths"]
    assert nafi["multiply_adds"] == 64 * width + width * 10
    assert nafi["parameters"] == nafi["multiply_adds"] + width + 10


def test_clients_can_train_at_the_widths_of_another_method(tmp_path: Path) -> None:
    wide = {"name": "wide", "method": "fedavg", "start": "shared", "widths_of": "nafi"}
    nafi = {"name": "nafi", "method": "nafi", "options": {"max_width": 2.0}}
    both = Experiment(**{**TWO, "problems": {"flat": {}}, "methods": [wide, nafi]})
    records = run_experiment(both, tmp_path / "wide.jsonl", jobs=1, resume=False, progress=quiet)
    found = {record["method"]: record for record in records}
    assert found["wide"]["parameters"] == found["nafi"]["parameters"]


def test_the_best_client_is_the_best_of_those_that_are_averaged(records: Records) -> None:
    cell = cell_of(Experiment(**TWO), "deep", "local")
    trial = load_trial(cell.trial_settings)
    scores = [trial.score(model)["test"] for model in population(cell.recipe({}))]
    found = {r["method"]: r["test"] for r in records if r["problem"] == "deep"}
    assert found["local best"] == pytest.approx(max(scores), abs=1e-3)
    assert found["local"] == pytest.approx(sum(scores) / 3, abs=1e-3)


@pytest.mark.parametrize(
    ("problems", "told"),
    [
        ("problems = 3", "my.toml: problems: "),
        ("problems = { a = 3 }", "my.toml: problems.a: "),
        ('problems = { a = { data = "x" } }', "there is no data set 'x'"),
        ('problems = { a = { network = "vgg" } }', "problems.a.network: found 'vgg', expected one"),
        ("problems = { a = { clients = [0] } }", "my.toml: problems.a.clients.0: "),
        ('problems = { a = { title = "A" } }', "problems.a: title is the same for all problems"),
        ("problems = { a = { problems = { b = {} } } }", "a problem has no problems of its own"),
        ("problems = { a = { widths = [5], hidden = [2] } }", "hidden: the network's layers"),
        ("problems = { a = { budget = 1 } }", "method n has 2 candidates"),
    ],
)
def test_bad_problems_are_named(tmp_path: Path, problems: str, told: str) -> None:
    file = tmp_path / "my.toml"
    method = '[[methods]]\nname = "n"\nmethod = "nafi"\ngrid = { penalty = [0.1, 0.2] }\n'
    file.write_text(f'name = "a"\ntitle = "b"\nclients = [2]\n{problems}\n{method}')
    with pytest.raises(InputError, match=told):
        load_experiment(str(file))


def test_layers_are_refitted_by_sums_over_clients_own_data(tmp_path: Path) -> None:
    """As a federation would do it, message by message, with the clients of one shot."""
    own = {"max_width": 1.5, "probe": "own"}
    method = {"name": "own", "method": "nafi", "options": own}
    experiment = Experiment(**{**TWO, "methods": [method]})
    *_, record = run_experiment(
        experiment, tmp_path / "own.jsonl", jobs=1, resume=False, progress=quiet
    )
    cell = cell_of(experiment, "deep", "own")
    trial = load_trial(cell.trial_settings)
    network = trial.architecture(cell.experiment.network, cell.local_widths)
    strategy = make_strategy(
        "match-refit", network, cell.training, rounds=1, seed=cell.fusion_seed, max_width=1.5
    )
    trainer = Trainer(network, trial.data, 10)
    state = strategy.start()
    models = zip(trial.data, population(cell.recipe(own), trial), strict=True)
    state = strategy.advance(
        state,
        [
            Update(c, 0, model.state_dict(), len(trial.data[c]), tuple(of_classes.tolist()))
            for (c, model), of_classes in zip(models, trial.class_counts, strict=True)
        ],
    )
    while state.awaiting:
        tasks = {client: strategy.next_task(state, client) for client in trial.data}
        state = strategy.advance(state, [trainer(c, task)[0] for c, task in tasks.items()])
    assert record["problem"] == "deep"
    assert record["widths"] == list(state.form.widths.values())
    score = trial.score(strategy.global_model(state))["test"]
    assert record["test"] == round(score, 3)


def test_clients_weigh_the_same_where_counts_are_not_used(tmp_path: Path) -> None:
    options = {"max_width": 1.5, "counts": False}
    equal = {"name": "equal", "method": "nafi", "options": options}
    experiment = Experiment(**{**TWO, "methods": [equal], "problems": {"flat": {}}})
    file = tmp_path / "equal.jsonl"
    (record,) = run_experiment(experiment, file, jobs=1, resume=False, progress=quiet)
    cell = cell_of(experiment, "flat", "equal")
    trial = load_trial(cell.trial_settings)
    models = population(cell.recipe(options), trial)
    equal_model, weighted_model = (
        nafi.fuse(
            models, trial.example_inputs, max_width=1.5, seed=cell.fusion_seed, class_counts=counts
        ).model
        for counts in (None, trial.class_counts)
    )
    assert record["test"] == round(trial.score(equal_model)["test"], 3)
    inputs = as_numbers(trial.test.inputs[:50])
    assert not torch.allclose(equal_model(inputs), weighted_model(inputs), rtol=1e-2)


def test_a_probe_is_drawn_from_all_clients_by_the_seed() -> None:
    trial = load_trial(cell_of(Experiment(**TWO), "flat", "local").trial_settings)
    inputs = torch.cat([samples.inputs for samples in trial.data.values()])
    every = trial.probe(len(inputs))
    assert torch.equal(every.sum(dim=0), as_numbers(inputs).sum(dim=0))
    assert not torch.equal(every, as_numbers(inputs))
    assert torch.equal(trial.probe(16), every[:16])


def test_the_vgg_has_six_convolutions_with_normalisation() -> None:
    model = VGG((16, 16, 32, 32, 64, 64))
    read = [3, 16, 16, 32, 32, 64, 64]
    expected = sum(9 * a * b + 2 * b for a, b in pairwise(read)) + 65 * 10
    assert sum(p.numel() for p in model.parameters()) == expected
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 6
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_resnet_has_widths_in_the_order_of_its_groups() -> None:
    widths = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    spec = groups(ResNet(widths).eval(), (torch.zeros(2, 3, 16, 16),))
    assert list(spec.widths.values()) == widths
    assert sum(isinstance(m, nn.Conv2d) for m in ResNet(resnet_widths(4)).modules()) == 15


@pytest.mark.parametrize(("numbers", "sizes"), [(64 * 40, {40}), (1, {32})])
def test_heads_are_summed_over_batches_of_a_size_that_fits_the_inputs(
    numbers: int, sizes: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cell_of(Experiment(**TWO), "deep", "local")
    trial = load_trial(cell.trial_settings)
    model = population(cell.recipe({}), trial)[0]
    seen: list[int] = []
    hook = model.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    usual = trial.with_head(model)
    seen.clear()
    monkeypatch.setattr("nafi.experiments.trials._SUMMED", numbers)
    found = trial.with_head(model)
    hook.remove()
    last = {len(samples) % size for samples in trial.data.values() for size in sizes}
    assert sizes <= set(seen) <= sizes | last
    for one, two in zip(found.parameters(), usual.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=1e-3, atol=1e-4)


def test_a_head_is_that_of_all_clients_data() -> None:
    """However samples fell to clients; the layers below stay as they are."""
    cell = cell_of(Experiment(**TWO), "deep", "local")
    trial = load_trial(cell.trial_settings)
    model = population(cell.recipe({}), trial)[0]
    found = trial.with_head(model)
    together = Samples(
        torch.cat([samples.inputs for samples in trial.data.values()]),
        torch.cat([samples.labels for samples in trial.data.values()]),
    )
    whole = replace(trial, data={"all": together}).with_head(model)
    rng = torch.Generator().manual_seed(0)
    inputs = torch.rand(50, 64, generator=rng)
    assert torch.allclose(found(inputs), whole(inputs), rtol=1e-3, atol=1e-4)
    assert trial.score(found)["test"] > trial.score(model)["test"]
    one, two = ([p for n, p in m.named_parameters() if "2" not in n] for m in (found, model))
    assert len(one) == 4
    assert all(torch.equal(p, q) for p, q in zip(one, two, strict=True))
