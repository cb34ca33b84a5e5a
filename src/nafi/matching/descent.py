"""Algorithm `algori:nafi`: coordinate descent over the models' assignments.

Hides: the order of models, the bookkeeping of global neurons, when to stop, the work that descents
under several costs share, and that costs are computed for some global neurons at a time. Promises:
each model's assignment is the cheapest for its cost matrix given all others, every global neuron
has an owner, and equal inputs and seeds give bit-equal results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from nafi.matching.assignment import AssignmentProblem
from nafi.matching.columns import Array, Index
from nafi.matching.cost import CostModel, joint_objective
from nafi.matching.gaussian import Gaussian
from nafi.matching.inputs import LocalModel, MatchingInput
from nafi.matching.posterior import Posterior
from nafi.matching.prior import BetaBernoulli
from nafi.matching.products import DoubleProducts, GramProducts, SingleProducts, direct_products
from nafi.matching.result import Matching, Sweep

# From this number of diverged descents on, computing all pairwise products once is faster, if they
# fit into this many bytes.
_SHARE_FROM = 3
_SHARE_BYTES = 2**30
# Costs of so many pairs are computed at a time: 16 MB, which the allocator keeps for the next.
_PAIRS = 2**21


@dataclass
class Branch:
    """Descents that have made the same choices so far and therefore share one state."""

    costs: list[int]
    posterior: Posterior
    settled: frozenset[int] = frozenset()  # models that would not change, given all others
    moved: int = 0
    history: list[Sweep] = field(default_factory=list)

    def split(self, costs: list[int]) -> Branch:
        """A copy for these costs, whose next choice differs."""
        return Branch(costs, self.posterior.copy(), self.settled, self.moved, list(self.history))


@dataclass(frozen=True)
class CoordinateDescent:
    """Descents under several costs over the same models, with one prior and one width limit."""

    inputs: MatchingInput
    costs: Sequence[CostModel]
    prior: BetaBernoulli
    max_width: int
    products: type[DoubleProducts] | type[SingleProducts] = DoubleProducts

    def run(self, sweeps: int, rng: np.random.Generator) -> list[Matching]:
        """Assign every model, the widest first; then reassign them in `sweeps` random orders.

        A descent stops early once every model's assignment is the best response to all others.
        The objective may rise at times: it does not contain the paper's `log k` for new neurons.
        """
        models = self.inputs.models
        branches = [Branch(list(range(len(self.costs))), Posterior(self.inputs, self.max_width))]
        widths = self.inputs.widths
        widest_first = sorted(range(len(models)), key=lambda s: -widths[s])
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

    def joined(self, posterior: Posterior, s: int) -> Index:
        """(J,) the best assignment of model s to global neurons that stay as they are."""
        model, taken = self.inputs.models[s], np.flatnonzero(posterior.taken())
        neurons = self._global_neurons(posterior, taken, model, diverged=1)
        return self.best(0, neurons, len(taken), model)

    def best(
        self, cost: int, neurons: Iterable[GlobalNeurons], existing: int, model: LocalModel
    ) -> Index:
        """(J,) the best assignment: i for the i-th of the existing, I and above: new."""
        room = min(self.prior.room(existing, model.width), self.max_width - existing, model.width)
        problem = AssignmentProblem(existing, self.opening(cost, model), self.prior.opened(room))
        for part in neurons:
            joining = self._costs(cost, part.gaussian, model, part.products)[part.taken]
            if model.owners is None:
                joining += self.prior.shared(part.counts)[:, None]
            else:
                joining += self.prior.joined(part.counts, model.owners)
            problem.add(part.first, joining)
        return problem.solve()

    def opening(self, cost: int, model: LocalModel) -> Array:
        """(J,) the cost of a new neuron, a global one equal to the prior."""
        prior = self.inputs.prior
        costs: Array = self._costs(cost, prior, model, direct_products(prior, model))[0]
        return costs if model.owners is None else costs + self.prior.gathered(model.owners)

    def _costs(
        self, cost: int, gaussian: Gaussian, model: LocalModel, products: list[Array]
    ) -> Array:
        """(I, J) the costs of all pairs, without popularity."""
        if model.owners is None:
            return self.costs[cost](gaussian, model, products)
        values = np.empty((len(gaussian.eta), model.width))
        for rows, part in model.parts:
            of_part = [product[:, rows] for product in products]
            values[:, rows] = self.costs[cost](gaussian, part, of_part)
        return values

    @cached_property
    def _gram(self) -> GramProducts:
        return GramProducts(self.inputs)

    def _sweep(self, branches: list[Branch], order: Sequence[int]) -> list[Branch]:
        """Assign the models in this order, in every branch that has not converged."""
        everyone = len(self.inputs.models)
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
        """Assign model s given all others, under each cost of the branch."""
        model = self.inputs.models[s]
        before = branch.posterior.assignments[s]
        branch.posterior.forget(s)
        taken = branch.posterior.taken(spare=model.width)
        existing = np.flatnonzero(taken)
        neurons: Iterable[GlobalNeurons]
        neurons = self._global_neurons(branch.posterior, existing, model, diverged)
        if len(branch.costs) > 1:
            neurons = list(neurons)  # all costs use the same products
        choices: dict[bytes, tuple[Index, list[int]]] = {}
        for cost in branch.costs:
            slots = _slots_of(self.best(cost, neurons, len(existing), model), taken, before)
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

    def _global_neurons(
        self, posterior: Posterior, slots: Index, model: LocalModel, diverged: int
    ) -> Iterator[GlobalNeurons]:
        """The taken slots, some at a time; all of them if there are not many."""
        # Free slots may lie between the taken ones: computing them is faster than copying the rest.
        front = int(slots[-1]) + 1 if len(slots) else 0
        gaussian, counts = posterior.at(slice(front)), posterior.counts(slots)
        shared = diverged >= _SHARE_FROM and GramProducts.bytes_needed(self.inputs) <= _SHARE_BYTES
        known = self._gram(posterior, front, model) if shared else []
        multiply = self.products(model, gaussian.columns)
        step = max(1, _PAIRS // model.width)
        for start in range(0, front, step):
            rows = slice(start, min(start + step, front))
            first, last = np.searchsorted(slots, [rows.start, rows.stop])
            part = gaussian.rows(rows)
            products = [each[rows] for each in known] if shared else multiply(part)
            taken = slots[first:last] - start
            yield GlobalNeurons(int(first), taken, counts[first:last], part, products)

    def _record(self, branch: Branch) -> Sweep:
        slots = np.flatnonzero(branch.posterior.taken())
        # A slice copies nothing; free slots between the taken ones are the prior and add nothing.
        gaussian = branch.posterior.at(slice(int(slots[-1]) + 1))
        counts = branch.posterior.counts(slots)
        objective = joint_objective(self.inputs, gaussian, counts, self.prior)
        return Sweep(objective, len(slots), branch.moved)

    def _matching(self, branch: Branch) -> Matching:
        posterior = branch.posterior
        slots, gaussian = posterior.settled()
        number = np.full(len(posterior.eta), -1, dtype=np.intp)
        number[slots] = np.arange(len(slots))
        return Matching(
            assignments=tuple(number[a] for a in posterior.assignments if a is not None),
            posterior=gaussian,
            counts=posterior.counts(slots).astype(np.intp),
            prior=self.inputs.prior,
            models=self.inputs.count,
            history=tuple(branch.history),
            converged=len(branch.settled) == len(self.inputs.models),
        )


@dataclass(frozen=True, eq=False)
class GlobalNeurons:
    """What the costs of some global neurons are computed from.

    first: how many taken slots come before
    taken, counts: (I,) the taken slots among these, and the number of their owners
    gaussian, products: the posterior and the inner products in all of these slots
    """

    first: int
    taken: Index
    counts: Array
    gaussian: Gaussian
    products: list[Array]


def _slots_of(assigned: Index, taken: npt.NDArray[np.bool_], before: Index | None) -> Index:
    """The slot of each neuron, from an assignment to the taken slots in their order, or new ones.

    New places are interchangeable: a neuron that had a slot for itself keeps it, the others get
    the free slots in the order of the neurons.
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
