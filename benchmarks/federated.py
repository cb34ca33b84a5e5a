"""Rounds: two workers against one, frozen layers computed once, networks prepared once.

`make bench` prints tables in Markdown; needs CIFAR-10 (NAFI_DATA, or a download). All ratios are
measured in one run on the same cores.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from nafi.experiments.data import cifar10
from nafi.experiments.models import ConvNet
from nafi.experiments.partition import dirichlet_partition
from nafi.federated import (
    Architecture,
    Samples,
    Strategy,
    Trainer,
    Training,
    make_strategy,
    simulate,
)

CLIENTS, SAMPLES, ROUNDS = 10, 10_000, 5
TRAINING = Training(epochs=5, batch=32, rate=0.01, momentum=0.9)


def shares() -> dict[str, Samples]:
    data = cifar10().train[:SAMPLES]
    parts = dirichlet_partition(data.labels.numpy(), CLIENTS, 0.5, np.random.default_rng(0))
    return {str(s): data[part] for s, part in enumerate(parts)}


def seconds(strategy: Strategy, work: Trainer, workers: int) -> list[float]:
    """Of each round; the start of worker processes is in the first."""
    start = time.perf_counter()
    run = simulate(strategy, [str(s) for s in range(CLIENTS)], work, workers=workers)
    rounds = [float(record["seconds"]) for record in run.records]
    return [time.perf_counter() - start, *rounds]


# What a server does to get at the clients' networks, and the modules where it does so.
PREPARATION = {"prepare_networks": "nafi.fusion.networks", "rebuild": "nafi.graph.rebuild"}


def counted(
    name: str, function: Callable[..., Any], calls: Counter[str], spent: Counter[str]
) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            calls[name] += 1
            spent[name] += time.perf_counter() - start

    return call


def preparation(architecture: Architecture, data: dict[str, Samples]) -> None:
    """Calls and seconds of every evaluated round of a layer-wise run in which nobody trains."""
    calls: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for name, home in PREPARATION.items():
        function = getattr(importlib.import_module(home), name)
        wrapped = counted(name, function, calls, spent)
        for module in [m for n, m in sys.modules.items() if n.split(".")[0] == "nafi"]:
            if getattr(module, name, None) is function:
                setattr(module, name, wrapped)
    rounds: list[tuple[int, int, float]] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        rounds.append(
            (
                calls["prepare_networks"],
                calls["rebuild"],
                spent["prepare_networks"] + spent["rebuild"],
            )
        )
        return {}

    strategy = make_strategy(
        "layerwise", architecture, Training(epochs=0), rounds=ROUNDS, penalty=0.1, max_width=2.0
    )
    simulate(strategy, list(data), Trainer(architecture, data, 10), evaluate=evaluate)
    totals = np.diff([(0, 0, 0.0), *rounds], axis=0)
    print("\n| preparation in an evaluated layer-wise round | 1 | 2 | 3 | 4 | 5 | mean |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = zip(("prepared", "rebuilt", "milliseconds"), totals.T * [[1], [1], [1e3]], strict=True)
    for label, row in rows:
        print(f"| {label} | " + " | ".join(f"{v:.0f}" for v in row) + f" | {row.mean():.1f} |")


def main() -> None:
    torch.set_num_threads(1)
    data = shares()
    architecture = Architecture(partial(ConvNet, (6, 16, 120, 84)), (torch.zeros(2, 3, 32, 32),))
    print(f"{os.cpu_count()} cores, one thread a worker\n")
    print(f"| fedavg, {CLIENTS} clients, {ROUNDS} rounds | seconds | ratio | without the start |")
    print("| --- | --- | --- | --- |")
    fedavg = make_strategy("fedavg", architecture, TRAINING, rounds=ROUNDS)
    one, two = (seconds(fedavg, Trainer(architecture, data, 10), w) for w in (1, 2))
    started = sum(two[2:]) / sum(one[2:])
    print(f"| one worker | {one[0]:.1f} | 1.00 | 1.00 |")
    print(f"| two workers | {two[0]:.1f} | {two[0] / one[0]:.2f} | {started:.2f} |")
    print("\n| layer-wise nafi, seconds of round | 1 | 2 | 3 | 4 | 5 |")
    print("| --- | --- | --- | --- | --- | --- |")
    found = {}
    for told, limit in (("computed once", 2**30), ("computed every time", 0)):
        layerwise = make_strategy(
            "layerwise",
            architecture,
            TRAINING,
            rounds=ROUNDS,
            penalty=0.1,
            evidence=60.0,
            max_width=2.0,
        )
        work = Trainer(architecture, data, 10, cache_bytes=limit)
        found[told] = seconds(layerwise, work, 2)[1:]
        print(f"| frozen layers {told} | " + " | ".join(f"{s:.1f}" for s in found[told]) + " |")
    ratios = [a / b for a, b in zip(*found.values(), strict=True)]
    print("| ratio | " + " | ".join(f"{r:.2f}" for r in ratios) + " |")
    preparation(architecture, data)


if __name__ == "__main__":
    main()
