"""Experiments: configured, resumable, in several processes, chosen on validation data."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from nafi.cli.app import app
from nafi.errors import InputError, NafiError
from nafi.experiments import (
    Experiment,
    experiment_names,
    load_experiment,
    read_records,
    read_runs,
    report_of,
    run_experiment,
)
from nafi.experiments.cells import Cell, cells
from nafi.experiments.clients import digest, population
from nafi.experiments.entries import accuracy
from nafi.experiments.records import finished, make_record
from nafi.experiments.runner import _each, _workers, run_cell
from nafi.experiments.trials import load_trial
from tests.processes import HEED_CTRL_C

SMALL: dict[str, Any] = {
    "name": "small",
    "title": "Small",
    "data": "digits",
    "trials": 2,
    "clients": [3],
    "width": 12,
    "training": {"epochs": 3},
    "methods": [
        {"name": "local", "method": "local"},
        {"name": "fedavg", "method": "fedavg", "start": "shared"},
        {
            "name": "fedprox",
            "method": "fedavg",
            "start": "shared",
            "grid": {"proximal": [0.1, 1.0]},
        },
        {"name": "nafi", "method": "nafi", "grid": {"penalty": [0.05, 0.4]}},
    ],
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAFI_CACHE", str(tmp_path / "cache"))


def quiet(*_: object) -> None:
    """No progress."""


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records but for what a clock decides."""
    text = json.dumps(records)
    found: list[dict[str, Any]] = json.loads(
        text, object_hook=lambda o: {k: v for k, v in o.items() if not k.endswith("seconds")}
    )
    return found


def test_records_hold_what_is_needed_to_run_them_again(tmp_path: Path) -> None:
    experiment = Experiment(**SMALL)
    seen: list[tuple[str, int, int]] = []
    file = tmp_path / "r.jsonl"
    records = run_experiment(
        experiment, file, jobs=1, resume=False, progress=lambda *a: seen.append(a)
    )
    assert len(records) == 2 * 4
    assert records == read_records(file)
    # Trained: own and shared starts, and two proximal strengths, for two trials.
    assert seen[0] == ("training clients", 0, 8 + 8)
    last = cells(experiment)[-1]
    assert seen[-1] == (f"{last.method.name}, 3 clients, trial 1", 16, 16)
    nafi = next(r for r in records if r["method"] == "nafi")
    best = max(nafi["candidates"], key=lambda entry: entry["validation"])
    assert nafi["chosen"] == best["options"]
    assert set(nafi["versions"]) == {"nafi", "torch", "numpy", "scipy"}
    assert nafi["config"]["training"]["epochs"] == 3
    assert all(width <= 3 * 12 for width in nafi["widths"])
    again = run_cell(next(c for c in cells(experiment) if c.key == (None, 0, 3, 1, "nafi")))
    assert without_times([again]) == without_times([nafi])


def test_the_choice_is_made_on_validation_data() -> None:
    """Test data would choose another candidate, and so would the last or the first one."""
    tried = [
        {"options": {"penalty": p}, "validation": v, "test": t, "widths": [w], "seconds": s}
        for p, v, t, w, s in [(0.1, 60, 90, 7, 1), (0.2, 70, 50, 8, 2), (0.3, 65, 80, 9, 3)]
    ]
    record = make_record(cells(Experiment(**SMALL))[-1], tried, 4.0)
    assert record["chosen"] == {"penalty": 0.2}
    assert (record["validation"], record["test"], record["test_picked"]) == (70, 50, 90)
    assert (record["widths"], record["fuse_seconds"], record["seconds"]) == ([8], 2, 4.0)
    assert record["candidates"] == tried


def first_cell(experiment: Experiment, method: str = "nafi") -> Cell:
    """A method's cell of the first trial."""
    return next(cell for cell in cells(experiment) if cell.method.name == method)


def test_validation_samples_are_held_back_and_test_samples_are_others() -> None:
    cell = first_cell(Experiment(**SMALL))
    trial = load_trial(cell.trial_settings)
    assert trial.class_counts is not None
    samples = int(trial.class_counts.sum()) + len(trial.validation)
    assert samples == 1797 - 1797 // 4
    assert len(trial.validation) == pytest.approx(0.1 * samples, abs=3)
    recipe = cell.recipe({})
    models = population(recipe)
    assert recipe.file.is_file()
    for one, two in zip(models, population(recipe), strict=True):
        assert accuracy(one, trial.test) == accuracy(two, trial.test)


