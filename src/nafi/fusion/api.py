"""`fuse`: several models in, one model out.

Hides: the methods. Promises: all checks of models and options come before any work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.fusion.clients import Array, check_clients
from nafi.fusion.method import Method, Progress
from nafi.fusion.registry import make_method
from nafi.fusion.result import FusionResult
from nafi.graph import Inputs, ModelSpec, check_inputs

Validate = Callable[[nn.Module], float]


def fuse(
    models: Sequence[nn.Module],
    example_inputs: Inputs,
    method: str | Method = "nafi",
    *,
    class_counts: npt.ArrayLike | None = None,
    sample_counts: npt.ArrayLike | None = None,
    input_moments: Sequence[Mapping[str, Array]] | None = None,
    spec: ModelSpec | None = None,
    names: Sequence[str] | None = None,
    probe: Any = None,
    validate: Validate | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> FusionResult:
    """Fuse models of one architecture that were trained apart into one.

    Args:
        models: S networks; their widths may differ (except for fedavg and rebasin). They are left
            as they are.
        example_inputs: the arguments of a network's forward, as a tuple; only shapes matter.
        method: nafi, pfnm, ot, rebasin, fedavg, ensemble, or the name of a method that another
            package provides; or a `Method` that was made before.
        class_counts: (S, K) samples per model and class: the output layer is then averaged by who
            knows which class. Without it, models weigh the same, or by `sample_counts` (S,).
        input_moments: for each model {weight: mean squares of its inputs}, see
            `nafi.input_moments`; inputs that are mostly zero then count for little.
        spec: the groups of the first model, from `nafi.groups`, if you have them.
        names: what errors call the models; progress: called with (next step, done, total).
        validate: a function of the fused model, the higher the better, such as its accuracy on data
            that clients held back. Its score is in `diagnostics`; where an option lists several
            values, the best is kept.
        options: of the method, see `nafi.fusion.Nafi` and the other classes, or `nafi methods`.

    What a method does not use, such as counts for ot, rebasin and ensemble, is refused.

    Returns:
        A `FusionResult`; its `model` is in eval mode.
    """
    chosen = make_method(method, **options)
    chosen.check_uses(
        class_counts=class_counts,
        sample_counts=sample_counts,
        input_moments=input_moments,
        probe=probe,
    )
    clients = check_clients(models, class_counts, sample_counts, names, input_moments)
    check_inputs(example_inputs)
    if spec is not None and not isinstance(spec, ModelSpec):
        raise InputError(f"spec: found {type(spec).__name__}, expected a ModelSpec of nafi.groups")
    for name, function in (("progress", progress), ("validate", validate)):
        if function is not None and not callable(function):
            raise InputError(f"{name}: found {function!r}, expected a function")
    if validate is None:
        chosen.check_one_variant()
    report = progress or (lambda step, done, total: None)
    start = time.perf_counter()
    prepared = chosen.prepare(clients, example_inputs, spec)
    if probe is not None:
        prepared = replace(prepared, probe=(probe,) if isinstance(probe, Tensor) else probe)
    if validate is None:
        result = chosen.fuse(prepared, report)
    else:
        result = _best(chosen, prepared, validate, report)
    diagnostics = {
        "method": chosen.name,
        "models": len(clients),
        "options": chosen.settings(),
        "seconds": time.perf_counter() - start,
    }
    return replace(result, diagnostics={**diagnostics, **result.diagnostics})


def _best(method: Method, prepared: Any, validate: Validate, progress: Progress) -> FusionResult:
    """The result of the variant with the highest score, with the scores of all."""
    best, highest = None, -np.inf
    scores = []
    for variant in method.variants():
        result = variant.fuse(prepared, progress)
        score = _score(validate, result.model)
        entry = {**variant.differences(method), "score": score}
        scores.append({**entry, "widths": result.widths})
        if score > highest:
            diagnostics = {**result.diagnostics, **entry, "scores": scores}
            best, highest = replace(result, diagnostics=diagnostics), score
    if best is None:
        raise InputError("validate: every score is NaN or minus infinity; there is no best")
    return best


def _score(validate: Validate, model: nn.Module) -> float:
    value = validate(model)
    try:
        score = float(value)
    except (TypeError, ValueError):
        raise InputError(f"validate: returned {value!r}, expected a number") from None
    return -np.inf if np.isnan(score) else score
