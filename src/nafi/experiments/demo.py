"""The demonstration: clients with digits of their own, fused by every method at the same size.

Hides: the sizes that make it quick. Promises: every fused network has the parameters of one client,
but for those that show what more of them are worth; what a method can use of the unlabelled digits
it gets; no run chooses anything by the test digits. The setting itself was chosen: docs/results.md
says among which. A method that cannot run stays in the table, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from nafi.errors import NafiError
from nafi.experiments.data import digits
from nafi.experiments.entries import accuracy
from nafi.experiments.methods import ENSEMBLE, fuse_clients
from nafi.experiments.models import MLP, draw_weights
from nafi.experiments.partition import class_counts, dirichlet_partition
from nafi.experiments.training import PAPER, train_clients
from nafi.federated import Samples
from nafi.fusion import METHODS, FusionResult, make_method, option_names
from nafi.graph import ModelSpec, groups

CLIENTS = 8
ALPHA = 1.0
HIDDEN = (50, 50)
PROBE = 64
TRIALS = 3
TRAINING = replace(PAPER, epochs=20)

ONE_CLIENT = "1.0 params"
# What more parameters, or fewer, are worth: a curve for each of these.
CURVES = dict.fromkeys(("nafi", "stack"), ("0.5 params", ONE_CLIENT, "2.0 params", "4.0 params"))
_ALONE, _BEST, _ALL = "one client, mean", "one client, best", f"ensemble of {CLIENTS}"


@dataclass(frozen=True)
class Accuracy:
    """In percent of the test digits: mean and standard deviation over trials, if several."""

    mean: float
    spread: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Accuracy:
        return cls(fmean(values), stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class DemoRow:
    """One way to use the clients' networks.

    accuracy: with the unlabelled digits, if it can use them; without_probe: if it has none of them
    neurons, parameters: of the network, mean over trials; size: parameters, times one client's
    missing: why it could not run
    """

    method: str
    accuracy: Accuracy | None = None
    without_probe: Accuracy | None = None
    uses_probe: bool = False
    neurons: float = 0.0
    parameters: float = 0.0
    size: float = 0.0
    missing: str = ""


@dataclass(frozen=True, eq=False)
class Demo:
    """What the demonstration found.

    references: the clients alone, and their ensemble; methods: each at the size of one client
    curves: method -> (parameters, times one client's; accuracy in percent), the smallest first
    local: accuracy of each client in each trial
    counts: (clients, classes) digits of the clients of the first trial
    tested: test digits of each trial; probe: digits without labels
    """

    references: list[DemoRow]
    methods: list[DemoRow]
    curves: dict[str, list[tuple[float, float]]]
    local: list[list[float]]
    counts: npt.NDArray[np.int64]
    trials: int
    tested: int
    hidden: tuple[int, ...] = HIDDEN
    probe: int = PROBE

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and for the page."""
        return asdict(self) | {"counts": self.counts.tolist()}


@dataclass(frozen=True)
class _Score:
    """One network of one trial. budget: what it was allowed, empty for what has no choice."""

    method: str
    budget: str
    probed: bool
    accuracy: float
    parameters: float
    neurons: float


@dataclass(frozen=True, eq=False)
class _Trial:
    """Clients that have trained, and what methods may know of them."""

    models: list[nn.Module]
    spec: ModelSpec
    counts: npt.NDArray[np.int64]
    probe: Tensor
    test: Samples
    seed: int

    def fuse(self, method: str, budget: str, probed: bool) -> _Score:
        """Score one method. probed: whether it is given the unlabelled digits."""
        options: dict[str, Any] = {"budget": budget} if budget else {}
        if method == ENSEMBLE:
            options["weigh_by"] = "counts"  # as all methods that can weigh by classes
        inputs = (self.test.inputs[:2],)
        probe = self.probe if probed else None
        result = fuse_clients(
            method,
            self.models,
            inputs,
            self.seed,
            options,
            class_counts=self.counts,
            spec=self.spec,
            probe=probe,
        )
        return _Score(
            method,
            budget,
            probed,
            accuracy(result.model, self.test),
            float(sum(weight.numel() for weight in result.model.parameters())),
            float(_neurons(result, method)),
        )


def _neurons(result: FusionResult, method: str) -> int:
    """Of all hidden layers; methods that look at no groups leave them as they are."""
    return sum(result.widths.values()) or sum(HIDDEN) * (CLIENTS if method == ENSEMBLE else 1)


def run_demo(seed: int, progress: Callable[[str, int, int], None], trials: int = TRIALS) -> Demo:
    """Train clients apart on scikit-learn's digits and fuse them by every method, several times."""
    methods = [name for name in METHODS if name != ENSEMBLE]
    missing = {name: reason for name in methods if (reason := _why_missing(name))}
    plan = [(ENSEMBLE, "", False), *_plan([name for name in methods if name not in missing])]
    total = trials * (1 + len(plan))
    scores: list[list[_Score]] = []
    alone: list[list[float]] = []
    first = None
    for number in range(trials):
        done = number * (1 + len(plan))
        progress(f"training {CLIENTS} clients", done, total)
        trial = _train(seed * trials + number)
        first = first or trial
        alone.append([accuracy(model, trial.test) for model in trial.models])
        scores.append([])
        for step, planned in enumerate(plan):
            progress(planned[0], done + 1 + step, total)
            scores[-1].append(trial.fuse(*planned))
    assert first is not None
    one = float(sum(weight.numel() for weight in first.models[0].parameters()))
    together = [_mean(several, one) for several in zip(*scores, strict=True)]
    return Demo(
        _references(alone, together[0], one),
        [_row(name, together, missing.get(name, "")) for name in methods],
        {name: list(_curve(name, together)) for name in CURVES if name not in missing},
        alone,
        first.counts,
        trials,
        len(first.test),
    )


def _plan(methods: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Method, budget, and whether it gets the unlabelled digits: all that is to be fused."""
    for name in methods:
        can_use = "probe" in METHODS[name].uses
        budget = ONE_CLIENT if "budget" in option_names(name) else ""
        # Which neurons to cut is measured on a probe.
        if not (budget and name == "stack"):
            yield name, budget, False
        if can_use:
            for each in CURVES.get(name, (budget,)):
                yield name, each, True


def _why_missing(name: str) -> str:
    """Why a method cannot run here, such as a package that is not installed."""
    try:
        make_method(name)
    except NafiError as error:
        return str(error)
    return ""


def _train(seed: int) -> _Trial:
    data = digits(seed)
    probe, train = data.train[:PROBE].inputs, data.train[PROBE:]
    labels = train.labels.numpy()
    parts = dirichlet_partition(labels, CLIENTS, ALPHA, np.random.default_rng(seed))
    widths = [train.inputs.shape[1], *HIDDEN, train.classes]
    first = [
        draw_weights(MLP(widths), torch.Generator().manual_seed(CLIENTS * seed + s))
        for s in range(CLIENTS)
    ]
    models = train_clients(first, [train[part] for part in parts], TRAINING, seed)
    counts = class_counts(labels, parts, train.classes)
    spec = groups(models[0], (data.test.inputs[:2],))
    return _Trial(models, spec, counts, probe, data.test, seed)


@dataclass(frozen=True)
class _Mean:
    """The same network of all trials."""

    score: _Score
    accuracy: Accuracy
    neurons: float
    parameters: float
    size: float


def _mean(scores: Sequence[_Score], one_client: float) -> _Mean:
    parameters = fmean(score.parameters for score in scores)
    return _Mean(
        scores[0],
        Accuracy.of([score.accuracy for score in scores]),
        fmean(score.neurons for score in scores),
        parameters,
        parameters / one_client,
    )


def _references(alone: Sequence[Sequence[float]], ensemble: _Mean, one: float) -> list[DemoRow]:
    one_client = partial(DemoRow, neurons=float(sum(HIDDEN)), parameters=one, size=1.0)
    return [
        one_client(_ALONE, Accuracy.of([fmean(trial) for trial in alone])),
        one_client(_BEST, Accuracy.of([max(trial) for trial in alone])),
        DemoRow(
            _ALL,
            ensemble.accuracy,
            neurons=ensemble.neurons,
            parameters=ensemble.parameters,
            size=ensemble.size,
        ),
    ]


def _row(name: str, found: Sequence[_Mean], missing: str) -> DemoRow:
    """A method at the size of one client."""
    if missing:
        return DemoRow(name, missing=missing)
    at_size = {
        each.score.probed: each
        for each in found
        if each.score.method == name and each.score.budget in ("", ONE_CLIENT)
    }
    shown = at_size.get(True) or at_size[False]
    return DemoRow(
        name,
        shown.accuracy,
        at_size[False].accuracy if False in at_size else None,
        True in at_size,
        shown.neurons,
        shown.parameters,
        shown.size,
    )


def _curve(name: str, found: Sequence[_Mean]) -> Iterator[tuple[float, float]]:
    for each in sorted(found, key=lambda each: each.size):
        if each.score.method == name and each.score.probed:
            yield each.size, each.accuracy.mean
