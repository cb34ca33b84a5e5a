"""Many clients: time and memory of the server, in one process and on Flower's simulation.

`python benchmarks/load.py` prints tables in Markdown; needs MNIST (NAFI_DATA, or a download). Every
row is a process of its own, whose peak memory is measured. Not part of `make bench`: it takes about
ten minutes.

`python benchmarks/load.py --nodes 1000` runs two strategies with so many nodes on Flower's
simulation instead.

`python benchmarks/load.py --registered 10000` samples 50 of so many clients in each of 20 rounds of
a tiny network, in process, and prints how the server's memory and its checkpoint grow.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nafi.experiments.data import mnist
from nafi.experiments.models import MLP
from nafi.experiments.partition import dirichlet_partition
from nafi.federated import (
    Acceptance,
    Architecture,
    Callback,
    Samples,
    Trainer,
    Training,
    make_strategy,
    simulate,
)

ROUNDS, WIDTH = 3, 100
TRAINING = Training(epochs=1, batch=32, rate=0.05)
INPUTS = (torch.zeros(2, 784),)
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "match-then-average": {"penalty": 0.2, "max_width": 2.0},
    "layerwise": {"penalty": 0.2, "max_width": 2.0},
}


_FOUND = "FOUND "


def network() -> MLP:
    return MLP([784, WIDTH, 10])


def shares(clients: int) -> dict[str, Samples]:
    data = mnist().train
    parts = dirichlet_partition(data.labels.numpy(), clients, 0.5, np.random.default_rng(0))
    return {str(s): data[part] for s, part in enumerate(parts)}


SAMPLED, SAMPLING_ROUNDS = 50, 20
OF_MANY: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "match-then-average": {"penalty": 0.2, "max_width": 2.0},
    "match-refit": {"penalty": 0.2, "max_width": 2.0},
    "layerwise": {"penalty": 0.2, "max_width": 2.0, "keep": SAMPLED},
}


def tiny() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(20, 16), torch.nn.ReLU(), torch.nn.Linear(16, len(CENTRES))
    )


CENTRES = 2 * torch.randn(5, 20, generator=torch.Generator().manual_seed(0))


def drawn(client: str) -> Samples:
    """A client's samples, which nobody keeps."""
    generator = torch.Generator().manual_seed(int(client))
    labels = torch.randint(len(CENTRES), (30,), generator=generator)
    return Samples(CENTRES[labels] + torch.randn(30, 20, generator=generator), labels)


def of_many(name: str, clients: int) -> dict[str, float]:
    """Sample few of many clients in this process; megabytes after rounds, and of the checkpoint."""
    torch.set_num_threads(1)
    architecture = Architecture(tiny, (torch.zeros(2, 20),))
    strategy = make_strategy(
        name,
        architecture,
        TRAINING,
        rounds=SAMPLING_ROUNDS,
        fraction=SAMPLED / clients,
        **OF_MANY[name],
    )
    found = {}

    class Watch(Callback):
        def round_finished(self, record: dict[str, Any]) -> None:
            for key, value in (("all", _Memory.now()[0]), ("file", file.stat().st_size / 2**20)):
                found[f"{key} {record['round']}"] = value

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.safetensors"
        start = time.perf_counter()
        run = simulate(
            strategy,
            [str(client) for client in range(clients)],
            Trainer(architecture, drawn, len(CENTRES)),
            checkpoint=file,
            callbacks=[Watch()],
        )
    return {**found, "seconds": time.perf_counter() - start, "seen": float(len(run.asked))}


def one(runner: str, name: str, clients: int) -> dict[str, float]:
    """Run a federation in this process; returns seconds a round and megabytes."""
    torch.set_num_threads(1)
    architecture = Architecture(network, INPUTS)
    strategy = make_strategy(name, architecture, TRAINING, rounds=ROUNDS, **OPTIONS[name])
    data = shares(clients)
    with _Memory() as memory:
        start = time.perf_counter()
        if runner == "process":
            records = simulate(strategy, list(data), Trainer(architecture, data, 10)).records
        else:
            records = _on_flower(strategy, clients)
        seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "rounds": float(np.mean([record["seconds"] for record in records[1:]])),
        "more": memory.peak[0] - memory.before[0],
        "own": memory.peak[1] - memory.before[1],
    }


