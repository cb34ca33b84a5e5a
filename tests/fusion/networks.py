"""Small networks and helpers that the tests of fusion share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(widths)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


class NormNet(nn.Module):
    """Convolutions without bias, each with batch normalisation, and one residual sum."""

    def __init__(self, channels: int = 6, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.inner = nn.Conv2d(channels, 5, 3, padding=1, bias=False)
        self.inner_norm = nn.BatchNorm2d(5, eps=1e-3, momentum=0.2)
        self.back = nn.Conv2d(5, channels, 3, padding=1)
        self.back_norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = x + self.back_norm(self.back(self.inner_norm(self.inner(x)).relu()))
        return self.head(x.relu().mean(dim=(2, 3)))


def seeded(seed: int, *widths: int) -> MLP:
    """An MLP with weights of its own."""
    torch.manual_seed(seed)
    return MLP(*widths).eval()


def trained_norms(seed: int, channels: int = 6) -> NormNet:
    """A NormNet whose running statistics are not those of an untrained one."""
    torch.manual_seed(seed)
    model = NormNet(channels)
    with torch.no_grad():
        for norm in [model.norm, model.inner_norm, model.back_norm]:
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_()
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
    return model.eval()


def outputs(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        leaves = pytree.tree_leaves(model(*inputs))
    return [t.double() for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def gap(one: nn.Module, two: nn.Module, inputs: Sequence[Tensor]) -> float:
    """The largest difference between two networks, relative to the largest output."""
    pairs = zip(outputs(one, inputs), outputs(two, inputs), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
