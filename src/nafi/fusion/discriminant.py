"""Classes told apart by a linear function of inputs, from sums over the inputs.

Promises: log odds of classes whose inputs are Gaussian with one covariance, in closed form.
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
        n, counts, about = sums.count, sums.totals[0], sums.centred
        apart = about.cross[0] / counts.clamp(min=1)  # a class without samples lies at the mean
        within = about.gram[0] - (apart * counts) @ apart.mT
        within.diagonal().add_(ridge * about.scale[0])
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


def choose_ridge(sums: LayerStatistics) -> float:
    """By generalised cross-validation: clients as folds would differ in their classes."""
    about = sums.centred
    return float(min(RIDGES, key=lambda ridge: about.gcv(ridge, sums.count)))
