"""Tasks, updates and states as bytes.

Hides: safetensors, and the JSON in its header. Promises: what is read is what was written, bit for
bit; nothing is unpickled; bytes that are no message raise an error that says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from safetensors.torch import save_file
from torch import Tensor

from nafi.errors import CheckpointError, InputError, few
from nafi.federated.architecture import Architecture, Form, Tensors
from nafi.federated.strategy import Member, Records, State, Task, Update
from nafi.federated.training import Training
from nafi.files import atomic_path
from nafi.graph.trace import named_tensors

_KEY = "nafi"
_GLOBAL, _MEMBER = "global", "member"
# What seeds and counts may be; numpy and torch take no others.
_Number = Annotated[int, Field(ge=0, lt=2**63)]
_Width = Annotated[int, Field(ge=1, lt=2**31)]


class _Told(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Form(_Told):
    widths: dict[str, _Width]
    folded: list[tuple[str, str]]

    def form(self) -> Form:
        return Form(self.widths, tuple(self.folded))


class _Task(_Told):
    round: _Number
    form: _Form
    frozen: list[str]
    training: dict[str, Any]
    start: _Number
    seed: _Number


class _Update(_Told):
    client: str
    round: int
    samples: int
    class_counts: list[int] | None


class _State(_Told):
    round: _Number
    form: _Form
    matched: list[str]
    members: list[tuple[str, _Number, list[_Number] | None]]
    records: list[dict[str, Any]]
    settings: dict[str, Any]


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
    tensors, header = _from_bytes(content)
    told = _understood(_Task, header, "a task")
    try:
        training = Training(**told.training)
    except TypeError as error:
        raise InputError(f"this is not a task: {error}") from None
    return Task(
        told.round,
        told.form.form(),
        tensors,
        frozenset(told.frozen),
        training,
        told.start,
        told.seed,
    )


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
    tensors, header = _from_bytes(content)
    told = _understood(_Update, header, "an update")
    counts = None if told.class_counts is None else tuple(told.class_counts)
    return Update(told.client, told.round, tensors, told.samples, counts)


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
    with atomic_path(path, private=True) as partial:
        save_file(_contiguous(tensors), partial, metadata={_KEY: json.dumps(told)})


def read_state(path: Path) -> tuple[State, Records, dict[str, Any]]:
    """The inverse of `write_state`."""
    try:
        with safe_open(path, framework="pt") as handle:
            header = (handle.metadata() or {})[_KEY]
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        told = _understood(_State, header, "a run")
        members = {
            name: Member(
                _under(tensors, f"{_MEMBER}/{place}/"),
                samples,
                None if counts is None else tuple(counts),
            )
            for place, (name, samples, counts) in enumerate(told.members)
        }
        state = State(
            told.round,
            told.form.form(),
            _under(tensors, f"{_GLOBAL}/"),
            tuple(told.matched),
            members,
        )
        return state, told.records, told.settings
    except (InputError, SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not the checkpoint of a run ({type(error).__name__}: {error}); remove it "
            "to start again"
        ) from None


def check_state(state: State, architecture: Architecture) -> None:
    """Refuse a state, as read from a file, whose tensors are not those of its networks."""
    model, spec = architecture.network(state.form)
    shapes = {name: tensor.shape for name, tensor in named_tensors(model).items()}
    unknown = [name for name in state.matched if name not in spec.groups]
    if unknown:
        raise InputError(f"there is no group {few(unknown)}")
    for own in (state.tensors, *(member.tensors for member in state.members.values())):
        wrong = [name for name in own if shapes.get(name) != own[name].shape]
        if wrong:
            raise InputError(f"{few(wrong)} is not what a network of this form has")
    for member in state.members.values():
        missing = [n for n in spec.axes if n not in member.tensors and n not in state.tensors]
        if missing:
            raise InputError(f"{few(missing)} is missing")


def form_to(form: Form) -> dict[str, Any]:
    """A form as plain data."""
    return {"widths": dict(form.widths), "folded": [list(pair) for pair in form.folded]}


_Kind = TypeVar("_Kind", bound=BaseModel)


def _understood(kind: type[_Kind], header: str, name: str) -> _Kind:
    try:
        return kind.model_validate_json(header)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part)[:60] for part in first["loc"])
        raise InputError(f"this is not {name}: {place}: {first['msg'].lower()}") from None


def _to_bytes(tensors: Tensors, told: Mapping[str, Any]) -> bytes:
    return save_bytes(_contiguous(tensors), metadata={_KEY: json.dumps(told)})


def _from_bytes(content: bytes) -> tuple[dict[str, Tensor], str]:
    try:
        tensors = load_bytes(content)
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])["__metadata__"][_KEY]
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"this is not a message: {type(error).__name__}: {error}") from None
    return tensors, str(header)


def _contiguous(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
