"""Training on a probe, without labels, towards what the ensemble of the clients says.

Hides: the loop. Promises: part of the probe is held out, and the parameters that do best on it are
kept, so that on those inputs the result is never further from the ensemble than it was.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import torch
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.fusion.clients import Clients
from nafi.fusion.ensemble import shares_of, weighted_sum
from nafi.fusion.held_out import held_out
from nafi.fusion.judge import outputs_of
from nafi.fusion.probe import batch_size
from nafi.fusion.recording import chosen_inputs
from nafi.graph import Inputs, call, evaluating, first_line, returned_tensors

_EVERY = 10  # steps between two looks at what is held out


def imitate(
    network: nn.Module,
    clients: Clients,
    inputs: Inputs,
    progress: Callable[[int], None],
    *,
    steps: int,
    rate: float,
    batch: int,
    seed: int,
    by_input: Tensor | None = None,
) -> tuple[float, float]:
    """Train all parameters of a network, in place; the error on held-out inputs before and after.

    progress: called with the number of steps that are done
    steps, rate, batch: of Adam, on three of every four inputs of the probe
    by_input: (S, inputs) how much each client's word counts for each input, if that differs
    """
    check_trainable(inputs)
    numbers = torch.arange(batch_size(inputs))
    held, rest = numbers[held_out(numbers)], numbers[~held_out(numbers)]
    training = _Training(network, inputs, _targets(clients, inputs, by_input), held)
    before = training.best
    if not isfinite(before):
        raise InputError(
            "probe: outputs on it are NaN, or too large to be trained towards; are the inputs "
            "prepared as in training?"
        )
    generator = torch.Generator().manual_seed(seed)
    learnt = [p for p in network.parameters() if p.is_floating_point()]
    optimiser = torch.optim.Adam([p.requires_grad_(True) for p in learnt], lr=rate)
    for step in range(steps):
        progress(step)
        drawn = rest[torch.randint(len(rest), (min(batch, len(rest)),), generator=generator)]
        optimiser.zero_grad()
        with torch.enable_grad():
            training.error(drawn).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if step % _EVERY == _EVERY - 1 or step == steps - 1:
            training.look()
    network.load_state_dict(training.state)
    network.zero_grad(set_to_none=True)  # or it would keep another copy of all its parameters
    return before, training.best


def check_trainable(inputs: Inputs) -> None:
    """Refuse a probe of which nothing can be held out, and a place where nothing has gradients."""
    if batch_size(inputs) < 2:
        raise InputError("probe: found one input, expected some dozens")
    if torch.is_inference_mode_enabled():
        raise InputError(
            "nothing can be trained within torch.inference_mode(); call nafi outside of it"
        )


def check_imitable(clients: Clients, inputs: Inputs, student: nn.Module | None = None) -> None:
    """Refuse networks of whose outputs no mean can be learnt.

    inputs: any on which networks run; student: the network that is to learn it, if there is one
    """
    shape = None if student is None else _said(student, inputs, "the fused network").shape
    for model, name in zip(clients.models, clients.names, strict=True):
        found = _said(model, inputs, name).shape
        if shape is not None and found != shape:
            raise InputError(
                f"{name} returns shape {tuple(found)}, the fused network {tuple(shape)}; give the "
                "models that were fused"
            )


def _said(model: nn.Module, inputs: Inputs, name: str) -> Tensor:
    """What a network returns, if that is a row of numbers for each input."""
    try:
        leaves = outputs_of(model, inputs)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"{name} does not run on inputs of the fused network: {first_line(error)}; give the "
            "models that were fused"
        ) from None
    if len(leaves) != 1 or not leaves[0].is_floating_point():
        returned = f"{len(leaves)} tensors" if len(leaves) != 1 else str(leaves[0].dtype)
        raise InputError(
            f"{name} returns {returned}; only networks that return one tensor of numbers can be "
            "trained on a probe"
        )
    if not leaves[0].ndim or len(leaves[0]) != batch_size(inputs):
        raise InputError(
            f"{name} returns shape {tuple(leaves[0].shape)} for {batch_size(inputs)} inputs; only "
            "networks that return a row for each input can be trained on a probe"
        )
    return leaves[0]


def _targets(clients: Clients, inputs: Inputs, by_input: Tensor | None) -> Tensor:
    """What the ensemble says; clients weigh in it what they weigh in the fusion."""
    named = zip(clients.models, clients.names, strict=True)
    outputs = torch.stack([_said(model, inputs, name) for model, name in named])
    return weighted_sum(outputs, *shares_of(clients), by_input)


class _Training:
    """A network on its way to the targets; the state that did best on what is held out."""

    def __init__(self, model: nn.Module, inputs: Inputs, targets: Tensor, held: Tensor) -> None:
        self.model, self.inputs, self.held = model, inputs, held
        self.targets = targets.to(next(model.parameters()))
        self.best = float("inf")
        self.look()

    def error(self, rows: Tensor) -> Tensor:
        """The mean squared difference at some inputs."""
        (outputs,) = returned_tensors(call(self.model, chosen_inputs(self.inputs, rows)))
        return (outputs - self.targets[rows]).square().mean()

    def look(self) -> None:
        """Keep the state if it does better than all before."""
        with evaluating(self.model):
            found = float(self.error(self.held))
        if found < self.best:
            self.best = found
            self.state = {n: t.detach().clone() for n, t in self.model.state_dict().items()}
