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
from nafi.fusion.clients import Array, Clients
from nafi.fusion.method import Method, Progress
from nafi.fusion.result import FusionResult
from nafi.graph import Inputs, ModelSpec, call, copy_network, evaluating, first_line
from nafi.options import one_of, option

AVERAGES = ("logits", "probabilities")
Prepared = tuple[Clients, Inputs]


def weighted_mean(outputs: Tensor, model_weights: Array, class_weights: Array | None) -> Tensor:
    """Of (S, ...) outputs, each class by who has seen it if the outputs are classes.

    model_weights: (S,); class_weights: (S, K), 1 on average over the models
    """
    weights, form = model_weights, [len(outputs)] + [1] * (outputs.ndim - 1)
    classes = 0 if class_weights is None else class_weights.shape[1]
    if class_weights is not None and outputs.ndim > 2 and outputs.shape[2] == classes:
        weights, form[2] = class_weights, classes
    shares = torch.from_numpy(weights).reshape(form).to(outputs)
    return (shares * outputs).sum(dim=0) / len(outputs)


class EnsembleNetwork(nn.Module):
    """The mean of several models' logits, or the logarithm of the mean of their probabilities."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        average: str,
        model_weights: Array,
        class_weights: Array | None = None,
    ) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.average = average
        self.model_weights, self.class_weights = model_weights, class_weights

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
        mean = weighted_mean(torch.stack(tensors), self.model_weights, self.class_weights)
        # Back to logits, so that whatever reads the output need not know.
        return mean.clamp(min=1e-30).log() if self.average == "probabilities" else mean


@dataclass(frozen=True, kw_only=True)
class Ensemble(Method):
    """All models side by side: what one model is measured against.

    average: logits, or probabilities along dimension 1
    weigh_by: "models", each counting the same; or "counts", by the samples or classes that a model
        has seen, as the other methods weigh them
    """

    name: ClassVar[str] = "ensemble"

    average: str = option(one_of(AVERAGES), "logits")
    weigh_by: str = option(one_of(("models", "counts")), "models")

    @property
    def uses(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"class_counts", "sample_counts"} if self.weigh_by == "counts" else ())

    def prepare(self, clients: Clients, example_inputs: Inputs, spec: ModelSpec | None) -> Prepared:
        return clients, example_inputs

    def fuse(self, prepared: Prepared, progress: Progress) -> FusionResult:
        clients, example_inputs = prepared
        models = [copy_network(model) for model in clients.models]
        weights = clients.model_weights, clients.class_weights  # equal where nothing is known
        network = EnsembleNetwork(models, self.average, *weights).eval()
        try:
            with evaluating(network):
                call(network, example_inputs)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = first_line(error)
            raise InputError(f"the models cannot be run side by side: {reason}") from None
        return FusionResult(network)
