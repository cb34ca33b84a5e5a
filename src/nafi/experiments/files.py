"""Experiments from files: those that come with nafi, and those of users.

Hides: TOML, profiles, and what can be wrong with the methods of either. Promises: an `Experiment`
in which every name is known and every method has as many candidates as the others may have.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nafi.errors import InputError
from nafi.experiments.config import FACTORS, Experiment, MethodConfig
from nafi.experiments.methods import ALONE, check_method
from nafi.experiments.problems import PROBLEMS

PAPER = resources.files("nafi.experiments") / "paper"


def experiment_names() -> list[str]:
    """The experiments that come with nafi."""
    return sorted(p.name.removesuffix(".toml") for p in PAPER.iterdir() if p.name.endswith(".toml"))


def load_experiment(name: str, profile: str | None = None, **changes: Any) -> Experiment:
    """An experiment by its name, or from a TOML file of the user's.

    profile: a table [profile.NAME] of the file whose entries replace those of the experiment
    changes: entries that replace both, None for no change
    """
    content = _read(name)
    profiles = content.pop("profile", {})
    if not isinstance(profiles, dict) or not all(isinstance(p, dict) for p in profiles.values()):
        raise InputError(f"{name}: profile: expected tables [profile.NAME]")
    elsewhere = _method_names([content, *profiles.values()])
    if profile is not None:
        if profile not in profiles:
            known = ", ".join(profiles) or "none"
            raise InputError(f"--profile: {name} has no profile {profile!r}; it has {known}")
        content |= profiles[profile]
    _change(content, {key: value for key, value in changes.items() if value is not None})
    try:
        experiment = Experiment(**{**content, "profile": profile})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise InputError(f"{name}: {place}: {reason[:1].lower()}{reason[1:]}") from None
    try:
        for part in experiment.parts:
            _check_methods(part)
        _check_leads(experiment, elsewhere)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    return experiment


def _change(content: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Replace entries of an experiment, and of all its problems."""
    problems = content.get("problems")
    for table in (content, *(problems.values() if isinstance(problems, dict) else ())):
        if isinstance(table, dict):
            table |= changes


def report_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The [report] table for a record: its own, or that of the experiment of its name.

    Under "run" it has what `nafi run` is given to run the experiment: its name if it comes with
    nafi, else a file of that name.
    """
    config = record.get("config")
    name = config.get("name") if isinstance(config, dict) else None
    own = record.get("report")
    table = own if isinstance(own, dict) else packaged_report(name)
    if name is None:
        return dict(table)
    return {**table, "run": name if name in experiment_names() else f"{name}.toml"}


def packaged_report(name: str | None) -> dict[str, Any]:
    """The [report] table of an experiment that comes with nafi; empty for any other."""
    if name not in experiment_names():
        return {}
    return load_experiment(str(name)).report.as_table()


def _method_names(tables: Sequence[Mapping[str, Any]]) -> set[str]:
    """The names of all methods of a file and its profiles, as far as they can be read."""
    lists = [table.get("methods") for table in tables]
    methods = [method for each in lists if isinstance(each, list) for method in each]
    return {str(method.get("name")) for method in methods if isinstance(method, dict)}


def _check_leads(experiment: Experiment, elsewhere: set[str]) -> None:
    """Refuse a comparison of methods that neither the experiment has nor another profile."""
    known = elsewhere | {method.name for part in experiment.parts for method in part.methods}
    for method in itertools.chain.from_iterable(experiment.report.leads):
        if method not in known:
            raise InputError(f"report: leads: there is no method {method!r}")


def _check_methods(experiment: Experiment) -> None:
    """Refuse methods that cannot be run, or not be compared."""
    if experiment.widths is not None and experiment.hidden != [1]:
        raise InputError("hidden: the network's layers are fixed by widths; leave hidden out")
    names = [method.name for method in experiment.methods]
    if len(set(names)) < len(names):
        raise InputError("two methods have the same name")
    for name in experiment.without:
        if name not in names:
            raise InputError(f"without: there is no method {name!r}")
    for method in experiment.methods:
        count = len(method.candidates())
        if count > experiment.budget:
            raise InputError(
                f"method {method.name} has {count} candidates, more than the budget of "
                f"{experiment.budget} that every method has"
            )
        try:
            check_method(method.method, method.candidates(), experiment.in_rounds)
        except InputError as error:
            raise InputError(f"method {method.name}: {error}") from None
        _check_widths(experiment, method)
        _check_attack(experiment, method)


def _check_widths(experiment: Experiment, method: MethodConfig) -> None:
    if method.widths_of is None:
        return
    if method.widths_of not in [m.name for m in experiment.methods if m.widths_of is None]:
        raise InputError(
            f"method {method.name} takes the widths of {method.widths_of}, which is no method with "
            "widths of its own"
        )


def _check_attack(experiment: Experiment, method: MethodConfig) -> None:
    possible = 0 < experiment.attackers < min(experiment.clients) and method.method not in ALONE
    if method.attack != "none" and not possible:
        raise InputError(
            f"method {method.name} is under attack, which needs attackers, fewer than clients, and "
            "a method that fuses"
        )
    if not experiment.in_rounds and method.attack not in FACTORS:
        raise InputError(
            f"method {method.name}: the attack {method.attack} needs rounds; without them, there "
            f"are {', '.join(FACTORS)}"
        )
    if method.attack != "none" and PROBLEMS[experiment.data].classes is None:
        raise InputError(f"method {method.name}: attacks are on classes, which the data have not")


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
