"""Rounds: two workers against one, and frozen layers computed once against every time.

`make bench` prints tables in Markdown; needs CIFAR-10 (NAFI_DATA, or a download). All ratios are
measured in one run on the same cores.
"""

from __future__ import annotations

import os
import time
from functools import partial

import numpy as np
import torch

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


if __name__ == "__main__":
    main()
