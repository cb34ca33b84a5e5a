"""Plays as data: roles are clients, characters are what there is to predict.

Hides: how speeches are found and cut into windows. Promises: within each role the last tenth of its
characters is for testing, and no window reaches over that border or from one role to another.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nafi.errors import InputError
from nafi.experiments.data import Dataset
from nafi.federated import Samples

# The characters of the text in their order; it has no others.
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
LENGTH = 64
_STEP = 8  # between windows of which only the last character is predicted
_TEST = 0.1
_SPEECH = re.compile(r"^([^\n:]+):\n(.+)", re.S)


@dataclass(frozen=True)
class Role:
    """What somebody says in all plays, as characters' numbers."""

    name: str
    text: Tensor

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """To train on, and to test on."""
        cut = len(self.text) - round(_TEST * len(self.text))
        return self.text[:cut], self.text[cut:]


def last_characters() -> Dataset:
    """Windows of `LENGTH` characters, and the one that follows each."""
    return _dataset("shakespeare", lambda text: _windows(text, _STEP, last=True))


def all_characters() -> Dataset:
    """Windows of `LENGTH` characters, and the one that follows each character of them."""
    return _dataset("shakespeare-tokens", lambda text: _windows(text, LENGTH, last=False))


@cache
def roles() -> tuple[Role, ...]:
    """All roles with enough to say for a window of each part, who speaks most first."""
    speeches: dict[str, list[str]] = {}
    for paragraph in _text().split("\n\n"):
        found = _SPEECH.match(paragraph)
        if found is not None:
            speeches.setdefault(found[1], []).append(found[2].strip() + "\n")
    number = {character: n for n, character in enumerate(CHARACTERS)}
    made = [
        Role(name, torch.tensor([number[c] for c in "".join(said)]))
        for name, said in speeches.items()
    ]
    enough = [role for role in made if min(map(len, role.parts)) > LENGTH]
    return tuple(sorted(enough, key=lambda role: (-len(role.text), role.name)))


def _text() -> str:
    folder = os.environ.get("NAFI_DATA")
    if not folder:
        raise InputError(
            "the plays cannot be downloaded; put TinyShakespeare's input.txt into "
            "DIR/shakespeare and set NAFI_DATA=DIR"
        )
    path = Path(folder) / "shakespeare" / "input.txt"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise InputError(f"{path} cannot be read; NAFI_DATA names the folder above it") from None
    unknown = sorted(set(text) - set(CHARACTERS))
    if unknown or "\n\n" not in text:
        raise InputError(f"{path} is another text: unknown characters {unknown[:5]}")
    return text


def _windows(text: Tensor, step: int, last: bool) -> Samples:
    starts = torch.arange(0, len(text) - LENGTH, step)
    seen = text[starts[:, None] + torch.arange(LENGTH + 1)]
    return Samples(seen[:, :-1], seen[:, -1] if last else seen[:, 1:])


def _dataset(name: str, cut: Callable[[Tensor], Samples]) -> Dataset:
    everybody = roles()
    train, test = ([cut(role.parts[k]) for role in everybody] for k in (0, 1))
    sites = [np.repeat(np.arange(len(part)), [len(s) for s in part]) for part in (train, test)]
    names = tuple(role.name for role in everybody)
    return Dataset(name, _joined(train), _joined(test), sites[0], sites[1], names)


def _joined(parts: list[Samples]) -> Samples:
    inputs, labels = ([getattr(part, name) for part in parts] for name in ("inputs", "labels"))
    return Samples(torch.cat(inputs), torch.cat(labels))
