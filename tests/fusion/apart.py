"""Models side by side in one network: every neuron of every model in a place of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from nafi.fusion import Networks, check_clients, prepare_networks
from nafi.fusion.merge import finished_network, merged_network
from nafi.graph import Inputs, ModelSpec, Positions


def apart(networks: Networks, shared: Collection[str]) -> list[dict[str, Positions]]:
    """Each model's neurons behind those of the models before; groups in `shared` in one place."""
    count = len(networks.specs)
    placements = []
    for s, spec in enumerate(networks.specs):
        places = {}
        for name, group in spec.groups.items():
            together = name in shared or group.parent is not None
            index = torch.arange(group.width) + (0 if together else s * group.width)
            if group.parent is not None:
                index = index.expand(spec.groups[group.parent].width, -1)
            places[name] = Positions(index, group.width * (1 if together else count))
        placements.append(places)
    return placements


def prepared(models: Sequence[nn.Module], inputs: Inputs, spec: ModelSpec) -> Networks:
    """The models as the methods get them."""
    return prepare_networks(check_clients(models, None, None, None), inputs, spec, "attach")


def shared_groups(networks: Networks) -> list[str]:
    """The groups whose width cannot change: all models must share their neurons."""
    fixed = networks.fixed_widths
    return [name for name, g in networks.spec.groups.items() if name in fixed or g.parent in fixed]


def side_by_side(networks: Networks, shared: Collection[str]) -> nn.Module:
    """One network with the neurons of all models, except that those in `shared` are averaged."""
    placements = apart(networks, shared)
    widths = {name: place.width for name, place in placements[0].items()}
    model = merged_network(networks, placements, widths, restore_norm=False)
    return finished_network(networks, placements, widths, model)[0]
