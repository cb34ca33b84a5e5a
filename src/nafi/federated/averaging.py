"""Strategies in which every round ends with one model for all.

Hides: which way of fusing a round uses. Promises: fedavg, fedprox, ot, rebasin and
match-then-average are one strategy that fuses in the first round by one method and after that by
another; plain averaging holds one update at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.federated.architecture import Form
from nafi.federated.strategy import State, Strategy, Task, Update, class_table, tensors_of
from nafi.fusion import FedAvg, Method, Nafi, fuse
from nafi.fusion.clients import check_class_axis
from nafi.fusion.screen import Screen, real
from nafi.fusion.widths import check_max_width
from nafi.graph.spec import ModelSpec, holds_numbers, widened
from nafi.options import SWITCH, one_of


@dataclass(frozen=True, eq=False)
class FusionRounds(Strategy):
    """Clients train the global model, and what they send is fused into the next.

    first, then: methods for the first round and for all others. Matched every round, normalisation
        is to be averaged (batchnorm="average"): attached, its statistics would start anew each time
    shared_start: whether all clients start from the same weights; else each draws its own, and the
        first round must match them
    class_shares: average the output layer by who has seen which class; in all other layers clients
        then count the same, as in `nafi.fuse`. Without it, all is the mean by samples
    screen: against clients that send harmful weights; averaging then holds all updates at once
    """

    first: Method = field(default_factory=FedAvg)
    then: Method = field(default_factory=FedAvg)
    shared_start: bool = True
    class_shares: bool = False
    screen: Screen = field(default_factory=Screen)

    def __post_init__(self) -> None:
        super().__post_init__()
        SWITCH.check(self.class_shares, "class_shares")
        batchnorm = getattr(self.first, "batchnorm", "attach")
        one_of(["attach", "average"]).check(batchnorm, "batchnorm")
        check_max_width(getattr(self.first, "max_width", None), self.architecture.spec)

    def start(self) -> State:
        form = self.architecture.form
        shared = self.architecture.drawn(form, self.seed) if self.shared_start else {}
        return State(0, form, shared)

    def task(self, state: State, client: str) -> Task:
        return self._task(state, client, state.tensors)

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        method = self.first if state.round == 0 else self.then
        if isinstance(method, FedAvg):
            _, spec = self.architecture.network(state.form)
            mean = partial(screened_average, self.screen) if self.screen.active else average
            tensors = mean(updates, spec, state.tensors, self.class_shares)
            return State(state.round + 1, state.form, tensors)
        return self._fused(state, list(updates), method)

    def model(self, state: State) -> nn.Module:
        tensors = state.tensors or self.architecture.drawn(state.form, self.seed)
        return self.architecture.filled(state.form, tensors).eval()

    def join(self, state: State, update: Update, weight: int) -> State:
        """Take in a model that a late client trained by itself, from weights of its own.

        Its neurons are matched to those of the global model, which keeps its form and counts as
        `weight` samples. The round does not change.
        """
        if not state.tensors:
            raise InputError("there is no global model to join before the first round")
        late = self.architecture.filled(self.architecture.form, update.tensors)
        method = self.first if isinstance(self.first, Nafi) else Nafi()
        widths = dict(state.form.widths)
        # Two models have no usual.
        alike = replace(method, seed=self.seed, max_width=widths, clip=None, trim=0.0)
        found = fuse(
            [self.model(state), late],
            self.architecture.example_inputs,
            alike,
            sample_counts=[weight, update.samples],
        )
        return State(state.round, Form(found.widths), tensors_of(found.model, state.tensors))

    def _fused(self, state: State, updates: list[Update], method: Method) -> State:
        models = [self.architecture.filled(state.form, u.tensors) for u in updates]
        _, spec = self.architecture.network(state.form)
        if len(models) == 1:
            return State(state.round + 1, state.form, dict(updates[0].tensors))
        found = fuse(
            models,
            self.architecture.example_inputs,
            replace(method, **({"seed": self.seed} if "seed" in method.option_names() else {})),
            spec=spec,
            names=[f"client {u.client}" for u in updates],
            **method.used(
                class_counts=class_table(updates), sample_counts=[u.samples for u in updates]
            ),
        )
        form = Form(found.widths or state.form.widths)
        return State(state.round + 1, form, tensors_of(found.model, spec.axes))


def average(
    updates: Iterable[Update], spec: ModelSpec, before: Mapping[str, Tensor], class_shares: bool
) -> dict[str, Tensor]:
    """The mean of updates by their samples, one update in memory at a time.

    class_shares: rows of the output layer weigh by the samples of their class instead, and clients
    count the same in all other layers; a class that nobody has seen keeps the row it had.
    """
    taken = iter(updates)
    first = next(taken, None)
    if first is None:
        raise InputError("no updates to average")
    if class_shares and first.class_counts is not None:
        check_class_axis(len(first.class_counts), spec)
    sums: dict[str, Tensor] = {}
    totals: dict[str, Tensor] = {}
    for update in chain([first], taken):
        for name, tensor in update.tensors.items():
            if not holds_numbers(tensor):
                sums.setdefault(name, tensor)
                continue
            weight = _weight(update, name, spec, class_shares)
            weighted = widened(tensor) * weight
            sums[name] = sums[name].add_(weighted) if name in sums else weighted
            totals[name] = totals[name] + weight if name in totals else weight
    mean = {}
    for name, value in sums.items():
        if name in totals:
            known = totals[name] > 0
            kept = before[name] if name in before else first.tensors[name]
            value = torch.where(known, value / torch.where(known, totals[name], 1.0), kept)
        mean[name] = value.to(first.tensors[name].dtype)
    return mean


def _held_to_usual(updates: list[Update], spec: ModelSpec, screen: Screen) -> list[Update]:
    """Updates with neurons that are too long made shorter, and counts that are too high lower."""
    if not updates:
        raise InputError("no updates to average")
    states = screen.clipped([update.tensors for update in updates], [spec] * len(updates))
    samples = screen.counts(np.array([update.samples for update in updates], dtype=np.float64))
    table = class_table(updates)
    classes = None if table is None else screen.counts(np.array(table, dtype=np.float64))
    rows = None if classes is None else classes.round().astype(int).tolist()
    assert samples is not None
    return [
        replace(
            update,
            tensors=states[s],
            samples=max(1, round(samples[s])),
            class_counts=update.class_counts if rows is None else tuple(rows[s]),
        )
        for s, update in enumerate(updates)
    ]


def screened_average(
    screen: Screen,
    updates: Iterable[Update],
    spec: ModelSpec,
    before: Mapping[str, Tensor],
    class_shares: bool,
) -> dict[str, Tensor]:
    """As `average`, of what a screen leaves; all updates are in memory."""
    given = _held_to_usual(list(updates), spec, screen)
    first = given[0].tensors
    mean = {}
    for name, tensor in first.items():
        if not holds_numbers(tensor):
            # Counters and positions: no client's word for them, where there is another.
            mean[name] = before.get(name, tensor)
            continue
        values = torch.stack([real(update.tensors[name], name) for update in given])
        weights = torch.stack([_weight(update, name, spec, class_shares) for update in given])
        weights = weights.reshape(len(given), *weights.shape[1:] or [1] * tensor.ndim)
        found = screen.mean(values, weights > 0, weights)
        kept = before.get(name, tensor)
        mean[name] = torch.where((weights > 0).any(dim=0), found, kept).to(tensor.dtype)
    return mean


def _weight(update: Update, name: str, spec: ModelSpec, class_shares: bool) -> Tensor:
    counts = update.class_counts
    if not class_shares:
        return torch.tensor(float(update.samples), dtype=torch.float64)
    if counts is None:
        raise InputError(f"class_shares: client {update.client} sent no class counts")
    axis = spec.tensors[name].class_axis(len(counts))
    if axis is None:
        return torch.tensor(1.0, dtype=torch.float64)
    form = [1] * len(spec.axes[name])
    form[axis] = len(counts)
    return torch.tensor(counts, dtype=torch.float64).reshape(form)
