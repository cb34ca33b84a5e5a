"""The paper's networks, with its initialisation.

Hides: nothing. Promises: a network and its first weights depend on the generator alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Fully connected layers with ReLU between them; inputs are flattened."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(widths)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        last: Tensor = self.layers[-1](x)
        return last


class ConvNet(nn.Module):
    """The paper's CIFAR-10 network: two convolutions with pooling, three fully connected layers.

    widths: filters of both convolutions, then units of both hidden layers
    """

    def __init__(self, widths: Sequence[int] = (6, 16, 120, 84), classes: int = 10) -> None:
        super().__init__()
        first, second, third, fourth = widths
        self.conv1 = nn.Conv2d(3, first, 5)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.fc1 = nn.Linear(second * 5 * 5, third)
        self.fc2 = nn.Linear(third, fourth)
        self.fc3 = nn.Linear(fourth, classes)

    def forward(self, x: Tensor) -> Tensor:
        # Pooled first: the same, and less to compare with zero.
        x = F.max_pool2d(self.conv1(x), 2).relu()
        x = F.max_pool2d(self.conv2(x), 2).relu().flatten(1)
        found: Tensor = self.fc3(self.fc2(self.fc1(x).relu()).relu())
        return found


def draw_weights(model: nn.Module, generator: torch.Generator, deviation: float = 0.1) -> nn.Module:
    """Weights from N(0, deviation^2), biases 0.1, as in the public code; in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(0.1)
            else:
                parameter.normal_(0.0, deviation, generator=generator)
    return model
