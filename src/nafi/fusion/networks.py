"""The clients' networks as tensors with named axes, and the way back to a network.

Hides: batch normalisation, which is folded before matching, and where modules keep sizes.
Promises: states and specs of all clients that differ in widths only, and `build`, which makes a
running network of fused tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from nafi.errors import InputError, SpecError
from nafi.fusion.clients import Clients
from nafi.fusion.recording import Recording, record, unlike_rows
from nafi.fusion.screen import Screen
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

    original: the first client's network; template: the same with its normalisation folded
    architecture: the spec of the original, normalisation included
    specs, states: of each client, folded; they differ in widths only
    batchnorm: what becomes of normalisation; "average" averages networks as `unfolded` gives them
    learnt: the tensors that clients trained; buffers are merged but say nothing of a neuron
    probe: inputs without labels, if there are any
    bases: what is free beyond the order of neurons, where that is made use of
    """

    clients: Clients
    original: nn.Module
    template: nn.Module
    architecture: ModelSpec
    specs: tuple[ModelSpec, ...]
    states: tuple[Mapping[str, Tensor], ...]
    batchnorm: Normalisation
    learnt: frozenset[str]
    probe: Inputs | None = None
    bases: Bases = field(default_factory=Bases)

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
        sizes = [
            sum(float(t.abs().double().square().sum()) for t in state.values() if holds_numbers(t))
            for state in self.states
        ]
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
    def _growth(self) -> Growth:
        return growth(self.template, self.spec)

    @cached_property
    def recordings(self) -> tuple[Recording, ...]:
        """What each client's network does on the probe."""
        assert self.probe is not None
        models = (self._client(s) for s in range(len(self.states)))
        recordings = tuple(
            record(model, spec, self.probe) for model, spec in zip(models, self.specs, strict=True)
        )
        recordings[0].kept.update(unlike_rows(self.template, self.spec, self.probe))
        return recordings

    def _client(self, index: int) -> nn.Module:
        """The network of one client, folded."""
        return self._filled(self.states[index], self.specs[index].widths)

    def only(self, index: int) -> Networks:
        """The network of one client alone."""
        original = self.clients.models[index]
        return replace(
            self,
            clients=self.clients.only(index),
            original=original,
            template=self._client(index),
            architecture=self.architecture.fitted(named_tensors(original)),
            specs=self.specs[index : index + 1],
            states=self.states[index : index + 1],
        )

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
        states = tuple(_state(_as_used(model)) for model in self.clients.models)
        specs = tuple(self.architecture.fitted(state) for state in states)
        return replace(self, template=self.original, specs=specs, states=states)

    def in_canonical_bases(self) -> Networks:
        """Networks that do the same, with nothing left of free bases but how they are turned."""
        assert self.architecture.example_inputs is not None
        bases = free_bases(self.template, self.spec, self.architecture.example_inputs)
        if not bases.freedoms:
            return self
        states = tuple(
            bases.canonical(state, spec)
            for state, spec in zip(self.states, self.specs, strict=True)
        )
        return replace(self, bases=bases, states=states)

    def freedom(self, group: str) -> Freedom:
        """What may be done to a group; where its widths differ, it has an order."""
        alike = len(set(self.local_widths(group))) == 1
        return self.bases.freedoms.get(group, Freedom.ORDER) if alike else Freedom.ORDER

    def screened(self, screen: Screen) -> Networks:
        """The same with neurons and counts held to what is usual."""
        if not screen.active:
            return self
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
    known = groups(first, example_inputs) if spec is None else spec
    if known.example_inputs is None:
        known = replace(known, example_inputs=check_inputs(example_inputs))
    way = Normalisation(batchnorm)
    folded = [
        way.for_matching(_as_used(model), _fitted(model, known, clients, s))
        for s, model in enumerate(clients.models)
    ]
    return Networks(
        clients,
        first,
        folded[0][0],
        known,
        tuple(fitted for _, fitted in folded),
        tuple(_state(model) for model, _ in folded),
        way,
        frozenset(name for name, _ in folded[0][0].named_parameters(remove_duplicate=False)),
    )


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


def _fitted(model: nn.Module, spec: ModelSpec, clients: Clients, index: int) -> ModelSpec:
    try:
        return spec.fitted(named_tensors(model))
    except SpecError as error:
        raise SpecError(
            f"{clients.names[index]} is of another architecture than {clients.names[0]}: {error}"
        ) from None
