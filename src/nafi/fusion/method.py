"""What a method of fusion is.

Hides: how clients' networks are prepared and how a fused network is built from the places of their
neurons. Promises: a method that can say where neurons go (`align`) needs to say nothing else; its
options are the fields of a frozen dataclass and are checked when the object is made.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.fusion.clients import Clients
from nafi.fusion.cluster import Run, in_turn
from nafi.fusion.merge import finished_network, merged_network
from nafi.fusion.networks import Networks, prepare_networks
from nafi.fusion.refit import Refit, refit
from nafi.fusion.result import FusionResult
from nafi.fusion.screen import Screen
from nafi.graph import (
    Inputs,
    ModelSpec,
    Normalisation,
    Placement,
    Positions,
    Rotated,
    Shares,
    Thinned,
)
from nafi.matching import Index, Matching
from nafi.options import SWITCH, Options, is_listed, one_of, option

_SCORE = (
    "a list needs validate=, a function of the fused model whose result is the higher the better "
    "(the accuracy on data held out by the clients, for example)"
)
# Called before each step with what comes next, how many steps are done, and how many there are.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Method(Options, ABC):
    """A way to make one model of several; its fields are its options.

    name: what users call it
    lists: its options that may list several values, to choose from by a score
    of_probe: its options that say nothing but what to do with a probe
    uses: which of class_counts, sample_counts and input_moments it takes into account; whatever
        else is given of the clients' data is refused
    streams: whether it can work on models that are read from files one at a time
    """

    name: ClassVar[str]
    of_probe: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[bool] = False
    lists: ClassVar[tuple[str, ...]] = ()
    uses: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.lists:
            value = getattr(self, name)
            if is_listed(value) and len(value) == 1:  # nothing to choose from
                object.__setattr__(self, name, value[0])

    @abstractmethod
    def prepare(self, clients: Clients, example_inputs: Inputs, spec: ModelSpec | None) -> Any:
        """Check the clients and do what all variants of the method have in common."""

    @abstractmethod
    def fuse(self, prepared: Any, progress: Progress) -> FusionResult:
        """Make one model of what `prepare` returned."""

    def with_probe(self, prepared: Any, probe: Inputs, by_input: Tensor | None) -> Any:
        """What `prepare` returned, with inputs, and (S, inputs) what each client counts for each.

        by_input: None if they count the same for all
        """
        return replace(prepared, probe=probe)

    def informed(self, prepared: Any, scores: Sequence[float]) -> Any:
        """What `prepare` returned, for clients of which the scores are known now."""
        return prepared

    def misses_probe(self, prepared: Any) -> bool:
        """Whether the result would be far better with a probe, even with a made-up one."""
        return False

    def variants(self) -> Sequence[Self]:
        """The methods to choose from by a score, where an option lists several values."""
        listed = {
            name: list(getattr(self, name)) for name in self.lists if is_listed(getattr(self, name))
        }
        values = itertools.product(*listed.values())
        return tuple(replace(self, **dict(zip(listed, each, strict=True))) for each in values)

    def check_available(self) -> None:
        """Refuse a method whose packages are not installed."""

    def check_one_variant(self, advice: str = _SCORE) -> None:
        """Refuse a list of values where there is no score to choose by."""
        first, *others = self.variants()
        if others:
            names = ", ".join(first.differences(self))
            raise InputError(f"{names}: {advice}")

    def check_in_rounds(self) -> None:
        """Refuse what needs a score or a probe, and what only changes what is done with a probe."""
        self.check_one_variant(
            "a list needs a score to choose by, which rounds do not have; give one value"
        )
        self.check_uses()
        usual = {field.name: field.default for field in fields(self)}
        for name in self.of_probe:
            found = getattr(self, name)
            if found != usual[name]:
                raise InputError(
                    f"{name}: found {found!r}, which is about a probe, and rounds have none; leave "
                    "it out"
                )

    def check_stored(self, clients: Clients) -> None:
        """Refuse models that stay in files, for a method that needs all of them at once."""
        if clients.stored and not self.streams:
            raise InputError(
                f"method {self.name} needs all models in memory at once; load them, or use nafi, "
                "pfnm or fedavg, which read one at a time"
            )

    def check_uses(self, **known: object) -> None:
        """Refuse what is known of the clients' data and does not count for this method."""
        for name, value in known.items():
            if value is not None and name not in self.uses:
                raise InputError(f"{name}: method {self.name} does not use them; leave them out")

    def used(self, **known: Any) -> dict[str, Any]:
        """Of what is known of the clients' data, the part that counts for this method."""
        return {name: value for name, value in known.items() if name in self.uses}


