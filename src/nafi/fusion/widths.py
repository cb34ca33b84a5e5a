"""How wide each group of the fused network may be.

Hides: the ways to state a limit, and which widths a network's code can change. Promises: a limit
for every group that the matching can keep and the rebuilt network can run with.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from math import isfinite
from numbers import Integral, Real

from nafi.errors import InputError, SpecError
from nafi.fusion.networks import Networks
from nafi.graph.rebuild import rebuild
from nafi.graph.spec import ModelSpec

MaxWidth = int | float | Mapping[str, "int | float"] | None


class FusionWarning(UserWarning):
    """The fused model is sound, but something could not be done as asked."""


def width_limits(networks: Networks, max_width: MaxWidth) -> dict[str, int]:
    """Group -> most global neurons.

    max_width: a whole number; a float, as a factor of the widest client; one of these for some
        groups by name; None for no limit. Groups whose width cannot change keep it.
    """
    spec = networks.spec
    if isinstance(max_width, Mapping):
        for name in max_width:
            spec.group(name)
    fixed = _fixed_groups(networks)
    limits = {}
    for name in spec.groups:
        local = networks.local_widths(name)
        if name in fixed:
            if len(set(local)) > 1:
                raise InputError(
                    f"group {name} has widths {sorted(set(local))} in different models, but "
                    f"{fixed[name]}; only models with equal widths there can be fused"
                )
            limits[name] = local[0]
        else:
            given = max_width.get(name) if isinstance(max_width, Mapping) else max_width
            limits[name] = _limit(given, name, local)
    return limits


def check_max_width(max_width: MaxWidth, spec: ModelSpec) -> None:
    """Refuse before any work a limit that no group of clients of this network could keep."""
    # Of groups that are not named the wider ones may be of fixed width, which no limit is for.
    narrowest = sorted(spec.groups, key=lambda name: spec.groups[name].width)[:1]
    for name in max_width if isinstance(max_width, Mapping) else narrowest:
        given = max_width[name] if isinstance(max_width, Mapping) else max_width
        _limit(given, name, [spec.group(name).width])


def _limit(given: int | float | None, name: str, local: list[int]) -> int:
    widest = max(local)
    if given is None:
        return sum(local)
    if isinstance(given, bool) or not isinstance(given, Real) or not isfinite(given):
        raise InputError(f"max_width: found {given!r}, expected a number, or numbers by group")
    limit = int(given) if isinstance(given, Integral) else int(float(given) * widest + 1e-9)
    if limit < widest:
        raise InputError(
            f"max_width: found {given!r} for group {name}, which has {widest} neurons in one model "
            "already; a factor is a float of at least 1.0, a number of neurons a whole number"
        )
    return min(limit, sum(local))


def _fixed_groups(networks: Networks) -> dict[str, str]:
    """The groups whose width cannot change, each with the reason.

    All others are widened by different amounts at once; if the network then does not run, each is
    tried alone.
    """
    spec = networks.spec
    fixed = {name: f"{g.rigid} fixes the width" for name, g in spec.groups.items() if g.rigid}
    free = [name for name in spec.groups if name not in fixed]
    grown = {name: spec.groups[name].width + 1 + k for k, name in enumerate(free)}
    trouble = _trouble(networks, grown)
    if trouble is None:
        return fixed
    alone = {name: _trouble(networks, {name: width}) for name, width in grown.items()}
    stuck = {name: reason for name, reason in alone.items() if reason is not None}
    if not stuck:  # only together: one of them changes with another, as layers of an LSTM do
        stuck = dict.fromkeys(free, trouble)
    names = ", ".join(stuck)
    warnings.warn(
        f"{names}: the width stays as it is, because {next(iter(stuck.values()))}",
        FusionWarning,
        stacklevel=4,
    )
    return fixed | dict.fromkeys(stuck, "its code fixes the width")


def _trouble(networks: Networks, widths: Mapping[str, int]) -> str | None:
    try:
        rebuild(networks.template, networks.spec, widths)
    except SpecError as error:
        return str(error)
    return None
