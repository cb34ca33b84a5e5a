"""The assignment is optimal, whatever the solver was not shown."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nafi.errors import InputError
from nafi.matching.assignment import AssignmentProblem
from tests.matching import oracle


def assign(
    joining: np.ndarray, opening: np.ndarray, prices: np.ndarray, step: int = 100
) -> np.ndarray:
    """The assignment, of costs that are told `step` global neurons at a time."""
    problem = AssignmentProblem(len(joining), opening, prices)
    for start in range(0, len(joining), step):
        problem.add(start, joining[start : start + step].copy())
    return problem.solve()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    neurons=st.integers(1, 4),
    existing=st.integers(0, 4),
    spread=st.sampled_from([0.3, 1.0, 5.0]),
    whole=st.booleans(),
    step=st.integers(1, 4),
    data=st.data(),
)
def test_against_brute_force(
    seed: int,
    neurons: int,
    existing: int,
    spread: float,
    whole: bool,
    step: int,
    data: st.DataObject,
) -> None:
    """Also with ties (whole numbers) and with fewer new places than neurons."""
    new = data.draw(st.integers(max(0, neurons - existing), neurons))
    rng = np.random.default_rng(seed)
    joining = spread * rng.normal(size=(existing, neurons))
    opening = spread * rng.normal(size=neurons)
    prices = np.cumsum(rng.uniform(0, 1, size=new))
    if whole:
        joining, opening, prices = np.round(joining), np.round(opening), np.round(prices)
    chosen = assign(joining, opening, prices, step)
    np.testing.assert_array_equal(chosen, assign(joining, opening, prices))
    is_new = chosen >= existing
    assert len(set(chosen[~is_new])) == np.count_nonzero(~is_new)
    assert np.count_nonzero(is_new) <= new
    cost = joining[chosen[~is_new], np.flatnonzero(~is_new)].sum()
    cost += opening[is_new].sum() + prices[: np.count_nonzero(is_new)].sum()
    full = np.hstack([joining.T, opening[:, None] + prices])
    assert cost == pytest.approx(oracle.cheapest(full), abs=1e-9)


def test_six_neurons_against_brute_force() -> None:
    rng = np.random.default_rng(0)
    joining, opening = rng.normal(size=(3, 6)), rng.normal(size=6)
    prices = 2 * np.log(np.arange(1, 7))
    chosen = assign(joining, opening, prices)
    shared = chosen < 3
    cost = joining[chosen[shared], np.flatnonzero(shared)].sum() + opening[~shared].sum()
    cost += prices[: np.count_nonzero(~shared)].sum()
    full = np.hstack([joining.T, opening[:, None] + prices])
    assert cost == pytest.approx(oracle.cheapest(full))


def test_overflowing_costs_are_refused() -> None:
    with pytest.raises(InputError, match="overflow"):
        assign(np.array([[np.inf]]), np.array([0.0]), np.array([1.0]))