def test_starts_are_shared_or_not() -> None:
    experiment = Experiment(**{**SMALL, "training": {"epochs": 1, "rate": 1e-9}})
    for method, equal in [("nafi", False), ("fedavg", True)]:
        models = population(first_cell(experiment, method).recipe({}))
        one, two = (m.layers[0].weight.detach().numpy() for m in models[:2])
        assert np.allclose(one, two, atol=1e-5) == equal


def test_the_seeds_that_were_used_are_recorded() -> None:
    """In one shot the fusion takes the number of the trial, whatever the experiment's seed."""
    record = run_cell(first_cell(Experiment(**{**SMALL, "seed": 3})))
    assert (record["seed"], record["fusion_seed"]) == (3000, 0)
    cell = cells(Experiment(**{**ROUNDS, "seed": 3, "trials": 2}))[-1]
    assert (cell.seed, cell.fusion_seed) == (3001, 3001)


@pytest.mark.slow
def test_a_resumed_run_computes_what_is_missing_only(tmp_path: Path) -> None:
    experiment = Experiment(**SMALL)
    file = tmp_path / "r.jsonl"
    whole = run_experiment(experiment, file, jobs=1, resume=False, progress=quiet)
    with pytest.raises(InputError, match=r"exists already: --resume"):
        run_experiment(experiment, file, jobs=1, resume=False, progress=quiet)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:5]) + lines[5][:40])  # killed while writing the sixth
    seen: list[tuple[str, int, int]] = []
    again = run_experiment(
        experiment, file, jobs=1, resume=True, progress=lambda *a: seen.append(a)
    )
    assert seen[-1][1:] == (3, 3)
    assert without_times(again) == without_times(whole)
    assert len(read_records(file)) == 8


@pytest.mark.slow
def test_two_processes_give_the_same_records(tmp_path: Path) -> None:
    experiment = Experiment(**{**SMALL, "trials": 1})
    one = run_experiment(experiment, tmp_path / "1.jsonl", jobs=1, resume=False, progress=quiet)
    two = run_experiment(experiment, tmp_path / "2.jsonl", jobs=2, resume=False, progress=quiet)
    assert without_times(one) == without_times(two)


MINE = (
    'name = "my"\ntitle = "Mine"\ndata = "digits"\nclients = [3]\ntrials = 8\nwidth = 10\n'
    'training = { epochs = 2 }\n[[methods]]\nname = "nafi"\nmethod = "nafi"\n'
)


