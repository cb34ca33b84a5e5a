"""The clients' networks as tensors with named axes, and the way back to a network.

Hides: batch normalisation, which is folded before matching, and where modules keep sizes.
Promises: states and specs of all clients that differ in widths only, and `build`, which makes a
running network of fused tensors.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from nafi.errors import InputError, SpecError
from nafi.fusion.clients import Clients
from nafi.fusion.cluster import Run, in_turn
from nafi.fusion.recording import Recording, record, unlike_rows
from nafi.fusion.screen import Screen
from nafi.fusion.selection import ordered_groups
from nafi.fusion.stored import Spill, StoredStates
from nafi.graph import (
    Bases,
    Freedom,
    Growth,
    Inputs,
    ModelSpec,
    Normalisation,
    OutputMoments,
    Tie,
    check_inputs,
    estimate_spectral,
    free_bases,
    gains_of_directions,
    groups,
    growth,
    holds_numbers,
    named_tensors,
    rebuild,
    unit_directions,
    unit_spectral,
)


class FusionWarning(UserWarning):
    """The fused model is sound, but something could not be done as asked."""


@dataclass(frozen=True, eq=False)
class Networks:
    """What matching works on.

    make_template: gives the first client's network with its normalisation folded
    architecture: the spec of the first client's network, normalisation included
    specs, states: of each client, folded; they differ in widths only
    batchnorm: what becomes of normalisation; "average" averages networks as `unfolded` gives them
    learnt: the tensors that clients trained; buffers are merged but say nothing of a neuron
    probe: inputs without labels, if there are any
    by_input: (S, inputs) how much each client counts for each of them, if that differs
    run: where the clients are run on the probe
    bases: what is free beyond the order of neurons, where that is made use of
    """

    clients: Clients
    make_template: Callable[[], nn.Module]
    architecture: ModelSpec
    specs: tuple[ModelSpec, ...]
    states: Sequence[Mapping[str, Tensor]]
    batchnorm: Normalisation
    learnt: frozenset[str]
    probe: Inputs | None = None
    by_input: Tensor | None = None
    run: Run = in_turn
    bases: Bases = field(default_factory=Bases)

    @cached_property
    def numbers(self) -> frozenset[str]:
        """The tensors that hold weights or statistics, and not counters or positions."""
        return frozenset(name for name, t in self.states[0].items() if holds_numbers(t))

    @property
    def original(self) -> nn.Module:
        """The first client's network; read again whenever it is asked for where it is in a file."""
        return self.clients.models[0]

    @property
    def template(self) -> nn.Module:
        """The same with its normalisation folded."""
        return self.make_template()

    @property
    def spec(self) -> ModelSpec:
        """The spec of the template."""
        return self.specs[0]

    @cached_property
    def ranking(self) -> list[int]:
        """The clients in an order that depends neither on that of the caller nor on their neurons'.

        The one with the largest weights comes first: it has learnt most. Whatever treats clients
        one after the other follows it.
        """
        sizes = [sum(_square(t) for t in state.values()) for state in self.states]
        return sorted(range(len(sizes)), key=lambda s: -sizes[s])

    @cached_property
    def fixed_widths(self) -> Mapping[str, str]:
        """The groups whose width cannot change, each with the reason."""
        growth = self._growth
        if growth.stuck:
            text = f"{', '.join(growth.stuck)}: the width stays as it is, because {growth.refusal}"
            warnings.warn(text, FusionWarning, stacklevel=4)
        return growth.fixed

    @property
    def tied_widths(self) -> Sequence[Tie]:
        """Groups whose widths change together, as those of all layers of an LSTM."""
        return self._growth.ties

    @cached_property
    def prunable(self) -> frozenset[str]:
        """The groups that have an order of neurons, a width that can change, and a reader.

        Cost: one run of the template on the example inputs.
        """
        names = {
            name
            for name, group in self.spec.groups.items()
            if group.parent is None
            and name not in self.fixed_widths
            and self.freedom(name) is Freedom.ORDER
        }
        inputs = self.architecture.example_inputs
        assert inputs is not None
        found = ordered_groups(self.template, self.spec, inputs, names)
        for tie in self.tied_widths:  # widths that agree change together or not at all
            if not found.issuperset(tie):
                found -= set(tie)
        return frozenset(found)

    @cached_property
    def _growth(self) -> Growth:
        return growth(self.template, self.spec)

    @cached_property
    def recordings(self) -> tuple[Recording, ...]:
        """What each client's network does on the probe."""
        assert self.probe is not None
        clients = ((self._client(s), spec) for s, spec in enumerate(self.specs))
        recordings = tuple(self.run(_record, self.probe, clients))
        recordings[0].kept.update(unlike_rows(self.template, self.spec, self.probe))
        return recordings

    def _client(self, index: int) -> nn.Module:
        """The network of one client, folded."""
        return self._filled(self.states[index], self.specs[index].widths)

    def only(self, index: int) -> Networks:
        """The network of one client alone."""
        clients, template = self.clients.only(index), self._client(index)
        return replace(
            self,
            clients=clients,
            make_template=lambda: template,
            architecture=self.architecture.fitted(next(clients.outlines)),
            specs=self.specs[index : index + 1],
            states=self.states[index : index + 1],
        )

    def fused(self, model: nn.Module, widths: Mapping[str, int]) -> Networks:
        """A network of `build` in the place of all clients."""
        model = _as_used(model)
        return replace(
            self,
            clients=self.clients.only(0),
            make_template=lambda: model,
            specs=(self.spec.resized(widths),),
            states=(_state(model),),
            by_input=None,
            run=in_turn,
        )

    def group(self, chosen: Sequence[int]) -> Networks:
        """Some of the clients, with the first of all as a template."""
        return self._some(chosen, self.clients.only(*chosen))

    def part(self, chosen: Sequence[int]) -> Networks:
        """The same, each client with the weight that it has among all."""
        return self._some(chosen, self.clients.part(chosen))

    def _some(self, chosen: Sequence[int], clients: Clients) -> Networks:
        states = self.states
        twin = self.with_clients(
            clients,
            [self.specs[s] for s in chosen],
            states.chosen(chosen)
            if isinstance(states, StoredStates)
            else tuple(states[s] for s in chosen),
        )
        rank = {s: place for place, s in enumerate(self.ranking)}  # nothing is read again for it
        vars(twin)["ranking"] = sorted(range(len(chosen)), key=lambda k: rank[chosen[k]])
        return twin

    def with_clients(
        self, clients: Clients, specs: Sequence[ModelSpec], states: Sequence[Mapping[str, Tensor]]
    ) -> Networks:
        """Other clients of the same architecture; what can grow in it is the same."""
        twin = replace(self, clients=clients, specs=tuple(specs), states=states)
        vars(twin)["_growth"] = self._growth  # which holds for the template, not for these clients
        return twin

    def local_widths(self, group: str) -> list[int]:
        return [spec.groups[group].width for spec in self.specs]

    @property
    def merging(self) -> Networks:
        """What is averaged once the neurons have their places."""
        # Not cached: an object that holds itself is not freed when it is no longer used.
        return self.unfolded if self.batchnorm.merges_unfolded else self

    @cached_property
    def unfolded(self) -> Networks:
        """What is averaged if normalisation is as well.

        The networks as the clients have them. Models that trained on from a common start keep
        their statistics this way; others need `calibrate` afterwards.
        """
        models = self.clients.models
        states: Sequence[Mapping[str, Tensor]]
        if self.clients.stored:
            states = StoredStates(len(models), lambda s: _state(_as_used(models[s])))
        else:
            states = tuple(_state(_as_used(model)) for model in models)
        specs = _fitted_specs(self.clients, self.architecture)
        return replace(self, make_template=lambda: models[0], specs=specs, states=states)

    def in_canonical_bases(self) -> Networks:
        """Networks that do the same, with nothing left of free bases but how they are turned."""
        assert self.architecture.example_inputs is not None
        bases = free_bases(self.template, self.spec, self.architecture.example_inputs)
        if not bases.freedoms:
            return self
        canonical = (
            bases.canonical(state, spec)
            for state, spec in zip(self.states, self.specs, strict=True)
        )
        states = _spilled(canonical) if self.clients.stored else tuple(canonical)
        return replace(self, bases=bases, states=states)

    def freedom(self, group: str) -> Freedom:
        """What may be done to a group; where its widths differ, it has an order."""
        alike = len(set(self.local_widths(group))) == 1
        return self.bases.freedoms.get(group, Freedom.ORDER) if alike else Freedom.ORDER

    def screened(self, screen: Screen) -> Networks:
        """The same with neurons and counts held to what is usual."""
        if not screen.active:
            return self
        if self.clients.stored:
            raise InputError("clip and trim compare all models with each other: load them")
        held = replace(
            self.clients,
            class_counts=screen.counts(self.clients.class_counts),
            sample_counts=screen.counts(self.clients.sample_counts),
        )
        return replace(self, clients=held, states=screen.clipped(self.states, self.specs))

    def check_equal_widths(self, method: str) -> None:
        """Refuse clients of different widths, for a method that cannot have them."""
        for spec, label in zip(self.specs, self.clients.names, strict=True):
            for name, width in spec.widths.items():
                if width != self.spec.widths[name]:
                    raise InputError(
                        f"{label}: group {name} has {width} neurons, in {self.clients.names[0]} "
                        f"{self.spec.widths[name]}; {method} needs equal widths, nafi does not"
                    )

    def build(self, state: Mapping[str, Tensor], widths: Mapping[str, int]) -> nn.Module:
        """The network with these tensors at these widths, in eval mode, still folded."""
        model = self._filled(state, widths)
        return gains_of_directions(estimate_spectral(model))

    def finish(
        self, model: nn.Module, widths: Mapping[str, int], moments: OutputMoments
    ) -> tuple[nn.Module, ModelSpec, ModelSpec]:
        """A network of `build` with its normalisation put back, and its spec.

        moments: of what the layers before each normalisation make
        The third is the spec of the clients' architecture at these widths.
        """
        spec = self.spec.resized(widths)
        if spec.folded:
            model, spec = self.batchnorm.put_back(model, spec, like=self.original, moments=moments)
        return model.eval(), spec, self.architecture.resized(widths)

    def _filled(self, state: Mapping[str, Tensor], widths: Mapping[str, int]) -> nn.Module:
        model = rebuild(self.template, self.spec, widths)
        with torch.no_grad():
            for name, tensor in named_tensors(model).items():
                tensor.copy_(state[self.spec.aliases.get(name, name)])
        return model.eval()


