"""nafi and pfnm: neurons matched by the Beta-Bernoulli process, group by group.

Hides: options, and the choice among penalties. Promises: one descent for both methods and for both
directions; they differ in the penalty and in the order of the groups alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any

import numpy as np
from torch import nn

from nafi.errors import InputError
from nafi.fusion.base import FusionResult, Progress, Task, check_switch, fuser
from nafi.fusion.clients import Array
from nafi.fusion.descent import Descent, Matcher
from nafi.fusion.features import Moments
from nafi.fusion.merge import check_classes, fused_network
from nafi.fusion.moments import check_moments
from nafi.fusion.networks import Networks, check_clip, prepare
from nafi.fusion.screen import Screen
from nafi.fusion.widths import MaxWidth, width_limits

DIRECTIONS = ("bottom-up", "top-down")

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
    clip: float | None = None
    trim: float = 0.0

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

        Screen(self.clip, self.trim)  # refuses what makes no sense

    @property
    def screen(self) -> Screen:
        return Screen(self.clip, self.trim)

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
        descent = Descent(networks, matcher, self.limits, self.moments)
        descent.run(self.settings.direction, self.progress)
        widths = descent.widths
        model, spec, architecture = fused_network(
            networks,
            descent.placements,
            widths,
            restore_norm=self.settings.restore_norm,
            screen=self.settings.screen,
        )
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
    check_clip(settings.screen, task.batchnorm)
    networks = networks.screened(settings.screen)
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
