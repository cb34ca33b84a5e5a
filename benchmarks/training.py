"""Simulating clients: all of a trial at once against one after the other, and sums for heads.

`make bench` prints tables in Markdown; needs MNIST (NAFI_DATA, or a download). All ways use the
same cores in the same run; the ratio is what to compare.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nafi.experiments.data import mnist
from nafi.experiments.entries import accuracy
from nafi.experiments.models import MLP, ConvNet, draw_weights
from nafi.experiments.partition import dirichlet_partition
from nafi.experiments.training import PAPER, train_clients
from nafi.federated.samples import Samples, in_batches
from nafi.fusion import statistics

CLIENTS = 30
TRAINING = replace(PAPER, epochs=4)


def one_after_the_other(models: list[nn.Module], data: list[Samples]) -> list[nn.Module]:
    """The loop that everybody writes."""
    trained = []
    for model, samples in zip(models, data, strict=True):
        model = copy.deepcopy(model)
        optimiser = torch.optim.Adam(
            model.parameters(), lr=TRAINING.rate, weight_decay=TRAINING.decay, amsgrad=True
        )
        for _ in range(TRAINING.epochs):
            for index in torch.randperm(len(samples)).split(TRAINING.batch):
                optimiser.zero_grad()
                F.cross_entropy(model(samples.inputs[index]), samples.labels[index]).backward()
                optimiser.step()
        trained.append(model)
    return trained


def mean_accuracy(models: list[nn.Module], samples: Samples) -> float:
    with torch.no_grad():
        found = [(m(samples.inputs).argmax(1) == samples.labels).double().mean() for m in models]
    return 100 * float(np.mean(found))


def random_images(count: int) -> Samples:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return Samples(inputs, torch.randint(10, (count,), generator=generator))


def least_seconds(ways: dict[str, Callable[[], object]], repeats: int = 3) -> dict[str, float]:
    """CPU seconds of this thread, each way in turn: other processes disturb them least."""
    seconds: dict[str, float] = {}
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.thread_time()
            way()
            seconds[name] = min(seconds.get(name, np.inf), time.thread_time() - start)
    return seconds


def sums_for_heads() -> None:
    """What a solved head costs in every evaluated round, beside running the network."""
    samples = random_images(9000)
    print("\n| statistics of 9,000 images, ms for 32 | forward | batches of 32 | of 341 | ratio |")
    print("| --- | --- | --- | --- | --- |")
    for factor in (1, 2):
        model = ConvNet([factor * width for width in (6, 16, 120, 84)]).eval()
        ways: dict[str, Callable[[], object]] = {
            "forward": lambda model=model: accuracy(model, samples),
            "small": lambda model=model: statistics(model, in_batches(samples)),
            "large": lambda model=model: statistics(model, in_batches(samples, 341)),
        }
        found = {name: 32e3 * s / len(samples) for name, s in least_seconds(ways).items()}
        times = " | ".join(f"{found[name]:.2f}" for name in ways)
        print(f"| ConvNet, {factor}x | {times} | {found['large'] / found['small']:.2f} |")


def clients_at_once() -> None:
    data = mnist()
    parts = dirichlet_partition(data.train.labels.numpy(), CLIENTS, 0.5, np.random.default_rng(0))
    samples = [data.train[part] for part in parts]
    print(f"{torch.get_num_threads()} threads of {os.cpu_count()} cores\n")
    print(
        f"| {CLIENTS} clients, {TRAINING.epochs} epochs | loop, s | at once, s | ratio | target |"
    )
    print("| --- | --- | --- | --- | --- |")
    for hidden in (1, 2):
        models: list[nn.Module] = [
            draw_weights(MLP([784, *[100] * hidden, 10]), torch.Generator().manual_seed(s))
            for s in range(CLIENTS)
        ]
        train_clients(models[:2], [s[:64] for s in samples[:2]], TRAINING, 0)  # sets vmap up once
        start = time.perf_counter()
        together = train_clients(models, samples, TRAINING, 0)
        middle = time.perf_counter()
        apart = one_after_the_other(models, samples)
        end = time.perf_counter()
        gap = abs(mean_accuracy(together, data.test) - mean_accuracy(apart, data.test))
        assert gap < 3, f"the two do not train alike: {gap:.1f} points"
        loop, at_once = end - middle, middle - start
        print(f"| {hidden} hidden | {loop:.1f} | {at_once:.1f} | {at_once / loop:.2f} | 0.5 |")


def main() -> None:
    clients_at_once()
    torch.set_num_threads(1)
    sums_for_heads()


if __name__ == "__main__":
    main()
