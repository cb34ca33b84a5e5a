"""Strategies by name.

Hides: which class and which settings a name stands for. Promises: one place for the names that
configurations use; an unknown name or option raises an error that lists the known ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from nafi.errors import InputError
from nafi.federated.architecture import Architecture
from nafi.federated.averaging import FusionRounds
from nafi.federated.layerwise import Layerwise
from nafi.federated.strategy import Strategy
from nafi.federated.training import Training
from nafi.fusion import METHODS, AligningMethod, Bayesian, Method, make_method, method_names
from nafi.fusion import option_names as method_options
from nafi.fusion.screen import Screen
from nafi.options import check_names

STRATEGIES = ("fedavg", "fedprox", "ot", "rebasin", "match-then-average", "layerwise")
_OF_TRAINING = tuple(f.name for f in fields(Training))
_OF_SCREEN = tuple(f.name for f in fields(Screen))


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
    """A strategy by its name.

    fedavg: all start from the same weights, and the mean by samples is the next start
    fedprox: the same, with `proximal`, by default 0.01
    ot, rebasin: clients start on their own, and every round is fused that way, by default with
        batchnorm="average"
    match-then-average: clients start on their own and are fused by `method`, "nafi" by default;
        after that the rounds are those of fedavg, or of fedprox with `proximal`
    layerwise: a group of neurons a round, by `method` "nafi" or "pfnm", which makes it FedMA

    options: of the strategy, of `nafi.fuse` where it fuses, and of `Training` for all of them;
    `clip` and `trim` of `nafi.fuse` also where updates are averaged
    """
    if name not in STRATEGIES:
        raise InputError(f"strategy: found {name!r}, expected one of {', '.join(STRATEGIES)}")
    check_names(options, option_names(name), f"strategy {name}")
    left = dict(options)
    changes = {key: left.pop(key) for key in _OF_TRAINING if key in left}
    if name == "fedprox":
        changes.setdefault("proximal", 0.01)
    common = (architecture, replace(training, **changes), rounds, seed, fraction)
    if name == "layerwise":
        freeze = left.pop("freeze", True)
        method = _method(left, Bayesian)
        assert isinstance(method, Bayesian)
        return Layerwise(*common, freeze=freeze, method=method)
    shares = left.pop("class_shares", False)
    if name in ("fedavg", "fedprox"):
        return FusionRounds(*common, class_shares=shares, screen=Screen(**left))
    if name in METHODS:
        each = make_method(name, **{"batchnorm": "average", **left})
        return FusionRounds(*common, first=each, then=each, shared_start=False)
    screen = Screen(**{key: left[key] for key in _OF_SCREEN if key in left})
    first = _method(left, AligningMethod)
    return FusionRounds(
        *common, first=first, shared_start=False, class_shares=shares, screen=screen
    )


def _method(options: Mapping[str, Any], kind: type) -> Method:
    """The method that a strategy matches by, "nafi" unless its options say otherwise."""
    left = dict(options)
    name = left.pop("method", "nafi")
    method = make_method(name, **left)
    if not isinstance(method, kind):
        known = ", ".join(method_names(kind))
        raise InputError(f"method: found {name!r}, expected one of {known}")
    return method


def option_names(name: str) -> list[str]:
    """The options that a strategy has beside rounds, seed and fraction."""
    own: dict[str, tuple[str, ...]] = {
        "fedavg": ("class_shares", *_OF_SCREEN),
        "fedprox": ("class_shares", *_OF_SCREEN),
        "ot": method_options("ot"),
        "rebasin": method_options("rebasin"),
        "match-then-average": ("method", "class_shares", *method_options("nafi")),
        "layerwise": ("method", "freeze", *method_options("nafi")),
    }
    every = dict.fromkeys((*own[name], *_OF_TRAINING))
    return [option for option in every if option != "seed"]
