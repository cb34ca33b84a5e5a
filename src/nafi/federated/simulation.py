"""A federation in one process, or in a few of one machine.

Hides: worker processes, and the files of a run that can be resumed. Promises: the model that a
real federation would come to; a run that was killed between any two rounds and resumed ends with
the same bytes.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from nafi.errors import InputError, NafiError
from nafi.federated.acceptance import Acceptance, QuorumError, UpdateError, shapes_of
from nafi.federated.messages import (
    read_state,
    task_from,
    task_to,
    update_from,
    update_to,
    write_state,
)
from nafi.federated.strategy import Records, State, Strategy, Task, Update, size_of

log = logging.getLogger(__name__)
Record = dict[str, Any]
# Told what is under way, how many steps are done and how many there are.
Progress = Callable[[str, int, int], None]
Work = Callable[[str, Task], tuple[Update, float]]
Evaluate = Callable[[nn.Module], Mapping[str, float]]


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: the model, the state it comes from, and a record for each round."""

    model: nn.Module
    state: State
    records: Records


def simulate(
    strategy: Strategy,
    clients: Sequence[str],
    work: Work,
    *,
    workers: int = 1,
    evaluate: Evaluate | None = None,
    checkpoint: Path | None = None,
    resume: bool = False,
    acceptance: Acceptance | None = None,
    progress: Progress | None = None,
) -> Run:
    """Run a strategy to its end.

    work: does a client's task; a `Trainer`, as a rule. With several workers it goes to each of
        their processes once, so it must be picklable.
    evaluate: looks at the global model after each round; its numbers go into the round's record
    checkpoint: a file that holds the run after each round; resume: go on with it if it exists
    acceptance: which updates are used, and how many a round needs; by default every client must
        deliver one that can be used, or the run ends with a `QuorumError`
    progress: called with (what is done, steps done, steps in all)

    A record has the round, its clients, who was refused and why, bytes down and up, counted from
    the tensors that are sent, seconds, the clients' mean loss, the widths that clients train next,
    and what `evaluate` found.
    """
    names = list(clients)
    if not names or len(set(names)) < len(names):
        raise InputError(f"clients: found {names!r}, expected names that differ")
    state = strategy.start()
    records: Records = []
    if checkpoint is not None and resume and checkpoint.exists():
        state, records, settings = read_state(checkpoint)
        _check_same_run(checkpoint, settings, strategy.settings())
    tell = progress or (lambda step, done, total: None)
    rules = acceptance or Acceptance()
    with _crew(work, workers) as crew:
        while not strategy.finished(state):
            chosen = strategy.select(state, names)
            state, record = _Round(strategy, state, rules, crew, tell).run(chosen)
            record["widths"] = list(state.form.widths.values())
            if evaluate is not None:
                found = evaluate(strategy.model(state))
                record |= {name: float(value) for name, value in found.items()}
            records = [*records, record]
            if checkpoint is not None:
                write_state(checkpoint, state, records, strategy.settings())
    return Run(strategy.model(state), state, records)


