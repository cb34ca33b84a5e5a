"""nafi and pfnm: neurons matched by the Beta-Bernoulli process, group by group.

Hides: how options become a matching of every group. Promises: one descent for both methods and for
both directions; they differ in the penalty and in the order of the groups alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import ClassVar, Self, TypeVar

from torch import Tensor, nn

from nafi.errors import InputError
from nafi.fusion.budget import BUDGET, read_budget
from nafi.fusion.clients import Clients
from nafi.fusion.cluster import Run, connected, run_on
from nafi.fusion.descent import Descent, MatchingOptions
from nafi.fusion.features import Moments
from nafi.fusion.learned_bases import learn_bases
from nafi.fusion.method import AligningMethod, Alignment, Progress
from nafi.fusion.moments import check_moments
from nafi.fusion.networks import Networks, check_clip
from nafi.fusion.pruning import prune
from nafi.fusion.refit import Refit
from nafi.fusion.result import FusionResult
from nafi.fusion.screen import Screen
from nafi.fusion.tree import (
    Places,
    Summary,
    align_clients,
    check_tree,
    groups_of,
    join_groups,
    match_groups,
    summarise,
)
from nafi.fusion.widths import (
    MAX_WIDTH,
    MaxWidth,
    check_budget,
    fitted_widths,
    largest_factor,
    width_limits,
)
from nafi.graph import Inputs, ModelSpec, tied_limits
from nafi.matching import DIVERGENCES, Matching, Owners
from nafi.options import Constraint, number, one_of, one_or_several, option, optional, whole

DIRECTIONS = ("bottom-up", "top-down")
LEARNED = "learned"
BASES = ("rotated", LEARNED, "ordered")
_NEEDS_PROBE = f"bases: {LEARNED!r} needs a probe, the inputs to learn them on: probe="
_PRUNING_NEEDS_PROBE = "prune_from: which neurons matter is measured on a probe: probe=, or --probe"
ADDRESS = Constraint(
    lambda value: isinstance(value, str) and bool(value), '"local" or the address of a Ray cluster'
)
# Where nothing else says how wide the fused network is to be.
PENALTY = 0.4
# How many times as wide a network is before it is pruned to a budget.
PRUNE_FROM = 2.0

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class Bayesian(MatchingOptions, AligningMethod):
    """What nafi and pfnm share.

    direction: "bottom-up", or "top-down" as in the public PFNM code
    max_width: most neurons of a group: a whole number, a float as a factor of the local width, or
        either by group name. With a probe, as many are kept apart as differ, up to this
    budget: instead, for the whole network: "2.0 params" or "2.0 flops", times one client's, or a
        size such as "300 kB". With a probe, each layer is pruned to the width at which least is
        lost; without one, or without a refit, all widths grow by the largest factor that fits. A
        list needs validate=
    bases: where nothing acts on neurons one by one, as in the residual stream of a transformer and
        within its heads, there are bases instead of neurons: "rotated" turns those of all models
        into a common one; "learned" then goes on turning them on the probe, until the mean of all
        weights says what the ensemble says, and leaves norms as they are; "ordered" only looks for
        an order
    prune_from: with a probe, match up to so many times as wide as the limit, then keep the neurons
        that the layers above would miss most. None means 2 with a budget and 1 with max_width; at
        1 nothing is pruned
    match_by: with a probe, "responses" to it, or "weights" as without one
    tree: match groups of at most so many models first, then their posteriors, in which a neuron of
        n models counts for n, and then place every model among what was found. For thousands of
        models: groups can be worked on side by side. By weights, without a probe
    ray: work on the groups of a tree, or run models on a probe, on Ray: "local" for the processors
        of this machine, or the address of a cluster whose nodes see the same files
    clip, trim: against models that may be harmful. Neurons longer than `clip` times the median of
        their layer are shortened; every number is the mean over the models that own it without the
        share `trim` of them at either end, and neurons of fewer models are not read. 2.0 and 0.2,
        with a max_width of 1.5, are a start
    """

    uses: ClassVar[frozenset[str]] = frozenset(
        {"class_counts", "sample_counts", "input_moments", "probe"}
    )

    of_probe: ClassVar[tuple[str, ...]] = (*AligningMethod.of_probe, "match_by", "prune_from")
    streams: ClassVar[bool] = True
    lists: ClassVar[tuple[str, ...]] = ("budget",)

    direction: str = option(one_of(DIRECTIONS), "bottom-up")
    max_width: MaxWidth = option(MAX_WIDTH, None)
    budget: str | float | Sequence[str | float] | None = option(one_or_several(BUDGET), None)
    prune_from: float | None = option(optional(number(at_least=1)), None)
    match_by: str = option(one_of(("responses", "weights")), "responses")
    bases: str = option(one_of(BASES), "rotated")
    tree: int | None = option(optional(whole(2)), None)
    ray: str | None = option(optional(ADDRESS), None)
    clip: float | None = option(optional(number(above=0)), None)
    trim: float = option(number(at_least=0, below=0.5), 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is not None and self.max_width is not None:
            raise InputError("give max_width or budget, not both: each says how wide")
        if (self.prune_from or 1) > 1:
            if self.budget is None and self.max_width is None:
                raise InputError("prune_from: give max_width or budget, the limit to prune to")
            if self.bases == LEARNED or not self.refit:
                raise InputError(
                    "prune_from: what is left is refitted, which changes bases that were learnt; "
                    "leave out bases='learned' and refit=False, or prune_from"
                )
        check_clip(self.screen, self.batchnorm)

    @property
    def screen(self) -> Screen:
        return Screen(self.clip, self.trim)

    @property
    def restores_norm(self) -> bool:
        return self.restore_norm and self.bases != LEARNED

    def check_uses(self, **known: object) -> None:
        super().check_uses(**known)
        if self.bases == LEARNED and known.get("probe") is None:
            raise InputError(_NEEDS_PROBE)
        if (self.prune_from or 1) > 1 and known.get("probe") is None:
            raise InputError(_PRUNING_NEEDS_PROBE)
        if self.ray is not None and self.tree is None and known.get("probe") is None:
            raise InputError(
                "ray: what can be done side by side is the groups of a tree, and what models do on "
                "a probe; give tree or a probe"
            )

    def with_probe(self, prepared: Networks, probe: Inputs, by_input: Tensor | None) -> Networks:
        return replace(super().with_probe(prepared, probe, by_input), run=self.run)

    def prepare(self, clients: Clients, example_inputs: Inputs, spec: ModelSpec | None) -> Networks:
        networks = super().prepare(clients, example_inputs, spec)
        networks.clients.check_classes(networks.spec)
        check_moments(networks)
        if self.bases != "ordered" and not networks.batchnorm.merges_unfolded:
            networks = networks.in_canonical_bases()
        return networks.screened(self.screen)

    def align(self, networks: Networks, progress: Progress) -> Alignment:
        if self.bases == LEARNED and networks.probe is None:
            raise InputError(_NEEDS_PROBE)
        if (self.prune_from or 1) > 1 and networks.probe is None:
            raise InputError(_PRUNING_NEEDS_PROBE)
        if self.tree is not None and self.tree < len(networks.specs):
            return self._align_tree(networks, self.tree, progress)
        descent = self.descent(networks, moments=check_moments(networks))
        descent.run(self.direction, progress)
        if self.bases == LEARNED:
            return learn_bases(networks, descent.alignment, progress, self.seed)
        return descent.alignment

    def fuse(self, prepared: Networks, progress: Progress) -> FusionResult:
        with connected(self.ray):
            return super().fuse(prepared, progress)

    @property
    def run(self) -> Run:
        return run_on(self.ray)

    def _align_tree(self, networks: Networks, size: int, progress: Progress) -> Alignment:
        """Where neurons go, by groups of clients."""
        check_tree(networks)
        groups = groups_of(networks, size)
        limits, steps = self.matched_limits(networks), 2 * len(groups) + 1
        work = _Work(self, networks, limits)

        def match_summaries(
            stands: Networks, owners: list[dict[str, Owners]], noises: dict[str, float]
        ) -> Descent:
            progress("all groups", len(groups), steps)
            descent = replace(
                self.descent(stands, limits=limits),
                owners=owners,
                noises=noises,
                keeps_neurons=True,
            )
            return self._steps(descent)

        summaries = self.run(_summarise, work, groups)
        told = _telling(summaries, progress, "group", 0, len(groups), steps)
        top = match_groups(networks, groups, told, match_summaries, self.noise)
        known = replace(work, noises=top.noises, known=top.matchings)
        joined = self.run(_join, known, groups)
        told_again = _telling(
            joined, progress, "models of group", len(groups) + 1, len(groups), steps
        )
        return align_clients(networks, groups, told_again, top.matchings)

    def _steps(self, descent: Descent) -> Descent:
        """All steps; widths that must agree do so at the end of a tree, when clients are placed."""
        for group in descent.steps(self.direction):
            descent.step(group)
        return descent

    def descent(
        self,
        networks: Networks,
        *,
        limits: Mapping[str, int] | None = None,
        moments: Moments | None = None,
        matched: Collection[str] = (),
    ) -> Descent:
        """The loop over groups, to be run whole or a step at a time.

        limits: group -> most neurons, instead of those of `max_width`
        matched: groups that are in the same order in all networks already
        """
        limits = self.matched_limits(networks) if limits is None else limits
        match_by = "weights" if networks.probe is None else self.match_by
        options = self.for_networks(networks)
        return Descent(networks, options, limits, moments or {}, matched, match_by)

    def matched_limits(self, networks: Networks) -> dict[str, int]:
        """Group -> most neurons that are kept apart, some of which may be pruned."""
        limits, wider = self.limits(networks), self.oversize(networks)
        if wider > 1:
            for name in networks.prunable:
                limits[name] = min(round(wider * limits[name]), sum(networks.local_widths(name)))
            for tie in networks.tied_widths:
                limits |= tied_limits(tie, limits)
        return limits

    def limits(self, networks: Networks) -> dict[str, int]:
        """Group -> most neurons by one factor for all: without pruning, of the fused network."""
        if self.budget is None:
            return width_limits(networks, self.max_width)
        budget = read_budget(self.budget)
        check_budget(networks, budget, networks.prunable if self.oversize(networks) > 1 else None)
        return width_limits(networks, largest_factor(networks, budget))

    def oversize(self, networks: Networks) -> float:
        """How many times as wide as its limit a network is matched; above 1, it is pruned then."""
        return 1.0 if networks.probe is None else self._oversize_with_probe

    @property
    def _oversize_with_probe(self) -> float:
        if not self.refit or self.bases == LEARNED:
            return 1.0
        usual = 1.0 if self.budget is None else PRUNE_FROM
        return usual if self.prune_from is None else self.prune_from

    def misses_probe(self, prepared: Networks) -> bool:
        prunes = self._oversize_with_probe > 1 and not self._refused_refit()
        return super().misses_probe(prepared) or prunes

    def pruned(
        self, networks: Networks, alignment: Alignment, model: nn.Module, progress: Progress
    ) -> tuple[Alignment, nn.Module, Refit] | None:
        if self.oversize(networks) == 1:
            return None
        progress("pruning", 0, 1)

        def widths(lost: Mapping[str, Sequence[float]]) -> Mapping[str, int]:
            if self.budget is not None:
                return fitted_widths(networks, alignment.widths, lost, read_budget(self.budget))
            limits = self.limits(networks)
            return {name: min(limits[name], alignment.widths[name]) for name in lost}

        return prune(networks, alignment, model, widths, progress)

    def for_networks(self, networks: Networks) -> Self:
        """With what was left open said, now that it is known what there is to work with."""
        return self


@dataclass(frozen=True)
class _Work:
    """What the groups of a tree have in common.

    noises, known: the precision of a column and what all groups have found, by group of neurons
    """

    method: Bayesian
    networks: Networks
    limits: Mapping[str, int]
    noises: Mapping[str, float] = field(default_factory=dict)
    known: Mapping[str, Matching] = field(default_factory=dict)


def _summarise(work: _Work, members: Sequence[int]) -> Summary:
    """What one group of clients says; here, or on a worker of a cluster."""

    def match_group(group: Networks) -> Descent:
        return work.method._steps(work.method.descent(group, limits=work.limits))

    return summarise(work.networks.group(members), match_group)


def _join(work: _Work, members: Sequence[int]) -> Places:
    """Where the clients of one group go; here, or on a worker of a cluster."""
    descent = work.method.descent(work.networks.part(members), limits=work.limits)
    return join_groups(replace(descent, noises=work.noises), work.known)


def _telling(
    found: Iterator[_Item], progress: Progress, what: str, before: int, count: int, steps: int
) -> Iterator[_Item]:
    """What was found, saying before each which comes next."""
    for done in range(count):
        progress(f"{what} {done + 1} of {count}", before + done, steps)
        yield next(found)


@dataclass(frozen=True, kw_only=True)
class Pfnm(Bayesian):
    """Bayesian matching without a penalty (Yurochkin et al., 2019)."""

    name: ClassVar[str] = "pfnm"

    @property
    def cost(self) -> tuple[float, str]:
        return 0.0, "kl"


@dataclass(frozen=True, kw_only=True)
class Nafi(Bayesian):
    """Bayesian matching with a penalty on how far a match moves a neuron: the paper's method.

    penalty: lam, more means fewer neurons; None for 0.4, and for 0 where a probe is given and
        max_width or budget says how wide: what the limit allows is then made use of. A list needs
        validate= of `nafi.fuse`; the best is kept and `diagnostics["scores"]` has all
    divergence: kl, reverse_kl, jeffreys, hellinger or wasserstein2
    """

    name: ClassVar[str] = "nafi"
    lists: ClassVar[tuple[str, ...]] = ("penalty", "budget")

    penalty: float | Sequence[float] | None = option(
        optional(one_or_several(number(at_least=0))), None
    )
    divergence: str = option(one_of(DIVERGENCES), "kl")

    @property
    def cost(self) -> tuple[float, str]:
        if self.penalty is None:
            return PENALTY, self.divergence
        (one,) = self.variants()
        assert isinstance(one.penalty, Real)
        return float(one.penalty), self.divergence

    def for_networks(self, networks: Networks) -> Self:
        limited = self.max_width is not None or self.budget is not None
        if self.penalty is None and limited and networks.probe is not None:
            return replace(self, penalty=0.0)
        return self
