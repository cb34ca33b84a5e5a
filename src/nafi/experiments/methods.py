"""The methods that an experiment can name.

Hides: that one shot takes them from `nafi.fuse` and rounds from the strategies. Promises: the same
questions for both; an option that a method does not have, or not with this value, is refused before
any client trains, as far as that can be told without the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy.typing as npt
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.experiments.controls import CONTROLS, strategy_of
from nafi.federated import STRATEGIES, Training
from nafi.federated import option_names as strategy_options
from nafi.fusion import METHODS, FusionResult, Screen, fuse, make_method, method_names
from nafi.fusion import option_names as method_options
from nafi.graph import ModelSpec
from nafi.options import SWITCH, Constraint, whole

# Clients that never talk: the mean of their scores, and the best of them.
LOCAL, BEST = ALONE = ("local", "best")
# A method of one shot that experiments in rounds have, too, of clients that trained alone.
ENSEMBLE = "ensemble"
_OF_TRAINING = tuple(f.name for f in fields(Training))
# No probe: sums over clients' own data, by the strategy match-refit.
OWN_DATA = "own"
_PROBE = Constraint(
    lambda value: value in ("noise", "synthetic", OWN_DATA) or whole(0).allows(value),
    'a number of inputs, "noise", "synthetic" or "own"',
)
_ONE_SHOT = {
    "calibrate": whole(0),
    "probe": _PROBE,
    "head": SWITCH,
    "distill": whole(0),
    "counts": SWITCH,  # whether clients weigh by their samples, and of each class, if there are any
}
_IN_ROUNDS = {"calibrate": whole(0), "rounds": whole(1)}
_OF_LABORATORY = _ONE_SHOT | _IN_ROUNDS

Options = Mapping[str, Any]


def check_method(method: str, candidates: Sequence[Options], in_rounds: bool) -> None:
    """Refuse a method, or an option of it, that there is not."""
    in_rounds = in_rounds and method != ENSEMBLE
    known = (*ALONE, *((*STRATEGIES, *CONTROLS, ENSEMBLE) if in_rounds else METHODS))
    if method not in known:
        where = "in rounds" if in_rounds else "in one shot"
        raise InputError(f"found {method!r}, expected one of {', '.join(known)} {where}")
    listed = option_names(method, in_rounds)
    for candidate in candidates:
        for option in candidate:
            if option not in listed:
                raise InputError(
                    f"{method} has no option {option!r}; its options: {', '.join(listed)}"
                )
        _check_values(method, candidate, in_rounds)


def _check_values(method: str, candidate: Options, in_rounds: bool) -> None:
    Training(**training_options(candidate))
    for name, constraint in (_IN_ROUNDS if in_rounds else _ONE_SHOT).items():
        if name in candidate:
            constraint.check(candidate[name], name)
    if method in ALONE:
        return
    if in_rounds:
        others = (*_OF_TRAINING, *_IN_ROUNDS)
        left = {name: value for name, value in candidate.items() if name not in others}
        _check_strategy(strategy_of(method), left)
    else:
        made = make_method(method, **fusion_options(candidate))
        made.check_one_variant()
        made.check_uses(probe=candidate.get("probe") or None)
        if candidate.get("probe") == OWN_DATA:
            _check_strategy("match-refit", {"method": method, **fusion_options(candidate)})


def _check_strategy(name: str, options: Options) -> None:
    """Refuse values that a strategy would refuse with any network."""
    kind = STRATEGIES[name]
    left = {**fusion_options(kind.defaults), **options}
    own = {f.name: left.pop(f.name) for f in fields(kind) if f.name in left and f.name != "method"}
    for field in fields(kind):
        if field.name in own and "constraint" in field.metadata:
            field.metadata["constraint"].check(own[field.name], field.name)
    Screen(own.get("clip"), own.get("trim", 0.0))
    if kind.method_kind is None:
        return
    known = method_names(kind.method_kind)
    method = make_method(left.pop("method", known[0]), **left)
    if not isinstance(method, kind.method_kind):
        raise InputError(f"method: found {method.name!r}, expected one of {', '.join(known)}")
    method.check_in_rounds()


def option_names(method: str, in_rounds: bool) -> list[str]:
    """Options of a method, of training, and of the laboratory itself; see `MethodConfig`."""
    if method in ALONE:
        return list(_OF_TRAINING)
    if in_rounds and method != ENSEMBLE:
        return [*strategy_options(strategy_of(method)), *_IN_ROUNDS]
    return [*method_options(method), *_OF_TRAINING, *_ONE_SHOT]


def training_options(options: Options) -> dict[str, Any]:
    """Those options of a candidate that change how clients train."""
    return {name: value for name, value in options.items() if name in _OF_TRAINING}


def fusion_options(options: Options) -> dict[str, Any]:
    """Those options of a candidate that are for the fusion, or for the strategy in rounds."""
    others = (*_OF_TRAINING, *_OF_LABORATORY)
    return {name: value for name, value in options.items() if name not in others}


def fuse_clients(
    method: str,
    models: Sequence[nn.Module],
    example_inputs: tuple[Tensor, ...],
    seed: int,
    options: Options,
    class_counts: npt.ArrayLike | None = None,
    sample_counts: npt.ArrayLike | None = None,
    spec: ModelSpec | None = None,
    probe: Tensor | str | None = None,
    distill: int = 0,
) -> FusionResult:
    """Fuse the clients' models in one shot; a method gets the seed and the counts that it uses."""
    seeded = {"seed": seed} if "seed" in method_options(method) else {}
    chosen = make_method(method, **{**seeded, **options})
    known = chosen.used(class_counts=class_counts, sample_counts=sample_counts, probe=probe)
    return fuse(models, example_inputs, chosen, spec=spec, distill=distill, **known)
