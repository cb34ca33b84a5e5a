"""Run records: one JSON line for each cell.

Hides: the file, and lines that were cut off. Promises: a record is written at once and whole;
records of other settings are never mixed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch

from nafi.errors import InputError
from nafi.experiments.cells import Cell, Key
from nafi.experiments.clients import fingerprint
from nafi.experiments.config import Experiment
from nafi.experiments.entries import DETAILS, Record
from nafi.experiments.files import packaged_report
from nafi.experiments.problems import PROBLEMS
from nafi.files import atomic_path, check_writable
from nafi.version import __version__


def _comes_with_nafi(name: str, report: Mapping[str, Any]) -> bool:
    """Whether this is the [report] table of the file of that name that comes with nafi."""
    try:
        return report == packaged_report(name)
    except InputError:  # whoever edits the file while it runs does not lose the run
        return False


def make_record(cell: Cell, tried: Sequence[Record], seconds: float) -> Record:
    """The record of a cell; the choice among what was tried is made on validation data alone.

    What choosing on test data would have given stands beside it, under that name. seed: of the
    clients; fusion_seed: of the method
    """
    experiment, method = cell.experiment, cell.method
    best = max(tried, key=lambda entry: entry["validation"])
    picked = max(tried, key=lambda entry: entry["test"])
    report = experiment.report.as_table()
    known = _comes_with_nafi(experiment.name, report)
    return {
        "experiment": experiment.label,
        "trial": cell.trial,
        "clients": cell.clients,
        "hidden": cell.hidden,
        **({"problem": experiment.problem} if experiment.problem else {}),
        "metric": PROBLEMS[experiment.data].metric,
        "method": method.name,
        **({"attack": method.attack} if method.attack != "none" else {}),
        "seed": cell.seed,
        "fusion_seed": cell.fusion_seed,
        **_populations(cell),
        "chosen": best["options"],
        "validation": best["validation"],
        "test": best["test"],
        "test_picked": picked["test"],
        "widths": best["widths"],
        "local_width": experiment.widths or experiment.width,
        "fuse_seconds": best["seconds"],
        "candidates": [{k: v for k, v in entry.items() if k != DETAILS} for entry in tried],
        **best.get(DETAILS, {}),
        "seconds": round(seconds, 3),
        "config": experiment.settings(),
        **({} if known else {"report": report}),
        "versions": {
            "nafi": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "scipy": scipy.__version__,
        },
    }


def _populations(cell: Cell) -> Record:
    """The fingerprint of every population that the cell has used."""
    marks = {recipe.file.stem: fingerprint(recipe) for recipe in cell.recipes()}
    known = {name: mark for name, mark in marks.items() if mark is not None}
    return {"populations": known} if known else {}


def check_populations(todo: Sequence[Cell], done: Iterable[Record], file: Path) -> None:
    """Refuse to compare methods on clients that were trained in the same way and are others.

    Call it when the populations are trained.
    """
    recorded = {name: mark for r in done for name, mark in r.get("populations", {}).items()}
    for cell in todo:
        for name, mark in _populations(cell).get("populations", {}).items():
            if recorded.get(name, mark) != mark:
                raise InputError(
                    f"{cell.label}: its clients are not those of the records in {file}. They were "
                    "trained in the same way on another processor, or with another number of "
                    "threads, where rounding errors differ and grow. Go on there, or run the "
                    "whole trial again: remove its lines, or give another --out"
                )


def append_record(file: Path, record: Record) -> None:
    """Write a record for good; the file is made with the first one."""
    try:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
    except OSError as error:
        raise InputError(
            f"cannot write {file}: {error.strerror}; the records before this one are in it: make "
            "room, then --resume"
        ) from None


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
    """Experiment -> its records, from a file or from all files of a folder; each cell once."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path} holds no .jsonl files; nafi run writes them")
    runs: dict[str, dict[str, Record]] = {}
    for file in files:
        for record in read_records(file):
            if not isinstance(record, dict) or not isinstance(record.get("experiment"), str):
                raise InputError(f"{file} does not hold run records")
            cells = runs.setdefault(record["experiment"], {})
            cells.setdefault(json.dumps([*_key(record), record.get("config")]), record)
    if not runs:
        raise InputError(f"{path} holds no records yet")
    return {name: list(cells.values()) for name, cells in runs.items()}


def _key(record: Record) -> Key:
    """What cell a record is of; strangers' records may leave out any part of it."""
    parts: list[Any] = [
        record.get(name) for name in ("problem", "trial", "clients", "hidden", "method")
    ]
    problem, trial, clients, hidden, method = parts
    return problem, trial, clients, hidden, method


def finished(experiment: Experiment, file: Path, resume: bool) -> dict[Key, Record]:
    """The records that need not be computed again; mends a file whose last line was cut off."""
    if not file.exists() or not file.stat().st_size:
        return {}
    if not resume:
        raise InputError(f"{file} exists already: --resume to go on with it, or another --out")
    records = read_records(file)
    for number, record in enumerate(records, start=1):
        if not _is_of(experiment, record):
            raise InputError(
                f"{file}: line {number} is of another experiment or other settings; give another "
                "--out, or remove the file"
            )
    _check_candidates(experiment, file, records)
    text = "".join(json.dumps(record) + "\n" for record in records)
    if text != file.read_text(encoding="utf-8"):
        with atomic_path(file) as partial:
            partial.write_text(text, encoding="utf-8")
    return {_key(record): record for record in records}


def check_place(file: Path) -> None:
    """Refuse a file that cannot be written before anything is trained for it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from None
    check_writable(file, overwrite=True)


def _is_of(experiment: Experiment, record: object) -> bool:
    """Whether a record is of this experiment; older ones of one shot are without the profile."""
    if not isinstance(record, dict):
        return False
    if not any(part.agrees(record.get("config")) for part in experiment.parts):
        return False
    older = "profile" not in record["config"]
    return record.get("experiment") in (experiment.label, experiment.name if older else None)


def _check_candidates(experiment: Experiment, file: Path, records: Sequence[Record]) -> None:
    """Refuse records of a method that had others to choose from."""
    methods = {(part.problem, m.name): (part, m) for part in experiment.parts for m in part.methods}
    chosen = {_key(record): record.get("chosen") for record in records}
    for number, record in enumerate(records, start=1):
        problem, trial, clients, hidden, name = _key(record)
        if (problem, name) not in methods:
            continue
        part, method = methods[problem, name]
        candidates = json.loads(json.dumps(method.candidates()))
        if part.choose == "first trial" and trial > 0:
            candidates = [chosen.get((problem, 0, clients, hidden, name))]
        tried = [entry["options"] for entry in record["candidates"]]
        if (tried, record.get("attack", "none")) != (candidates, method.attack):
            raise InputError(
                f"{file}: line {number}: {name} had other candidates or attackers; "
                "remove its lines to run it again, or give another --out"
            )
