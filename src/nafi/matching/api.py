"""`match`, `match_path` and `place`: the public face of the matching core.

Hides: how options become checked inputs, a cost and a descent.
Promises: bad options raise `InputError` before any work is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from nafi.errors import InputError
from nafi.matching.columns import Index
from nafi.matching.cost import CostModel, EvidenceCost, PenalisedCost
from nafi.matching.descent import CoordinateDescent
from nafi.matching.divergence import Divergence, divergence_named
from nafi.matching.inputs import LARGEST, MatchingInput, Owners, Streamed, make_input
from nafi.matching.posterior import Posterior
from nafi.matching.prior import popularity_named
from nafi.matching.products import products_named
from nafi.matching.result import Matching


def match(
    neurons: Sequence[npt.ArrayLike | Matching],
    *,
    precisions: float | Sequence[npt.ArrayLike] = 1.0,
    prior_mean: npt.ArrayLike = 0.0,
    prior_precision: npt.ArrayLike = 1.0,
    owners: Sequence[Owners | None] | None = None,
    mass: float = 1.0,
    penalty: float = 0.1,
    divergence: str = "kl",
    dimension: float | None = None,
    sweeps: int = 10,
    max_width: int | None = None,
    compat: str = "paper",
    seed: int = 0,
    products: str = "float64",
) -> Matching:
    """Match the neurons of S models by the Beta-Bernoulli process (Algorithm `algori:nafi`).

    Neuron j of model s goes to the global neuron i that minimises, over all assignments of the
    model, `2 log((S-n_i)/n_i) + sum_d [eta_i^2/P_i - (eta_i + t w)^2/(P_i + t)] + lam D(i, i+w)`,
    or to a new one for `2 log(k S/gamma)` and the same sum at the prior.

    Args:
        neurons: S arrays (J_s, D); the widths J_s may differ. A `Matching` stands for all of its
            models: what they say of each global neuron enters with its own precision and number of
            owners, so that groups of models can be matched apart and then with each other. A
            `nafi.matching.Streamed` is read a model at a time.
        precisions: 1/variance of the neurons around their global neuron, t_s: a number, or a list
            with a number or a (D,) array for each model. 0: the model says nothing about a column.
        prior_mean: m0 of a global neuron, a number or (D,).
        prior_precision: t0 of a global neuron, a number or (D,), above 0.
        owners: for each model how many models its neurons stand for (`nafi.matching.Owners`), or
            None for one; such a model may have precisions of shape (J_s, 1) or (J_s, D). Not needed
            for a `Matching`, which brings its own precisions, too.
        mass: gamma > 0; more means that new global neurons cost less.
        penalty: lam; 0 is PFNM, a larger penalty usually means fewer global neurons.
        divergence: kl (the paper's), reverse_kl, jeffreys, hellinger, wasserstein2.
        dimension: the number of columns in the divergence's spread, the part that depends only on
            precisions; None for D, as in the paper. The spread grows with the number of columns,
            all other terms with the norm of the neurons.
        sweeps: maximum number of passes over the models after the first; fewer if no model would
            change its assignment given all others. A few neurons may alternate forever (a cycle of
            best responses): see `Matching.converged`.
        max_width: maximum number of global neurons, at least the widest model's; None: no limit.
        compat: "paper", or "pfnm-code" for the popularity terms of the public PFNM code
            (factor 1 instead of 2, counts capped at 10, and from a width of 700 on one new neuron
            at a time).
        seed: of the random order of the models in the sweeps.
        products: "float32" multiplies neurons in float32 and sums in float64, which takes about
            half the time where neurons are many and long. A product is off by at most 6.2e-5 times
            the norms of its two neurons, so nearly equal costs may be taken for each other.

    Returns:
        A `Matching`; for a single model, its own posterior.

    Cost: O(I J D) for each model and sweep with I global neurons, and an assignment problem.
    Memory: the neurons in float64 (twice if their precisions differ by column), about three times
    the global neurons, and 8 bytes for each neuron of a model and global neuron that one of its
    neurons may join (all of them with `max_width`).

    Examples:
        >>> import numpy as np
        >>> w = np.eye(3) * 5
        >>> matching = match([w, w[[2, 0, 1]]])
        >>> [assigned.tolist() for assigned in matching.assignments]
        [[0, 1, 2], [2, 0, 1]]
    """
    return match_path(
        neurons,
        penalties=[penalty],
        precisions=precisions,
        prior_mean=prior_mean,
        prior_precision=prior_precision,
        owners=owners,
        mass=mass,
        divergence=divergence,
        dimension=dimension,
        sweeps=sweeps,
        max_width=max_width,
        compat=compat,
        seed=seed,
        products=products,
    )[0]


def match_path(
    neurons: Sequence[npt.ArrayLike | Matching],
    penalties: Sequence[float],
    *,
    precisions: float | Sequence[npt.ArrayLike] = 1.0,
    prior_mean: npt.ArrayLike = 0.0,
    prior_precision: npt.ArrayLike = 1.0,
    owners: Sequence[Owners | None] | None = None,
    mass: float = 1.0,
    divergence: str = "kl",
    dimension: float | None = None,
    sweeps: int = 10,
    max_width: int | None = None,
    compat: str = "paper",
    seed: int = 0,
    products: str = "float64",
) -> list[Matching]:
    """`match` for each of several penalties, sharing the work that the descents have in common.

    The results are those of `match`, one per penalty and in the same order, up to ties that
    rounding decides. Once three descents have diverged, it keeps the inner products of all pairs of
    neurons, (sum of J_s)^2 doubles for each wide block of columns, if they take less than 1 GiB,
    and one copy of the global neurons for each descent. These products are always in float64.
    """
    if not isinstance(neurons, Streamed):
        neurons, precisions, owners = _summarised(neurons, precisions, owners)
    inputs = make_input(neurons, precisions, prior_mean, prior_precision, owners)  # type: ignore[arg-type]
    if dimension is None:
        dimension = len(inputs.columns.order)
    spread = _number(dimension, "dimension", 0.0)
    costs = _costs(penalties, divergence_named(divergence), spread)
    prior = popularity_named(compat, inputs.count, _number(mass, "mass", 1 / LARGEST))
    passes = _whole(sweeps, "sweeps", at_least=0)
    limit = _max_width(max_width, inputs)
    rng = np.random.default_rng(_whole(seed, "seed", at_least=0))
    multiply = products_named(products)
    return CoordinateDescent(inputs, costs, prior, limit, multiply).run(passes, rng)


def place(
    neurons: Sequence[npt.ArrayLike],
    found: Matching,
    *,
    precisions: float | Sequence[npt.ArrayLike] = 1.0,
    penalty: float = 0.1,
    divergence: str = "kl",
    dimension: float | None = None,
    compat: str = "paper",
) -> list[Index]:
    """Where the neurons of more models go among the global neurons of a matching.

    Every model is asked alone, as if it came after all models of the matching. Global neurons stay
    as they are, and none is opened, so the order of the models does not matter. For options see
    `match`; those of the prior are the matching's.

    Returns for each model a (J_s,) array, the global neuron of each local one.
    """
    rows, precision, owners = found.summary()
    known: Sequence[npt.ArrayLike] = [rows, *neurons]
    if isinstance(neurons, Streamed):
        read = neurons.read
        known = Streamed(
            [len(rows), *neurons.widths], rows.shape[1], lambda s: read(s - 1) if s else rows
        )
    alone = isinstance(precisions, Real) or getattr(precisions, "ndim", None) == 0
    each: list[Any] = [precisions] * len(neurons) if alone else list(precisions)  # type: ignore[arg-type]
    inputs = make_input(
        known,
        [precision, *each],
        *found.prior_of_columns,
        [owners, *[None] * len(neurons)],
    )
    if inputs.widest > found.width:
        raise InputError(f"place: a model is wider than the {found.width} neurons of the matching")
    spread = len(inputs.columns.order) if dimension is None else dimension
    cost = _costs([penalty], divergence_named(divergence), _number(spread, "dimension", 0.0))
    prior = popularity_named(compat, found.models + 1, 1.0)  # nothing is opened: no mass matters
    posterior = Posterior(inputs)
    posterior.taken(spare=found.width)
    posterior.observe(0, np.arange(found.width))
    descent = CoordinateDescent(inputs, cost, prior, found.width)
    return [descent.joined(posterior, s) for s in range(1, len(inputs.models))]


def _summarised(neurons: Any, precisions: Any, owners: Any) -> tuple[Any, Any, Any]:
    """The same with every `Matching` replaced by what its models say."""
    known = isinstance(neurons, Sequence) and not isinstance(neurons, str)
    found = [s for s, entry in enumerate(neurons) if isinstance(entry, Matching)] if known else []
    if not found:
        return neurons, precisions, owners
    alone = isinstance(precisions, Real) or getattr(precisions, "ndim", None) == 0
    rows, counted = list(neurons), list(owners or [None] * len(neurons))
    spread = [precisions] * len(rows) if alone else list(precisions)
    for s in found:
        rows[s], spread[s], counted[s] = neurons[s].summary()
    return rows, spread, counted


def _costs(penalties: Sequence[float], divergence: Divergence, dimension: float) -> list[CostModel]:
    is_array = isinstance(penalties, np.ndarray) and penalties.ndim == 1
    if not is_array and (isinstance(penalties, str) or not isinstance(penalties, Sequence)):
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


def _max_width(value: int | None, inputs: MatchingInput) -> int:
    if value is None:
        return sum(inputs.widths)
    width = _whole(value, "max_width", at_least=1)
    if width < inputs.widest:
        widest = inputs.widths.index(inputs.widest)
        raise InputError(
            f"max_width: found {width}, expected at least {inputs.widest}, the neurons of model "
            f"{widest}: no two neurons of one model may share a global neuron"
        )
    return width
