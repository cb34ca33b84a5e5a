"""The paper's networks, with its initialisation.

Hides: nothing. Promises: a network and its first weights depend on the generator alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
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


def draw_weights(model: nn.Module, generator: torch.Generator, deviation: float = 0.1) -> nn.Module:
    """Weights from N(0, deviation^2), biases 0.1, as in the public code; in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(0.1)
            else:
                parameter.normal_(0.0, deviation, generator=generator)
    return model
