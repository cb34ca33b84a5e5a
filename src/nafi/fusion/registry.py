"""Methods by name.

Hides: where methods come from: this package, or others that name them in the entry-point group
`nafi.methods`. Promises: one table for `nafi.fuse`, strategies, the command line and experiments;
an unknown name raises an error that lists the known ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract
from typing import Any, ClassVar

from nafi.errors import InputError
from nafi.fusion.averaging import FedAvg
from nafi.fusion.bayesian import Nafi, Pfnm
from nafi.fusion.ensemble import Ensemble
from nafi.fusion.method import Method
from nafi.fusion.rebasin import Rebasin
from nafi.fusion.stack import Stack
from nafi.fusion.transport import Transport

ENTRY_POINTS = "nafi.methods"
_OURS: tuple[type[Method], ...] = (Nafi, Pfnm, Transport, Rebasin, FedAvg, Stack, Ensemble)


class Registry(Mapping[str, type[Method]]):
    """Name -> class of every method; other packages are imported when theirs is asked for."""

    _ours: ClassVar[dict[str, type[Method]]] = {method.name: method for method in _OURS}

    def __getitem__(self, name: str) -> type[Method]:
        if name in self._ours:
            return self._ours[name]
        return _load(self._plugins[name])

    def __iter__(self) -> Iterator[str]:
        yield from self._ours
        yield from self._plugins

    def __len__(self) -> int:
        return len(self._ours) + len(self._plugins)

    @cached_property
    def _plugins(self) -> dict[str, EntryPoint]:
        return {
            point.name: point
            for point in entry_points(group=ENTRY_POINTS)
            if point.name not in self._ours
        }


METHODS = Registry()


def _load(point: EntryPoint) -> type[Method]:
    """The class that an entry point names."""
    try:
        method: type[Method] = point.load()
    except Exception as error:
        raise InputError(
            f"method {point.name} ({point.value}) cannot be imported: {type(error).__name__}: "
            f"{error}; mend or remove the package that provides it"
        ) from error
    complete = isinstance(method, type) and issubclass(method, Method) and not isabstract(method)
    if not complete or getattr(method, "name", None) != point.name:
        raise InputError(
            f"method {point.name}: {point.value} is not a class derived from nafi.fusion.Method "
            f"with all of its methods and the name {point.name!r}"
        )
    return method


def make_method(method: str | Method, **options: Any) -> Method:
    """The method of a name with these options, all checked; a `Method` that is made already stays.

    >>> make_method("nafi", penalty=0.1).penalty
    0.1
    """
    if isinstance(method, Method):
        if options:
            raise InputError(
                f"pass {', '.join(options)} to {type(method).__name__}(...) itself, or give the "
                "method by its name"
            )
        return method
    made = method_class(method).from_options(options, f"method {method}")
    made.check_available()
    return made


def method_class(name: str) -> type[Method]:
    """Look a method up."""
    if isinstance(name, type):
        raise InputError(f"method: found a class, expected {name.__name__}() or a name")
    if not isinstance(name, str) or name not in METHODS:
        raise InputError(f"method: found {name!r}, expected one of {', '.join(METHODS)}")
    return METHODS[name]


def method_names(kind: type = Method) -> list[str]:
    """The methods of a kind; those of packages that cannot be imported are left out."""
    names = []
    for name in METHODS:
        try:
            names += [name] if issubclass(METHODS[name], kind) else []
        except InputError:
            continue
    return names


def option_names(name: str) -> tuple[str, ...]:
    """The options that a method has."""
    return method_class(name).option_names()
