"""Byzantine-robust means of the literature, to compare with; for experiments alone.

Promises: rounds of fedavg that differ from it in their mean only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from nafi.federated import FedAvg, State, Strategy, Update


@dataclass(frozen=True, eq=False)
class CoordinateMedian(FedAvg):
    """The median over clients of every number (Yin et al., 2018)."""

    def averaged(self, state: State, updates: Iterable[Update]) -> dict[str, Tensor]:
        sent = [update.tensors for update in updates]
        return {
            name: torch.stack([tensors[name] for tensors in sent])
            .double()
            .quantile(0.5, dim=0)
            .to(tensor.dtype)
            for name, tensor in sent[0].items()
        }


@dataclass(frozen=True, eq=False)
class MultiKrum(FedAvg):
    """The mean of the clients that are nearest to their neighbours (Blanchard et al., 2017).

    trim: the share of clients that may be harmful, rounded up; so many are left out
    """

    def averaged(self, state: State, updates: Iterable[Update]) -> dict[str, Tensor]:
        sent = [update.tensors for update in updates]
        flat = torch.stack([torch.cat([t.double().flatten() for t in s.values()]) for s in sent])
        kept = krum_order(flat, self.screen.cut(len(sent)))[
            : len(sent) - self.screen.cut(len(sent))
        ]
        return {
            name: torch.stack([sent[s][name] for s in kept]).double().mean(dim=0).to(tensor.dtype)
            for name, tensor in sent[0].items()
        }


def krum_order(values: Tensor, harmful: int) -> list[int]:
    """Clients, those first whose S - f - 2 nearest neighbours are nearest; values: (S, D)."""
    distances = torch.cdist(values, values, compute_mode="donot_use_mm_for_euclid_dist").square()
    nearest = distances.sort(dim=1).values[:, 1 : max(2, len(values) - harmful - 1)]
    order: list[int] = nearest.sum(dim=1).argsort(stable=True).tolist()
    return order


CONTROLS: dict[str, type[FedAvg]] = {
    "coordinate-median": CoordinateMedian,
    "multi-krum": MultiKrum,
}


def as_control(strategy: Strategy, name: str) -> Strategy:
    """A strategy of the options of fedavg with another mean, if the name is of one."""
    if name not in CONTROLS:
        return strategy
    return CONTROLS[name](**{f.name: getattr(strategy, f.name) for f in fields(strategy) if f.init})


def strategy_of(name: str) -> str:
    """The strategy whose options a method of rounds has."""
    return "fedavg" if name in CONTROLS else name
