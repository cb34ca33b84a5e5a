"""What is recorded of a candidate, and how good it is.

Hides: nothing. Promises: numbers rounded alike for all methods.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nafi.federated.samples import Samples

Record = dict[str, Any]
_CHUNK = 1000


def entry(
    options: dict[str, Any],
    validation: float,
    test: float,
    widths: list[int],
    seconds: float,
    rounds: list[Record] | None = None,
) -> Record:
    """A candidate: what was set, and what came of it."""
    found = {
        "options": options,
        "validation": round(validation, 3),
        "test": round(test, 3),
        "widths": widths,
        "seconds": round(seconds, 3),
    }
    return found if rounds is None else {**found, "rounds": rounds}


def accuracy(model: nn.Module, samples: Samples) -> float:
    """The share of samples whose class gets the highest output, in percent."""
    with torch.no_grad():
        found = [model(inputs).argmax(dim=1) for inputs in torch.split(samples.inputs, _CHUNK)]
    return 100 * float((torch.cat(found) == samples.labels).double().mean())
