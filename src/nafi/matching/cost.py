"""The cost of assigning a local neuron to a global one.

Hides: the terms of each method. Promises: a `CostModel` writes the costs of all pairs as quadratic
functions, so that a cost matrix takes one product of the neurons for any number of terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from nafi.matching.columns import Array
from nafi.matching.divergence import Divergence
from nafi.matching.gaussian import Gaussian
from nafi.matching.inputs import LocalModel, MatchingInput
from nafi.matching.prior import BetaBernoulli
from nafi.matching.quadratic import Quadratic


class CostModel(Protocol):
    """What the coordinate descent needs of a method: the costs of all pairs of neurons."""

    def __call__(self, posterior: Gaussian, model: LocalModel, products: Sequence[Array]) -> Array:
        """(I, J) cost of assigning neuron j of `model` to global neuron i, without popularity.

        A new neuron is a global neuron whose posterior is the prior. All neurons of the model have
        one precision and stand for equally many models: see `LocalModel.parts`.
        """


def evidence(posterior: Gaussian, precision: Array) -> Quadratic:
    """`sum_d eta^2/P - (eta + t w)^2/(P + t)`, the data term of `pfnm_cost`.

    posterior: I Gaussians; precision: (B,) of the observation, t.
    Expanded: `eta^2 t/(P P') - 2 t/P' eta w - t^2/P' w^2` with `P' = P + t`.
    """
    before = posterior.precision
    share = precision / (before + precision)
    return Quadratic(np.zeros(len(before)), share / before, -2.0 * share, -share * precision)


class EvidenceCost:
    """PFNM: the change of the log posterior alone (`pfnm_cost`)."""

    def __call__(self, posterior: Gaussian, model: LocalModel, products: Sequence[Array]) -> Array:
        return evidence(posterior, model.precision).evaluate(posterior, model, products)


class PenalisedCost:
    """NAFI: `EvidenceCost` plus a penalty on how far the match moves the global neuron.

    dimension: the number of columns in the divergence's spread
    """

    def __init__(self, penalty: float, divergence: Divergence, dimension: float) -> None:
        self.penalty = penalty
        self.divergence = divergence
        self.dimension = dimension

    def __call__(self, posterior: Gaussian, model: LocalModel, products: Sequence[Array]) -> Array:
        cost = evidence(posterior, model.precision)
        moved = self.divergence.moved(posterior, model.precision, self.dimension, model.steps)
        if self.divergence.is_quadratic:
            both = cost + moved.scaled(self.penalty)
            return both.evaluate(posterior, model, products)
        values = cost.evaluate(posterior, model, products)
        total = moved.evaluate(posterior, model, products)
        return values + self.penalty * self.divergence.link(total)


def joint_objective(
    inputs: MatchingInput, posterior: Gaussian, counts: Array, prior: BetaBernoulli
) -> float:
    """Twice the negative log posterior (`neg_log_pos`) of all assignments, up to a constant.

    `-sum_i sum_d (eta_i^2/P_i - t0 m0^2)` plus the popularity term. The penalty is not part of it:
    it depends on the step, not on the state. A Gaussian equal to the prior adds nothing.
    """
    start = (inputs.prior.energy / inputs.prior.precision).sum()
    evidence_of_all = (posterior.energy / posterior.precision).sum() - len(posterior.eta) * start
    return prior.negative_log_probability(counts) - float(evidence_of_all)
