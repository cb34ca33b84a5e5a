"""Strategies in which every round ends with one model for all.

Hides: which way of fusing a round uses. Promises: fedavg, fedprox, ot, rebasin and
match-then-average are one algorithm and differ in the methods that rounds are fused by; plain
averaging holds one update at a time, and a round that is fused keeps them on disk.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.federated.architecture import Form, Tensors
from nafi.federated.disk import on_disk
from nafi.federated.kept import networks_of
from nafi.federated.statistics import head_names
from nafi.federated.strategies import strategy
from nafi.federated.strategy import (
    State,
    Strategy,
    Task,
    Update,
    class_table,
    plain,
    tensors_of,
)
from nafi.fusion import (
    CHANGES_AGREE,
    AligningMethod,
    Bayesian,
    Method,
    Nafi,
    Rebasin,
    Screen,
    Transport,
    as_real,
    check_budget_in_rounds,
    check_class_axis,
    check_max_width,
    fuse,
)
from nafi.graph import ModelSpec, holds_numbers, widened
from nafi.options import SWITCH, one_of, option

HEAD_STARTS = ("trained", "solved", "frozen")


@dataclass(frozen=True, eq=False)
class FusionRounds(Strategy[State]):
    """Clients train the global model, and what they send is fused into the next.

    head_start: the last layer from which clients train on where it was solved: the one they
        "trained", the "solved" one, or that, "frozen"
    """

    head_start: str = option(one_of(HEAD_STARTS), "trained", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_start != "trained" and self.head == "trained":
            raise InputError("head_start: no head is solved; give head='statistics', too")

    @abstractmethod
    def fused_by(self, round: int) -> Method | None:
        """How a round is fused, rounds counted from 0; None for the mean by samples."""

    @property
    def class_shares(self) -> bool:
        """Whether the mean of the output layer is by who has seen which class."""
        return False

    def check_classes(self, classes: int | None) -> None:
        counted = self.class_shares or "class_counts" in getattr(self.fused_by(0), "uses", ())
        if classes is not None and counted:
            check_class_axis(classes, self.architecture.spec)
        if classes is None and self.class_shares:
            raise InputError("class_shares: clients must count their classes; say how many")

    def start(self) -> State:
        """All clients start from the same weights, unless the first round matches them."""
        form = self.architecture.form
        alike = self.fused_by(0) is None
        drawn = self.architecture.drawn(form, self.seed) if alike else {}
        return self.state_type(0, form, drawn)

    def task(self, state: State, client: str) -> Task:
        return self._task(state, client, state.tensors, self._frozen(state))

    def _frozen(self, state: State) -> Tensors:
        """The last layer, if it was solved and is to stay."""
        if self.head_start != "frozen" or not state.round:
            return {}
        model = self.architecture.filled(state.form, state.tensors)
        names = head_names(model, self.architecture.example_inputs)
        return {name: state.tensors[name] for name in names}

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        method = self.fused_by(state.round)
        if method is not None:
            kept = [replace(update, tensors=on_disk(update.tensors)) for update in updates]
            return self._fused(state, kept, method)
        tensors = {**self._frozen(state), **self.averaged(state, updates)}
        return replace(state, round=state.round + 1, tensors=tensors)

    def with_head(self, state: State, head: Tensors) -> State:
        after = super().with_head(state, head)
        if self.head_start == "trained":
            return after
        return replace(after, tensors={**state.tensors, **plain(head)})

    def averaged(self, state: State, updates: Iterable[Update]) -> dict[str, Tensor]:
        """The mean of updates to the global model."""
        spec = self.architecture.spec_of(state.form)
        mean = partial(screened_average, self.screen) if self.screen.active else average
        return mean(updates, spec, state.tensors, self.class_shares)

    def model(self, state: State) -> nn.Module:
        tensors = state.tensors or self.architecture.drawn(state.form, self.seed)
        return self.architecture.filled(state.form, tensors).eval()

    def join(self, state: State, update: Update, weight: int) -> State:
        """Take in a model that a late client trained by itself, from weights of its own.

        Its neurons are matched to those of the global model, which keeps its form and counts as
        `weight` samples; normalisation is treated as in the first round. The round does not change.
        """
        if not state.tensors:
            raise InputError("there is no global model to join before the first round")
        late = self.architecture.filled(self.architecture.form, update.tensors)
        first = self.fused_by(0)
        method = first if isinstance(first, Nafi) else Nafi(**_batchnorm_of(first))
        # The global model says how wide; two models have no usual.
        alike = replace(
            method,
            seed=self.seed,
            max_width=dict(state.form.widths),
            budget=None,
            clip=None,
            trim=0.0,
        )
        result = fuse(
            [self.model(state), late],
            self.architecture.example_inputs,
            alike,
            sample_counts=[weight, update.samples],
        )
        tensors = tensors_of(result.model, state.tensors)
        return replace(state, form=Form(result.widths), tensors=tensors)

    def _fused(self, state: State, updates: list[Update], method: Method) -> State:
        frozen = self._frozen(state)
        states = [{**frozen, **update.tensors} for update in updates]
        models = networks_of(self.architecture, state.form, states, method)
        spec = self.architecture.spec_of(state.form)
        if len(models) == 1:
            return replace(state, round=state.round + 1, tensors=dict(updates[0].tensors))
        result = fuse(
            models,
            self.architecture.example_inputs,
            self.seeded(method),
            spec=spec,
            names=[f"client {u.client}" for u in updates],
            **method.used(
                class_counts=class_table(u.class_counts for u in updates),
                sample_counts=[u.samples for u in updates],
            ),
        )
        form = Form(result.widths or state.form.widths)
        tensors = tensors_of(result.model, spec.axes)
        return replace(state, round=state.round + 1, form=form, tensors=tensors)


def _batchnorm_of(method: Method | None) -> dict[str, Any]:
    return {"batchnorm": method.batchnorm} if isinstance(method, AligningMethod) else {}


@strategy("fedavg")
@dataclass(frozen=True, eq=False)
class FedAvg(FusionRounds):
    """All start from the same weights, and the mean by samples is the next start.

    class_shares: average the output layer by who has seen which class; in all other layers clients
        then count the same, as in `nafi.fuse`. Without it, all is the mean by samples
    clip, trim: against clients that send harmful weights, as in `nafi.fuse`; averaging then holds
        all updates at once
    """

    class_shares: bool = option(SWITCH, False)
    clip: float | None = None
    trim: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        Screen(self.clip, self.trim)  # refuses what makes no sense

    @property
    def screen(self) -> Screen:
        return Screen(self.clip, self.trim)

    def fused_by(self, round: int) -> Method | None:
        return None


@strategy("fedprox")
@dataclass(frozen=True, eq=False)
class FedProx(FedAvg):
    """fedavg whose clients are pulled to the weights that they start from, see `Training`."""

    defaults: ClassVar[Mapping[str, Any]] = {"proximal": 0.01}


@dataclass(frozen=True, eq=False)
class MatchedRounds(FusionRounds):
    """Clients start on their own, and the first round matches their neurons.

    method: how; normalisation is attached or averaged
    """

    method: AligningMethod = field(default_factory=Nafi)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(["attach", "average"]).check(self.method.batchnorm, "batchnorm")
        self.method.check_in_rounds()
        check_max_width(getattr(self.method, "max_width", None), self.architecture.spec)
        if isinstance(self.method, Bayesian) and self.method.budget is not None:
            model, spec = self.architecture.network(self.architecture.form)
            check_budget_in_rounds(self.method.budget, model.eval(), spec)

    def fused_by(self, round: int) -> Method | None:
        return self.method


@strategy("ot")
@dataclass(frozen=True, eq=False)
class TransportRounds(MatchedRounds):
    """Every round is fused by optimal transport.

    Normalisation is averaged: attached in every round, its statistics would start anew each time.
    """

    method_kind: ClassVar[type[Method] | None] = Transport
    defaults: ClassVar[Mapping[str, Any]] = {"batchnorm": "average"}

    method: AligningMethod = field(default_factory=lambda: Transport(batchnorm="average"))


@strategy("rebasin")
@dataclass(frozen=True, eq=False)
class RebasinRounds(MatchedRounds):
    """Every round is fused by Git Re-Basin, with normalisation averaged."""

    method_kind: ClassVar[type[Method] | None] = Rebasin
    defaults: ClassVar[Mapping[str, Any]] = {"batchnorm": "average"}

    method: AligningMethod = field(default_factory=lambda: Rebasin(batchnorm="average"))


@strategy("match-then-average")
@dataclass(frozen=True, eq=False)
class MatchThenAverage(MatchedRounds):
    """The first round is matched, "nafi" by default; after that rounds are those of fedavg.

    With `proximal`, they are those of fedprox. What the method does against harmful weights is done
    in all rounds.

    class_shares: as in fedavg, from the second round on
    """

    method_kind: ClassVar[type[Method] | None] = AligningMethod

    method: AligningMethod = field(default_factory=Nafi)
    class_shares: bool = option(SWITCH, False)

    @property
    def screen(self) -> Screen:
        return self.method.screen

    def fused_by(self, round: int) -> Method | None:
        return self.method if round == 0 else None


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


def screened_average(
    screen: Screen,
    updates: Iterable[Update],
    spec: ModelSpec,
    before: Mapping[str, Tensor],
    class_shares: bool,
) -> dict[str, Tensor]:
    """As `average`, of what a screen leaves; all updates are in memory.

    Clients are compared by how they changed what they were sent. Rows of a class are also compared
    among those that say they have seen it.
    """
    sent = list(updates)
    if not sent:
        raise InputError("no updates to average")
    first = sent[0].tensors
    numbers = [name for name in first if holds_numbers(first[name])]
    changes = screen.clipped_changes(
        {name: _changes(sent, name, before) for name in numbers}, spec.tensors
    )
    heard = _heard(screen, list(changes.values()))
    cut = max(0, screen.cut(len(sent)) - int((~heard).sum()))
    table = class_table(update.class_counts for update in sent) if class_shares else None
    claims = None if table is None else _believed(screen, table, heard, changes, spec)
    samples = screen.counts(np.array([update.samples for update in sent], dtype=np.float64))
    if class_shares and claims is None:
        raise InputError("class_shares: not all clients sent class counts")
    mean = {}
    for name, tensor in first.items():
        kept = before.get(name, tensor)
        if name not in changes:
            # Counters and positions: no client's word for them, where there is another.
            mean[name] = kept
            continue
        each = torch.ones(len(sent)) if claims is not None else torch.as_tensor(samples)
        weights = (each * heard).double().reshape(-1, *[1] * tensor.ndim)
        axis = None if claims is None else spec.tensors[name].class_axis(claims.shape[1])
        if claims is not None and axis is not None:
            weights = claims.reshape(
                len(sent), *[-1 if a == axis else 1 for a in range(tensor.ndim)]
            )
        moved = screen.mean(changes[name], weights > 0, weights, cut)
        base = before[name].double() if name in before else torch.zeros(())
        known = (weights > 0).any(dim=0)
        mean[name] = torch.where(known, base + moved, kept.double()).to(tensor.dtype)
    return mean


def _changes(sent: list[Update], name: str, before: Mapping[str, Tensor]) -> Tensor:
    """(S, ...) how clients changed a tensor; the tensor itself where they were sent none."""
    start = before[name].double() if name in before else 0.0
    return torch.stack([as_real(update.tensors[name], name) for update in sent]) - start


def _heard(screen: Screen, changes: list[Tensor]) -> Tensor:
    """(S,) which clients are heard, by all that they changed."""
    flat = torch.cat([change.flatten(1) for change in changes], dim=1)
    return screen.heard(flat, torch.ones_like(flat, dtype=torch.bool), CHANGES_AGREE)


def _believed(
    screen: Screen,
    table: Sequence[Sequence[int]],
    heard: Tensor,
    changes: Mapping[str, Tensor],
    spec: ModelSpec,
) -> Tensor:
    """(S, K) the class counts that rows of the output layer are weighted by.

    Of those that say they have seen a class, who contradicts the others is not heard about it.
    """
    counts = np.array(table, dtype=np.float64)
    claims = torch.from_numpy(screen.claims(counts)) * heard[:, None]
    classes = claims.shape[1]
    rows = [
        change for name, change in changes.items() if spec.tensors[name].class_axis(classes) == 0
    ]
    for label in range(classes if rows and screen.trim else 0):
        who = torch.nonzero(claims[:, label] > 0).flatten()
        if len(who) > 2:
            about = _heard(screen, [change[who, label].reshape(len(who), -1) for change in rows])
            claims[who, label] *= about
    return claims


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
