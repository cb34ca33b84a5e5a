"""The rounds of a federation, whoever carries its messages.

Hides: which updates are used, records, checkpoints and how a run is resumed. Promises: in one
process or over a network, the same updates give the same model and the same record; a run that was
killed at any moment and resumed ends with the same bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from nafi.errors import InputError, NafiError, few
from nafi.federated.acceptance import Acceptance, QuorumError
from nafi.federated.callbacks import Callback, Listeners
from nafi.federated.codec import pack
from nafi.federated.messages import read_state, write_state
from nafi.federated.strategy import Records, State, Strategy, Task, Update, size_of, tensors_of
from nafi.files import remove_leftovers
from nafi.graph import copy_network, holds_numbers

log = logging.getLogger(__name__)
_LONGEST = 300
Record = dict[str, Any]
# Told what is under way, how many steps are done and how many there are.
Progress = Callable[[str, int, int], None]
Evaluate = Callable[[nn.Module], Mapping[str, float]]
# What came of a client's task: its update and loss, or why there is none.
Outcome = tuple[Update, float] | Exception


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: the model, the state it comes from, and a record for each round."""

    model: nn.Module
    state: State
    records: Records


@dataclass
class Round:
    """One round under way: what was sent, who delivered and who was refused.

    clients: those that take part, in the order in which their updates are used
    """

    strategy: Strategy
    state: State
    clients: Sequence[str]
    acceptance: Acceptance
    tell: Progress
    tasks: dict[str, Task] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    down: int = 0
    up: int = 0

    def __post_init__(self) -> None:
        self.started = time.perf_counter()
        self.needed = self.acceptance.needed(len(self.clients))
        architecture, form = self.strategy.architecture, self.state.form
        self.shapes = architecture.shapes(form)
        model, spec = architecture.network(form)
        tensors = tensors_of(model, spec.axes)
        self.counters = {n: t for n, t in tensors.items() if not holds_numbers(t)}
        self.done = self.state.round * len(self.clients)
        self.total = self.strategy.rounds * len(self.clients)
        self.tell(self.label, self.done, self.total)

    @property
    def label(self) -> str:
        step = f", {self.state.awaiting}" if self.state.awaiting else ""
        return f"round {self.state.round + 1} of {self.strategy.rounds}{step}"

    def hand_out(self) -> Iterator[tuple[str, Task]]:
        """What each client is asked to do."""
        for client in self.clients:
            task = self.strategy.next_task(self.state, client)
            self.tasks[client] = task
            self.down += size_of(task.tensors) + size_of(task.extras)
            yield client, task

    def finish(self, outcomes: Iterable[Outcome]) -> tuple[State, Record]:
        """The state after the round; outcomes: one for each client, in their order."""
        try:
            after = self.strategy.advance(self.state, self._usable(outcomes))
        except NafiError as error:
            self._check_quorum(error)
            raise
        self._check_quorum()
        self._check_finite(after)
        losses = [loss for loss in self.losses if isfinite(loss)]
        return after, {
            "round": self.state.round + 1,
            "clients": len(self.clients),
            "refused": self.refused,
            "bytes_down": self.down,
            "bytes_up": self.up,
            "loss": round(fmean(losses), 5) if losses else None,
            "seconds": round(time.perf_counter() - self.started, 3),
        }

    def _usable(self, outcomes: Iterable[Outcome]) -> Iterator[Update]:
        """The updates that can be used, one after the other."""
        for client, outcome in zip(self.clients, outcomes, strict=True):
            self.done += 1
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                update, loss = _delivered(outcome)
                task = self.tasks.pop(client)
                self.acceptance.check(update, client, task, self.shapes)
            except Exception as error:  # whatever went wrong on the client's side
                self.refused[client] = _short(f"{type(error).__name__}: {error}")
                log.warning("%s: client %s refused: %s", self.label, client, self.refused[client])
                self.tell(f"{self.label}, client {client} refused", self.done, self.total)
                continue
            self.up += size_of(update.tensors) + size_of(update.extras)
            self.losses.append(loss)
            loss_text = f", loss {loss:.3f}" if isfinite(loss) else ""
            self.tell(f"{self.label}, client {client}{loss_text}", self.done, self.total)
            yield self._with_counters_as_sent(update, task)

    def _with_counters_as_sent(self, update: Update, task: Task) -> Update:
        """The update with counters and indices as they were sent.

        They cannot be averaged: one client's would be everybody's.
        """
        fixed = {n: task.tensors.get(n, t) for n, t in self.counters.items() if n in update.tensors}
        return replace(update, tensors={**update.tensors, **fixed})

    def _check_quorum(self, cause: Exception | None = None) -> None:
        if len(self.losses) < self.needed:
            reasons = "; ".join(f"client {c}: {why}" for c, why in list(self.refused.items())[:3])
            raise QuorumError(
                f"{self.label}: {len(self.losses)} of {len(self.clients)} clients delivered, "
                f"{self.needed} are needed ({reasons}). The rounds before are kept; resume to try "
                "again"
            ) from cause

    def _check_finite(self, after: State) -> None:
        """What clients sent is finite, and so is nearly everything that can come of it."""
        tensors = pack(after)[1]
        bad = [
            name.removeprefix("tensors/")
            for name, tensor in tensors.items()
            if holds_numbers(tensor) and not bool(tensor.isfinite().all())
        ]
        if bad:
            raise NafiError(
                f"{self.label}: {few(bad)} became NaN or infinite. The rounds before are kept; "
                "limit what clients can send with max_norm or a screen, or lower the rate"
            )


