"""A federation through two hundred rounds in which everything fails, and the same one undisturbed.

    python tools/soak.py    # or make soak: some minutes; exits with 1 if anything differs

One client in five fails in every round: it raises an error, sends NaN, or answers another round.
Every few rounds a worker process is killed while it trains, and five times in a run the server
itself, which is then started again with its checkpoint: all by SIGKILL. The run beside it has the
same clients that fail, but no killed process.

Hides: processes, and when they are killed. Promises: `Verdict.problems` is empty only if both runs
end with the same bytes and the same records (but for seconds), if no process outlived its server,
and if memory is flat: what the server holds late in a run is at most a tenth more than what it
held early. That is the resident memory of its process, and the bytes of all tensors alive in it,
which shows leaks that are small beside PyTorch itself.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nafi.federated import (
    Acceptance,
    Architecture,
    Run,
    Samples,
    Strategy,
    Task,
    Trainer,
    Training,
    Update,
    make_strategy,
    simulate,
)
from nafi.federated.callbacks import Callback

FEATURES, CLASSES, CLIENTS = 48, 6, 8
FAILING = 0.2
GROWTH = 1.1  # how much more memory a server may hold late in a run than early in it
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "layerwise": {"max_width": 1.5},
    "match-refit": {"max_width": 1.5, "head": "statistics"},
}


class Network(nn.Module):
    """Some 18,000 numbers: a server that kept those of every round would be seen to grow."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(FEATURES, 96)
        self.two = nn.Linear(96, 128)
        self.out = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.two(self.one(x).relu()).relu())
        return scores


def population() -> dict[str, Samples]:
    """Clients with 40 to 80 points around a centre for each class."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(99))
    data = {}
    for client in range(CLIENTS):
        drawn = torch.Generator().manual_seed(client)
        labels = torch.randint(CLASSES, (40 + 4 * client,), generator=drawn)
        points = centres[labels] + torch.randn(len(labels), FEATURES, generator=drawn)
        data[str(client)] = Samples(points, labels)
    return data


@dataclass
class Unreliable:
    """A trainer that fails for one client in five, always the same ones of a round."""

    trainer: Trainer
    seed: int

    @property
    def classes(self) -> int | None:
        return self.trainer.classes

    def __call__(self, client: str, task: Task) -> tuple[Update, float]:
        drawn = zlib.crc32(f"{self.seed} {client} {task.round} {sorted(task.asks)}".encode())
        if drawn % 1000 >= 1000 * FAILING:
            return self.trainer(client, task)
        if drawn % 3 == 0:
            raise RuntimeError("this client is out of order")
        update, loss = self.trainer(client, task)
        if drawn % 3 == 1:
            return replace(update, round=task.round + 1), loss
        spoilt = {name: tensor * float("nan") for name, tensor in update.tensors.items()}
        return replace(update, tensors=spoilt, samples=0), loss


@dataclass
class Watch(Callback):
    """Notes what the process holds after every tenth of its rounds."""

    rounds: int = 0
    memory: list[dict[str, float]] = field(default_factory=list)

    def round_finished(self, record: Mapping[str, Any]) -> None:
        self.rounds += 1
        if self.rounds % 10:
            return
        gc.collect()
        alive = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in gc.get_objects()
            if type(tensor) in (Tensor, nn.Parameter)  # others have no numbers
        }
        self.memory.append(
            {
                "round": record["round"],
                "resident": resident() / 1e6,
                "tensors": sum(alive.values()) / 1e6,
            }
        )


def resident() -> int:
    """The bytes of memory that this process has, on Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def strategy_of(name: str, rounds: int) -> Strategy:
    architecture = Architecture(Network, (torch.zeros(2, FEATURES),))
    training = Training(epochs=1, batch=16, rate=0.02, momentum=0.9)
    return make_strategy(name, architecture, training, rounds=rounds, seed=1, **OPTIONS[name])


def kill_a_worker() -> None:
    """End one of this process's workers, whatever it is at."""
    workers = sorted(multiprocessing.active_children(), key=lambda worker: worker.pid or 0)
    if not workers or workers[0].pid is None:
        raise RuntimeError("there is no worker to kill")
    os.kill(workers[0].pid, signal.SIGKILL)


def federation(
    name: str,
    rounds: int,
    *,
    workers: int = 1,
    kill_every: int = 0,
    checkpoint: Path | None = None,
    tell: bool = False,
    watch: Watch | None = None,
) -> Run:
    """A run with clients that fail.

    kill_every: in every such round, a worker is killed when the first client has delivered
    tell: print every step, for the process that decides when this one is killed
    """
    struck: set[int] = set()

    def progress(step: str, done: int, total: int) -> None:
        if tell:
            print(step, flush=True)
        number = int(step.split()[1])
        if kill_every and number % kill_every == 0 and "client" in step and number not in struck:
            struck.add(number)
            kill_a_worker()

    strategy = strategy_of(name, rounds)
    clients = population()
    trainer = Trainer(strategy.architecture, clients, CLASSES)
    return simulate(
        strategy,
        list(clients),
        Unreliable(trainer, seed=7),
        workers=workers,
        checkpoint=checkpoint,
        resume=True,
        acceptance=Acceptance(quorum=2, classes=CLASSES),
        progress=progress,
        callbacks=[] if watch is None else [watch],
    )


def digest(run: Run, file: Path) -> str:
    """Of the model's file, which holds its tensors and nothing else."""
    state = {name: tensor.contiguous() for name, tensor in run.model.state_dict().items()}
    save_file(state, file)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def without_seconds(run: Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in run.records]


