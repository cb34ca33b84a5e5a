"""What a safetensors file says before its numbers: shapes, types and notes.

Hides: the layout of the file. Promises: no tensor is read, however large the file is; a note is
added without touching the numbers, and the file is complete or as it was.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from nafi.errors import CheckpointError
from nafi.files import atomic_path

if TYPE_CHECKING:  # torch is imported for those alone who ask for tensors
    from torch import Tensor

_LENGTH = 8  # bytes that say how long the header is
_NOTES = "__metadata__"
_ALIGNED = 8
_TYPES = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"F8_{kind}": f"float8_{kind.lower()}" for kind in ("E4M3", "E5M2", "E8M0")},
    "BF16": "bfloat16",
    "BOOL": "bool",
    "C64": "complex64",
}


@dataclass(frozen=True)
class Header:
    """shapes: tensor -> sizes; types: tensor -> as F32; notes: name -> text; size: bytes of all."""

    shapes: dict[str, tuple[int, ...]]
    types: dict[str, str]
    notes: dict[str, str]
    size: int


def read_header(path: Path) -> Header:
    """The header of a file; any other file raises a `CheckpointError`."""
    try:
        with safe_open(path, framework="np") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            shapes = {name: tuple(piece.get_shape()) for name, piece in slices.items()}
            types = {name: str(piece.get_dtype()) for name, piece in slices.items()}
            return Header(shapes, types, handle.metadata() or {}, path.stat().st_size)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from None


def meta_tensors(header: Header) -> dict[str, Tensor]:
    """Tensors of the same shapes and types that hold no numbers."""
    import torch

    def empty(name: str) -> Tensor:
        dtype = getattr(torch, _TYPES.get(header.types[name], "float32"))
        return torch.empty(header.shapes[name], dtype=dtype, device="meta")

    return {name: empty(name) for name in header.shapes}


def add_note(path: Path, name: str, text: str) -> None:
    """Write a text into the header of a file, in place of one of the same name."""
    read_header(path)  # refuses what is no such file
    with path.open("rb") as source:
        length = int.from_bytes(source.read(_LENGTH), "little")
        header = json.loads(source.read(length))
        header[_NOTES] = {**header.get(_NOTES, {}), name: text}
        written = json.dumps(header, separators=(",", ":")).encode()
        written += b" " * (-len(written) % _ALIGNED)
        with atomic_path(path) as partial, partial.open("wb") as target:
            target.write(len(written).to_bytes(_LENGTH, "little"))
            target.write(written)
            shutil.copyfileobj(source, target)
