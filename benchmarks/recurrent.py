"""Recurrent networks in one shot: digits read row by row, five clients with classes of their own.

Prints the accuracy of the clients and of the fused network, without and with a probe of
64 unlabelled digits, mean and spread over seeds.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import nafi

CLIENTS, CLASSES, SEEDS, PROBE = 5, 10, 3, 64
KINDS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


class Reader(nn.Module):
    """Reads eight rows of eight pixels, then names the digit."""

    def __init__(self, kind: str, layers: int) -> None:
        super().__init__()
        self.body = KINDS[kind](8, 32, num_layers=layers, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


def train(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(40):
        for part in torch.randperm(len(y)).split(32):
            optimiser.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimiser.step()
    return model.eval()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return 100 * float((model(x).argmax(dim=1) == y).double().mean())


def trial(kind: str, layers: int, seed: int) -> list[float]:
    """Accuracies: the mean client, the best; fused within 2x, with a probe; all neurons apart."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    pixels, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(labels))
    x = torch.tensor(pixels[order] / 16, dtype=torch.float32).reshape(-1, 8, 8)
    y = torch.tensor(labels[order])
    test, rest = slice(0, 500), np.arange(500, len(y))
    owner = np.empty(len(rest), dtype=int)
    for label in range(CLASSES):
        mine = np.flatnonzero(y[rest].numpy() == label)
        owner[mine] = rng.choice(CLIENTS, len(mine), p=rng.dirichlet(np.full(CLIENTS, 0.5)))
    models, counts = [], []
    for client in range(CLIENTS):
        chosen = rest[owner == client]
        models.append(train(Reader(kind, layers), x[chosen], y[chosen]))
        counts.append(np.bincount(y[chosen].numpy(), minlength=CLASSES))
    alone = [accuracy(model, x[test], y[test]) for model in models]
    inputs = (x[:2],)
    fused = [
        accuracy(nafi.fuse(models, inputs, class_counts=counts, **options).model, x[test], y[test])
        for options in (
            {"max_width": 2.0},
            {"max_width": 2.0, "probe": x[rest[:PROBE]]},
            {"penalty": 0.0, "evidence": 1e6},
        )
    ]
    return [float(np.mean(alone)), max(alone), *fused]


def main() -> None:
    warnings.simplefilter("ignore")
    print("network   clients, mean   best client   2x   2x with a probe   all neurons apart")
    for kind in KINDS:
        for layers in (1, 2):
            rows = np.array([trial(kind, layers, seed) for seed in range(SEEDS)])
            cells = [f"{m:6.1f} ± {s:4.1f}" for m, s in zip(rows.mean(0), rows.std(0), strict=True)]
            print(f"{kind}, {layers} layer{'s' * (layers > 1):<6}", *cells, sep="   ")


if __name__ == "__main__":
    main()
