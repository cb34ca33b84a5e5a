"""Matchings as models of another matching, and neurons that are read when they are needed."""

from __future__ import annotations

from itertools import permutations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import nafi
from nafi.errors import InputError
from nafi.matching import DIVERGENCES, Matching, Owners, Streamed, place
from nafi.matching.columns import ColumnBlocks
from nafi.matching.cost import EvidenceCost, joint_objective
from nafi.matching.descent import CoordinateDescent, GlobalNeurons
from nafi.matching.gaussian import Gaussian
from nafi.matching.inputs import MatchingInput, make_input
from nafi.matching.posterior import Posterior
from nafi.matching.prior import POPULARITY
from nafi.matching.products import direct_products
from tests.matching.strategies import Case, cases


def matching_of(inputs: MatchingInput, assigned: list[np.ndarray]) -> Matching:
    """The posterior of given assignments, whose global neurons are numbered without gaps."""
    posterior = Posterior(inputs)
    width = 1 + max(int(a.max()) for a in assigned)
    posterior.taken(spare=width)
    for s, places in enumerate(assigned):
        posterior.observe(s, places)
    slots = np.arange(width)
    counts = posterior.counts(slots).astype(np.intp)
    at = posterior.at(slots)
    return Matching(tuple(assigned), at, counts, inputs.prior, inputs.count, (), True)


