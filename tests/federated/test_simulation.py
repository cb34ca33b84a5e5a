"""The runner in this process: checkpoints, resuming, workers, records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nafi.errors import CheckpointError, InputError, NafiError
from nafi.federated import (
    Acceptance,
    QuorumError,
    State,
    Strategy,
    Task,
    Trainer,
    Training,
    Update,
    make_strategy,
    simulate,
)
from nafi.federated.averaging import FusionRounds
from nafi.federated.messages import read_state
from tests.federated.networks import CLASSES, normed, population, small

ROUNDS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "match-then-average": {"penalty": 0.0, "evidence": 500.0},
    "layerwise": {"penalty": 0.0, "evidence": 500.0},
}


def made(name: str) -> Strategy:
    training = Training(epochs=2, batch=8, rate=0.05, momentum=0.9)
    return make_strategy(name, small(), training, rounds=ROUNDS, seed=1, **OPTIONS[name])


def work(strategy: Strategy) -> Trainer:
    return Trainer(strategy.architecture, population(), CLASSES)


class StopError(Exception):
    pass


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("stopped", range(1, ROUNDS))
def test_a_run_stopped_between_rounds_ends_with_the_same_bytes(
    name: str, stopped: int, tmp_path: Path
) -> None:
    clients = list(population())
    whole, halves = tmp_path / "whole.safetensors", tmp_path / "halves.safetensors"
    strategy = made(name)
    run = simulate(strategy, clients, work(strategy), checkpoint=whole)

    def stop(told: str, done: int, total: int) -> None:
        if told.startswith(f"round {stopped + 1} of {ROUNDS}, client 1"):
            raise StopError

    with pytest.raises(StopError):
        simulate(strategy, clients, work(strategy), checkpoint=halves, progress=stop)
    again = simulate(made(name), clients, work(strategy), checkpoint=halves, resume=True)
    found, expected = load_file(halves), load_file(whole)
    assert set(found) == set(expected)
    for key in found:
        assert torch.equal(found[key], expected[key]), key
    assert [r["round"] for r in again.records] == list(range(1, ROUNDS + 1))
    assert [r["bytes_up"] for r in again.records] == [r["bytes_up"] for r in run.records]


SCRIPT = """
import sys, time
from pathlib import Path
from nafi.federated import simulate
from nafi.federated.averaging import FusionRounds
from nafi.federated.messages import read_state
from tests.federated.networks import population
from tests.federated.test_simulation import made, work

def slowly(told, done, total):
    time.sleep(0.05)

strategy = made(sys.argv[1])
simulate(strategy, list(population()), work(strategy), checkpoint=Path(sys.argv[2]), resume=True,
         progress=slowly)
