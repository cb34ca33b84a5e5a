"""Running the cells of an experiment.

Hides: processes, and what is done already. Promises: one record for each finished cell; a run that
was stopped resumes where it was and gives the same records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nafi.errors import InputError, NafiError
from nafi.experiments.cells import Cell, Key, cells
from nafi.experiments.clients import Recipe, population
from nafi.experiments.config import Experiment
from nafi.experiments.engine import try_candidates
from nafi.experiments.entries import Record
from nafi.experiments.records import (
    append_record,
    check_place,
    check_populations,
    finished,
    make_record,
)
from nafi.federated import Progress
from nafi.locks import locked
from nafi.workers import WorkerDiedError, Workers

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def run_experiment(
    experiment: Experiment,
    file: Path,
    *,
    jobs: int,
    resume: bool,
    progress: Progress,
    device: str = "cpu",
) -> list[Record]:
    """Run all cells that `file` does not hold yet; the records of all of them.

    A second run with the same file is refused while the first is at it.

    jobs: processes, each with one thread; 1 for this process alone
    resume: go on with an existing file; without it, an existing file is refused
    device: where clients train one after the other, like cpu, cuda or mps
    progress: told what is under way, how many steps are done and how many there are
    """
    if jobs < 1:
        raise InputError(f"jobs: found {jobs}, expected a whole number of at least 1")
    check_place(file)
    with locked(file):
        done = finished(experiment, file, resume)
        _run(experiment, file, done, jobs, progress, device)
    return [done[cell.key] for cell in cells(experiment)]


def _run(
    experiment: Experiment,
    file: Path,
    done: dict[Key, Record],
    jobs: int,
    progress: Progress,
    device: str,
) -> None:
    """Add the records of all other cells to the file, and to those that are done."""
    todo = [cell for cell in cells(experiment) if cell.key not in done]
    _check_needs(todo, done)
    untrained = _untrained(todo)
    total = len(untrained) + len(todo)
    progress("training clients" if untrained else experiment.name, 0, total)
    count = 0

    def here(cell: Cell) -> Record:
        """Run a cell in this process, and tell what it is at."""
        return run_cell(
            cell, lambda step, *_: progress(f"{cell.label}: {step}", count, total), device
        )

    with _workers(jobs) as pool:
        for recipe, _ in _each(partial(_train, device=device), untrained, pool):
            count += 1
            progress(f"trained {recipe.trial.clients} clients", count, total)
        check_populations(todo, done.values(), file)
        for wave in _waves(todo, done):
            run = here if pool is None else partial(run_cell, device=device)
            for cell, record in _each(run, wave, pool):
                done[cell.key] = record
                append_record(file, record)
                count += 1
                progress(cell.label, count, total)


def run_cell(cell: Cell, progress: Progress | None = None, device: str = "cpu") -> Record:
    """Try every candidate of a cell; its record."""
    start = time.perf_counter()
    tried = try_candidates(cell, progress, device)
    return make_record(cell, tried, time.perf_counter() - start)


def _untrained(todo: Sequence[Cell]) -> list[Recipe]:
    """The populations that cells need and nobody has trained yet, each once."""
    needed = dict.fromkeys(recipe for cell in todo for recipe in cell.recipes())
    return [recipe for recipe in needed if not recipe.file.is_file()]


def _check_needs(todo: Sequence[Cell], done: Mapping[Key, Record]) -> None:
    """Refuse cells that need the record of another one that is neither done nor to be run."""
    known = {*done, *(cell.key for cell in todo)}
    for cell in todo:
        for key in cell.needs:
            if key not in known:
                raise InputError(
                    f"method {cell.method.name} needs the widths of {key[-1]}: run that one, too"
                )


def _waves(todo: Sequence[Cell], done: Mapping[Key, Record]) -> Iterator[list[Cell]]:
    """The cells that need nothing of others, then those for which all is known by then."""
    waiting = list(todo)
    while waiting:
        ready = [cell for cell in waiting if all(key in done for key in cell.needs)]
        waiting = [cell for cell in waiting if not all(key in done for key in cell.needs)]
        yield [cell.informed(done) for cell in ready]


def _train(recipe: Recipe, device: str) -> None:
    population(recipe, device=device)


# Worker processes that call functions: (function, argument) in, what it returns out.
_Callers = Workers[tuple[Callable[[Any], Any], Any], Any]


def _each(
    work: Callable[[_Item], _Result], items: Sequence[_Item], pool: _Callers | None
) -> Iterator[tuple[_Item, _Result]]:
    """Each item with its result, as they come; in this process, or in those of a pool."""
    if pool is None:
        for item in items:
            yield item, work(item)
        return
    for place, result in pool.completed((work, item) for item in items):
        if isinstance(result, WorkerDiedError):
            raise NafiError(
                "a worker process died, perhaps for want of memory; what was finished is kept: "
                "resume with fewer --jobs"
            ) from result
        if isinstance(result, Exception):
            raise result
        yield items[place], result


def _called(call: tuple[Callable[[_Item], _Result], _Item]) -> _Result:
    work, item = call
    return work(item)


@contextmanager
def _workers(jobs: int) -> Iterator[_Callers | None]:
    """Worker processes, if there is more than one job; work under way is dropped on an error."""
    if jobs == 1:
        yield None
        return
    pool: _Callers = Workers(jobs, _called)
    with pool:
        yield pool
