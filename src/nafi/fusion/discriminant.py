"""Classes told apart by a linear function of inputs, from sums over the inputs.

Promises: log odds of classes whose inputs are Gaussian with one covariance, in closed form; the
ridge that it needs comes from the sums, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nafi.fusion.statistics import RIDGES, LayerStatistics


@dataclass(frozen=True, eq=False)
class Discriminant:
    """Log odds of classes whose inputs have one covariance, linear in the input.

    mean: (K,) of all inputs; directions: (K, C) and offsets: (C,) of the log likelihoods
    priors: (C,) log shares of the classes
    """

    mean: Tensor
    directions: Tensor
    offsets: Tensor
    priors: Tensor

    @classmethod
    def of(cls, sums: LayerStatistics, ridge: float) -> Discriminant:
        """ridge: added to the covariance, in units of the mean variance of an input."""
        n, counts, about = int(sums.count), sums.totals[0], sums.centred()
        apart = about.cross[0] / counts.clamp(min=1)  # a class without samples lies at the mean
        within = about.gram[0] - (apart * counts) @ apart.mT
        within.diagonal().add_(ridge * unit_of(about))
        within /= max(n - int((counts > 0).sum()), 1)
        directions = torch.linalg.solve(within, apart)
        offsets = -(apart * directions).sum(dim=0) / 2
        return cls(sums.sums[0] / n, directions, offsets, (counts.clamp(min=0.5) / n).log())

    def likelihoods(self, inputs: Tensor) -> Tensor:
        """(M, C) up to what all classes have in common."""
        return (inputs - self.mean) @ self.directions + self.offsets

    def affine(self, scale: float) -> tuple[Tensor, Tensor]:
        """Weights (K, C) and bias (C,) of the log odds."""
        bias = scale * (self.offsets - self.mean @ self.directions) + self.priors
        return scale * self.directions, bias


def unit_of(sums: LayerStatistics) -> float:
    """The mean diagonal of the gram matrix: what ridges are multiples of."""
    return max(float(sums.gram[0].diagonal().mean()), torch.finfo(torch.float64).tiny)


def choose_ridge(sums: LayerStatistics) -> float:
    """The ridge of least generalised cross-validation, for regression on the classes.

    The discriminant with a ridge lies in the span of that regression. Clients would be poor folds:
    they differ in their classes. One eigendecomposition serves all ridges.
    """
    about = sums.centred()
    values, vectors = torch.linalg.eigh(about.gram[0])
    values, unit = values.clamp(min=0), unit_of(about)
    power = (vectors.mT @ about.cross[0]).square().sum(dim=1)

    def score(ridge: float) -> float:
        kept = values + ridge * unit
        error = about.squares.sum() - (power * (kept + ridge * unit) / kept.square()).sum()
        left = 1 - (1 + (values / kept).sum()) / sums.count  # the means are fitted, too
        return float(error / left.square())

    return min(RIDGES, key=score)
