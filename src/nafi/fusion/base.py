"""What every method of fusion is and what it returns.

Hides: how methods are found by name and their options checked. Promises: a method is one function
and one decorator; an unknown method or option raises an error that lists the known ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    assignments: group -> for each client the place of each of its neurons in the fused model,
        (J_s,), or (parent's width, J_s) within each member of a parent
    matchings: group -> what `nafi.match` found; `group[i]` within member i of a parent
    diagnostics: method, options, seconds and whatever else the method has to tell
    """

    model: nn.Module
    widths: Mapping[str, int] = field(default_factory=dict)
    spec: ModelSpec | None = None
    assignments: Mapping[str, tuple[Index, ...]] = field(default_factory=dict)
    matchings: Mapping[str, Matching] = field(default_factory=dict)
    diagnostics: Mapping[str, Any] = field(default_factory=dict)

    def owners(self, group: str) -> Index:
        """(J,) how many clients own each fused neuron of a group without a parent."""
        counts = np.zeros(self.widths[group], dtype=np.intp)
        for assigned in self.assignments[group]:
            counts[assigned] += 1
        return counts


@dataclass(frozen=True)
class Task:
    """What a method is given beside its own options."""

    clients: Clients
    example_inputs: Inputs
    spec: ModelSpec | None
    batchnorm: str
    seed: int
    progress: Progress


Fuser = Callable[..., FusionResult]
FUSERS: dict[str, Fuser] = {}


def fuser(name: str) -> Callable[[Fuser], Fuser]:
    """Make a function known as a method: (task, *, options) -> FusionResult."""

    def register(function: Fuser) -> Fuser:
        FUSERS[name] = function
        return function

    return register


def fuser_named(name: str, options: Mapping[str, Any]) -> Fuser:
    """Look a method up and check that it has these options."""
    if name not in FUSERS:
        raise InputError(f"method: found {name!r}, expected one of {', '.join(FUSERS)}")
    known = [p.name for p in inspect.signature(FUSERS[name]).parameters.values()][1:]
    for option in options:
        if option not in known:
            listed = ", ".join(known) or "none"
            raise InputError(f"method {name} has no option {option!r}; its options: {listed}")
    return FUSERS[name]
