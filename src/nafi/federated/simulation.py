"""A federation in one process, or in a few of one machine.

Hides: worker processes, and the files of a run that can be resumed. Promises: the model that a
real federation would come to; a run that was killed between any two rounds and resumed ends with
the same bytes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nafi.errors import InputError
from nafi.federated.messages import (
    read_state,
    task_from,
    task_to,
    update_from,
    update_to,
    write_state,
)
from nafi.federated.strategy import Records, State, Strategy, Task, Update, size_of

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
    progress: Progress | None = None,
) -> Run:
    """Run a strategy to its end.

    work: does a client's task; a `Trainer`, as a rule. With several workers it goes to each of
        their processes once, so it must be picklable.
    evaluate: looks at the global model after each round; its numbers go into the round's record
    checkpoint: a file that holds the run after each round; resume: go on with it if it exists
    progress: called with (what is done, steps done, steps in all)

    A record has the round, its clients, bytes down and up, counted from the tensors that are sent,
    seconds, the clients' mean loss, the widths of the model, and what `evaluate` found.
    """
    names = list(clients)
    if not names or len(set(names)) < len(names):
        raise InputError(f"clients: found {names!r}, expected names that differ")
    state = strategy.start()
    records: Records = []
    if checkpoint is not None and resume and checkpoint.exists():
        state, records = read_state(checkpoint)
    tell = progress or (lambda step, done, total: None)
    with _crew(work, workers) as crew:
        while not strategy.finished(state):
            state, record = _round(strategy, state, names, crew, tell)
            model = strategy.model(state)
            record["widths"] = list(state.form.widths.values())
            if evaluate is not None:
                record |= evaluate(model)
            records = [*records, record]
            if checkpoint is not None:
                write_state(checkpoint, state, records)
    return Run(strategy.model(state), state, records)


# Does several clients' tasks: (client, task) pairs in, results in the same order out.
_Crew = Callable[[Iterator[tuple[str, Task]]], Iterator[tuple[Update, float]]]


def _round(
    strategy: Strategy, state: State, names: Sequence[str], crew: _Crew, tell: Progress
) -> tuple[State, dict[str, Any]]:
    start = time.perf_counter()
    chosen = strategy.select(state, names)
    told = f"round {state.round + 1} of {strategy.rounds}"
    total = strategy.rounds * len(chosen)
    losses: list[float] = []
    sent = {"down": 0, "up": 0}
    tell(told, state.round * len(chosen), total)

    def tasks() -> Iterator[tuple[str, Task]]:
        for client in chosen:
            task = strategy.task(state, client)
            sent["down"] += size_of(task.tensors)
            yield client, task

    def updates() -> Iterator[Update]:
        for update, loss in crew(tasks()):
            sent["up"] += size_of(update.tensors)
            losses.append(loss)
            done = state.round * len(chosen) + len(losses)
            tell(f"{told}, client {update.client}, loss {loss:.3f}", done, total)
            yield update

    after = strategy.aggregate(state, updates())
    return after, {
        "round": after.round,
        "clients": len(chosen),
        "bytes_down": sent["down"],
        "bytes_up": sent["up"],
        "loss": round(sum(losses) / len(losses), 5),
        "seconds": round(time.perf_counter() - start, 3),
    }


@contextmanager
def _crew(work: Work, workers: int) -> Iterator[_Crew]:
    if workers == 1:
        yield lambda given: (work(client, task) for client, task in given)
        return
    # Fresh processes: forked ones would inherit the state of torch's threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _begin, (work,))
    try:

        def together(given: Iterator[tuple[str, Task]]) -> Iterator[tuple[Update, float]]:
            waiting = [pool.submit(_do, client, task_to(task)) for client, task in given]
            for future in waiting:
                content, loss = future.result()
                yield update_from(content), loss

        yield together
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_work: list[Work] = []


def _begin(work: Work) -> None:
    torch.set_num_threads(1)
    _work.append(work)


def _do(client: str, content: bytes) -> tuple[bytes, float]:
    update, loss = _work[0](client, task_from(content))
    return update_to(update), loss
