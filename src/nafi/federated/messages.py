"""Tasks and updates as bytes.

Hides: safetensors, and the JSON in its header. Promises: what is read is what was written, bit for
bit; nothing is unpickled; bytes that are no message raise an error that says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from nafi.errors import InputError
from nafi.federated.codec import pack, unpack
from nafi.federated.strategy import Task, Update

# What the header of a message, or of a run's checkpoint, is called in safetensors' own.
KEY = "nafi"
_Kind = TypeVar("_Kind")


def task_to(task: Task) -> bytes:
    """A task as bytes."""
    return _to_bytes(task)


def task_from(content: bytes) -> Task:
    """The inverse of `task_to`."""
    return _from_bytes(Task, content, "a task")


def update_to(update: Update) -> bytes:
    """An update as bytes."""
    return _to_bytes(update)


def update_from(content: bytes) -> Update:
    """The inverse of `update_to`."""
    return _from_bytes(Update, content, "an update")


def _to_bytes(value: object) -> bytes:
    packed, tensors = pack(value)
    return save_bytes(contiguous(tensors), metadata={KEY: json.dumps(packed)})


def _from_bytes(kind: type[_Kind], content: bytes, name: str) -> _Kind:
    try:
        tensors = load_bytes(content)
        length = int.from_bytes(content[:8], "little")
        data = parsed(json.loads(content[8 : 8 + length])["__metadata__"][KEY])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"this is not a message: {type(error).__name__}: {error}") from None
    try:
        return unpack(kind, data, tensors)
    except InputError as error:
        raise InputError(f"this is not {name}: {error}") from None


def parsed(text: str) -> Any:
    """JSON, in which no name may be there twice."""
    try:
        return json.loads(text, object_pairs_hook=_table)
    except RecursionError:
        raise InputError("it is nested too deeply") from None


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise InputError("a name is there twice")
    return table


def contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors writes them."""
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