def prepare_networks(
    clients: Clients, example_inputs: Inputs, spec: ModelSpec | None, batchnorm: str
) -> Networks:
    """Find the groups, fit them to every client and fold batch normalisation."""
    first = clients.models[0]
    fitted = _specs_of_clients(clients, first, example_inputs, spec)
    way = Normalisation(batchnorm)
    template, _ = _folded(first, fitted[0], way)
    unchanged = template is first
    learnt = frozenset(name for name, _ in template.named_parameters(remove_duplicate=False))
    networks = partial(Networks, clients, architecture=fitted[0], batchnorm=way, learnt=learnt)
    if not clients.stored:
        kept = template
        folded = [_folded(m, own, way) for m, own in zip(clients.models, fitted, strict=True)]
        return networks(
            make_template=lambda: kept,
            specs=tuple(own for _, own in folded),
            states=tuple(_state(model) for model, _ in folded),
        )
    del first, template  # not held while the others are read
    gc.collect()  # what was traced refers to itself, and to the network
    # Where nothing was changed, files have it all.
    specs, states = (fitted, clients.states) if unchanged else _folded_once(clients, fitted, way)
    return networks(
        make_template=lambda: _folded(clients.models[0], fitted[0], way)[0],
        specs=specs,
        states=states,
    )