# A process that is killed while it writes its sixth record.
KILLED = """
import os, signal
import nafi.experiments.runner as runner
from nafi.cli import main

whole, count = runner.append_record, 0

def sixth(file, record):
    global count
    count += 1
    if count < 6:
        return whole(file, record)
    with file.open("a") as lines:
        lines.write('{"experiment": "my", "tri')
    os.kill(os.getpid(), signal.SIGKILL)

runner.append_record = sixth
main()
"""


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Killed without warning in the middle; the second run ends it."""
    toml = tmp_path / "my.toml"
    toml.write_text(MINE + '[[methods]]\nname = "local"\nmethod = "local"\n')
    out = tmp_path / "my.jsonl"
    command = [sys.executable, "-c", KILLED, "run", str(toml), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    half = [r for r in read_records(out) if r]
    assert len(half) == 5
    experiment = load_experiment(str(toml))
    records = run_experiment(experiment, out, jobs=1, resume=True, progress=quiet)
    assert len(records) == len(read_records(out)) == 16
    assert records[: len(half)] == half  # kept as they were, seconds included


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_at_once(tmp_path: Path) -> None:
    """It goes to every process of a terminal; one line says how to resume, and nobody is left.

    Some clients are trained when it comes, others would take hours.
    """
    endless = '[[methods]]\nname = "long"\nmethod = "nafi"\noptions = { epochs = 1000000 }\n'
    (tmp_path / "my.toml").write_text(MINE + endless)
    options = ["--out", "my records.jsonl", "--trials", "1", "--jobs", "2"]
    code = f"{HEED_CTRL_C}from nafi.cli import main; main()"
    command = [sys.executable, "-c", code, "run", "my.toml"]
    process = subprocess.Popen(
        [*command, *options],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _wait_until(lambda: any((tmp_path / "cache").glob("*.safetensors")), process)
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 130, error
        assert "Traceback" not in error
        expected = "nafi run my.toml --resume --out 'my records.jsonl' --trials 1 --jobs 2"
        assert error.rstrip().endswith(f"To resume: {expected}")
        # The operating system takes a moment to bury them.
        _wait_until(lambda: not _has_processes(process.pid))
    finally:
        if _has_processes(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def _has_processes(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_until(
    condition: Callable[[], bool], process: subprocess.Popen[str] | None = None
) -> None:
    """Wait for something that a process does, as long as it runs."""
    deadline = time.monotonic() + 300
    while not condition():
        assert process is None or process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_an_interrupt_between_two_results_ends_the_workers(tmp_path: Path) -> None:
    """The workers are at something that would take hours."""
    long = {"name": "long", "method": "nafi", "options": {"epochs": 10**6}}
    experiment = Experiment(**{**SMALL, "trials": 1, "methods": [SMALL["methods"][0], long]})

    def stop(step: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment, tmp_path / "r.jsonl", jobs=2, resume=False, progress=stop)
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_worker_that_dies_is_told(tmp_path: Path) -> None:
    died = r"a worker process died.* resume with fewer --jobs"
    with pytest.raises(NafiError, match=died), _workers(2) as pool:
        list(_each(os._exit, [1, 1], pool))
    with pytest.raises(InputError, match="jobs: found 0"):
        run_experiment(
            Experiment(**SMALL), tmp_path / "r.jsonl", jobs=0, resume=False, progress=quiet
        )


def test_a_failed_run_does_not_block_its_retry(tmp_path: Path) -> None:
    """Three clients have no reference 7; the second run is the same experiment mended."""
    file = tmp_path / "deep" / "r.jsonl"
    bad = {"name": "ot", "method": "ot", "options": {"reference": 7}}
    with pytest.raises(InputError, match="reference"):
        run_experiment(
            Experiment(**{**SMALL, "methods": [bad]}), file, jobs=1, resume=False, progress=quiet
        )
    assert not file.exists()
    file.touch()  # as older versions left it
    good = {"name": "ot", "method": "ot", "options": {"reference": 1}}
    experiment = Experiment(**{**SMALL, "trials": 1, "methods": [good]})
    records = run_experiment(experiment, file, jobs=1, resume=False, progress=quiet)
    assert read_records(file) == records


def test_a_file_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, words in [(tmp_path, "it is a folder"), (tmp_path / "file" / "r.jsonl", "cannot")]:
        with pytest.raises(InputError, match=words):
            run_experiment(Experiment(**SMALL), place, jobs=1, resume=False, progress=quiet)
    assert not (tmp_path / "cache").exists()


def test_other_clients_do_not_join_records(tmp_path: Path) -> None:
    """Another processor trains others from the same recipe; here, a changed last bit does."""
    experiment = Experiment(**{**SMALL, "trials": 1})
    file = tmp_path / "r.jsonl"
    alone = experiment.only(["local"])
    run_experiment(alone, file, jobs=1, resume=False, progress=quiet)
    content = file.read_text()
    trained = first_cell(experiment).recipe({}).file
    assert json.loads(content)["populations"] == {trained.stem: digest(trained.read_bytes())}
    tensors = load_file(trained)
    next(iter(tensors.values()))[0, 0] += 1e-7
    save_file(tensors, trained)
    with pytest.raises(InputError, match=r"^nafi, 3 clients, trial 0: its clients are not"):
        run_experiment(experiment, file, jobs=1, resume=True, progress=quiet)
    assert file.read_text() == content
    trained.unlink()  # trained again, they are the same
    run_experiment(experiment, file, jobs=1, resume=True, progress=quiet)


def test_older_records_are_resumed(tmp_path: Path) -> None:
    """Of version 0.1.0: without rounds, optimiser and, in one shot, the profile."""
    experiment = load_experiment("mnist-nets", "quick")
    settings = experiment.settings()
    older = {
        name: settings[name]
        for name in ("name", "title", "data", "seed", "width", "alpha", "validation", "samples")
    } | {
        "width_limit": 3.0,
        "budget": 8,
        "training": {"epochs": 2, "batch": 32, "rate": 0.01, "decay": 1e-6},
    }
    assert experiment.agrees(older)
    for change in ({"samples": 800}, {"profile": "other"}, {"training": {"epochs": 3}}, {"x": 1}):
        assert not experiment.agrees({**older, **change})
    assert not experiment.agrees(None)
    tried = {"options": {}, "validation": 1.0, "test": 2.0}
    record = {
        "experiment": "mnist-nets",
        "trial": 0,
        "clients": 4,
        "hidden": 1,
        "method": "local",
        "candidates": [tried],
        "config": older,
    }
    file = tmp_path / "r.jsonl"
    for label, profile, accepted in [
        ("mnist-nets", None, True),
        ("mnist-nets-quick", "quick", True),
        ("mnist-nets", "quick", False),
        ("mnist-size", None, False),
    ]:
        config = older if profile is None else {**older, "profile": profile}
        file.write_text(json.dumps({**record, "experiment": label, "config": config}) + "\n")
        if accepted:
            assert list(finished(experiment, file, resume=True)) == [(None, 0, 4, 1, "local")]
        else:
            with pytest.raises(InputError, match="line 1 is of another experiment"):
                finished(experiment, file, resume=True)


def test_records_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    run_experiment(Experiment(**{**SMALL, "trials": 1}), file, jobs=1, resume=False, progress=quiet)
    other = Experiment(**{**SMALL, "trials": 1, "alpha": 0.7})
    with pytest.raises(InputError, match="other settings"):
        run_experiment(other, file, jobs=1, resume=True, progress=quiet)


def test_settings_chosen_in_the_first_trial_are_kept_in_the_others(tmp_path: Path) -> None:
    """The penalty of 100 merges everything, which the width shows; fedavg has no choice."""
    file = tmp_path / "r.jsonl"
    nafi = {"name": "nafi", "method": "nafi", "grid": {"penalty": [0.0, 100.0]}}
    methods = [{"name": "fedavg", "method": "fedavg"}, nafi]
    content = {**SMALL, "trials": 3, "methods": methods, "choose": "first trial"}
    experiment = Experiment(**content)
    records = run_experiment(experiment, file, jobs=1, resume=False, progress=quiet)
    tried = [[e["options"] for e in r["candidates"]] for r in records if r["method"] == "nafi"]
    assert tried[0] == [{"penalty": 0.0}, {"penalty": 100.0}]
    assert tried[1] == tried[2] == [records[1]["chosen"]]
    assert (
        records[1]["chosen"]
        == max(records[1]["candidates"], key=lambda e: e["validation"])["options"]
    )
    # The same records as without a choice, for what was chosen.
    fixed = {"name": "nafi", "method": "nafi", "options": records[1]["chosen"]}
    alone = Experiment(**{**SMALL, "trials": 3, "methods": [fixed]})
    others = run_experiment(alone, tmp_path / "a.jsonl", jobs=1, resume=False, progress=quiet)
    assert [r["test"] for r in others] == [r["test"] for r in records if r["method"] == "nafi"]
    # Resumed, nothing is run again; a record that chose otherwise is refused.
    assert run_experiment(experiment, file, jobs=1, resume=True, progress=quiet) == records
    every = Experiment(**{**content, "choose": "every trial"})
    with pytest.raises(InputError, match="had other candidates"):
        run_experiment(every, file, jobs=1, resume=True, progress=quiet)


def test_a_stack_of_more_clients_than_there_are_has_no_cell() -> None:
    methods = [{"name": f"stack-{k}", "method": "stack", "options": {"keep": k}} for k in (2, 3, 4)]
    found = cells(Experiment(**{**SMALL, "trials": 1, "clients": [3, 4], "methods": methods}))
    assert [(cell.clients, cell.method.name) for cell in found] == [
        (3, "stack-2"), (3, "stack-3"), (4, "stack-2"), (4, "stack-3"), (4, "stack-4"),
    ]  # fmt: skip


def test_a_problem_leaves_methods_out() -> None:
    """Networks without batch normalisation have nothing to make inputs of."""
    found = cells(load_experiment("oneshot-deep", "scaled"))
    synthetic = {c.experiment.problem for c in found if c.method.name == "nafi 2x synthetic"}
    assert "CIFAR-10, VGG" in synthetic
    assert not synthetic & {"CIFAR-10, ConvNet", "MNIST, 3 hidden layers"}


def test_every_experiment_of_the_paper_can_be_read() -> None:
    mnist = ["layers", "nets", "poison", "sensitivity", "size", "width"]
    cifar10 = ["cifar10", "cifar10-sensitivity"]
    rest = [
        "nuclei",
        "oneshot-deep",
        "oneshot-epochs",
        "shakespeare",
        "shakespeare-rounds",
        "vit-cifar10",
    ]
    names = ["carvana", *cifar10, "digits-attacks", *(f"mnist-{name}" for name in mnist), *rest]
    assert experiment_names() == names
    trials = {"carvana": 2, "cifar10": 3, "cifar10-sensitivity": 1, "nuclei": 2, "oneshot-deep": 3}
    trials |= {"digits-attacks": 3, "oneshot-epochs": 3, "shakespeare": 3}
    trials |= {"shakespeare-rounds": 3, "vit-cifar10": 3}
    for name in experiment_names():
        whole, quick = load_experiment(name), load_experiment(name, "quick")
        assert whole.trials == trials.get(name, 5)
        assert quick.samples is not None
        for method in whole.methods:
            assert len(method.candidates()) <= whole.budget
    rows = load_experiment("mnist-nets")
    assert rows.clients == [15, 20, 25, 30]
    assert rows.training.model_dump() == {
        "epochs": 10,
        "batch": 32,
        "optimiser": "adam",
        "rate": 0.01,
        "momentum": 0.0,
        "decay": 1e-6,
    }


@pytest.mark.slow
@pytest.mark.usefixtures("real_data")
@pytest.mark.parametrize(
    "name",
    [
        "mnist-layers",
        "mnist-poison",
        "mnist-size",
        "cifar10",
        "carvana",
        "nuclei",
        "oneshot-deep",
        "oneshot-epochs",
        "shakespeare",
        "shakespeare-rounds",
        "vit-cifar10",
    ],
)
def test_quick_profiles_run(name: str, tmp_path: Path) -> None:
    experiment = load_experiment(name, "quick")
    records = run_experiment(experiment, tmp_path / "q.jsonl", jobs=1, resume=False, progress=quiet)
    assert len(records) == len(cells(experiment))
    for record in records:
        best = max(record["candidates"], key=lambda entry: entry["validation"])
        assert (record["chosen"], record["test"]) == (best["options"], best["test"])
        assert all(0 <= entry["test"] <= 100 for entry in record["candidates"])


@pytest.mark.usefixtures("real_data")
def test_profiles_of_cifar10_are_those_of_the_protocol() -> None:
    scaled, paper = (load_experiment("cifar10", profile) for profile in ("scaled", "paper"))
    for experiment in (scaled, paper):
        assert (experiment.rounds, experiment.clients) == (5, [5, 10, 15, 20])
        assert experiment.widths == [6, 16, 120, 84]
        assert experiment.training.optimiser == "sgd"
    assert (scaled.samples, scaled.training.epochs, scaled.trials) == (10000, 3, 3)
    assert (paper.samples, paper.training.epochs, paper.trials) == (50000, 10, 5)
    assert (scaled.label, paper.label) == ("cifar10-scaled", "cifar10-paper")


def test_layer_by_layer_the_nuclei_have_a_round_for_each_group() -> None:
    """Fewer would leave groups that nobody trains after they were matched."""
    experiment = load_experiment("nuclei")
    groups = len(experiment.widths or [])
    passes = [m for m in experiment.methods if m.method == "layerwise"]
    assert [m.name for m in passes] == ["fedma", "nafi-layerwise"]
    assert {m.options["rounds"] for m in passes} == {groups + 1} == {19}


@pytest.mark.slow
@pytest.mark.usefixtures("real_data")
def test_every_lab_of_the_nuclei_is_scored(tmp_path: Path) -> None:
    experiment = load_experiment("nuclei", "quick", test_samples=None).only(["local", "fedavg"])
    records = run_experiment(experiment, tmp_path / "n.jsonl", jobs=1, resume=False, progress=quiet)
    trial = load_trial(cells(experiment)[0].trial_settings)
    assert len(trial.data) == 7
    counts = {lab: len(samples) for lab, samples in trial.test_by_site.items()}
    assert sum(counts.values()) == len(trial.test)
    for record in records:
        assert set(record["sites"]) == set(counts)
        mean = sum(record["sites"][lab] * n for lab, n in counts.items()) / len(trial.test)
        assert record["test"] == pytest.approx(mean, abs=2e-3)


ROUNDS: dict[str, Any] = {
    "name": "rounds",
    "title": "Rounds",
    "rounds": 3,
    "trials": 1,
    "clients": [3],
    "samples": 240,
    "test_samples": 200,
    "widths": [3, 4, 8, 6],
    "training": {"epochs": 1, "batch": 16, "rate": 0.02, "momentum": 0.9},
    "methods": [
        {"name": "wide", "method": "fedavg", "widths_of": "nafi"},
        {"name": "fedavg", "method": "fedavg"},
        {"name": "nafi", "method": "layerwise", "grid": {"penalty": [0.0, 0.4]}},
    ],
}


@pytest.mark.slow
@pytest.mark.usefixtures("real_data")
def test_an_experiment_in_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round is recorded; the choice is by validation; the control has the other's widths."""
    monkeypatch.setenv("NAFI_CACHE", str(tmp_path / "clients"))
    experiment = Experiment(**ROUNDS)
    file = tmp_path / "rounds.jsonl"
    records = run_experiment(experiment, file, jobs=1, resume=False, progress=quiet)
    by_name = {record["method"]: record for record in records}
    assert list(by_name) == ["wide", "fedavg", "nafi"]
    for record in records:
        assert [entry["round"] for entry in record["rounds"]] == [1, 2, 3]
        last = record["rounds"][-1]
        assert (record["test"], record["validation"]) == (last["test"], last["validation"])
        best = max(record["candidates"], key=lambda entry: entry["validation"])
        assert record["chosen"] == best["options"]
    assert by_name["wide"]["widths"] == by_name["nafi"]["widths"]
    assert by_name["fedavg"]["widths"] == [3, 4, 8, 6]
    again = run_experiment(experiment, tmp_path / "2.jsonl", jobs=1, resume=False, progress=quiet)
    assert [r["test"] for r in again] == [r["test"] for r in records]
    left = [f.name for f in (tmp_path / "clients" / "runs").iterdir()]
    assert left
    assert all(name.startswith("first-") for name in left)  # no checkpoint of a finished run


