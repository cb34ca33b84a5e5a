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
from torch import nn

from nafi.experiments.config import Experiment, MethodConfig
from nafi.experiments.populations import Description, Population, describe, population
from nafi.federated.samples import Samples
from nafi.fusion import FUSERS, fuse
from nafi.graph import ModelSpec, groups
from nafi.version import __version__

Record = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A method on the population of one trial."""

    experiment: Experiment
    trial: int
    clients: int
    hidden: int
    method: MethodConfig

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells the cells of an experiment apart."""
        return (self.trial, self.clients, self.hidden, self.method.name)

    def descriptions(self) -> list[Description]:
        """The populations that the cell needs, one for each strength of the proximal term."""
        pulls = self.method.grid.get("proximal", [self.method.options.get("proximal", 0.0)])
        return [
            describe(
                self.experiment, self.trial, self.clients, self.hidden, self.method.start, pull
            )
            for pull in pulls
        ]


def cells(experiment: Experiment) -> list[Cell]:
    """All cells of an experiment, those of one population next to each other."""
    return [
        Cell(experiment, trial, clients, hidden, method)
        for trial in range(experiment.trials)
        for hidden in experiment.hidden
        for clients in experiment.clients
        for method in experiment.methods
    ]


def run_cell(cell: Cell) -> Record:
    """Try every candidate, keep the one that does best on validation data."""
    start = time.perf_counter()
    tried = _local(cell) if cell.method.method == "local" else _fused(cell)
    best = max(tried, key=lambda entry: entry["validation"])
    picked = max(tried, key=lambda entry: entry["test"])
    description = cell.descriptions()[0]
    return {
        "experiment": cell.experiment.name,
        "trial": cell.trial,
        "clients": cell.clients,
        "hidden": cell.hidden,
        "method": cell.method.name,
        "seed": description.seed,
        "chosen": best["options"],
        "validation": best["validation"],
        "test": best["test"],
        "test_picked": picked["test"],
        "widths": best["widths"],
        "local_width": cell.experiment.width,
        "fuse_seconds": best["seconds"],
        "candidates": tried,
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
    return [_entry({}, found[0], found[1], [], 0.0)]


def _fused(cell: Cell) -> list[Record]:
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
        limit = cell.experiment.width_limit
        if limit != "none" and "max_width" in FUSERS[cell.method.method].options:
            options.setdefault("max_width", limit)
        start = time.perf_counter()
        result = fuse(
            clients.models,
            inputs,
            method=cell.method.method,
            class_counts=clients.counts,
            seed=cell.trial,
            spec=spec,
            **options,
        )
        seconds = time.perf_counter() - start
        validation, test = (
            accuracy(result.model, samples) for samples in (clients.validation, clients.test)
        )
        widths = list(result.widths.values())
        tried.append(_entry(candidate, validation, test, widths, seconds))
    return tried


def _entry(
    options: dict[str, Any], validation: float, test: float, widths: list[int], seconds: float
) -> Record:
    return {
        "options": options,
        "validation": round(validation, 3),
        "test": round(test, 3),
        "widths": widths,
        "seconds": round(seconds, 3),
    }


def accuracy(model: nn.Module, samples: Samples) -> float:
    """The share of samples whose class gets the highest output, in percent."""
    with torch.no_grad():
        found = model(samples.inputs).argmax(dim=1)
    return 100 * float((found == samples.labels).double().mean())
