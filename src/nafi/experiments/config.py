"""Experiments as configuration.

Hides: what the data and their problem say where an experiment says nothing. Promises: entries of
the right kind, with data, a network and widths that there are.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from nafi.errors import InputError
from nafi.experiments.methods import LOCAL
from nafi.experiments.problems import PROBLEMS, problem_named
from nafi.federated import Optimiser

# What clients start from: weights of their own, or the same for all.
Start = Literal["own", "shared"]
# What attackers do; see `nafi.experiments.attacks`.
Attack = Literal[
    "none",
    "absent",
    "flip",
    "flip-1000",
    "scale",
    "flip-and-scale",
    "alie",
    "min-max",
    "ipm",
    "label-flip",
    "backdoor",
    "quiet-backdoor",
    "erase-class",
    "sybil",
]
# Attacks that multiply what a client learnt, and by how much: its weights in one shot, in rounds
# its change of them.
FACTORS: dict[Attack, float] = {
    "none": 1.0,
    "flip": -1.0,
    "flip-1000": -1000.0,
    "scale": 10.0,
    "flip-and-scale": -10.0,
}
# When settings are chosen on validation data: in every trial, or in the first one for all others.
Choose = Literal["every trial", "first trial"]
# How samples fall to clients: as is usual for the data, or every class to one client alone.
Partition = Literal["usual", "classes", "same"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainingConfig(_Strict):
    """How clients train; see `nafi.federated.Training`."""

    epochs: int = Field(default=10, ge=1)
    batch: int = Field(default=32, ge=1)
    optimiser: Optimiser = "sgd"
    rate: float = Field(default=0.01, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    decay: float = Field(default=0.0, ge=0)


class MethodConfig(_Strict):
    """A row of the table: a method, what is fixed, and what is chosen on validation data.

    method: one of nafi.fuse, or of the strategies for an experiment in rounds; "local" for the mean
        of the clients' own models, "best" for the one with the highest test score
    options: fixed options; grid: option -> values, of which all combinations are tried; variants:
        tables of options, each of which is tried with all combinations of the grid. Options of
        training, like FedProx's `proximal`, are among them, and those of the laboratory:
        `calibrate`, training inputs on which the statistics of a model are measured before it is
        judged; in one shot `probe`, training inputs without labels that the method is given, and
        `head`, whether the last layer is solved from all clients' labelled statistics; in rounds
        `rounds`, instead of the experiment's
    start: whose models are fused
    widths_of: take the widths that this other method came to
    attack: what the experiment's attackers do
    """

    name: str
    method: str
    options: dict[str, Any] = {}
    grid: dict[str, list[Any]] = {}
    variants: list[dict[str, Any]] = Field(default=[{}], min_length=1)
    start: Start = "own"
    widths_of: str | None = None
    attack: Attack = "none"

    def candidates(self) -> list[dict[str, Any]]:
        """All combinations of the grid, for every variant, with the fixed options."""
        values = list(itertools.product(*self.grid.values()))
        return [
            {**self.options, **variant, **dict(zip(self.grid, v, strict=True))}
            for variant in self.variants
            for v in values
        ]

    def least_clients(self) -> int:
        """How many clients there must be: a stack cannot keep more than there are."""
        return max(int(candidate.get("keep") or 1) for candidate in self.candidates())

    def settled(self, candidate: Mapping[str, Any]) -> Self:
        """The method with nothing left to choose."""
        return self.model_copy(update={"options": dict(candidate), "grid": {}, "variants": [{}]})


class PaperRow(_Strict):
    """What the paper has for a number of clients and hidden layers: (mean, spread) by method."""

    clients: int
    hidden: int = 1
    figures: list[tuple[float, float]]


class PaperConfig(_Strict):
    """The paper's table; samples: so many it trained on; note: how far ours can be compared."""

    methods: list[str]
    samples: int | None = None
    note: str | None = None
    rows: list[PaperRow]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if any(len(row.figures) != len(self.methods) for row in self.rows):
            raise ValueError("every row needs a mean and a spread for each method")
        return self


class ReportConfig(_Strict):
    """What a report shows of the records.

    views: names of tables and figures, see `nafi.reports`; none for those of any experiment
    titles: view -> another title for its tables, or for its figure if it has no table
    paper: what the view "paper" compares with
    leads: pairs of methods, of which the view "leads" says how far the first is ahead
    """

    views: list[str] = []
    titles: dict[str, str] = {}
    paper: PaperConfig | None = None
    leads: list[tuple[str, str]] = []

    @model_validator(mode="after")
    def _check_titles(self) -> Self:
        for name in self.titles:
            if self.views and name not in self.views:
                raise ValueError(f"titles: {name!r} is none of the views {', '.join(self.views)}")
        return self

    def as_table(self) -> dict[str, Any]:
        """What is said in it, as plain data."""
        return self.model_dump(mode="json", exclude_defaults=True)


