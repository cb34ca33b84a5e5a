"""The runner in this process: checkpoints, resuming, workers, records."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nafi.errors import CheckpointError, InputError, NafiError
from nafi.federated import (
    Acceptance,
    Architecture,
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
from nafi.federated.acceptance import MOST
from nafi.federated.averaging import FedAvg
from nafi.federated.checkpoint import read_state
from nafi.federated.messages import task_from
from tests.federated.networks import CLASSES, FEATURES, normed, pictures, population, small
from tests.processes import runs, stop_the_clock

ROUNDS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "match-then-average": {"penalty": 0.0, "evidence": 500.0},
    "layerwise": {"penalty": 0.0, "evidence": 500.0},
    "fedavg head": {"head": "statistics", "head_start": "frozen"},
    "layerwise moments": {"penalty": 0.0, "evidence": 500.0, "moments": True},
    "match-refit": {"penalty": 0.0, "evidence": 500.0, "head": "statistics"},
}


def made(name: str) -> Strategy:
    training = Training(epochs=2, batch=8, rate=0.05, momentum=0.9)
    kind = name.split()[0]
    return make_strategy(kind, small(), training, rounds=ROUNDS, seed=1, **OPTIONS[name])


def work(strategy: Strategy) -> Trainer:
    return Trainer(strategy.architecture, population(), CLASSES)


class StopError(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stopped"),
    [(name, stopped) for name in list(OPTIONS)[:3] for stopped in range(1, ROUNDS)]
    + [(name, 2) for name in list(OPTIONS)[3:]],
)
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
import sys
from pathlib import Path
from nafi.federated import simulate
from tests.federated.networks import population
from tests.federated.test_simulation import made, work

strategy = made(sys.argv[1])
simulate(strategy, list(population()), work(strategy), checkpoint=Path(sys.argv[2]), resume=True,
         progress=globals().get("progress", lambda told, done, total: None))
"""

KILLED = """
import os, signal

def progress(told, done, total):
    if told.startswith("round 3 of 4, client 1"):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layerwise"])
def test_a_killed_process_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    whole, file = tmp_path / "whole.safetensors", tmp_path / "killed.safetensors"
    strategy = made(name)
    simulate(strategy, list(population()), work(strategy), checkpoint=whole)
    command = [sys.executable, "-c", SCRIPT, name, str(file)]
    killed = [*command[:2], KILLED + SCRIPT, *command[3:]]
    assert subprocess.run(killed, timeout=300, check=False).returncode == -signal.SIGKILL
    assert read_state(file, strategy.state_type)[0].round == 2
    assert subprocess.run(command, timeout=300, check=False).returncode == 0
    found, expected = load_file(file), load_file(whole)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


HALF = """
import os, signal
import nafi.federated.checkpoint as messages

whole, count = messages.save_file, 0

def half(tensors, path, metadata):
    global count
    whole(tensors, path, metadata=metadata)
    count += 1
    if count == 2:
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

