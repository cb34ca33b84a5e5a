"""Follow a federation while it runs: JSON lines always, TensorBoard and MLflow if installed.

    python examples/follow_a_run.py rounds.jsonl

Four clients with random numbers, fused layer by layer; what matters here is what is told of it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from nafi.federated import (
    Architecture,
    Callback,
    JsonLines,
    Samples,
    Scalars,
    Trainer,
    Training,
    make_strategy,
    simulate,
)


class Printer(Callback):
    """A line for each round."""

    def round_started(self, number: int, clients: Sequence[str]) -> None:
        print(f"round {number}: {', '.join(clients)}")

    def round_finished(self, record: Mapping[str, Any]) -> None:
        print(f"round {record['round']}: loss {record['loss']:.3f}, widths {record['widths']}")


def trackers() -> list[Callback]:
    """Those that are installed."""
    found: list[Callback] = []
    if find_spec("tensorboard") is not None:
        from torch.utils.tensorboard import SummaryWriter

        found.append(Scalars(SummaryWriter("logs").add_scalar, "federation/"))
    if find_spec("mlflow") is not None:
        import mlflow

        found.append(Scalars(mlflow.log_metric))
    return found


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 3))


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 20, generator=generator)
    labels = inputs[:, :3].argmax(dim=1)
    clients = {
        f"client {s + 1}": Samples(inputs[100 * s : 100 * (s + 1)], labels[100 * s : 100 * (s + 1)])
        for s in range(4)
    }
    architecture = Architecture(network, (torch.zeros(2, 20),))
    training = Training(epochs=3, batch=16, optimiser="adam", rate=0.01)
    strategy = make_strategy("layerwise", architecture, training, rounds=2, max_width=2.0)
    file = sys.argv[1] if len(sys.argv) > 1 else "rounds.jsonl"
    callbacks = [Printer(), JsonLines(file), *trackers()]
    simulate(strategy, list(clients), Trainer(architecture, clients, 3), callbacks=callbacks)
    print(f"the records are in {file}")


if __name__ == "__main__":
    main()
