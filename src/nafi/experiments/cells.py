"""One cell of an experiment: one method on one population.

Hides: choosing among candidates. Promises: a record of plain data; the choice is made on validation
data alone, and what choosing on test data would have given stands beside it under that name.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
import torch

from nafi.experiments.config import AnyExperiment, Experiment, MethodConfig, RoundsExperiment
from nafi.experiments.entries import DETAILS, Record, accuracy, entry
from nafi.experiments.populations import (
    Description,
    Population,
    attacked,
    describe,
    population,
)
from nafi.experiments.rounds import run_rounds
from nafi.federated.run import Progress
from nafi.fusion import fuse, make_method, option_names
from nafi.graph import ModelSpec, groups
from nafi.version import __version__


@dataclass(frozen=True)
class Cell:
    """A method on the population of one trial; widths: those of another method's model."""

    experiment: AnyExperiment
    trial: int
    clients: int
    hidden: int
    method: MethodConfig
    widths: tuple[int, ...] | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells the cells of an experiment apart."""
        return (self.trial, self.clients, self.hidden, self.method.name)

    @property
    def label(self) -> str:
        """What a progress line calls it; trials as records count them, from 0."""
        layers = f", {self.hidden} hidden layers" if len(self.experiment.hidden) > 1 else ""
        return f"{self.method.name}, {self.clients} clients{layers}, trial {self.trial}"

    @property
    def seed(self) -> int:
        return 1000 * self.experiment.seed + self.trial

    def descriptions(self) -> list[Description]:
        """The populations that the cell needs, one for each strength of the proximal term."""
        if isinstance(self.experiment, RoundsExperiment):
            return []
        pulls = self.method.grid.get("proximal", [self.method.options.get("proximal", 0.0)])
        return [
            describe(
                self.experiment, self.trial, self.clients, self.hidden, self.method.start, pull
            )
            for pull in pulls
        ]


def cells(experiment: AnyExperiment) -> list[Cell]:
    """All cells of an experiment, those of one population next to each other."""
    return [
        Cell(experiment, trial, clients, hidden, method)
        for trial in range(experiment.trials)
        for hidden in experiment.hidden
        for clients in experiment.clients
        for method in experiment.methods
    ]


def run_cell(cell: Cell, progress: Progress | None = None, device: str = "cpu") -> Record:
    """Try every candidate, keep the one that does best on validation data.

    device: where clients of an experiment in rounds train
    """
    start = time.perf_counter()
    experiment = cell.experiment
    if isinstance(experiment, RoundsExperiment):
        tried = run_rounds(
            experiment, cell.method, cell.clients, cell.seed, cell.widths, progress, device
        )
        local: int | list[int] = experiment.widths
    else:
        tried = _local(cell) if cell.method.method == "local" else _fused(cell)
        local = experiment.width
    best = max(tried, key=lambda entry: entry["validation"])
    picked = max(tried, key=lambda entry: entry["test"])
    return {
        "experiment": cell.experiment.label,
        "trial": cell.trial,
        "clients": cell.clients,
        "hidden": cell.hidden,
        "method": cell.method.name,
        **({"attack": cell.method.attack} if cell.method.attack != "none" else {}),
        "seed": cell.seed,
        "chosen": best["options"],
        "validation": best["validation"],
        "test": best["test"],
        "test_picked": picked["test"],
        "widths": best["widths"],
        "local_width": local,
        "fuse_seconds": best["seconds"],
        "candidates": [{k: v for k, v in entry.items() if k != DETAILS} for entry in tried],
        **best.get(DETAILS, {}),
        "seconds": round(time.perf_counter() - start, 3),
        "config": cell.experiment.settings(),
        "versions": {
            "nafi": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "scipy": scipy.__version__,
        },
    }


def _local(cell: Cell) -> list[Record]:
    """The clients' own models; accuracies are means over them."""
    clients = population(cell.descriptions()[0])
    found = [
        float(np.mean([accuracy(model, samples) for model in clients.models]))
        for samples in (clients.validation, clients.test)
    ]
    return [entry({}, found[0], found[1], [], 0.0)]


def _fused(cell: Cell) -> list[Record]:
    experiment = cell.experiment
    assert isinstance(experiment, Experiment)
    known = {d.proximal: d for d in cell.descriptions()}
    loaded: dict[float, Population] = {}
    spec: ModelSpec | None = None
    tried = []
    for candidate in cell.method.candidates():
        options = dict(candidate)
        pull = options.pop("proximal", 0.0)
        if pull not in loaded:
            loaded[pull] = population(known[pull])
        clients = loaded[pull]
        inputs = (clients.test.inputs[:2],)
        spec = spec or groups(clients.models[0], inputs)
        limit = experiment.width_limit
        if limit != "none" and "max_width" in option_names(cell.method.method):
            options.setdefault("max_width", limit)
        if "seed" in option_names(cell.method.method):
            options["seed"] = cell.trial
        method = make_method(cell.method.method, **options)
        start = time.perf_counter()
        result = fuse(
            attacked(clients.models, cell.method.attack, experiment.attackers, cell.seed),
            inputs,
            method,
            spec=spec,
            **method.used(class_counts=clients.counts),
        )
        seconds = time.perf_counter() - start
        validation, test = (
            accuracy(result.model, samples) for samples in (clients.validation, clients.test)
        )
        widths = list(result.widths.values())
        tried.append(entry(candidate, validation, test, widths, seconds))
    return tried
