"""Fuse a network of one's own: a residual convolutional one with batch normalisation.

Nothing about the network is told to nafi but its inputs: the groups of neurons, the skip connection
and the normalisation are found. Run `python examples/custom_network.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import nafi


class SmallResidual(nn.Module):
    """A stem, one residual block, and a classifier. Sizes are taken from tensors, never fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12))
        self.block = nn.Sequential(
            nn.Conv2d(12, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 12, 3, padding=1, bias=False),
            nn.BatchNorm2d(12),
        )
        self.head = nn.Linear(12 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (x + self.block(x)).relu()
        return self.head(F.max_pool2d(x, 2).flatten(1))


def train(inputs: Tensor, labels: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = SmallResidual()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(15):
        for batch in torch.randperm(len(labels)).split(64):
            optimiser.zero_grad()
            F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimiser.step()
    return model.eval()


def main() -> None:
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    labels = torch.from_numpy(digits.target)
    test = torch.arange(len(labels)) % 4 == 0
    clients = [~test & (torch.arange(len(labels)) % 3 == s) for s in range(3)]
    models = [train(images[mine], labels[mine], s) for s, mine in enumerate(clients)]

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(images[test]).argmax(1) == labels[test]).double().mean())

    print(nafi.groups(models[0], (images[:2],)))
    for seed, model in enumerate(models):
        print(f"client {seed}: {accuracy(model):.1%}")
    counts = [int(mine.sum()) for mine in clients]
    for options in ({}, {"penalty": 0.1}):
        found = nafi.fuse(models, (images[:2],), sample_counts=counts, **options)
        print(f"nafi {options} {dict(found.widths)}: {accuracy(found.model):.1%}")
    averaged = nafi.fuse(models, (images[:2],), method="fedavg", sample_counts=counts)
    print(f"mean of the weights: {accuracy(averaged.model):.1%}")


if __name__ == "__main__":
    main()
