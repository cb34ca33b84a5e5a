"""A client's data.

Hides: nothing. Promises: inputs and targets of equal length, which can be indexed together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Samples:
    """inputs: (n, ...) numbers; labels: (n,) classes, or (n, ...) what else a loss compares to."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | npt.NDArray[np.intp] | slice) -> Samples:
        chosen = torch.from_numpy(index) if isinstance(index, np.ndarray) else index
        return Samples(self.inputs[chosen], self.labels[chosen])

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1
