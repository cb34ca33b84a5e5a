"""Random numbers that depend on a seed alone.

Hides: torch's one generator for everything, which factories and dropout draw from. Promises: what
is drawn within `seeded` is the same every time, and what comes after it is as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(seed: int, device: str = "cpu") -> Iterator[None]:
    """Draw from this seed for a while."""
    kind = torch.device(device).type
    fork = (
        torch.random.fork_rng(devices=[])
        if kind == "cpu"
        else torch.random.fork_rng(device_type=kind)
    )
    with fork:
        torch.manual_seed(seed)
        yield


def derived_seed(*parts: int) -> int:
    """A seed made of several numbers."""
    return int(np.random.default_rng(parts).integers(2**62))
