"""Which updates are used, and how many of them a round needs.

Hides: everything that can be wrong with what a client sends. Promises: an update that passes has
the tensors that were asked for, extras included, of their shapes and types, finite, and counts that
are counts; one that does not raises an `UpdateError` that says why, and nothing of it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf

import torch
from torch import Tensor

from nafi.errors import InputError, NafiError, unlike
from nafi.federated.architecture import Expected, Shapes
from nafi.federated.statistics import check_sums
from nafi.federated.strategy import Task, Update, size_of
from nafi.graph import holds_numbers

# No sum of so many counts overflows anything.
MOST_SAMPLES = 2**48
# No weight is larger. Folding a batch normalisation multiplies two such numbers and divides by the
# root of its epsilon; squares of that must still be numbers in single precision. Large variances
# only make things smaller.
MOST = 1e9


class UpdateError(NafiError):
    """An update cannot be used; the message says why."""


class QuorumError(NafiError):
    """Too few clients sent something that can be used."""


@dataclass(frozen=True)
class Acceptance:
    """What a server takes.

    quorum: so many clients must deliver in a round, or such a share of those asked if it is a
        float; by default all of them
    max_bytes: of an update's tensors and extras
    max_norm: of the change to what the client was sent, over all tensors; of the tensors themselves
        where it was sent none
    classes: how many class counts an update must have; None for none
    """

    quorum: int | float | None = None
    max_bytes: int | None = None
    max_norm: float | None = None
    classes: int | None = None

    def __post_init__(self) -> None:
        share = isinstance(self.quorum, float) and 0 < self.quorum <= 1
        if self.quorum is not None and not share and not _is_positive(self.quorum):
            raise InputError(
                f"quorum: found {self.quorum!r}, expected a number of clients, or a share of them "
                "as a float of more than 0, at most 1.0"
            )
        for name in ("max_bytes", "classes"):
            value = getattr(self, name)
            if value is not None and not _is_positive(value):
                raise InputError(f"{name}: found {value!r}, expected a number of at least 1")
        if self.max_norm is not None and not (
            isinstance(self.max_norm, int | float) and 0 < self.max_norm < inf
        ):
            raise InputError(f"max_norm: found {self.max_norm!r}, expected a number above 0")

    def needed(self, asked: int) -> int:
        """How many of the clients that were asked must deliver."""
        if self.quorum is None:
            return asked
        share = isinstance(self.quorum, float)
        count = ceil(self.quorum * asked - 1e-9) if share else int(self.quorum)
        if not 1 <= count <= asked:
            raise InputError(
                f"quorum: found {self.quorum!r} for {asked} clients, expected a number of them, or "
                "a share as a float of more than 0, at most 1.0"
            )
        return count

    def check(self, update: Update, client: str, task: Task, shapes: Shapes) -> None:
        """Refuse an update that is not what this client was asked for."""
        if update.client != client:
            raise UpdateError(f"it says that it is from {str(update.client)[:60]!r}")
        if type(update.round) is not int or update.round != task.round:
            raise UpdateError(f"it is for round {update.round!r}, expected {task.round}")
        _check_counts(update, self.classes)
        _check_tensors(update.tensors, {n: e for n, e in shapes.items() if n not in task.frozen})
        _check_tensors(update.extras, task.asks, "extra ")
        try:
            check_sums(update.extras, task.sums)
        except InputError as error:
            raise UpdateError(str(error)) from None
        size = size_of(update.tensors) + size_of(update.extras)
        if self.max_bytes is not None and size > self.max_bytes:
            raise UpdateError(f"it has {size} bytes, more than the limit of {self.max_bytes}")
        if self.max_norm is not None:
            norm = _change(update.tensors, task.tensors)
            if norm > self.max_norm:
                raise UpdateError(
                    f"its weights moved by {norm:.4g}, more than the limit of {self.max_norm:g}"
                )


def _check_counts(update: Update, classes: int | None) -> None:
    counts = update.class_counts
    if not _is_count(update.samples) or update.samples == 0:
        raise UpdateError(f"samples: found {update.samples!r}, expected a count of at least 1")
    if counts is None and classes is None:
        return
    if counts is None:
        raise UpdateError(f"class counts are missing, expected {classes}")
    if not isinstance(counts, tuple) or not all(_is_count(count) for count in counts):
        raise UpdateError(f"class counts: found {str(counts)[:60]}, expected counts")
    if classes is None:
        raise UpdateError(
            f"class counts: found {len(counts)}, expected none; the server must be given classes "
            "if clients are"
        )
    if len(counts) != classes:
        raise UpdateError(f"class counts: found {len(counts)}, expected {classes}")
    if sum(counts) != update.samples:
        raise UpdateError(
            f"class counts: their sum is {sum(counts)}, but there are {update.samples} samples"
        )


def _is_positive(value: object) -> bool:
    return type(value) is int and value > 0


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST_SAMPLES


def _check_tensors(tensors: Mapping[str, Tensor], shapes: Shapes, label: str = "") -> None:
    if not isinstance(tensors, Mapping):
        raise UpdateError(f"{label}tensors: found {type(tensors).__name__}, expected a table")
    expected = {n: e for n, e in shapes.items() if e.required or n in tensors}
    difference = unlike(tensors, expected)
    if difference:
        raise UpdateError(f"it {difference}" + (f" among its {label.strip()}s" if label else ""))
    for name, kind in expected.items():
        _check_tensor(tensors[name], f"{label}{name}", kind)


def _check_tensor(tensor: Tensor, name: str, expected: Expected) -> None:
    if not isinstance(tensor, Tensor):
        raise UpdateError(f"{name} is {type(tensor).__name__}, expected a tensor")
    if tuple(tensor.shape) != expected.shape or tensor.dtype != expected.dtype:
        raise UpdateError(
            f"{name}: found shape {tuple(tensor.shape)} of {tensor.dtype}, expected "
            f"{expected.shape} of {expected.dtype}"
        )
    if holds_numbers(tensor) and not bool(torch.isfinite(tensor).all()):
        raise UpdateError(f"{name} holds values that are NaN or infinite")
    most = MOST**2 if expected.variance or expected.total else MOST
    if holds_numbers(tensor) and tensor.numel() and float(tensor.abs().max()) > most:
        raise UpdateError(f"{name} holds values beyond {most:g}")
    if expected.variance and bool((tensor < 0).any()):
        raise UpdateError(f"{name} holds negative variances")


def _change(tensors: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> float:
    total = 0.0
    for name, tensor in tensors.items():
        if holds_numbers(tensor):
            moved = tensor - before[name] if name in before else tensor
            total += float(moved.abs().double().square().sum())
    return float(total**0.5)
