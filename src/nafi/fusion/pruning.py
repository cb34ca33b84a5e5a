"""Pruning: of a network that was fused wider than it may be, the neurons that matter most.

Hides: how neurons are given up, and where that leaves the clients' neurons. Promises: what is left
is fitted anew to what it computed among the others, and has an alignment of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from nafi.fusion.merge import merge_tensors
from nafi.fusion.method import Alignment, Progress
from nafi.fusion.networks import Networks
from nafi.fusion.refit import Refit, refit
from nafi.fusion.selection import neuron_orders
from nafi.graph import Kept, Placement, Positions, Thinned

# Group -> what is lost with so many of its neurons; group -> how many to keep.
Widths = Callable[[Mapping[str, Sequence[float]]], Mapping[str, int]]


def prune(
    networks: Networks,
    alignment: Alignment,
    model: nn.Module,
    widths: Widths,
    progress: Progress,
) -> tuple[Alignment, nn.Module, Refit] | None:
    """The fused network with the neurons that the layers above would miss most; None if all stay.

    networks: with a probe; model: merged and refitted, its normalisation folded as theirs is

    Cost: that of a refit and of `neuron_orders`, about the cube of the columns that the widest
    layer reads.
    """
    assert networks.probe is not None
    spec = networks.spec.resized(alignment.widths)
    orders = neuron_orders(model, spec, networks.probe, networks.prunable)
    chosen = widths({name: order.lost for name, order in orders.items()})
    kept = {
        name: Kept(order.order[: chosen[name]].sort().values)
        for name, order in orders.items()
        if chosen[name] < spec.groups[name].width
    }
    if not kept:
        return None
    left = {**alignment.widths, **{name: place.width for name, place in kept.items()}}
    fused = networks.fused(model, alignment.widths)
    pruned = networks.build(merge_tensors(fused, [kept], restore_norm=False), left)
    refitted = refit(fused, [kept], pruned, lambda step, *at: progress(f"pruned, {step}", *at))
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
