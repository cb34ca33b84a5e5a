"""Options that are declared as fields of a dataclass and checked when an object is made.

Hides: how a value is compared with its declaration. Promises: an object whose class derives from
`Options` holds only values that its fields allow; any other raises an `InputError` that names the
option, the value and what was expected.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any, Self

import numpy as np

from nafi.errors import InputError

_CONSTRAINT = "constraint"
# "name, other: text" in a docstring, and the indented lines that continue it.
_DOCUMENTED = re.compile(r"^(\w+(?:, \w+)*): (.*(?:\n +.*)*)", re.MULTILINE)


@dataclass(frozen=True)
class Constraint:
    """Which values an option may have, and how an error puts that."""

    allows: Callable[[Any], bool]
    expected: str

    def check(self, value: Any, name: str) -> None:
        """Refuse a value of the option called `name`."""
        if not self.allows(value):
            raise InputError(f"{name}: found {value!r}, expected {self.expected}")


def number(*, above: float = -inf, at_least: float = -inf, below: float = inf) -> Constraint:
    """A finite number within these bounds."""
    bounds = [f"above {above:g}"] * isfinite(above)
    bounds += [f"of at least {at_least:g}"] * isfinite(at_least)
    bounds += [f"below {below:g}"] * isfinite(below)
    return Constraint(
        lambda value: (
            _is_number(value) and above < value < below and at_least <= value and isfinite(value)
        ),
        " and ".join([f"a number {' '.join(bounds[:1])}".strip(), *bounds[1:]]),
    )


def whole(at_least: int, at_most: int | None = None) -> Constraint:
    """A whole number within these bounds."""
    bounds = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
    most = inf if at_most is None else at_most
    return Constraint(
        lambda value: (
            _is_number(value) and isinstance(value, Integral) and at_least <= int(value) <= most
        ),
        f"a whole number {bounds}",
    )


def one_of(names: Iterable[str]) -> Constraint:
    """One of some words."""
    known = tuple(names)
    return Constraint(
        lambda value: isinstance(value, str) and value in known, f"one of {', '.join(known)}"
    )


# A word would count as true.
SWITCH = Constraint(lambda value: isinstance(value, bool), "True or False")
FUNCTION = Constraint(callable, "a function")


def optional(constraint: Constraint) -> Constraint:
    """The same, or None."""
    return Constraint(
        lambda value: value is None or constraint.allows(value), f"{constraint.expected}, or None"
    )


def one_or_several(constraint: Constraint) -> Constraint:
    """The same, or a list of such values to choose from."""

    def allows(value: Any) -> bool:
        if not is_listed(value):
            return constraint.allows(value)
        return len(value) > 0 and all(map(constraint.allows, value))

    return Constraint(allows, f"{constraint.expected}, or a list of such values")


def is_listed(value: object) -> bool:
    """Whether a value of an option stands for several."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def option(
    constraint: Constraint, default: Any = dataclasses.MISSING, *, kw_only: bool = False
) -> Any:
    """A field of an `Options` class; without a default it must be given."""
    named = kw_only or dataclasses.MISSING
    return dataclasses.field(default=default, kw_only=named, metadata={_CONSTRAINT: constraint})


@dataclass(frozen=True)
class OptionInfo:
    """What there is to say about an option.

    type: as it is declared; expected: the values that are allowed
    default: its default, MISSING for an option that must be given
    meaning: what the docstring of the class says about it
    """

    name: str
    type: str
    expected: str
    default: Any
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Options:
    """A frozen dataclass whose fields are options."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic | np.ndarray):  # as numbers and lists of Python
                value = value.tolist()
                object.__setattr__(self, field.name, value)
            constraint = field.metadata.get(_CONSTRAINT)
            if constraint is not None:
                constraint.check(value, field.name)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The names of all options, in the order of their declaration."""
        return tuple(field.name for field in dataclasses.fields(cls) if field.init)

    @classmethod
    def describe(cls) -> list[OptionInfo]:
        """All options with what their declarations and the docstrings of the classes say."""
        meanings: dict[str, str] = {}
        for parent in reversed(cls.__mro__):
            for names, text in _DOCUMENTED.findall(inspect.cleandoc(parent.__doc__ or "")):
                meanings |= dict.fromkeys(names.split(", "), " ".join(text.split()))
        return [
            OptionInfo(
                field.name,
                str(field.type),
                getattr(field.metadata.get(_CONSTRAINT), "expected", str(field.type)),
                field.default,
                meanings.get(field.name, ""),
            )
            for field in dataclasses.fields(cls)
            if field.init
        ]

    @classmethod
    def from_options(cls, options: Mapping[str, Any], owner: str) -> Self:
        """The object with these options; an unknown one raises an error that lists the known ones.

        owner: what the error calls the object, such as "method nafi"
        """
        check_names(options, cls.option_names(), owner)
        required = (info.name for info in cls.describe() if info.default is dataclasses.MISSING)
        missing = [name for name in required if name not in options]
        if missing:
            raise InputError(f"{owner} needs the option {', '.join(missing)}")
        return cls(**options)

    def settings(self) -> dict[str, Any]:
        """All options as plain data for JSON."""
        return {name: plain_data(getattr(self, name)) for name in self.option_names()}

    def differences(self, other: Options) -> dict[str, Any]:
        """The options that have another value than those of an object of the same class."""
        theirs = other.settings()
        return {name: value for name, value in self.settings().items() if value != theirs[name]}


def check_names(options: Iterable[str], known: Sequence[str], owner: str) -> None:
    """Refuse options that the owner does not have."""
    for name in options:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise InputError(f"{owner} has no option {name!r}; its options: {listed}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def plain_data(value: Any) -> Any:
    """A value as JSON has it; functions by their names and what is bound to them.

    Equal values give equal data in every process: no address in memory is part of it.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.generic() | np.ndarray():
            return value.tolist()
        case Mapping():
            return {str(name): plain_data(item) for name, item in value.items()}
        case list() | tuple():
            return [plain_data(item) for item in value]
        case set() | frozenset():
            return sorted(plain_data(item) for item in value)
        case partial():
            bound = {"arguments": list(value.args), **value.keywords}
            return {"function": plain_data(value.func), **plain_data(bound)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return {"kind": type(value).__qualname__, **plain_data(named)}
    named_thing = value if hasattr(value, "__qualname__") else type(value)
    return f"{named_thing.__module__}.{named_thing.__qualname__}"
