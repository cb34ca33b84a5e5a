"""Tasks, updates and checkpoints of runs as bytes.

Hides: safetensors, and the JSON in its header. Promises: what is read is what was written, bit for
bit; nothing is unpickled; bytes that are no message raise an error that says so. It knows no
strategy: a state is written by the types of its fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from safetensors.torch import save_file
from torch import Tensor

from nafi.errors import CheckpointError, InputError
from nafi.federated.codec import pack, unpack
from nafi.federated.strategy import Records, State, Task, Update
from nafi.files import atomic_path

_KEY = "nafi"
# Of checkpoints; those of version 0.1.0 have none.
_FORMAT = 2
_Kind = TypeVar("_Kind")
_State = TypeVar("_State", bound=State)


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


def write_state(
    path: Path, state: State, records: Records, settings: Mapping[str, Any] | None = None
) -> None:
    """Save a run after a round, whole or not at all; settings: of the strategy, to know it by."""
    packed, tensors = pack(state)
    header = {
        "format": _FORMAT,
        "state": packed,
        "records": records,
        "settings": dict(settings or {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path, private=True) as partial:
        save_file(_contiguous(tensors), partial, metadata={_KEY: json.dumps(header)})


def read_state(path: Path, kind: type[_State]) -> tuple[_State, Records, dict[str, Any]]:
    """The inverse of `write_state`; kind: of the strategy's state."""
    try:
        header, tensors = _read(path)
        state = unpack(kind, header["state"], tensors)
    except (InputError, SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from None
    return state, header["records"], header["settings"]


def read_records(path: Path) -> Records:
    """What a checkpoint has to tell of every round."""
    try:
        records: Records = _read(path)[0]["records"]
    except (InputError, SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from None
    return records


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as handle:
        header = _parsed((handle.metadata() or {})[_KEY])
        if isinstance(header, dict) and "members" in header and "format" not in header:
            raise CheckpointError(
                f"{path} is the checkpoint of a run of nafi 0.1.0, which this version cannot "
                "resume; finish the run with nafi 0.1.0, or remove the file to start again"
            )
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    kinds = {"format": int, "state": dict, "records": list, "settings": dict}
    if not isinstance(header, dict) or set(header) != set(kinds):
        raise InputError(f"its header is not {', '.join(kinds)}")
    wrong = [name for name, kind in kinds.items() if type(header[name]) is not kind]
    if wrong or not all(isinstance(record, dict) for record in header["records"]):
        raise InputError(f"{', '.join(wrong) or 'records'} in its header is of another type")
    if header["format"] != _FORMAT:
        raise InputError(f"its format is {header['format']}, expected {_FORMAT}")
    return header, tensors


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is not the checkpoint of a run of this strategy ({type(error).__name__}: "
        f"{error}); remove it to start again"
    )


def _to_bytes(value: object) -> bytes:
    packed, tensors = pack(value)
    return save_bytes(_contiguous(tensors), metadata={_KEY: json.dumps(packed)})


def _from_bytes(kind: type[_Kind], content: bytes, name: str) -> _Kind:
    try:
        tensors = load_bytes(content)
        length = int.from_bytes(content[:8], "little")
        data = _parsed(json.loads(content[8 : 8 + length])["__metadata__"][_KEY])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"this is not a message: {type(error).__name__}: {error}") from None
    try:
        return unpack(kind, data, tensors)
    except InputError as error:
        raise InputError(f"this is not {name}: {error}") from None


def _parsed(text: str) -> Any:
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


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
