"""What is a fused network worth at which size? Several budgets and ways to combine models at once.

Hides: that every method shares its statistics among budgets. Promises: every point was scored by
the same function; clients, their ensemble and whole clients side by side stand beside them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from torch import nn

from nafi.errors import InputError
from nafi.fusion.api import fuse
from nafi.fusion.budget import measured_size, read_budget
from nafi.fusion.judge import Validate
from nafi.fusion.method import Method, Progress
from nafi.fusion.networks import FusionWarning
from nafi.fusion.registry import make_method
from nafi.fusion.result import FusionResult, Scores
from nafi.graph import Inputs

BUDGETS = ("0.5 params", "1.0 params", "2.0 params", "4.0 params")
METHODS_COMPARED = ("stack", "nafi")
WHOLE = "whole clients"


@dataclass(frozen=True)
class Point:
    """One network: how it was made, its size, and its score.

    params, flops: parameters and multiply-adds of one input, times those of one client
    """

    method: str
    budget: str
    params: float
    flops: float
    score: float


@dataclass(frozen=True, eq=False)
class Frontier:
    """Scores over sizes.

    points: fused networks and whole clients side by side; then each client, and the ensemble
    best: the fused network with the highest score
    """

    points: tuple[Point, ...]
    best: FusionResult

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain data for JSON and for the page, NaN as None."""
        return [
            asdict(point) | {"score": point.score if isfinite(point.score) else None}
            for point in self.points
        ]


def frontier(
    models: Sequence[nn.Module],
    example_inputs: Inputs,
    *,
    validate: Validate,
    probe: object,
    budgets: Sequence[str | float] = BUDGETS,
    methods: Sequence[str] = METHODS_COMPARED,
    class_counts: Any = None,
    sample_counts: Any = None,
    head: Sequence[Any] | None = None,
    names: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Frontier:
    """Fuse models within several budgets, and score all results.

    validate, probe, head, class_counts, sample_counts, names, progress: as `nafi.fuse` has them
    budgets: in params or flops, times one client's; methods that merge cannot have less than one
    methods: names of methods with a budget

    Whole clients side by side, the best first, are the control of every size.
    """
    plans = [_plan(method, budgets) for method in methods]
    plans.append(make_method("stack", keep=list(range(1, len(models) + 1))))
    points: list[Point] = []
    results: list[FusionResult] = []
    for method in filter(None, plans):
        known = method.used(class_counts=class_counts, sample_counts=sample_counts, probe=probe)
        with warnings.catch_warnings():
            # Which results are worse than a client is what the points show.
            warnings.simplefilter("ignore", FusionWarning)
            result = fuse(
                models,
                example_inputs,
                method,
                validate=validate,
                head=head,
                names=names,
                progress=progress,
                **known,
            )
        points += _points(result)
        results.append(result)
    best = max(results, key=lambda result: float(result.diagnostics["score"]))
    assert best.scores is not None
    points += _alone(best.scores, models, example_inputs)
    return Frontier(tuple(points), best)


def _plan(method: str, budgets: Sequence[str | float]) -> Method | None:
    """A method with the budgets that it can keep; None if there is none."""
    read = [read_budget(budget) for budget in budgets]
    if any(budget.unit == "bytes" for budget in read):
        raise InputError("budgets: expected params or flops, such as '2.0 params', not bytes")
    merges = method != "stack"
    allowed = [str(budget) for budget in read if budget.amount >= 1 or not merges]
    return make_method(method, budget=allowed) if allowed else None


def _points(result: FusionResult) -> Iterator[Point]:
    for entry in result.diagnostics["scores"]:
        size, whole = entry["size"], entry.get("keep")
        label = f"{whole} kept" if whole is not None else str(entry.get("budget", ""))
        method = WHOLE if whole is not None else str(result.diagnostics["method"])
        sizes = size["params_of_client"], size["flops_of_client"]
        yield Point(method, label, *sizes, float(entry["score"]))


def _alone(scores: Scores, models: Sequence[nn.Module], inputs: Inputs) -> Iterator[Point]:
    """The clients and their ensemble."""
    for name, model, score in zip(scores.names, models, scores.clients, strict=True):
        size = measured_size(model, models, inputs)
        yield Point("client", name, size["params_of_client"], size["flops_of_client"], score)
    if scores.ensemble is not None:
        count = float(len(models))
        yield Point("ensemble", "all clients", count, count, scores.ensemble)
