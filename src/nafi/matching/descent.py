"""Algorithm `algori:nafi`: coordinate descent over the models' assignments.

Hides: the order of models, the bookkeeping of global neurons, when to stop, and what descents
under several costs have in common. Promises: each model's assignment is the cheapest for its cost
matrix given all others, no global neuron is without owners, and equal inputs and seeds give
bit-equal results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from nafi.matching.assignment import assign
from nafi.matching.columns import Array, Index
from nafi.matching.cost import CostModel, joint_objective
from nafi.matching.gaussian import Gaussian
from nafi.matching.posterior import Posterior
from nafi.matching.prior import BetaBernoulli
from nafi.matching.problem import LocalModel, Problem
from nafi.matching.products import GramProducts, direct_products
from nafi.matching.result import Matching, Sweep

# From this many diverged descents on it pays to multiply all neurons with each other once,
# while the result fits.
_SHARE_FROM = 3
_SHARE_BYTES = 2**30


@dataclass
class Branch:
    """Descents that have made the same choices so far, so that one state serves them all."""

    costs: list[int]
    posterior: Posterior
    settled: frozenset[int] = frozenset()  # models that would not move, all else being as it is
    moved: int = 0
    history: list[Sweep] = field(default_factory=list)

    def split(self, costs: list[int]) -> Branch:
        """Leave the others behind, with these costs."""
        return Branch(costs, self.posterior.copy(), self.settled, self.moved, list(self.history))


@dataclass(frozen=True)
class Descent:
    """Descents under several costs over the same models, with one prior and one width limit."""

    problem: Problem
    costs: Sequence[CostModel]
    prior: BetaBernoulli
    max_width: int

    def run(self, sweeps: int, rng: np.random.Generator) -> list[Matching]:
        """Place every model, the widest first; then re-place them in `sweeps` random orders.

        A descent stops early once every model's assignment is the best response to all others.
        The objective may rise now and then: the paper's `log k` for new neurons is no part of it.
        """
        models = self.problem.models
        branches = [Branch(list(range(len(self.costs))), Posterior(self.problem))]
        widest_first = sorted(range(len(models)), key=lambda s: -models[s].width)
        branches = self._sweep(branches, widest_first)
        for _ in range(sweeps):
            if all(len(branch.settled) == len(models) for branch in branches):
                break
            branches = self._sweep(branches, rng.permutation(len(models)).tolist())
        results: dict[int, Matching] = {}
        for branch in branches:
            branch.posterior.refresh()  # so that the result depends on the assignments alone
            results |= {cost: self._matching(branch) for cost in branch.costs}
        return [results[cost] for cost in range(len(self.costs))]

    def best(self, cost: int, shared: Shared, model: LocalModel) -> Index:
        """(J,) the best assignment under one cost: i for the i-th of the taken slots, or beyond."""
        existing = len(shared.slots)
        room = min(self.prior.room(existing, model.width), self.max_width - existing, model.width)
        joining = np.empty((0, model.width))
        if existing:
            joining = self.costs[cost](shared.gaussian, model, shared.products)[shared.slots]
            joining += self.prior.shared(shared.counts)[:, None]
        return assign(joining, self.openings[cost][model.index], self.prior.opened(room))

    @cached_property
    def openings(self) -> list[list[Array]]:
        """Per cost and model (J,): a new neuron is a global one that is still the prior."""
        prior = self.problem.prior
        return [
            [cost(prior, model, direct_products(prior, model))[0] for model in self.problem.models]
            for cost in self.costs
        ]

    @cached_property
    def _gram(self) -> GramProducts:
        return GramProducts(self.problem)

    def _sweep(self, branches: list[Branch], order: Sequence[int]) -> list[Branch]:
        """Place the models in this order in every branch that has not come to rest."""
        everyone = len(self.problem.models)
        done = [branch for branch in branches if len(branch.settled) == everyone]
        active = [branch for branch in branches if len(branch.settled) < everyone]
        for branch in active:
            branch.moved = 0
        for s in order:
            diverged = len(active)
            active = [
                part
                for branch in active
                for part in ([branch] if s in branch.settled else self._place(branch, s, diverged))
            ]
        for branch in active:
            branch.history.append(self._record(branch))
        return done + active

    def _place(self, branch: Branch, s: int, diverged: int) -> list[Branch]:
        """Give model s its best assignment given all others, under each cost of the branch."""
        model = self.problem.models[s]
        before = branch.posterior.assignments[s]
        branch.posterior.forget(s)
        taken = branch.posterior.taken(spare=model.width)
        shared = self._shared(branch.posterior, np.flatnonzero(taken), model, diverged)
        choices: dict[bytes, tuple[Index, list[int]]] = {}
        for cost in branch.costs:
            slots = _slots_of(self.best(cost, shared, model), taken, before)
            choices.setdefault(slots.tobytes(), (slots, []))[1].append(cost)
        parts = [branch.split(costs) for _, costs in list(choices.values())[1:]]
        branch.costs = next(iter(choices.values()))[1]
        parts.insert(0, branch)
        for part, (slots, _) in zip(parts, choices.values(), strict=True):
            part.posterior.observe(s, slots)
            moved = model.width if before is None else int(np.count_nonzero(slots != before))
            part.moved += moved
            part.settled = frozenset({s}) if moved else part.settled | {s}
        return parts

    def _shared(
        self, posterior: Posterior, slots: Index, model: LocalModel, diverged: int
    ) -> Shared:
        # Some free slots may lie between the taken ones: computing them too beats copying the rest.
        front = int(slots[-1]) + 1 if len(slots) else 0
        gaussian = posterior.at(slice(front))
        if diverged >= _SHARE_FROM and GramProducts.bytes_needed(self.problem) <= _SHARE_BYTES:
            products = self._gram(posterior, front, model)
        else:
            products = direct_products(gaussian, model)
        return Shared(slots, posterior.counts(slots), gaussian, products)

    def _record(self, branch: Branch) -> Sweep:
        slots = np.flatnonzero(branch.posterior.taken())
        # A slice copies nothing; free slots between the taken ones are the prior and count nothing.
        gaussian = branch.posterior.at(slice(int(slots[-1]) + 1))
        counts = branch.posterior.counts(slots)
        objective = joint_objective(self.problem, gaussian, counts, self.prior)
        return Sweep(objective, len(slots), branch.moved)

    def _matching(self, branch: Branch) -> Matching:
        posterior = branch.posterior
        slots = np.flatnonzero(posterior.taken())
        number = np.full(len(posterior.eta), -1, dtype=np.intp)
        number[slots] = np.arange(len(slots))
        return Matching(
            assignments=tuple(number[a] for a in posterior.assignments if a is not None),
            posterior=posterior.at(slots),
            counts=posterior.counts(slots).astype(np.intp),
            history=tuple(branch.history),
            converged=len(branch.settled) == len(self.problem.models),
        )


@dataclass(frozen=True, eq=False)
class Shared:
    """What the cost matrices of one model have in common, whatever the cost.

    slots, counts: (I,) the taken slots and their owners
    gaussian, products: the posterior and the inner products in all slots up to the last taken
    """

    slots: Index
    counts: Array
    gaussian: Gaussian
    products: list[Array]


def _slots_of(assigned: Index, taken: npt.NDArray[np.bool_], before: Index | None) -> Index:
    """Turn an assignment to the taken slots in their order, or beyond, into slots.

    Which of the new places a neuron took means nothing, only that it took one: it gets back the
    slot that it had for itself, else free slots are handed out in the order of the neurons.
    """
    existing = np.flatnonzero(taken)
    is_new = assigned >= len(existing)
    chosen = np.empty(len(assigned), dtype=np.intp)
    chosen[~is_new] = existing[assigned[~is_new]]
    keeps = np.zeros_like(is_new)
    unused = ~taken
    if before is not None:
        keeps = is_new & unused[before]
        chosen[keeps] = before[keeps]
        unused[before[keeps]] = False
    wanted = is_new & ~keeps
    chosen[wanted] = np.flatnonzero(unused)[: np.count_nonzero(wanted)]
    return chosen
