"""A method in rounds on the clients of one trial.

Hides: data, strategies, checkpoints, and that methods whose clients start alike share their first
round. Promises: the same clients, data and seeds for every method; a run that was killed goes on
from its last finished round.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from nafi.errors import CheckpointError, InputError
from nafi.experiments.config import MethodConfig, RoundsExperiment
from nafi.experiments.data import cache_folder, load_data
from nafi.experiments.entries import Record, entry
from nafi.experiments.partition import hold_back
from nafi.experiments.problems import PROBLEMS, Problem
from nafi.federated.acceptance import Acceptance
from nafi.federated.architecture import Architecture
from nafi.federated.client import Trainer
from nafi.federated.messages import task_to, update_from, update_to
from nafi.federated.run import Progress, Run
from nafi.federated.samples import Samples, as_numbers
from nafi.federated.simulation import simulate
from nafi.federated.strategies import make_strategy, option_names
from nafi.federated.strategy import Strategy, Task, Update
from nafi.federated.training import Training, train
from nafi.files import atomic_path
from nafi.fusion import calibrate

# Changes whenever the same settings would give other models.
RECIPE = 1


def run_rounds(
    experiment: RoundsExperiment,
    method: MethodConfig,
    clients: int,
    seed: int,
    widths: tuple[int, ...] | None,
    progress: Progress | None = None,
    device: str = "cpu",
) -> list[Record]:
    """An entry for each candidate of a method, with its rounds."""
    trial = share_out(experiment, clients, seed)
    training = Training(**experiment.training.model_dump())
    if method.method == "local":
        return [
            _local(experiment, trial, replace(training, **candidate), candidate, device)
            for candidate in method.candidates()
        ]
    if method.widths_of is not None and widths is None:
        raise InputError(f"{method.name}: the widths of {method.widths_of} are not known")
    architecture = trial.architecture(widths or experiment.widths)
    found = []
    for candidate in method.candidates():
        options = dict(candidate)
        if experiment.width_limit != "none" and "max_width" in option_names(method.method):
            options.setdefault("max_width", experiment.width_limit)
        rounds = int(options.pop("rounds", experiment.rounds))
        judged = replace(trial, calibration=int(options.pop("calibrate", 0)))
        strategy = make_strategy(
            method.method, architecture, training, rounds=rounds, seed=seed, **options
        )
        start = time.perf_counter()
        run = _resumed(strategy, judged, f"{method.name} {candidate}", progress, device)
        seconds = time.perf_counter() - start
        last = run.records[-1]
        details: Record = {"rounds": run.records, "metric": trial.problem.metric}
        if trial.problem.pictures is not None:
            details["pictures"] = trial.problem.pictures(judged.calibrated(run.model), trial.test)
        scores = (last["validation"], last["test"])
        found.append(entry(candidate, *scores, last["widths"], seconds, **details))
    return found


@dataclass(frozen=True, eq=False)
class Trial:
    """The clients of a trial.

    key: what decides their data; calibration: training samples, without their labels, on which the
    statistics of a model are measured before it is judged
    """

    problem: Problem
    data: Mapping[str, Samples]
    validation: Samples
    test: Samples
    seed: int
    key: str
    calibration: int = 0

    def architecture(self, widths: Sequence[int]) -> Architecture:
        """The network of the problem at these widths."""
        example = as_numbers(self.test.inputs[:2])
        return Architecture(partial(self.problem.network, tuple(widths)), (example,))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The score on the samples that clients hold back, and on the test data."""
        model = self.calibrated(model)
        return {
            "validation": round(self.problem.score(model, self.validation), 3),
            "test": round(self.problem.score(model, self.test), 3),
        }

    def calibrated(self, model: nn.Module) -> nn.Module:
        """The model with statistics of some training samples of all clients, if there are to be."""
        if not self.calibration:
            return model
        inputs = torch.cat([samples.inputs for samples in self.data.values()])
        order = np.random.default_rng(self.seed).permutation(len(inputs))[: self.calibration]
        return calibrate(model, [as_numbers(inputs[order])])


def share_out(experiment: RoundsExperiment, clients: int, seed: int) -> Trial:
    """Draw the training data of a trial and share it out."""
    problem = PROBLEMS[experiment.data]
    data = load_data(experiment.data, experiment.samples, seed, experiment.size)
    rng = np.random.default_rng([seed, clients])
    parts = problem.partition(data, clients, experiment.alpha, rng)
    kept, held = zip(*(hold_back(p, experiment.validation, rng) for p in parts), strict=True)
    decisive = {"data", "samples", "alpha", "validation", "size", "test_samples"}
    settings = experiment.model_dump(include=decisive)
    return Trial(
        problem,
        {str(s): data.train[index] for s, index in enumerate(kept)},
        data.train[np.concatenate(held)],
        data.test[slice(experiment.test_samples)],
        seed,
        json.dumps([RECIPE, settings, clients, seed]),
    )


def _local(
    experiment: RoundsExperiment,
    trial: Trial,
    training: Training,
    candidate: dict[str, Any],
    device: str,
) -> Record:
    """Clients that never talk: as many epochs as all rounds have, each on its own data."""
    start = time.perf_counter()
    architecture = trial.architecture(experiment.widths)
    whole = replace(training, epochs=training.epochs * experiment.rounds)
    found = []
    for s, samples in enumerate(trial.data.values()):
        drawn = architecture.drawn(architecture.form, trial.seed + s)
        model = architecture.filled(architecture.form, drawn)
        train(model, samples, whole, seed=trial.seed + s, loss=trial.problem.loss, device=device)
        found.append(trial.evaluate(model.eval()))
    means = [float(np.mean([f[name] for f in found])) for name in ("validation", "test")]
    return entry(candidate, means[0], means[1], [], time.perf_counter() - start)


def _resumed(
    strategy: Strategy, trial: Trial, label: str, progress: Progress | None, device: str
) -> Run:
    """Run a strategy from wherever it was left; its checkpoint goes when it is done."""
    settings = json.dumps([trial.key, label, strategy.settings(), strategy.rounds])
    checkpoint = _runs() / f"{_digest(settings.encode())}.safetensors"
    problem = trial.problem
    trainer = Trainer(strategy.architecture, trial.data, problem.classes, problem.loss, device)
    run = simulate(
        strategy,
        list(trial.data),
        _Remembered(trainer, trial.key, strategy.architecture.form.widths),
        acceptance=Acceptance(classes=problem.classes),
        evaluate=trial.evaluate,
        checkpoint=checkpoint,
        resume=True,
        progress=progress,
    )
    checkpoint.unlink(missing_ok=True)
    return run


@dataclass(frozen=True)
class _Remembered:
    """A trainer that keeps what clients made of weights they drew themselves.

    All methods whose clients start on their own have that first round in common.
    """

    trainer: Trainer
    key: str
    widths: Mapping[str, int]

    def __call__(self, client: str, task: Task) -> tuple[Update, float]:
        if task.tensors:
            return self.trainer(client, task)
        settings = json.dumps([self.key, client, dict(self.widths)]).encode()
        file = _runs() / f"first-{_digest(settings + task_to(task))}"
        try:
            content = file.read_bytes()
            return update_from(content[8:]), float(struct.unpack("<d", content[:8])[0])
        except (OSError, CheckpointError, InputError):
            update, loss = self.trainer(client, task)
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(file) as partial_file:
            Path(partial_file).write_bytes(struct.pack("<d", loss) + update_to(update))
        return update, loss


def _runs() -> Path:
    return cache_folder() / "runs"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]