def _delivered(outcome: Any) -> tuple[Update, float]:
    """An update and its loss, from whatever a client's work returned."""
    if not isinstance(outcome, tuple | list) or len(outcome) != 2:
        raise InputError(f"found {type(outcome).__name__}, expected an update and its loss")
    update, loss = outcome
    if not isinstance(update, Update):
        raise InputError(f"update: found {type(update).__name__}, expected Update")
    try:
        return update, float(loss)
    except (TypeError, ValueError):
        raise InputError(f"loss: found {loss!r}, expected a number") from None


def _short(text: str) -> str:
    """A text that comes from a client, fit for a line of a log and for a record."""
    if len(text) > _LONGEST:  # the end of a traceback says what it was
        text = f"{text[: _LONGEST // 3]} ... {text[-2 * _LONGEST // 3 :]}"
    return "".join(c if c.isprintable() else " " for c in text)


def conduct(
    strategy: Strategy,
    clients: Callable[[], Sequence[str]],
    carry: Callable[[Round], tuple[State, Record]],
    acceptance: Acceptance,
    *,
    evaluate: Evaluate | None = None,
    checkpoint: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Run a strategy to its end.

    clients: who is there, asked before each round
    carry: takes a round's tasks to its clients, and finishes it with what comes of them

    For the rest see `simulate`.
    """
    listeners = Listeners(callbacks)
    strategy.check_classes(acceptance.classes)
    state: State = strategy.start()
    records: Records = []
    model: nn.Module | None = None
    if checkpoint is not None:
        remove_leftovers(checkpoint)
    if checkpoint is not None and checkpoint.exists():
        if not resume:
            raise InputError(f"{checkpoint} exists already: resume it, or give another name")
        state, records, settings = read_state(checkpoint, strategy.state_type)
        _check_same_run(checkpoint, settings, strategy.settings())
        strategy.check_state(state)
        if state.round > strategy.rounds:
            raise InputError(
                f"{checkpoint} holds {state.round} rounds, more than the {strategy.rounds} asked "
                "for; give another checkpoint, or remove it"
            )
        log.info("%s holds %d of %d rounds", checkpoint, state.round, strategy.rounds)
    tell = progress or (lambda step, done, total: None)
    while not strategy.finished(state):
        chosen = strategy.select(state, clients())
        if not state.awaiting:
            listeners.tell("round_started", state.round + 1, tuple(chosen))
        round = Round(strategy, state, chosen, acceptance, tell)
        state, record = carry(round)
        if records and records[-1]["round"] == record["round"]:
            record = _joined(records.pop(), record)
        record["widths"] = list(state.form.widths.values())
        if evaluate is not None and not state.awaiting:
            model = strategy.global_model(state)
            # It may do with its copy as it likes; the last one is the run's.
            scores = _scores(evaluate(copy_network(model)))
            scores_text = "".join(f", {name} {value:.4g}" for name, value in scores.items())
            tell(f"{round.label}{scores_text}", round.done, round.total)
            record |= scores
        records = [*records, record]
        if checkpoint is not None:
            write_state(checkpoint, state, records, strategy.settings())
        if not state.awaiting:
            listeners.tell("round_finished", record)
    run = Run(strategy.global_model(state) if model is None else model, state, records)
    listeners.tell("run_finished", run)
    return run


def _joined(before: Record, record: Record) -> Record:
    """One record of all messages of a round."""
    added = {name: before[name] + record[name] for name in ("bytes_down", "bytes_up", "seconds")}
    return {
        **before,
        **{name: round(value, 3) for name, value in added.items()},
        "clients": max(before["clients"], record["clients"]),
        "refused": {**before["refused"], **record["refused"]},
        "messages": before.get("messages", 1) + 1,
    }


def _check_same_run(
    checkpoint: Path, written: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    for name in expected:
        if written.get(name) != expected[name]:
            raise InputError(
                f"{checkpoint} is of another run: {name} was {written.get(name)}, now it is "
                f"{expected[name]}; give another checkpoint, or remove it"
            )


def _scores(values: object) -> dict[str, float]:
    """What `evaluate` returned, as numbers."""
    try:
        assert isinstance(values, Mapping)
        return {str(name): float(value) for name, value in values.items()}
    except (AssertionError, TypeError, ValueError):
        raise InputError(
            f"evaluate: returned {values!r}, expected a dict of numbers such as {{'accuracy': 0.9}}"
        ) from None
