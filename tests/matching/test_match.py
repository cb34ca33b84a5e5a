"""`nafi.match` as a whole: invariances, optimality, limits, determinism."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import nafi
from nafi.errors import InputError
from nafi.matching import descent
from nafi.matching import inputs as inputs_module
from nafi.matching.divergence import DIVERGENCES
from nafi.matching.inputs import make_input
from nafi.matching.posterior import Posterior
from tests.matching import oracle
from tests.matching.strategies import Case, cases, random_posterior


def partition(matching: nafi.Matching) -> set[frozenset[tuple[int, int]]]:
    """Which local neurons are together, whatever their global neuron is called."""
    return {
        frozenset((s, int(j)) for s, j in enumerate(row) if j >= 0) for row in matching.owners()
    }


def noisy_subsets(
    seed: int,
    models: int = 5,
    width: int = 6,
    truth: int = 9,
    columns: int = 20,
    noise: float = 0.8,
) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    neurons = 3 * rng.normal(size=(truth, columns))
    return [
        neurons[rng.permutation(truth)[:width]] + noise * rng.normal(size=(width, columns))
        for _ in range(models)
    ]


@settings(max_examples=150, deadline=None)
@given(
    case=cases(models=5, width=5),
    name=st.sampled_from(list(DIVERGENCES)),
    penalty=st.sampled_from([0.0, 0.05, 1.0]),
    mass=st.sampled_from([0.2, 1.0, 30.0]),
    compat=st.sampled_from(["paper", "pfnm-code"]),
    spare=st.sampled_from([None, 0, 2]),
    sweeps=st.sampled_from([0, 1, 7]),
    seed=st.integers(0, 5),
    pairs=st.sampled_from([1, 7, 2**21]),
)
def test_whole_runs_equal_the_plain_algorithm(
    case: Case,
    name: str,
    penalty: float,
    mass: float,
    compat: str,
    spare: int | None,
    sweeps: int,
    seed: int,
    pairs: int,
) -> None:
    """Order of models, sweeps, mass, width limit and both popularity terms, end to end.

    pairs: how many costs are computed at a time; the plain algorithm has all of them
    """
    # Without zeros: where two models know different columns, some matches cost the same.
    case.precisions = [np.maximum(t, 0.1) for t in case.precisions]
    widest = max(len(w) for w in case.neurons)
    limit = None if spare is None else widest + spare
    options = {"mass": mass, "penalty": penalty, "divergence": name, "sweeps": sweeps, "seed": seed}
    arguments = {"compat": compat, "max_width": limit, **options, **case.arguments}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descent, "_PAIRS", pairs)
        found = nafi.match(case.neurons, **arguments)  # type: ignore[arg-type]
    plain, widths, objectives = oracle.reference_match(
        case.neurons,
        case.precisions,
        case.prior_mean,
        case.prior_precision,
        public_code=compat == "pfnm-code",
        max_width=limit,
        **options,  # type: ignore[arg-type]
    )
    assert partition(found) == plain
    passes = len(found.history)
    assert [s.width for s in found.history] == widths[:passes]
    assert [s.objective for s in found.history] == pytest.approx(objectives[:passes], rel=1e-9)
    assert set(widths[passes:]) <= {widths[passes - 1]}  # we may stop earlier, at the same end


@pytest.mark.parametrize("name", list(DIVERGENCES))
@settings(max_examples=15, deadline=None)
@given(case=cases(models=3, width=3, columns=4), penalty=st.sampled_from([0.0, 0.2]))
def test_each_assignment_is_the_best_response(name: str, case: Case, penalty: float) -> None:
    """When settled, no model can do better, judged by brute force over the plain formulas."""
    found = nafi.match(case.neurons, penalty=penalty, divergence=name, sweeps=30, **case.arguments)  # type: ignore[arg-type]
    assume(found.converged)  # Hypothesis fails the test if that is rare
    for s in range(len(case.neurons)):
        # Without s, global neurons that it owned alone do not exist.
        counts = found.counts.copy()
        counts[found.assignments[s]] -= 1
        left = np.flatnonzero(counts > 0)
        number = np.full(found.width, -1)
        number[left] = np.arange(len(left))
        others = [None if o == s else number[a] for o, a in enumerate(found.assignments)]
        matrix = oracle.cost_matrix(
            case.neurons,
            case.precisions,
            case.prior_mean,
            case.prior_precision,
            1.0,
            penalty,
            name,
            others,
            s,
        )
        chosen = number[found.assignments[s]]
        new = chosen < 0
        chosen[new] = len(left) + np.arange(np.count_nonzero(new))
        cost = matrix[np.arange(len(chosen)), chosen].sum()
        assert cost == pytest.approx(oracle.cheapest(matrix), rel=1e-9, abs=1e-8)


@settings(max_examples=50, deadline=None)
@given(case=cases(), seed=st.integers(0, 1000))
def test_forgetting_and_observing_again_restores_the_posterior(case: Case, seed: int) -> None:
    inputs = case.inputs()
    rng = np.random.default_rng(seed)
    posterior = random_posterior(inputs, rng)
    slots = np.flatnonzero(posterior.taken())
    before = posterior.at(slots)
    for s in rng.integers(len(inputs.models), size=20):
        assigned = posterior.assignments[s]
        assert assigned is not None
        posterior.forget(int(s))
        posterior.observe(int(s), assigned)
    after = posterior.at(slots)
    np.testing.assert_allclose(after.mean, before.mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(after.precision, before.precision)


def test_a_huge_precision_leaves_no_trace_in_the_precisions() -> None:
    """1e12 beside 1e-3: adding and subtracting precisions would leave a negative one."""
    inputs = Case(
        [np.ones((1, 2)), np.full((1, 2), 3.0)],
        [np.full(2, 1e12), np.full(2, 1e-3)],
        np.zeros(2),
        np.full(2, 1e-3),
    ).inputs()
    posterior = Posterior(inputs)
    posterior.observe(1, np.array([0]))
    expected = posterior.at(np.array([0])).precision
    posterior.observe(0, np.array([0]))
    posterior.forget(0)
    np.testing.assert_array_equal(posterior.at(np.array([0])).precision, expected)


def test_there_are_no_more_slots_than_there_may_be_neurons() -> None:
    inputs = make_input(noisy_subsets(0), 1.0, 0.0, 1.0)  # five models of six neurons
    posterior = Posterior(inputs, most=8)
    posterior.observe(0, np.arange(6))
    assert len(posterior.eta) == len(posterior.taken(spare=6)) == 8
    assert len(Posterior(inputs).eta) == 12
    full = nafi.match(noisy_subsets(0), max_width=6)
    assert full.width == len(full.posterior.eta) == 6


@pytest.mark.parametrize("differ", [False, True])
def test_neurons_are_added_in_parts_with_the_same_bytes(
    differ: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    neurons = noisy_subsets(1)
    precisions = [1.0 + s * np.arange(20) for s in range(5)] if differ else 2.0
    whole = nafi.match(neurons, precisions=precisions, sweeps=2)
    monkeypatch.setattr(inputs_module, "_SCRATCH", 50)  # two neurons of 20 columns
    parts = nafi.match(neurons, precisions=precisions, sweeps=2)
    np.testing.assert_array_equal(parts.posterior.eta, whole.posterior.eta)
    np.testing.assert_array_equal(parts.means, whole.means)


@pytest.mark.parametrize("penalty", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_permuting_a_models_neurons_permutes_its_assignment_only(penalty: float, seed: int) -> None:
    """The global neurons stay the same; which number each has is free."""
    neurons = noisy_subsets(seed)
    found = nafi.match(neurons, penalty=penalty, seed=seed)
    order = np.random.default_rng(seed).permutation(len(neurons[2]))
    shuffled = [w[order] if s == 2 else w for s, w in enumerate(neurons)]
    again = nafi.match(shuffled, penalty=penalty, seed=seed)
    back = {
        frozenset((s, int(order[j]) if s == 2 else j) for s, j in group)
        for group in partition(again)
    }
    assert back == partition(found)
    one = again.means[again.assignments[2]]
    np.testing.assert_allclose(one, found.means[found.assignments[2]][order], rtol=1e-12)


@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_permuted_copies_of_one_model_match_exactly(name: str) -> None:
    rng = np.random.default_rng(1)
    model = 2 * rng.normal(size=(12, 30))
    orders = [rng.permutation(12) for _ in range(4)]
    found = nafi.match([model[order] for order in orders], divergence=name)
    assert found.width == 12
    for order, assigned in zip(orders, found.assignments, strict=True):
        np.testing.assert_array_equal(
            assigned[np.argsort(order)], found.assignments[0][np.argsort(orders[0])]
        )
    # Four observations of precision 1 and a prior of precision 1 at 0.
    np.testing.assert_allclose(found.means[found.assignments[1]], model[orders[1]] * 4 / 5)
    np.testing.assert_allclose(found.precisions, 5.0)


def test_posterior_is_the_conjugate_one_in_the_callers_columns() -> None:
    """Precisions per model and column, 0 among them, unsorted on purpose."""
    neurons = noisy_subsets(3, models=3, columns=5)
    precisions = [np.array([2.0, 0.0, 1.0, 2.0, 0.5]), np.array([1.0, 0, 3, 1, 0]), np.ones(5)]
    mean, prior = np.array([0.1, 0, 0.2, 0, 0]), np.array([1.0, 2, 1, 1, 4])
    found = nafi.match(
        neurons, precisions=precisions, prior_mean=mean, prior_precision=prior, penalty=0.05
    )
    owners = found.owners()
    for i in range(found.width):
        top, bottom = prior * mean, prior.copy()
        for s in range(3):
            if owners[i, s] >= 0:
                top += precisions[s] * neurons[s][owners[i, s]]
                bottom += precisions[s]
        np.testing.assert_allclose(found.means[i], top / bottom, rtol=1e-12)
        np.testing.assert_allclose(found.precisions[i], bottom, rtol=1e-12)
        assert found.counts[i] == np.count_nonzero(owners[i] >= 0)


def test_one_model_comes_back_as_its_own_posterior() -> None:
    w = np.arange(12.0).reshape(4, 3)
    found = nafi.match([w], precisions=3.0, prior_mean=1.0, prior_precision=1.0)
    np.testing.assert_array_equal(found.assignments[0], np.arange(4))
    np.testing.assert_allclose(found.means, (1.0 + 3 * w) / 4)
    assert found.converged
    assert found.counts.tolist() == [1, 1, 1, 1]


def test_same_input_and_seed_give_equal_bits_and_the_seed_decides_the_order() -> None:
    neurons = noisy_subsets(0, models=8, truth=20, columns=40)
    one, two = (nafi.match(neurons, penalty=0.01, seed=5) for _ in range(2))
    np.testing.assert_array_equal(one.means, two.means)
    assert one.history == two.history
    assert all((a == b).all() for a, b in zip(one.assignments, two.assignments, strict=True))
    rng = np.random.default_rng(2)
    vague = [2 * rng.normal(size=(8, 4)) for _ in range(8)]
    ends = {
        frozenset(partition(nafi.match(vague, penalty=0.0, sweeps=1, seed=s))) for s in range(8)
    }
    assert len(ends) > 1


@pytest.mark.parametrize("limit", [6, 8, 11])
def test_max_width_is_a_hard_limit(limit: int) -> None:
    rng = np.random.default_rng(4)
    neurons = [50 * rng.normal(size=(width, 10)) for width in (6, 3, 5, 4)]
    free = nafi.match(neurons, penalty=0.0, prior_precision=1e-3)
    assert free.width == 18  # nothing in common: every neuron is its own
    found = nafi.match(neurons, penalty=0.0, prior_precision=1e-3, max_width=limit)
    assert found.width <= limit
    assert max(sweep.width for sweep in found.history) <= limit
    for assigned in found.assignments:
        assert len(set(assigned.tolist())) == len(assigned)


def test_penalty_is_a_dial_of_the_width() -> None:
    widths = [
        match.width for match in nafi.match_path(noisy_subsets(7, models=12), [0, 0.1, 1, 10])
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1] >= 6


@pytest.mark.parametrize("seed", range(6))
def test_a_path_gives_what_single_matches_give(seed: int) -> None:
    """Enough penalties to diverge and to share products; class columns of other precisions."""
    neurons = noisy_subsets(seed, models=6, width=10, truth=25, columns=50, noise=2.5)
    rng = np.random.default_rng(seed)
    precisions = [np.r_[np.ones(45), rng.uniform(0, 2, size=5)] for _ in neurons]
    penalties = [0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
    options = {"precisions": precisions, "seed": seed}
    path = nafi.match_path(neurons, penalties, **options)  # type: ignore[arg-type]
    assert len({match.width for match in path}) > 2
    for penalty, found in zip(penalties, path, strict=True):
        single = nafi.match(neurons, penalty=penalty, **options)  # type: ignore[arg-type]
        assert partition(found) == partition(single)
        np.testing.assert_allclose(found.means, single.means, rtol=1e-9, atol=1e-12)
        assert [s.width for s in found.history] == [s.width for s in single.history]


def test_sweeps_stop_when_nothing_changes() -> None:
    found = nafi.match(noisy_subsets(0), sweeps=50)
    assert found.converged
    assert len(found.history) - 1 < 10
    assert found.history[-1].changed == 0
    assert len(nafi.match(noisy_subsets(0), sweeps=0).history) == 1


def test_public_code_popularity_changes_the_outcome_by_name() -> None:
    rng = np.random.default_rng(0)
    neurons = [rng.normal(size=(5, 3)) for _ in range(14)]
    paper = nafi.match(neurons, penalty=0.0)
    code = nafi.match(neurons, penalty=0.0, compat="pfnm-code")
    assert partition(paper) != partition(code)


def test_summary_names_what_matters() -> None:
    found = nafi.match(noisy_subsets(0))
    first, second, third = str(found).splitlines()
    owners = [sum(s >= 0 for s in row) for row in found.owners()]
    assert first.startswith(f"30 neurons of 5 models -> {found.width} global neurons")
    assert f"owned by one model: {owners.count(1)}, by all: {owners.count(5)}," in second
    assert len(found.history) == 2  # before all sweeps, and after the only one
    assert third.startswith("converged after 1 sweep, objective")
    unswept = str(nafi.match(noisy_subsets(0), sweeps=0)).splitlines()
    assert unswept[2].startswith("not converged after 0 sweeps, objective")


@pytest.mark.parametrize("divergence", ["kl", "jeffreys", "hellinger", "wasserstein2"])
def test_dimension_counts_the_spread_as_columns_of_zeros_would(divergence: str) -> None:
    rng = np.random.default_rng(5)
    neurons = [rng.standard_normal((6, 7)) for _ in range(4)]
    padded = [np.pad(own, ((0, 0), (0, 13))) for own in neurons]
    for penalty in [0.1, 0.5]:
        options = {"penalty": penalty, "divergence": divergence, "prior_precision": 0.5}
        wide = nafi.match(padded, **options)
        counted = nafi.match(neurons, dimension=20, **options)
        for one, two in zip(wide.assignments, counted.assignments, strict=True):
            np.testing.assert_array_equal(one, two)
    assert nafi.match(neurons, dimension=2000).width < nafi.match(neurons, dimension=0).width


def test_products_in_float32_find_what_float64_finds_where_nothing_is_nearly_equal() -> None:
    neurons = noisy_subsets(3, width=40, truth=60, columns=300)
    exact, single = (nafi.match(neurons, products=name) for name in ("float64", "float32"))
    assert partition(single) == partition(exact)
    np.testing.assert_array_equal(single.means, exact.means)  # the posterior is in float64


def test_products_must_be_known() -> None:
    with pytest.raises(InputError, match="products: found 'float16', expected one of float64"):
        nafi.match([np.eye(2)] * 2, products="float16")


def test_dimension_must_be_a_number() -> None:
    with pytest.raises(InputError, match="dimension: found -1"):
        nafi.match([np.ones((2, 3))] * 2, dimension=-1)
