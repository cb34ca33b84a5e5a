"""Tensors on disk that are used like tensors in memory.

Hides: the file, which is mapped into memory and then has no name. Promises: the same numbers, bit
for bit; the system reads them when they are used, and takes their memory back when it needs it.
Nothing is left on disk when the tensors are gone, nor when the process is killed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from nafi.errors import InputError

# Fewer bytes are not worth a mapping, of which a process has some ten thousands.
_SMALLEST = 4096
_ALIGNED = 64


def on_disk(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in a file of the folder for temporary files; change them, and memory is taken.

    Where an open file cannot lose its name, as on Windows, they stay in memory.
    """
    starts, size = {}, 0
    for name, tensor in tensors.items():
        starts[name] = size
        size += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
    if size < _SMALLEST or os.name != "posix":
        return dict(tensors)
    try:
        with tempfile.NamedTemporaryFile(prefix="nafi-", buffering=0) as file:
            file.truncate(size)
            for name, tensor in tensors.items():
                file.seek(starts[name])
                file.write(_bytes_of(tensor))
            mapped = torch.UntypedStorage.from_file(file.name, shared=False, nbytes=size)
    except (OSError, RuntimeError) as error:  # the second where no more files can be mapped
        raise InputError(
            f"cannot keep what clients sent in {tempfile.gettempdir()}: "
            f"{getattr(error, 'strerror', None) or error}; make room, or set TMPDIR to a folder "
            "with more"
        ) from None
    assert isinstance(mapped, torch.UntypedStorage)
    return {name: _view(mapped, starts[name], tensor) for name, tensor in tensors.items()}


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _view(mapped: torch.UntypedStorage, start: int, like: Tensor) -> Tensor:
    """A tensor of this form at a place of the mapped file."""
    place, shape = start // like.element_size(), tuple(like.shape)
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return torch.empty(0, dtype=like.dtype).set_(mapped, place, shape, strides)
