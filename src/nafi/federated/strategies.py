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
from nafi.fusion import FUSERS
from nafi.fusion.base import fuser_named
from nafi.fusion.bayesian import Settings
from nafi.fusion.descent import Matcher
from nafi.fusion.screen import Screen

STRATEGIES = ("fedavg", "fedprox", "ot", "rebasin", "match-then-average", "layerwise")
_OF_TRAINING = tuple(f.name for f in fields(Training))
_OF_MATCHER = tuple(f.name for f in fields(Matcher) if f.name != "seed")
_OF_SETTINGS = tuple(f.name for f in fields(Settings))
_OF_SCREEN = tuple(f.name for f in fields(Screen))
_OF_LAYERWISE = ("method", "freeze", "max_width", "restore_norm", "batchnorm")


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
    known = option_names(name)
    for option in options:
        if option not in known:
            raise InputError(
                f"strategy {name} has no option {option!r}; its options: {', '.join(known)}"
            )
    given = dict(options)
    changes = {key: given.pop(key) for key in _OF_TRAINING if key in given}
    if name == "fedprox":
        changes.setdefault("proximal", 0.01)
    chosen = replace(training, **changes)
    common = (architecture, chosen, rounds, seed, fraction)
    if name == "layerwise":
        return _layerwise(common, given)
    shares = given.pop("class_shares", False)
    if name in ("fedavg", "fedprox"):
        return FusionRounds(*common, class_shares=shares, screen=Screen(**given))
    batchnorm = given.pop("batchnorm", "attach" if name == "match-then-average" else "average")
    method = given.pop("method", "nafi") if name == "match-then-average" else name
    _check_fuser(method, given)
    return FusionRounds(
        *common,
        first=method,
        then="fedavg" if name == "match-then-average" else name,
        options=given,
        shared_start=False,
        class_shares=shares,
        screen=Screen(**{key: given[key] for key in _OF_SCREEN if key in given}),
        batchnorm=batchnorm,
    )


def _check_fuser(method: str, options: Mapping[str, Any]) -> None:
    """Refuse before the first round what `nafi.fuse` would refuse after it."""
    if method not in ("nafi", "pfnm", "ot", "rebasin"):
        raise InputError(f"method: found {method!r}, expected nafi, pfnm, ot or rebasin")
    fuser_named(method, options)
    if method in ("nafi", "pfnm"):
        Matcher(**{key: options[key] for key in _OF_MATCHER if key in options})
        Settings(**{key: options[key] for key in _OF_SETTINGS if key in options})


def option_names(name: str) -> list[str]:
    """The options that a strategy has beside rounds, seed and fraction."""
    own: dict[str, tuple[str, ...]] = {
        "fedavg": ("class_shares", *_OF_SCREEN),
        "fedprox": ("class_shares", *_OF_SCREEN),
        "ot": ("batchnorm", *FUSERS["ot"].options),
        "rebasin": ("batchnorm", *FUSERS["rebasin"].options),
        "match-then-average": ("method", "class_shares", "batchnorm", *FUSERS["nafi"].options),
        "layerwise": (*_OF_LAYERWISE, *_OF_MATCHER, *_OF_SCREEN),
    }
    return list(dict.fromkeys((*own[name], *_OF_TRAINING)))


def _layerwise(common: tuple[Any, ...], given: Mapping[str, Any]) -> Layerwise:
    method = given.get("method", "nafi")
    if method not in ("nafi", "pfnm"):
        raise InputError(f"method: found {method!r}, expected nafi or pfnm")
    settings = {key: given[key] for key in _OF_MATCHER if key in given}
    if method == "pfnm":
        if settings.get("penalty"):
            raise InputError("penalty: pfnm has none; use the method nafi")
        settings["penalty"] = 0.0
    rest = {key: given[key] for key in _OF_LAYERWISE if key in given and key != "method"}
    screen = Screen(**{key: given[key] for key in _OF_SCREEN if key in given})
    architecture, training, rounds, seed, fraction = common
    return Layerwise(
        architecture,
        training,
        rounds,
        seed,
        fraction,
        matcher=Matcher(**settings),
        screen=screen,
        **rest,
    )
