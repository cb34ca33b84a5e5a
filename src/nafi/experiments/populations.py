"""Clients of one trial: their data, and their models once trained.

Hides: partitions, seeds, training, and the cache of trained models. Promises: a population depends
on its description alone; it is trained once and then read from disk.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nafi.experiments.config import Attack, Experiment, Start
from nafi.experiments.data import Dataset, cache_folder, load_data
from nafi.experiments.models import MLP, draw_weights
from nafi.experiments.partition import class_counts, dirichlet_partition, hold_back
from nafi.experiments.training import PAPER, train_clients
from nafi.federated.samples import Samples
from nafi.files import atomic_path

# Changes whenever the same description would give other models.
RECIPE = 1


@dataclass(frozen=True)
class Description:
    """All that decides a population."""

    data: str
    samples: int | None
    clients: int
    hidden: int
    width: int
    alpha: float
    validation: float
    epochs: int
    batch: int
    rate: float
    decay: float
    seed: int
    start: Start = "own"
    proximal: float = 0.0

    @property
    def key(self) -> str:
        """A hash of the description, for the name of a file."""
        text = json.dumps({"recipe": RECIPE, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def describe(
    experiment: Experiment,
    trial: int,
    clients: int,
    hidden: int,
    start: Start = "own",
    proximal: float = 0.0,
) -> Description:
    """The population of one trial of an experiment."""
    training = experiment.training
    return Description(
        experiment.data,
        experiment.samples,
        clients,
        hidden,
        experiment.width,
        experiment.alpha,
        experiment.validation,
        training.epochs,
        training.batch,
        training.rate,
        training.decay,
        1000 * experiment.seed + trial,
        start,
        proximal,
    )


@dataclass(frozen=True, eq=False)
class Population:
    """models: one per client; counts: (S, K) training samples; validation: held by the clients."""

    models: list[nn.Module]
    counts: npt.NDArray[np.int64]
    validation: Samples
    test: Samples


def population(
    description: Description, progress: Callable[[int, int], None] | None = None
) -> Population:
    """The clients' data and models; trained now if they are not in the cache."""
    data = load_data(description.data, description.samples)
    train, held, counts = _shares(description, data)
    models = _untrained(description, data)
    file = cache_folder() / f"{description.key}.safetensors"
    if file.is_file():
        stacked = load_file(file)
        for s, model in enumerate(models):
            model.load_state_dict({name: value[s] for name, value in stacked.items()})
    else:
        training = replace(
            PAPER,
            epochs=description.epochs,
            batch=description.batch,
            rate=description.rate,
            decay=description.decay,
            proximal=description.proximal,
        )
        parts = [data.train[index] for index in train]
        models = train_clients(models, parts, training, description.seed, progress)
        file.parent.mkdir(parents=True, exist_ok=True)
        states = [model.state_dict() for model in models]
        with atomic_path(file) as partial:
            save_file({n: torch.stack([s[n] for s in states]) for n in states[0]}, partial)
    return Population(
        [model.eval() for model in models],
        counts,
        data.train[np.concatenate(held)],
        data.test,
    )


_FACTORS: dict[Attack, float] = {"none": 1.0, "flip": -1.0, "scale": 10.0, "flip-and-scale": -10.0}


def attacked(models: list[nn.Module], attack: Attack, attackers: int, seed: int) -> list[nn.Module]:
    """The models as they are sent; attackers, drawn by the seed, multiply all their weights."""
    if attack == "none" or not attackers:
        return models
    chosen = np.random.default_rng([seed, attackers]).permutation(len(models))[:attackers]
    sent = [copy.deepcopy(model) if s in chosen else model for s, model in enumerate(models)]
    with torch.no_grad():
        for s in chosen:
            for parameter in sent[s].parameters():
                parameter.mul_(_FACTORS[attack])
    return sent


Index = npt.NDArray[np.intp]


def _shares(
    description: Description, data: Dataset
) -> tuple[list[Index], list[Index], npt.NDArray[np.int64]]:
    """Each client's samples, those that it holds back for validation, and its training counts."""
    labels = data.train.labels.numpy()
    rng = np.random.default_rng([description.seed, description.clients])
    train, held = [], []
    for part in dirichlet_partition(labels, description.clients, description.alpha, rng):
        kept, aside = hold_back(part, description.validation, rng)
        train.append(kept)
        held.append(aside)
    return train, held, class_counts(labels, train, data.train.classes)


def _untrained(description: Description, data: Dataset) -> list[nn.Module]:
    """Networks before training: weights of their own, or one start for all."""
    inputs, classes = data.train.inputs.shape[1], data.train.classes
    widths = [inputs, *[description.width] * description.hidden, classes]
    seeds = [[description.seed, description.hidden, s] for s in range(description.clients)]
    if description.start == "shared":
        seeds = [seeds[0]] * len(seeds)
    return [draw_weights(MLP(widths), _generator(seed)) for seed in seeds]


def _generator(seed: list[int]) -> torch.Generator:
    drawn = np.random.default_rng(seed).integers(2**62)
    return torch.Generator().manual_seed(int(drawn))
