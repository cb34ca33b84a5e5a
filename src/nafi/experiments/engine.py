"""A method on the clients of one trial.

Hides: how candidates are run, in one shot or in rounds, and checkpoints. Promises: the same
clients, data and seeds for every method; a run that was killed resumes from its last finished
round.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import nan
from typing import Any

import numpy as np
from torch import nn

from nafi.errors import InputError
from nafi.experiments.attacks import (
    AttackedWork,
    Work,
    backdoor_success,
    drawn_attackers,
    poisoned,
    recalls,
)
from nafi.experiments.cells import Cell
from nafi.experiments.clients import (
    CachedTrainer,
    Recipe,
    attacked,
    digest,
    population,
    runs_folder,
)
from nafi.experiments.controls import as_control, strategy_of
from nafi.experiments.entries import Record, entry, mean_loss
from nafi.experiments.methods import (
    ALONE,
    ENSEMBLE,
    LOCAL,
    OWN_DATA,
    Options,
    fuse_clients,
    fusion_options,
    option_names,
)
from nafi.experiments.trials import Trial, load_trial
from nafi.federated import (
    Acceptance,
    Architecture,
    Progress,
    Run,
    Strategy,
    Task,
    Trainer,
    Update,
    make_strategy,
    simulate,
)
from nafi.fusion import measured_size
from nafi.graph import named_tensors


def try_candidates(cell: Cell, progress: Progress | None, device: str) -> list[Record]:
    """An entry for each candidate of the cell's method."""
    bench = _Bench(cell, load_trial(cell.trial_settings), progress, device)
    run: Callable[[Options], Record]
    if cell.method.method in ALONE:
        run = bench.run_alone
    elif cell.experiment.rounds is None or cell.method.method == ENSEMBLE:
        run = bench.run_one_shot
    else:
        run = bench.run_rounds
    return [run(candidate) for candidate in cell.method.candidates()]


