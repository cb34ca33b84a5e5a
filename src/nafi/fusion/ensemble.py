"""ensemble: all models side by side, the ceiling that one model is measured against.

Promises: a module whose output is the mean of the models' outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import InputError
from nafi.fusion.clients import Clients
from nafi.fusion.method import Method, Progress
from nafi.fusion.result import FusionResult
from nafi.graph import Inputs, ModelSpec, call, copy_network, evaluating, first_line
from nafi.options import one_of, option

AVERAGES = ("logits", "probabilities")
Prepared = tuple[Clients, Inputs]


class EnsembleNetwork(nn.Module):
    """The mean of several models' logits, or the logarithm of the mean of their probabilities."""

    def __init__(self, models: Sequence[nn.Module], weights: Sequence[float], average: str) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.weights = list(weights)
        self.average = average

    def forward(self, *inputs: Any, **named: Any) -> Any:
        outputs = [pytree.tree_flatten(model(*inputs, **named)) for model in self.models]
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


@dataclass(frozen=True, kw_only=True)
class Ensemble(Method):
    """All models side by side, each counting the same: what one model is measured against.

    average: logits, or probabilities along dimension 1
    """

    name: ClassVar[str] = "ensemble"

    average: str = option(one_of(AVERAGES), "logits")

    def prepare(self, clients: Clients, example_inputs: Inputs, spec: ModelSpec | None) -> Prepared:
        return clients, example_inputs

    def fuse(self, prepared: Prepared, progress: Progress) -> FusionResult:
        clients, example_inputs = prepared
        models = [copy_network(model) for model in clients.models]
        network = EnsembleNetwork(models, [1 / len(models)] * len(models), self.average).eval()
        try:
            with evaluating(network):
                call(network, example_inputs)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = first_line(error)
            raise InputError(f"the models cannot be run side by side: {reason}") from None
        return FusionResult(network)
