"""Running the cells of an experiment.

Hides: processes, and what is done already. Promises: one JSON line for each finished cell, written
at once and whole; a run that was stopped goes on where it was and gives the same records.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from nafi.errors import InputError
from nafi.experiments.cells import Cell, cells, run_cell
from nafi.experiments.config import AnyExperiment
from nafi.experiments.data import cache_folder
from nafi.experiments.entries import Record
from nafi.experiments.populations import Description, population
from nafi.files import atomic_path

# Told what is under way, how many steps are done and how many there are.
Progress = Callable[[str, int, int], None]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def run_experiment(
    experiment: AnyExperiment,
    file: Path,
    *,
    jobs: int,
    resume: bool,
    progress: Progress,
    device: str = "cpu",
) -> list[Record]:
    """Run all cells that `file` does not hold yet; the records of all of them.

    jobs: processes, each with one thread; 1 for this process alone
    resume: go on with an existing file; without it, an existing file is refused
    device: where clients of an experiment in rounds train, like cpu, cuda or mps
    """
    done = _finished(experiment, file, resume)
    todo = [cell for cell in cells(experiment) if cell.key not in done]
    _check_widths(todo, done)
    untrained = _untrained(todo)
    total = len(untrained) + len(todo)
    progress("training clients" if untrained else experiment.name, 0, total)
    for count, (description, _) in enumerate(_each(_train, untrained, jobs)):
        progress(f"trained {description.clients} clients", count + 1, total)
    file.parent.mkdir(parents=True, exist_ok=True)
    count = len(untrained)

    def here(cell: Cell) -> Record:
        """Run a cell in this process, and tell what it is at."""
        return run_cell(
            cell, lambda step, *_: progress(f"{cell.label}: {step}", count, total), device
        )

    apart = partial(run_cell, device=device)
    with file.open("a", encoding="utf-8") as lines:
        for wave in _waves(todo, done):
            for cell, record in _each(here if jobs == 1 else apart, wave, jobs):
                done[cell.key] = record
                lines.write(json.dumps(record) + "\n")
                lines.flush()
                os.fsync(lines.fileno())
                count += 1
                progress(cell.label, count, total)
    return [done[cell.key] for cell in cells(experiment)]


def read_records(file: Path) -> list[Record]:
    """The records of a file; a last line that was cut off while being written is left out."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{file} does not hold run records: {error}") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise InputError(f"{file}: line {number} is not a record") from None
    return records


def read_runs(path: Path) -> dict[str, list[Record]]:
    """Experiment -> its records, from a file or from all files of a folder."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path} holds no .jsonl files; nafi run writes them")
    found: dict[str, list[Record]] = {}
    for file in files:
        for record in read_records(file):
            if not isinstance(record, dict) or not isinstance(record.get("experiment"), str):
                raise InputError(f"{file} does not hold run records")
            found.setdefault(record["experiment"], []).append(record)
    if not found:
        raise InputError(f"{path} holds no records yet")
    return found


def _finished(experiment: AnyExperiment, file: Path, resume: bool) -> dict[tuple[Any, ...], Record]:
    """The records that need not be computed again; mends a file whose last line was cut off."""
    if not file.exists():
        return {}
    if not resume:
        raise InputError(f"{file} exists already: --resume to go on with it, or another --out")
    records = read_records(file)
    for number, record in enumerate(records, start=1):
        if record.get("experiment") != experiment.label or not experiment.agrees(
            record.get("config")
        ):
            raise InputError(
                f"{file}: line {number} is of another experiment or other settings; give another "
                "--out, or remove the file"
            )
    text = "".join(json.dumps(record) + "\n" for record in records)
    if text != file.read_text(encoding="utf-8"):
        with atomic_path(file) as partial_file:
            Path(partial_file).write_text(text, encoding="utf-8")
    _check_candidates(experiment, file, records)
    return {(r["trial"], r["clients"], r["hidden"], r["method"]): r for r in records}


def _check_candidates(experiment: AnyExperiment, file: Path, records: Sequence[Record]) -> None:
    """Refuse records of a method that had others to choose from."""
    candidates = {
        m.name: (json.loads(json.dumps(m.candidates())), m.attack) for m in experiment.methods
    }
    for number, record in enumerate(records, start=1):
        tried = [entry["options"] for entry in record["candidates"]], record.get("attack", "none")
        if record["method"] in candidates and tried != candidates[record["method"]]:
            raise InputError(
                f"{file}: line {number}: {record['method']} had other candidates or attackers; "
                "remove its lines to run it again, or give another --out"
            )


def _untrained(todo: Sequence[Cell]) -> list[Description]:
    """The populations that cells need and nobody has trained yet, each once."""
    needed = dict.fromkeys(d for cell in todo for d in cell.descriptions())
    return [d for d in needed if not (cache_folder() / f"{d.key}.safetensors").is_file()]


def _check_widths(todo: Sequence[Cell], done: Mapping[tuple[Any, ...], Record]) -> None:
    """Refuse cells whose widths are those of a method that is neither done nor to be run."""
    known = {*done, *(cell.key for cell in todo)}
    for cell in todo:
        other = cell.method.widths_of
        if other is not None and (*cell.key[:-1], other) not in known:
            raise InputError(
                f"method {cell.method.name} needs the widths of {other}: run that one, too"
            )


def _waves(todo: Sequence[Cell], done: Mapping[tuple[Any, ...], Record]) -> Iterator[list[Cell]]:
    """The cells that need nothing of others, then those that need their widths."""
    yield [cell for cell in todo if cell.method.widths_of is None]
    yield [
        replace(cell, widths=tuple(done[(*cell.key[:-1], cell.method.widths_of)]["widths"]))
        for cell in todo
        if cell.method.widths_of is not None
    ]


def _train(description: Description) -> None:
    population(description)


def _each(
    work: Callable[[_Item], _Result], items: Sequence[_Item], jobs: int
) -> Iterator[tuple[_Item, _Result]]:
    """Each item with its result, as they come; in this process, or in several."""
    if jobs == 1 or not items:
        for item in items:
            yield item, work(item)
        return
    # Fresh processes: forked ones would inherit the state of torch's threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread)
    try:
        waiting = iter(items)
        running: dict[Future[_Result], _Item] = {
            pool.submit(work, item): item for item in islice(waiting, 2 * jobs)
        }
        while running:
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                item_done = running.pop(future)
                following = next(waiting, None)
                if following is not None:
                    running[pool.submit(work, following)] = following
                yield item_done, future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _one_thread() -> None:
    torch.set_num_threads(1)
