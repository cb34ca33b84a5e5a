"""Pruning: of a network that was fused wider than it may be, the neurons that matter most.

Hides: how neurons are given up, and what becomes of those who went there. Promises: what is left is
fitted anew to what it computed among the others, and has an alignment of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from torch import nn

from nafi.fusion.merge import merge_tensors
from nafi.fusion.method import Alignment, Progress
from nafi.fusion.networks import Networks
from nafi.fusion.refit import Refit, refit
from nafi.fusion.selection import neuron_orders, ordered_groups
from nafi.graph import Freedom, Kept, Placement, Positions, Thinned

# Group -> what is lost with so many of its neurons; group -> how many to keep.
Widths = Callable[[Mapping[str, Sequence[float]]], Mapping[str, int]]


def prunable(networks: Networks) -> set[str]:
    """The groups that have an order of neurons, a width that can change, and a layer that reads.

    Cost: one run of a network on two inputs.
    """
    fixed, spec = networks.fixed_widths, networks.spec
    names = {
        name
        for name, group in spec.groups.items()
        if group.parent is None and name not in fixed and networks.freedom(name) is Freedom.ORDER
    }
    assert networks.architecture.example_inputs is not None
    found = ordered_groups(networks.template, spec, networks.architecture.example_inputs, names)
    for tie in networks.tied_widths:  # widths that agree change together or not at all
        if not found.issuperset(tie):
            found -= set(tie)
    return found


def prune(
    networks: Networks,
    alignment: Alignment,
    model: nn.Module,
    names: Collection[str],
    widths: Widths,
    progress: Progress,
) -> tuple[Alignment, nn.Module, Refit]:
    """The fused network with the neurons of some groups that the layers above would miss most.

    networks: with a probe; model: merged and refitted, its normalisation folded as theirs is

    Cost: that of a refit and of `neuron_orders`, about the cube of the columns that the widest
    layer reads.
    """
    assert networks.probe is not None
    spec = networks.spec.resized(alignment.widths)
    orders = neuron_orders(model, spec, networks.probe, names)
    chosen = widths({name: order.lost for name, order in orders.items()})
    kept = {
        name: Kept(order.order[: chosen[name]].sort().values)
        for name, order in orders.items()
        if chosen[name] < spec.groups[name].width
    }
    left = {**alignment.widths, **{name: place.width for name, place in kept.items()}}
    fused = networks.fused(model, alignment.widths)
    pruned = networks.build(merge_tensors(fused, [kept], restore_norm=False), left)
    refitted = refit(fused, [kept], pruned, progress)
    placements = [
        {name: _thinned(place, kept.get(name)) for name, place in of_client.items()}
        for of_client in alignment.placements
    ]
    return replace(alignment, placements=placements, widths=left), pruned, refitted


def _thinned(place: Placement, kept: Kept | None) -> Placement:
    if kept is None:
        return place
    assert isinstance(place, Positions)
    return Thinned(place, kept)
