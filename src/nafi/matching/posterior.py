"""The global neurons during a descent: their owners and their posterior.

Hides: slots, which are reused and never move, so that a neuron keeps its place while models are
added and removed. Promises: `forget` undoes `observe` up to rounding; precisions are recomputed
from the members each time, so they stay positive however often models are added and removed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nafi.matching.columns import Array, Index
from nafi.matching.gaussian import Gaussian
from nafi.matching.inputs import MatchingInput


class Posterior:
    """Slots for global neurons; a slot without members is free.

    eta: (slots, D) `t0 m0 + sum t_s w_sj` over the members
    members: (slots, S) 1 where model s owns a neuron there, else 0
    assignments: per model the slot of each of its neurons, None while the model is removed
    """

    def __init__(self, inputs: MatchingInput) -> None:
        self.inputs = inputs
        self.assignments: list[Index | None] = [None] * len(inputs.models)
        self.eta: Array = np.repeat(inputs.prior.eta, 2 * inputs.widest, axis=0)
        self.members: Array = np.zeros((len(self.eta), len(inputs.models)))

    def copy(self) -> Posterior:
        """An independent copy that shares the inputs."""
        twin = Posterior.__new__(Posterior)
        twin.inputs = self.inputs
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
        """Remove model s; a slot without members is exactly the prior again."""
        slots = self.assignments[s]
        if slots is None:
            return
        self._add_weighted(s, slots, -1.0)
        self.members[slots, s] = 0.0
        self.eta[slots[~self.members[slots].any(axis=1)]] = self.inputs.prior.eta
        self.assignments[s] = None

    def refresh(self) -> None:
        """Recompute `eta` from the assignments, to remove accumulated rounding errors."""
        self.eta[:] = self.inputs.prior.eta
        for s, slots in enumerate(self.assignments):
            if slots is not None:
                self._add_weighted(s, slots, 1.0)

    def taken(self, spare: int = 0) -> npt.NDArray[np.bool_]:
        """Which slots have members; makes room so that at least `spare` of them have none."""
        taken = np.asarray(self.members.any(axis=1))
        missing = spare - int(np.count_nonzero(~taken))
        if missing <= 0:
            return taken
        # Doubling, so that copies are rare, but to no more than there can ever be.
        most = sum(model.width for model in self.inputs.models)
        grow = max(missing, min(len(self.eta), most - len(self.eta)))
        self.eta = np.concatenate([self.eta, np.repeat(self.inputs.prior.eta, grow, axis=0)])
        self.members = np.concatenate([self.members, np.zeros((grow, self.members.shape[1]))])
        return np.concatenate([taken, np.zeros(grow, dtype=np.bool_)])

    def counts(self, slots: Index) -> Array:
        """(I,) how many models own each of these global neurons."""
        return np.asarray(self.members[slots].sum(axis=1))

    def at(self, slots: Index | slice) -> Gaussian:
        """The posterior in these slots; free slots are the prior; a slice copies nothing."""
        precision = self.inputs.prior.precision + self.members[slots] @ self.inputs.precisions
        return Gaussian(self.eta[slots], precision, self.inputs.columns)

    def _add_weighted(self, s: int, slots: Index, sign: float) -> None:
        """`eta += sign t_s w_sj`, in buffers that are kept.

        New temporary arrays of this size are returned to the system each time: eight times slower.
        """
        model = self.inputs.models[s]
        weighted, rows = self.inputs.scratch
        weighted, rows = weighted[: model.width], rows[: model.width]
        np.multiply(model.neurons, self.inputs.columns.spread(sign * model.precision), weighted)
        np.take(self.eta, slots, axis=0, out=rows, mode="clip")
        self.eta[slots] = np.add(rows, weighted, out=rows)