def _folded(model: nn.Module, spec: ModelSpec, way: Normalisation) -> tuple[nn.Module, ModelSpec]:
    """A network as neurons are matched by, and its spec."""
    return way.for_matching(_as_used(model), spec)


def _folded_once(
    clients: Clients, fitted: Sequence[ModelSpec], way: Normalisation
) -> tuple[tuple[ModelSpec, ...], Sequence[Mapping[str, Tensor]]]:
    """Every client's network with its normalisation folded, written to a temporary folder."""
    known: dict[int, ModelSpec] = {}

    def fold(index: int) -> Mapping[str, Tensor]:
        folded, spec = _folded(clients.models[index], fitted[index], way)
        known.setdefault(id(fitted[index]), spec)
        return _state(folded)

    states = _spilled(map(fold, range(len(clients))))
    return tuple(known[id(own)] for own in fitted), states


def _spilled(states: Iterable[Mapping[str, Tensor]]) -> Sequence[Mapping[str, Tensor]]:
    """The same in a temporary folder, one at a time."""
    spill = Spill()
    for state in states:
        spill.add(state)
        del state  # not held while the next one is made
    return spill.states()


def _record(probe: Inputs, client: tuple[nn.Module, ModelSpec]) -> Recording:
    """What one client does on a probe; here, or on a worker of a cluster."""
    return record(*client, probe)


