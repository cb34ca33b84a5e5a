"""Layers that take their sizes from the first inputs, as nn.LazyLinear.

Hides: how torch makes them ordinary layers. Promises: afterwards a network has no such layers, and
its weights are those that it had, if it had any.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from nafi.errors import SpecError
from nafi.graph.inputs import Inputs, call, first_line


def has_lazy_layers(model: nn.Module) -> bool:
    """Whether some layers have never run."""
    return any(isinstance(module, LazyModuleMixin) for module in model.modules())


def lacks_weights(model: nn.Module) -> bool:
    """Whether some layers do not even have sizes."""
    return any(map(is_lazy, (*model.parameters(), *model.buffers())))


def materialise(model: nn.Module, inputs: Inputs) -> None:
    """Run a network with lazy layers once, in place; weights that it lacks have no meaning then."""
    if not has_lazy_layers(model):
        return
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            call(model, inputs)
    except Exception as error:  # the network's own code
        raise SpecError(
            f"{type(model).__name__} has lazy layers and does not run on the example inputs: "
            f"{first_line(error)}"
        ) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
