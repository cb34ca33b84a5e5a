"""`match` and `match_path`: the public face of the matching core.

Hides: how options become a problem, a cost and a descent.
Promises: bad options raise `InputError` before any work is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np
import numpy.typing as npt

from nafi.errors import InputError
from nafi.matching.cost import CostModel, EvidenceCost, PenalisedCost
from nafi.matching.descent import Descent
from nafi.matching.divergence import Divergence, divergence_named
from nafi.matching.prior import popularity_named
from nafi.matching.problem import LARGEST, Problem, build_problem
from nafi.matching.result import Matching


def match(
    neurons: Sequence[npt.ArrayLike],
    *,
    precisions: float | Sequence[npt.ArrayLike] = 1.0,
    prior_mean: npt.ArrayLike = 0.0,
    prior_precision: npt.ArrayLike = 1.0,
    mass: float = 1.0,
    penalty: float = 0.1,
    divergence: str = "kl",
    dimension: float | None = None,
    sweeps: int = 10,
    max_width: int | None = None,
    compat: str = "paper",
    seed: int = 0,
) -> Matching:
    """Match the neurons of S models by the Beta-Bernoulli process (Algorithm `algori:nafi`).

    Neuron j of model s goes to the global neuron i that minimises, over all assignments of the
    model, `2 log((S-n_i)/n_i) + sum_d [eta_i^2/P_i - (eta_i + t w)^2/(P_i + t)] + lam D(i, i+w)`,
    or to a new one for `2 log(k S/gamma)` and the same sum at the prior.

    Args:
        neurons: S arrays (J_s, D); the widths J_s may differ.
        precisions: 1/variance of the neurons around their global neuron, t_s: a number, or a list
            with a number or a (D,) array for each model. 0: the model knows nothing of a column.
        prior_mean, prior_precision: m0 and t0 of a global neuron, a number or (D,); t0 > 0.
        mass: gamma, the readiness to open new neurons; > 0.
        penalty: lam; 0 is PFNM, more penalty means fewer global neurons as a rule.
        divergence: kl (the paper's), reverse_kl, jeffreys, hellinger, wasserstein2.
        dimension: how many columns the divergence's spread, the part that depends on precisions
            alone, is counted for; None for as many as there are, which is the paper's formula.
            It grows with the columns while everything else grows with the size of the neurons.
        sweeps: most passes over the models after the first; fewer if no model would change its
            assignment given all others. A few neurons may go to and fro for ever (a cycle of best
            responses); `Matching.converged` tells.
        max_width: most global neurons, at least the widest model's; None for no limit.
        compat: "paper", or "pfnm-code" for the popularity terms of the public PFNM code
            (factor 1 instead of 2, counts capped at 10, and from a width of 700 on one new neuron
            at a time).
        seed: decides the order of the models in the sweeps.

    Returns:
        A `Matching`; with one model alone, its own posterior.

    Cost: O(I J D) for each model and sweep with I global neurons, and an assignment problem.
    Memory: the neurons in float64 (twice if their precisions differ by column), and at most
    about six times the global neurons.

    >>> import numpy as np
    >>> w = np.eye(3) * 5
    >>> found = match([w, w[[2, 0, 1]]])
    >>> [a.tolist() for a in found.assignments]
    [[0, 1, 2], [2, 0, 1]]
    """
    return match_path(
        neurons,
        penalties=[penalty],
        precisions=precisions,
        prior_mean=prior_mean,
        prior_precision=prior_precision,
        mass=mass,
        divergence=divergence,
        dimension=dimension,
        sweeps=sweeps,
        max_width=max_width,
        compat=compat,
        seed=seed,
    )[0]


def match_path(
    neurons: Sequence[npt.ArrayLike],
    penalties: Sequence[float],
    *,
    precisions: float | Sequence[npt.ArrayLike] = 1.0,
    prior_mean: npt.ArrayLike = 0.0,
    prior_precision: npt.ArrayLike = 1.0,
    mass: float = 1.0,
    divergence: str = "kl",
    dimension: float | None = None,
    sweeps: int = 10,
    max_width: int | None = None,
    compat: str = "paper",
    seed: int = 0,
) -> list[Matching]:
    """`match` for each of several penalties, sharing what the descents have in common.

    The results are those of `match`, one per penalty in the given order, up to ties that rounding
    decides. Once three descents have diverged it keeps the products of all neurons with each other,
    (sum of J_s)^2 doubles for each wide block of columns, where that is below 1 GiB; and the global
    neurons once for each descent.
    """
    problem = build_problem(neurons, precisions, prior_mean, prior_precision)
    columns = float(len(problem.columns.order))
    counted = columns if dimension is None else _number(dimension, "dimension", 0.0)
    costs = _costs(penalties, divergence_named(divergence), counted)
    prior = popularity_named(compat, len(problem.models), _number(mass, "mass", 1 / LARGEST))
    passes = _whole(sweeps, "sweeps", at_least=0)
    limit = _max_width(max_width, problem)
    rng = np.random.default_rng(_whole(seed, "seed", at_least=0))
    return Descent(problem, costs, prior, limit).run(passes, rng)


def _costs(penalties: Sequence[float], divergence: Divergence, dimension: float) -> list[CostModel]:
    array = isinstance(penalties, np.ndarray) and penalties.ndim == 1
    if not array and (isinstance(penalties, str) or not isinstance(penalties, Sequence)):
        raise InputError(f"penalties: found {penalties!r}, expected a list of numbers")
    if len(penalties) == 0:
        raise InputError("penalties: found none, expected at least one number")
    several = len(penalties) > 1
    names = [f"penalties[{index}]" if several else "penalty" for index in range(len(penalties))]
    values = [_number(value, name, 0.0) for value, name in zip(penalties, names, strict=True)]
    return [
        PenalisedCost(value, divergence, dimension) if value else EvidenceCost() for value in values
    ]


def _number(value: float, name: str, at_least: float) -> float:
    if not isinstance(value, Real) or isinstance(value, bool | np.bool_):
        raise InputError(f"{name}: found {value!r}, expected a number")
    if not at_least <= value <= LARGEST:
        raise InputError(f"{name}: found {value!r}, expected {at_least:g} to {LARGEST:g}")
    return float(value)


def _whole(value: int, name: str, at_least: int) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < at_least:
        raise InputError(f"{name}: found {value!r}, expected a whole number of at least {at_least}")
    return int(value)


def _max_width(value: int | None, problem: Problem) -> int:
    if value is None:
        return sum(model.width for model in problem.models)
    width = _whole(value, "max_width", at_least=1)
    if width < problem.widest:
        widest = max(problem.models, key=lambda model: model.width)
        raise InputError(
            f"max_width: found {width}, expected at least {widest.width}, the neurons of model "
            f"{widest.index}: no two neurons of one model may share a global neuron"
        )
    return width