messages.save_file = half
"""


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_the_round_before(tmp_path: Path) -> None:
    whole, file = tmp_path / "whole.safetensors", tmp_path / "killed.safetensors"
    strategy = made("layerwise")
    simulate(strategy, list(population()), work(strategy), checkpoint=whole)
    command = [sys.executable, "-c", HALF + SCRIPT, "layerwise", str(file)]
    assert subprocess.run(command, timeout=120, check=False).returncode == -signal.SIGKILL
    assert read_state(file, strategy.state_type)[0].round == 1
    assert len(list(tmp_path.iterdir())) == 4  # and what was half written, and the lock
    simulate(strategy, list(population()), work(strategy), checkpoint=file, resume=True)
    found, expected = load_file(file), load_file(whole)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert {p.name for p in tmp_path.iterdir()} == {"whole.safetensors", "killed.safetensors"}
    assert file.stat().st_mode & 0o777 == 0o600  # it holds the weights of every client


@pytest.mark.slow
@pytest.mark.parametrize(("name", "what"), [("fedavg", "nothing"), ("layerwise", "exit")])
def test_two_workers_do_what_one_does(name: str, what: str) -> None:
    """Also where a client fails in one round."""
    rules = Acceptance(quorum=2, classes=CLASSES)
    broken = Broken(work(made(name)), "1", what, when=None if what == "nothing" else 1)
    runs = [
        simulate(made(name), list(population()), broken, acceptance=rules, workers=workers)
        for workers in (1, 2)
    ]
    one, two = (run.state.tensors for run in runs)
    assert all(torch.equal(one[key], two[key]) for key in one)
    refused = [[list(record["refused"]) for record in run.records] for run in runs]
    assert refused[0] == refused[1] == [[], ["1"] if what == "exit" else [], [], []]


def test_records_tell_of_every_round() -> None:
    strategy = made("match-then-average")
    steps: list[tuple[str, int, int]] = []
    seen: list[nn.Module] = []

    def evaluate(model: nn.Module) -> dict[str, Any]:
        seen.append(model)
        return {"score": np.float32(len(seen))}

    trainer = work(strategy)
    losses: list[float] = []

    def train(client: str, task: Task) -> tuple[Update, float]:
        update, loss = trainer(client, task)
        losses.append(loss)
        return update, loss

    run = simulate(
        strategy,
        list(population()),
        train,
        evaluate=evaluate,
        acceptance=Acceptance(classes=CLASSES),
        progress=lambda *step: steps.append(step),
    )
    assert [record["score"] for record in run.records] == [1.0, 2.0, 3.0, 4.0]
    for at, record in enumerate(run.records):
        assert record["loss"] == pytest.approx(fmean(losses[3 * at : 3 * at + 3]), abs=1e-5)
    assert all(record["seconds"] > 0 for record in run.records)
    assert steps[0] == ("round 1 of 4", 0, 12)
    assert steps[-2][0] == f"round 4 of 4, client 2, loss {losses[-1]:.3f}"
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
    with pytest.raises(InputError, match="exists already: resume it"):
        simulate(longer, clients, work(longer), checkpoint=file)
    run = simulate(longer, clients, work(longer), checkpoint=str(file), resume=True)
    assert len(run.records) == ROUNDS + 2  # more rounds of the same run are welcome
    with pytest.raises(InputError, match="holds 6 rounds, more than the 4 asked for"):
        simulate(strategy, clients, work(strategy), checkpoint=file, resume=True)


class Broken:
    """Fails for one client, always or in one round; or does nothing of the kind."""

    def __init__(self, trainer: Trainer, client: str, what: str, when: int | None = None) -> None:
        self.trainer, self.client, self.what, self.when = trainer, client, what, when

    def __call__(self, client: str, task: Task) -> tuple[Update, float]:
        update, loss = self.trainer(client, task)
        if client != self.client or self.when not in (None, task.round) or self.what == "nothing":
            return update, loss
        if self.what == "crash":
            raise RuntimeError("out of memory")
        if self.what == "exit":
            raise SystemExit(3)
        if self.what == "old":
            return replace(update, round=task.round - 1), loss
        if not update.tensors:  # it was asked for sums alone
            return update, loss
        name = next(iter(update.tensors))
        broken = {**update.tensors, name: update.tensors[name] * float("nan")}
        return replace(update, tensors=broken), loss


WRONG = {
    "crash": "RuntimeError: out of memory",
    "exit": "WorkError: SystemExit: 3",
    "nan": "UpdateError: one.weight holds values that are NaN",
    "old": "UpdateError: it is for round",
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("what", WRONG)
def test_a_round_goes_on_without_a_bad_update(
    name: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = made(name)
    broken = Broken(work(strategy), "1", what, when=1)
    rules = Acceptance(quorum=2, classes=CLASSES)
    run = simulate(strategy, list(population()), broken, acceptance=rules)
    assert [list(record["refused"]) for record in run.records] == [[], ["1"], [], []]
    frozen = name.startswith("layerwise") and what == "nan"  # then the first tensor is another one
    expected = WRONG[what].replace("one.weight", "two.weight") if frozen else WRONG[what]
    assert run.records[1]["refused"]["1"].startswith(expected)
    assert "client 1 refused" in caplog.text
    assert all(torch.isfinite(t).all() for t in run.state.tensors.values())


class Dying:
    """Sends back what it gets; its process is killed for one client, and hangs for another."""

    classes = CLASSES

    def __call__(self, client: str, task: Task) -> tuple[Update, float]:
        if client == "1" and task.round == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if client == "2" and task.round == 2:
            time.sleep(600)
        return Update(client, task.round, task.tensors, 3, (1, 1, 1)), 0.0


@pytest.mark.slow
def test_a_worker_that_dies_or_hangs_is_replaced_and_costs_one_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop_the_clock(monkeypatch, hangs=lambda item: item[0] == "2" and task_from(item[1]).round == 2)
    strategy = made("fedavg")
    run = simulate(
        strategy,
        list(population()),
        Dying(),
        workers=2,
        deadline=0.5,
        acceptance=Acceptance(quorum=1, classes=CLASSES),
    )
    assert [record["refused"] for record in run.records] == [
        {},
        {"1": "WorkerDiedError: its process died twice (exit code -9)"},
        {"2": "TimeoutError: not done within 0.5 seconds"},
        {},
    ]


def test_a_deadline_that_cannot_be_kept_is_refused() -> None:
    strategy = made("fedavg")
    with pytest.raises(InputError, match="in this process cannot be stopped; give workers=2"):
        simulate(strategy, list(population()), work(strategy), deadline=5.0)
    with pytest.raises(InputError, match="deadline: found 0, expected a number above 0"):
        simulate(strategy, list(population()), work(strategy), workers=2, deadline=0)


class Stuck:
    """Says which process it is in, then holds Python's lock for ages, as code in C may."""

    def __init__(self, trainer: Trainer, folder: Path, since: int = 0) -> None:
        self.trainer, self.folder, self.since = trainer, folder, since
        self.classes = CLASSES

    def __call__(self, client: str, task: Task) -> tuple[Update, float]:
        if task.round < self.since:
            return self.trainer(client, task)
        (self.folder / str(os.getpid())).touch()
        re.match("(a+)+$", "a" * 60 + "b")
        raise AssertionError