class Experiment(_Strict):
    """Clients train once and are fused in one shot, or they train in rounds.

    profile: the profile of the file that it was taken from
    rounds: None for one shot: clients train alone, and a method of `nafi.fuse` fuses them
    data: a name of `PROBLEMS`, by default mnist in one shot and cifar10 in rounds
    network: one of those of the data, by default the usual one
    size: width and height of images, for data that come in several
    clients: every number is run; samples: of the training data, None for all
    partition: "usual" for the data, by Dir(alpha) for classes; "classes": each client has its own;
        "same": every client has all data, and they differ in their seeds alone
    hidden, width: numbers of hidden layers and their width, where the network has a choice of them;
    widths: of the network's layers, where it has none
    width_limit: most neurons of a group for every matching method, as a factor, or "none"
    budget: most candidates that a method may choose from
    choose: when it chooses; what it takes in the "first trial" of a number of clients, it keeps in
        the others, which saves running every candidate in all of them
    attackers: clients that do what a method's `attack` says; in a file, `attacks` may list several,
        and every method is then run under each of them, as "METHOD under ATTACK"
    solved_head: in rounds, also score every model with the last layer solved from the labelled
        statistics of all clients, which changes nothing else
    without: methods that are not run, as those of a file that make no sense for one of its problems
    problems: name -> the experiment on one of several problems; in a file, what differs there from
        the entries that all have in common
    problem: its name, if it is one of these
    """

    name: str
    title: str
    profile: str | None = None
    rounds: int | None = Field(default=None, ge=1)
    data: str = Field(default=None, validate_default=True)
    network: str = Field(default=None, validate_default=True)
    size: tuple[int, int] | None = None
    trials: int = Field(default=5, ge=1)
    seed: int = Field(default=0, ge=0)
    clients: list[PositiveInt] = Field(min_length=1)
    hidden: list[PositiveInt] = Field(default=[1], min_length=1)
    width: int = Field(default=100, ge=1)
    widths: list[PositiveInt] | None = Field(default=None, validate_default=True)
    alpha: float = Field(default=0.5, gt=0)
    partition: Partition = "usual"
    validation: float = Field(default=0.1, gt=0, lt=1)
    samples: int | None = Field(default=None, ge=1)
    test_samples: int | None = Field(default=None, ge=1)
    width_limit: PositiveFloat | Literal["none"] = 3.0
    budget: int = Field(default=8, ge=1)
    choose: Choose = "every trial"
    attackers: int = Field(default=0, ge=0)
    solved_head: bool = False
    training: TrainingConfig = Field(default={}, validate_default=True)
    methods: list[MethodConfig] = Field(min_length=1)
    without: list[str] = []
    report: ReportConfig = ReportConfig()
    problems: dict[str, Experiment] = {}
    problem: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _list_attacks(cls, content: object) -> object:
        """Make a method for each of the attacks, if the problems do not."""
        if not isinstance(content, dict) or "attacks" not in content:
            return content
        rest = {name: value for name, value in content.items() if name != "attacks"}
        attacks, methods = content["attacks"], content.get("methods")
        if not isinstance(attacks, list) or not isinstance(methods, list):
            raise ValueError("attacks: expected a list of attacks, and methods to attack")
        return {**rest, "methods": [m for each in methods for m in _under(each, attacks)]}

    @model_validator(mode="before")
    @classmethod
    def _complete_problems(cls, content: object) -> object:
        """Give every problem the entries that all have in common."""
        if not isinstance(content, dict) or not isinstance(content.get("problems"), dict):
            return content
        common = {name: value for name, value in content.items() if name != "problems"}
        return {
            **content,
            "problems": {
                name: {**common, **table, "problem": name} if isinstance(table, dict) else table
                for name, table in content["problems"].items()
            },
        }

    @model_validator(mode="after")
    def _check_problems(self) -> Self:
        """What a file says once must not differ."""
        for name, part in self.problems.items():
            for entry in ("name", "title", "profile", "report"):
                if getattr(part, entry) != getattr(self, entry):
                    raise ValueError(f"problems.{name}: {entry} is the same for all problems")
            if part.problems:
                raise ValueError(f"problems.{name}: a problem has no problems of its own")
        return self

    @field_validator("name", "profile", mode="after")
    @classmethod
    def _no_path(cls, name: str | None) -> str | None:
        """Records are written to a file of this name."""
        if name is not None and re.fullmatch(r"\w[\w.-]{0,99}", name) is None:
            raise ValueError(
                f"found {name[:60]!r}, expected at most 100 letters, digits, dots, hyphens and "
                "underscores"
            )
        return name

    @field_validator("data", mode="before")
    @classmethod
    def _usual_data(cls, name: object, info: ValidationInfo) -> object:
        usual = "mnist" if info.data.get("rounds") is None else "cifar10"
        return usual if name is None else name

    @field_validator("data", mode="after")
    @classmethod
    def _known_data(cls, name: str) -> str:
        problem_named(name)
        return name

    @field_validator("network", mode="before")
    @classmethod
    def _usual_network(cls, name: object, info: ValidationInfo) -> object:
        problem = PROBLEMS.get(info.data.get("data", ""))
        return problem.usual_network if name is None and problem is not None else name

    @field_validator("network", mode="after")
    @classmethod
    def _known_network(cls, name: str, info: ValidationInfo) -> str:
        problem = PROBLEMS.get(info.data.get("data", ""))
        if problem is not None and name not in problem.networks:
            known = ", ".join(problem.networks)
            raise ValueError(f"found {name!r}, expected one of {known} for {info.data['data']}")
        return name

    @field_validator("widths", mode="before")
    @classmethod
    def _widths_of_network(cls, widths: object, info: ValidationInfo) -> object:
        problem = PROBLEMS.get(info.data.get("data", ""))
        network = problem.networks.get(info.data.get("network", "")) if problem else None
        return network.widths if widths is None and network is not None else widths

    @field_validator("training", mode="before")
    @classmethod
    def _training_of_data(cls, training: object, info: ValidationInfo) -> object:
        """What is not said about training is as usual for the data."""
        problem = PROBLEMS.get(info.data.get("data", ""))
        if problem is None or not isinstance(training, dict):
            return training
        usual = asdict(problem.training)
        return {name: usual[name] for name in TrainingConfig.model_fields} | training

    @property
    def label(self) -> str:
        """What records call it."""
        return self.name if self.profile is None else f"{self.name}-{self.profile}"

    @property
    def parts(self) -> list[Experiment]:
        """The experiments on each of its problems; itself, if it names none."""
        return list(self.problems.values()) or [self]

    @property
    def in_rounds(self) -> bool:
        """Whether clients train more than once, or might."""
        return self.rounds is not None

    def settings(self) -> dict[str, Any]:
        """What all cells have in common; records of other settings are not to be mixed."""
        of_cells = {"methods", "clients", "hidden", "trials", "budget", "choose", "without"}
        return self.model_dump(
            exclude=of_cells | {"report", "problems", "solved_head"}, mode="json"
        )

    def only_problems(self, names: Sequence[str]) -> Self:
        """The experiment with no method left for its other problems; their records still fit."""
        for name in names:
            if name not in self.problems:
                known = "; ".join(self.problems) or "none"
                raise InputError(f"--problem: there is no {name!r}; known: {known}")
        parts = {
            name: part if name in names else part._with_methods([])
            for name, part in self.problems.items()
        }
        return self.model_copy(update={"problems": parts})

    def only(self, names: Sequence[str]) -> Self:
        """The experiment with some of its methods."""
        known = dict.fromkeys(method.name for part in self.parts for method in part.methods)
        for name in names:
            if name not in known:
                raise InputError(f"--methods: there is no {name!r}; known: {', '.join(known)}")
        return self._with_methods(names)

    def _with_methods(self, names: Sequence[str]) -> Self:
        parts = {name: part._with_methods(names) for name, part in self.problems.items()}
        methods = [method for method in self.methods if method.name in names]
        return self.model_copy(update={"methods": methods, "problems": parts})

    def agrees(self, settings: object) -> bool:
        """Whether these are its settings; what older records do not say is as by default."""
        if not isinstance(settings, dict):
            return False
        # Older records of one shot do not name their profile, but all that it changes.
        settings = {"profile": self.profile, **settings, "clients": [1]}
        settings["methods"] = [MethodConfig(name="any", method=LOCAL)]
        try:
            return type(self)(**settings).settings() == self.settings()
        except ValidationError:
            return False


def _under(method: object, attacks: Sequence[object]) -> list[object]:
    """A method without attackers, and under each of the attacks."""
    if not isinstance(method, dict):
        return [method]
    name = method.get("name")
    attacked = [{**method, "name": f"{name} under {a}", "attack": a} for a in attacks]
    return [method, *attacked]
