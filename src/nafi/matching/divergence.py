"""How far an observation moves a Gaussian: the penalties that NAFI can add to a match.

Hides: the closed forms. Promises: each divergence between N(m, 1/P) before and N(m', 1/P') after
observing w with precision t, for diagonal Gaussians, without a loop over neurons.

All of them have the form `link( sum_d [ spread(P, P') + weight(P, P') (m' - m)^2 ] )`, and
`m' - m = t (w - m) / P'`: the argument of the link is quadratic in w, see `moved`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from difflib import get_close_matches

import numpy as np

from nafi.errors import InputError
from nafi.matching.columns import Array
from nafi.matching.gaussian import Gaussian
from nafi.matching.quadratic import Quadratic

# Steps are taken together as long as there are no more numbers than this: 512 KB.
_NUMBERS = 2**16


class Divergence(ABC):
    """One divergence between the Gaussian before and after an observation."""

    @abstractmethod
    def spread(self, before: Array, after: Array) -> Array:
        """What the change of precision alone contributes, per column; any equal shapes."""

    @abstractmethod
    def weight(self, before: Array, after: Array) -> Array:
        """The factor on the squared shift of the mean, per column."""

    def link(self, total: Array) -> Array:
        """From the sum over columns to the divergence; the identity unless overridden."""
        return total

    @property
    def is_quadratic(self) -> bool:
        """Whether the divergence can be added to a cost before any product is taken."""
        return type(self).link is Divergence.link

    def moved(
        self, posterior: Gaussian, precision: Array, dimension: float, steps: int = 1
    ) -> Quadratic:
        """The sum over columns as a function of the observation w.

        posterior: I Gaussians; precision: (B,) of the observation; dimension: the number of columns
        in the spread, D for the plain sum.
        steps: as many observations of w one after the other, each with its part of the precision:
            a neuron that n models own moves a global one as often as n models would.
        With `k = weight t^2 / P'^2`: `k (w - eta/P)^2 = k w^2 - 2 k/P eta w + k/P^2 eta^2`. Once w
        was observed with precision u, it is nearer by `P / (P + u)`.
        """
        first = posterior.precision
        sizes = posterior.columns.sizes
        one = precision / steps
        factor, spread = np.zeros_like(first), np.zeros_like(first)
        at_once = max(1, _NUMBERS // max(1, first.size))
        for start in range(0, steps, at_once):
            step = np.arange(start, min(start + at_once, steps))[:, None, None]
            before = first + step * one
            after = before + one
            nearer = first / before
            factor += (self.weight(before, after) * (one / after * nearer) ** 2).sum(axis=0)
            spread += self.spread(before, after).sum(axis=0)
        offset = spread @ (sizes * (dimension / sizes.sum()))
        return Quadratic(offset, factor / first / first, -2.0 * factor / first, factor)


class KullbackLeibler(Divergence):
    """KL(before || after), the paper's penalty (`eq:kl_cost`).

    `1/2 sum_d [ P'/P - 1 - ln(P'/P) + P' (m'-m)^2 ]`. The first part is large for new neurons
    (P = t0) and small for shared ones: this is why the penalty controls the width.
    """

    def spread(self, before: Array, after: Array) -> Array:
        gain = (after - before) / before
        return 0.5 * (gain - np.log1p(gain))

    def weight(self, before: Array, after: Array) -> Array:
        return 0.5 * after


class ReverseKullbackLeibler(Divergence):
    """KL(after || before) = `1/2 sum_d [ P/P' - 1 + ln(P'/P) + P (m'-m)^2 ]`."""

    def spread(self, before: Array, after: Array) -> Array:
        return 0.5 * ((before - after) / after + np.log1p((after - before) / before))

    def weight(self, before: Array, after: Array) -> Array:
        return 0.5 * before


class Jeffreys(Divergence):
    """KL(before || after) + KL(after || before)."""

    def spread(self, before: Array, after: Array) -> Array:
        return 0.5 * (after - before) ** 2 / (before * after)

    def weight(self, before: Array, after: Array) -> Array:
        return 0.5 * (before + after)


class Hellinger(Divergence):
    """Squared Hellinger distance, `1 - exp(-Bhattacharyya)`, between 0 and 1.

    `Bhattacharyya = sum_d [ 1/4 P P'/(P+P') (m'-m)^2 + 1/2 ln((P+P') / (2 sqrt(P P'))) ]`.
    It saturates at 1 in high dimension, where it hardly distinguishes one match from another.
    """

    def spread(self, before: Array, after: Array) -> Array:
        return 0.5 * np.log((before + after) / (2.0 * np.sqrt(before * after)))

    def weight(self, before: Array, after: Array) -> Array:
        return 0.25 * before * after / (before + after)

    def link(self, total: Array) -> Array:
        return -np.expm1(-total)


class Wasserstein2(Divergence):
    """Squared 2-Wasserstein distance, `sum_d [ (m'-m)^2 + (P^-1/2 - P'^-1/2)^2 ]`.

    The only one with a unit (that of a squared weight): its penalty depends on the scale of the
    weights.
    """

    def spread(self, before: Array, after: Array) -> Array:
        return (1.0 / np.sqrt(before) - 1.0 / np.sqrt(after)) ** 2

    def weight(self, before: Array, after: Array) -> Array:
        return np.ones_like(before)


DIVERGENCES: dict[str, Divergence] = {
    "kl": KullbackLeibler(),
    "reverse_kl": ReverseKullbackLeibler(),
    "jeffreys": Jeffreys(),
    "hellinger": Hellinger(),
    "wasserstein2": Wasserstein2(),
}


def divergence_named(name: str) -> Divergence:
    """Look a divergence up by its public name."""
    if isinstance(name, str) and name in DIVERGENCES:
        return DIVERGENCES[name]
    close = get_close_matches(str(name), DIVERGENCES, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise InputError(f"divergence: found {name!r}, expected one of {', '.join(DIVERGENCES)}{hint}")
