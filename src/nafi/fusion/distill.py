"""The last step where there is time for it: some training on the probe, without labels.

Promises: the weights of the fused network are trained to say what the ensemble of its clients says,
and are kept where that helps on held-out inputs; the result that was given stays as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy.typing as npt
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.fusion.clients import Clients, check_clients
from nafi.fusion.familiarity import familiarity
from nafi.fusion.imitation import check_imitable, imitate
from nafi.fusion.judge import agreement
from nafi.fusion.method import Progress
from nafi.fusion.networks import FusionWarning
from nafi.fusion.result import FusionResult
from nafi.fusion.synthetic import read_or_make
from nafi.graph import Inputs, ModelSpec, copy_network
from nafi.options import FUNCTION, SWITCH, number, optional, whole

_OPTIONS = {
    "steps": whole(1),
    "rate": number(above=0),
    "batch": whole(1),
    "seed": whole(0, 2**63 - 1),
    "weigh_inputs": SWITCH,
    "progress": optional(FUNCTION),
}


def distill(
    result: FusionResult,
    models: Sequence[nn.Module],
    probe: object,
    *,
    class_counts: npt.ArrayLike | None = None,
    sample_counts: npt.ArrayLike | None = None,
    steps: int = 200,
    rate: float = 3e-4,
    batch: int = 64,
    seed: int = 0,
    weigh_inputs: bool = True,
    progress: Progress | None = None,
) -> FusionResult:
    """Train a fused network to say what the ensemble of its clients says; no labels are needed.

    result: of `nafi.fuse`; models, probe, class_counts, sample_counts: as that took them
    steps, rate, batch: of Adam, on three of every four inputs of the probe. Normalisation keeps its
        statistics
    weigh_inputs: let those models count more for an input whose batch normalisation remembers its
        like, if they have any and the probe is not made up

    `result.diagnostics["distilled"]` has the error on held-out inputs, before and after. If no step
    lowered it, the network is as it was, and a warning says so. A head that was solved from labels
    is trained away from them: solve it again afterwards.
    """
    _check_options(
        steps=steps,
        rate=rate,
        batch=batch,
        seed=seed,
        weigh_inputs=weigh_inputs,
        progress=progress,
    )
    if not isinstance(result, FusionResult):
        raise InputError(
            f"result: found {type(result).__name__}, expected what nafi.fuse returned, with all "
            "that it knows of its model"
        )
    clients = check_clients(models, class_counts, sample_counts, None)
    spec, examples = _known_of(result)
    clients.check_classes(spec)
    check_imitable(clients, examples, result.model)
    report = progress or (lambda step, done, total: None)
    inputs = read_or_make(probe, clients.models, examples, report)
    by_input = weights_by_input(clients, probe, inputs) if weigh_inputs else None
    found = distill_on(
        result,
        clients,
        inputs,
        report,
        steps=int(steps),
        rate=float(rate),
        batch=int(batch),
        seed=int(seed),
        by_input=by_input,
    )
    return replace(found, scores=None, agreement=agreement(clients, found.model, inputs, by_input))


def _known_of(result: FusionResult) -> tuple[ModelSpec, Inputs]:
    """The spec of a fused network, or of one of several side by side, and example inputs."""
    for spec in (result.architecture, *(body.architecture for body in result.bodies)):
        if spec is not None and spec.example_inputs is not None:
            return spec, spec.example_inputs
    raise InputError(
        f"distill: method {result.diagnostics.get('method')} knows nothing of its inputs; give "
        "nafi.fuse(..., distill=200) instead"
    )


def weights_by_input(clients: Clients, probe: object, inputs: Inputs) -> Tensor | None:
    """(S, inputs) whose word counts for the inputs of a probe; None for inputs that are made up."""
    return None if isinstance(probe, str) else familiarity(clients.models, inputs)


def distill_on(
    result: FusionResult,
    clients: Clients,
    inputs: Inputs,
    progress: Progress,
    *,
    steps: int = 200,
    rate: float = 3e-4,
    batch: int = 64,
    seed: int = 0,
    by_input: Tensor | None = None,
) -> FusionResult:
    """The same on a probe that was read, for clients and options that were checked."""
    student = copy_network(result.model).eval()
    before, after = imitate(
        student,
        clients,
        inputs,
        lambda step: progress("distilling", step, steps),
        steps=steps,
        rate=rate,
        batch=batch,
        seed=seed,
        by_input=by_input,
    )
    if not after < before:
        warnings.warn(
            "distill: no step brought the network nearer to the ensemble on the inputs that are "
            "held out, so it is as it was; give more inputs, or nafi.distill a smaller rate",
            FusionWarning,
            stacklevel=3,
        )
    weighed = by_input is not None
    distilled = {"before": before, "after": after, "steps": steps, "weighed_by_input": weighed}
    diagnostics = {**result.diagnostics, "distilled": distilled}
    return replace(result, model=student, diagnostics=diagnostics)


def _check_options(**found: object) -> None:
    for name, value in found.items():
        _OPTIONS[name].check(value, name)