def _check_same_run(
    checkpoint: Path, found: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    for name in expected:
        if found.get(name) != expected[name]:
            raise InputError(
                f"{checkpoint} is of another run: {name} was {found.get(name)}, now it is "
                f"{expected[name]}; give another checkpoint, or remove it"
            )


# What came of a client's task: its update and loss, or why there is none.
_Outcome = tuple[Update, float] | Exception
# Does several clients' tasks: (client, task) pairs in, outcomes in the same order out.
_Crew = Callable[[Iterator[tuple[str, Task]]], Iterator[_Outcome]]


@dataclass
class _Round:
    """One round under way: what was sent, who delivered and who was refused."""

    strategy: Strategy
    state: State
    acceptance: Acceptance
    crew: _Crew
    tell: Progress
    tasks: dict[str, Task] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    classes: int | None = None
    down: int = 0
    up: int = 0

    def run(self, clients: Sequence[str]) -> tuple[State, Record]:
        start = time.perf_counter()
        needed = self.acceptance.needed(len(clients))
        self.tell(self.label, self.state.round * len(clients), self.strategy.rounds * len(clients))
        try:
            after = self.strategy.aggregate(self.state, self.updates(clients))
        except NafiError as error:
            self.check_quorum(needed, len(clients), error)
            raise
        self.check_quorum(needed, len(clients))
        told = [loss for loss in self.losses if isfinite(loss)]
        return after, {
            "round": after.round,
            "clients": len(clients),
            "refused": self.refused,
            "bytes_down": self.down,
            "bytes_up": self.up,
            "loss": round(fmean(told), 5) if told else None,
            "seconds": round(time.perf_counter() - start, 3),
        }

    @property
    def label(self) -> str:
        return f"round {self.state.round + 1} of {self.strategy.rounds}"

    def given(self, clients: Sequence[str]) -> Iterator[tuple[str, Task]]:
        for client in clients:
            task = self.strategy.task(self.state, client)
            self.tasks[client] = task
            self.down += size_of(task.tensors)
            yield client, task

    def updates(self, clients: Sequence[str]) -> Iterator[Update]:
        """The updates that can be used, one after the other."""
        shapes = shapes_of(self.strategy.architecture, self.state.form)
        total = self.strategy.rounds * len(clients)
        done = self.state.round * len(clients)
        for client, outcome in zip(clients, self.crew(self.given(clients)), strict=True):
            done += 1
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                update, loss = outcome
                self.acceptance.check(update, client, self.tasks.pop(client), shapes)
                self.check_alike(update)
            except Exception as error:  # whatever went wrong on the client's side
                self.refused[client] = f"{type(error).__name__}: {error}"
                log.warning("%s: client %s refused: %s", self.label, client, self.refused[client])
                self.tell(f"{self.label}, client {client} refused", done, total)
                continue
            self.up += size_of(update.tensors)
            self.losses.append(loss)
            self.tell(f"{self.label}, client {client}, loss {loss:.3f}", done, total)
            yield update

    def check_alike(self, update: Update) -> None:
        """Refuse an update that counts other classes than those before it."""
        classes = None if update.class_counts is None else len(update.class_counts)
        if self.losses and classes != self.classes:
            raise UpdateError(f"class counts: found {classes}, the clients before {self.classes}")
        self.classes = classes

    def check_quorum(self, needed: int, asked: int, cause: Exception | None = None) -> None:
        if len(self.losses) < needed:
            reasons = "; ".join(f"client {c}: {why}" for c, why in list(self.refused.items())[:3])
            raise QuorumError(
                f"{self.label}: {len(self.losses)} of {asked} clients delivered, {needed} are "
                f"needed ({reasons}). The rounds before are kept; resume to try again"
            ) from cause


@contextmanager
def _crew(work: Work, workers: int) -> Iterator[_Crew]:
    if workers == 1:
        yield lambda given: (_tried(work, client, task) for client, task in given)
        return
    pool = _Pool(work, workers)
    try:
        yield pool.outcomes
    finally:
        pool.close()


class _Pool:
    """Worker processes that are replaced when one of them dies."""

    def __init__(self, work: Work, workers: int) -> None:
        self.work, self.workers = work, workers
        self.processes = self._started()

    def outcomes(self, given: Iterator[tuple[str, Task]]) -> Iterator[_Outcome]:
        """In the order of the tasks; few more than there are workers are under way at a time."""
        waiting: deque[Future[tuple[bytes, float]] | Exception] = deque()
        for client, task in given:
            waiting.append(self._submitted(client, task))
            if len(waiting) > 2 * self.workers:
                yield _result(waiting.popleft())
        while waiting:
            yield _result(waiting.popleft())

    def close(self) -> None:
        self.processes.shutdown(wait=False, cancel_futures=True)

    def _submitted(self, client: str, task: Task) -> Future[tuple[bytes, float]] | Exception:
        content = task_to(task)
        for _ in range(2):
            try:
                return self.processes.submit(_do, client, content)
            except BrokenProcessPool:
                self.close()
                self.processes = self._started()
        return NafiError("worker processes die as soon as they are started")

    def _started(self) -> ProcessPoolExecutor:
        # Fresh processes: forked ones would inherit the state of torch's threads.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self.workers, context, _begin, (self.work,))


def _result(future: Future[tuple[bytes, float]] | Exception) -> _Outcome:
    if isinstance(future, Exception):
        return future
    try:
        content, loss = future.result()
        return update_from(content), loss
    except Exception as error:  # also of a process that was killed
        return error


def _tried(work: Work, client: str, task: Task) -> _Outcome:
    try:
        return work(client, task)
    except Exception as error:
        return error


_work: list[Work] = []


def _begin(work: Work) -> None:
    torch.set_num_threads(1)
    _work.append(work)


def _do(client: str, content: bytes) -> tuple[bytes, float]:
    update, loss = _work[0](client, task_from(content))
    return update_to(update), loss
