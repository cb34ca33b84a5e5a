"""Something that is made of the latest value of a kind, once, when it is first asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

_Made = TypeVar("_Made")


class Latest(Generic[_Made]):
    """What was made of a state; it is forgotten with the next state."""

    def __init__(self) -> None:
        self._state: Callable[[], object | None] = lambda: None
        self._make: Callable[[], _Made] | None = None
        self._made: _Made | None = None

    def __reduce__(self) -> tuple[type[Latest[_Made]], tuple[()]]:
        """A copy remembers nothing: it can be made again."""
        return type(self), ()

    def expect(self, state: object, make: Callable[[], _Made]) -> None:
        """If it is asked for, make it this way."""
        self._state, self._make, self._made = weakref.ref(state), make, None

    def get(self, state: object, make: Callable[[], _Made]) -> _Made:
        """What was made of this very state; make: how, where nothing better is known."""
        if self._state() is not state or (self._make is None and self._made is None):
            self.expect(state, make)
        if self._made is None:
            assert self._make is not None
            self._made, self._make = self._make(), None
        return self._made

    def forget(self) -> None:
        self._make = self._made = None
