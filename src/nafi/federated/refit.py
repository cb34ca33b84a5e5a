"""Match once, then refit from clients' own data: a light message a layer, and no training.

Hides: the order of the layers, and how each client's network is put into the form of the fused one.
Promises: after the messages every layer is the posterior mean of METHOD's section 6 about its
merged weights, with the deviation of what it was fitted to, as `nafi.fuse` has it from a probe;
here from sums over clients' own inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import ClassVar

import torch
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.federated.architecture import Form, Tensors
from nafi.federated.averaging import MatchThenAverage
from nafi.federated.disk import on_disk
from nafi.federated.kept import networks_of
from nafi.federated.latest import Latest
from nafi.federated.request import Request
from nafi.federated.statistics import OWN, OWNED, probing_inputs, read_errors, read_layer
from nafi.federated.strategies import strategy
from nafi.federated.strategy import State, Task, Update, check_shapes, class_table, tensors_of
from nafi.fusion import (
    RIDGES,
    AligningMethod,
    Bayesian,
    Method,
    Nafi,
    Networks,
    Written,
    add_to_layer,
    bounded_sums,
    check_clients,
    layer_weights,
    merged_network,
    owned_outputs,
    pooled_deviation,
    pooled_fit,
    recurrent_weights,
    refittable,
    sole_writers,
)
from nafi.graph import (
    ModelSpec,
    OutputMoments,
    Placements,
    Positions,
    attach_batchnorm,
    in_order,
    owned,
)
from nafi.options import number, one_of, option, optional

_LAYER = "layer "
# Of a weight that reads what it made itself, as in a recurrent layer: a fit changes what it reads.
_FITS = 3
# Smaller ridges give larger weights, from which training at the usual rate diverges.
_TO_TRAIN_ON = 0.3


@dataclass(frozen=True, eq=False)
class Matched:
    """A client's network while layers are refitted.

    tensors: its own, normalisation folded, where its neurons went in the fused network; bases that
        were turned are turned
    places: group -> where each of its neurons went; of a basis that was turned, all places
    """

    tensors: Tensors
    places: Tensors


@dataclass(frozen=True, eq=False)
class RefitState(State):
    """While layers are refitted, normalisation is folded, and clients' networks are kept.

    outputs: mean and deviation of what layers make whose normalisation is to be put back
    fitted: how many fits are done
    """

    members: Mapping[str, Matched] = field(default_factory=dict)
    outputs: Tensors = field(default_factory=dict)
    fitted: int = 0


@dataclass(frozen=True, eq=False)
class _Layers:
    """The layers that can be refitted, as they run.

    recurrent: those that read what they make; alone: those whose neurons no other layer adds to
    """

    written: Mapping[str, Written]
    recurrent: frozenset[str]

    @property
    def alone(self) -> frozenset[str]:
        return sole_writers({n: axes for n, (axes, _) in self.written.items()}) - self.recurrent

    @property
    def order(self) -> list[str]:
        """The fits, one after the other."""
        return [
            name for name in self.written for _ in range(_FITS if name in self.recurrent else 1)
        ]


@strategy("match-refit")
@dataclass(frozen=True, eq=False)
class MatchRefit(MatchThenAverage):
    """The first round matches, then refits; with more rounds, these are those of fedavg.

    After the fusion each layer takes one message, in the order in which the network runs: clients
    get the fused network, fitted so far, and their own. They send the second moments of what the
    layer reads in the first, and what it lacks there to say what their own says. No labels and no
    gradients are sent, and nobody trains. The recurrent weights of a recurrent layer take three.

    pool: what fits a neuron: its "owners" alone, or "all" clients, where those that do not own it
        want it as it is. The sum of all messages is enough for "all"
    ridge: of the fit, in units of the mean diagonal; None to choose it for each layer by how
        clients' own fits do on a quarter of their inputs, and at least 0.3 if rounds of averaging
        follow
    """

    state_type: ClassVar[type[State]] = RefitState
    method_kind: ClassVar[type[Method] | None] = Bayesian

    method: AligningMethod = field(default_factory=Nafi)
    pool: str = option(one_of(("owners", "all")), "owners")
    ridge: float | None = option(optional(number(above=0)), None)
    _refittable: Latest[_Layers] = field(init=False, repr=False, default_factory=Latest)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(["attach"]).check(self.method.batchnorm, "batchnorm")
        if self.method.screen.trim:
            raise InputError("match-refit would fit outliers that trim leaves out; leave trim out")

    def select(self, state: State, clients: Sequence[str]) -> list[str]:
        """While layers are refitted, those whose networks were fused."""
        assert isinstance(state, RefitState)
        chosen = super().select(state, clients)
        return [c for c in clients if c in state.members] if _layer_of(state) else chosen

    def task(self, state: State, client: str) -> Task:
        assert isinstance(state, RefitState)
        layer = _layer_of(state)
        return self._layer_task(state, client, layer) if layer else super().task(state, client)

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        assert isinstance(state, RefitState)
        layer = _layer_of(state)
        return self._fitted(state, updates, layer) if layer else super().aggregate(state, updates)

    def check_state(self, state: State) -> None:
        super().check_state(state)
        assert isinstance(state, RefitState)
        shapes = self.architecture.shapes(state.form)
        for member in state.members.values():
            check_shapes(member.tensors, shapes)

    # -------------------------------------------------------------------------------- the fusion

    def _fused(self, state: State, updates: list[Update], method: Method) -> State:
        """Match and merge; layers are refitted in the messages that follow."""
        assert isinstance(state, RefitState)
        assert isinstance(method, Bayesian)
        if len(updates) == 1:
            return super()._fused(state, updates, method)
        seeded = self.seeded(method)
        networks = self._prepared(state, updates, seeded)
        alignment = seeded.align(networks, lambda step, done, total: None)
        model = merged_network(
            networks,
            alignment.placements,
            alignment.widths,
            restore_norm=method.restore_norm,
            screen=method.screen,
        )
        form = Form(alignment.widths, networks.spec.folded)
        members = {
            update.client: _matched(networks, s, places)
            for s, (update, places) in enumerate(zip(updates, alignment.placements, strict=True))
        }
        merged = tensors_of(model, networks.spec.axes)
        after = replace(state, form=form, tensors=merged, members=members)
        return self._next(after)

    def _prepared(self, state: State, updates: Sequence[Update], method: Bayesian) -> Networks:
        clients = check_clients(
            networks_of(self.architecture, state.form, [u.tensors for u in updates], method),
            class_table(u.class_counts for u in updates),
            [u.samples for u in updates],
            [f"client {u.client}" for u in updates],
        )
        spec = self.architecture.spec_of(state.form)
        return method.prepare(clients, self.architecture.example_inputs, spec)

    # ------------------------------------------------------------------------- layer after layer

    def _next(self, state: RefitState) -> State:
        """Wait for the sums of the next layer, or end the round."""
        order = self._layers(state).order
        if state.fitted < len(order):
            return replace(state, awaiting=_LAYER + order[state.fitted])
        return self._finished(state)

    def _layers(self, state: RefitState) -> _Layers:
        return self._refittable.get(state, lambda: self._find_layers(state))

    def _find_layers(self, state: RefitState) -> _Layers:
        model, spec = self._network(state)
        inputs = probing_inputs(self.architecture.example_inputs)
        return _Layers(refittable(model, spec, inputs), recurrent_weights(model, inputs))

    def _network(self, state: State) -> tuple[nn.Module, ModelSpec]:
        spec = self.architecture.spec_of(state.form)
        return self.architecture.filled(state.form, state.tensors).eval(), spec

    def _request(self, layer: str) -> Request:
        return Request(inputs=(layer,), outputs=True, precision=self.precision)

    def _layer_task(self, state: RefitState, client: str, layer: str) -> Task:
        """Ask for the sums of one layer; what comes after it is not sent."""
        request, spec = self._request(layer), self.architecture.spec_of(state.form)
        order = list(self._layers(state).written)
        later = {
            name
            for weight in order[order.index(layer) + 1 :]
            for name in (weight, spec.tensors[weight].bias)
        }
        member = state.members[client]
        own = {OWN + n: t for n, t in member.tensors.items() if n not in later}
        own[OWNED + layer] = self._owned(state, client, layer).to(torch.uint8)
        return self._task(
            state,
            client,
            {name: t for name, t in state.tensors.items() if name not in later},
            spec.axes,
            extras=own,
            asks=self._asks.get(state, lambda: self._expected(state, request)),
            sums=request,
        )

    def _owned(self, state: RefitState, client: str, layer: str) -> Tensor:
        """(B, N) which outputs of a layer are a client's own."""
        spec = self.architecture.spec_of(state.form)
        places = {
            name: Positions(index, state.form.widths[name])
            for name, index in state.members[client].places.items()
        }
        where = self._layers(state).written[layer]
        return owned_outputs(where, spec.resized(self.architecture.spec.widths), places)

    def _fitted(self, state: RefitState, updates: Iterable[Update], layer: str) -> State:
        """The layer fitted to what all clients sent."""
        request, sent, errors = self._request(layer), {}, torch.zeros(len(RIDGES))
        for update in updates:
            sent[update.client] = read_layer(update.extras, layer, request)
            errors = errors + read_errors(update.extras, layer)
        if not sent:
            raise InputError(f"nobody sent sums for {layer}")
        parts = list(sent.values())
        if self.method.screen.clip is not None:
            parts = bounded_sums(parts, self.method.screen.clip**2)
        known = torch.stack([self._owned(state, client, layer) for client in sent])
        owners = torch.ones_like(known) if self.pool == "all" else known
        model, spec = self._network(state)
        inputs = probing_inputs(self.architecture.example_inputs)
        with_bias = spec.tensors[layer].bias is not None
        change, shifts = pooled_fit(parts, owners, ridge=self._ridge(errors), with_bias=with_bias)
        if with_bias and layer in self._layers(state).alone:
            weights = layer_weights(model, inputs, layer)
            change, shifts = pooled_deviation(parts, owners, weights, change, shifts)
        weights, biases = add_to_layer(model, spec, inputs, layer, change, shifts)
        made = torch.stack(reduce(add, parts).outputs(weights, biases))
        after = replace(
            state,
            tensors=tensors_of(model, spec.axes),
            outputs={**state.outputs, layer: made.flatten(1)},
            fitted=state.fitted + 1,
            awaiting="",
        )
        return self._next(after)

    def _ridge(self, errors: Tensor) -> float:
        """The one that was set, or the one with which clients' own fits did best."""
        if self.ridge is not None:
            return self.ridge
        best = RIDGES[int(errors.argmin())]
        return max(best, _TO_TRAIN_ON) if self.rounds > 1 else best

    def _finished(self, state: RefitState) -> State:
        """The round is over: normalisation is put back, and clients' networks are forgotten."""
        model, spec = self._network(state)
        if spec.folded:
            original, _ = self.architecture.network(self.architecture.form)
            model, spec = attach_batchnorm(model, spec, original, _moments(state, spec))
        form = Form(state.form.widths)
        known = self.architecture.spec_of(form)
        tensors = tensors_of(model.eval(), known.axes)
        return RefitState(state.round + 1, form, tensors)


def _layer_of(state: State) -> str:
    """The weight of the layer whose sums are awaited, if any."""
    waiting = state.awaiting.startswith(_LAYER)
    return state.awaiting.removeprefix(_LAYER) if waiting else ""


def _moments(state: RefitState, spec: ModelSpec) -> OutputMoments | None:
    """What the layers make whose normalisation is put back, if all of them were refitted."""
    layers = {norm: f"{layer}.weight" for layer, norm in spec.folded}
    if not all(layer in state.outputs for layer in layers.values()):
        return None
    return {norm: tuple(state.outputs[layer].float()) for norm, layer in layers.items()}


def _matched(networks: Networks, index: int, places: Placements) -> Matched:
    """A client's network where its neurons went, in the bases that all have in common."""
    spec, tensors = networks.specs[index], networks.states[index]
    own = {name: in_order(tensors[name], name, spec, places) for name in spec.axes}
    known = {name: at.index for name, at in owned(places).items() if isinstance(at, Positions)}
    return Matched(on_disk(own), known)