def serve(arguments: argparse.Namespace) -> None:
    """The server's process: a run to its end, and what came of it in a file."""
    folder, watch = arguments.serve, Watch()
    run = federation(
        arguments.strategies[0],
        arguments.rounds,
        workers=arguments.workers,
        kill_every=arguments.kill_workers_every,
        checkpoint=folder / "run.safetensors",
        tell=True,
        watch=watch,
    )
    found = {
        "model": digest(run, folder / "model.safetensors"),
        "records": without_seconds(run),
        "memory": watch.memory,
    }
    (folder / "result.json").write_text(json.dumps(found))


@dataclass
class Verdict:
    """What one strategy went through, and what was wrong with it."""

    strategy: str
    seconds: float
    refused: int
    asked: int
    workers_killed: int
    servers_killed: int
    memory: dict[str, list[dict[str, float]]]
    problems: list[str]

    def lines(self) -> list[str]:
        facts = (
            f"{self.strategy}: {self.seconds:.0f} s, {self.refused} of {self.asked} updates "
            f"refused, {self.workers_killed} workers and {self.servers_killed} servers killed"
        )
        held = [
            f"  {name}: "
            + "; ".join(
                f"round {at['round']:.0f}: {at['resident']:.0f} MB resident, "
                f"{at['tensors']:.2f} MB of tensors"
                for at in both
            )
            for name, both in self.memory.items()
        ]
        result = self.problems or ["the same bytes, the same records, memory flat"]
        return [facts, *held, *(f"  {text}" for text in result)]


def killed_rounds(rounds: int, times: int, seed: int) -> list[int]:
    """When the server is killed: in the first three quarters, so that the last one lives long."""
    return sorted(random.Random(seed).sample(range(2, max(3 + times, 3 * rounds // 4)), times))


def server(
    folder: Path, arguments: argparse.Namespace, name: str, workers: int, kill_every: int
) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--serve", str(folder), "--strategies", name]
    command += ["--rounds", str(arguments.rounds), "--workers", str(workers)]
    command += ["--kill-workers-every", str(kill_every)]
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}  # of what killed processes left behind
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=quiet
    )


def run_through(process: subprocess.Popen[str], kill_at: int | None, client: int) -> bool:
    """Follow a server; returns whether it was killed, in the round and at the client given."""
    for line in process.stdout or ():
        step = re.match(r"round (\d+) of \d+.*client (\d+)", line)
        if step and kill_at is not None and int(step[1]) >= kill_at and int(step[2]) >= client:
            process.kill()
            process.wait()
            return True
    process.wait()
    return False


def outlived(process: subprocess.Popen[str], seconds: float = 60.0) -> bool:
    """Whether processes of a killed server are still there after a while."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    return True


def soak(name: str, arguments: argparse.Namespace) -> Verdict:
    """Both runs of a strategy, compared."""
    begun, killed = time.monotonic(), 0
    problems: list[str] = []
    drawn = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="nafi-soak-") as temporary:
        calm, rough = (Path(temporary) / kind for kind in ("calm", "rough"))
        calm.mkdir()
        rough.mkdir()
        run_through(server(calm, arguments, name, 1, 0), None, 0)
        every = arguments.kill_workers_every
        for at in [*killed_rounds(arguments.rounds, arguments.kill_server, arguments.seed), None]:
            process = server(rough, arguments, name, arguments.workers, every)
            killed += run_through(process, at, drawn.randrange(CLIENTS - 2))
            if outlived(process):
                problems.append(f"processes of the server outlived it (round {at})")
        found = {}
        for folder in (calm, rough):
            result = folder / "result.json"
            if not result.exists():
                return Verdict(name, 0, 0, 0, 0, killed, {}, [f"the {folder.name} run failed"])
            found[folder.name] = json.loads(result.read_text())
    records = found["calm"]["records"]
    if found["calm"]["model"] != found["rough"]["model"]:
        problems.append("the models differ")
    if records != found["rough"]["records"]:
        problems.append("the records differ")
    if killed != arguments.kill_server:
        problems.append(f"only {killed} servers could be killed")
    memory = {kind: early_and_late(both["memory"]) for kind, both in found.items()}
    problems += [text for kind, both in memory.items() for text in grown(kind, both)]
    return Verdict(
        name,
        time.monotonic() - begun,
        sum(len(record["refused"]) for record in records),
        sum(record["clients"] for record in records),
        arguments.rounds // every if every else 0,
        killed,
        memory,
        problems,
    )


def early_and_late(memory: list[dict[str, float]]) -> list[dict[str, float]]:
    """After a quarter of the rounds that a server lived through, and at its end."""
    return [memory[(len(memory) - 1) // 4], memory[-1]]


def grown(kind: str, both: list[dict[str, float]]) -> list[str]:
    early, late = both
    return [
        f"the {kind} server grew: {what} {early[what]:.1f} MB, then {late[what]:.1f} MB"
        for what in ("resident", "tensors")
        if late[what] > GROWTH * early[what]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--strategies", nargs="+", default=["fedavg", "layerwise"], choices=list(OPTIONS)
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2, help="of the run that is disturbed")
    parser.add_argument("--kill-workers-every", type=int, default=10, metavar="ROUNDS")
    parser.add_argument("--kill-server", type=int, default=5, metavar="TIMES")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.serve is not None:
        logging.disable()  # of the clients that fail
        serve(arguments)
        return 0
    verdicts = []
    for name in arguments.strategies:
        verdicts.append(soak(name, arguments))
        print("\n".join(verdicts[-1].lines()), flush=True)
    return int(any(verdict.problems for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
