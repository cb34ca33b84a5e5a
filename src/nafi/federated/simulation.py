"""A federation in one process, or in a few of one machine.

Hides: worker processes. Promises: the model that a real federation would come to.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nafi.errors import InputError, NafiError
from nafi.federated.acceptance import Acceptance
from nafi.federated.callbacks import Callback
from nafi.federated.messages import task_from, task_to, update_from, update_to
from nafi.federated.run import Evaluate, Outcome, Progress, Run, conduct
from nafi.federated.strategy import Strategy, Task, Update
from nafi.options import whole
from nafi.workers import begin_worker

Work = Callable[[str, Task], tuple[Update, float]]
# Does several clients' tasks: (client, task) pairs in, outcomes in the same order out.
Crew = Callable[[Iterator[tuple[str, Task]]], Iterator[Outcome]]


def simulate(
    strategy: Strategy,
    clients: Sequence[str],
    work: Work,
    *,
    workers: int = 1,
    evaluate: Evaluate | None = None,
    checkpoint: Path | str | None = None,
    resume: bool = False,
    acceptance: Acceptance | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Run a strategy to its end.

    work: does a client's task; a `Trainer`, as a rule. With several workers it goes to each of
        their processes once, so it must be picklable.
    evaluate: looks at a copy of the global model after each round; its numbers go into the round's
        record
    checkpoint: a file that holds the run after each round; resume: continue it if it exists
    acceptance: which updates are used, and how many a round needs; by default every client must
        deliver one that can be used, or the run ends with a `QuorumError`. Its classes are by
        default those of `work`, if that is a `Trainer`
    workers: processes that train; 1 is this one
    progress: called with (what is done, steps done, steps in all)
    callbacks: told when a round starts, when it is finished with its record, and when all are

    A record has the round, its clients, who was refused and why, bytes down and up, counted from
    the tensors that are sent, seconds, the clients' mean loss, the widths that clients train next,
    and what `evaluate` found.
    """
    names = list(clients)
    whole(1).check(workers, "workers")
    if not names or len(set(names)) < len(names):
        raise InputError(f"clients: found {names!r}, expected names that differ")
    rules = acceptance or Acceptance()
    if rules.classes is None:
        rules = replace(rules, classes=getattr(work, "classes", None))
    with _crew(work, workers) as crew:
        return conduct(
            strategy,
            lambda: names,
            lambda round: round.finish(crew(round.hand_out())),
            rules,
            evaluate=evaluate,
            checkpoint=None if checkpoint is None else Path(checkpoint),
            resume=resume,
            progress=progress,
            callbacks=callbacks,
        )


@contextmanager
def _crew(work: Work, workers: int) -> Iterator[Crew]:
    if workers == 1:
        yield lambda tasks: (_tried(work, client, task) for client, task in tasks)
        return
    pool = _Pool(work, workers)
    try:
        yield pool.outcomes
    finally:
        pool.close()


_Future = Future[tuple[bytes, float]]
_Sent = tuple[str, bytes, _Future]


class _Pool:
    """Worker processes that are replaced when one of them dies."""

    def __init__(self, work: Work, workers: int) -> None:
        self.work, self.workers = work, workers
        self.processes = self._started()

    def outcomes(self, tasks: Iterator[tuple[str, Task]]) -> Iterator[Outcome]:
        """In the order of the tasks; few more than there are workers are under way at a time."""
        waiting: deque[_Sent] = deque()
        for client, task in tasks:
            content = task_to(task)
            waiting.append((client, content, self._submitted(client, content)))
            if len(waiting) > 2 * self.workers:
                yield self._result(*waiting.popleft())
        while waiting:
            yield self._result(*waiting.popleft())

    def close(self) -> None:
        self.processes.shutdown(wait=False, cancel_futures=True)

    def _result(self, client: str, content: bytes, future: _Future) -> Outcome:
        try:
            try:
                answer, loss = future.result()
            except BrokenProcessPool:
                # A process died, and took the tasks of all others with it: once more, alone.
                answer, loss = self._submitted(client, content).result()
            return update_from(answer), loss
        except Exception as error:
            return error

    def _submitted(self, client: str, content: bytes) -> _Future:
        for _ in range(2):
            try:
                return self.processes.submit(_do, client, content)
            except BrokenProcessPool:
                self.close()
                self.processes = self._started()
        raise NafiError("worker processes die as soon as they are started")

    def _started(self) -> ProcessPoolExecutor:
        # Fresh processes: forked ones would inherit the state of torch's threads.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self.workers, context, _begin, (self.work,))


def _tried(work: Work, client: str, task: Task) -> Outcome:
    try:
        return work(client, task)
    except Exception as error:
        return error


_work: list[Work] = []


def _begin(work: Work) -> None:
    begin_worker()
    _work.append(work)


def _do(client: str, content: bytes) -> tuple[bytes, float]:
    update, loss = _work[0](client, task_from(content))
    return update_to(update), loss
