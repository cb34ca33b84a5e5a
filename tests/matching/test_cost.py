"""Cost entries against plain loops, and against the joint objective they are differences of."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from nafi.matching.cost import CostModel, EvidenceCost, PenalisedCost, joint_objective
from nafi.matching.divergence import DIVERGENCES
from nafi.matching.inputs import MatchingInput
from nafi.matching.prior import BetaBernoulli, PublicCodeBetaBernoulli
from nafi.matching.products import GramProducts, SingleProducts, direct_products
from tests.matching import oracle
from tests.matching.strategies import Case, cases, random_posterior

COSTS = ["pfnm", *DIVERGENCES]


def cost_named(name: str, penalty: float, inputs: MatchingInput) -> CostModel:
    dimension = len(inputs.columns.order)
    return (
        EvidenceCost() if name == "pfnm" else PenalisedCost(penalty, DIVERGENCES[name], dimension)
    )


@pytest.mark.parametrize("name", COSTS)
@settings(max_examples=60, deadline=None)
@given(case=cases(), seed=st.integers(0, 1000), penalty=st.floats(0.01, 3))
def test_every_entry_equals_the_formula(name: str, case: Case, seed: int, penalty: float) -> None:
    inputs = case.inputs()
    rng = np.random.default_rng(seed)
    posterior = random_posterior(inputs, rng)
    s = int(rng.integers(len(inputs.models)))
    assignments = [a.copy() for a in posterior.assignments if a is not None]
    posterior.forget(s)
    slots = np.flatnonzero(posterior.taken())
    number = np.full(len(posterior.eta), -1)
    number[slots] = np.arange(len(slots))
    others = [None if o == s else number[a] for o, a in enumerate(assignments)]
    model, gaussian = inputs.models[s], posterior.at(slots)
    cost = cost_named(name, penalty, inputs)
    prior = BetaBernoulli(len(inputs.models), mass=0.7)
    expected = oracle.cost_matrix(
        case.neurons,
        case.precisions,
        case.prior_mean,
        case.prior_precision,
        0.7,
        0.0 if name == "pfnm" else penalty,
        "kl" if name == "pfnm" else name,
        others,
        s,
    )
    joining = cost(gaussian, model, direct_products(gaussian, model)).T
    joining += prior.shared(posterior.counts(slots))
    opening = cost(inputs.prior, model, direct_products(inputs.prior, model))[0]
    np.testing.assert_allclose(joining, expected[:, : len(slots)], rtol=1e-9, atol=1e-9)
    new = opening[:, None] + prior.opened(model.width)
    np.testing.assert_allclose(new, expected[:, len(slots) :], rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(case=cases(), seed=st.integers(0, 1000))
def test_a_pfnm_cost_is_a_change_of_the_joint_objective(case: Case, seed: int) -> None:
    """Without the paper's `log k`: see `BetaBernoulli.negative_log_probability`."""
    inputs = case.inputs()
    rng = np.random.default_rng(seed)
    posterior = random_posterior(inputs, rng)
    prior = BetaBernoulli(len(inputs.models), mass=1.3)

    def objective() -> float:
        slots = np.flatnonzero(posterior.taken())
        return joint_objective(inputs, posterior.at(slots), posterior.counts(slots), prior)

    s = int(rng.integers(len(inputs.models)))
    model, assigned = inputs.models[s], posterior.assignments[s]
    assert assigned is not None
    total = objective()
    posterior.forget(s)
    gaussian = posterior.at(slice(None))
    joining = EvidenceCost()(gaussian, model, direct_products(gaussian, model))
    counts = posterior.counts(assigned)
    popularity = np.full(model.width, 2 * np.log(len(inputs.models) / 1.3))
    popularity[counts > 0] = prior.shared(counts[counts > 0])
    step = joining[assigned, np.arange(model.width)] + popularity
    assert total - objective() == pytest.approx(step.sum(), rel=1e-9, abs=1e-8)


@settings(max_examples=60, deadline=None)
@given(case=cases(), seed=st.integers(0, 1000))
def test_gram_products_equal_direct_products(case: Case, seed: int) -> None:
    inputs = case.inputs()
    rng = np.random.default_rng(seed)
    posterior = random_posterior(inputs, rng)
    s = int(rng.integers(len(inputs.models)))
    posterior.forget(s)
    front = int(np.flatnonzero(posterior.taken()).max(initial=-1)) + 1
    gaussian = posterior.at(slice(front))
    shared = GramProducts(inputs)(posterior, front, inputs.models[s])
    direct = direct_products(gaussian, inputs.models[s])
    assert len(shared) == len(direct) == len(inputs.columns.wide)
    for one, other in zip(shared, direct, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


def test_public_code_popularity_is_what_that_code_computes() -> None:
    prior = PublicCodeBetaBernoulli(models=30, mass=2.0)
    counts = np.array([1.0, 9.0, 10.0, 25.0])
    capped = np.array([1.0, 9.0, 10.0, 10.0])
    np.testing.assert_allclose(prior.shared(counts), np.log((30 - capped) / capped))
    np.testing.assert_allclose(prior.opened(2), [2 * np.log(15), 2 * np.log(30)])
    # Up to 700 global neurons, then one at a time, but never fewer than the model needs.
    assert [prior.room(width, 100) for width in (0, 650, 699, 700, 800)] == [100, 50, 1, 1, 1]
    assert prior.room(0, 900) == 900


def test_paper_popularity_against_numbers_worked_by_hand() -> None:
    prior = BetaBernoulli(models=4, mass=0.5)
    np.testing.assert_allclose(
        prior.shared(np.array([1.0, 2.0, 3.0])), [2.1972245773, 0, -2.1972245773]
    )
    np.testing.assert_allclose(prior.opened(3), 2 * np.log([8, 16, 24]))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    columns=st.sampled_from([40, 1024, 2600]),
    scale=st.sampled_from([1e-40, 1.0, 1e45]),
    shift=st.sampled_from([0.0, 30.0]),
)
def test_float32_products_stay_within_their_bound(
    seed: int, columns: int, scale: float, shift: float
) -> None:
    """Against exact sums; also beyond the range of float32, and where all terms have one sign."""
    rng = np.random.default_rng(seed)
    neurons = [scale * (rng.normal(size=(5, columns)) + shift) for _ in range(2)]
    neurons[1][0] = 0.0
    inputs = Case(neurons, [np.ones(columns)] * 2, np.zeros(columns), np.ones(columns)).inputs()
    posterior = random_posterior(inputs, rng)
    posterior.forget(1)
    gaussian, model = posterior.at(np.flatnonzero(posterior.taken())), inputs.models[1]
    (found,) = SingleProducts(model, inputs.columns)(gaussian)
    bound = (min(columns, 1024) + 2) * 2.0**-24 + 1e-12
    assert bound < 6.2e-5
    for i, eta in enumerate(gaussian.eta):
        for j, w in enumerate(model.neurons):
            error = abs(found[i, j] - math.fsum(eta * w))
            assert error <= bound * np.linalg.norm(eta) * np.linalg.norm(w)