STUCK = """
import signal, sys
from pathlib import Path
from tests.federated.test_simulation import *

if __name__ == "__main__":
    # A shell lets what it starts in the background ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    strategy, folder, file = made("fedavg"), Path(sys.argv[1]), Path(sys.argv[2])
    stuck = Stuck(work(strategy), folder, since=1)
    simulate(strategy, ["0", "1"], stuck, workers=2, checkpoint=file)
"""


@pytest.mark.slow
def test_a_run_that_is_interrupted_leaves_no_worker_and_a_good_checkpoint(tmp_path: Path) -> None:
    """Whatever its workers are at, which would take ages; other signals: test_workers."""
    pids, file = tmp_path / "pids", tmp_path / "run.safetensors"
    pids.mkdir()
    command = [sys.executable, "-c", STUCK, str(pids), str(file)]
    main = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(workers := [int(file.name) for file in pids.iterdir()]) < 2:
        assert main.poll() is None, main.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    main.send_signal(signal.SIGINT)
    _, error = main.communicate(timeout=60)
    assert main.returncode == -signal.SIGINT, error
    while any(runs(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    strategy = made("fedavg")
    assert read_state(file, strategy.state_type)[0].round == 1
    again = simulate(strategy, ["0", "1"], work(strategy), checkpoint=file, resume=True)
    whole = simulate(strategy, ["0", "1"], work(strategy))
    for key, tensor in whole.state.tensors.items():
        assert torch.equal(tensor, again.state.tensors[key])


def test_below_the_quorum_a_run_stops_and_can_be_resumed(tmp_path: Path) -> None:
    strategy = made("layerwise")
    clients, file = list(population()), tmp_path / "run.safetensors"
    whole = simulate(strategy, clients, work(strategy))
    broken = Broken(work(strategy), "1", "crash", when=2)
    with pytest.raises(QuorumError, match=r"round 3 of 4: 2 of 3 clients delivered, 3 are needed"):
        simulate(strategy, clients, broken, checkpoint=file, acceptance=Acceptance(classes=CLASSES))
    again = simulate(strategy, clients, work(strategy), checkpoint=file, resume=True)
    for key, tensor in whole.state.tensors.items():
        assert torch.equal(tensor, again.state.tensors[key])


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b'\x08\0\0\0\0\0\0\0{"a":1}}'])
def test_a_broken_checkpoint_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    file.write_bytes(content)
    strategy = made("fedavg")
    with pytest.raises(CheckpointError, match=r"run\.safetensors.*start a new run"):
        simulate(strategy, ["0"], work(strategy), checkpoint=file, resume=True)


def test_a_model_that_is_no_longer_finite_is_not_kept(tmp_path: Path) -> None:
    class Overflowing(FedAvg):
        def aggregate(self, state: State, updates: Iterable[Update]) -> State:
            after = super().aggregate(state, updates)
            if after.round < 3:
                return after
            tensors = {**after.tensors, "one.weight": after.tensors["one.weight"] * torch.inf}
            return replace(after, tensors=tensors)

    fedavg = made("fedavg")
    strategy = Overflowing(**{f.name: getattr(fedavg, f.name) for f in fields(fedavg) if f.init})
    file = tmp_path / "run.safetensors"
    with pytest.raises(NafiError, match=r"round 3 of 4: one\.weight became NaN or infinite"):
        simulate(strategy, list(population()), work(strategy), checkpoint=file)
    assert read_state(file, strategy.state_type)[0].round == 2


