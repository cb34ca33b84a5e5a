"""What a fusion would do, before its checkpoints are read.

Hides: how widths, seconds and bytes are estimated. Promises: shapes are enough; the fused widths
lie within the bounds that are given; every estimate says how it was made.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import SpecError
from nafi.fusion.bayesian import Bayesian
from nafi.fusion.budget import read_budget, size_in
from nafi.fusion.clients import Clients
from nafi.fusion.method import AligningMethod, Method
from nafi.fusion.networks import Networks, prepare_networks
from nafi.fusion.stack import Stack
from nafi.fusion.widths import allowed
from nafi.graph import Inputs, Product, call, check_inputs, groups, rebuild, watch

# Matching and refitting takes so many runs of all networks over the probe: see docs/results.md.
_RUNS = 10
# Passes over a matrix of costs, and copies of all tensors, that were counted on small networks.
_PASSES, _COPIES = 4, 4
_TRIED = 384  # the size of the matrices that are multiplied to see how fast that is


@dataclass(frozen=True)
class GroupForecast:
    """A group of neurons: its width in each client, and the least and most of the fused network."""

    name: str
    local: tuple[int, ...]
    least: int
    most: int


@dataclass(frozen=True)
class Forecast:
    """What a fusion would do.

    params: least and most parameters of the fused network; of_client: those of the first client
    probe: how many inputs layers would be refitted on
    seconds, bytes: estimates, and `how` they were made, a line each; what takes less than a second
        has none
    """

    groups: tuple[GroupForecast, ...]
    params: tuple[float, float]
    of_client: float
    probe: int
    seconds: float
    bytes: float
    how: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def forecast(
    method: Method,
    network: nn.Module,
    example_inputs: Inputs,
    shapes: Sequence[Mapping[str, Tensor]],
    names: Sequence[str],
    probe: int = 0,
) -> Forecast:
    """What a method would make of checkpoints.

    network: of their architecture, at any width and with any weights
    shapes: of each checkpoint, as tensors of the device "meta"; names: what errors call them
    probe: how many inputs layers would be refitted on
    """
    start = time.perf_counter()
    networks = _networks(method, network, example_inputs, shapes, names)
    traced = time.perf_counter() - start
    networks = replace(networks, probe=check_inputs(example_inputs) if probe else None)
    plans = [_plan(variant, networks) for variant in method.variants()]
    bounds = {
        name: (min(plan[name].least for plan in plans), max(plan[name].most for plan in plans))
        for name in networks.spec.groups
    }
    widest = {name: max(plan[name].matched for plan in plans) for name in bounds}
    params, of_client = _params(method, networks, bounds)
    matching, rate = _matching(method, networks, widest)
    refit, run = _refit(networks, example_inputs, probe)
    refit *= 2 if any(_prunes(variant, networks) for variant in method.variants()) else 1
    loaded = sum(_bytes(each) for each in shapes)
    loaded += _bytes(shapes[0]) * _counted(networks, widest) / max(of_client, 1)
    neurons = sum(widest.values()) / max(sum(networks.specs[0].widths.values()), 1)
    recorded = _written(networks.original, example_inputs) * probe * (len(shapes) + neurons)
    steps = [
        (traced, "to find the groups"),
        (
            matching,
            "to match at the largest width: the multiplications of all costs, at "
            f"{rate / 1e9:.1f} billion a second",
        ),
        (
            refit,
            f"to refit: {_RUNS} runs of {len(shapes)} networks over {probe} inputs, "
            f"{1e3 * run:.2f} ms for an input",
        ),
    ]
    return Forecast(
        tuple(
            GroupForecast(name, tuple(networks.local_widths(name)), *each)
            for name, each in bounds.items()
        ),
        params,
        of_client,
        probe,
        traced + matching + refit,
        _COPIES * loaded + recorded,
        (
            *(
                f"{seconds:.1f} s {what}, as just measured"
                for seconds, what in steps
                if seconds >= 1
            ),
            f"memory: {_COPIES} copies of all checkpoints and of the largest fused network, and "
            "what layers write on the probe; PyTorch itself takes some 300 MB more",
        ),
    )


def _networks(
    method: Method,
    network: nn.Module,
    example_inputs: Inputs,
    shapes: Sequence[Mapping[str, Tensor]],
    names: Sequence[str],
) -> Networks:
    """One network, that of the first checkpoint, in the place of all, and the widths of each."""
    spec = groups(network, example_inputs)
    widths = []
    for name, each in zip(names, shapes, strict=True):
        try:
            widths.append(spec.fitted(each).widths)
        except SpecError as error:
            raise SpecError(f"{name} is not a checkpoint of this network: {error}") from None
    first = rebuild(network, spec, widths[0]).eval()
    clients = Clients((first,), (names[0],), None, None)
    known, way = spec.resized(widths[0]), getattr(method, "batchnorm", "fold")
    networks = prepare_networks(clients, example_inputs, known, way)
    return replace(networks, specs=tuple(networks.spec.resized(each) for each in widths))


class _Width(NamedTuple):
    """Of one group: least and most neurons of the fused network, and most that are matched."""

    least: int
    most: int
    matched: int


def _plan(method: Method, networks: Networks) -> dict[str, _Width]:
    """How wide one variant of a method makes each group."""
    local = {name: networks.local_widths(name) for name in networks.spec.groups}
    if isinstance(method, Stack):
        whole = method.budget is None and method.keep is None
        return {n: _Width(sum(w) if whole else 1, sum(w), sum(w)) for n, w in local.items()}
    if not isinstance(method, Bayesian):
        return {name: _Width(*[max(widths)] * 3) for name, widths in local.items()}
    limits, matched = method.limits(networks), method.matched_limits(networks)
    plan = {n: _Width(min(max(w), limits[n]), limits[n], matched[n]) for n, w in local.items()}
    if method.budget is not None and _prunes(method, networks):  # to where least is lost
        plan |= {name: _Width(1, matched[name], matched[name]) for name in networks.prunable}
    return plan


def _prunes(method: Method, networks: Networks) -> bool:
    return isinstance(method, Bayesian) and method.oversize(networks) > 1


def _counted(networks: Networks, widths: Mapping[str, int]) -> float:
    """Parameters at these widths."""
    spec = networks.architecture
    return size_in("params", networks.original, spec).of(spec, {**spec.widths, **widths})


def _params(
    method: Method, networks: Networks, bounds: Mapping[str, tuple[int, int]]
) -> tuple[tuple[float, float], float]:
    """Least and most parameters of the fused network, and those of the first client."""
    spec = networks.architecture
    size = size_in("params", networks.original, spec)
    clients = [size.of(spec, local.widths) for local in networks.specs]
    if isinstance(method, Stack):  # networks side by side, each cut down or whole
        whole = method.budget is None and method.keep is None
        return (sum(clients) if whole else 0.0, sum(clients)), clients[0]
    least, most = (
        _counted(networks, {name: each[end] for name, each in bounds.items()}) for end in range(2)
    )
    budgets = [read_budget(variant.budget) for variant in method.variants() if _has_budget(variant)]
    if budgets and all(budget.unit == "params" for budget in budgets):
        most = min(most, max(allowed(networks, budget)[1] for budget in budgets))
    return (least, most), clients[0]


def _has_budget(method: Method) -> TypeGuard[Bayesian]:
    return isinstance(method, Bayesian) and method.budget is not None


def _matching(method: Method, networks: Networks, widest: Mapping[str, int]) -> tuple[float, float]:
    """Seconds for the cost matrices, and multiplications a second."""
    rate = _multiplications_a_second()
    if not isinstance(method, AligningMethod):
        return 0.0, rate
    sweeps = 1 + getattr(method, "sweeps", 1)
    needed = 0.0
    for name, most in widest.items():
        shapes = [
            networks.spec.tensors[p.tensor].shape(networks.spec.widths)
            for p in networks.spec.places(name)
        ]
        columns = sum(prod(shape) for shape in shapes) / networks.spec.widths[name]
        needed += sum(
            _PASSES * sweeps * most * local * columns for local in networks.local_widths(name)
        )
    return needed / rate, rate


def _multiplications_a_second() -> float:
    matrix = np.random.default_rng(0).normal(size=(_TRIED, _TRIED))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return _TRIED**3 / min(seconds)


def _refit(networks: Networks, inputs: Inputs, probe: int) -> tuple[float, float]:
    """Seconds for all, and of one network for one input."""
    with torch.no_grad():
        call(networks.original, inputs)  # the first is slower
        start = time.perf_counter()
        call(networks.original, inputs)
    one = (time.perf_counter() - start) / _batch(inputs)
    return _RUNS * len(networks.specs) * probe * one, one


def _written(network: nn.Module, inputs: Inputs) -> float:
    """Bytes of what all layers write for one input."""
    numbers = 0.0

    def visit(product: Product) -> None:
        nonlocal numbers
        blocks, _, outputs = product.weights.shape
        numbers += product.places * blocks * outputs

    watch(network, inputs, visit)
    return 4 * numbers / _batch(inputs)


def _batch(inputs: Inputs) -> int:
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return max([len(leaf) for leaf in leaves if leaf.ndim] or [1])


def _bytes(tensors: Mapping[str, Tensor]) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
