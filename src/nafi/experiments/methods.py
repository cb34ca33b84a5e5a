"""The methods that an experiment can name.

Hides: that one shot takes them from `nafi.fuse` and rounds from the strategies. Promises: the same
questions for both; an option that a method does not have is refused before any client trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy.typing as npt
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.federated import STRATEGIES, Training
from nafi.federated import option_names as strategy_options
from nafi.fusion import METHODS, FusionResult, fuse, make_method
from nafi.fusion import option_names as method_options
from nafi.graph import ModelSpec

LOCAL = "local"
_OF_TRAINING = tuple(f.name for f in fields(Training))

Options = Mapping[str, Any]


def check_method(method: str, candidates: Sequence[Options], in_rounds: bool) -> None:
    """Refuse a method, or an option of it, that there is not."""
    known = (LOCAL, *(STRATEGIES if in_rounds else METHODS))
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
        Training(**training_options(candidate))
        if method in METHODS and not in_rounds:
            make_method(method, **fusion_options(candidate))


def option_names(method: str, in_rounds: bool) -> list[str]:
    """Options of a method, of training, and of the laboratory itself; see `MethodConfig`."""
    if method == LOCAL:
        return list(_OF_TRAINING)
    if in_rounds:
        return [*strategy_options(method), "rounds", "calibrate"]
    return [*method_options(method), *_OF_TRAINING, "calibrate"]


def training_options(options: Options) -> dict[str, Any]:
    """Those options of a candidate that change how clients train."""
    return {name: value for name, value in options.items() if name in _OF_TRAINING}


def fusion_options(options: Options) -> dict[str, Any]:
    """Those options of a candidate that are for the fusion in one shot."""
    others = (*_OF_TRAINING, "calibrate")
    return {name: value for name, value in options.items() if name not in others}


def fuse_clients(
    method: str,
    models: Sequence[nn.Module],
    example_inputs: tuple[Tensor, ...],
    seed: int,
    options: Options,
    class_counts: npt.ArrayLike | None = None,
    spec: ModelSpec | None = None,
) -> FusionResult:
    """Fuse the clients' models in one shot; a method gets the seed and the counts that it uses."""
    seeded = {"seed": seed} if "seed" in method_options(method) else {}
    chosen = make_method(method, **{**seeded, **options})
    return fuse(models, example_inputs, chosen, spec=spec, **chosen.used(class_counts=class_counts))
