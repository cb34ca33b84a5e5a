"""Experiments as configuration.

Hides: TOML, profiles, and what can be wrong in either. Promises: an `Experiment` in which every
name is known and every method has as many candidates as the others may have.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

from nafi.errors import InputError
from nafi.federated.training import Optimiser

PAPER = resources.files("nafi.experiments") / "paper"
# What clients start from: weights of their own, or the same for all.
Start = Literal["own", "shared"]
Attack = Literal["none", "flip", "scale", "flip-and-scale"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainingConfig(_Strict):
    """How clients train."""

    epochs: int = Field(default=10, ge=1)
    batch: int = Field(default=32, ge=1)
    rate: float = Field(default=0.01, gt=0)
    decay: float = Field(default=1e-6, ge=0)


class RoundConfig(_Strict):
    """How clients train in each round of a federation; see `nafi.federated.Training`."""

    epochs: int = Field(default=10, ge=1)
    batch: int = Field(default=32, ge=1)
    optimiser: Optimiser = "sgd"
    rate: float = Field(default=0.01, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    decay: float = Field(default=0.0, ge=0)


class MethodConfig(_Strict):
    """A row of the table: a method, what is fixed, and what is chosen on validation data.

    method: one of nafi.fuse, or of the strategies for an experiment in rounds; "local" for the mean
        of the clients' own models
    options: fixed options; grid: option -> values, of which all combinations are tried. In rounds,
        `rounds` of its own and `calibrate`, see `Trial`, are options, too
    start: whose models are fused; proximal: FedProx's pull to the start, may be in the grid
    widths_of: take the widths that this other method came to, in an experiment in rounds
    attack: what the experiment's attackers do to their weights before they send them
    """

    name: str
    method: str
    options: dict[str, Any] = {}
    grid: dict[str, list[Any]] = {}
    start: Start = "own"
    widths_of: str | None = None
    attack: Attack = "none"

    def candidates(self) -> list[dict[str, Any]]:
        """All combinations of the grid, with the fixed options."""
        values = itertools.product(*self.grid.values())
        return [{**self.options, **dict(zip(self.grid, v, strict=True))} for v in values]


class _Experiment(_Strict):
    """What decides the records of a run.

    clients: every number is run; samples: of the training data, None for all
    hidden: numbers of hidden layers, where the network has a choice of them
    width_limit: most neurons of a group for every matching method, as a factor, or "none"
    budget: most candidates that a method may choose from
    """

    name: str
    title: str
    trials: int = Field(default=5, ge=1)
    seed: int = Field(default=0, ge=0)
    clients: list[int] = Field(min_length=1)
    hidden: list[int] = [1]
    alpha: float = Field(default=0.5, gt=0)
    validation: float = Field(default=0.1, gt=0, lt=1)
    samples: int | None = Field(default=None, ge=1)
    width_limit: PositiveFloat | Literal["none"] = 3.0
    budget: int = Field(default=8, ge=1)
    methods: list[MethodConfig] = Field(min_length=1)

    @property
    def label(self) -> str:
        """What records call it."""
        return self.name

    def settings(self) -> dict[str, Any]:
        """What all cells have in common; records of other settings are not to be mixed."""
        return self.model_dump(exclude={"methods", "clients", "hidden", "trials"}, mode="json")

    def only(self, names: Sequence[str]) -> Self:
        """The experiment with some of its methods."""
        known = [method.name for method in self.methods]
        for name in names:
            if name not in known:
                raise InputError(f"--methods: there is no {name!r}; known: {', '.join(known)}")
        return self.model_copy(update={"methods": [m for m in self.methods if m.name in names]})

    def agrees(self, settings: object) -> bool:
        """Whether these are its settings; what older records do not say is as by default."""
        if not isinstance(settings, dict):
            return False
        own = self.settings()
        usual = {name: type(self).model_fields[name].default for name in own}
        return {name: usual[name] for name in own if name not in settings} | settings == own


class Experiment(_Experiment):
    """Clients train once, and their models are fused in one shot.

    attackers: clients that do what a method's `attack` says
    """

    attackers: int = Field(default=0, ge=0)
    data: Literal["mnist", "digits"] = "mnist"
    width: int = Field(default=100, ge=1)
    training: TrainingConfig = TrainingConfig()


class RoundsExperiment(_Experiment):
    """Clients train in rounds.

    profile: the profile of the file that it was taken from; widths: of the network's groups
    size: width and height of images, for data that come in several
    """

    profile: str | None = None

    data: Literal["cifar10", "carvana"] = "cifar10"
    size: tuple[int, int] | None = None
    rounds: int = Field(ge=1)
    widths: list[int] = [6, 16, 120, 84]
    test_samples: int | None = Field(default=None, ge=1)
    training: RoundConfig = RoundConfig()

    @property
    def label(self) -> str:
        return self.name if self.profile is None else f"{self.name}-{self.profile}"


AnyExperiment = Experiment | RoundsExperiment


def experiment_names() -> list[str]:
    """The experiments that come with nafi."""
    return sorted(p.name.removesuffix(".toml") for p in PAPER.iterdir() if p.name.endswith(".toml"))


def load_experiment(name: str, profile: str | None = None, **changes: Any) -> AnyExperiment:
    """An experiment by its name, or from a TOML file of the user's.

    profile: a table [profile.NAME] of the file whose entries replace those of the experiment
    changes: entries that replace both, None for no change
    """
    data = _read(name)
    profiles = data.pop("profile", {})
    if profile is not None:
        if profile not in profiles:
            known = ", ".join(profiles) or "none"
            raise InputError(f"--profile: {name} has no profile {profile!r}; it has {known}")
        data |= profiles[profile]
    data |= {key: value for key, value in changes.items() if value is not None}
    try:
        if "rounds" in data:
            experiment: AnyExperiment = RoundsExperiment(**data, profile=profile)
        else:
            experiment = Experiment(**data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{name}: {place}: {first['msg'].lower()}") from None
    for method in experiment.methods:
        count = len(method.candidates())
        if count > experiment.budget:
            raise InputError(
                f"{name}: method {method.name} has {count} candidates, more than the budget of "
                f"{experiment.budget} that every method has"
            )
    names = [method.name for method in experiment.methods]
    if len(set(names)) < len(names):
        raise InputError(f"{name}: two methods have the same name")
    sources = [method.name for method in experiment.methods if method.widths_of is None]
    for method in experiment.methods:
        if method.widths_of is not None and method.widths_of not in sources:
            raise InputError(
                f"{name}: method {method.name} takes the widths of {method.widths_of}, which is no "
                "method with widths of its own"
            )
        attackers = getattr(experiment, "attackers", 0)
        fit = 0 < attackers < min(experiment.clients) and method.method != "local"
        if method.attack != "none" and not fit:
            raise InputError(
                f"{name}: method {method.name} is under attack, which needs attackers, fewer than "
                "clients, a method that fuses, and an experiment without rounds"
            )
    return experiment


def _read(name: str) -> dict[str, Any]:
    try:
        if name in experiment_names():
            return tomllib.loads((PAPER / f"{name}.toml").read_text())
        if not name.endswith(".toml"):
            known = ", ".join(experiment_names())
            raise InputError(f"there is no experiment {name!r}; known: {known}, or a .toml file")
        return tomllib.loads(Path(name).read_text())
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{name} is not TOML: {error}") from None
