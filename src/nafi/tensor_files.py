"""Tensors in one file: safetensors, or torch's own format.

Hides: the formats, and what people call the weights in a file that holds more. Promises: nothing is
ever unpickled; a file that cannot be used raises `CheckpointError` with its name and what to do;
who asks for shapes alone gets them without the numbers being read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nafi.errors import CheckpointError
from nafi.headers import meta_tensors, read_header

# What people call the weights in a file that holds more than weights.
_NESTED = ("state_dict", "model_state_dict", "model")
_ZIP = b"PK"

# Tensors by name, and the metadata of safetensors.
Contents = tuple[dict[str, Tensor], dict[str, str]]
Reader = Callable[[Path], Contents]


def read_tensors(path: Path) -> Contents:
    """The tensors of a file under the names it has for them, and the metadata of safetensors."""
    if _is_safetensors(path):
        return _read_safetensors(path)
    return _read_torch(path), {}


def read_shapes(path: Path) -> Contents:
    """What `read_tensors` gives, with tensors of the device "meta", which have no numbers."""
    if _is_safetensors(path):
        header = read_header(path)
        return _some(meta_tensors(header), path), header.notes
    with path.open("rb") as handle:
        mapped = handle.read(2) == _ZIP  # older files cannot be
    return {name: t.to("meta") for name, t in _read_torch(path, mmap=mapped).items()}, {}


def _is_safetensors(path: Path) -> bool:
    """Whether a file is of safetensors, or else of torch.save; others are refused."""
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path} {kind}; expected a checkpoint")
    with path.open("rb") as handle:
        first_bytes = handle.read(9)
    if first_bytes[8:9] == b"{":
        return True
    if first_bytes[:2] == _ZIP or first_bytes[:1] == b"\x80":
        return False
    raise CheckpointError(
        f"{path} is neither a safetensors file nor one of torch.save; was it cut off or renamed?"
    )


def _read_safetensors(file: Path) -> Contents:
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
            state = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; was it cut off?") from None
    return _some(state, file), metadata


def _some(state: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    if not state:
        raise CheckpointError(f"{file} holds no tensors")
    return state


def _read_torch(file: Path, *, mmap: bool = False) -> dict[str, Tensor]:
    try:
        content = torch.load(str(file), map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # whatever torch finds wrong with the file
        raise CheckpointError(
            f"{file} cannot be read with weights_only=True ({type(error).__name__}): it is cut off "
            f"or holds more than tensors{_foreign(error)}; save model.state_dict(), nothing else "
            "is ever unpickled"
        ) from None
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{file} holds {type(content).__name__}, expected a state dict")
    for name, value in content.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{file}: {name} is {type(value).__name__}, expected tensors only; save "
                "model.state_dict()"
            )
    return {name: value.detach() for name, value in content.items()}


def _foreign(error: Exception) -> str:
    """The class that torch would have to run code of, if it says one."""
    found = re.search(r"GLOBAL ([\w.]{1,80})", str(error))
    return f" ({found[1]})" if found else ""
