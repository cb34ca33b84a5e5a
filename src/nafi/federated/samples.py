"""A client's data.

Promises: inputs and targets of equal length, which can be indexed together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nafi.errors import InputError

# Small enough for what a convolution makes of them to stay in a processor's cache.
_BATCH = 32


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


def in_batches(samples: Samples, size: int = _BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs as a network takes them, and labels, some dozens at a time.

    Images are laid out with their channels last: convolutions run up to twice as fast.
    """
    images = samples.inputs.ndim == 4
    layout = torch.channels_last if images else torch.contiguous_format
    for start in range(0, len(samples), size):
        part = samples[slice(start, start + size)]
        yield as_numbers(part.inputs).contiguous(memory_format=layout), part.labels
