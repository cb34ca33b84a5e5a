"""Groups of clients matched apart, and then what each group says with the others.

Hides: that a client may be a group of clients. Promises: the posterior of a group, its mean neurons
and how many clients own each, stands for the group; given where neurons go, the fused network is
that of all clients at once. The order in which neurons are compared is another one, so where they
go may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.fusion.clients import Clients
from nafi.fusion.descent import Descent
from nafi.fusion.merge import merge_tensors
from nafi.fusion.method import Alignment
from nafi.fusion.networks import Networks
from nafi.fusion.stored import Spill, StoredModels
from nafi.graph import Inputs, Placement, Positions
from nafi.matching import Index, Owners

# What a client's network, or a group of them, looks like to whoever matches groups.
Match = Callable[[Networks], Descent]


@dataclass(frozen=True, eq=False)
class Summary:
    """What a group of clients says, once their neurons are matched.

    state: the mean over the owners of each tensor, neurons in the group's order
    places: group of neurons -> for each client where its neurons went
    counts: group of neurons -> (J,) how many clients own each
    energies: group of neurons -> squared norms of all clients' neurons, and how many there are
    """

    state: Mapping[str, Tensor]
    places: Mapping[str, Sequence[Index]]
    counts: Mapping[str, Index]
    energies: Mapping[str, tuple[float, int]]

    @property
    def widths(self) -> dict[str, int]:
        return {name: len(counts) for name, counts in self.counts.items()}


def groups_of(networks: Networks, size: int) -> list[list[int]]:
    """The clients in groups of at most so many: neighbours by rank, whatever the caller's order."""
    count = ceil(len(networks.specs) / size)
    return [group.tolist() for group in np.array_split(networks.ranking, count)]


def summarise(networks: Networks, match: Match) -> Summary:
    """Match the clients of one group with each other."""
    descent = match(networks)
    placements, widths = descent.placements, descent.widths
    places = {name: [_index(client[name]) for client in placements] for name in widths}
    counts = {
        name: np.bincount(np.concatenate(index), minlength=widths[name])
        for name, index in places.items()
    }
    state = merge_tensors(networks, placements, restore_norm=False)
    return Summary(state, places, counts, descent.energies)


def align_groups(
    networks: Networks,
    groups: Sequence[Sequence[int]],
    summaries: Iterable[Summary],
    match_summaries: Callable[[Networks, list[dict[str, Owners]], dict[str, float]], Descent],
    noise: Callable[[float, int], float],
) -> Alignment:
    """Where the neurons of all clients go, by way of those of their groups.

    summaries: of each group, taken one at a time; what is kept of them in memory is small
    match_summaries: matches networks whose neurons stand for several clients
    noise: the precision of a column, from energies
    """
    spill, kept = Spill(), list[Summary]()
    for summary in summaries:
        spill.add(summary.state)
        kept.append(replace(summary, state={}))
    owners = [
        {name: Owners(counts, len(members)) for name, counts in summary.counts.items()}
        for summary, members in zip(kept, groups, strict=True)
    ]
    noises = {
        name: noise(
            sum(summary.energies[name][0] for summary in kept),
            sum(summary.energies[name][1] for summary in kept),
        )
        for name in kept[0].energies
    }
    descent = match_summaries(_of_summaries(networks, groups, kept, spill), owners, noises)
    return _composed(descent, groups, kept)


def check_tree(networks: Networks) -> None:
    """Refuse networks whose clients cannot be stood for by a mean and counts."""
    spec = networks.spec
    if networks.probe is not None:
        raise InputError("tree: groups are matched by their weights alone; leave the probe out")
    if networks.bases.freedoms or any(group.parent is not None for group in spec.groups.values()):
        raise InputError("tree: attention heads and turned bases are matched all at once")
    if networks.clients.input_moments is not None:
        raise InputError("tree: input_moments are not known of groups of models; leave them out")


def _of_summaries(
    networks: Networks, groups: Sequence[Sequence[int]], kept: Sequence[Summary], spill: Spill
) -> Networks:
    """The groups as if each were one client."""
    specs = tuple(networks.spec.resized(summary.widths) for summary in kept)
    clients = networks.clients
    means = [
        None
        if counts is None
        else np.stack([counts[list(members)].mean(axis=0) for members in groups])
        for counts in (clients.class_counts, clients.sample_counts)
    ]
    names = tuple(f"group {g}" for g in range(len(groups)))
    stands = Clients(_SummaryModels(spill), names, means[0], means[1])
    return networks.with_clients(stands, specs, spill.states())


class _SummaryModels(StoredModels):
    """The mean networks of groups, which nobody runs."""

    def __init__(self, spill: Spill) -> None:
        self._spill = spill

    def __len__(self) -> int:
        return len(self._spill)

    def tensors(self, index: int) -> Mapping[str, Tensor]:
        return self._spill.read(index)

    def outline(self, index: int) -> Mapping[str, Tensor]:
        return self._spill.read(index)

    def with_inputs(self, example_inputs: Inputs) -> Self:
        return self

    def network(self, index: int) -> nn.Module:
        raise NotImplementedError


def _composed(
    descent: Descent, groups: Sequence[Sequence[int]], kept: Sequence[Summary]
) -> Alignment:
    """Client -> group -> all."""
    found: dict[int, dict[str, Placement]] = {}
    for top, members, summary in zip(descent.placements, groups, kept, strict=True):
        for place, s in enumerate(members):
            found[s] = {
                name: Positions(
                    torch.from_numpy(_index(top[name])[summary.places[name][place]]),
                    top[name].width,
                )
                for name in descent.widths
            }
    placements = [found[s] for s in range(len(found))]
    matchings = {
        name: replace(matching, assignments=tuple(_index(client[name]) for client in placements))
        for name, matching in descent.matchings.items()
    }
    return Alignment(placements, descent.widths, matchings)


def _index(place: Placement) -> Index:
    assert isinstance(place, Positions)
    return np.asarray(place.index.numpy())
