"""rebasin: weight matching by coordinate descent (Ainsworth et al., 2023), all to a common centre.

Hides: the loop over models and groups. Promises: the sum of products between each model and the
mean of the others never falls, and all models keep their function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from nafi.fusion.clients import Array, Clients
from nafi.fusion.features import real_rows
from nafi.fusion.heads import pair_heads
from nafi.fusion.method import AligningMethod, Alignment, Progress
from nafi.fusion.networks import Networks
from nafi.fusion.transport import align_to_one
from nafi.graph import Inputs, ModelSpec, Placement, Positions, gather, holds_numbers, permute_state
from nafi.options import option, whole

State = Mapping[str, Tensor]
Orders = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Rebasin(AligningMethod):
    """Permute each model towards the mean of the others until none would move, then the mean.

    sweeps: most passes over the models, and over the groups within each
    seed: decides the order of models and groups
    """

    name: ClassVar[str] = "rebasin"

    sweeps: int = option(whole(1), 10)
    seed: int = option(whole(0), 0)

    def prepare(self, clients: Clients, example_inputs: Inputs, spec: ModelSpec | None) -> Networks:
        networks = super().prepare(clients, example_inputs, spec)
        networks.check_equal_widths(self.name)
        return networks

    def align(self, networks: Networks, progress: Progress) -> Alignment:
        start = align_to_one(networks, networks.ranking[0], "sqeuclidean", _one_to_one, progress)
        search = _Search(networks, start, np.random.default_rng(self.seed))
        for sweep in range(self.sweeps):
            progress(f"sweep {sweep + 1}", sweep, self.sweeps)
            if not search.sweep(self.sweeps):
                break
        progress("merging", self.sweeps, self.sweeps)
        return Alignment(search.placements, networks.spec.widths)


class _Search:
    """The models as they are permuted now, and where their neurons went."""

    def __init__(
        self,
        networks: Networks,
        start: Sequence[Mapping[str, Placement]],
        rng: np.random.Generator,
    ) -> None:
        self.spec = networks.spec
        self.ranking = networks.ranking
        self.rng = rng
        self.placements = [_positions(placements) for placements in start]
        self.states: list[State] = [
            permute_state(state, self.spec, _orders(placements, self.spec))
            for state, placements in zip(networks.states, self.placements, strict=True)
        ]
        self.total = dict(self.states[0])
        for state in self.states[1:]:
            self.total = _combined(self.total, state, 1)

    def sweep(self, passes: int) -> bool:
        """Let every model move once; whether any did."""
        moved = [self._move(int(s), passes) for s in self.rng.permutation(self.ranking)]
        return any(moved)

    def _move(self, s: int, passes: int) -> bool:
        """Permute one model, group by group, until no group of it wants to move."""
        others = _combined(self.total, self.states[s], -1)
        moved = False
        for _ in range(passes):
            changed = False
            for group in self.rng.permutation(list(self.spec.groups)):
                orders = _best_orders(self.spec, str(group), self.states[s], others)
                if orders is not None:
                    self.states[s] = permute_state(self.states[s], self.spec, orders)
                    self.placements[s] = _moved(self.placements[s], self.spec, orders)
                    changed = moved = True
            if not changed:
                break
        self.total = _combined(others, self.states[s], 1)
        return moved


def _one_to_one(cost: Array) -> Array:
    """The cheapest plan that gives every neuron a place of its own."""
    plan = np.zeros(cost.shape)
    plan[linear_sum_assignment(cost)] = 1
    return plan


def _positions(placements: Mapping[str, Placement]) -> dict[str, Positions]:
    positions = {}
    for name, placement in placements.items():
        assert isinstance(placement, Positions)  # of equal widths
        positions[name] = placement
    return positions


def _orders(placements: Mapping[str, Positions], spec: ModelSpec) -> Orders:
    """Which neuron comes to each place; within a parent, a row for each of its members as given."""
    return {name: placements[name].index.argsort(dim=-1) for name in spec.groups}


def _form(spec: ModelSpec, group: str) -> tuple[int, ...]:
    parent = spec.groups[group].parent
    width = spec.groups[group].width
    return (width,) if parent is None else (spec.groups[parent].width, width)


def _combined(one: State, two: State, sign: int) -> dict[str, Tensor]:
    """The sum or difference of two states; what holds no numbers stays."""
    return {n: t + sign * two[n] if holds_numbers(t) else t for n, t in one.items()}


def _moved(
    before: Mapping[str, Positions], spec: ModelSpec, orders: Orders
) -> dict[str, Positions]:
    """Where neurons are after a step; orders within are counted by the parent's old places."""
    after = dict(before)
    for name, order in orders.items():
        places, index = order.argsort(dim=-1), before[name].index
        parent = spec.groups[name].parent
        if parent is not None:
            places = places[before[parent].index]  # a row for each head as the model counts them
        after[name] = Positions(places.gather(-1, index), before[name].width)
    return after


def _best_orders(spec: ModelSpec, group: str, mine: State, others: State) -> Orders | None:
    """The orders of a group, and of groups within it, that bring a model closest to the others.

    None if the products of what is compared would not grow.
    """
    inside = spec.children(group)
    if inside:
        return _best_heads(spec, group, inside, mine, others)
    rows_now = _rows(spec, group, mine)
    wanted = _rows(spec, group, others)
    rows, gain, size = [], 0.0, 0.0
    for mine_rows, their_rows in zip(rows_now, wanted, strict=True):
        products = their_rows @ mine_rows.T
        order = linear_sum_assignment(products, maximize=True)[1]
        rows.append(order)
        gain += float(products[np.arange(len(order)), order].sum() - np.trace(products))
        size += float(np.abs(np.diag(products)).sum())
    if gain <= 1e-9 * size:
        return None
    orders = torch.from_numpy(np.stack(rows))
    return {group: orders if spec.groups[group].parent is not None else orders[0]}


def _best_heads(
    spec: ModelSpec, group: str, inside: list[str], mine: State, others: State
) -> Orders | None:
    heads, orders = pair_heads(
        _rows(spec, group, mine)[0],
        [_rows(spec, name, mine) for name in inside],
        _rows(spec, group, others)[0],
        [_rows(spec, name, others) for name in inside],
    )
    if (heads == np.arange(len(heads))).all():
        return None  # what is within them has its own turn
    chosen = {
        name: torch.from_numpy(order[np.arange(len(heads)), heads])
        for name, order in zip(inside, orders, strict=True)
    }
    return {group: torch.from_numpy(np.argsort(heads)), **chosen}


def _rows(spec: ModelSpec, group: str, state: State) -> Array:
    """(parent's width or 1, J, D) a group's neurons, without columns that move with them."""
    neurons = gather(state, spec, group)
    moving = {group, *spec.children(group)}
    fixed = [c.where for c in neurons.columns if not moving & set(c.factors)]
    parts = [neurons.matrix[:, where] for where in fixed] or [neurons.matrix[:, :0]]
    matrix = real_rows(torch.cat(parts, dim=1))
    return matrix.reshape(*([1, *_form(spec, group)][-2:]), matrix.shape[1])
