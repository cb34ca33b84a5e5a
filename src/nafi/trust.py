"""What files may make nafi do: which functions they may name, and how much memory they may take.

Hides: how limits are found and kept. Promises: no file chooses code or takes memory beyond what the
user allowed; a refusal names the file, what it asks for, and the option that would allow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

from nafi.errors import CheckpointError, InputError
from nafi.memory import machine_memory, memory_cap, text_of_size

_NO_MEMORY = "allocate memory"  # in what torch says instead of a MemoryError
_SHARE = 2  # fusing holds more than one copy of what it reads


@dataclass(frozen=True)
class Trust:
    """What files may do.

    factories: the functions that they may name, as "package.module:function"; True for any
    max_bytes: most memory for what they declare; None for half of the machine's memory
    taken: bytes of it that other files have taken
    """

    factories: tuple[str, ...] | bool = ()
    max_bytes: int | None = None
    taken: int = 0

    @classmethod
    def of(cls, trust_factory: str | bool | None, max_bytes: int | None) -> Self:
        """From what a caller in Python says."""
        if not isinstance(trust_factory, str | bool | None):
            raise InputError(
                f"trust_factory: found {trust_factory!r}, expected 'package.module:function'"
            )
        whole = isinstance(max_bytes, int) and not isinstance(max_bytes, bool)
        if max_bytes is not None and not (whole and max_bytes > 0):
            raise InputError(f"max_bytes: found {max_bytes!r}, expected a number of bytes")
        names = (trust_factory,) if isinstance(trust_factory, str) else bool(trust_factory)
        return cls(names, max_bytes)

    def factory(self, named: Mapping[str, str | None]) -> str | None:
        """The function that makes the network of all files; None if they name none.

        named: file -> the function that it names
        """
        names = {file: name for file, name in named.items() if name is not None}
        if len(set(names.values())) > 1:
            (first, one), *others = names.items()
            second, other = next((file, name) for file, name in others if name != one)
            raise CheckpointError(
                f"{first} names {one} as what makes its network, but {second} names {other}: give "
                "--model (in Python, factory=) for all of them"
            )
        for file, name in names.items():
            if self.factories is not True and name not in (self.factories or ()):
                raise CheckpointError(
                    f"{file} names {name} as what makes its network, but no file may choose code; "
                    f'if you trust it, give --trust-factory {name} (in Python, trust_factory="'
                    f'{name}")'
                )
        return next(iter(names.values()), None)

    @property
    def limit(self) -> int:
        """The most bytes that files may take."""
        return self.max_bytes or machine_memory() // _SHARE

    def check_bytes(self, needed: int, label: str, times: int = 1) -> None:
        """Refuse what would take too much memory, before any is taken.

        label: what asks for it; times: how many times as much it takes to use it
        """
        total = needed * times + self.taken
        if total > self.limit:
            others = ", with the files before it," if self.taken else ""
            raise CheckpointError(
                f"{label} would take {text_of_size(total)} of memory{others} and the limit is "
                f"{self._limit}; if you trust it, give --max-bytes {total} (in Python, "
                f"max_bytes={total})"
            )

    @contextmanager
    def capped(self, label: str, mapped: int = 0) -> Iterator[None]:
        """Refuse what takes more memory than it seemed to; mapped: bytes that take none."""
        try:
            with memory_cap(max(0, self.limit - self.taken) + mapped):
                yield
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and _NO_MEMORY not in str(error):
                raise
            raise CheckpointError(
                f"{label} takes more memory than the limit of {self._limit}; if you trust it, give "
                "a larger --max-bytes (in Python, max_bytes=)"
            ) from None

    @property
    def _limit(self) -> str:
        whose = "" if self.max_bytes else ", half of this machine's memory"
        return text_of_size(self.limit) + whose

    def after(self, taken: int) -> Self:
        """What is left once a file has taken so many bytes."""
        return replace(self, taken=self.taken + taken)


# What files may do unless the user says otherwise: choose no code, and take half of the memory.
UNTRUSTED = Trust()
