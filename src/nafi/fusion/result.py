"""What a fusion returns.

Promises: one model, ready to run, where every client's neurons went in it, and what is known of how
good it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
from torch import nn

from nafi.fusion.statistics import LayerFit
from nafi.graph import ModelSpec
from nafi.matching import Index, Matching


@dataclass(frozen=True)
class Scores:
    """What `validate` gave every model, the higher the better; minus infinity stands for NaN.

    clients: of each client alone, under `names`
    ensemble: of all of them side by side, if their outputs can be averaged; clients weigh in it
        what they weigh in the fusion, by classes or samples if these are known
    fused: of the fused model
    """

    clients: tuple[float, ...]
    ensemble: float | None
    fused: float
    names: tuple[str, ...]

    @property
    def best(self) -> float:
        """The score of the best client."""
        return max(self.clients)

    @property
    def better(self) -> bool:
        """Whether the fused model is at least as good as every client."""
        return self.fused >= self.best

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, NaN as None."""
        clients = _named(self.names, self.clients)
        ensemble = None if self.ensemble is None else _finite(self.ensemble)
        fused = _finite(self.fused)
        return {"clients": clients, "ensemble": ensemble, "fused": fused, "better": self.better}


@dataclass(frozen=True)
class Agreement:
    """How far models do what the ensemble of all clients does on a probe; no labels are needed.

    In this ensemble clients weigh what they weigh in the fusion: by classes or samples, if known.

    of: "classes", the share of inputs that are given the same class; or "values", the share of the
        outputs' variance that is explained (R squared, minus infinity for outputs that are NaN)
    fused: of the fused model; clients: of each client alone, under `names`
    inputs: how many were compared
    """

    of: str
    fused: float
    clients: tuple[float, ...]
    inputs: int
    names: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, minus infinity as None."""
        clients = _named(self.names, self.clients)
        fused = _finite(self.fused)
        return {"of": self.of, "clients": clients, "fused": fused, "inputs": self.inputs}


def _named(names: Sequence[str], scores: Sequence[float]) -> list[dict[str, Any]]:
    pairs = zip(names, scores, strict=True)
    return [{"name": name, "score": _finite(score)} for name, score in pairs]


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


@dataclass(frozen=True, eq=False)
class Body:
    """One of several networks that run side by side in a fused model.

    client: whose network it was made of
    spec, architecture: as those of `FusionResult`
    """

    client: str
    spec: ModelSpec
    architecture: ModelSpec


@dataclass(frozen=True, eq=False)
class FusionResult:
    """One model made of several.

    model: ready to run, in eval mode
    widths: group -> neurons of the fused model; empty for methods that look at no groups
    spec: the fused model's groups, where the method looked at them
    architecture: the groups of the clients' architecture at the fused widths; the same as `spec`
        unless batch normalisation was left folded
    assignments: group -> for each client the place of each of its neurons in the fused model,
        (J_s,), or (parent's width, J_s) within each member of a parent; -1 for one that is gone
    matchings: group -> what `nafi.match` returned, without the neurons themselves, which are in the
        model; `group[i]` within member i of a parent, with its owners only. Of a network that was
        pruned, what was found before
    scores: of clients, ensemble and fused model, if there was a function to `validate` them
    agreement: of the fused model with the ensemble of its clients, if there was a probe
    fits: weight -> how it was refitted on the probe; of a network that was pruned, how far what is
        left computes what the wider network did
    kept: weight -> why it was not refitted and keeps its merged values
    bodies: the networks that run side by side in the model, for a stack
    diagnostics: method, options, seconds, size, and whatever else the method reports
    """

    model: nn.Module
    widths: Mapping[str, int] = field(default_factory=dict)
    spec: ModelSpec | None = None
    architecture: ModelSpec | None = None
    assignments: Mapping[str, tuple[Index, ...]] = field(default_factory=dict)
    matchings: Mapping[str, Matching] = field(default_factory=dict)
    diagnostics: Mapping[str, Any] = field(default_factory=dict)
    scores: Scores | None = None
    agreement: Agreement | None = None
    fits: Mapping[str, LayerFit] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    bodies: tuple[Body, ...] = ()

    def owners(self, group: str) -> Index:
        """(J,) how many clients own each fused neuron; (parent's width, J) within a parent."""
        parent = self.spec.groups[group].parent if self.spec is not None else None
        shape = [self.widths[name] for name in (parent, group) if name is not None]
        counts = np.zeros(shape, dtype=np.intp)
        for s, assigned in enumerate(self.assignments[group]):
            if parent is None:
                counts[np.unique(assigned[assigned >= 0])] += 1
            else:
                members = self.assignments[parent][s]
                counts[members[members >= 0, None], assigned[members >= 0]] += 1
        return counts

    def summary(self) -> list[dict[str, Any]]:
        """A row for each group: its local widths, its width, and how many clients share neurons.

        shared: at place k, the neurons that k + 1 clients own.
        """
        rows = []
        for group, width in self.widths.items():
            clients = self.assignments[group]
            local = [assigned.shape[-1] for assigned in clients]
            shared = np.bincount(self.owners(group).flatten(), minlength=len(clients) + 1)[1:]
            rows.append({"group": group, "local": local, "width": width, "shared": shared.tolist()})
        return rows
