"""What every method of fusion is and what it returns.

Hides: how methods are found by name and their options checked. Promises: a method is one function
and one decorator; an unknown method or option raises an error that lists the known ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from torch import nn

from nafi.errors import InputError
from nafi.fusion.clients import Clients
from nafi.graph.spec import ModelSpec
from nafi.graph.trace import Inputs
from nafi.matching import Matching
from nafi.matching.columns import Index

# Told before each step: what comes next, how many steps are done, and how many there are.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class FusionResult:
    """One model made of several.

    model: ready to run, in eval mode
    widths: group -> neurons of the fused model; empty for methods that look at no groups
    spec: the fused model's groups, where the method looked at them
    architecture: the groups of the clients' architecture at the fused widths; the same as `spec`
        unless batch normalisation was left folded
    assignments: group -> for each client the place of each of its neurons in the fused model,
        (J_s,), or (parent's width, J_s) within each member of a parent
    matchings: group -> what `nafi.match` found, without the neurons themselves, which are in the
        model; `group[i]` within member i of a parent, with its owners only
    diagnostics: method, options, seconds and whatever else the method has to tell
    """

    model: nn.Module
    widths: Mapping[str, int] = field(default_factory=dict)
    spec: ModelSpec | None = None
    architecture: ModelSpec | None = None
    assignments: Mapping[str, tuple[Index, ...]] = field(default_factory=dict)
    matchings: Mapping[str, Matching] = field(default_factory=dict)
    diagnostics: Mapping[str, Any] = field(default_factory=dict)

    def owners(self, group: str) -> Index:
        """(J,) how many clients own each fused neuron; (parent's width, J) within a parent."""
        parent = self.spec.groups[group].parent if self.spec is not None else None
        shape = [self.widths[name] for name in (parent, group) if name is not None]
        counts = np.zeros(shape, dtype=np.intp)
        for s, assigned in enumerate(self.assignments[group]):
            if parent is None:
                counts[np.unique(assigned)] += 1
            else:
                counts[self.assignments[parent][s][:, None], assigned] += 1
        return counts

    def summary(self) -> list[dict[str, Any]]:
        """A row for each group: its local widths, its width, and how many clients share neurons.

        shared: at place k, the neurons that k + 1 clients own.
        """
        rows = []
        for group, width in self.widths.items():
            clients = self.assignments[group]
            local = [assigned.shape[-1] for assigned in clients]
            shared = np.bincount(self.owners(group).flatten(), minlength=len(clients) + 1)[1:]
            rows.append({"group": group, "local": local, "width": width, "shared": shared.tolist()})
        return rows


@dataclass(frozen=True)
class Task:
    """What a method is given beside its own options."""

    clients: Clients
    example_inputs: Inputs
    spec: ModelSpec | None
    batchnorm: str
    seed: int
    progress: Progress


@dataclass(frozen=True)
class Fuser:
    """A method: a function of a task and of the options it lists."""

    function: Callable[..., FusionResult]
    options: tuple[str, ...]


FUSERS: dict[str, Fuser] = {}
_Function = TypeVar("_Function", bound=Callable[..., FusionResult])


def fuser(name: str, options: Sequence[str] = ()) -> Callable[[_Function], _Function]:
    """Make a function known as a method, with these options."""

    def register(function: _Function) -> _Function:
        FUSERS[name] = Fuser(function, tuple(options))
        return function

    return register


def fuser_named(name: str, options: Mapping[str, Any]) -> Callable[..., FusionResult]:
    """Look a method up and check that it has these options."""
    if name not in FUSERS:
        raise InputError(f"method: found {name!r}, expected one of {', '.join(FUSERS)}")
    known = FUSERS[name].options
    for option in options:
        if option not in known:
            listed = ", ".join(known) or "none"
            raise InputError(f"method {name} has no option {option!r}; its options: {listed}")
    return FUSERS[name].function


def check_switch(value: bool, name: str) -> None:
    """Refuse anything but true and false; a word would count as true."""
    if not isinstance(value, bool):
        raise InputError(f"{name}: found {value!r}, expected True or False")


def check_whole(value: int, name: str, least: int, most: int | None = None) -> None:
    """Refuse anything but a whole number within these bounds."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not fits or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name}: found {value!r}, expected a whole number {bounds}")