@dataclass(frozen=True, eq=False)
class _Bench:
    """Where the candidates of one cell are run."""

    cell: Cell
    trial: Trial
    progress: Progress | None
    device: str

    def run_alone(self, candidate: Options) -> Record:
        """Clients that never talk: the means of their scores, or those of the best on test data."""
        start = time.perf_counter()
        models = population(self.cell.recipe(candidate), self.trial, self.device)
        scored = [(self.trial.score(model), model) for model in models]
        if self.cell.method.method != LOCAL:
            scored = [max(scored, key=lambda pair: pair[0]["test"])]
        validation, test = _means([scores for scores, _ in scored]).values()
        seconds = time.perf_counter() - start
        of_models = [model for _, model in scored]
        details = self._sites(of_models) | self._loss(of_models)
        return entry(candidate, validation, test, [], seconds, **details)

    def run_one_shot(self, candidate: Options) -> Record:
        """Clients train alone, and are fused once."""
        cell = self.cell
        models = attacked(
            self._population(cell.recipe(candidate)),
            cell.method.attack,
            cell.experiment.attackers,
            cell.seed,
        )
        start = time.perf_counter()
        model, widths = self._fused(candidate, models)
        seconds = time.perf_counter() - start
        size = measured_size(model, models, self.trial.example_inputs)
        details: Record = {"parameters": int(size["params"]), "multiply_adds": int(size["flops"])}
        model = self.trial.calibrate(model, int(candidate.get("calibrate", 0)))
        if candidate.get("head"):
            model = self.trial.with_head(model)
        validation, test = self.trial.score(model).values()
        details |= self._pictures(model) | self._sites([model]) | self._loss([model])
        return entry(candidate, validation, test, widths, seconds, **details)

    def _fused(
        self, candidate: Options, models: Sequence[nn.Module]
    ) -> tuple[nn.Module, list[int]]:
        """One network of the clients', and its widths."""
        if candidate.get("probe") == OWN_DATA:
            return self._fused_on_own_data(candidate, models)
        inputs, counted = candidate.get("probe", 0), candidate.get("counts", True)
        result = fuse_clients(
            self.cell.method.method,
            models,
            self.trial.example_inputs,
            self.cell.fusion_seed,
            fusion_options(self._limited(candidate)),
            self.trial.class_counts if counted else None,
            self.trial.sample_counts if counted else None,
            self.architecture.spec,
            self.trial.probe(inputs) if isinstance(inputs, int) and inputs else inputs or None,
            int(candidate.get("distill", 0)),
        )
        return result.model, list(result.widths.values())

    def _fused_on_own_data(
        self, candidate: Options, models: Sequence[nn.Module]
    ) -> tuple[nn.Module, list[int]]:
        """Refitted by sums over the samples that each client has."""
        trial, classes = self.trial, self.trial.problem.classes
        strategy = make_strategy(
            "match-refit",
            self.architecture,
            self.cell.training,
            rounds=1,
            seed=self.cell.fusion_seed,
            method=self.cell.method.method,
            **fusion_options(self._limited(candidate)),
        )
        answer = Trainer(self.architecture, trial.data, classes, trial.problem.loss, self.device)
        trained = dict(zip(trial.data, models, strict=True))
        tables = trial.class_counts

        def work(client: str, task: Task) -> tuple[Update, float]:
            if task.sums:
                return answer(client, task)
            place, count = list(trained).index(client), len(trial.data[client])
            of_classes = None if tables is None else tuple(int(n) for n in tables[place])
            tensors = named_tensors(trained[client])
            weights = {name: tensors[name].detach() for name in self.architecture.spec.axes}
            return Update(client, task.round, weights, count, of_classes), nan

        acceptance = Acceptance(classes=classes)
        run = simulate(strategy, list(trained), work, acceptance=acceptance, progress=self.progress)
        return run.model, list(run.records[-1]["widths"])

    def run_rounds(self, candidate: Options) -> Record:
        """Clients train in rounds; the last one counts."""
        cell, trial = self.cell, self.trial
        options = self._limited(candidate)
        rounds = int(options.pop("rounds", cell.experiment.rounds))
        judged = partial(trial.calibrate, samples=int(options.pop("calibrate", 0)))
        made = make_strategy(
            strategy_of(cell.method.method),
            self.architecture,
            cell.training,
            rounds=rounds,
            seed=cell.fusion_seed,
            **options,
        )
        strategy = as_control(made, cell.method.method)

        def evaluate(model: nn.Module) -> dict[str, float]:
            scores = trial.score(judged(model))
            if cell.experiment.solved_head:
                solved = trial.score(trial.with_head(model))
                scores |= {f"head_{name}": value for name, value in solved.items()}
            return {name: round(value, 3) for name, value in scores.items()}

        start = time.perf_counter()
        run = self._simulate(strategy, candidate, evaluate)
        seconds = time.perf_counter() - start
        last = run.records[-1]
        final = judged(run.model)
        details = {
            "rounds": run.records,
            **self._pictures(final),
            **self._sites([final]),
            **self._harm(final),
        }
        if "head_test" in last:
            details["head_test"] = last["head_test"]
        validation, test = last["validation"], last["test"]
        return entry(candidate, validation, test, last["widths"], seconds, **details)

    def _pictures(self, model: nn.Module) -> Record:
        """What a report can draw of a few samples, if the problem has something to draw."""
        draw = self.trial.problem.pictures
        return {} if draw is None else {"pictures": draw(model, self.trial.test)}

    def _loss(self, models: Sequence[nn.Module]) -> Record:
        """The mean loss on test data, where the problem has a name for it."""
        problem = self.trial.problem
        if problem.loss_name is None:
            return {}
        losses = [mean_loss(model, self.trial.test, problem.loss) for model in models]
        return {problem.loss_name: round(float(np.mean(losses)), 4)}

    @property
    def _target(self) -> int:
        """The class that attackers of this trial are after."""
        return self.cell.seed % (self.trial.problem.classes or 1)

    def _harm(self, model: nn.Module) -> Record:
        """What attackers are after, where there may be any: single classes, and a backdoor."""
        classes = self.trial.problem.classes
        if not self.cell.experiment.attackers or classes is None:
            return {}
        test, target = self.trial.test, self._target
        return {
            "target": target,
            "recalls": recalls(model, test, classes),
            "backdoor": backdoor_success(model, test, target),
        }

    def _sites(self, models: Sequence[nn.Module]) -> Record:
        """The score of every site, the mean over models, if the test data come from sites."""
        means = _means([self.trial.site_scores(model) for model in models])
        return {"sites": {site: round(value, 3) for site, value in means.items()}} if means else {}

    @cached_property
    def architecture(self) -> Architecture:
        """The network that clients train, at the widths of another method's model if need be."""
        method = self.cell.method
        if method.widths_of is not None and self.cell.widths is None:
            raise InputError(f"{method.name}: the widths of {method.widths_of} are not known")
        network = self.cell.experiment.network
        return self.trial.architecture(network, self.cell.widths or self.cell.local_widths)

    @cached_property
    def _populations(self) -> dict[Recipe, list[nn.Module]]:
        return {}

    def _population(self, recipe: Recipe) -> list[nn.Module]:
        """Candidates that differ in fusion alone share their clients."""
        if recipe not in self._populations:
            self._populations[recipe] = population(recipe, self.trial, self.device)
        return self._populations[recipe]

    def _limited(self, candidate: Options) -> dict[str, Any]:
        """The options with the experiment's limit on widths, where the method has one."""
        experiment, method = self.cell.experiment, self.cell.method.method
        limit = experiment.width_limit
        if limit == "none" or "max_width" not in option_names(method, experiment.in_rounds):
            return dict(candidate)
        return {"max_width": limit, **candidate}

    def _simulate(
        self, strategy: Strategy, candidate: Options, evaluate: Callable[..., dict[str, float]]
    ) -> Run:
        """Run a strategy from wherever it was left; its checkpoint goes when it is done."""
        trial, problem = self.trial, self.trial.problem
        label = f"{self.cell.method.name} {candidate}"
        settings = json.dumps([label, strategy.settings(), strategy.rounds])
        checkpoint = runs_folder() / f"{digest(trial.settings.key, settings)}.safetensors"
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(
            strategy.architecture, trial.data, problem.classes, problem.loss, self.device
        )
        clients, work = self._attacked(
            trainer, CachedTrainer(trainer, trial.settings.key, strategy.architecture.form.widths)
        )
        run = simulate(
            strategy,
            clients,
            work,
            acceptance=Acceptance(classes=problem.classes),
            evaluate=evaluate,
            checkpoint=checkpoint,
            resume=True,
            progress=self.progress,
        )
        checkpoint.unlink(missing_ok=True)
        return run

    def _attacked(self, trainer: Trainer, work: Work) -> tuple[list[str], Work]:
        """The clients, attackers last as they want to know what the others send, and their work."""
        data, attack = self.trial.data, self.cell.method.attack
        if attack == "none":
            return list(data), work
        classes = self.trial.problem.classes
        assert classes is not None
        attackers = drawn_attackers(list(data), self.cell.experiment.attackers, self.cell.seed)
        honest = [client for client in data if client not in attackers]
        if attack == "absent":
            return honest, work
        harmful = poisoned(data, attackers, attack, self._target, classes)
        attacked = AttackedWork(
            trainer.architecture,
            work,
            replace(trainer, data=harmful),
            attack,
            attackers,
            self._target,
        )
        return [*honest, *attackers], attacked


def _means(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Name -> the mean of what all have under it."""
    return {name: float(np.mean([of_one[name] for of_one in scores])) for name in scores[0]}