@dataclass(frozen=True, eq=False)
class Alignment:
    """Where every client's neurons go.

    placements: for each client group -> the places of its neurons
    widths: group -> neurons of the fused network
    matchings: group -> the matching behind it, for methods that have one
    parts: clients whose tensors are summed apart, one part after the other or side by side
    """

    placements: Sequence[Mapping[str, Placement]]
    widths: Mapping[str, int]
    matchings: Mapping[str, Matching] = field(default_factory=dict)
    parts: Sequence[Sequence[int]] | None = None

    @cached_property
    def assignments(self) -> dict[str, tuple[Index, ...]]:
        """Group -> for each client the place that most of each neuron goes to."""
        return {
            name: tuple(main_places(placements[name]) for placements in self.placements)
            for name in self.widths
        }


@dataclass(frozen=True, kw_only=True)
class AligningMethod(Method):
    """A method that says where neurons go; all of these merge them in the same way.

    batchnorm: normalisation is folded into the layers before matching; "attach" puts it back
        with other statistics, to train on; "fold" leaves it folded. With "average" only the
        matching looks at folded layers, and normalisation is averaged with its neurons: for models
        from a common start, or to `nafi.calibrate` the result on a few inputs
    restore_norm: give merged neurons the mean norm of their members, since averaging shrinks them
    refit: with a probe, fit every layer of the fused network to what its members compute
    weigh_inputs: with a probe of real inputs, let those models count more for an input whose batch
        normalisation remembers its like, if they have any: for clients whose inputs differ in kind
    """

    of_probe: ClassVar[tuple[str, ...]] = ("refit", "weigh_inputs")
    uses: ClassVar[frozenset[str]] = frozenset({"probe"})

    batchnorm: str = option(one_of([way.value for way in Normalisation]), "attach")
    restore_norm: bool = option(SWITCH, True)
    refit: bool = option(SWITCH, True)
    weigh_inputs: bool = option(SWITCH, True)

    @property
    def screen(self) -> Screen:
        """What is done against harmful models; nothing, unless a method has options for it."""
        return Screen()

    @property
    def restores_norm(self) -> bool:
        """Whether merged neurons get the norm of their members."""
        return self.restore_norm

    @property
    def run(self) -> Run:
        """How the parts of an alignment are worked on."""
        return in_turn

    def prepare(self, clients: Clients, example_inputs: Inputs, spec: ModelSpec | None) -> Networks:
        """The clients' networks with groups found and normalisation folded."""
        return prepare_networks(clients, example_inputs, spec, self.batchnorm)

    def misses_probe(self, prepared: Networks) -> bool:
        """From the second hidden layer on, the inputs of merged neurons are not what they were."""
        return len(prepared.spec.groups) > 1 and self.refit and not self._refused_refit()

    def with_probe(self, prepared: Networks, probe: Inputs, by_input: Tensor | None) -> Networks:
        return replace(prepared, probe=probe, by_input=by_input)

    @abstractmethod
    def align(self, networks: Networks, progress: Progress) -> Alignment:
        """Where every client's neurons go."""

    def pruned(
        self, networks: Networks, alignment: Alignment, model: nn.Module, progress: Progress
    ) -> tuple[Alignment, nn.Module, Refit] | None:
        """A part of a fused network, refitted, for a method that matches more than is to stay."""
        return None

    def fuse(self, prepared: Networks, progress: Progress) -> FusionResult:
        if prepared.probe is not None:
            if self.refit and (refused := self._refused_refit()):
                raise InputError(f"refit: {refused}")
            progress("running the clients on the probe", 0, len(prepared.spec.groups))
        alignment = self.align(prepared, progress)
        model = merged_network(
            prepared,
            alignment.placements,
            alignment.widths,
            restore_norm=self.restores_norm,
            screen=self.screen,
            parts=alignment.parts,
            run=self.run,
        )
        refitted = Refit()
        if prepared.probe is not None and self.refit:
            refitted = refit(prepared, alignment.placements, model, progress)
            pruned = self.pruned(prepared, alignment, model, progress)
            if pruned is not None:
                alignment, model, refitted = pruned
        placements, widths = alignment.placements, alignment.widths
        model, spec, architecture = finished_network(prepared, placements, widths, model)
        return FusionResult(
            model,
            widths,
            spec,
            architecture,
            alignment.assignments,
            alignment.matchings,
            fits=refitted.fits,
            kept=refitted.kept,
        )

    def _refused_refit(self) -> str | None:
        """Why layers cannot be, or must not be, fitted to the means of all members, if so."""
        if self.batchnorm == Normalisation.AVERAGE:
            return (
                "layers cannot be fitted before a normalisation that is averaged; use "
                "batchnorm='attach', or refit=False"
            )
        if self.screen.trim:
            return "it would fit outliers that trim leaves out; give refit=False"
        return None


def main_places(placement: Placement) -> Index:
    """The place that most of each neuron goes to; -1 if it is gone."""
    if isinstance(placement, Shares):
        return np.asarray(placement.plan.argmax(dim=1).numpy())
    if isinstance(placement, Rotated):
        placement = placement.owned
    assert isinstance(placement, Positions | Thinned)
    return np.asarray(placement.index.numpy())
