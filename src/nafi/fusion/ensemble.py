"""ensemble: all models side by side, the ceiling that one model is measured against.

Promises: a module whose output is the weighted sum of the models' outputs, and saves as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import InputError
from nafi.fusion.clients import Clients
from nafi.fusion.familiarity import as_weights, watched_distances
from nafi.fusion.method import Method, Progress
from nafi.fusion.result import FusionResult
from nafi.fusion.running import remembers
from nafi.graph import Inputs, ModelSpec, call, copy_network, evaluating, first_line
from nafi.options import one_of, option

AVERAGES = ("logits", "probabilities")
BY_INPUT = "inputs"
Prepared = tuple[Clients, Inputs]


def shares_of(clients: Clients) -> tuple[Tensor, Tensor | None]:
    """What each client's output counts in the sum of all: (S,), and (S, K) for classes.

    Equal where nothing is known; by who has seen a class where class counts are.
    """
    classes = clients.class_weights
    count = len(clients)
    return (
        torch.from_numpy(clients.model_weights / count),
        None if classes is None else torch.from_numpy(classes / count),
    )


def weighted_sum(
    outputs: Tensor,
    shares: Tensor,
    class_shares: Tensor | None,
    by_input: Tensor | None = None,
) -> Tensor:
    """Of (S, inputs, ...) outputs; by (S, K) class_shares if they are classes, else by (S,) shares.

    by_input: (S, inputs) factors of these, after which they add up to one for each input again

    Classes lie along the first axis after that of the inputs, as those of pixels, or along the
    last, as those of tokens. Where both are as long it cannot be told, and shares are used.
    """
    weights, form = shares, [len(outputs)] + [1] * (outputs.ndim - 1)
    if class_shares is not None and outputs.ndim > 2:
        classes = class_shares.shape[1]
        axes = {axis for axis in (2, outputs.ndim - 1) if outputs.shape[axis] == classes}
        if len(axes) == 1:
            weights, form[axes.pop()] = class_shares, classes
    weights = weights.reshape(form).to(outputs)
    if by_input is not None:
        factors = by_input.to(outputs).reshape(*outputs.shape[:2], *[1] * (outputs.ndim - 2))
        weights = weights * factors
        weights = weights / weights.sum(dim=0)
    return (weights * outputs).sum(dim=0)


class EnsembleNetwork(nn.Module):
    """The weighted sum of several models' logits, or the logarithm of that of probabilities.

    shares: (S,) what each model counts; class_shares: (S, K) the same for each class, if known
    by_input: let those count more that know the like of an input (`familiarity`)
    """

    shares: Tensor
    class_shares: Tensor | None

    def __init__(
        self,
        models: Sequence[nn.Module],
        shares: Tensor,
        class_shares: Tensor | None = None,
        average: str = "logits",
        by_input: bool = False,
    ) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.average = average
        self.by_input = by_input
        self.register_buffer("shares", shares.float())
        self.register_buffer("class_shares", None if class_shares is None else class_shares.float())

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with ExitStack() as stack:
            watched = [
                stack.enter_context(watched_distances(m)) for m in self.models if self.by_input
            ]
            outputs = [pytree.tree_flatten(model(*inputs, **named)) for model in self.models]
        if not all(watched):
            raise ValueError("one of them runs none of its batch normalisations")
        by_input = as_weights([found[0] for found in watched]) if watched else None
        leaves = [
            self._sum(list(tensors), by_input)
            for tensors in zip(*(o[0] for o in outputs), strict=True)
        ]
        return pytree.tree_unflatten(leaves, outputs[0][1])

    def _sum(self, tensors: list[Any], by_input: Tensor | None) -> Any:
        if not isinstance(tensors[0], Tensor):
            return tensors[0]
        if not tensors[0].is_floating_point():
            if not all(torch.equal(tensors[0], other) for other in tensors[1:]):
                raise ValueError("they return whole numbers or masks that differ")
            return tensors[0]
        if self.average == "probabilities":
            tensors = [tensor.softmax(dim=1) for tensor in tensors]
        total = weighted_sum(torch.stack(tensors), self.shares, self.class_shares, by_input)
        # Back to logits, so that whatever reads the output need not know.
        return total.clamp(min=1e-30).log() if self.average == "probabilities" else total


def run_side_by_side(network: EnsembleNetwork, example_inputs: Inputs) -> None:
    """Refuse models whose outputs cannot be added up."""
    try:
        with evaluating(network):
            call(network, example_inputs)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = first_line(error)
        raise InputError(f"the models cannot be run side by side: {reason}") from None


@dataclass(frozen=True, kw_only=True)
class Ensemble(Method):
    """All models side by side: what one model is measured against.

    average: logits, or probabilities along dimension 1
    weigh_by: "models", each counting the same; "counts", by the samples or classes that a model has
        seen, as the other methods weigh them; or "inputs": those models count more whose batch
        normalisation remembers the like of an input, and counts are used if they are given
    """

    name: ClassVar[str] = "ensemble"
    uses: ClassVar[frozenset[str]] = frozenset({"class_counts", "sample_counts"})

    average: str = option(one_of(AVERAGES), "logits")
    weigh_by: str = option(one_of(("models", "counts", BY_INPUT)), "models")

    def check_uses(self, **known: object) -> None:
        super().check_uses(**known)
        counts = [name for name in self.uses if known.get(name) is not None]
        if counts and self.weigh_by == "models":
            raise InputError(
                f"{counts[0]}: ensemble uses them with weigh_by='counts' and 'inputs' only"
            )

    def used(self, **known: Any) -> dict[str, Any]:
        return {} if self.weigh_by == "models" else super().used(**known)

    def prepare(self, clients: Clients, example_inputs: Inputs, spec: ModelSpec | None) -> Prepared:
        for model, name in zip(clients.models, clients.names, strict=True):
            if self.weigh_by == BY_INPUT and not any(map(remembers, model.modules())):
                raise InputError(
                    f"weigh_by: {name} has no batch normalisation with running statistics, so "
                    "nobody knows which inputs it has seen; use 'models' or 'counts'"
                )
        return clients, example_inputs

    def fuse(self, prepared: Prepared, progress: Progress) -> FusionResult:
        clients, example_inputs = prepared
        models = [copy_network(model) for model in clients.models]
        network = EnsembleNetwork(
            models, *shares_of(clients), self.average, self.weigh_by == BY_INPUT
        ).eval()
        run_side_by_side(network, example_inputs)
        return FusionResult(network)
