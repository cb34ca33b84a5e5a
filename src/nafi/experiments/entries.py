"""What is recorded of a candidate, and how good it is.

Promises: numbers rounded alike for all methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nafi.federated import Loss, Samples, in_batches

Record = dict[str, Any]
DETAILS = "details"


def entry(
    options: Mapping[str, Any],
    validation: float,
    test: float,
    widths: list[int],
    seconds: float,
    **details: Any,
) -> Record:
    """A candidate: what was set, and what came of it; details are kept of the chosen one only."""
    return {
        "options": dict(options),
        "validation": round(validation, 3),
        "test": round(test, 3),
        "widths": widths,
        "seconds": round(seconds, 3),
        **({DETAILS: details} if details else {}),
    }


def accuracy(model: nn.Module, samples: Samples) -> float:
    """The share of samples whose class gets the highest output, in percent."""
    with torch.no_grad():
        right = [(model(x).argmax(dim=1) == y).sum() for x, y in in_batches(samples)]
    return 100 * float(torch.stack(right).sum()) / len(samples)


def dice(model: nn.Module, samples: Samples) -> float:
    """The mean over images of `2 |A and B| / (|A| + |B|)`, in percent.

    A is where the outputs are above zero, B the mask.
    """
    total = 0.0
    with torch.no_grad():
        for inputs, masks in in_batches(samples):
            predicted, wanted = (model(inputs) > 0).flatten(1), masks.flatten(1) > 0
            both = (predicted & wanted).sum(dim=1).double()
            sizes = (predicted.sum(dim=1) + wanted.sum(dim=1)).double()
            total += float(torch.where(sizes > 0, 2 * both / sizes.clamp(min=1), 1.0).sum())
    return 100 * total / len(samples)


def token_accuracy(model: nn.Module, samples: Samples) -> float:
    """The share of all places whose class gets the highest output, in percent."""
    with torch.no_grad():
        right = [(model(x).argmax(dim=-1) == y).sum() for x, y in in_batches(samples)]
    return 100 * float(torch.stack(right).sum()) / samples.labels.numel()


def mean_loss(model: nn.Module, samples: Samples, loss: Loss) -> float:
    """The mean over samples of a loss that is itself a mean over a batch."""
    with torch.no_grad():
        parts = [loss(model(x), y).double() * len(y) for x, y in in_batches(samples)]
    return float(torch.stack(parts).sum()) / len(samples)
