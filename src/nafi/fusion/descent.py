"""Group after group: the loop that nafi and pfnm share, whole or one step at a time.

Hides: the scale of each group and the order of the groups. Promises: what is matched already
orders the columns of what comes next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from nafi.fusion.clients import Array
from nafi.fusion.features import Moments, NeuronTable, known_share
from nafi.fusion.heads import comparable
from nafi.fusion.method import Alignment, Progress
from nafi.fusion.networks import Networks
from nafi.fusion.responses import response_table
from nafi.fusion.rotation import circuit_table, common_bases
from nafi.graph import Freedom, ModelSpec, Placement, Positions, equal_widths
from nafi.matching import POPULARITY, Index, Matching, Owners, Streamed, match, place
from nafi.options import Options, number, one_of, option, optional, whole

# The spread of the penalty is counted for so many columns, those of the paper's first layer. It
# grows with the columns, though neurons are no further apart: without this, layers with many inputs
# would merge everything and those with few nothing.
PENALTY_COLUMNS = 800
# How much more evidence a neuron is given, one after the other, until a limit of width is reached.
FILLING = (10.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class MatchingOptions(Options, ABC):
    """How the neurons of one group are matched; see `nafi.match`.

    evidence: what a neuron of mean size is worth, its squared norm over the noise variance; the
        noise of each group is scaled to that, and the penalty's spread is counted for the same
        number of columns, so that neither the size of the weights nor their number matters. More
        evidence means more neurons, closer to keeping all
    prior_ratio: prior variance over noise variance
    noise_precision, prior_precision: absolute 1/variances instead, the same for every group; the
        penalty is then that of the paper
    mass: gamma, the readiness to open new neurons
    sweeps, compat, seed: as in `nafi.match`
    """

    evidence: float = option(number(above=0), 150.0)
    prior_ratio: float = option(number(above=0), 1.0)
    noise_precision: float | None = option(optional(number(above=0)), None)
    prior_precision: float | None = option(optional(number(above=0)), None)
    mass: float = option(number(above=0), 1.0)
    sweeps: int = option(whole(0), 10)
    compat: str = option(one_of(POPULARITY), "paper")
    seed: int = option(whole(0), 0)

    @property
    @abstractmethod
    def cost(self) -> tuple[float, str]:
        """The penalty of a match and the divergence that it is for."""

    def match(self, table: NeuronTable, limit: int, noise: float) -> Matching:
        """Match the rows of a table; noise: the precision of a column of weight 1."""
        prior = noise / self.prior_ratio if self.prior_precision is None else self.prior_precision
        penalty, divergence = self.cost
        return match(
            table.neurons,
            precisions=_scaled(table, noise),
            owners=table.owners,
            prior_precision=prior,
            mass=self.mass,
            penalty=penalty,
            dimension=self._columns,
            divergence=divergence,
            sweeps=self.sweeps,
            max_width=limit,
            compat=self.compat,
            seed=self.seed,
        )

    def place(self, table: NeuronTable, known: Matching, noise: float) -> list[Index]:
        """Where the rows of a table go among neurons that stay as they are."""
        penalty, divergence = self.cost
        return place(
            table.neurons,
            known,
            precisions=_scaled(table, noise),
            penalty=penalty,
            dimension=self._columns,
            divergence=divergence,
            compat=self.compat,
        )

    @property
    def _columns(self) -> int | None:
        """For how many columns the spread of the penalty is counted; None for all."""
        return PENALTY_COLUMNS if self.noise_precision is None else None

    def noise(self, total: float, count: int) -> float:
        """The precision of a column of weight 1; total, count: the `energy` of all neurons."""
        if self.noise_precision is not None:
            return self.noise_precision
        return self.evidence * count / total if total > 0 else 1.0


@dataclass
class Descent:
    """Where the neurons of every client go, as far as groups are matched.

    matched: groups that are in the same order in all clients to begin with
    match_by: "weights", or "responses" on the networks' probe
    owners, noises: for networks that stand for groups of clients: how many each neuron stands for,
        by client and group, and the precision of a column by group
    keeps_neurons: whether `matchings` keep what global neurons are
    energies: group -> squared norms of all neurons and how many there are, of what is matched
    """

    networks: Networks
    options: MatchingOptions
    limits: Mapping[str, int]
    moments: Moments = field(default_factory=dict)
    matched: Collection[str] = ()
    match_by: str = "weights"
    owners: Sequence[Mapping[str, Owners]] | None = None
    noises: Mapping[str, float] = field(default_factory=dict)
    keeps_neurons: bool = False
    energies: dict[str, tuple[float, int]] = field(default_factory=dict)
    placements: list[dict[str, Placement]] = field(default_factory=list)
    matchings: dict[str, Matching] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.placements = [in_place(spec, self.matched) for spec in self.networks.specs]

    @property
    def alignment(self) -> Alignment:
        """Where the neurons of all matched groups went."""
        return Alignment(self.placements, self.widths, self.matchings)

    @property
    def widths(self) -> dict[str, int]:
        """The global width of every matched group."""
        names = self.networks.spec.groups
        return {n: self.placements[0][n].width for n in names if n in self.placements[0]}

    def join(self, known: Mapping[str, Matching]) -> None:
        """Place neurons among those that are known, group after group."""
        for group, matching in known.items():
            table = self._table(group)
            places = self.options.place(table, matching, self._noise(group, table))
            self._place(group, places, matching.width)

    def run(self, direction: str, progress: Progress) -> None:
        """Match all groups that are left, and make widths agree that must."""
        total = len(self.networks.spec.groups)
        for group in self.steps(direction):
            progress(group, len(self.placements[0]), total)
            self.step(group)
        equalise(self.networks, self.placements)
        progress("merging", total, total)

    def steps(self, direction: str) -> Iterator[str]:
        """Which group to match next, as long as one is left."""
        while len(self.placements[0]) < len(self.networks.spec.groups):
            yield next_group(self.networks, direction, list(self.placements[0]))

    def step(self, group: str) -> None:
        """Match one group, and those within it."""
        spec = self.networks.spec
        inside = spec.children(group)
        if self.networks.freedom(group) is not Freedom.ORDER:
            self._rotate(group)
        elif spec.groups[group].parent is not None:
            self._match_within(group)
        else:
            table = self._table(group)
            matching = self._match(table, self.limits[group], self._noise(group, table))
            self.matchings[group] = matching if self.keeps_neurons else matching.without_neurons()
            self._place(group, matching.assignments, matching.width)
        for name in inside:
            self.step(name)

    def _noise(self, group: str, table: NeuronTable) -> float:
        """The precision of a column of weight 1."""
        if group in self.noises:
            return self.noises[group]
        if self.options.noise_precision is None:
            self.energies[group] = energy(table)
        return self.options.noise(*self.energies.get(group, (0.0, 0)))

    def _table(self, group: str) -> NeuronTable:
        """What the neurons of a group are compared by."""
        circuits = circuit_table(self.networks, group, self.placements)
        if circuits is not None:
            return circuits
        table = response_table(self.networks, group) if self.match_by == "responses" else None
        table = table or comparable(self.networks, group, self.placements, self.moments)
        if self.owners is None:
            return table
        return replace(table, owners=[client[group] for client in self.owners])

    def _match(self, table: NeuronTable, limit: int, noise: float) -> Matching:
        """Match in the order of the ranking, and answer in that of the clients."""
        ranking = self.networks.ranking
        ranked = table.ranked(ranking)
        matching = self.options.match(ranked, limit, noise)
        if self.match_by == "responses" and limit < sum(map(len, table.neurons)):
            # A refit makes good use of every neuron that it may have.
            for factor in FILLING:
                if matching.width < limit:
                    matching = self.options.match(ranked, limit, noise * factor)
        by_client = dict(zip(ranking, matching.assignments, strict=True))
        return replace(matching, assignments=tuple(by_client[s] for s in range(len(ranking))))

    def _rotate(self, group: str) -> None:
        """Turn the bases of all clients into a common one."""
        parent = self.networks.spec.groups[group].parent
        heads = None
        if parent is not None:
            heads = [self._places(s, parent) for s in range(len(self.placements))]
        rotations = common_bases(
            self.networks, group, self.placements, heads, self.match_by == "responses"
        )
        for placements, rotated in zip(self.placements, rotations, strict=True):
            placements[group] = rotated

    def _match_within(self, group: str) -> None:
        """Match the neurons within each member of the parent, on one scale for all of them."""
        table = self._table(group)
        unit = self._noise(group, table)
        parent = str(self.networks.spec.groups[group].parent)
        widths = self.networks.local_widths(group)
        heads = self.networks.local_widths(parent)
        assigned = [np.zeros(shape, dtype=np.intp) for shape in zip(heads, widths, strict=True)]
        width = 0
        for member, owned in enumerate(self._owners(parent)):
            rows = _within(table, owned, [widths[s] for s, _ in owned])
            matching = self.options.match(rows, self.limits[group], unit)
            self.matchings[f"{group}[{member}]"] = matching.without_neurons()
            for (s, head), places in zip(owned, matching.assignments, strict=True):
                assigned[s][head] = places
            width = max(width, matching.width)
        self._place(group, assigned, width)

    def _owners(self, group: str) -> list[list[tuple[int, int]]]:
        """For each global neuron the clients that have it, by rank, and which of theirs it is."""
        owned: list[list[tuple[int, int]]] = [[] for _ in range(self.placements[0][group].width)]
        for s in self.networks.ranking:
            for local, at in enumerate(self._places(s, group)):
                owned[at].append((s, local))
        return owned

    def _places(self, s: int, group: str) -> list[int]:
        """Where the neurons of one client went."""
        of_client = self.placements[s][group]
        assert isinstance(of_client, Positions)
        places: list[int] = of_client.index.tolist()
        return places

    def _place(self, group: str, assigned: Sequence[Index], width: int) -> None:
        for placements, places in zip(self.placements, assigned, strict=True):
            placements[group] = Positions(torch.from_numpy(places), width)


def equalise(networks: Networks, placements: Sequence[dict[str, Placement]]) -> None:
    """Give groups that are tied widths that agree, in place; places that nobody owns are zero."""
    widths = {name: place.width for name, place in placements[0].items()}
    if widths == networks.spec.widths:
        return  # a client has them, so they agree
    for tie in networks.tied_widths:
        for name, width in equal_widths(tie, widths).items():
            for of_client in placements:
                place = of_client[name]
                assert isinstance(place, Positions)
                of_client[name] = Positions(place.index, width)


def _within(
    table: NeuronTable, owned: Sequence[tuple[int, int]], widths: Sequence[int]
) -> NeuronTable:
    """The neurons within heads that were matched with each other."""

    def read(index: int) -> Array:
        s, head = owned[index]
        neurons: Array = table.neurons[s][head]
        return neurons

    weights = [table.weights[s] for s, _ in owned]
    if isinstance(table.neurons, list):
        return NeuronTable([read(index) for index in range(len(owned))], weights)
    return NeuronTable(Streamed(widths, len(weights[0]), read), weights)


def energy(table: NeuronTable) -> tuple[float, int]:
    """The weighted squared norms of all neurons, and how many there are."""
    total, count = 0.0, 0
    for neurons, weights in zip(table.neurons, table.weights, strict=True):
        total += float((np.square(neurons) @ weights).sum())
        count += neurons[..., 0].size
    return total, count


def _scaled(table: NeuronTable, noise: float) -> list[Array]:
    """The precisions of each client's columns; rows of weights that are one stay one.

    (J_s, D), or (J_s, 1) where columns are alike, for a client whose neurons stand for several.
    """
    if table.owners is None:
        scaled = {id(row): noise * row for row in table.weights}
        return [scaled[id(row)] for row in table.weights]
    return [
        noise * np.asarray(owners.counts, dtype=np.float64)[:, None] * _alike(row)
        for owners, row in zip(table.owners, table.weights, strict=True)
    ]


def _alike(row: Array) -> Array:
    return row[:1] if (row == row[0]).all() else row


def next_group(networks: Networks, direction: str, matched: Sequence[str]) -> str:
    """The group to match next among those without a parent.

    bottom-up: the one of whose own columns most can be compared, the first of these as data flow;
    top-down: the last that is not matched.
    """
    left = [
        name
        for name, group in networks.spec.groups.items()
        if name not in matched and group.parent is None
    ]
    if direction == "top-down":
        return left[-1]
    return max(left, key=lambda name: known_share(networks, name, matched))


def in_place(spec: ModelSpec, groups: Iterable[str]) -> dict[str, Placement]:
    """Every neuron of some groups where it is."""
    places: dict[str, Placement] = {}
    for name in groups:
        width, parent = spec.groups[name].width, spec.groups[name].parent
        index = torch.arange(width)
        if parent is not None:
            index = index.expand(spec.groups[parent].width, width)
        places[name] = Positions(index, width)
    return places
