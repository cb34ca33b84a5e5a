"""Which groups of a network may change their width.

Hides: the search for what the network's code fixes. Promises: groups that are not fixed can have
any widths that keep the ties, all at once. Norms and modules of torch state what they need
(`ties`); the rest of the code is tried, on shapes alone as long as these tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

from torch import nn

from nafi.errors import SpecError
from nafi.graph.spec import ModelSpec
from nafi.graph.ties import Tie, width_constraints
from nafi.graph.trial import Trial, make_trial

# Groups that grow together, or not at all.
_Unit = tuple[str, ...]
# Whether some groups can grow; ways to read what modules remember of sizes, before giving up.
_Fits = Callable[[Sequence[str], int], bool]
_FEW, _MANY = 2, 16


@dataclass(frozen=True)
class Growth:
    """Which widths may change.

    fixed: group -> why its width cannot change
    ties: groups that change together; see `Tie`
    refusal: what stands in the way of those whose width the network's code fixes
    """

    fixed: Mapping[str, str]
    ties: Sequence[Tie]
    stuck: tuple[str, ...] = ()
    refusal: str | None = None


def growth(model: nn.Module, spec: ModelSpec) -> Growth:
    """Find the groups whose width cannot change.

    All others are widened by different amounts at once, those that are tied together; where the
    network then does not run, halves of them are tried. Layers that look alike are one in this.
    Cost: two runs of the network, and runs without numbers for what cannot grow.
    """
    known = width_constraints(model, spec)
    units = [tuple(tie) for tie in known.ties]
    tied = {name for unit in units for name in unit}
    units += [(n,) for n in spec.groups if n not in known.fixed and n not in tied]
    search = _Search(make_trial(model, spec, {}, None), known.ties, units)
    growing = search.growing()
    stuck = tuple(name for unit in units for name in unit if name not in growing)
    if not stuck:
        return Growth(known.fixed, known.ties)
    fixed = {**known.fixed, **dict.fromkeys(stuck, "its code fixes the width")}
    ties = [tie for tie in known.ties if not set(tie) & set(stuck)]
    return Growth(fixed, ties, stuck, search.refusal((*growing, *stuck)))


class _Search:
    """Looks for the units that can grow together."""

    def __init__(self, trial: Trial, ties: Sequence[Tie], units: Sequence[_Unit]) -> None:
        self._trial = trial
        self._alike = _alike(trial.spec, units)
        self._widths = dict(_grown(trial.spec, ties, self._alike))

    def growing(self) -> _Unit:
        """The groups that can have other widths, all of them at once."""
        growing = _largest(self._alike, self._fit_in_shapes, ())
        if self._fit(growing, _MANY):
            return growing
        # Some compute something else, though all shapes are right.
        kept = [[unit for unit in units if unit[0] in growing] for units in self._alike]
        return _largest([units for units in kept if units], self._fit, ())

    def refusal(self, names: Sequence[str]) -> str:
        """What stands in the way of these groups."""
        try:
            trial = self._at(names)
            trouble = trial.fitting(_FEW)[1]
            return trial.advice(trouble) if trouble is not None else "it does not run otherwise"
        except SpecError as error:
            return str(error)

    def _at(self, names: Sequence[str]) -> Trial:
        widths = {name: self._widths[name] for name in names}
        return replace(self._trial, new_spec=self._trial.spec.resized(widths))

    def _fit_in_shapes(self, names: Sequence[str], tries: int) -> bool:
        try:
            return self._at(names).fitting_shapes(tries)[1] is None
        except SpecError:
            return False

    def _fit(self, names: Sequence[str], tries: int) -> bool:
        try:
            return self._at(names).fitting(tries)[1] is None
        except SpecError:
            return False


def _largest(classes: Sequence[Sequence[_Unit]], fits: _Fits, others: _Unit) -> _Unit:
    """The groups, of all classes of units, that fit together with some others.

    Where the first of a class does not fit, none of it does. Many at once are given up early: half
    of them may need less.
    """
    names = tuple(name for units in classes for unit in units for name in unit)
    if not names or fits((*others, *names), _FEW if len(classes) > 1 else _MANY):
        return names
    if len(classes) == 1:
        (units,) = classes
        if len(units) == 1 or not fits((*others, *units[0]), _MANY):
            return ()
        classes = [[unit] for unit in units]
    half = len(classes) // 2
    first = _largest(classes[:half], fits, others)
    return first + _largest(classes[half:], fits, (*others, *first))


def _alike(spec: ModelSpec, units: Sequence[_Unit]) -> list[list[_Unit]]:
    """The units by what they look like: those of equal layers, that differ in numbers alone."""
    classes: dict[tuple[object, ...], list[_Unit]] = {}
    for unit in units:
        names = {re.sub(r"\d+", "#", tensor) for group in unit for tensor in spec.tensors_of(group)}
        widths = tuple(spec.widths[group] for group in unit)
        classes.setdefault((frozenset(names), widths), []).append(unit)
    return list(classes.values())


def _grown(
    spec: ModelSpec, ties: Sequence[Tie], classes: Sequence[Sequence[_Unit]]
) -> Iterator[tuple[str, int]]:
    """A larger width for every group: neighbours of one class differ, and so do most classes.

    Groups that the code takes to be equal are found out by growing differently.
    """
    places = {name: tie for tie in ties for name in tie}
    for index, units in enumerate(classes):
        for member, unit in enumerate(units):
            tie = places.get(unit[0], dict.fromkeys(unit, 1))
            added = lcm(*tie.values()) * (1 + (2 * index + member) % 5)
            yield from ((name, spec.widths[name] + added // tie[name]) for name in unit)
