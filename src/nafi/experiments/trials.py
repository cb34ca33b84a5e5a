"""The clients of one trial, their data, and how a model is judged.

Hides: loading, sharing out and holding back. Promises: a trial depends on its settings alone, so
every method meets the same clients and judges.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from nafi.experiments.partition import hold_back
from nafi.experiments.problems import PROBLEMS, Problem, by_own_classes, load_data
from nafi.federated import Architecture, Samples, as_numbers, in_batches
from nafi.fusion import FusionWarning, calibrate, solve_head, statistics

# Summing over a batch has a fixed cost, over half of running the paper's ConvNet on 32 images. So
# batches have so many input numbers, some 340 images of CIFAR-10, but not less than 32 samples.
# A token counts as many: each becomes a vector, and all steps of a recurrent layer are in memory.
_SUMMED = 2**20
_LEAST_SUMMED = 32
_TOKEN = 64

# Changes whenever the same settings would give other clients or models.
RECIPE = 2


@dataclass(frozen=True)
class TrialSettings:
    """All that decides the clients of a trial.

    seed: of the partition; samples_seed: of the draw of `samples` from the training data
    partition: "usual" for the problem, "classes", which go to one client each, or "same": every
        client has all training data, and they differ in their first weights and batches
    """

    data: str
    clients: int
    seed: int
    alpha: float
    validation: float
    samples: int | None = None
    samples_seed: int = 0
    test_samples: int | None = None
    size: tuple[int, int] | None = None
    partition: str = "usual"

    @property
    def key(self) -> str:
        """The settings as a text, for the names of files."""
        return json.dumps([RECIPE, asdict(self)])


@dataclass(frozen=True, eq=False)
class Trial:
    """The clients' data, and what models are judged on.

    data: client -> its training samples; validation: what all clients hold back
    test_by_site: site -> its test samples, where the data say where they come from
    """

    settings: TrialSettings
    problem: Problem
    data: Mapping[str, Samples]
    validation: Samples
    test: Samples
    test_by_site: Mapping[str, Samples] = field(default_factory=dict)

    @property
    def example_inputs(self) -> tuple[Tensor]:
        """The arguments of a network's forward."""
        return (as_numbers(self.test.inputs[:2]),)

    @property
    def class_counts(self) -> npt.NDArray[np.int64] | None:
        """(S, K) training samples of each client and class."""
        if self.problem.classes is None:
            return None
        classes = self.problem.classes
        labels = [samples.labels.numpy() for samples in self.data.values()]
        return np.stack([np.bincount(of_client, minlength=classes) for of_client in labels])

    @property
    def sample_counts(self) -> npt.NDArray[np.int64]:
        """(S,) training samples of each client."""
        return np.array([len(samples) for samples in self.data.values()])

    def architecture(self, network: str, widths: Sequence[int]) -> Architecture:
        """A network of the problem at these widths."""
        build = self.problem.networks[network].build
        return Architecture(partial(build, tuple(widths)), self.example_inputs)

    def score(self, model: nn.Module) -> dict[str, float]:
        """On the samples that clients hold back, and on the test data; in percent."""
        score = self.problem.score
        return {"validation": score(model, self.validation), "test": score(model, self.test)}

    def site_scores(self, model: nn.Module) -> dict[str, float]:
        """Site -> the score on its test data, in percent."""
        score = self.problem.score
        return {site: score(model, samples) for site, samples in self.test_by_site.items()}

    def calibrate(self, model: nn.Module, samples: int) -> nn.Module:
        """The model with statistics of so many training inputs of all clients; 0 for its own."""
        return calibrate(model, [self.probe(samples)]) if samples else model

    def with_head(self, model: nn.Module) -> nn.Module:
        """The model with its last layer solved from the labelled statistics of all clients.

        Costs a forward pass over all training samples, and some 0.1 s for each client.
        """
        inputs = self.test.inputs
        numbers = inputs[0].numel() * (_TOKEN if inputs.dtype == torch.int64 else 1)
        size = max(_LEAST_SUMMED, _SUMMED // numbers)
        with warnings.catch_warnings():  # the data is public: sums over few samples tell nothing
            warnings.simplefilter("ignore", FusionWarning)
            parts = [
                statistics(model, in_batches(samples, size), labels=True)
                for samples in self.data.values()
            ]
        return solve_head(model, parts)

    def probe(self, samples: int) -> Tensor:
        """So many training inputs of all clients, drawn by the seed of the trial."""
        inputs = torch.cat([of_client.inputs for of_client in self.data.values()])
        order = np.random.default_rng(self.settings.seed).permutation(len(inputs))[:samples]
        return as_numbers(inputs[order])


def load_trial(settings: TrialSettings) -> Trial:
    """Draw the training data of a trial and share it out."""
    problem = PROBLEMS[settings.data]
    data = load_data(settings.data, settings.samples, settings.samples_seed, settings.size)
    rng = np.random.default_rng([settings.seed, settings.clients])
    if settings.partition == "same":
        kept_by_all, held_back = hold_back(np.arange(len(data.train)), settings.validation, rng)
        kept, held = (kept_by_all,) * settings.clients, (held_back,)
    else:
        share_out = problem.partition if settings.partition == "usual" else by_own_classes
        parts = share_out(data, settings.clients, settings.alpha, rng)
        pairs = [hold_back(part, settings.validation, rng) for part in parts]
        kept, held = zip(*pairs, strict=True)
        data = data.tested_at(np.unique(np.concatenate(parts)))
    return Trial(
        settings,
        problem,
        {str(s): data.train[index] for s, index in enumerate(kept)},
        data.train[np.concatenate(held)],
        data.test[slice(settings.test_samples)],
        data.test_by_site(settings.test_samples),
    )
