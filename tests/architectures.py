"""Factories that tests name on the command line."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fusion.networks import MLP


def mlp() -> nn.Module:
    return MLP(8, 12, 9, 5)


def example_inputs() -> Tensor:
    return torch.zeros(2, 8)
