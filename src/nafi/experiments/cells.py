"""The cells of an experiment: each is one method on the clients of one trial.

Hides: where seeds come from. Promises: a cell is a small value that decides its record; it can be
sent to another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nafi.experiments.clients import Recipe
from nafi.experiments.config import Experiment, MethodConfig
from nafi.experiments.entries import Record
from nafi.experiments.methods import Options, training_options
from nafi.experiments.trials import TrialSettings
from nafi.federated import Training, derived_seed

# Problem, trial, clients, hidden layers, method.
Key = tuple[str | None, int, int, int, str]


@dataclass(frozen=True)
class Cell:
    """A method on the clients of one trial; widths: those of another method's model."""

    experiment: Experiment
    trial: int
    clients: int
    hidden: int
    method: MethodConfig
    widths: tuple[int, ...] | None = None

    @property
    def key(self) -> Key:
        """What tells the cells of an experiment apart."""
        problem = self.experiment.problem
        return (problem, self.trial, self.clients, self.hidden, self.method.name)

    @property
    def label(self) -> str:
        """What a progress line calls it; trials as records count them, from 0."""
        problem = f"{self.experiment.problem}: " if self.experiment.problem else ""
        layers = f", {self.hidden} hidden layers" if len(self.experiment.hidden) > 1 else ""
        return f"{problem}{self.method.name}, {self.clients} clients{layers}, trial {self.trial}"

    @property
    def first_trial(self) -> Key | None:
        """The cell that chooses for it; None if it chooses itself, or has no choice."""
        once = self.experiment.choose == "first trial" and self.trial > 0
        if not once or len(self.method.candidates()) == 1:
            return None
        return replace(self, trial=0).key

    @property
    def width_source(self) -> Key | None:
        """The cell whose widths it takes; None if it has its own."""
        other = self.method.widths_of
        return None if other is None else (*self.key[:-1], other)

    @property
    def needs(self) -> list[Key]:
        """The cells that must be done before it."""
        return [key for key in (self.first_trial, self.width_source) if key is not None]

    def informed(self, done: Mapping[Key, Record]) -> Cell:
        """With what the records of the cells that it needs say."""
        method, widths = self.method, self.widths
        if self.first_trial is not None:
            method = method.settled(done[self.first_trial]["chosen"])
        if self.width_source is not None:
            widths = tuple(done[self.width_source]["widths"])
        return replace(self, method=method, widths=widths)

    @property
    def seed(self) -> int:
        """Of the clients: their data, first weights and batches."""
        return 1000 * self.experiment.seed + self.trial

    @property
    def fusion_seed(self) -> int:
        """Of the method; one shot has always taken the number of the trial."""
        return self.seed if self.experiment.in_rounds else self.trial

    @property
    def local_widths(self) -> tuple[int, ...]:
        """Of the network that clients train."""
        experiment = self.experiment
        return tuple(experiment.widths or [experiment.width] * self.hidden)

    @property
    def training(self) -> Training:
        """How clients train, unless the method says otherwise."""
        return Training(**self.experiment.training.model_dump())

    @property
    def trial_settings(self) -> TrialSettings:
        """The clients that all methods of the trial meet."""
        e = self.experiment
        return TrialSettings(
            data=e.data,
            clients=self.clients,
            seed=self.seed,
            alpha=e.alpha,
            validation=e.validation,
            samples=e.samples,
            # One shot draws the same samples for all trials.
            samples_seed=self.seed if e.in_rounds else 0,
            test_samples=e.test_samples,
            size=e.size,
            partition=e.partition,
        )

    def recipe(self, candidate: Options) -> Recipe:
        """The population of clients that train alone, with a candidate's options of training."""
        training = replace(self.training, **training_options(candidate))
        rounds, clients = self.experiment.rounds, range(self.clients)
        if rounds is None:
            starts = [derived_seed(self.seed, self.hidden, s) for s in clients]
        else:  # as many epochs as all rounds have
            starts = [self.seed + s for s in clients]
            training = replace(training, epochs=training.epochs * rounds)
        if self.method.start == "shared":
            starts = starts[:1] * len(starts)
        return Recipe(
            self.trial_settings,
            self.experiment.network,
            self.widths or self.local_widths,
            tuple(starts),
            training,
            stacked=rounds is None,
        )

    def recipes(self) -> list[Recipe]:
        """The populations that it shares with other cells: those of one shot."""
        unknown = self.method.widths_of is not None and self.widths is None
        if self.experiment.in_rounds or unknown:
            return []
        return list(dict.fromkeys(self.recipe(c) for c in self.method.candidates()))


def cells(experiment: Experiment) -> list[Cell]:
    """All cells of an experiment, those of one population next to each other.

    A method that needs more clients than there are has none, nor has one of `without`.
    """
    return [
        Cell(part, trial, clients, hidden, method)
        for part in experiment.parts
        for trial in range(part.trials)
        for hidden in part.hidden
        for clients in part.clients
        for method in part.methods
        if method.name not in part.without and method.least_clients() <= clients
    ]
