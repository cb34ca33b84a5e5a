"""How wide each group of the fused network may be.

Hides: the ways to state a limit. Promises: a limit for every group that the matching can keep and
the rebuilt network can run with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import lcm
from numbers import Integral, Real

from torch import nn

from nafi.errors import InputError, few
from nafi.fusion.allocation import Part, cut_to
from nafi.fusion.budget import Budget, Size, read_budget, size_in
from nafi.fusion.networks import Networks
from nafi.graph import ModelSpec, tied_limits
from nafi.options import Constraint

_HALVINGS = 20

MaxWidth = int | float | Mapping[str, "int | float"] | None


def _is_limit(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_limit(limit) for name, limit in value.items())
    if value is None:
        return True
    return not isinstance(value, bool) and isinstance(value, Real) and bool(0 < value <= WIDEST)  # type: ignore[operator]


# More neurons, or times as many, than any network has.
WIDEST = 10**9
MAX_WIDTH = Constraint(
    _is_limit,
    "a number of neurons, a float as a factor, or either by group, above 0 and at most 1e9",
)


def width_limits(
    networks: Networks, max_width: MaxWidth, fixed: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Group -> most global neurons.

    max_width: a whole number; a float, as a factor of the widest client; one of these for some
        groups by name; None for no limit. Groups whose width cannot change keep it.
    fixed: these groups, each with the reason, if they are known already
    """
    spec = networks.spec
    if isinstance(max_width, Mapping):
        for name in max_width:
            spec.group(name)
    if isinstance(max_width, float) and max_width == 1.0:
        kept = {name: set(networks.local_widths(name)) for name in spec.groups}
        if all(len(widths) == 1 for widths in kept.values()):
            # Nothing may grow, so what could need not be tried out.
            return {name: width for name, (width,) in kept.items()}
    fixed = networks.fixed_widths if fixed is None else fixed
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
            limit = max_width.get(name) if isinstance(max_width, Mapping) else max_width
            limits[name] = _limit(limit, name, local)
    for tie in networks.tied_widths:  # their widths will agree
        limits |= tied_limits(tie, limits)
    return limits


def allowed(networks: Networks, budget: Budget) -> tuple[Size, float]:
    """How to count what a network costs, and the most that a budget allows."""
    spec = networks.architecture
    size = size_in(budget.unit, networks.original, spec)
    if budget.unit == "bytes":
        return size, budget.amount
    of_clients = [size.of(spec, local.widths) for local in networks.specs]
    return size, budget.amount * sum(of_clients) / len(of_clients)


def check_budget(
    networks: Networks, budget: Budget, prunable: Collection[str] | None = None
) -> None:
    """Refuse a budget that no fused network fits.

    prunable: groups that may lose neurons; None where nothing is pruned
    """
    size, limit = allowed(networks, budget)
    least = {name: max(networks.local_widths(name)) for name in networks.spec.groups}
    least |= dict.fromkeys(prunable or (), 1)
    for tie in networks.tied_widths:
        if set(tie) <= set(prunable or ()):
            least |= {name: lcm(*tie.values()) // places for name, places in tie.items()}
    needed = size.of(networks.architecture, networks.architecture.widths | least) / limit
    if needed <= 1:
        return
    if prunable is None:
        raise InputError(
            f"budget: found {budget}, but a merged network is as wide as its widest client, which "
            f"is {needed:.2f} times that; with a probe and a refit it is pruned, unless bases are "
            "learned or prune_from is 1; method stack can be smaller"
        )
    fixed = [name for name in networks.spec.groups if name not in prunable]
    raise InputError(
        f"budget: found {budget}, but with the fewest neurons the network has {needed:.2f} times "
        "that; allow more" + (f"; the width of {few(fixed)} cannot change" if fixed else "")
    )


def fitted_widths(
    networks: Networks,
    widths: Mapping[str, int],
    lost: Mapping[str, Sequence[float]],
    budget: Budget,
) -> dict[str, int]:
    """Group -> neurons to keep of these widths, so that least is lost within a budget.

    lost: group -> what is lost with so many of its neurons; other groups keep all
    """
    size, limit = allowed(networks, budget)
    part = Part(networks.architecture.resized(widths), lost)
    (kept,) = cut_to(limit, [part], size, networks.tied_widths, str(budget))
    return kept


def largest_factor(networks: Networks, budget: Budget) -> float:
    """The factor of the local widths at which a fused network costs what a budget allows.

    It is 1 for a smaller budget, which only pruning can keep; see `check_budget`.
    """
    size, limit = allowed(networks, budget)
    spec = networks.architecture

    def cost(factor: float) -> float:
        return size.of(spec, spec.widths | width_limits(networks, factor))

    if cost(1.0) > limit:
        return 1.0
    low, high = 1.0, float(len(networks.specs))
    if cost(high) <= limit:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) <= limit else (low, middle)
    return low


def check_max_width(max_width: MaxWidth, spec: ModelSpec) -> None:
    """Refuse before any work a limit that no group of clients of this network could keep."""
    # Of groups that are not named the wider ones may be of fixed width, which no limit is for.
    narrowest = sorted(spec.groups, key=lambda name: spec.groups[name].width)[:1]
    for name in max_width if isinstance(max_width, Mapping) else narrowest:
        limit = max_width[name] if isinstance(max_width, Mapping) else max_width
        _limit(limit, name, [spec.group(name).width])


def check_budget_in_rounds(stated: object, model: nn.Module, spec: ModelSpec) -> None:
    """Refuse before any work a budget below one client, which a fusion without a probe cannot keep.

    model: a client's network, in eval mode; spec: its groups, with example inputs
    """
    budget = read_budget(stated)
    own = size_in(budget.unit, model, spec).of(spec, spec.widths)
    needed = own / budget.amount if budget.unit == "bytes" else 1 / budget.amount
    if needed > 1:
        raise InputError(
            f"budget: found {budget}, but in rounds a fused network is at least as wide as one "
            f"client, which is {needed:.2f} times that; allow more, or give clients a narrower "
            "network"
        )


def _limit(stated: int | float | None, name: str, local: list[int]) -> int:
    widest = max(local)
    if stated is None:
        return sum(local)
    limit = int(stated) if isinstance(stated, Integral) else int(float(stated) * widest + 1e-9)
    if limit < widest:
        raise InputError(
            f"max_width: found {stated!r} for group {name}, which has {widest} neurons in one "
            "model already; write a factor of at least 1.0, 1x on the command line, for the local "
            "width, or a whole number for as many neurons"
        )
    return min(limit, sum(local))