def test_other_candidates_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "small.jsonl"
    methods = [{"name": "nafi", "method": "nafi", "grid": {"penalty": [0.1, 0.2]}}]
    settings = {**SMALL, "trials": 1, "methods": methods}
    run_experiment(Experiment(**settings), file, jobs=1, resume=False, progress=quiet)
    methods[0]["grid"] = {"penalty": [0.1, 0.4]}
    with pytest.raises(InputError, match="line 1: nafi had other candidates"):
        run_experiment(Experiment(**settings), file, jobs=1, resume=True, progress=quiet)


@pytest.mark.usefixtures("real_data")
def test_some_methods_and_numbers_of_clients_can_be_chosen(tmp_path: Path) -> None:
    experiment = load_experiment("cifar10", "paper", clients=["5", "20"])
    assert experiment.clients == [5, 20]
    two = experiment.only(["fedavg", "local"])
    assert [method.name for method in two.methods] == ["local", "fedavg"]
    assert two.agrees(experiment.settings())
    with pytest.raises(InputError, match="there is no 'fedsgd'; known: local, ensemble, fedavg"):
        experiment.only(["fedsgd"])
    wide = Experiment(**ROUNDS).only(["wide"])
    with pytest.raises(InputError, match="wide needs the widths of nafi: run that one, too"):
        run_experiment(wide, tmp_path / "w.jsonl", jobs=1, resume=False, progress=quiet)


