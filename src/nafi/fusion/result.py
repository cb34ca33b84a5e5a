"""What a fusion returns.

Promises: one model, ready to run, and where every client's neurons went in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from nafi.fusion.statistics import LayerFit
from nafi.graph import ModelSpec
from nafi.matching import Index, Matching


@dataclass(frozen=True, eq=False)
class FusionResult:
    """One model made of several.

    model: ready to run, in eval mode
    widths: group -> neurons of the fused model; empty for methods that look at no groups
    spec: the fused model's groups, where the method looked at them
    architecture: the groups of the clients' architecture at the fused widths; the same as `spec`
        unless batch normalisation was left folded
    assignments: group -> for each client the place of each of its neurons in the fused model,
        (J_s,), or (parent's width, J_s) within each member of a parent
    matchings: group -> what `nafi.match` returned, without the neurons themselves, which are in the
        model; `group[i]` within member i of a parent, with its owners only
    diagnostics: method, options, seconds and whatever else the method reports
    fits: weight -> how well it was refitted; kept: weight -> why it was not, with a probe
    """

    model: nn.Module
    widths: Mapping[str, int] = field(default_factory=dict)
    spec: ModelSpec | None = None
    architecture: ModelSpec | None = None
    assignments: Mapping[str, tuple[Index, ...]] = field(default_factory=dict)
    matchings: Mapping[str, Matching] = field(default_factory=dict)
    diagnostics: Mapping[str, Any] = field(default_factory=dict)
    fits: Mapping[str, LayerFit] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)

    def owners(self, group: str) -> Index:
        """(J,) how many clients own each fused neuron; (parent's width, J) within a parent."""
        parent = self.spec.groups[group].parent if self.spec is not None else None
        shape = [self.widths[name] for name in (parent, group) if name is not None]
        counts = np.zeros(shape, dtype=np.intp)
        for s, assigned in enumerate(self.assignments[group]):
            if parent is None:
                counts[np.unique(assigned)] += 1
            else:
                counts[self.assignments[parent][s][:, None], assigned] += 1
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
