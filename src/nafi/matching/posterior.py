"""The global neurons while a descent runs: who owns them, and what they are believed to be.

Hides: slots, which are reused and never move, so that a neuron keeps its place while models come
and go. Promises: `forget` undoes `observe` up to the rounding of the sums; precisions are always
summed anew from the members, so they stay positive however often models come and go.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nafi.matching.columns import Array, Index
from nafi.matching.gaussian import Gaussian
from nafi.matching.problem import Problem


class Posterior:
    """Slots for global neurons; a slot without members is free.

    eta: (slots, D) `t0 m0 + sum t_s w_sj` over the members
    members: (slots, S) 1 where model s owns a neuron there, else 0
    assignments: per model the slot of each of its neurons, None while the model is out
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.assignments: list[Index | None] = [None] * len(problem.models)
        self.eta: Array = np.repeat(problem.prior.eta, 2 * problem.widest, axis=0)
        self.members: Array = np.zeros((len(self.eta), len(problem.models)))

    def copy(self) -> Posterior:
        """An independent copy that shares the problem."""
        twin = Posterior.__new__(Posterior)
        twin.problem = self.problem
        twin.assignments = list(self.assignments)
        twin.eta = self.eta.copy()
        twin.members = self.members.copy()
        return twin

    def observe(self, s: int, slots: Index) -> None:
        """Add model s, its neuron j to the global neuron in `slots[j]` (`Gauss_conj`)."""
        self._add_weighted(s, slots, 1.0)
        self.members[slots, s] = 1.0
        self.assignments[s] = slots

    def forget(self, s: int) -> None:
        """Take model s out again; a slot left without members goes back to the prior exactly."""
        slots = self.assignments[s]
        if slots is None:
            return
        self._add_weighted(s, slots, -1.0)
        self.members[slots, s] = 0.0
        self.eta[slots[~self.members[slots].any(axis=1)]] = self.problem.prior.eta
        self.assignments[s] = None

    def refresh(self) -> None:
        """Sum `eta` anew from the assignments, to shed what rounding left behind."""
        self.eta[:] = self.problem.prior.eta
        for s, slots in enumerate(self.assignments):
            if slots is not None:
                self._add_weighted(s, slots, 1.0)

    def taken(self, spare: int = 0) -> npt.NDArray[np.bool_]:
        """Which slots have members; at least `spare` of them have none."""
        taken = np.asarray(self.members.any(axis=1))
        missing = spare - int(np.count_nonzero(~taken))
        if missing <= 0:
            return taken
        grow = max(missing, len(self.eta))  # doubling keeps the copies few
        self.eta = np.concatenate([self.eta, np.repeat(self.problem.prior.eta, grow, axis=0)])
        self.members = np.concatenate([self.members, np.zeros((grow, self.members.shape[1]))])
        return np.concatenate([taken, np.zeros(grow, dtype=np.bool_)])

    def counts(self, slots: Index) -> Array:
        """(I,) how many models own each of these global neurons."""
        return np.asarray(self.members[slots].sum(axis=1))

    def at(self, slots: Index | slice) -> Gaussian:
        """The posterior in these slots, a free one being the prior; a slice copies nothing."""
        precision = self.problem.prior.precision + self.members[slots] @ self.problem.precisions
        return Gaussian(self.eta[slots], precision, self.problem.columns)

    def _add_weighted(self, s: int, slots: Index, sign: float) -> None:
        """`eta += sign t_s w_sj`, in buffers of its own.

        Fresh temporaries of this size go back to the system each time: eight times slower.
        """
        model = self.problem.models[s]
        weighted, rows = self.problem.scratch
        weighted, rows = weighted[: model.width], rows[: model.width]
        np.multiply(model.neurons, self.problem.columns.spread(sign * model.precision), weighted)
        np.take(self.eta, slots, axis=0, out=rows, mode="clip")
        self.eta[slots] = np.add(rows, weighted, out=rows)
