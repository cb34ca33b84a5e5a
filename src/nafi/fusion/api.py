"""`fuse`: several models in, one model out.

Hides: the methods. Promises: all checks of models and options come before any work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.fusion.budget import measured_size
from nafi.fusion.clients import Array, Clients, check_clients
from nafi.fusion.distill import distill_on, weights_by_input
from nafi.fusion.head import solve_head, statistics
from nafi.fusion.imitation import check_imitable, check_trainable
from nafi.fusion.judge import (
    FROM_FILES,
    WITHOUT_PROBE,
    Validate,
    agreement,
    score,
    score_clients,
    warn_if_worse,
)
from nafi.fusion.method import Method, Progress
from nafi.fusion.probe import (
    NOISE,
    SYNTHETIC,
    is_word,
    made_up_probe,
    noise_stands_for,
    read_probe,
)
from nafi.fusion.registry import make_method
from nafi.fusion.result import FusionResult
from nafi.fusion.stored import StoredModels
from nafi.fusion.synthetic import synthetic_probe
from nafi.graph import (
    Inputs,
    ModelSpec,
    Normalisation,
    calibrate,
    call,
    check_inputs,
    materialise,
)
from nafi.options import FUNCTION, optional, whole

# What is done to a result, one after the other, once a method has made it.
_Step = Callable[[FusionResult], FusionResult]
_AUTO = "auto"


def fuse(
    models: Sequence[nn.Module],
    example_inputs: Inputs,
    method: str | Method = "nafi",
    *,
    probe: object = None,
    validate: Validate | None = None,
    distill: int = 0,
    head: Iterable[Any] | None = None,
    class_counts: npt.ArrayLike | None = None,
    sample_counts: npt.ArrayLike | None = None,
    input_moments: Sequence[Mapping[str, Array]] | None = None,
    spec: ModelSpec | None = None,
    names: Sequence[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> FusionResult:
    """Fuse models of one architecture that were trained apart into one.

    Args:
        models: S networks; their widths may differ (except for fedavg and rebasin). They are left
            as they are. Or `nafi.open_models(...)`: files that are read a tensor at a time, so that
            thousands take the memory of one (nafi, pfnm and fedavg, without a probe).
        example_inputs: the arguments of a network's forward: a tuple, or a dict of keyword
            arguments; only shapes matter.
        method: nafi, pfnm, ot, rebasin, fedavg, stack, ensemble, or the name of a method that
            another package provides; or a `Method` that was made before.
        probe: some dozens of inputs without labels, such as the network is for: a tensor, a tuple
            or a dict of the network's arguments, or an iterable of such batches, as a DataLoader;
            at most 1024 are used. Neurons are then matched by what they do, layers refitted, and
            `agreement` says how far the result does what the ensemble of the models does.
            For whoever has none, "noise" makes inputs up, "synthetic" makes better ones of what
            batch normalisation remembers, and "auto" means noise where a method would miss a probe:
            with two or more hidden layers, or to prune to a budget. Without a probe,
            `diagnostics["advice"]` then says what to expect.
        validate: a function of a model, the higher the better, such as its accuracy on data that
            clients held back. Models, ensemble and result are scored (`scores`), with a warning if
            the result is worse than a model; where an option lists several values, the best is
            kept.
        distill: with a probe, so many steps of training towards what the ensemble says, as the last
            step: some 200 are worth up to a point, and ten where clients' inputs differ in kind
            and networks have batch normalisation. See `nafi.distill`.
        head: labelled batches, as `nafi.statistics` takes them, if the server has some: the last
            layer of the result is solved from them. Of clients' own labels, see `nafi.solve_head`.
        class_counts: (S, K) samples per model and class: the output layer is then averaged by who
            knows which class. Without it, models weigh the same, or by `sample_counts` (S,).
        input_moments: for each model {weight: mean squares of its inputs}, see
            `nafi.input_moments`; inputs that are mostly zero then count for little.
        spec: the groups of the first model, from `nafi.groups`, if you have them.
        names: what errors call the models; progress: called with (next step, done, total).
        options: of the method, see `nafi.fusion.Nafi` and the other classes, or `nafi methods`.

    What a method does not use, such as counts for ot, rebasin and ensemble, is refused.

    Returns:
        A `FusionResult`; its `model` is in eval mode.
    """
    chosen = make_method(method, **options)
    automatic = is_word(probe, _AUTO)
    probe = None if automatic else probe
    chosen.check_uses(
        class_counts=class_counts,
        sample_counts=sample_counts,
        input_moments=input_moments,
        probe=_AUTO if automatic and "probe" in chosen.uses else probe,
    )
    check_inputs(example_inputs)
    if isinstance(models, StoredModels):
        models = models.with_inputs(example_inputs)
    clients = check_clients(models, class_counts, sample_counts, names, input_moments)
    chosen.check_stored(clients)
    if clients.stored and probe is not None:
        raise InputError(
            "probe: what all models do on it must be in memory at once; load the models, or leave "
            "it out: those in files are matched by their weights"
        )
    if not clients.stored:
        for model in clients.models:  # loaded weights leave lazy layers without their sizes
            materialise(model, example_inputs)
    _check_arguments(spec, head, distill, probe)
    optional(FUNCTION).check(progress, "progress")
    optional(FUNCTION).check(validate, "validate")
    if validate is None:
        chosen.check_one_variant()
    report = progress or (lambda step, done, total: None)
    start = time.perf_counter()
    inputs = None
    if probe is not None and not is_word(probe, SYNTHETIC):
        inputs = read_probe(probe, clients.models[0], example_inputs)
    prepared = chosen.prepare(clients, example_inputs, spec)
    if distill:
        check_imitable(clients, example_inputs)
        if inputs is not None:
            check_trainable(inputs)
    automatic = automatic and not clients.stored
    missed = probe is None and noise_stands_for(example_inputs) and chosen.misses_probe(prepared)
    # Work, which comes after all checks.
    if is_word(probe, SYNTHETIC):
        inputs = synthetic_probe(clients.models, example_inputs, report)
    elif automatic and missed:
        inputs = made_up_probe(clients.models[0], example_inputs)
        probe = None if inputs is None else NOISE
    by_input = None
    if inputs is not None:
        if getattr(chosen, "weigh_inputs", True):
            by_input = weights_by_input(clients, probe, inputs)
        prepared = chosen.with_probe(prepared, inputs, by_input)
    steps = _steps(distill, head, clients, inputs, by_input, report)
    steps.append(partial(_measured, clients=clients.models, inputs=example_inputs))
    fuse_variant = partial(_fuse, prepared=prepared, probe=inputs, steps=steps, progress=report)
    if validate is None:
        result = fuse_variant(chosen)
    else:
        # Clients first, so that a function that fails does so before the work.
        alone = score_clients(clients, example_inputs, validate, report)
        prepared = chosen.informed(prepared, alone.clients)
        result = _best(chosen, validate, partial(fuse_variant, prepared=prepared), report)
        result = replace(result, scores=replace(alone, fused=result.diagnostics["score"]))
    del prepared, fuse_variant  # with all that was recorded on the probe
    if inputs is not None:
        report("comparing with the ensemble", 0, 1)
        result = replace(result, agreement=agreement(clients, result.model, inputs, by_input))
    diagnostics: dict[str, Any] = {
        "method": chosen.name,
        "models": len(clients),
        "options": chosen.settings(),
        "seconds": time.perf_counter() - start,
        "probe": _named(probe),
    }
    if chosen.used(class_counts=class_counts):
        diagnostics["class_counts"] = class_counts is not None
    if clients.stored:
        diagnostics["advice"] = FROM_FILES
    elif missed and inputs is None:
        diagnostics["advice"] = WITHOUT_PROBE
    result = replace(result, diagnostics={**diagnostics, **result.diagnostics})
    warn_if_worse(result)
    return result


def _named(probe: object) -> str:
    """What was refitted on, for people and files."""
    if probe is None:
        return "none"
    return probe if isinstance(probe, str) else "inputs"


def _check_arguments(spec: object, head: object, distill: int, probe: object) -> None:
    if spec is not None and not isinstance(spec, ModelSpec):
        raise InputError(f"spec: found {type(spec).__name__}, expected a ModelSpec of nafi.groups")
    if head is not None and not isinstance(head, Iterable):
        raise InputError(f"head: found {type(head).__name__}, expected batches (inputs, labels)")
    whole(0).check(distill, "distill")
    if distill and probe is None:
        raise InputError("distill: needs a probe, the inputs to train on: probe=")


def _fuse(
    method: Method,
    prepared: Any,
    probe: Inputs | None,
    steps: Sequence[_Step],
    progress: Progress,
) -> FusionResult:
    """One variant's result; averaged normalisation is measured where there are inputs for it."""
    result = method.fuse(prepared, progress)
    if probe is not None and getattr(method, "batchnorm", None) == Normalisation.AVERAGE:
        calibrate(_Spread(result.model), [(probe,)])
    for step in steps:
        result = step(result)
    return result


