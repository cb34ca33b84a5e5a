"""A federation in one process: layer-wise matching against averaging.

Six clients hold digits of their own, mostly of a few classes. Both strategies get the same rounds
and epochs; run it with `python examples/federation.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from nafi.experiments.data import digits
from nafi.experiments.partition import dirichlet_partition
from nafi.federated import Architecture, Trainer, Training, make_strategy, simulate

CLIENTS, ROUNDS = 6, 3


def network() -> nn.Module:
    """Two hidden layers; the strategies find them by themselves."""
    return nn.Sequential(
        nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 10)
    )


def main() -> None:
    data = digits()
    labels = data.train.labels.numpy()
    parts = dirichlet_partition(labels, CLIENTS, 0.5, np.random.default_rng(0))
    clients = {f"hospital {s + 1}": data.train[part] for s, part in enumerate(parts)}

    architecture = Architecture(network, (torch.zeros(2, 64),))
    training = Training(epochs=15, batch=16, optimiser="adam", rate=0.005)
    work = Trainer(architecture, clients, classes=10)

    def evaluate(model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            right = model(data.test.inputs).argmax(dim=1) == data.test.labels
        return {"accuracy": 100 * float(right.double().mean())}

    for name, options in {
        "fedavg": {},
        "layerwise": {"method": "nafi", "penalty": 0.1, "max_width": 3.0},
        "match-then-average": {"method": "nafi", "penalty": 0.1, "max_width": 3.0},
    }.items():
        strategy = make_strategy(name, architecture, training, rounds=ROUNDS, **options)
        run = simulate(strategy, list(clients), work, evaluate=evaluate)
        for record in run.records:
            sent = (record["bytes_down"] + record["bytes_up"]) / 1e3
            print(
                f"{name}, round {record['round']}, widths {record['widths']}, {sent:.0f} kB: "
                f"{record['accuracy']:.1f}%"
            )


if __name__ == "__main__":
    main()
