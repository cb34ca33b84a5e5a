"""Worker processes, each of which does one piece of work at a time.

Hides: processes, pipes and signals. Promises: work that ends its process, or takes too long, costs
that piece of work alone, and the process is replaced; a worker has one thread, since more threads
than cores only wait for each other; a worker ends with the process that started it, however that
was ended, and never hears of Ctrl-C, which is the first process's to deal with.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import torch

from nafi.errors import NafiError

# Fresh processes: forked ones would inherit the state of torch's threads.
_SPAWN = multiprocessing.get_context("spawn")
_BEGUN, _DONE = "begun", "done"
# A process may die for want of memory that others have taken: its work is done once more.
_TRIES = 2
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class WorkError(NafiError):
    """Work ended in a way that no function should: by SystemExit, say."""


class WorkerDiedError(NafiError):
    """The process that did the work ended, and did so again."""


@dataclass(eq=False)
class _Job:
    place: int
    item: Any
    tries: int = 0


class Workers(Generic[_Item, _Result]):
    """So many processes that do the same kind of work."""

    def __init__(
        self, count: int, work: Callable[[_Item], _Result], deadline: float | None = None
    ) -> None:
        """work: goes to each process once, so it must be picklable.

        deadline: seconds after which a piece of work is given up, and its process ended
        """
        self.count, self.work, self.deadline = count, work, deadline
        self._workers: list[_Worker] = []

    def __enter__(self) -> Workers[_Item, _Result]:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in list(self._workers):
            self._end(worker)

    def results(self, items: Iterable[_Item]) -> Iterator[_Result | Exception]:
        """What came of each item, in their order; few more than there are workers are begun."""
        results: dict[int, _Result | Exception] = {}
        due = 0

        def may_begin(place: int) -> bool:
            return place <= due + 2 * self.count

        for place, result in self._completed(items, may_begin):
            results[place] = result
            while due in results:
                yield results.pop(due)
                due += 1

    def completed(self, items: Iterable[_Item]) -> Iterator[tuple[int, _Result | Exception]]:
        """The place of each item and what came of it, as they come."""
        return self._completed(items, lambda place: True)

    def _completed(
        self, items: Iterable[_Item], may_begin: Callable[[int], bool]
    ) -> Iterator[tuple[int, _Result | Exception]]:
        jobs = (_Job(place, item) for place, item in enumerate(items))
        waiting: deque[_Job] = deque()
        try:
            while True:
                self._hand_out(jobs, waiting, may_begin)
                busy = [worker for worker in self._workers if worker.job is not None]
                if not busy:
                    return
                for worker in _heard_of(busy):
                    yield from self._outcome(worker, waiting)
        finally:  # whoever stops listening wants no more of this
            for worker in [worker for worker in self._workers if worker.job is not None]:
                self._end(worker)

    def _hand_out(
        self, jobs: Iterator[_Job], waiting: deque[_Job], may_begin: Callable[[int], bool]
    ) -> None:
        """Give every idle worker something to do, as long as there is something."""
        while sum(worker.job is not None for worker in self._workers) < self.count:
            if not waiting:
                waiting.extend(job for job in [next(jobs, None)] if job is not None)
            if not waiting or not may_begin(waiting[0].place):
                return
            while len(self._workers) < self.count:
                self._workers.append(_Worker(self.work))
            idle = next(worker for worker in self._workers if worker.job is None)
            idle.begin(waiting.popleft())

    def _outcome(
        self, worker: _Worker, waiting: deque[_Job]
    ) -> Iterator[tuple[int, _Result | Exception]]:
        """What a worker has to tell: nothing, or the place of its job and what came of it."""
        job = worker.job
        assert job is not None
        try:
            for message, value in worker.messages():
                if message == _DONE:
                    worker.job, worker.end = None, inf
                    yield job.place, value
                    return
                if self.deadline is not None:
                    worker.end = time.monotonic() + self.deadline
        except (EOFError, OSError):
            self._end(worker)
            yield from self._died(worker, job, waiting)
            return
        if time.monotonic() >= worker.end:
            self._end(worker)
            yield job.place, TimeoutError(f"not done within {self.deadline:g} seconds")

    def _died(
        self, worker: _Worker, job: _Job, waiting: deque[_Job]
    ) -> Iterator[tuple[int, _Result | Exception]]:
        job.tries += 1
        if job.tries < _TRIES:
            waiting.appendleft(job)
        elif not worker.begun:
            raise NafiError("worker processes die as soon as they are started")
        else:
            code = worker.process.exitcode
            yield job.place, WorkerDiedError(f"its process died twice (exit code {code})")

    def _end(self, worker: _Worker) -> None:
        worker.end_now()
        self._workers.remove(worker)


class _Worker:
    """A process, and what it is at.

    begun: whether it has ever begun with a job; end: when its job is given up
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(theirs, work))
        with _without_interrupts():
            self.process.start()
        theirs.close()
        self.job: _Job | None = None
        self.begun = False
        self.end = inf

    def begin(self, job: _Job) -> None:
        self.job = job
        try:
            self.pipe.send(job.item)
        except OSError:  # it has died, which is heard of when it is listened to
            self.pipe.close()

    def messages(self) -> Iterator[tuple[str, Any]]:
        """What it has sent; EOFError or OSError if it has died."""
        heard = False
        while self.pipe.poll():
            try:
                message = self.pipe.recv()
            except (EOFError, OSError):
                raise
            except Exception as error:  # what was sent cannot be read
                message = _DONE, error
            heard = self.begun = True
            yield message
        if not heard and not self.process.is_alive():
            raise EOFError

    def end_now(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _heard_of(workers: list[_Worker]) -> list[_Worker]:
    """The workers that have something to tell, have died, or whose time is over."""
    gone = [worker for worker in workers if worker.pipe.closed]
    if gone:
        return gone
    signs: dict[Any, _Worker] = {worker.pipe: worker for worker in workers}
    signs |= {worker.process.sentinel: worker for worker in workers}
    rest = min(worker.end for worker in workers) - time.monotonic()
    heard = {id(signs[sign]) for sign in wait(list(signs), None if rest == inf else max(0, rest))}
    now = time.monotonic()
    return [worker for worker in workers if id(worker) in heard or now >= worker.end]


def _serve(pipe: Connection, work: Callable[[Any], Any]) -> None:
    """What a worker process does: work, until nobody asks for any."""
    torch.set_num_threads(1)
    _end_with_parent()
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        pipe.send((_BEGUN, None))
        result = _tried(work, item)
        try:
            pipe.send((_DONE, result))
        except Exception as error:  # it cannot be pickled
            pipe.send((_DONE, WorkError(f"{type(error).__name__}: {error}")))


def _tried(work: Callable[[Any], Any], item: object) -> object:
    try:
        return work(item)
    except BaseException as error:
        failed = as_failure(error)
        failed.add_note(f"In a worker process:\n{traceback.format_exc()}")
        return failed


def as_failure(error: BaseException) -> Exception:
    """An error of somebody's work that ends no more than that work, whatever it was."""
    if isinstance(error, Exception):
        return error
    return WorkError(f"{type(error).__name__}: {error}")


def _end_with_parent() -> None:
    """End this process when its parent ends, whatever it is at."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()
    if sys.platform == "linux":
        # The thread cannot act while code holds Python's lock, as a regular expression does.
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it ended before we could say so
        os._exit(1)


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # nobody waits for it any more


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process that is started meanwhile never hears of Ctrl-C.

    Ctrl-C goes to all processes of a terminal, and the first one ends the others.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Python starts this helper with the first process, and unblocks Ctrl-C when it has.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