def numbered(assigned: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Places without gaps, and which place each number stands for."""
    used = np.unique(np.concatenate(assigned))
    return [np.searchsorted(used, places) for places in assigned], used


@given(cases(models=6), st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_posteriors_of_groups_add_up_to_that_of_all(case: Case, seed: int, cut: int) -> None:
    rng = np.random.default_rng(seed)
    assigned = [rng.permutation(6)[: len(rows)] for rows in case.neurons]
    assigned, _ = numbered(assigned)
    flat = matching_of(case.inputs(), assigned)
    groups, tops = [], []
    for part in (slice(None, cut), slice(cut, None)):
        if not case.neurons[part]:
            continue
        local, places = numbered(assigned[part])
        inputs = make_input(
            case.neurons[part], case.precisions[part], case.prior_mean, case.prior_precision
        )
        groups.append(matching_of(inputs, local).summary())
        tops.append(places)
    rows, precisions, owners = map(list, zip(*groups, strict=True))
    inputs = make_input(rows, precisions, case.prior_mean, case.prior_precision, owners)
    tree = matching_of(inputs, tops)
    np.testing.assert_allclose(tree.means, flat.means, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(tree.precisions, flat.precisions, rtol=1e-9)
    np.testing.assert_array_equal(tree.counts, flat.counts)
    assert tree.models == len(case.neurons)


@pytest.mark.parametrize("compat", ["paper", "pfnm-code"])
def test_joining_costs_what_one_model_after_the_other_would_pay(compat: str) -> None:
    prior = POPULARITY[compat](30, 0.7)
    counts, owners = np.array([1.0, 4.0, 12.0]), np.array([1.0, 3.0, 18.0])
    expected = [
        [sum(prior.shared(np.array([n + k]))[0] for k in range(int(m))) for m in owners]
        for n in counts
    ]
    np.testing.assert_allclose(prior.joined(counts, owners), expected)
    alone = [sum(prior.shared(np.array([1.0 + k]))[0] for k in range(int(m) - 1)) for m in owners]
    np.testing.assert_allclose(prior.gathered(owners), alone)


@given(cases(models=4), st.integers(0, 2**32 - 1))
def test_without_a_penalty_costs_are_changes_of_the_joint_objective(case: Case, seed: int) -> None:
    """One neuron that stands for some models, against all others in place."""
    rng = np.random.default_rng(seed)
    dimension = case.neurons[0].shape[1]
    models = int(rng.integers(1, 5))
    summary = rng.normal(size=(1, dimension))
    owners = Owners([int(rng.integers(1, models + 1))], models)
    inputs = make_input(
        [*case.neurons, summary],
        [*case.precisions, rng.uniform(0.1, 3, size=(1, dimension))],
        case.prior_mean,
        case.prior_precision,
        [*[None] * len(case.neurons), owners],
    )
    posterior = Posterior(inputs)
    posterior.taken(spare=6)
    assigned, _ = numbered([rng.permutation(5)[: len(rows)] for rows in case.neurons])
    for s, places in enumerate(assigned):
        posterior.observe(s, places)
    slots = np.flatnonzero(posterior.taken(spare=1))
    prior = POPULARITY["paper"](inputs.count, 0.7)
    descent = CoordinateDescent(inputs, [EvidenceCost()], prior, 100)
    model = inputs.models[len(assigned)]
    gaussian = posterior.at(slice(int(slots[-1]) + 1))
    products = direct_products(gaussian, model)
    joining = descent._costs(0, gaussian, model, products)[slots, 0]
    assert model.owners is not None
    joining = joining + prior.joined(posterior.counts(slots), model.owners)[:, 0]
    opening = descent.opening(0, model)[0] + prior.opened(1)[0]

    def objective(slot: int) -> float:
        tried = posterior.copy()
        tried.observe(len(assigned), np.array([slot]))
        taken = np.flatnonzero(tried.taken())
        return joint_objective(inputs, tried.at(taken), tried.counts(taken), prior)

    new = objective(int(slots[-1]) + 1)
    expected = np.array([objective(int(slot)) - new for slot in slots])
    np.testing.assert_allclose(joining - opening, expected, rtol=1e-7, atol=1e-7)
    neurons = GlobalNeurons(0, slots, posterior.counts(slots), gaussian, products)
    best = descent.best(0, [neurons], len(slots), model)
    assert best[0] == (np.argmin(expected) if expected.min() < 0 else len(slots))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_several_steps_move_a_neuron_as_observing_it_again_and_again(name: str) -> None:
    rng = np.random.default_rng(0)
    columns = ColumnBlocks(np.arange(3), np.array([3]))
    start = Gaussian(rng.normal(size=(4, 3)), rng.uniform(0.5, 2, size=(4, 1)), columns)
    w, t = rng.normal(size=3), np.array([0.6])
    divergence = DIVERGENCES[name]
    several = divergence.moved(start, 5 * t, 3.0, steps=5)

    def value(quadratic: object, gaussian: Gaussian) -> np.ndarray:
        q, eta = quadratic, gaussian.eta
        terms = q.energy * eta**2 + q.slope * eta * w + q.square * w**2  # type: ignore[attr-defined]
        return np.asarray(q.offset + terms.sum(axis=1))  # type: ignore[attr-defined]

    total, now = np.zeros(4), start
    for _ in range(5):
        total += value(divergence.moved(now, t, 3.0), now)
        now = Gaussian(now.eta + t * w, now.precision + t, columns)
    np.testing.assert_allclose(value(several, start), total, rtol=1e-10)


@given(cases(models=5), st.sampled_from([0.0, 0.3]), st.integers(0, 99))
def test_neurons_that_are_read_again_match_as_those_that_are_held(
    case: Case, penalty: float, seed: int
) -> None:
    rows = Streamed(
        [len(r) for r in case.neurons], case.neurons[0].shape[1], lambda s: case.neurons[s].copy()
    )
    options = {**case.arguments, "penalty": penalty, "seed": seed, "sweeps": 3}
    held = nafi.match(case.neurons, **options)  # type: ignore[arg-type]
    read = nafi.match(rows, **options)  # type: ignore[arg-type]
    for one, two in zip(held.assignments, read.assignments, strict=True):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(held.means, read.means)
    assert held.history == read.history


def test_a_stream_holds_one_model_at_a_time() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=(4, 6)) * 5
    inputs = make_input(Streamed([4] * 50, 6, lambda s: base + 0.01 * s), 1.0, 0.0, 1.0)
    for s in (0, 7, 7, 3):
        np.testing.assert_array_equal(inputs.models[s].neurons, base + 0.01 * s)
        assert list(inputs.models._made) == [s]
    assert len(inputs.models.kinds) == 1


def test_groups_of_permuted_copies_match_as_all_at_once() -> None:
    rng = np.random.default_rng(1)
    truth = rng.normal(size=(8, 20)) * 3
    orders = [rng.permutation(8) for _ in range(6)]
    models = [truth[order] + 0.01 * rng.normal(size=(8, 20)) for order in orders]
    flat = nafi.match(models)
    top = nafi.match([nafi.match(models[:2]), nafi.match(models[2:5]), models[5]])
    assert (top.width, top.models) == (8, 6)
    assert (top.counts == 6).all()
    assert "by all: 8" in str(top)
    order = [int(np.abs(flat.means - mean).sum(axis=1).argmin()) for mean in top.means]
    np.testing.assert_allclose(top.means, flat.means[order], rtol=1e-10)


@given(cases(models=4, width=3), st.integers(0, 2**32 - 1))
def test_without_a_penalty_a_model_is_placed_where_all_are_likeliest(case: Case, seed: int) -> None:
    """Against all ways to place the last model, the others where they are."""
    rng = np.random.default_rng(seed)
    *before, last = case.neurons
    if not before:
        return
    local, _ = numbered([rng.permutation(4)[: len(rows)] for rows in before])
    width = 1 + max(int(places.max()) for places in local)
    few = last[:width]
    inputs = make_input([*before, few], case.precisions, case.prior_mean, case.prior_precision)
    known = matching_of(
        make_input(before, case.precisions[:-1], case.prior_mean, case.prior_precision), local
    )
    (chosen,) = place([few], known, precisions=case.precisions[-1:], penalty=0.0)

    def objective(places: tuple[int, ...]) -> float:
        tried = matching_of(inputs, [*local, np.array(places)])
        prior = POPULARITY["paper"](inputs.count, 1.0)
        return joint_objective(inputs, tried.posterior, tried.counts, prior)

    least = min(map(objective, permutations(range(width), len(few))))
    assert objective(tuple(chosen)) == pytest.approx(least, rel=1e-9, abs=1e-7)


def test_models_are_placed_each_for_itself() -> None:
    rng = np.random.default_rng(2)
    truth = rng.normal(size=(8, 20)) * 3
    orders = [rng.permutation(8)[:6] for _ in range(5)]
    models = [truth[order] + 0.3 * rng.normal(size=(6, 20)) for order in orders]
    found = nafi.match([truth, truth + 0.1])
    placed = place(models, found)
    for places, order in zip(placed, orders, strict=True):
        np.testing.assert_array_equal(places, found.assignments[0][order])
    read = place(Streamed([6] * 5, 20, lambda s: models[4 - s]), found, precisions=[1.0] * 5)
    for one, two in zip(placed, reversed(read), strict=True):
        np.testing.assert_array_equal(one, two)
    with pytest.raises(InputError, match="wider than the 8 neurons of the matching"):
        place([rng.normal(size=(9, 20))], found)


def test_owners_that_cannot_be_are_refused() -> None:
    rows = [np.eye(2), np.eye(2)]
    with pytest.raises(InputError, match="owners of model 1: expected 2 whole numbers from 1 to 3"):
        nafi.match(rows, owners=[None, Owners([1, 4], 3)])
    with pytest.raises(InputError, match="owners: found 1 entries"):
        nafi.match(rows, owners=[None])
    with pytest.raises(InputError, match="without neurons has no summary"):
        nafi.match([nafi.match(rows).without_neurons(), np.eye(2)])
    with pytest.raises(InputError, match=r"neurons of model 0: read shape \(2, 2\)"):
        nafi.match(Streamed([3, 3], 2, lambda s: np.eye(2)))
