"""The last step where there is time for it: some training on the probe, without labels.

Hides: the loop. Promises: the fused network is trained to say what the ensemble of its clients
says; part of the probe is held out, and the weights that do best on it are kept, so that on those
inputs the result is never further from the ensemble than it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import InputError
from nafi.fusion.clients import Clients, check_clients
from nafi.fusion.ensemble import shares_of, weighted_sum
from nafi.fusion.judge import agreement, outputs_of
from nafi.fusion.method import Progress
from nafi.fusion.probe import batch_size
from nafi.fusion.result import FusionResult
from nafi.fusion.synthetic import read_or_make
from nafi.graph import Inputs, call, copy_network, evaluating, returned_tensors

HELD_OUT = 0.25
_EVERY = 10  # steps between two looks at what is held out


def distill(
    result: FusionResult,
    models: Sequence[nn.Module],
    probe: object,
    *,
    class_counts: npt.ArrayLike | None = None,
    sample_counts: npt.ArrayLike | None = None,
    steps: int = 200,
    rate: float = 3e-4,
    batch: int = 64,
    seed: int = 0,
    progress: Progress | None = None,
) -> FusionResult:
    """Train a fused network to say what the ensemble of its clients says; no labels are needed.

    result: of `nafi.fuse`; models, probe, class_counts, sample_counts: as that took them
    steps, rate, batch: of Adam, on three quarters of the probe. Normalisation keeps its statistics

    `result.diagnostics["distilled"]` has the error on held-out inputs, before and after. A head
    that was solved from labels is trained away from them: solve it again afterwards.
    """
    clients = check_clients(models, class_counts, sample_counts, None)
    specs = [result.architecture, *(body.architecture for body in result.bodies)]
    examples = next((spec.example_inputs for spec in specs if spec is not None), None)
    if examples is None:
        raise InputError(
            f"distill: method {result.diagnostics.get('method')} knows nothing of its inputs; give "
            "nafi.fuse(..., distill=200) instead"
        )
    report = progress or (lambda step, done, total: None)
    inputs = read_or_make(probe, clients.models, examples, report)
    found = distill_on(
        result, clients, inputs, report, steps=steps, rate=rate, batch=batch, seed=seed
    )
    return replace(found, scores=None, agreement=agreement(clients, found.model, inputs))


def distill_on(
    result: FusionResult,
    clients: Clients,
    inputs: Inputs,
    progress: Progress,
    *,
    steps: int = 200,
    rate: float = 3e-4,
    batch: int = 64,
    seed: int = 0,
) -> FusionResult:
    """The same on a probe that was read, for clients that were checked."""
    _check_numbers(steps=steps, rate=rate, batch=batch)
    count = batch_size(inputs)
    held = torch.arange(max(1, round(HELD_OUT * count)))
    rest = torch.arange(len(held), count)
    if not len(rest):
        raise InputError("probe: found one input, expected some dozens")
    student = copy_network(result.model).eval()
    training = _Training(student, inputs, _targets(clients, inputs), held)
    before = training.best
    generator = torch.Generator().manual_seed(seed)
    learnt = [p for p in student.parameters() if p.is_floating_point()]
    optimiser = torch.optim.Adam([p.requires_grad_(True) for p in learnt], lr=rate)
    for step in range(steps):
        progress("distilling", step, steps)
        drawn = rest[torch.randint(len(rest), (min(batch, len(rest)),), generator=generator)]
        optimiser.zero_grad()
        with torch.enable_grad():
            training.error(drawn).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if step % _EVERY == _EVERY - 1 or step == steps - 1:
            training.look()
    student.load_state_dict(training.state)
    distilled = {"before": before, "after": training.best, "steps": steps}
    diagnostics = {**result.diagnostics, "distilled": distilled}
    return replace(result, model=student, diagnostics=diagnostics)


def _check_numbers(**numbers: Any) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"{name}: found {value!r}, expected a number above 0")


def _targets(clients: Clients, inputs: Inputs) -> Tensor:
    """What the ensemble says; clients weigh in it what they weigh in the fusion."""
    said = [outputs_of(model, inputs) for model in clients.models]
    if any(len(leaves) != 1 or not leaves[0].is_floating_point() for leaves in said):
        raise InputError("only networks that return one tensor of numbers can be distilled")
    return weighted_sum(torch.stack([leaves[0] for leaves in said]), *shares_of(clients))


class _Training:
    """A network on its way to the targets; the state that did best on what is held out."""

    def __init__(self, model: nn.Module, inputs: Inputs, targets: Tensor, held: Tensor) -> None:
        self.model, self.inputs, self.held = model, inputs, held
        self.targets = targets.to(next(model.parameters()))
        self.size = batch_size(inputs)
        self.best = float("inf")
        self.look()

    def error(self, rows: Tensor) -> Tensor:
        """The mean squared difference at some inputs."""
        part = pytree.tree_map(lambda leaf: self._at(leaf, rows), self.inputs)
        (outputs,) = returned_tensors(call(self.model, part))
        return (outputs - self.targets[rows]).square().mean()

    def _at(self, leaf: Any, rows: Tensor) -> Any:
        batched = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == self.size
        return leaf[rows] if batched else leaf

    def look(self) -> None:
        """Keep the state if it does better than all before."""
        with evaluating(self.model):
            found = float(self.error(self.held))
        if found < self.best:
            self.best = found
            self.state = {n: t.detach().clone() for n, t in self.model.state_dict().items()}