@pytest.mark.slow
@pytest.mark.usefixtures("real_data")
def test_a_run_in_rounds_goes_on_from_its_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAFI_CACHE", str(tmp_path / "clients"))
    experiment = Experiment(**{**ROUNDS, "methods": ROUNDS["methods"][1:2]})
    whole = run_experiment(experiment, tmp_path / "w.jsonl", jobs=1, resume=False, progress=quiet)
    told: list[str] = []

    def stop(step: str, done: int, total: int) -> None:
        told.append(step)
        if "round 3" in step:
            raise KeyboardInterrupt

    file = tmp_path / "r.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment, file, jobs=1, resume=False, progress=stop)
    assert any("fedavg, 3 clients, trial 0: round 1 of 3, client 2, loss" in step for step in told)
    told.clear()
    resumed = run_experiment(
        experiment, file, jobs=1, resume=True, progress=lambda step, *_: told.append(step)
    )
    assert not any("round 1" in step or "round 2" in step for step in told)
    assert resumed[0]["test"] == whole[0]["test"]
    assert [e["test"] for e in resumed[0]["rounds"]] == [e["test"] for e in whole[0]["rounds"]]


METHOD = 'name = "a"\ntitle = "b"\nclients = [2]\n[[methods]]\nname = "n"\n'
IN_ROUNDS = "rounds = 2\n" + METHOD


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name = 3", "my.toml: name"),
        ('name = "a"\ntitle = "b"\nclients = [2]\nmethods = []', "methods"),
        ('name = "a"\nodd = 1', "odd|title"),
        ("name = ", "is not TOML"),
        (
            'name = "a"\ntitle = "b"\nclients = [2]\nbudget = 1\n'
            '[[methods]]\nname = "n"\nmethod = "nafi"\ngrid = { penalty = [0.1, 0.2] }',
            "2 candidates, more than the budget of 1",
        ),
        (
            METHOD + 'method = "fedmax"',
            r"method n: found 'fedmax', expected one of local, best, nafi",
        ),
        (METHOD + 'method = "layerwise"', "method n: found 'layerwise'"),
        ("rounds = 2\n" + METHOD + 'method = "pfnm"', "method n: found 'pfnm'.* in rounds"),
        (METHOD + 'method = "ot"\ngrid = { penalty = [1] }', "n: ot has no option 'penalty'"),
        (METHOD + 'method = "nafi"\noptions = { penalty = -1 }', "method n: penalty: found -1"),
        (METHOD + 'method = "local"\noptions = { rate = "x" }', "method n: rate: found 'x'"),
        (METHOD + 'method = "nafi"\noptions = { penalty = [0.1, 0.2] }', "n: penalty: a list"),
        (METHOD + 'method = "nafi"\noptions = { calibrate = 2.5 }', "n: calibrate: found 2.5"),
        (METHOD + 'method = "nafi"\noptions = { probe = -1 }', "n: probe: found -1"),
        (METHOD + 'method = "nafi"\noptions = { head = 1 }', "n: head: found 1"),
        (METHOD + 'method = "fedavg"\noptions = { probe = 9 }', "n: probe: method fedavg does not"),
        (METHOD + 'method = "stack"\noptions = { probe = "own" }', "n: method: found 'stack', exp"),
        (METHOD + 'method = "ensemble"\noptions = { probe = 9 }', "n: probe: method ensemble does"),
        (
            IN_ROUNDS + 'method = "fedavg"\noptions = { probe = 9 }',
            "n: fedavg has no option 'probe'",
        ),
        (IN_ROUNDS + 'method = "fedavg"\noptions = { calibrate = -1 }', "n: calibrate: found -1"),
        (IN_ROUNDS + 'method = "fedavg"\noptions = { rounds = "3" }', "n: rounds: found '3'"),
        (IN_ROUNDS + 'method = "fedavg"\noptions = { trim = 0.7 }', "n: trim: found 0.7"),
        (IN_ROUNDS + 'method = "fedprox"\noptions = { proximal = -1 }', "n: proximal: found -1"),
        (IN_ROUNDS + 'method = "fedadam"\noptions = { beta1 = 1.0 }', "n: beta1: found 1.0"),
        (
            IN_ROUNDS + 'method = "layerwise"\noptions = { divergence = "kll" }',
            "n: divergence: found",
        ),
        (IN_ROUNDS + 'method = "layerwise"\noptions = { freeze = 1 }', "n: freeze: found 1"),
        (
            IN_ROUNDS + 'method = "layerwise"\noptions = { penalty = [0.1, 0.2] }',
            "n: penalty: a list",
        ),
        (IN_ROUNDS + 'method = "layerwise"\noptions = { method = "ot" }', "n: method: found 'ot'"),
        (
            IN_ROUNDS + 'method = "match-refit"\noptions = { refit = false }',
            "n: refit: found False",
        ),
        (
            METHOD + 'method = "nafi"\noptions = { probe = "own", match_by = "weights" }',
            "n: match_by: found 'weights', which is about a probe",
        ),
        ("hidden = []\n" + METHOD + 'method = "nafi"', "my.toml: hidden: "),
        ("hidden = [-1]\n" + METHOD + 'method = "nafi"', "my.toml: hidden.0: "),
        (METHOD.replace("[2]", "[2, 0]") + 'method = "nafi"', "my.toml: clients.1: "),
        (METHOD.replace("[2]", "[-2]") + 'method = "nafi"', "my.toml: clients.0: "),
        ("widths = [5, -5]\n" + METHOD + 'method = "nafi"', "my.toml: widths.1: "),
        (
            METHOD + 'method = "nafi"\n[report]\nviews = ["score"]\ntitles = { widths = "W" }',
            "report: titles: 'widths' is none of the views score",
        ),
        (
            METHOD + 'method = "nafi"\n[report]\nleads = [["n", "pfmn"]]',
            "report: leads: there is no method 'pfmn'",
        ),
        (
            METHOD + 'method = "nafi"\n[report]\nleads = [["n"]]',
            "report.leads.0.1: field required",
        ),
        (METHOD + 'method = "nafi"\nwidths_of = "n"', "is no method with widths of its own"),
        ('without = ["x"]\n' + METHOD + 'method = "nafi"', "without: there is no method 'x'"),
        ("widths = [5]\nhidden = [2]\n" + METHOD + 'method = "nafi"', "hidden: the network"),
        ("profile = 3\n" + METHOD + 'method = "nafi"', r"expected tables \[profile.NAME\]"),
        (
            METHOD + 'method = "nafi"\n[report.paper]\nmethods = ["nafi"]\n'
            "rows = [{ clients = 5, figures = [] }]",
            "report.paper: every row needs a mean and a spread for each method",
        ),
    ],
)
def test_bad_configurations_are_named(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "my.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=told):
        load_experiment(str(file))


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="there is no experiment 'mnist'; known: carvana, cifar10, cifar10-sens"
    ):
        load_experiment("mnist")
    with pytest.raises(InputError, match="no profile 'fast'; it has quick"):
        load_experiment("mnist-nets", "fast")
    with pytest.raises(InputError, match="cannot read"):
        load_experiment(str(tmp_path / "no.toml"))
    with pytest.raises(InputError, match=r"holds no \.jsonl files"):
        read_runs(tmp_path)
    (tmp_path / "odd.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(InputError, match="does not hold run records"):
        read_runs(tmp_path)
    (tmp_path / "odd.jsonl").write_text('nonsense\n{"experiment": "a"}\n')
    with pytest.raises(InputError, match="line 1 is not a record"):
        read_runs(tmp_path)


def test_a_run_and_its_report_from_the_command_line(tmp_path: Path) -> None:
    """The report shows the views that the user's file names."""
    report = '[report]\nviews = ["score"]\ntitles = { score = "By hand" }\n'
    (tmp_path / "my.toml").write_text(MINE + report)
    out, page, text = (tmp_path / name for name in ("r.jsonl", "p.html", "p.md"))
    text.write_text("<!-- generated: begin -->\n<!-- generated: end -->\n")
    arguments = ["run", str(tmp_path / "my.toml"), "--trials", "2", "--out", str(out), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert json.loads(done.stdout) == {"records": 2, "file": str(out)}
    done = CliRunner().invoke(
        app, ["report", str(out), "--out", str(page), "--markdown", str(text)]
    )
    assert done.exit_code == 0, done.output
    assert "<h3>By hand</h3>" in page.read_text()
    assert text.read_text().count("| --- |") == 1
    (tmp_path / "my.toml").write_text(MINE + '[report]\nviews = ["scores"]\n')
    refused = CliRunner().invoke(app, arguments)
    assert isinstance(refused.exception, InputError)
    assert "there is no view 'scores'" in str(refused.exception)


def test_reports_of_experiments_that_come_with_nafi_are_not_in_their_records() -> None:
    tried = [{"options": {}, "validation": 1.0, "test": 2.0, "widths": [], "seconds": 0.0}]
    packaged = cells(load_experiment("mnist-poison", "quick"))[0]
    assert "report" not in make_record(packaged, tried, 1.0)
    changed = packaged.experiment.report.model_copy(update={"views": ["widths"]})
    experiment = packaged.experiment.model_copy(update={"report": changed})
    record = make_record(replace(packaged, experiment=experiment), tried, 1.0)
    assert report_of(record)["views"] == ["widths"]


def test_a_file_that_is_edited_while_it_runs_does_not_stop_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The records then carry the [report] table that they were run with."""
    tried = [{"options": {}, "validation": 1.0, "test": 2.0, "widths": [], "seconds": 0.0}]
    cell = cells(load_experiment("mnist-poison", "quick"))[0]
    (tmp_path / "mnist-poison.toml").write_text("half a li")
    monkeypatch.setattr("nafi.experiments.files.PAPER", tmp_path)
    record = make_record(cell, tried, 1.0)
    assert report_of(record)["views"] == cell.experiment.report.views


def test_a_file_has_one_run_at_a_time(tmp_path: Path) -> None:
    """The second is refused and changes nothing; once the first has ended, it may."""
    experiment, file = Experiment(**SMALL).only(["local"]), tmp_path / "new" / "r.jsonl"
    refused: list[str] = []

    def second(*_: object) -> None:
        if not refused:
            with pytest.raises(InputError, match=r"r\.jsonl is in use by another run") as error:
                run_experiment(experiment, file, jobs=1, resume=True, progress=quiet)
            refused.append(str(error.value))

    records = run_experiment(experiment, file, jobs=1, resume=False, progress=second)
    assert refused
    assert read_records(file) == records
    assert [each.name for each in file.parent.iterdir()] == ["r.jsonl"]
    assert run_experiment(experiment, file, jobs=1, resume=True, progress=quiet) == records


def test_a_cell_counts_once(tmp_path: Path) -> None:
    """Also if it is in a file twice, or in two files of a folder; other settings are others."""
    cell = {"experiment": "small", "trial": 0, "clients": 3, "hidden": 1, "method": "local"}
    records = [cell, {**cell, "trial": 1}, {**cell, "config": {"seed": 1}}]
    text = "".join(json.dumps(record) + "\n" for record in [*records, cell])
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(text)
        assert read_runs(tmp_path) == {"small": records}


@pytest.mark.parametrize("name", ["../up", "/tmp/x", "a/b", "..", "", "x" * 101, "a\n", "~"])
def test_a_name_is_no_path(name: str) -> None:
    with pytest.raises(ValueError, match=r"name\n.*expected at most 100 letters"):
        Experiment(**{**SMALL, "name": name})
    with pytest.raises(ValueError, match=r"profile\n.*expected at most 100 letters"):
        Experiment(**SMALL, profile=name)
