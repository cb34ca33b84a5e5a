"""Groups of clients matched apart, then what each group says with the others, then every client.

Hides: that a client may be a group of clients. Promises: the posterior of a group, its mean neurons
and how many clients own each, stands for the group. What the groups have found together stays as it
is while every client looks for its place in it: a client is not bound to what its group decided,
and the clients of a group need to know nothing of the others. Given where neurons go, the fused
network is that of all clients at once. The order in which neurons are compared is another one, so
where they go may differ.
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
from nafi.fusion.descent import Descent, equalise
from nafi.fusion.merge import merge_tensors
from nafi.fusion.method import Alignment
from nafi.fusion.networks import Networks
from nafi.fusion.stored import Spill, StoredModels
from nafi.graph import Inputs, Placement, Positions
from nafi.matching import Index, Matching, Owners

# What a client's network, or a group of them, looks like to whoever matches groups.
Match = Callable[[Networks], Descent]
# For each client of a group: group of neurons -> the place of each.
Places = Sequence[Mapping[str, Index]]


@dataclass(frozen=True, eq=False)
class Summary:
    """What a group of clients says, once their neurons are matched.

    state: the mean over the owners of each tensor, neurons in the group's order
    counts: group of neurons -> (J,) how many clients own each
    energies: group of neurons -> squared norms of all clients' neurons, and how many there are
    """

    state: Mapping[str, Tensor]
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
    counts = {
        name: np.bincount(
            np.concatenate([_index(client[name]) for client in placements]), minlength=width
        )
        for name, width in widths.items()
    }
    state = merge_tensors(networks, placements, restore_norm=False)
    return Summary(state, counts, descent.energies)


def match_groups(
    networks: Networks,
    groups: Sequence[Sequence[int]],
    summaries: Iterable[Summary],
    match_summaries: Callable[[Networks, list[dict[str, Owners]], dict[str, float]], Descent],
    noise: Callable[[float, int], float],
) -> Descent:
    """Match what groups say with each other.

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
    return match_summaries(_of_summaries(networks, groups, kept, spill), owners, noises)


def join_groups(descent: Descent, known: Mapping[str, Matching]) -> Places:
    """Where the clients of one group belong among what all groups have found."""
    descent.join(known)
    return [
        {name: _index(place) for name, place in client.items()} for client in descent.placements
    ]


def align_clients(
    networks: Networks,
    groups: Sequence[Sequence[int]],
    found: Iterable[Places],
    known: Mapping[str, Matching],
) -> Alignment:
    """Where the neurons of all clients go; what no client has joined is left out.

    found: for each group what `join_groups` returned
    known: group of neurons -> the matching of all groups
    """
    pairs = zip(groups, found, strict=True)
    of_client = {s: at for members, places in pairs for s, at in zip(members, places, strict=True)}
    placements: list[dict[str, Placement]] = [{} for _ in of_client]
    matchings = {}
    for name, matching in known.items():
        places = [of_client[s][name] for s in range(len(placements))]
        used, numbers = np.unique(np.concatenate(places), return_inverse=True)
        ends = np.cumsum([len(index) for index in places])
        assigned = np.split(numbers, ends[:-1])
        matchings[name] = matching.with_assignments(assigned, len(used))
        for of_one, index in zip(placements, assigned, strict=True):
            of_one[name] = Positions(torch.from_numpy(index), len(used))
    equalise(networks, placements)
    widths = {name: placements[0][name].width for name in networks.spec.groups}
    return Alignment(placements, widths, matchings, groups)


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


def _index(place: Placement) -> Index:
    assert isinstance(place, Positions)
    return np.asarray(place.index.numpy())
