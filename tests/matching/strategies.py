"""Hypothesis strategies: small random matching problems, zeros in the precisions included."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np

from nafi.matching.inputs import MatchingInput, make_input
from nafi.matching.posterior import Posterior


@dataclass
class Case:
    """Arguments of `nafi.match`, every precision written out per model and column."""

    neurons: list[np.ndarray]
    precisions: list[np.ndarray]
    prior_mean: np.ndarray
    prior_precision: np.ndarray

    @property
    def arguments(self) -> dict[str, object]:
        return {
            "precisions": self.precisions,
            "prior_mean": self.prior_mean,
            "prior_precision": self.prior_precision,
        }

    def inputs(self) -> MatchingInput:
        return make_input(self.neurons, **self.arguments)  # type: ignore[arg-type]


@st.composite
def cases(draw: st.DrawFn, models: int = 4, width: int = 4, columns: int = 6) -> Case:
    """1..models models of 1..width neurons; columns of equal, of different and of no precision.

    Some cases repeat a column often enough for the wide-block product to be taken.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, models))
    base = draw(st.integers(1, columns))
    repeat = draw(st.sampled_from([1, 1, 40]))
    kind = draw(st.sampled_from(["scalar", "blocks", "free"]))
    dimension = base * repeat
    table = rng.choice([0.0, 0.3, 1.0, 2.5], size=(count, base))
    if kind == "scalar":
        table = np.repeat(rng.uniform(0.2, 3, size=(count, 1)), base, axis=1)
    elif kind == "free":
        table = rng.uniform(0, 3, size=(count, base))
    precisions = np.repeat(table, repeat, axis=1)
    prior = np.repeat(rng.choice([0.5, 1.0, 2.0], size=base), repeat)
    neurons = [
        rng.normal(size=(draw(st.integers(1, width)), dimension)) * 2 / np.sqrt(repeat)
        for _ in range(count)
    ]
    mean = rng.normal(size=dimension) * draw(st.sampled_from([0.0, 1.0]))
    return Case(neurons, list(precisions), mean, prior)


def random_posterior(inputs: MatchingInput, rng: np.random.Generator) -> Posterior:
    """Every model placed at random on a few shared global neurons, none of them without owner."""
    posterior = Posterior(inputs)
    places = inputs.widest + 2
    posterior.taken(spare=places)
    labels = [rng.permutation(places)[: model.width] for model in inputs.models]
    _, dense = np.unique(np.concatenate(labels), return_inverse=True)
    start = 0
    for s, model in enumerate(inputs.models):
        posterior.observe(s, dense[start : start + model.width])
        start += model.width
    return posterior