def _steps(
    distill: int,
    head: Iterable[Any] | None,
    clients: Clients,
    inputs: Inputs | None,
    by_input: Tensor | None,
    progress: Progress,
) -> list[_Step]:
    """What is done to the result of a method: training on the probe, then the last layer."""
    steps: list[_Step] = []
    if distill and inputs is not None:
        distilled = partial(distill_on, clients=clients, inputs=inputs, by_input=by_input)
        steps.append(partial(distilled, progress=progress, steps=int(distill)))
    if head is not None:
        steps.append(partial(_with_head, batches=list(head), progress=progress))
    return steps


def _with_head(result: FusionResult, batches: Sequence[Any], progress: Progress) -> FusionResult:
    """With the last layer solved from labelled batches."""
    progress("solving the last layer", 0, 1)
    model = solve_head(result.model, [statistics(result.model, batches)])
    return replace(result, model=model)


def _measured(result: FusionResult, clients: Sequence[nn.Module], inputs: Inputs) -> FusionResult:
    """With its size."""
    size = measured_size(result.model, clients, inputs)
    return replace(result, diagnostics={**result.diagnostics, "size": size})


class _Spread(nn.Module):
    """A network that takes its arguments in one tuple."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Inputs) -> Any:
        return call(self.model, inputs)


def _best(
    method: Method,
    validate: Validate,
    fuse_variant: Callable[[Method], FusionResult],
    progress: Progress,
) -> FusionResult:
    """The result of the variant with the highest score, with the scores of all."""
    best, highest = None, -np.inf
    scores = []
    for variant in method.variants():
        result = fuse_variant(variant)
        progress("scoring the result", 0, 1)
        found = score(validate, result.model)
        entry = {**variant.differences(method), "score": found}
        size = result.diagnostics["size"]
        scores.append({**entry, "widths": result.widths, "size": size})
        if found > highest:
            diagnostics = {**result.diagnostics, **entry, "scores": scores}
            best, highest = replace(result, diagnostics=diagnostics), found
    if best is None:
        raise InputError("validate: every score is NaN or minus infinity; there is no best")
    return best