class Indexed(nn.Module):
    """Reads its inputs in an order that it keeps as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(FEATURES))
        self.one = nn.Linear(FEATURES, 5)
        self.out = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = self.get_buffer("order")
        found: torch.Tensor = self.out(self.one(x[:, order]).relu())
        return found


@pytest.mark.parametrize("name", OPTIONS)
def test_what_cannot_be_averaged_is_not_taken_from_a_client(name: str) -> None:
    architecture = Architecture(Indexed, (torch.zeros(2, FEATURES),))
    training = Training(epochs=1, batch=8, rate=0.05)
    kind = name.split()[0]
    strategy = make_strategy(kind, architecture, training, rounds=ROUNDS, **OPTIONS[name])
    trainer = Trainer(architecture, population(), CLASSES)

    def spoilt(client: str, task: Task) -> tuple[Update, float]:
        update, loss = trainer(client, task)
        if client == "0" and "order" in update.tensors:
            tensors = {**update.tensors, "order": torch.full((FEATURES,), 10**6)}
            update = replace(update, tensors=tensors)
        return update, loss

    clients, rules = list(population()), Acceptance(classes=CLASSES)
    found = simulate(strategy, clients, spoilt, acceptance=rules)
    assert found.model.get_buffer("order").tolist() == list(range(FEATURES))
    expected = simulate(strategy, clients, trainer)
    for key, tensor in expected.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[key], tensor)


@pytest.mark.parametrize("name", list(OPTIONS)[:3])
def test_the_largest_weights_that_are_taken_do_not_end_a_round(name: str) -> None:
    """Folding multiplies a gain and a weight, and divides by the root of a variance."""
    training = Training(epochs=1, batch=8, rate=0.05)
    strategy = make_strategy(name, normed(), training, rounds=1, **OPTIONS[name])
    trainer = Trainer(strategy.architecture, {c: pictures(20, int(c)) for c in "012"}, CLASSES)

    def huge(client: str, task: Task) -> tuple[Update, float]:
        update, loss = trainer(client, task)
        if client == "0":
            largest = {
                n: torch.zeros_like(t) if n.endswith("running_var") else t.sign() * MOST
                for n, t in update.tensors.items()
                if t.is_floating_point()
            }
            update = replace(update, tensors={**update.tensors, **largest})
        return update, loss

    run = simulate(strategy, list("012"), huge, acceptance=Acceptance(classes=CLASSES))
    assert run.records[0]["refused"] == {}
    assert all(t.isfinite().all() for t in run.model.state_dict().values())


def test_class_counts_that_nobody_expects_are_refused() -> None:
    strategy = made("fedavg")
    trainer = work(strategy)
    with pytest.raises(QuorumError, match=r"class counts: found 3, expected none; .* classes"):
        simulate(strategy, ["0", "1"], lambda client, task: trainer(client, task))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("loss", "why"), [(None, "loss: found None, expected a number"), ("x", "loss: found 'x'")]
)
def test_a_loss_that_is_no_number_fails_the_client(loss: Any, why: str, workers: int) -> None:
    strategy = made("fedavg")
    odd = OddLoss(work(strategy), loss)
    rules = Acceptance(quorum=2, classes=CLASSES)
    run = simulate(strategy, list(population()), odd, workers=workers, acceptance=rules)
    for record in run.records:
        assert list(record["refused"]) == ["1"]
        assert why in record["refused"]["1"]


@dataclass
class OddLoss:
    """A trainer whose client 1 tells another loss."""

    trainer: Trainer
    loss: Any

    def __call__(self, client: str, task: Task) -> tuple[Update, float]:
        update, loss = self.trainer(client, task)
        return update, self.loss if client == "1" else loss


def test_slips_are_answered() -> None:
    architecture = small()
    with pytest.raises(NafiError, match=r"write \(x,\)"):
        Architecture(architecture.factory, architecture.example_inputs[0])
    strategy = make_strategy("fedavg", architecture, Training(epochs=0), rounds=1)
    data = population()
    work = Trainer(architecture, data, CLASSES)
    with pytest.raises(InputError, match=r"evaluate: returned 0.5, expected a dict of numbers"):
        simulate(strategy, list(data), work, evaluate=lambda model: 0.5)  # type: ignore[arg-type]