def _square(tensor: Tensor) -> float:
    return float(tensor.abs().double().square().sum()) if holds_numbers(tensor) else 0.0


def _as_used(model: nn.Module) -> nn.Module:
    """The network with normalised weights as they are used, so that they can be averaged."""
    return unit_directions(unit_spectral(model))


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in named_tensors(model).items()}


def check_clip(screen: Screen, batchnorm: str) -> None:
    """Refuse to look at the lengths of neurons before their normalisation."""
    if screen.clip is not None and batchnorm == "average":
        raise InputError(
            "clip: lengths of neurons mean nothing before normalisation; use batchnorm='attach'"
        )


def _specs_of_clients(
    clients: Clients, first: nn.Module, example_inputs: Inputs, spec: ModelSpec | None
) -> tuple[ModelSpec, ...]:
    """The groups of every client; spec: those of the first one, if they are known.

    A layer with one neuron is in no group. If the first client has such a layer where others have
    more neurons, the groups are those of the largest client.
    """

    def fitted(known: ModelSpec) -> tuple[ModelSpec, ...]:
        if known.example_inputs is None:
            known = replace(known, example_inputs=check_inputs(example_inputs))
        return _fitted_specs(clients, known)

    if spec is not None:
        return fitted(spec)
    try:
        return fitted(groups(first, example_inputs))
    except SpecError:
        sizes = [sum(t.shape.numel() for t in o.values()) for o in clients.outlines]
        largest = sizes.index(max(sizes))
        if largest == 0 or sizes[largest] == sizes[0]:
            raise
        try:
            return fitted(groups(clients.models[largest], example_inputs))
        except SpecError:
            pass
        raise


def _fitted_specs(clients: Clients, spec: ModelSpec) -> tuple[ModelSpec, ...]:
    """The spec at the widths of every client; clients of the same shapes share one."""
    known: dict[tuple[torch.Size, ...], ModelSpec] = {}
    fitted = []
    for outline, label in zip(clients.outlines, clients.names, strict=True):
        shapes = tuple(tensor.shape for tensor in outline.values())
        if shapes not in known:
            try:
                known[shapes] = spec.fitted(outline)
            except SpecError as error:
                raise SpecError(
                    f"{label} is of another architecture than {clients.names[0]}: {error}"
                ) from None
        fitted.append(known[shapes])
    return tuple(fitted)
