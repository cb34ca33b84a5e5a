"""ensemble: all models side by side, the ceiling that one model is measured against.

Hides: nothing. Promises: a module whose output is the mean of the models' outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import InputError
from nafi.fusion.base import FusionResult, Task, fuser
from nafi.graph.trace import evaluating, first_line

AVERAGES = ("logits", "probabilities")


class Ensemble(nn.Module):
    """The mean of several models' logits, or the logarithm of the mean of their probabilities."""

    def __init__(self, models: Sequence[nn.Module], weights: Sequence[float], average: str) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.weights = list(weights)
        self.average = average

    def forward(self, *inputs: Any) -> Any:
        outputs = [pytree.tree_flatten(model(*inputs)) for model in self.models]
        leaves = [
            self._mean(list(tensors)) for tensors in zip(*(o[0] for o in outputs), strict=True)
        ]
        return pytree.tree_unflatten(leaves, outputs[0][1])

    def _mean(self, tensors: list[Any]) -> Any:
        if not isinstance(tensors[0], Tensor) or not tensors[0].is_floating_point():
            return tensors[0]
        if self.average == "probabilities":
            tensors = [tensor.softmax(dim=1) for tensor in tensors]
        mean = torch.stack([w * t for w, t in zip(self.weights, tensors, strict=True)]).sum(dim=0)
        # Back to logits, so that whatever reads the output need not know.
        return mean.clamp(min=1e-30).log() if self.average == "probabilities" else mean


@fuser("ensemble", options=["average"])
def ensemble(task: Task, *, average: str = "logits") -> FusionResult:
    """All models, each counting the same; average: logits, or probabilities along dimension 1."""
    if average not in AVERAGES:
        raise InputError(f"average: found {average!r}, expected one of {', '.join(AVERAGES)}")
    count = len(task.clients)
    models = [copy.deepcopy(model) for model in task.clients.models]
    together = Ensemble(models, [1 / count] * count, average).eval()
    try:
        with evaluating(together):
            together(*task.example_inputs)
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(f"the models cannot be run side by side: {first_line(error)}") from None
    return FusionResult(together)
