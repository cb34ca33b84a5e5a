"""fedavg: the mean of all tensors by position.

Promises: what a federation that shares its initialisation would compute, and what fails for models
that do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from nafi.errors import InputError
from nafi.fusion.clients import Clients
from nafi.fusion.method import Method, Progress
from nafi.fusion.result import FusionResult
from nafi.graph import Inputs, ModelSpec, copy_network, holds_numbers, named_tensors, widened


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """The mean by position and sample counts: for models that share their start, and no others.

    Counters come from the first model.
    """

    name: ClassVar[str] = "fedavg"
    streams: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = frozenset({"class_counts", "sample_counts"})

    def prepare(self, clients: Clients, example_inputs: Inputs, spec: ModelSpec | None) -> Clients:
        """Refuse models of different widths."""
        first = next(clients.outlines)
        for outline, label in zip(clients.outlines, clients.names, strict=True):
            for name, tensor in outline.items():
                if tensor.shape != first[name].shape:
                    raise InputError(
                        f"{label}: {name} has shape {tuple(tensor.shape)}, in {clients.names[0]} "
                        f"{tuple(first[name].shape)}; fedavg needs equal widths, nafi does not"
                    )
        return clients

    def fuse(self, prepared: Clients, progress: Progress) -> FusionResult:
        states = prepared.states
        samples = prepared.sample_counts
        shares = [1 / len(states)] * len(states) if samples is None else samples / samples.sum()
        progress("averaging", 0, 1)
        model = copy_network(prepared.models[0]).eval()
        with torch.no_grad():
            for name, tensor in named_tensors(model).items():
                if holds_numbers(tensor):
                    mean = torch.zeros_like(widened(tensor))
                    for share, state in zip(shares, states, strict=True):
                        mean.add_(state[name].detach().to(mean.device), alpha=float(share))
                    tensor.copy_(mean)
        return FusionResult(model)
