"""Tensors in one file: safetensors, or torch's own format.

Hides: the formats, and what people call the weights in a file that holds more. Promises: nothing is
ever unpickled; a file that cannot be used raises `CheckpointError` with its name and what to do,
before it takes more memory than it may; who asks for shapes alone gets them without the numbers
being read.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nafi.errors import CheckpointError
from nafi.headers import meta_tensors, read_header
from nafi.trust import Trust

# What people call the weights in a file that holds more than weights.
_NESTED = ("state_dict", "model_state_dict", "model")
_ZIP = b"PK"
_PICKLE = "data.pkl"  # what describes the tensors in a file of torch.save

# Tensors by name, and the metadata of safetensors.
Contents = tuple[dict[str, Tensor], dict[str, str]]
Reader = Callable[[Path, Trust], Contents]
# Types of numbers that torch can compute with; others only store them.
_KINDS = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}


def read_tensors(path: Path, trust: Trust) -> Contents:
    """The tensors of a file under the names it has for them, and the metadata of safetensors."""
    if _is_safetensors(path):
        return _read_safetensors(path, trust)
    return _read_torch(path, trust), {}


def read_shapes(path: Path, trust: Trust) -> Contents:
    """What `read_tensors` gives, with tensors of the device "meta", which have no numbers."""
    if _is_safetensors(path):
        header = read_header(path)
        return _usable(meta_tensors(header), path), header.notes
    with path.open("rb") as handle:
        mapped = handle.read(2) == _ZIP  # older files cannot be
    tensors = _read_torch(path, trust, mmap=mapped)
    return {name: tensor.to("meta") for name, tensor in tensors.items()}, {}


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory that tensors take once each has numbers of its own; of device "meta" none."""
    return sum(each.numel() * each.element_size() for each in tensors if not each.is_meta)


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


def _read_safetensors(file: Path, trust: Trust) -> Contents:
    trust.check_bytes(file.stat().st_size, str(file))
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
            state = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; was it cut off?") from None
    return _usable(state, file), metadata


def _usable(state: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Tensors, of which there must be some, with numbers that torch can compute with."""
    if not state:
        raise CheckpointError(f"{file} holds no tensors")
    for name, tensor in state.items():
        if tensor.dtype not in _KINDS or tensor.layout != torch.strided or tensor.is_quantized:
            kind = str(tensor.dtype if tensor.dtype not in _KINDS else tensor.layout)
            raise CheckpointError(
                f"{file}: {name[:60]} is {kind.removeprefix('torch.')}, which cannot be fused; "
                "save the network in float32, float16 or bfloat16, before it is quantised or packed"
            )
    return state


def _read_torch(file: Path, trust: Trust, *, mmap: bool = False) -> dict[str, Tensor]:
    try:
        _check_records(file, trust, mmap)
        with trust.capped(str(file), file.stat().st_size if mmap else 0):
            content = torch.load(str(file), map_location="cpu", weights_only=True, mmap=mmap)
    except CheckpointError:
        raise
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
        if value.is_meta:
            raise CheckpointError(f"{file}: {name[:60]} has a shape, but no numbers")
    state = _usable({name: value.detach() for name, value in content.items()}, file)
    if not mmap:
        trust.check_bytes(tensor_bytes(state.values()), str(file))
    return state


def _check_records(file: Path, trust: Trust, mmap: bool) -> None:
    """Refuse an archive whose parts, which may be compressed, would take too much memory.

    mmap: whether tensors are mapped, and only the description of them is read
    """
    if not zipfile.is_zipfile(file):
        trust.check_bytes(file.stat().st_size, str(file))
        return
    archive = torch._C.PyTorchFileReader(str(file))  # as torch.load counts them
    names = archive.get_all_records()
    sizes = {name: archive.get_record_size(name) for name in names}
    trust.check_bytes(sum(sizes[name] for name in names if name == _PICKLE or not mmap), str(file))


def _foreign(error: Exception) -> str:
    """The class that torch would have to run code of, if it says one."""
    found = re.search(r"GLOBAL ([\w.]{1,80})", str(error))
    return f" ({found[1]})" if found else ""
