"""stack: clients side by side, each cut down to the neurons that matter most, within a budget.

Hides: how a budget is shared out among clients and layers. Promises: nothing is merged, so nothing
that clients do not share is averaged away; every neuron that is kept is fitted anew to what it
computed, from those that are left below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from nafi.errors import InputError, few
from nafi.fusion.allocation import Part, cut_to
from nafi.fusion.budget import BUDGET, Budget, read_budget
from nafi.fusion.clients import Clients
from nafi.fusion.ensemble import EnsembleNetwork, run_side_by_side, shares_of
from nafi.fusion.merge import finished_network, merge_tensors
from nafi.fusion.method import Method, Progress
from nafi.fusion.networks import Networks, prepare_networks
from nafi.fusion.refit import Refit, refit
from nafi.fusion.result import Body, FusionResult
from nafi.fusion.selection import NeuronOrder, neuron_orders
from nafi.fusion.widths import allowed
from nafi.graph import Inputs, Kept, ModelSpec, Normalisation, copy_network
from nafi.matching import Index
from nafi.options import one_of, one_or_several, option, optional, whole


@dataclass(frozen=True, kw_only=True)
class Stack(Method):
    """Clients side by side in one model, each cut down to fit a budget.

    budget: of the whole model: "1.0 params" or "0.5 flops" for so many times one client's, or a
        size such as "300 kB". Neurons go where the layers above miss them least, and the others
        are refitted on the probe. None keeps clients as they are. A list needs validate=
    keep: how many clients; None for all. A list needs validate= of `nafi.fuse`
    choose: which ones: "best" by the scores of validate=, else by samples, else those with the
        largest weights; or at "random"
    batchnorm: "attach" puts normalisation back after clients were cut down, "fold" leaves it out
    seed: of the random choice
    """

    name: ClassVar[str] = "stack"
    uses: ClassVar[frozenset[str]] = frozenset({"class_counts", "sample_counts", "probe"})

    lists: ClassVar[tuple[str, ...]] = ("budget", "keep")

    budget: str | float | Sequence[str | float] | None = option(one_or_several(BUDGET), None)
    keep: int | Sequence[int] | None = option(one_or_several(optional(whole(1))), None)
    choose: str = option(one_of(("best", "random")), "best")
    batchnorm: str = option(one_of(("attach", "fold")), "attach")
    seed: int = option(whole(0), 0)

    def prepare(self, clients: Clients, example_inputs: Inputs, spec: ModelSpec | None) -> Prepared:
        for variant in self.variants():
            if isinstance(variant.keep, int) and variant.keep > len(clients):
                raise InputError(f"keep: found {variant.keep}, but there are {len(clients)} models")
        networks = prepare_networks(clients, example_inputs, spec, self.batchnorm)
        clients.check_classes(networks.spec)
        return Prepared(networks)

    def misses_probe(self, prepared: Prepared) -> bool:
        """Which neurons to give up for a budget is measured on one."""
        return self.budget is not None

    def informed(self, prepared: Prepared, scores: Sequence[float]) -> Prepared:
        return replace(prepared, scores=tuple(scores))

    def fuse(self, prepared: Prepared, progress: Progress) -> FusionResult:
        networks, chosen = prepared.networks, self._chosen(prepared)
        slim = _slim_bodies(self, prepared, chosen, progress)
        shares = shares_of(networks.clients.only(*chosen))
        network = EnsembleNetwork([body.model for body in slim], *shares).eval()
        assert networks.architecture.example_inputs is not None
        run_side_by_side(network, networks.architecture.example_inputs)
        return _result(network, networks, dict(zip(chosen, slim, strict=True)))

    def _chosen(self, prepared: Prepared) -> list[int]:
        """The clients to keep, in their order."""
        networks = prepared.networks
        count = len(networks.clients) if self.keep is None else self.keep
        assert isinstance(count, int)
        if self.choose == "random":
            order = np.random.default_rng(self.seed).permutation(len(networks.clients)).tolist()
        else:
            worth = prepared.scores or networks.clients.sample_counts
            order = networks.ranking
            if worth is not None:
                order = sorted(order, key=lambda s: -float(worth[s]))
        return sorted(order[:count])


@dataclass(frozen=True, eq=False)
class Prepared:
    """The clients' networks, each for itself; what budgets have in common is found once.

    scores: of each client, the higher the better, if somebody has measured them
    """

    networks: Networks
    probe: Inputs | None = None
    scores: tuple[float, ...] = ()

    @cached_property
    def alone(self) -> list[Networks]:
        with_probe = replace(self.networks, probe=self.probe)
        return [with_probe.only(s) for s in range(len(self.networks.clients))]

    @cached_property
    def orders(self) -> dict[int, dict[str, NeuronOrder]]:
        """Filled as clients are asked for."""
        return {}

    def order(self, index: int) -> dict[str, NeuronOrder]:
        """How much the neurons of one client matter, for the groups whose width can change."""
        if index not in self.orders:
            one, fixed = self.alone[index], self.networks.fixed_widths
            groups = one.spec.groups.items()
            names = [n for n, group in groups if group.parent is None and n not in fixed]
            assert self.probe is not None
            self.orders[index] = neuron_orders(one.template, one.spec, self.probe, names)
        return self.orders[index]


@dataclass(frozen=True, eq=False)
class _Slim:
    """A client's network with some of its neurons.

    kept: group -> the neurons that are left; groups of which all are left are not listed
    """

    model: nn.Module
    spec: ModelSpec
    architecture: ModelSpec
    kept: Mapping[str, Kept]
    refitted: Refit


def _slim_bodies(
    method: Stack, prepared: Prepared, chosen: Sequence[int], progress: Progress
) -> list[_Slim]:
    """The chosen clients, cut down until they fit the budget together."""
    alone = [prepared.alone[s] for s in chosen]
    if method.budget is None:
        return [_whole(one) for one in alone]
    if prepared.probe is None:
        raise InputError(
            "budget: which neurons matter is measured on a probe: give probe=, or leave the budget "
            "out and keep fewer clients (keep=)"
        )
    names = prepared.networks.clients.names
    parts: list[Part] = []
    for s, one in zip(chosen, alone, strict=True):
        progress(f"ordering the neurons of {names[s]}", len(parts), len(chosen))
        lost = {group: order.lost for group, order in prepared.order(s).items()}
        weight = float(prepared.networks.clients.model_weights[s])
        parts.append(Part(one.architecture, lost, weight))
    widths = _within(read_budget(method.budget), parts, prepared)
    slim: list[_Slim] = []
    for s, one, at in zip(chosen, alone, widths, strict=True):
        progress(f"refitting {names[s]}", len(slim), len(chosen))
        slim.append(_cut(one, prepared.order(s), at))
    return slim


def _within(budget: Budget, parts: Sequence[Part], prepared: Prepared) -> list[dict[str, int]]:
    """The widths of each client at which all together keep the budget."""
    networks = prepared.networks
    size, limit = allowed(networks, budget)
    if budget.unit == "bytes":  # what each of them counts is stored, too, in single precision
        classes = networks.clients.class_weights
        limit -= 4 * len(parts) * (1 + (0 if classes is None else classes.shape[1]))
    try:
        return cut_to(limit, parts, size, networks.tied_widths, str(budget))
    except InputError as error:
        fixed = [name for name in networks.spec.groups if name not in parts[0].lost]
        why = f"; the width of {few(fixed)} cannot change" if fixed else ""
        raise InputError(f"{error}{why}") from None


def _whole(one: Networks) -> _Slim:
    """A client as it is; its normalisation as that of the others will be."""
    if one.batchnorm is Normalisation.FOLD:
        model = copy_network(one.template).eval()
        return _Slim(model, one.spec, one.architecture, {}, Refit())
    model = copy_network(one.original).eval()
    return _Slim(model, one.architecture, one.architecture, {}, Refit())


def _cut(one: Networks, orders: Mapping[str, NeuronOrder], widths: Mapping[str, int]) -> _Slim:
    """One client at these widths, its layers refitted from the inputs on."""
    kept = {
        name: Kept(order.order[: widths[name]].sort().values)
        for name, order in orders.items()
        if widths[name] < one.spec.groups[name].width
    }
    if not kept:
        return _whole(one)
    fewer = {name: placement.width for name, placement in kept.items()}
    model = one.build(merge_tensors(one, [kept], restore_norm=False), one.spec.widths | fewer)
    refitted = refit(one, [kept], model, lambda step, done, total: None)
    finished = finished_network(one, [kept], one.spec.widths | fewer, model)
    return _Slim(*finished, kept, refitted)


def _result(network: nn.Module, networks: Networks, slim: Mapping[int, _Slim]) -> FusionResult:
    """What became of every client's neurons; nothing is shared."""
    names = networks.clients.names
    widths: dict[str, int] = {}
    assignments: dict[str, tuple[Index, ...]] = {}
    for group in (g for g, each in networks.spec.groups.items() if each.parent is None):
        start, places = 0, []
        for s in range(len(names)):
            place = np.full(networks.specs[s].groups[group].width, -1, dtype=np.intp)
            if s in slim:
                every = Kept(torch.arange(len(place)))
                index = slim[s].kept.get(group, every).index.numpy()
                place[index] = np.arange(start, start + len(index))
                start += len(index)
            places.append(place)
        widths[group], assignments[group] = start, tuple(places)
    return FusionResult(
        network,
        widths,
        assignments=assignments,
        fits={
            f"{names[s]}: {w}": fit for s, b in slim.items() for w, fit in b.refitted.fits.items()
        },
        kept={
            f"{names[s]}: {w}": why for s, b in slim.items() for w, why in b.refitted.kept.items()
        },
        bodies=tuple(Body(names[s], body.spec, body.architecture) for s, body in slim.items()),
    )
