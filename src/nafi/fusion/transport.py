"""ot: optimal-transport fusion (Singh and Jaggi, 2020).

Hides: POT. Promises: every model's neurons transported to those of one, group by group from the
inputs on, by exact transport between uniform masses; then the plain mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from scipy.spatial.distance import cdist

from nafi.errors import InputError, NafiError
from nafi.fusion.clients import Array, Clients
from nafi.fusion.descent import next_group
from nafi.fusion.heads import comparable
from nafi.fusion.method import AligningMethod, Alignment, Progress, main_places
from nafi.fusion.networks import Networks
from nafi.graph import Inputs, ModelSpec, Placement, Placements, Positions, Role, Shares
from nafi.options import SWITCH, one_of, option, optional, whole

METRICS = ("euclidean", "sqeuclidean", "cosine")
_OWN = (Role.INCOMING, Role.BIAS)


Solver = Callable[[Array], Array]


@dataclass(frozen=True, kw_only=True)
class Transport(AligningMethod):
    """Optimal transport of all models to one of them, then the mean (Singh and Jaggi, 2020).

    reference: the model that all others are aligned to, whose widths are those of the result; by
        default one that depends neither on the order of the models nor on that of their neurons
    metric: the ground cost between neurons' incoming weights: euclidean, sqeuclidean or cosine
    """

    name: ClassVar[str] = "ot"

    reference: int | None = option(optional(whole(0)), None)
    metric: str = option(one_of(METRICS), "euclidean")
    restore_norm: bool = option(SWITCH, False)

    def check_available(self) -> None:
        exact_transport()

    def prepare(self, clients: Clients, example_inputs: Inputs, spec: ModelSpec | None) -> Networks:
        self.check_available()
        if self.reference is not None:
            whole(0, len(clients) - 1).check(self.reference, "reference")
        networks = super().prepare(clients, example_inputs, spec)
        _check_rigid(networks)
        return networks

    def align(self, networks: Networks, progress: Progress) -> Alignment:
        centre = networks.ranking[0] if self.reference is None else self.reference
        placements = align_to_one(networks, centre, self.metric, exact_transport(), progress)
        return Alignment(placements, networks.specs[centre].widths)


def align_to_one(
    networks: Networks, reference: int, metric: str, solver: Solver, progress: Progress
) -> list[dict[str, Placement]]:
    """Where every client's neurons go among those of one client, group by group from the inputs.

    solver: (J, I) costs -> (J, I) plan
    """
    whole(0, len(networks.specs) - 1).check(reference, "reference")
    placements: list[dict[str, Placement]] = [{} for _ in networks.specs]
    total = len(networks.spec.groups)
    while len(placements[0]) < total:
        group = next_group(networks, "bottom-up", list(placements[0]))
        progress(group, len(placements[0]), total)
        inside = networks.spec.children(group)
        for name in [group, *inside]:
            destinations = _transported(networks, placements, name, reference, metric, solver)
            for client, place in zip(placements, destinations, strict=True):
                client[name] = place
    progress("merging", total, total)
    return placements


def _transported(
    networks: Networks,
    placements: Sequence[Placements],
    group: str,
    reference: int,
    metric: str,
    solver: Solver,
) -> list[Placement]:
    """Where one group's neurons go in each client."""
    table = comparable(networks, group, placements, roles=_OWN)
    width = networks.specs[reference].groups[group].width
    parent = networks.spec.groups[group].parent
    if parent is None:
        return [
            _placement(_plan(neurons, table.neurons[reference], metric, solver), width)
            for neurons in table.neurons
        ]
    destinations: list[Placement] = []
    for s, neurons in enumerate(table.neurons):
        # Every member goes to one of the reference, and what is within it with it.
        partners = main_places(placements[s][parent])
        plans = [
            _plan(rows, table.neurons[reference][partner], metric, solver)
            for rows, partner in zip(neurons, partners, strict=True)
        ]
        destinations.append(Positions(torch.from_numpy(np.stack(plans)).argmax(dim=2), width))
    return destinations


def _plan(rows: Array, others: Array, metric: str, solver: Solver) -> Array:
    # The cosine of a neuron of zeros is not a number.
    return solver(np.nan_to_num(cdist(rows, others, metric)))


def _placement(plan: Array, width: int) -> Placement:
    mass = torch.from_numpy(plan)
    if len(plan) == width:  # then an exact plan is a permutation
        return Positions(mass.argmax(dim=1), width)
    return Shares(mass)


def _check_rigid(networks: Networks) -> None:
    """Masses can be shared out among any number of neurons, but not where a norm counts them."""
    spec = networks.spec
    parents = {group.parent for group in spec.groups.values()}
    for name, group in spec.groups.items():
        local = networks.local_widths(name)
        if len(set(local)) > 1 and (group.rigid or group.parent or name in parents):
            raise InputError(
                f"group {name} has widths {sorted(set(local))} in different models; ot needs equal "
                "widths where neurons are counted or held by others"
            )


def exact_transport() -> Solver:
    """Exact transport between uniform masses."""
    try:
        from ot import emd
    except ImportError:
        raise NafiError(
            "method ot needs the POT package: pip install 'nafi[ot]' (or pip install POT)"
        ) from None

    def solve(cost: Array) -> Array:
        source, target = (np.full(n, 1 / n) for n in cost.shape)
        return np.asarray(emd(source, target, cost))

    return solve
