"""Strategies by name.

Hides: which class and which options a name stands for. Promises: a strategy is one class and one
decorator; its options are the fields of the class, of `Training` and of its method of fusion, and
all are checked when it is made. An unknown name or option raises an error that lists the known
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from nafi.errors import InputError
from nafi.federated.architecture import Architecture
from nafi.federated.codec import check_fields
from nafi.federated.strategy import Strategy, check_instance
from nafi.federated.training import Training
from nafi.fusion import METHODS, Method, make_method, method_names
from nafi.options import check_names

# Name -> class of every strategy, in the order in which they were registered.
STRATEGIES: dict[str, type[Strategy]] = {}
_Class = TypeVar("_Class", bound=type[Strategy])
_COMMON = ("architecture", "training", "rounds", "seed", "fraction")
_OF_TRAINING = tuple(field.name for field in fields(Training))


def strategy(name: str) -> Callable[[_Class], _Class]:
    """Make a frozen dataclass known as a strategy."""

    def register(kind: _Class) -> _Class:
        if name in STRATEGIES:
            raise InputError(f"strategy {name}: there is one already, {STRATEGIES[name].__name__}")
        try:
            check_fields(kind.state_type)
        except InputError as error:
            state = kind.state_type.__name__
            raise InputError(f"strategy {name}: its state {state}: {error}") from None
        STRATEGIES[name] = kind
        return kind

    return register


def make_strategy(
    name: str,
    architecture: Architecture,
    training: Training,
    *,
    rounds: int,
    seed: int = 0,
    fraction: float = 1.0,
    **options: Any,
) -> Strategy:
    """A strategy by its name; the class in `STRATEGIES` documents what it does and its options.

    options: of the strategy, of its method of fusion, see `nafi.fuse`, and of `Training`
    """
    kind = strategy_class(name)
    check_instance(training, Training, "training")
    check_names(options, option_names(name), f"strategy {name}")
    left = {**kind.defaults, **options}
    changes = {key: left.pop(key) for key in _OF_TRAINING if key in left}
    arguments = {key: left.pop(key) for key in _own_options(kind) if key in left}
    if kind.method_kind is not None:
        arguments["method"] = _method(kind.method_kind, left)
    trained = replace(training, **changes)
    return kind(architecture, trained, rounds, seed, fraction, **arguments)


def strategy_class(name: str) -> type[Strategy]:
    """Look a strategy up."""
    if not isinstance(name, str) or name not in STRATEGIES:
        raise InputError(f"strategy: found {name!r}, expected one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def option_names(name: str) -> list[str]:
    """The options that a strategy has beside rounds, seed and fraction."""
    kind = strategy_class(name)
    names = list(_own_options(kind))
    if kind.method_kind is not None:
        methods = method_names(kind.method_kind)
        names += ["method"] if len(methods) > 1 else []
        names += [option for method in methods for option in METHODS[method].option_names()]
    return [n for n in dict.fromkeys((*names, *_OF_TRAINING)) if n not in _COMMON]


def _own_options(kind: type[Strategy]) -> list[str]:
    """The fields of a strategy's class, its own first, without those that are always given."""
    shared = Strategy.option_names()
    names = sorted(kind.option_names(), key=lambda name: name in shared)
    return [n for n in names if n not in (*_COMMON, "method")]


def _method(kind: type[Method], options: Mapping[str, Any]) -> Method:
    """The method of a strategy; by default the first of its kind."""
    left = dict(options)
    known = method_names(kind)
    method = make_method(left.pop("method", known[0]), **left)
    if not isinstance(method, kind):
        raise InputError(f"method: found {method.name!r}, expected one of {', '.join(known)}")
    method.check_available()  # before clients train
    return method
