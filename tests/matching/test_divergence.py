"""Closed forms against numerical integration of the definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from nafi.errors import InputError
from nafi.matching.divergence import DIVERGENCES, divergence_named
from nafi.matching.inputs import make_input

positive = st.floats(0.2, 5)
shift = st.floats(-2, 2)


def integrated(name: str, before: norm, after: norm) -> float:
    """The one-dimensional divergence from its integral; Wasserstein from quantile functions."""

    def integral(f) -> float:  # type: ignore[no-untyped-def]
        return quad(f, -40, 40, limit=400, points=[before.mean(), after.mean()])[0]

    def kl(p: norm, q: norm) -> float:
        return integral(lambda x: p.pdf(x) * (p.logpdf(x) - q.logpdf(x)))

    match name:
        case "kl":
            return kl(before, after)
        case "reverse_kl":
            return kl(after, before)
        case "jeffreys":
            return kl(before, after) + kl(after, before)
        case "hellinger":
            return 0.5 * integral(
                lambda x: (math.sqrt(before.pdf(x)) - math.sqrt(after.pdf(x))) ** 2
            )
        case "wasserstein2":
            return quad(lambda u: (before.ppf(u) - after.ppf(u)) ** 2, 0, 1, limit=400)[0]
    raise AssertionError(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(DIVERGENCES))
@settings(max_examples=25, deadline=None)
@given(m0=shift, w=shift, p0=positive, t=st.one_of(st.just(0.0), positive))
def test_closed_form_equals_integral(name: str, m0: float, w: float, p0: float, t: float) -> None:
    """In one dimension, through the same code that builds the cost matrices."""
    inputs = make_input([[[w]]], t, m0, p0)  # type: ignore[arg-type]
    divergence = DIVERGENCES[name]
    moved = divergence.moved(inputs.prior, inputs.models[0].precision, dimension=1)
    found = divergence.link(moved.evaluate(inputs.prior, inputs.models[0], []))[0, 0]
    after = norm((p0 * m0 + t * w) / (p0 + t), 1 / math.sqrt(p0 + t))
    expected = integrated(name, norm(m0, 1 / math.sqrt(p0)), after)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_nothing_observed_is_no_distance(name: str) -> None:
    divergence = DIVERGENCES[name]
    precision = np.array([[0.3, 2.0]])
    assert divergence.spread(precision, precision) == pytest.approx(0.0, abs=1e-15)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"'helinger'.*did you mean 'hellinger'"):
        divergence_named("helinger")
