"""nafi and pfnm: neurons matched by the Beta-Bernoulli process, group by group.

Hides: the order of the groups and the scale of each. Promises: one descent for both methods and
for both directions; they differ in the penalty and in the order of the groups alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import nn

from nafi.errors import InputError
from nafi.fusion.base import FusionResult, Progress, Task, check_switch, fuser
from nafi.fusion.clients import Array
from nafi.fusion.features import Moments, Table, known_share
from nafi.fusion.heads import comparable
from nafi.fusion.merge import check_classes, merge
from nafi.fusion.moments import check_moments
from nafi.fusion.networks import Networks, prepare
from nafi.fusion.widths import MaxWidth, width_limits
from nafi.graph.lift import Positions
from nafi.matching import Matching, match
from nafi.matching.columns import Index

DIRECTIONS = ("bottom-up", "top-down")

# The spread of the penalty is counted for so many columns, those of the paper's first layer. It
# grows with the columns, though neurons are no further apart: without this, layers with many inputs
# would merge everything and those with few nothing.
PENALTY_COLUMNS = 800


@dataclass(frozen=True)
class Matcher:
    """How the neurons of one group are matched.

    evidence: what a neuron of mean size is worth, its squared norm over the noise variance; the
        noise of each group is scaled to that, and the penalty's spread is counted for the same
        number of columns, so that neither the size of the weights nor their number matters
    prior_ratio: prior variance over noise variance
    noise_precision, prior_precision: absolute 1/variances instead, the same for every group; the
        penalty is then that of the paper
    """

    penalty: float = 0.4
    divergence: str = "kl"
    evidence: float = 150.0
    prior_ratio: float = 1.0
    noise_precision: float | None = None
    prior_precision: float | None = None
    mass: float = 1.0
    sweeps: int = 10
    compat: str = "paper"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("evidence", "prior_ratio", "noise_precision", "prior_precision"):
            value = getattr(self, name)
            if value is None and name.endswith("precision"):
                continue
            if not (isinstance(value, int | float | np.number) and 0 < value < np.inf):
                raise InputError(f"{name}: found {value!r}, expected a number above 0")

    def match(self, given: Table, limit: int, noise: float) -> Matching:
        """Match the rows of a table; noise: the precision of a column of weight 1."""
        prior = noise / self.prior_ratio if self.prior_precision is None else self.prior_precision
        return match(
            given.neurons,
            precisions=[noise * weights for weights in given.weights],
            prior_precision=prior,
            mass=self.mass,
            penalty=self.penalty,
            dimension=PENALTY_COLUMNS if self.noise_precision is None else None,
            divergence=self.divergence,
            sweeps=self.sweeps,
            max_width=limit,
            compat=self.compat,
            seed=self.seed,
        )

    def noise(self, given: Table) -> float:
        """The precision of a column of weight 1."""
        if self.noise_precision is not None:
            return self.noise_precision
        total = sum(
            float((np.square(neurons) @ weights).sum())
            for neurons, weights in zip(given.neurons, given.weights, strict=True)
        )
        count = sum(neurons[..., 0].size for neurons in given.neurons)
        return self.evidence * count / total if total > 0 else 1.0


@dataclass
class _Descent:
    """Group after group: what is matched already orders the columns of what comes next."""

    networks: Networks
    matcher: Matcher
    limits: Mapping[str, int]
    moments: Moments
    placements: list[dict[str, Positions]] = field(default_factory=list)
    matchings: dict[str, Matching] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.placements = [{} for _ in self.networks.specs]

    def step(self, group: str) -> None:
        spec = self.networks.spec
        inside = [name for name, other in spec.groups.items() if other.parent == group]
        if spec.groups[group].parent is not None:
            self._match_within(group)
        else:
            given = comparable(self.networks, group, self.placements, self.moments)
            found = self._match(given, self.limits[group], self.matcher.noise(given))
            self.matchings[group] = found.without_neurons()
            self._place(group, found.assignments, found.width)
        for name in inside:
            self.step(name)

    def _match(self, given: Table, limit: int, noise: float) -> Matching:
        """Match in the order of the ranking, and answer in that of the clients."""
        ranking = self.networks.ranking
        ranked = Table([given.neurons[s] for s in ranking], [given.weights[s] for s in ranking])
        found = self.matcher.match(ranked, limit, noise)
        by_client = dict(zip(ranking, found.assignments, strict=True))
        return replace(found, assignments=tuple(by_client[s] for s in range(len(ranking))))

    def _match_within(self, group: str) -> None:
        """Match the neurons within each member of the parent, on one scale for all of them."""
        given = comparable(self.networks, group, self.placements, self.moments)
        unit = self.matcher.noise(given)
        parent = str(self.networks.spec.groups[group].parent)
        assigned = [np.zeros(neurons.shape[:2], dtype=np.intp) for neurons in given.neurons]
        width = 0
        for member, owned in enumerate(self._owners(parent)):
            rows = Table(
                [given.neurons[s][head] for s, head in owned], [given.weights[s] for s, _ in owned]
            )
            found = self.matcher.match(rows, self.limits[group], unit)
            self.matchings[f"{group}[{member}]"] = found.without_neurons()
            for (s, head), places in zip(owned, found.assignments, strict=True):
                assigned[s][head] = places
            width = max(width, found.width)
        self._place(group, assigned, width)

    def _owners(self, group: str) -> list[list[tuple[int, int]]]:
        """For each global neuron the clients that have it, by rank, and which of theirs it is."""
        owned: list[list[tuple[int, int]]] = [[] for _ in range(self.placements[0][group].width)]
        for s in self.networks.ranking:
            for local, place in enumerate(self.placements[s][group].index.tolist()):
                owned[place].append((s, local))
        return owned

    def _place(self, group: str, assigned: Sequence[Index], width: int) -> None:
        for placements, places in zip(self.placements, assigned, strict=True):
            placements[group] = Positions(torch.from_numpy(places), width)


def next_group(networks: Networks, direction: str, matched: Sequence[str]) -> str:
    """The group to match next among those without a parent.

    bottom-up: the one of whose own columns most can be compared, the first of these as data flow;
    top-down: the last that is not matched.
    """
    left = [
        name
        for name, group in networks.spec.groups.items()
        if name not in matched and group.parent is None
    ]
    if direction == "top-down":
        return left[-1]
    return max(left, key=lambda name: known_share(networks, name, matched))


Validate = Callable[[nn.Module], float]


@dataclass(frozen=True)
class Settings:
    """Everything else about a fusion by matching; see `nafi.fuse`."""

    penalty: float | Sequence[float] = 0.4
    validate: Validate | None = None
    direction: str = "bottom-up"
    max_width: MaxWidth = None
    restore_norm: bool = True
    input_moments: Sequence[Mapping[str, Array]] | None = None

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            expected = " or ".join(DIRECTIONS)
            raise InputError(f"direction: found {self.direction!r}, expected {expected}")
        if self.validate is not None and not callable(self.validate):
            raise InputError(f"validate: found {self.validate!r}, expected a function of a model")
        check_switch(self.restore_norm, "restore_norm")
        if not isinstance(self.penalty, Real | Sequence) or isinstance(self.penalty, str | bool):
            raise InputError(
                f"penalty: found {self.penalty!r}, expected a number or a list of them"
            )
        if not self.penalties:
            raise InputError("penalty: found an empty list, expected numbers")
        if len(self.penalties) > 1 and self.validate is None:
            raise InputError(
                "penalty: a list needs validate=, a function of the fused model whose result is "
                "the higher the better (the accuracy on data held out by the clients, for example)"
            )

    @property
    def penalties(self) -> list[float]:
        return list(self.penalty) if isinstance(self.penalty, Sequence) else [self.penalty]


@dataclass(frozen=True)
class _Plan:
    """A fusion up to the penalty; it is made once for a list of them."""

    networks: Networks
    settings: Settings
    limits: Mapping[str, int]
    moments: Moments
    progress: Progress

    def run(self, matcher: Matcher) -> FusionResult:
        """Match every group, then merge."""
        networks = self.networks
        descent = _Descent(networks, matcher, self.limits, self.moments)
        total = len(networks.spec.groups)
        while len(descent.placements[0]) < total:
            group = next_group(networks, self.settings.direction, list(descent.placements[0]))
            self.progress(group, len(descent.placements[0]), total)
            descent.step(group)
        self.progress("merging", total, total)
        state = merge(networks, descent.placements, restore_norm=self.settings.restore_norm)
        widths = {name: descent.placements[0][name].width for name in networks.spec.groups}
        model, spec, architecture = networks.build(state, widths)
        assignments = {
            name: tuple(own[name].index.numpy() for own in descent.placements) for name in widths
        }
        return FusionResult(model, widths, spec, architecture, assignments, descent.matchings)

    def best(self, matchers: Sequence[Matcher], validate: Validate) -> FusionResult:
        """The result with the highest score, with the scores of all."""
        best, highest = None, -np.inf
        scores = []
        for matcher in matchers:
            found = self.run(matcher)
            score = _score(validate, found.model)
            scores.append({"penalty": matcher.penalty, "score": score, "widths": found.widths})
            if score > highest:
                told = {"penalty": matcher.penalty, "score": score, "scores": scores}
                best, highest = replace(found, diagnostics=told), score
        if best is None:
            raise InputError("validate: every score is NaN or minus infinity; there is no best")
        return best


def _score(validate: Validate, model: nn.Module) -> float:
    found = validate(model)
    try:
        score = float(found)
    except (TypeError, ValueError):
        raise InputError(f"validate: returned {found!r}, expected a number") from None
    return -np.inf if np.isnan(score) else score


_OF_MATCHER = [f.name for f in fields(Matcher) if f.name not in ("penalty", "seed")]
_OF_SETTINGS = [f.name for f in fields(Settings)]
_OF_NAFI_ALONE = ("penalty", "divergence", "validate")


@fuser("nafi", options=[*_OF_SETTINGS, *_OF_MATCHER])
def nafi(task: Task, **options: Any) -> FusionResult:
    """The paper's matching, with a divergence penalty."""
    settings = Settings(**{name: options[name] for name in _OF_SETTINGS if name in options})
    chosen = {name: options[name] for name in _OF_MATCHER if name in options}
    matchers = [Matcher(penalty=lam, seed=task.seed, **chosen) for lam in settings.penalties]
    networks = prepare(task.clients, task.example_inputs, task.spec, task.batchnorm)
    check_classes(networks.clients, networks.spec)
    moments = check_moments(networks, settings.input_moments)
    limits = width_limits(networks, settings.max_width)
    plan = _Plan(networks, settings, limits, moments, task.progress)
    return (
        plan.run(matchers[0])
        if settings.validate is None
        else plan.best(matchers, settings.validate)
    )


@fuser("pfnm", options=[o for o in [*_OF_SETTINGS, *_OF_MATCHER] if o not in _OF_NAFI_ALONE])
def pfnm(task: Task, **options: Any) -> FusionResult:
    """The same without a penalty; direction="top-down" is the public code's order of layers."""
    return nafi(task, penalty=0.0, **options)
