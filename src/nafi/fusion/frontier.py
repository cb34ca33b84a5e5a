"""What is a fused network worth at which size? Several budgets and ways to combine models at once.

Hides: that every method shares its statistics among budgets. Promises: every point was scored by
the same function; clients, their ensemble and whole clients side by side stand beside them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from torch import Tensor, nn

from nafi.errors import InputError
from nafi.fusion.api import fuse
from nafi.fusion.budget import measured_size, read_budget
from nafi.fusion.clients import check_clients
from nafi.fusion.judge import Validate
from nafi.fusion.method import Method, Progress
from nafi.fusion.networks import FusionWarning
from nafi.fusion.probe import SYNTHETIC, is_word
from nafi.fusion.registry import make_method
from nafi.fusion.result import FusionResult, Scores
from nafi.fusion.synthetic import synthetic_probe
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
    head: Iterable[Any] | None = None,
    names: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Frontier:
    """Fuse models within several budgets, and score all results.

    validate, probe, head, class_counts, sample_counts, names, progress: as `nafi.fuse` has them
    budgets: in params or flops, times one client's; those that a method cannot keep are left out
    methods: names of methods with a budget

    Whole clients side by side, the best first, are the control of every size.
    """
    if probe is None:
        raise InputError("probe: found none, expected inputs to refit by; give some dozens")
    budgets = [budgets] if isinstance(budgets, str | int | float) else list(budgets)
    methods = [methods] if isinstance(methods, str) else list(methods)
    _check_budgets(budgets)
    # Read or made once: every method meets the same.
    if is_word(probe, SYNTHETIC):
        clients = check_clients(models, class_counts, sample_counts, names)
        report = progress or (lambda step, done, total: None)
        probe = synthetic_probe(clients.models, example_inputs, report)
    if not isinstance(probe, str | tuple | Mapping | Tensor):
        probe = list(probe) if isinstance(probe, Iterable) else probe
    common: dict[str, Any] = {"validate": validate, "names": names, "progress": progress}
    common["head"] = None if head is None else list(head)
    known = {"class_counts": class_counts, "sample_counts": sample_counts, "probe": probe}

    def run(method: Method) -> FusionResult:
        with warnings.catch_warnings():
            # Which results are worse than a client is what the points show.
            warnings.simplefilter("ignore", FusionWarning)
            return fuse(models, example_inputs, method, **common, **method.used(**known))

    # What is wrong with models or data is found by the control, which is never too small.
    whole = run(make_method("stack", keep=list(range(1, len(models) + 1))))
    results = [result for method in methods for result in _within_budgets(method, budgets, run)]
    if not results:
        raise InputError("budgets: no method can keep any of them; allow more")
    results.append(whole)
    points = [point for result in results for point in _points(result)]
    best = max(results, key=lambda result: float(result.diagnostics["score"]))
    assert best.scores is not None
    points += _alone(best.scores, models, example_inputs)
    return Frontier(tuple(points), best)


def _check_budgets(budgets: Sequence[str | float]) -> None:
    if not budgets:
        raise InputError("budgets: found none, expected some, such as ['1.0 params', '2.0 params']")
    if any(read_budget(budget).unit == "bytes" for budget in budgets):
        raise InputError("budgets: expected params or flops, such as '2.0 params', not bytes")


def _within_budgets(
    method: str, budgets: Sequence[str | float], run: Callable[[Method], FusionResult]
) -> list[FusionResult]:
    """All budgets at once; one by one if the method cannot keep some, which are left out."""
    every = make_method(method, budget=list(budgets))
    try:
        return [run(every)]
    except InputError:
        results = []
        for budget in budgets:
            with suppress(InputError):
                results.append(run(make_method(method, budget=[budget])))
        return results


def _points(result: FusionResult) -> Iterator[Point]:
    for entry in result.diagnostics["scores"]:
        size, whole = entry["size"], entry.get("keep")
        stated = entry.get("budget", result.diagnostics["options"].get("budget"))
        label = f"{whole} kept" if whole is not None else str(stated)
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
