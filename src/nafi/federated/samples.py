"""A client's data.

Promises: inputs and targets of equal length, which can be indexed together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nafi.errors import InputError


@dataclass(frozen=True, eq=False)
class Samples:
    """A row for each sample.

    inputs: (n, ...) numbers or bytes; labels: (n,) classes, or (n, ...) what a loss compares to
    """

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise InputError(f"samples: found {len(self.inputs)} inputs, {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | npt.NDArray[np.intp] | slice) -> Samples:
        chosen = torch.from_numpy(index) if isinstance(index, np.ndarray) else index
        return Samples(self.inputs[chosen], self.labels[chosen])

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1


def as_numbers(inputs: Tensor) -> Tensor:
    """Inputs as a network takes them: bytes, as images are kept in memory, become [0, 1]."""
    return inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs
