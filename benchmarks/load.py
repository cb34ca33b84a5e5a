"""Many clients: time and memory of the server, in one process and on Flower's simulation.

`python benchmarks/load.py` prints tables in Markdown; needs MNIST (NAFI_DATA, or a download). Every
row is a process of its own, whose peak memory is measured. Not part of `make bench`: it takes about
ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
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


def network() -> MLP:
    return MLP([784, WIDTH, 10])


def shares(clients: int) -> dict[str, Samples]:
    data = mnist().train
    parts = dirichlet_partition(data.labels.numpy(), clients, 0.5, np.random.default_rng(0))
    return {str(s): data[part] for s, part in enumerate(parts)}


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
        "more": memory.peak - memory.before,
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
            wait=300.0,
            deadline=600.0,
            acceptance=Acceptance(classes=10),
        )
        federation.start(grid)
        found.extend(federation.run.records)

    app = client_app(network, INPUTS, partial(_share, clients), classes=10)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, app, num_supernodes=clients, backend_config=resources)
    return found


_known: dict[int, dict[str, Samples]] = {}


def _share(clients: int, context: Any) -> Samples:
    if clients not in _known:
        _known[clients] = shares(clients)
    return _known[clients][str(context.node_config["partition-id"])]


class _Memory:
    """The most that this process had while it was looked at, in megabytes; Linux only."""

    def __enter__(self) -> _Memory:
        self.before = self.peak = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=3)
    chosen = parser.parse_args().one
    if chosen:
        print("FOUND " + json.dumps(one(chosen[0], chosen[1], int(chosen[2]))))
        return
    print(f"{os.cpu_count()} cores; MNIST, {WIDTH} hidden neurons, {ROUNDS} rounds\n")
    print("| runner | strategy | clients | seconds | seconds a round, from the second | MB more |")
    print("| --- | --- | --- | --- | --- | --- |")
    rows = [("process", name, clients) for name in OPTIONS for clients in (50, 200)]
    for runner, name, clients in [*rows, ("flower", "fedavg", 50), ("flower", "layerwise", 50)]:
        command = [sys.executable, __file__, "--one", runner, name, str(clients)]
        quiet = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=quiet, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        if not lines:
            sys.exit(f"{runner} {name} {clients}: {done.stderr[-2000:]}")
        found = json.loads(lines[0].removeprefix("FOUND "))
        print(
            f"| {runner} | {name} | {clients} | {found['seconds']:.1f} | {found['rounds']:.2f} | "
            f"{found['more']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
