"""The result of a matching.

Hides: that means are computed on first use. Promises: everything in the caller's column order, and
a summary to print.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nafi.errors import InputError
from nafi.matching.columns import Array, ColumnBlocks, Index
from nafi.matching.gaussian import Gaussian
from nafi.matching.inputs import Owners


@dataclass(frozen=True)
class Sweep:
    """The state after one pass over the models; the first pass assigns them.

    objective: twice the negative log posterior (`neg_log_pos`), up to a constant
    width: global neurons
    changed: local neurons whose global neuron changed in this pass
    """

    objective: float
    width: int
    changed: int


@dataclass(frozen=True, eq=False)
class Matching:
    """Which local neurons are the same global neuron, and what that neuron is.

    assignments: per model s a (J_s,) array, the global neuron of each local one
    posterior: of each global neuron (`Gauss_conj`), in sorted columns; see `means`, `precisions`
    counts: (J,) how many models own each global neuron
    prior: of a global neuron, in sorted columns
    models: how many models there are, with those that some of them stand for
    history: one `Sweep` for the first assignment and one for each pass after it
    converged: whether no model would change its assignment given all others
    """

    assignments: tuple[Index, ...]
    posterior: Gaussian
    counts: Index
    prior: Gaussian
    models: int
    history: tuple[Sweep, ...]
    converged: bool

    @cached_property
    def means(self) -> Array:
        """(J, D) the posterior mean of each global neuron."""
        return self.posterior.columns.unsort(self.posterior.mean)

    @cached_property
    def precisions(self) -> Array:
        """(J, D) the posterior precision of each global neuron."""
        columns = self.posterior.columns
        spread = np.broadcast_to(columns.spread(self.posterior.precision), self.posterior.eta.shape)
        return columns.unsort(spread)

    def summary(self) -> tuple[Array, Array, Owners]:
        """What the models say of each global neuron without the prior: a model for another `match`.

        Returns (J, D) their mean, (J, D) their precision, and how many models each stands for.
        """
        columns, shape = self.posterior.columns, self.posterior.eta.shape
        if not shape[1]:
            raise InputError("a matching without neurons has no summary; match again")
        precision = np.maximum(self.posterior.precision - self.prior.precision, 0.0)
        spread = np.broadcast_to(columns.spread(precision), shape)
        mean = (self.posterior.eta - self.prior.eta) / np.where(spread > 0, spread, 1.0)
        mean = np.where(spread > 0, mean, 0.0)
        owners = Owners(self.counts, self.models)
        return columns.unsort(mean), columns.unsort(spread), owners

    @property
    def prior_of_columns(self) -> tuple[Array, Array]:
        """(D,) the mean and the precision of the prior."""
        columns = self.prior.columns
        spread = np.broadcast_to(columns.spread(self.prior.precision), self.prior.eta.shape)
        return columns.unsort(self.prior.mean)[0], columns.unsort(spread)[0]

    def with_assignments(self, assignments: Sequence[Index], width: int) -> Matching:
        """The same with other models, or the same ones elsewhere; without columns."""
        bare = self.without_neurons()
        none = np.zeros((width, 0))
        return replace(
            bare,
            assignments=tuple(assignments),
            posterior=replace(bare.posterior, eta=none, precision=none),
            counts=np.bincount(np.concatenate(assignments), minlength=width),
            converged=False,
        )

    def without_neurons(self) -> Matching:
        """The same without columns, to save memory where no means are needed."""
        posterior = self.posterior
        none = ColumnBlocks(np.arange(0), np.array([], dtype=np.intp))
        empty = Gaussian(posterior.eta[:, :0].copy(), posterior.precision[:, :0].copy(), none)
        return replace(self, posterior=empty, prior=empty)

    @property
    def width(self) -> int:
        """The number of global neurons, J."""
        return len(self.counts)

    def owners(self) -> Index:
        """(J, S) the local index of each global neuron in each model, -1 where it has none."""
        table = np.full((self.width, len(self.assignments)), -1, dtype=np.intp)
        for s, assigned in enumerate(self.assignments):
            table[assigned, s] = np.arange(len(assigned))
        return table

    def __str__(self) -> str:
        locals_ = [len(assigned) for assigned in self.assignments]
        alone = int(np.count_nonzero(self.counts == 1))
        everywhere = int(np.count_nonzero(self.counts == self.models))
        passes = len(self.history) - 1
        state = "converged" if self.converged else "not converged"
        return (
            f"{sum(locals_)} neurons of {len(locals_)} models -> {self.width} global neurons "
            f"({self.width / max(locals_):.2f}x the widest model)\n"
            f"owned by one model: {alone}, by all: {everywhere}, "
            f"mean owners {self.counts.mean():.1f}\n"
            f"{state} after {passes} sweep{'' if passes == 1 else 's'}, "
            f"objective {self.history[-1].objective:.6g}"
        )
