"""The rounds of a federation, whoever carries its messages.

Hides: which updates are used, records, and how a run is resumed. Promises: in one process or over a
network, the same updates give the same model and the same record; a run that was killed at any
moment and resumed ends with the same bytes; no two runs share a checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from nafi.errors import InputError, NafiError, few
from nafi.federated.acceptance import Acceptance, QuorumError
from nafi.federated.callbacks import Callback, Listeners
from nafi.federated.checkpoint import read_run, write_state
from nafi.federated.codec import pack
from nafi.federated.seats import Seats
from nafi.federated.strategy import Records, State, Strategy, Task, Update, size_of, tensors_of
from nafi.files import remove_leftovers
from nafi.graph import copy_network, holds_numbers
from nafi.locks import locked

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
    """A finished run: the model, the state it comes from, and a record for each round.

    asked: client -> in how many rounds it was asked for weights, for `Noise.epsilon`
    """

    model: nn.Module
    state: State
    records: Records
    asked: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Round:
    """One round under way: what was sent, who delivered and who was refused.

    clients: those that take part, in the order in which their updates are used
    samples: of those that delivered, as they say
    """

    strategy: Strategy
    state: State
    clients: Sequence[str]
    acceptance: Acceptance
    tell: Progress
    tasks: dict[str, Task] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    samples: dict[str, int] = field(default_factory=dict)
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
            self.samples[client] = update.samples
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
    seats: Seats | None = None,
    facts: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Run:
    """Run a strategy to its end.

    clients: who is there, asked before each round
    carry: takes a round's tasks to its clients, and finishes it with what comes of them
    seats: what is remembered of clients beside weights
    facts: what else decides the result, beside the strategy's settings; plain data
    sizes: client -> how many samples it has, where that is known before the run

    For the rest see `simulate`.
    """
    course = _Course(
        strategy,
        clients,
        carry,
        acceptance,
        evaluate,
        checkpoint,
        progress or (lambda step, done, total: None),
        Listeners(callbacks),
        seats or Seats(),
        {
            **strategy.settings(),
            "code of the network": strategy.architecture.fingerprint,
            **(facts or {}),
        },
    )
    strategy.check_classes(acceptance.classes)
    with nullcontext() if checkpoint is None else locked(checkpoint):
        return course.run(*course.begun(resume, sizes or {}))


@dataclass
class _Course:
    """A run under way; its fields are what `conduct` was given."""

    strategy: Strategy
    clients: Callable[[], Sequence[str]]
    carry: Callable[[Round], tuple[State, Record]]
    acceptance: Acceptance
    evaluate: Evaluate | None
    checkpoint: Path | None
    tell: Progress
    listeners: Listeners
    seats: Seats
    settings: dict[str, Any]
    model: nn.Module | None = None

    def begun(self, resume: bool, sizes: Mapping[str, int]) -> tuple[State, Records]:
        """Where the run begins: with its checkpoint, if there is one."""
        start: State = self.strategy.start()
        if self.checkpoint is None:
            return start, []
        remove_leftovers(self.checkpoint)
        if not self.checkpoint.exists():
            return start, []
        if not resume:
            raise InputError(f"{self.checkpoint} exists already: resume it, or give another name")
        saved = read_run(self.checkpoint)
        saved.check_settings(self.settings, sizes)
        state: State = saved.state(self.strategy.state_type)
        self.strategy.check_state(state)
        if state.round > self.strategy.rounds:
            raise InputError(
                f"{self.checkpoint} holds {state.round} rounds, more than the "
                f"{self.strategy.rounds} asked for; ask for more, or give another name for the "
                "checkpoint to start a new run"
            )
        self.seats.table = dict(saved.seats)
        log.info("%s holds %d of %d rounds", self.checkpoint, state.round, self.strategy.rounds)
        return state, saved.records

    def run(self, state: State, records: Records) -> Run:
        """All rounds that are left."""
        while not self.strategy.finished(state):
            state, record = self._message(state)
            if records and records[-1]["round"] == record["round"]:
                record = _joined(records.pop(), record)
            records = [*records, record]
            if self.checkpoint is not None:
                write_state(self.checkpoint, state, records, self.settings, self.seats.table)
            if not state.awaiting:
                self.listeners.tell("round_finished", record)
        model = self.strategy.global_model(state) if self.model is None else self.model
        asked = {name: seat.asked for name, seat in self.seats.table.items()}
        run = Run(model, state, records, asked)
        self.listeners.tell("run_finished", run)
        return run

    def _message(self, state: State) -> tuple[State, Record]:
        """One message to clients and their answers: a round, or a part of one."""
        first = not state.awaiting
        if first:
            state = self.strategy.forget(state, self.seats.forgotten())
        present = self.clients()
        chosen = self.strategy.select(state, present)
        if first:
            self.listeners.tell("round_started", state.round + 1, tuple(chosen))
        round = Round(self.strategy, state, chosen, self.acceptance, self.tell)
        after, record = self.carry(round)
        if first:
            self.seats.close_round(present, chosen, round.samples)
        record["widths"] = list(after.form.widths.values())
        if self.evaluate is not None and not after.awaiting:
            record |= self._evaluated(round, after, self.evaluate)
        return after, record

    def _evaluated(self, round: Round, state: State, evaluate: Evaluate) -> dict[str, float]:
        self.model = self.strategy.global_model(state)
        # It may do with its copy as it likes; the last one is the run's.
        scores = _scores(evaluate(copy_network(self.model)))
        scores_text = "".join(f", {name} {value:.4g}" for name, value in scores.items())
        self.tell(f"{round.label}{scores_text}", round.done, round.total)
        return scores


def _joined(before: Record, record: Record) -> Record:
    """One record of all messages of a round: widths and scores are those after the last one."""
    added = {name: before[name] + record[name] for name in ("bytes_down", "bytes_up", "seconds")}
    return {
        **before,
        **{name: value for name, value in record.items() if value is not None},
        **{name: round(value, 3) for name, value in added.items()},
        "clients": max(before["clients"], record["clients"]),
        "refused": {**before["refused"], **record["refused"]},
        "messages": before.get("messages", 1) + 1,
    }


def _scores(values: object) -> dict[str, float]:
    """What `evaluate` returned, as numbers."""
    try:
        assert isinstance(values, Mapping)
        return {str(name): float(value) for name, value in values.items()}
    except (AssertionError, TypeError, ValueError):
        raise InputError(
            f"evaluate: returned {values!r}, expected a dict of numbers such as {{'accuracy': 0.9}}"
        ) from None