"""


@pytest.mark.parametrize("name", ["layerwise"])
def test_a_killed_process_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    whole, file = tmp_path / "whole.safetensors", tmp_path / "killed.safetensors"
    strategy = made(name)
    simulate(strategy, list(population()), work(strategy), checkpoint=whole)
    command = [sys.executable, "-c", SCRIPT, name, str(file)]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
    found, expected = load_file(file), load_file(whole)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".safetensors"] == []


@pytest.mark.parametrize("name", ["fedavg", "layerwise"])
def test_two_workers_do_what_one_does(name: str) -> None:
    clients = list(population())
    runs = [simulate(made(name), clients, work(made(name)), workers=w) for w in (1, 2)]
    one, two = (run.state.tensors for run in runs)
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_records_tell_of_every_round() -> None:
    strategy = made("match-then-average")
    steps: list[tuple[str, int, int]] = []
    seen: list[nn.Module] = []

    def evaluate(model: nn.Module) -> dict[str, Any]:
        seen.append(model)
        return {"score": np.float32(len(seen))}

    run = simulate(
        strategy,
        list(population()),
        work(strategy),
        evaluate=evaluate,
        progress=lambda *step: steps.append(step),
    )
    assert [record["score"] for record in run.records] == [1.0, 2.0, 3.0, 4.0]
    assert run.records[-1]["loss"] < run.records[1]["loss"]
    assert all(record["seconds"] > 0 for record in run.records)
    assert steps[0] == ("round 1 of 4", 0, 12)
    assert steps[-2][0].startswith("round 4 of 4, client 2, loss 0.")
    assert steps[-1] == ("round 4 of 4, score 4", 12, 12)


def test_the_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    strategy = made("fedavg")
    clients = list(population())
    simulate(strategy, clients, work(strategy), checkpoint=file)
    other = make_strategy("fedavg", small(), strategy.training, rounds=ROUNDS, seed=2)
    with pytest.raises(InputError, match=r"of another run: seed was 1, now it is 2"):
        simulate(other, clients, work(other), checkpoint=file, resume=True)
    wider = make_strategy("fedavg", normed(), strategy.training, rounds=ROUNDS, seed=1)
    with pytest.raises(InputError, match="of another run: network was 6 tensors"):
        simulate(wider, clients, work(wider), checkpoint=file, resume=True)
    longer = make_strategy("fedavg", small(), strategy.training, rounds=ROUNDS + 2, seed=1)
    run = simulate(longer, clients, work(longer), checkpoint=file, resume=True)
    assert len(run.records) == ROUNDS + 2  # more rounds of the same run are welcome


class Broken:
    """Fails for one client, always or in one round."""

    def __init__(self, trainer: Trainer, client: str, what: str, when: int | None = None) -> None:
        self.trainer, self.client, self.what, self.when = trainer, client, what, when

    def __call__(self, client: str, task: Task) -> tuple[Update, float]:
        update, loss = self.trainer(client, task)
        if client != self.client or self.when not in (None, task.round):
            return update, loss
        if self.what == "crash":
            raise RuntimeError("out of memory")
        if self.what == "old":
            return replace(update, round=task.round - 1), loss
        name = next(iter(update.tensors))
        broken = {**update.tensors, name: update.tensors[name] * float("nan")}
        return replace(update, tensors=broken), loss


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("crash", "RuntimeError: out of memory"),
        ("nan", "UpdateError: one.weight holds values that are NaN"),
        ("old", "UpdateError: it is for round"),
    ],
)
@pytest.mark.parametrize(
    ("name", "workers"),
    [("fedavg", 1), ("match-then-average", 1), ("layerwise", 1), ("layerwise", 2)],
)
def test_a_round_goes_on_without_a_bad_update(
    name: str, what: str, why: str, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = made(name)
    broken = Broken(work(strategy), "1", what, when=1)
    rules = Acceptance(quorum=2, classes=CLASSES)
    run = simulate(strategy, list(population()), broken, acceptance=rules, workers=workers)
    assert [list(record["refused"]) for record in run.records] == [[], ["1"], [], []]
    frozen = name == "layerwise" and what == "nan"  # then the first tensor is another one
    expected = why.replace("one.weight", "two.weight") if frozen else why
    assert run.records[1]["refused"]["1"].startswith(expected)
    assert "client 1 refused" in caplog.text
    assert all(torch.isfinite(t).all() for t in run.state.tensors.values())


class Dying:
    """A trainer whose process is killed while it works for one client."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def __call__(self, client: str, task: Task) -> tuple[Update, float]:
        if client == "1" and task.round == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.trainer(client, task)


def test_a_killed_worker_is_replaced() -> None:
    strategy = made("fedavg")
    run = simulate(
        strategy,
        list(population()),
        Dying(work(strategy)),
        workers=2,
        acceptance=Acceptance(quorum=1),
    )
    assert "1" in run.records[1]["refused"] or len(run.records[1]["refused"]) == 3
    assert [len(record["refused"]) for record in run.records[2:]] == [0, 0]


def test_below_the_quorum_a_run_stops_and_can_be_resumed(tmp_path: Path) -> None:
    strategy = made("layerwise")
    clients, file = list(population()), tmp_path / "run.safetensors"
    whole = simulate(strategy, clients, work(strategy))
    broken = Broken(work(strategy), "1", "crash", when=2)
    with pytest.raises(QuorumError, match=r"round 3 of 4: 2 of 3 clients delivered, 3 are needed"):
        simulate(strategy, clients, broken, checkpoint=file)
    again = simulate(strategy, clients, work(strategy), checkpoint=file, resume=True)
    for key, tensor in whole.state.tensors.items():
        assert torch.equal(tensor, again.state.tensors[key])


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b'\x08\0\0\0\0\0\0\0{"a":1}}'])
def test_a_broken_checkpoint_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    file.write_bytes(content)
    strategy = made("fedavg")
    with pytest.raises(CheckpointError, match=r"run\.safetensors.*start again"):
        simulate(strategy, ["0"], work(strategy), checkpoint=file, resume=True)


def test_a_model_that_is_no_longer_finite_is_not_kept(tmp_path: Path) -> None:
    class Overflowing(FusionRounds):
        def aggregate(self, state: State, updates: Iterable[Update]) -> State:
            after = super().aggregate(state, updates)
            if after.round < 3:
                return after
            tensors = {**after.tensors, "one.weight": after.tensors["one.weight"] * torch.inf}
            return replace(after, tensors=tensors)

    fedavg = made("fedavg")
    strategy = Overflowing(**{f.name: getattr(fedavg, f.name) for f in fields(fedavg)})
    file = tmp_path / "run.safetensors"
    with pytest.raises(NafiError, match=r"round 3 of 4: one\.weight became NaN or infinite"):
        simulate(strategy, list(population()), work(strategy), checkpoint=file)
    assert read_state(file)[0].round == 2
