"""`fuse`: several models in, one model out.

Hides: the methods. Promises: all checks of models and options come before any work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt
from torch import nn

from nafi.errors import InputError
from nafi.fusion import averaging, bayesian, ensemble, rebasin, transport  # noqa: F401 (register)
from nafi.fusion.base import FusionResult, Progress, Task, check_whole, fuser_named
from nafi.fusion.clients import check_clients
from nafi.graph.spec import ModelSpec
from nafi.graph.trace import Inputs, check_inputs


def fuse(
    models: Sequence[nn.Module],
    example_inputs: Inputs,
    *,
    method: str = "nafi",
    class_counts: npt.ArrayLike | None = None,
    sample_counts: npt.ArrayLike | None = None,
    seed: int = 0,
    spec: ModelSpec | None = None,
    batchnorm: str = "attach",
    names: Sequence[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> FusionResult:
    """Fuse models of one architecture that were trained apart into one.

    Args:
        models: S networks; their widths may differ (except for fedavg and rebasin). They are left
            as they are.
        example_inputs: the arguments of a network's forward, as a tuple; only shapes matter.
        method: nafi, pfnm, ot, rebasin, fedavg or ensemble.
        class_counts: (S, K) samples per model and class: the output layer is then averaged by who
            knows which class. Without it, models weigh the same, or by `sample_counts` (S,).
        spec: the groups of the first model, from `nafi.groups`, if you have them.
        batchnorm: normalisation is folded into the layers before matching; "attach" puts an
            identity back, to train on; "fold" leaves it folded. With "average" it is only the
            matching that looks at folded layers, and normalisation is averaged with its neurons:
            for models from a common start, or to `nafi.calibrate` the result on a few inputs.
        names: what errors call the models; progress: called with (next step, done, total).

    Options of nafi and pfnm:
        penalty: lam, for nafi only: more means fewer neurons. A list needs validate=, a function of
            the fused model whose result is the higher the better; the best is kept and
            `diagnostics["scores"]` tells all.
        divergence: kl, reverse_kl, jeffreys, hellinger, wasserstein2; for nafi only.
        evidence, prior_ratio: the squared norm of a mean neuron over the noise variance of its
            group, and prior over noise variance; more evidence means more neurons, closer to
            keeping all. `noise_precision` and `prior_precision` set absolute ones instead.
        mass: gamma, the readiness to open new neurons.
        max_width: most neurons of a group: a whole number, a float as a factor of the local width,
            or either by group name.
        direction: "bottom-up", or "top-down" as in the public PFNM code.
        restore_norm: give merged neurons the mean norm of their members.
        input_moments: for each model {weight: mean squares of its inputs}, see
            `nafi.input_moments`; inputs that are mostly zero then count for little.
        clip, trim: against models that may be harmful. Neurons longer than `clip` times the median
            of their layer are shortened; every number is the mean over the models that own it
            without the share `trim` of them at either end, and neurons of fewer models are not
            read. 2.0 and 0.2, with a max_width of 1.5, are a start.
        sweeps, compat: as in `nafi.match`.

    Options of others: ot: reference, metric, restore_norm; rebasin: sweeps, restore_norm;
    ensemble: average ("logits" or "probabilities").

    Returns:
        A `FusionResult`; its `model` is in eval mode.
    """
    function = fuser_named(method, options)
    clients = check_clients(models, class_counts, sample_counts, names)
    check_inputs(example_inputs)
    if spec is not None and not isinstance(spec, ModelSpec):
        raise InputError(f"spec: found {type(spec).__name__}, expected a ModelSpec of nafi.groups")
    if progress is not None and not callable(progress):
        raise InputError(f"progress: found {progress!r}, expected a function")
    check_whole(seed, "seed", 0)
    task = Task(
        clients, example_inputs, spec, batchnorm, seed, progress or (lambda step, done, total: None)
    )
    start = time.perf_counter()
    result = function(task, **options)
    seconds = time.perf_counter() - start
    told = {
        "method": method,
        "models": len(clients),
        "options": options,
        "seed": seed,
        "seconds": seconds,
    }
    return replace(result, diagnostics={**told, **result.diagnostics})
