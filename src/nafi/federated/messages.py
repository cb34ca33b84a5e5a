"""Tasks, updates and states as bytes.

Hides: safetensors, and the JSON in its header. Promises: what is read is what was written, bit for
bit; nothing is unpickled; bytes that are no message raise an error that says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from safetensors.torch import save_file
from torch import Tensor

from nafi.errors import CheckpointError, InputError
from nafi.federated.architecture import Form, Tensors
from nafi.federated.strategy import Member, Records, State, Task, Update
from nafi.federated.training import Training
from nafi.files import atomic_path

_KEY = "nafi"
_GLOBAL, _MEMBER = "global", "member"


def task_to(task: Task) -> bytes:
    """A task as bytes."""
    told = {
        "round": task.round,
        "form": form_to(task.form),
        "frozen": sorted(task.frozen),
        "training": asdict(task.training),
        "start": task.start,
        "seed": task.seed,
    }
    return _to_bytes(task.tensors, told)


def task_from(content: bytes) -> Task:
    """The inverse of `task_to`."""
    tensors, told = _from_bytes(content)
    try:
        return Task(
            told["round"],
            form_from(told["form"]),
            tensors,
            frozenset(told["frozen"]),
            Training(**told["training"]),
            told["start"],
            told["seed"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"this is not a task: {error}") from None


def update_to(update: Update) -> bytes:
    """An update as bytes."""
    counts = update.class_counts
    told = {
        "client": update.client,
        "round": update.round,
        "samples": update.samples,
        "class_counts": None if counts is None else list(counts),
    }
    return _to_bytes(update.tensors, told)


def update_from(content: bytes) -> Update:
    """The inverse of `update_to`."""
    tensors, told = _from_bytes(content)
    try:
        counts = told["class_counts"]
        return Update(
            told["client"],
            told["round"],
            tensors,
            told["samples"],
            None if counts is None else tuple(counts),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"this is not an update: {error}") from None


def write_state(
    path: Path, state: State, records: Records, settings: Mapping[str, Any] | None = None
) -> None:
    """Save a run after a round, whole or not at all; settings: of the strategy, to know it by."""
    order = list(state.members)
    tensors = {f"{_GLOBAL}/{name}": tensor for name, tensor in state.tensors.items()}
    for place, member in enumerate(state.members.values()):
        tensors |= {f"{_MEMBER}/{place}/{n}": tensor for n, tensor in member.tensors.items()}
    told = {
        "round": state.round,
        "form": form_to(state.form),
        "matched": list(state.matched),
        "members": [
            [name, state.members[name].samples, state.members[name].class_counts] for name in order
        ],
        "records": records,
        "settings": dict(settings or {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as partial:
        save_file(_contiguous(tensors), partial, metadata={_KEY: json.dumps(told)})


def read_state(path: Path) -> tuple[State, Records, dict[str, Any]]:
    """The inverse of `write_state`."""
    try:
        with safe_open(path, framework="pt") as handle:
            told = json.loads((handle.metadata() or {})[_KEY])
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        members = {
            str(name): Member(
                _under(tensors, f"{_MEMBER}/{place}/"),
                int(samples),
                None if counts is None else tuple(counts),
            )
            for place, (name, samples, counts) in enumerate(told["members"])
        }
        state = State(
            int(told["round"]),
            form_from(told["form"]),
            _under(tensors, f"{_GLOBAL}/"),
            tuple(told["matched"]),
            members,
        )
        return state, list(told["records"]), dict(told["settings"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not the checkpoint of a run ({type(error).__name__}: {error}); remove it "
            "to start again"
        ) from None


def form_to(form: Form) -> dict[str, Any]:
    """A form as plain data."""
    return {"widths": dict(form.widths), "folded": [list(pair) for pair in form.folded]}


def form_from(data: Mapping[str, Any]) -> Form:
    """The inverse of `form_to`."""
    widths = {str(name): int(width) for name, width in data["widths"].items()}
    return Form(widths, tuple((str(layer), str(norm)) for layer, norm in data["folded"]))


def _to_bytes(tensors: Tensors, told: Mapping[str, Any]) -> bytes:
    return save_bytes(_contiguous(tensors), metadata={_KEY: json.dumps(told)})


def _from_bytes(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        tensors = load_bytes(content)
        length = int.from_bytes(content[:8], "little")
        told = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_KEY])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"this is not a message: {type(error).__name__}: {error}") from None
    if not isinstance(told, dict):
        raise InputError("this is not a message: its header is no table")
    return tensors, told


def _contiguous(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
