"""The clients' networks as tensors with named axes, and the way back to a network.

Hides: batch normalisation, which is folded before matching, and where modules keep sizes.
Promises: states and specs of all clients that differ in widths only, and `build`, which makes a
running network of fused tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from nafi.errors import InputError, SpecError
from nafi.fusion.clients import Clients
from nafi.fusion.recording import Recording, record, unlike_rows
from nafi.fusion.screen import Screen
from nafi.graph import (
    Inputs,
    ModelSpec,
    Normalisation,
    OutputMoments,
    check_inputs,
    estimate_spectral,
    groups,
    holds_numbers,
    named_tensors,
    rebuild,
    tied_widths,
    unit_spectral,
    width_trouble,
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
    def fixed_widths(self) -> dict[str, str]:
        """The groups whose width cannot change, each with the reason.

        All others are widened by different amounts at once, those that are tied by the same; where
        the network then does not run, halves of them are tried. Cost: one rebuild of the template,
        and some more for every group that cannot grow.
        """
        groups = self.spec.groups
        fixed = {name: f"{g.rigid} fixes the width" for name, g in groups.items() if g.rigid}
        ties = [tie for tie in self.tied_widths if not set(tie) & set(fixed)]
        tied = {name for tie in ties for name in tie}
        free = [(name,) for name in groups if name not in fixed and name not in tied]
        grown = {
            name: groups[name].width + 1 + k for k, tie in enumerate(free + ties) for name in tie
        }
        growing = self._growing(free + ties, grown, ())
        stuck = [name for name in grown if name not in growing]
        if stuck:
            widths = {name: grown[name] for name in (*growing, *stuck)}
            reason = _reason(self.template, self.spec, widths)
            text = f"{', '.join(stuck)}: the width stays as it is, because {reason}"
            warnings.warn(text, FusionWarning, stacklevel=4)
        return fixed | dict.fromkeys(stuck, "its code fixes the width")

    @cached_property
    def tied_widths(self) -> list[tuple[str, ...]]:
        """Groups that must have the same width, as those of all layers of an LSTM."""
        return tied_widths(self.template, self.spec)

    def _growing(
        self, ties: Sequence[tuple[str, ...]], grown: Mapping[str, int], others: Sequence[str]
    ) -> tuple[str, ...]:
        """The groups that can have the widths `grown` together with some others."""
        names = tuple(name for tie in ties for name in tie)
        widths = {name: grown[name] for name in (*others, *names)}
        if not names or width_trouble(self.template, self.spec, widths) is None:
            return names
        if len(ties) == 1:
            return ()
        half = len(ties) // 2
        first = self._growing(ties[:half], grown, others)
        return first + self._growing(ties[half:], grown, (*others, *first))

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

    def local_widths(self, group: str) -> list[int]:
        return [spec.groups[group].width for spec in self.specs]

    @cached_property
    def merging(self) -> Networks:
        """What is averaged once the neurons have their places."""
        return self.unfolded() if self.batchnorm.merges_unfolded else self

    def unfolded(self) -> Networks:
        """What is averaged if normalisation is as well.

        The networks as the clients have them. Models that trained on from a common start keep
        their statistics this way; others need `calibrate` afterwards.
        """
        states = tuple(_state(unit_spectral(model)) for model in self.clients.models)
        specs = tuple(self.architecture.fitted(state) for state in states)
        return replace(self, template=self.original, specs=specs, states=states)

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
        estimate_spectral(model)
        return model

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
        way.for_matching(unit_spectral(model), _fitted(model, known, clients, s))
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


def _reason(model: nn.Module, spec: ModelSpec, widths: Mapping[str, int]) -> str:
    """What stands in the way of these widths, with the lines of code where they are known."""
    try:
        rebuild(model, spec, widths)
    except SpecError as error:
        return str(error)
    return "it does not run otherwise"


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