def _on_flower(strategy: Any, clients: int) -> list[dict[str, Any]]:
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    from nafi.federated.flower import Federation, client_app

    found: list[dict[str, Any]] = []
    server = ServerApp()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        federation = Federation(
            strategy,
            nodes=clients,
            wait=3600.0,
            deadline=3600.0,
            acceptance=Acceptance(classes=10),
        )
        federation.start(grid)
        found.extend(federation.run.records)

    # What is defined in a script is sent with every message, and would read all data again: a
    # worker that imports it by name has read them before.
    here = import_module(Path(__file__).stem)
    app = client_app(here.network, INPUTS, partial(here.share, clients), classes=10)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, app, num_supernodes=clients, backend_config=resources)
    return found


_known: dict[int, dict[str, Samples]] = {}


def share(clients: int, context: Any) -> Samples:
    if clients not in _known:
        _known[clients] = shares(clients)
    return _known[clients][str(context.node_config["partition-id"])]


class _Memory:
    """The most that this process had while it was looked at, in megabytes; Linux only.

    Two numbers: all of it, and without pages of files, which the system may take back.
    """

    def __enter__(self) -> _Memory:
        self.before = self.peak = self.now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            now = self.now()
            self.peak = max(self.peak[0], now[0]), max(self.peak[1], now[1])

    @staticmethod
    def now() -> tuple[float, float]:
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
        size = os.sysconf("SC_PAGE_SIZE") / 2**20
        return resident * size, (resident - shared) * size


def in_process_of_its_own(*arguments: str) -> dict[str, float]:
    command = [sys.executable, __file__, *arguments]
    quiet = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=quiet, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_FOUND)]
    if not lines:
        sys.exit(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(lines[0].removeprefix(_FOUND))
    return found


def load(nodes: int | None) -> None:
    print(f"{os.cpu_count()} cores; MNIST, {WIDTH} hidden neurons, {ROUNDS} rounds\n")
    print("| runner | strategy | clients | seconds | seconds a round, from the second ", end="")
    print("| MB more | without files |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = [("process", name, clients) for name in OPTIONS for clients in (50, 200)]
    rows += [("flower", "fedavg", 50), ("flower", "layerwise", 50)]
    if nodes is not None:
        rows = [("flower", name, nodes) for name in ("fedavg", "match-then-average")]
    for runner, name, clients in rows:
        found = in_process_of_its_own("--one", runner, name, str(clients))
        print(
            f"| {runner} | {name} | {clients} | {found['seconds']:.1f} | {found['rounds']:.2f} | "
            f"{found['more']:.0f} | {found['own']:.0f} |",
            flush=True,
        )


def registered(clients: int) -> None:
    rounds = (5, 10, SAMPLING_ROUNDS)
    print(f"{clients} clients, {SAMPLED} of them in each of {SAMPLING_ROUNDS} rounds\n")
    titles = [f"MB after round {number}" for number in rounds]
    print(f"| strategy | clients seen | {' | '.join(titles)} | growth | checkpoint, KB, ", end="")
    print(f"after round {rounds[0]} and {rounds[-1]} | seconds |")
    print(f"| --- | --- | {' | '.join('---' for _ in rounds)} | --- | --- | --- |")
    for name in OF_MANY:
        found = in_process_of_its_own("--one", "sampled", name, str(clients))
        sizes = [found[f"all {number}"] for number in rounds]
        files = [1024 * found[f"file {number}"] for number in (rounds[0], rounds[-1])]
        print(
            f"| {name} | {found['seen']:.0f} | {' | '.join(f'{size:.0f}' for size in sizes)} "
            f"| {sizes[-1] / sizes[0] - 1:+.1%} | {files[0]:.0f} and {files[1]:.0f} "
            f"| {found['seconds']:.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--registered", type=int, metavar="CLIENTS")
    chosen = parser.parse_args()
    if chosen.one:
        runner, name, clients = chosen.one[0], chosen.one[1], int(chosen.one[2])
        found = of_many(name, clients) if runner == "sampled" else one(runner, name, clients)
        print(_FOUND + json.dumps(found))
    elif chosen.registered:
        registered(chosen.registered)
    else:
        load(chosen.nodes)


if __name__ == "__main__":
    main()
