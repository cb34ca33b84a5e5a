"""Clients that train on their own, and what is kept of them.

Hides: which executor trains them, and the cache. Promises: a population depends on its recipe
alone; it is trained once and then read from disk.
"""

from __future__ import annotations

import copy
import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from nafi.errors import CheckpointError, InputError
from nafi.experiments.config import FACTORS, Attack
from nafi.experiments.data import cache_folder
from nafi.experiments.problems import PROBLEMS, Problem
from nafi.experiments.training import train_clients, train_in_turn
from nafi.experiments.trials import Trial, TrialSettings, load_trial
from nafi.federated import Task, Trainer, Training, Update, seeded, task_to, update_from, update_to
from nafi.files import atomic_path

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Recipe:
    """All that decides a population: the clients of a trial, each trained alone.

    network: its name in the problem
    starts: seeds of the clients' first weights
    stacked: train them together where that can be; else one after the other
    """

    trial: TrialSettings
    network: str
    widths: tuple[int, ...]
    starts: tuple[int, ...]
    training: Training
    stacked: bool = True

    @property
    def file(self) -> Path:
        """Where the trained clients are kept."""
        return cache_folder() / f"{digest(json.dumps(asdict(self)), self.trial.key)}.safetensors"


def population(
    recipe: Recipe,
    trial: Trial | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> list[nn.Module]:
    """The clients' models, in eval mode; trained now if they are not in the cache.

    trial: the one of the recipe, if it is loaded already; progress: called with (done, all)
    """
    models = _untrained(recipe)
    if recipe.file.is_file():
        stacked = load_file(recipe.file)
        for s, model in enumerate(models):
            model.load_state_dict({name: value[s] for name, value in stacked.items()})
    else:
        models = _train(recipe, models, trial or load_trial(recipe.trial), device, progress)
        states = [model.state_dict() for model in models]
        recipe.file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(recipe.file) as partial:
            save_file({n: torch.stack([s[n] for s in states]) for n in states[0]}, partial)
    return [model.eval() for model in models]


def fingerprint(recipe: Recipe) -> str | None:
    """Changes with the last bit of the trained clients; None if they are not in the cache.

    A recipe gives the same bits on the same processor with as many threads, and only there.
    """
    return digest(recipe.file.read_bytes()) if recipe.file.is_file() else None


def _untrained(recipe: Recipe) -> list[nn.Module]:
    models = []
    network = PROBLEMS[recipe.trial.data].networks[recipe.network]
    for start in recipe.starts:
        with seeded(start):
            models.append(network.build(recipe.widths))
    return models


def _train(
    recipe: Recipe, models: list[nn.Module], trial: Trial, device: str, progress: Progress | None
) -> list[nn.Module]:
    data, seed = list(trial.data.values()), recipe.trial.seed
    if recipe.stacked and _can_be_stacked(models[0], trial.problem):
        return train_clients(models, data, recipe.training, seed, progress)
    loss = trial.problem.loss
    return train_in_turn(models, data, recipe.training, seed, progress, loss=loss, device=device)


def _can_be_stacked(model: nn.Module, problem: Problem) -> bool:
    """Running statistics of many clients, and losses that look at a whole batch, cannot.

    Of recurrent networks and transformers, not every operation can.
    """
    sequential = any(isinstance(m, nn.RNNBase | nn.LayerNorm) for m in model.modules())
    plain = next(model.buffers(), None) is None and not sequential
    return plain and problem.loss is F.cross_entropy


def attacked(models: list[nn.Module], attack: Attack, attackers: int, seed: int) -> list[nn.Module]:
    """The models as they are sent; attackers, drawn by the seed, multiply all their weights."""
    if attack == "none" or not attackers:
        return models
    chosen = np.random.default_rng([seed, attackers]).permutation(len(models))[:attackers]
    sent = [copy.deepcopy(model) if s in chosen else model for s, model in enumerate(models)]
    with torch.no_grad():
        for s in chosen:
            for parameter in sent[s].parameters():
                parameter.mul_(FACTORS[attack])
    return sent


@dataclass(frozen=True)
class CachedTrainer:
    """A trainer that keeps what clients made of weights they drew themselves.

    All methods whose clients start on their own have that first round in common.
    """

    trainer: Trainer
    key: str
    widths: Mapping[str, int]

    def __call__(self, client: str, task: Task) -> tuple[Update, float]:
        if task.tensors:
            return self.trainer(client, task)
        settings = json.dumps([self.key, client, dict(self.widths)])
        file = runs_folder() / f"first-{digest(settings, task_to(task))}"
        try:
            content = file.read_bytes()
            return update_from(content[8:]), float(struct.unpack("<d", content[:8])[0])
        except (OSError, CheckpointError, InputError, struct.error):
            update, loss = self.trainer(client, task)
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(file) as partial:
            partial.write_bytes(struct.pack("<d", loss) + update_to(update))
        return update, loss


def runs_folder() -> Path:
    """Where runs in rounds keep checkpoints and first rounds."""
    return cache_folder() / "runs"


def digest(*parts: str | bytes) -> str:
    """A short hash, for the name of a file."""
    content = b"\0".join(part.encode() if isinstance(part, str) else part for part in parts)
    return hashlib.sha256(content).hexdigest()[:20]
