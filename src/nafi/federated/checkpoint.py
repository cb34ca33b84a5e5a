"""The checkpoint of a run: one file that holds all of it.

Hides: the file's format and checksum. Promises: what is read is what was written, bit for bit, and
nothing is unpickled; a file that cannot be used raises an error that says whether it is damaged, no
checkpoint, of another version of nafi or of another run, and what to do. It knows no strategy: a
state is written by the types of its fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nafi.errors import CheckpointError, InputError, few, unlike
from nafi.federated.codec import pack, unpack
from nafi.federated.messages import KEY, contiguous, parsed
from nafi.federated.seats import Seat, SeatTable
from nafi.federated.strategy import Records, State
from nafi.files import atomic_path

# Version 0.1.0 wrote none.
_FORMAT = 3
_CHECKSUM = "sha256"
_KINDS = {"format": int, "state": dict, "records": list, "settings": dict, "seats": dict}
_ANEW = "give another name for the checkpoint to start a new run"
_Kind = TypeVar("_Kind")
_State = TypeVar("_State", bound=State)


@dataclass(frozen=True, eq=False)
class SavedRun:
    """A run as a file holds it.

    records: of its rounds; settings: what decides its result, to know it by
    seats: what is remembered of clients
    """

    path: Path
    records: Records
    settings: Mapping[str, Any]
    seats: Mapping[str, Seat]
    _state: dict[str, Any] = field(repr=False)
    _tensors: Mapping[str, Tensor] = field(repr=False)

    def check_settings(self, expected: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Refuse a run other than the one that is expected, and say what differs.

        sizes: client -> how many samples it has, where that is known

        What was not known when the file was written, such as the loss of a function that does
        clients' work, is not compared.
        """
        known = {name: seat.samples for name, seat in self.seats.items() if seat.samples}
        common = {name: size for name, size in sizes.items() if name in known}
        both = {name: value for name, value in expected.items() if name in self.settings}
        written = dict(_flat({**self.settings, "samples": known}))
        differences = [
            f"{name} was {written.get(name)}, now it is {value}"
            for name, value in _flat({**both, "samples": common})
            if written.get(name, {}) != value
        ]
        if differences:
            raise InputError(
                f"{self.path} is of another run: {few(differences)}; put that back to continue the "
                f"run, or {_ANEW}"
            )

    def state(self, kind: type[_State]) -> _State:
        """What the strategy knew; kind: of its state."""
        return _unpacked(self.path, kind, self._state, self._tensors)


def write_state(
    path: Path,
    state: State,
    records: Records,
    settings: Mapping[str, Any] | None = None,
    seats: Mapping[str, Seat] | None = None,
) -> None:
    """Save a run after a round, whole or not at all; for the rest see `SavedRun`."""
    packed, named = pack(state)
    tensors = contiguous(named)
    header = {
        "format": _FORMAT,
        "state": packed,
        "records": records,
        "settings": dict(settings or {}),
        "seats": pack(SeatTable(dict(seats or {})))[0],
    }
    text = json.dumps(header)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path, private=True) as partial:
        save_file(tensors, partial, metadata={KEY: text, _CHECKSUM: checksum(text, tensors)})


def read_run(path: Path) -> SavedRun:
    """The inverse of `write_state`."""
    header, tensors = _read(path)
    seats = _unpacked(path, SeatTable, header["seats"], {}).seats
    return SavedRun(path, header["records"], header["settings"], seats, header["state"], tensors)


def read_state(path: Path, kind: type[_State]) -> tuple[_State, Records, Mapping[str, Any]]:
    """State, records and settings of a run; kind: of the strategy's state."""
    run = read_run(path)
    return run.state(kind), run.records, run.settings


def read_records(path: Path) -> Records:
    """What a checkpoint has to tell of every round."""
    return read_run(path).records


def checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    """Changes with any bit of a file's content."""
    digest = sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header of a checkpoint and its tensors, as they were written."""
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from None
    if KEY not in metadata:
        raise _foreign(path, "it is not of nafi")
    try:
        header = parsed(metadata[KEY])
    except ValueError as error:
        raise _damaged(path, error) from None
    _check_format(path, header)
    if metadata.get(_CHECKSUM) != checksum(metadata[KEY], tensors):
        raise _damaged(path, InputError("its content does not fit its checksum"))
    _check_header(path, header)
    return header, tensors


def _check_format(path: Path, header: object) -> None:
    if not isinstance(header, dict) or not {"format", "members"} & set(header):
        raise _foreign(path, "it is another file of nafi")
    if "format" not in header:
        raise CheckpointError(
            f"{path} is the checkpoint of a run of nafi 0.1.0, which this version cannot resume; "
            f"finish the run with nafi 0.1.0, or {_ANEW}"
        )
    if header["format"] != _FORMAT:
        raise CheckpointError(
            f"{path} has format {str(header['format'])[:20]}, but this version of nafi reads "
            f"{_FORMAT}; finish the run with the version that began it, or {_ANEW}"
        )


def _check_header(path: Path, header: Mapping[str, Any]) -> None:
    difference = unlike(header, _KINDS)
    wrong = [name for name, kind in _KINDS.items() if type(header.get(name)) is not kind]
    if difference or wrong or not all(isinstance(record, dict) for record in header["records"]):
        raise _foreign(path, f"its header {difference or 'has values of other types'}")


def _unpacked(
    path: Path, kind: type[_Kind], data: dict[str, Any], tensors: Mapping[str, Tensor]
) -> _Kind:
    try:
        return unpack(kind, data, tensors)
    except InputError as error:
        raise CheckpointError(
            f"{path} is not the checkpoint of a run of this strategy ({error}); use the strategy "
            f"that wrote it, or {_ANEW}"
        ) from None


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged, or no checkpoint at all ({type(error).__name__}: {error}); put back a "
        f"copy of it, or {_ANEW}"
    )


def _foreign(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is not the checkpoint of a run: {why}; {_ANEW}")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings with those of tables within them: training.rate."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
