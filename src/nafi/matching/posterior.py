"""The global neurons during a descent: their owners and their posterior.

Hides: slots, which are reused and never move, so that a neuron keeps its place while models are
added and removed. Promises: `forget` undoes `observe` up to rounding; precisions are recomputed
from the members each time, so they stay positive however often models are added and removed; what
is held does not grow with the number of models, but for one integer per neuron and, where
precisions differ between models, one per global neuron and precision.
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
    precision: (slots, B) `t0 + sum t_s` over the members
    owned: (slots,) how many models own the global neuron there
    members: (slots, K) how many of them have each of the K precisions that occur
    assignments: per model the slot of each of its neurons, None while the model is removed
    """

    def __init__(self, inputs: MatchingInput, most: int | None = None) -> None:
        """most: global neurons that there may be; as many as local ones by default"""
        self.inputs = inputs
        self.most = sum(inputs.widths) if most is None else most
        self.assignments: list[Index | None] = [None] * len(inputs.models)
        self.eta: Array = np.repeat(inputs.prior.eta, min(2 * inputs.widest, self.most), axis=0)
        self.precision: Array = np.repeat(inputs.prior.precision, len(self.eta), axis=0)
        self.owned: Array = np.zeros(len(self.eta))
        self.members = np.zeros((len(self.eta), len(inputs.models.kinds)), dtype=np.int32)
        self._exact = True  # whether nothing was ever taken away from `eta`

    def copy(self) -> Posterior:
        """An independent copy that shares the inputs."""
        twin = Posterior.__new__(Posterior)
        twin.inputs, twin.most = self.inputs, self.most
        twin.assignments = list(self.assignments)
        twin.eta = self.eta.copy()
        twin.precision = self.precision.copy()
        twin.owned = self.owned.copy()
        twin.members = self.members.copy()
        twin._exact = self._exact
        return twin

    def observe(self, s: int, slots: Index) -> None:
        """Add model s, its neuron j to the global neuron in `slots[j]` (`Gauss_conj`)."""
        self._add_weighted(s, slots, 1.0)
        self.assignments[s] = slots
        self._count(s, slots, 1)

    def forget(self, s: int) -> None:
        """Remove model s; a slot without members is exactly the prior again."""
        slots = self.assignments[s]
        if slots is None:
            return
        self._add_weighted(s, slots, -1.0)
        self._exact = False
        self.assignments[s] = None
        self._count(s, slots, -1)
        self.eta[slots[self.owned[slots] == 0]] = self.inputs.prior.eta

    def refresh(self) -> None:
        """Recompute `eta` from the assignments, to remove what rounding left of removed models."""
        if self._exact:
            return
        self.eta[:] = self.inputs.prior.eta
        for s, slots in enumerate(self.assignments):
            if slots is not None:
                self._add_weighted(s, slots, 1.0)
        self._exact = True

    def taken(self, spare: int = 0) -> npt.NDArray[np.bool_]:
        """Which slots have members.

        Makes room so that at least `spare` of them have none, or as many as there may be more.
        """
        taken = self.owned > 0
        missing = min(spare - int(np.count_nonzero(~taken)), self.most - len(self.eta))
        if missing <= 0:
            return taken
        # Doubling, so that copies are rare, but to no more than there can ever be.
        grow = max(missing, min(len(self.eta), self.most - len(self.eta)))
        prior = self.inputs.prior
        self.eta = np.concatenate([self.eta, np.repeat(prior.eta, grow, axis=0)])
        self.precision = np.concatenate([self.precision, np.repeat(prior.precision, grow, axis=0)])
        self.owned = np.concatenate([self.owned, np.zeros(grow)])
        self.members = np.pad(self.members, ((0, grow), (0, 0)))
        return np.concatenate([taken, np.zeros(grow, dtype=np.bool_)])

    def counts(self, slots: Index) -> Array:
        """(I,) how many models own each of these global neurons."""
        return self.owned[slots]

    def at(self, slots: Index | slice) -> Gaussian:
        """The posterior in these slots; free slots are the prior; a slice copies nothing."""
        return Gaussian(self.eta[slots], self.precision[slots], self.inputs.columns)

    def settled(self) -> tuple[Index, Gaussian]:
        """The slots with members and the posterior in them; where all have some, nothing is copied.

        For the end: what is returned may be the posterior itself.
        """
        slots = np.flatnonzero(self.taken())
        return slots, self.at(slice(None) if len(slots) == len(self.eta) else slots)

    def _count(self, s: int, slots: Index, sign: int) -> None:
        """Add model s to the members of its slots, or take it away, and sum up their precisions.

        Never by a difference: that of a huge precision would leave nothing of small ones.
        """
        models = self.inputs.models
        owners = models.owners.get(s)
        self.owned[slots] += sign if owners is None else sign * owners
        if s not in models.by_neuron:
            self.members[slots, models.kind[s]] += sign
        precision = self.inputs.prior.precision + self.members[slots] @ models.kinds
        if models.by_neuron:
            total = np.zeros_like(self.precision)
            for other, by_neuron in models.by_neuron.items():
                assigned = self.assignments[other]
                if assigned is not None:
                    total[assigned] += by_neuron
            precision += total[slots]
        self.precision[slots] = precision

    def _add_weighted(self, s: int, slots: Index, sign: float) -> None:
        """`eta += sign t_s w_sj`, in buffers that are kept.

        New temporary arrays of this size are returned to the system each time: eight times slower.
        """
        model = self.inputs.models[s]
        precision = self.inputs.columns.spread(sign * model.precision)
        weighted, rows = self.inputs.scratch
        for start in range(0, model.width, len(rows)):
            part = slice(start, min(start + len(rows), model.width))
            count = part.stop - start
            own = precision[part] if precision.ndim == 2 else precision
            np.multiply(model.neurons[part], own, weighted[:count])
            np.take(self.eta, slots[part], axis=0, out=rows[:count], mode="clip")
            self.eta[slots[part]] = np.add(rows[:count], weighted[:count], out=rows[:count])
