"""fedavg: the mean of all tensors by position.

Hides: nothing. Promises: what a federation that shares its initialisation would compute, and what
fails for models that do not.
"""

from __future__ import annotations

import copy

import torch

from nafi.errors import InputError
from nafi.fusion.base import FusionResult, Task, fuser
from nafi.graph.spec import holds_numbers, widened
from nafi.graph.trace import named_tensors


@fuser("fedavg")
def fedavg(task: Task) -> FusionResult:
    """Average weights and statistics by sample counts; counters come from the first model."""
    clients = task.clients
    states = [named_tensors(model) for model in clients.models]
    for state, label in zip(states, clients.names, strict=True):
        for name, tensor in state.items():
            if tensor.shape != states[0][name].shape:
                raise InputError(
                    f"{label}: {name} has shape {tuple(tensor.shape)}, in {clients.names[0]} "
                    f"{tuple(states[0][name].shape)}; fedavg needs equal widths, nafi does not"
                )
    samples = clients.sample_counts
    shares = [1 / len(states)] * len(states) if samples is None else samples / samples.sum()
    task.progress("averaging", 0, 1)
    model = copy.deepcopy(clients.models[0]).eval()
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            if holds_numbers(tensor):
                mean = torch.zeros_like(widened(tensor))
                for share, state in zip(shares, states, strict=True):
                    mean.add_(state[name].detach().to(mean.device), alpha=float(share))
                tensor.copy_(mean)
    return FusionResult(model)
