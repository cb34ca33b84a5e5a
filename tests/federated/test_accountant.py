"""Epsilon against closed forms."""

from __future__ import annotations

from math import exp, inf, log

import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from nafi.errors import InputError
from nafi.federated.accountant import divergence, gaussian_epsilon


def exact(scale: float, releases: int, delta: float) -> float:
    """The smallest epsilon of the Gaussian mechanism (Balle and Wang 2018)."""
    mu = releases**0.5 / scale
    lost = lambda e: norm.cdf(mu / 2 - e / mu) - exp(e) * norm.cdf(-mu / 2 - e / mu)  # noqa: E731
    return float(brentq(lambda e: lost(e) - delta, 0, 500))


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("releases", [1, 10, 100])
@pytest.mark.parametrize("delta", [1e-5, 1e-8])
def test_epsilon_is_a_close_upper_bound(scale: float, releases: int, delta: float) -> None:
    found, least = gaussian_epsilon(scale, releases, delta), exact(scale, releases, delta)
    assert least <= found <= 1.15 * least + 0.01


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
def test_the_divergence_of_a_sample_is_its_integral(rate: float) -> None:
    scale, order = 1.5, 4

    def integrand(x: float) -> float:
        ratio = 1 - rate + rate * exp((2 * x - 1) / (2 * scale**2))
        return float(norm.pdf(x, scale=scale)) * ratio**order

    expected = log(quad(integrand, -40, 60, points=[0, 1, 4])[0]) / (order - 1)
    assert divergence(order, scale, rate) == pytest.approx(expected, rel=1e-6)


def test_order_two_has_a_closed_form() -> None:
    q, scale = 0.2, 0.8
    assert divergence(2, scale, q) == pytest.approx(log(1 + q * q * (exp(1 / scale**2) - 1)))
    assert divergence(7, scale, 1 - 1e-12) == pytest.approx(divergence(7, scale, 1.0))


def test_more_is_spent_with_more_rounds_less_noise_and_more_samples() -> None:
    base = gaussian_epsilon(2.0, 10, 1e-5, 0.1)
    assert 0 < base < gaussian_epsilon(2.0, 20, 1e-5, 0.1)
    assert base < gaussian_epsilon(1.5, 10, 1e-5, 0.1)
    assert base < gaussian_epsilon(2.0, 10, 1e-5, 0.2) < gaussian_epsilon(2.0, 10, 1e-5)
    assert gaussian_epsilon(0.0, 1, 1e-5) == inf
    assert gaussian_epsilon(1.0, 0, 1e-5) == 0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("delta", (1.0, 1, 0.0)), ("rate", (1.0, 1, 0.1, 1.5)), ("releases", (1.0, -1, 0.1))],
)
def test_bad_arguments_are_named(name: str, arguments: tuple[float, int, float]) -> None:
    with pytest.raises(InputError, match=f"{name}: found"):
        gaussian_epsilon(*arguments)
