"""What strategies cost: messages, bytes down and up, and seconds of one client in all rounds.

python benchmarks/messages.py

Bytes depend on the network and its widths alone. Seconds are process time on one thread: of a
client that trains for one epoch a round on 2,000 samples (64 photos), and of the server.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch

from nafi.experiments.models import ConvNet, UNet, drawn_mlp, unet_widths
from nafi.experiments.problems import bce_and_dice
from nafi.federated import (
    Acceptance,
    Architecture,
    Samples,
    Task,
    Trainer,
    Training,
    Update,
    make_strategy,
    simulate,
)

torch.set_num_threads(1)
CLIENTS = 3
MATCHED = {"penalty": 0.1, "evidence": 60.0, "max_width": 2.0}
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "fedavg, head from statistics": ("fedavg", {"head": "statistics"}),
    "match-then-average": ("match-then-average", MATCHED),
    "match-refit, one round": ("match-refit", {**MATCHED, "rounds": 1}),
    "match-refit, one round, float16": (
        "match-refit",
        {**MATCHED, "rounds": 1, "precision": "float16"},
    ),
    "layerwise": ("layerwise", MATCHED),
    "layerwise, moments": ("layerwise", {**MATCHED, "moments": True}),
    "layerwise, moments, float16": (
        "layerwise",
        {**MATCHED, "moments": True, "precision": "float16"},
    ),
}


def mlp() -> tuple[Architecture, dict[str, Samples], int, int | None, Any]:
    data = {
        str(s): Samples(torch.rand(2000, 784), torch.randint(10, (2000,))) for s in range(CLIENTS)
    }
    return (
        Architecture(lambda: drawn_mlp(784, 10, [100]), (torch.zeros(2, 784),)),
        data,
        2,
        10,
        torch.nn.functional.cross_entropy,
    )


def convnet() -> tuple[Architecture, dict[str, Samples], int, int | None, Any]:
    data = {
        str(s): Samples(torch.rand(2000, 3, 32, 32), torch.randint(10, (2000,)))
        for s in range(CLIENTS)
    }
    return (
        Architecture(lambda: ConvNet((6, 16, 120, 84)), (torch.zeros(2, 3, 32, 32),)),
        data,
        5,
        10,
        torch.nn.functional.cross_entropy,
    )


def unet() -> tuple[Architecture, dict[str, Samples], int, int | None, Any]:
    data = {
        str(s): Samples(torch.rand(64, 3, 64, 64), torch.randint(2, (64, 1, 64, 64)))
        for s in range(CLIENTS)
    }
    return (
        Architecture(lambda: UNet(unet_widths(8)), (torch.zeros(2, 3, 64, 64),)),
        data,
        19,
        None,
        bce_and_dice,
    )


class Timed:
    """A trainer that counts its process time."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.seconds = trainer, 0.0

    def __call__(self, client: str, task: Task) -> tuple[Update, float]:
        start = time.process_time()
        answer = self.trainer(client, task)
        self.seconds += time.process_time() - start
        return answer


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    networks = {"MNIST, 100 hidden": mlp, "ConvNet": convnet, "U-Net, base 8": unet}
    print("| network | strategy | rounds | messages | MB down | MB up | client, s | server, s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for network, make in networks.items():
        architecture, data, rounds, classes, loss = make()
        for label, (name, options) in STRATEGIES.items():
            chosen = {"rounds": rounds, **options}
            training = Training(epochs=1, optimiser="adam", rate=0.001)
            strategy = make_strategy(name, architecture, training, **chosen)
            work = Timed(Trainer(architecture, data, classes, loss))
            start = time.process_time()
            run = simulate(strategy, list(data), work, acceptance=Acceptance(classes=classes))
            server = time.process_time() - start - work.seconds
            messages = sum(record.get("messages", 1) for record in run.records)
            down, up = (
                sum(record[f"bytes_{way}"] for record in run.records) / CLIENTS / 1e6
                for way in ("down", "up")
            )
            print(
                f"| {network} | {label} | {chosen['rounds']} | {messages} | {down:.2f} | "
                f"{up:.2f} | {work.seconds / CLIENTS:.1f} | {server:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
