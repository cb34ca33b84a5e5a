"""How much privacy Gaussian noise gives: epsilon of differential privacy.

Hides: Renyi differential privacy. Promises: an upper bound, from published formulas alone.
"""

from __future__ import annotations

from math import inf

import numpy as np
from scipy.special import gammaln, logsumexp

from nafi.options import number, whole

# Orders of Renyi divergences: whole ones, for which there is a formula for samples, and those
# between, for which there is one only without sampling.
_WHOLE = (*range(2, 65), *(2**n for n in range(7, 13)))
_BETWEEN = tuple(1 + n / 20 for n in range(1, 80) if n % 20)


def gaussian_epsilon(scale: float, releases: int, delta: float, rate: float = 1.0) -> float:
    """Epsilon of a number of releases, each with noise of `scale` times the sensitivity.

    rate: the chance to be in a release, drawn anew and independently for each one and kept secret
        from whoever sees the releases; 1 where that does not hold

    Releases compose by adding Renyi divergences (Mironov, Talwar and Zhang 2019, for Poisson
    sampling), which are converted as by Canonne, Kamath and Steinke (2020), proposition 12.
    """
    number(at_least=0).check(scale, "scale")
    whole(0).check(releases, "releases")
    number(above=0, below=1).check(delta, "delta")
    number(at_least=0, below=np.nextafter(1, 2)).check(rate, "rate")
    if releases == 0 or rate == 0:
        return 0.0
    if scale == 0:
        return inf
    orders = _WHOLE + _BETWEEN if rate == 1 else _WHOLE
    bounds = (_converted(a, releases * divergence(a, scale, rate), delta) for a in orders)
    return max(0.0, min(bounds))


def divergence(order: float, scale: float, rate: float = 1.0) -> float:
    """The Renyi divergence of one release; order: above 1, and whole if the rate is below 1."""
    if rate == 1:
        return order / (2 * scale**2)
    k = np.arange(int(order) + 1)
    choices = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    chances = (order - k) * np.log1p(-rate) + k * np.log(rate)
    return float(logsumexp(choices + chances + (k * k - k) / (2 * scale**2))) / (order - 1)


def _converted(order: float, spent: float, delta: float) -> float:
    rest = np.log1p(-1 / order) - (np.log(delta) + np.log(order)) / (order - 1)
    return float(spent + rest)
