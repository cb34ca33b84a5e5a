"""ot: optimal-transport fusion (Singh and Jaggi, 2020).

Hides: POT. Promises: every model's neurons transported to those of one, group by group from the
inputs on, by exact transport between uniform masses; then the plain mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.spatial.distance import cdist

from nafi.errors import InputError, NafiError
from nafi.fusion.base import FusionResult, Task, fuser
from nafi.fusion.bayesian import next_group
from nafi.fusion.clients import Array
from nafi.fusion.features import table
from nafi.fusion.heads import places_of_heads
from nafi.fusion.merge import merge
from nafi.fusion.networks import Networks, prepare
from nafi.graph.lift import Placement, Placements, Positions, Shares
from nafi.graph.neurons import Role
from nafi.matching.columns import Index

METRICS = ("euclidean", "sqeuclidean", "cosine")
_OWN = (Role.INCOMING, Role.BIAS)


@fuser("ot", options=["reference", "metric", "restore_norm"])
def ot(
    task: Task, *, reference: int = 0, metric: str = "euclidean", restore_norm: bool = False
) -> FusionResult:
    """Align all models to one by the distance between incoming weights.

    reference: the model that all others are aligned to; its widths are those of the result
    metric: the ground cost between neurons: euclidean, sqeuclidean or cosine
    """
    emd = _solver()
    if not 0 <= reference < len(task.clients):
        raise InputError(f"reference: found {reference}, expected 0 to {len(task.clients) - 1}")
    if metric not in METRICS:
        raise InputError(f"metric: found {metric!r}, expected one of {', '.join(METRICS)}")
    networks = prepare(task.clients, task.example_inputs, task.spec, task.batchnorm).unweighted()
    _check_rigid(networks)
    placements: list[dict[str, Placement]] = [{} for _ in networks.specs]
    total = len(networks.spec.groups)
    while len(placements[0]) < total:
        group = next_group(networks, "bottom-up", list(placements[0]))
        task.progress(group, len(placements[0]), total)
        inside = [n for n, other in networks.spec.groups.items() if other.parent == group]
        found = (
            _transported_heads(networks, placements, group, inside, reference)
            if inside
            else {group: _transported(networks, placements, group, reference, metric, emd)}
        )
        for name, places in found.items():
            for own, place in zip(placements, places, strict=True):
                own[name] = place
    task.progress("merging", total, total)
    state = merge(networks, placements, restore_norm=restore_norm)
    widths = networks.specs[reference].widths
    model, spec, architecture = networks.build(state, widths)
    assignments = {
        name: tuple(_strongest(own[name]) for own in placements) for name in networks.spec.groups
    }
    return FusionResult(model, widths, spec, architecture, assignments)


def _transported(
    networks: Networks,
    placements: Sequence[Placements],
    group: str,
    reference: int,
    metric: str,
    emd: Callable[[Array, Array, Array], Array],
) -> list[Placement]:
    """Where one group's neurons go in each client."""
    given = table(networks, group, placements, roles=_OWN) or table(networks, group, placements)
    places: list[Placement] = []
    width = networks.specs[reference].groups[group].width
    for s, local in enumerate(networks.local_widths(group)):
        if given is None or s == reference:
            places.append(Shares(torch.eye(local, width, dtype=torch.float64)))
            continue
        cost = np.nan_to_num(cdist(given.neurons[s], given.neurons[reference], metric))
        source, target = (np.full(n, 1 / n) for n in cost.shape)
        plan = torch.from_numpy(emd(source, target, cost))
        if local == width:  # then an exact plan is a permutation
            places.append(Positions(plan.argmax(dim=1), width))
        else:
            places.append(Shares(plan))
    return places


def _transported_heads(
    networks: Networks,
    placements: Sequence[Placements],
    group: str,
    inside: list[str],
    reference: int,
) -> dict[str, list[Placement]]:
    """The same for a group that holds others, one to one."""
    own = table(networks, group, placements, roles=_OWN)
    found = {name: table(networks, name, placements) for name in inside}
    known = {name: given for name, given in found.items() if given is not None}
    heads, within = places_of_heads(own, known, reference)
    spec = networks.spec
    result: dict[str, list[Placement]] = {
        group: [Positions(torch.from_numpy(h), spec.groups[group].width) for h in heads]
    }
    for name in inside:
        width = spec.groups[name].width
        kept = np.tile(np.arange(width), (spec.groups[group].width, 1))
        indices = within.get(name, [kept] * len(heads))
        result[name] = [Positions(torch.from_numpy(index), width) for index in indices]
    return result


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


def _strongest(placement: Placement) -> Index:
    """The place that most of each neuron goes to."""
    if isinstance(placement, Shares):
        return np.asarray(placement.plan.argmax(dim=1).numpy())
    assert isinstance(placement, Positions)
    return np.asarray(placement.index.numpy())


def _solver() -> Callable[[Array, Array, Array], Array]:
    try:
        from ot import emd
    except ImportError:
        raise NafiError(
            "method ot needs the POT package: pip install 'nafi[ot]' (or pip install POT)"
        ) from None
    solver: Callable[[Array, Array, Array], Array] = emd
    return solver
