"""Which widths must change together, and which cannot change.

Hides: what modules of torch demand of the sizes of their tensors. Promises: ties that have no group
in common and none that is fixed; widths that keep them satisfy every module that is known here.
Modules that nobody here wrote are tried out instead (`growth`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from torch import nn

from nafi.graph.spec import ModelSpec
from nafi.graph.tensors import Axis

# Group -> places that one of its neurons takes: width times places is the same for all of them.
Tie = Mapping[str, int]


@dataclass(frozen=True)
class Constraints:
    """What is known of widths before anything is tried.

    fixed: group -> why its width cannot change
    ties: groups that change together; none of them is fixed
    """

    fixed: Mapping[str, str]
    ties: Sequence[Tie]


def width_constraints(model: nn.Module, spec: ModelSpec) -> Constraints:
    """What norms, recurrent modules and attention demand of the widths of a network."""
    groups = spec.groups.items()
    fixed = {name: f"{group.rigid} fixes the width" for name, group in groups if group.rigid}
    demands = [*_demands(model, spec), *_heads(spec)]
    for demand in demands:
        for name in demand.fixed:
            fixed.setdefault(name, demand.reason)
    ties = []
    for tie, reason in _joined(demands):
        held = next((name for name in tie if name in fixed), None)
        if held is not None:
            fixed |= {n: f"{reason}, and {fixed[held]}" for n in tie if n not in fixed}
        elif len(tie) > 1:
            ties.append(tie)
    return Constraints(fixed, ties)


def equal_widths(tie: Tie, widths: Mapping[str, int]) -> dict[str, int]:
    """The least widths that keep a tie, none below those given."""
    unit = lcm(*tie.values())
    size = max(widths[name] * places for name, places in tie.items())
    size = -(-size // unit) * unit
    return {name: size // places for name, places in tie.items()}


def tied_limits(tie: Tie, limits: Mapping[str, int]) -> dict[str, int]:
    """The largest widths that keep a tie, none above these limits."""
    unit = lcm(*tie.values())
    size = min(limits[name] * places for name, places in tie.items()) // unit * unit
    return {name: size // places for name, places in tie.items()}


@dataclass(frozen=True)
class _Demand:
    """What one module demands: groups tied, others fixed."""

    tie: Tie
    reason: str
    fixed: tuple[str, ...] = ()


def _demands(model: nn.Module, spec: ModelSpec) -> Iterator[_Demand]:
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            yield from _recurrent(module, path, spec)
        elif isinstance(module, nn.MultiheadAttention):
            yield _attention(module, path, spec)


def _recurrent(module: nn.RNNBase, path: str, spec: ModelSpec) -> Iterator[_Demand]:
    """One hidden size for all layers and directions, and one size of what they hand on."""
    kind = type(module).__name__
    names = [name for name, _ in module.named_parameters() if name.startswith("weight_hh")]
    for axis in (0, 1):
        axes = [_axis(spec, _path(path, name), axis) for name in names]
        groups = {group: 1 for a in axes for segment in a for group in segment.groups}
        yield _Demand(groups, f"{kind} {path} has one width for all layers and directions")


def _attention(module: nn.MultiheadAttention, path: str, spec: ModelSpec) -> _Demand:
    """Heads times their width is the width of the embedding, which is also the output's."""
    first = "in_proj_weight" if module.in_proj_weight is not None else "q_proj_weight"
    places = [(first, 0), (first, 1), ("out_proj.weight", 0), ("out_proj.weight", 1)]
    axes = [_axis(spec, _path(path, name), axis) for name, axis in places]
    within = {g for axis in axes for s in axis for g in s.groups if spec.groups[g].parent}
    tie: dict[str, int] = {}
    fixed = set(within)
    for axis in axes[1:]:
        one = _single(axis, spec, within)
        if one is None:
            fixed |= {group for other in axes for segment in other for group in segment.groups}
        else:
            tie[one[0]] = one[1]
    reason = f"nn.MultiheadAttention {path} needs heads x head width = embedding"
    return _Demand(tie, reason, tuple(sorted(fixed)))


def _axis(spec: ModelSpec, tensor: str, axis: int) -> Axis:
    """An axis of a tensor; of one that is computed from others nothing is known."""
    return spec.tensor(tensor).axes[axis] if tensor in {*spec.tensors, *spec.aliases} else ()


def _single(axis: Axis, spec: ModelSpec, within: Iterable[str]) -> tuple[str, int] | None:
    """The only group of an axis that may change, and the places that each of its neurons takes."""
    if len(axis) != 1 or len(free := set(axis[0].groups) - set(within)) != 1:
        return None
    (group,) = free
    return group, axis[0].size(spec.widths) // spec.widths[group]


def _heads(spec: ModelSpec) -> Iterator[_Demand]:
    """Orders of one width within the same heads: the code has one width for all of them."""
    for parent in spec.groups:
        by_width: dict[int, dict[str, int]] = {}
        for child in spec.children(parent):
            by_width.setdefault(spec.groups[child].width, {})[child] = 1
        for tie in by_width.values():
            yield _Demand(tie, f"all parts of a head of {parent} have one width")


def _joined(demands: Sequence[_Demand]) -> list[tuple[dict[str, int], str]]:
    """The ties, those with a common group made one."""
    joined: list[tuple[dict[str, int], str]] = []
    for demand in demands:
        tie, reason = dict(demand.tie), demand.reason
        apart = []
        for other, why in joined:
            common = next((name for name in other if name in tie), None)
            if common is None:
                apart.append((other, why))
            else:
                both = lcm(tie[common], other[common])
                tie = _times(tie, both // tie[common]) | _times(other, both // other[common])
        joined = [*apart, (tie, reason)] if tie else apart
    return joined


def _times(tie: Tie, factor: int) -> dict[str, int]:
    return {name: places * factor for name, places in tie.items()}


def _path(module: str, name: str) -> str:
    return f"{module}.{name}".removeprefix(".")
