"""Strategies by name: their options, all checked when a strategy is made."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from nafi.errors import InputError, NafiError
from nafi.federated import (
    STRATEGIES,
    Samples,
    State,
    Strategy,
    Trainer,
    Training,
    make_strategy,
    option_names,
    simulate,
)
from nafi.federated.averaging import FedAvg
from nafi.federated.strategies import strategy
from nafi.fusion import Nafi, Transport
from nafi.options import plain_data
from tests.federated.networks import small

COMMON = {"architecture", "training", "rounds", "seed", "fraction"}


def made(name: str, **options: Any) -> Strategy:
    return make_strategy(name, small(), Training(epochs=1), **{"rounds": 2, **options})


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_option_can_be_given(name: str) -> None:
    """At its default, where that depends on no other."""
    plain = made(name)
    for option in option_names(name):
        assert option not in COMMON
        for owner in (plain, getattr(plain, "method", None), plain.training):
            if owner is not None and hasattr(owner, option) and option != "method":
                again = made(name, **{option: getattr(owner, option)})
                assert again.settings() == plain.settings()
                break


@pytest.mark.parametrize("name", ["layerwise", "match-then-average"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"divergence": "kll"},
        {"mass": -1},
        {"sweeps": -1},
        {"compat": "x"},
        {"penalty": -1},
        {"penalty": [0.1, 0.2]},
        {"evidence": 0},
        {"prior_ratio": "x"},
        {"max_width": -2},
        {"batchnorm": "x"},
        {"method": "ensemble"},
        {"trim": 0.5},
        {"clip": -1.0},
    ],
)
def test_wrong_values_of_the_method_are_refused_when_a_strategy_is_made(
    name: str, wrong: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        made(name, **wrong)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedadam"])
def test_what_an_average_does_not_use_is_refused(name: str) -> None:
    for option in ("batchnorm", "penalty", "method"):
        with pytest.raises(InputError, match=rf"{name} has no option '{option}'"):
            made(name, **{option: "x"})


def test_names_that_are_none_are_refused() -> None:
    for name in ("fedsgd", "", None, ["fedavg"]):
        with pytest.raises(InputError, match=r"strategy: found .*, expected one of .*fedadam"):
            make_strategy(name, small(), Training(), rounds=1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="method ot has no option 'penalty'"):
        made("match-then-average", method="ot", penalty=0.1)


def never(client: str) -> Samples:
    raise AssertionError("a client trained")


@pytest.mark.parametrize(
    ("name", "options"),
    [("layerwise", {}), ("match-then-average", {}), ("fedavg", {"class_shares": True})],
)
def test_classes_that_no_layer_has_are_refused_before_any_round(
    name: str, options: dict[str, Any]
) -> None:
    strategy = made(name, **options)
    with pytest.raises(InputError, match="found 8 classes, but no layer"):
        simulate(strategy, ["0", "1"], Trainer(strategy.architecture, never, 8))


def test_class_shares_without_classes_are_refused_before_any_round() -> None:
    strategy = made("fedavg", class_shares=True)
    with pytest.raises(InputError, match="class_shares: clients must count"):
        simulate(strategy, ["0", "1"], Trainer(strategy.architecture, never))


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "2"])
def test_workers_are_a_whole_number(workers: Any) -> None:
    strategy = made("fedavg")
    with pytest.raises(InputError, match="workers: found"):
        simulate(strategy, ["0"], Trainer(strategy.architecture, never), workers=workers)


def loss(factor: float, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return factor * (outputs - labels).square().mean()


class Callable:
    def __call__(self) -> None:
        pass


SCRIPT = """
import json
from tests.federated.test_registry import SETTINGS
from nafi.options import plain_data
print(json.dumps(plain_data(SETTINGS), sort_keys=True))
"""
SETTINGS = {
    "partial": partial(loss, 2.0, labels=partial(loss)),
    "function": loss,
    "class": Samples,
    "object": Callable(),
    "method": Nafi(penalty=0.1),
    "training": Training(),
    "words": frozenset({"b", "a", "c"}),
}


@pytest.mark.slow
def test_settings_are_the_same_in_another_process() -> None:
    here = json.dumps(plain_data(SETTINGS), sort_keys=True)
    assert " at 0x" not in here
    command = [sys.executable, "-c", SCRIPT]
    there = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(there.stdout) == json.loads(here)
    other = plain_data({**SETTINGS, "partial": partial(loss, 3.0, labels=partial(loss))})
    assert json.dumps(other, sort_keys=True) != here
    assert plain_data(partial(loss, 2.0)) == {
        "function": "tests.federated.test_registry.loss",
        "arguments": [2.0],
    }


def test_the_settings_of_every_strategy_are_plain_data() -> None:
    for name in STRATEGIES:
        settings = made(name).settings()
        assert json.loads(json.dumps(settings)) == settings
        assert settings["strategy"] == STRATEGIES[name].__name__


@dataclass(frozen=True, eq=False)
class Listed(State):
    seen: list[int] = field(default_factory=list)


def test_a_state_that_cannot_be_written_is_refused_when_a_strategy_is_registered() -> None:
    class Odd(FedAvg):
        state_type = Listed

    with pytest.raises(InputError, match=r"strategy odd: its state Listed: seen: .*list\[int\]"):
        strategy("odd")(Odd)
    assert "odd" not in STRATEGIES


@pytest.mark.parametrize("name", ["layerwise", "match-then-average"])
def test_a_seed_of_the_method_is_refused(name: str) -> None:
    """That of the strategy would take its place."""
    with pytest.raises(InputError, match="seed: give it to the strategy; found 5"):
        made(name, method=Nafi(seed=5))
    assert made(name, method=Nafi(), seed=5).settings()["seed"] == 5


def test_seeds_that_no_checkpoint_holds_are_refused() -> None:
    assert made("fedavg", seed=2**63 - 1).seed == 2**63 - 1
    for seed in (2**63, 2**70, -1):
        with pytest.raises(InputError, match=f"seed: found {seed}"):
            made("fedavg", seed=seed)


def test_what_is_no_architecture_or_training_is_refused() -> None:
    odd: Any = "x"
    for name in ("fedavg", "layerwise"):
        with pytest.raises(InputError, match="architecture: found 'x', expected Architecture"):
            make_strategy(name, odd, Training(), rounds=1)
        with pytest.raises(InputError, match="training: found 'x', expected Training"):
            make_strategy(name, small(), odd, rounds=1)


def test_a_method_whose_package_is_missing_is_refused_before_any_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ot", None)
    methods: list[dict[str, Any]] = [{}, {"method": Transport()}]
    for name, options in zip(("ot", "match-then-average"), methods, strict=True):
        with pytest.raises(NafiError, match="POT"):
            made(name, **options)


@pytest.mark.parametrize("name", ["layerwise", "match-then-average", "match-refit"])
def test_what_needs_a_probe_is_refused_before_clients_train(name: str) -> None:
    with pytest.raises(InputError, match="bases: 'learned' needs a probe"):
        made(name, bases="learned")


@pytest.mark.parametrize(
    "name", ["layerwise", "match-then-average", "match-refit", "ot", "rebasin"]
)
def test_what_is_only_done_with_a_probe_is_refused(name: str) -> None:
    """Rounds have none, and it changed nothing."""
    options: dict[str, Any] = {"refit": False, "weigh_inputs": False}
    if name not in ("ot", "rebasin"):
        options |= {"match_by": "weights", "prune_from": 1.0}
    for option, value in options.items():
        with pytest.raises(InputError, match=f"{option}: found {value!r}, .* leave it out"):
            made(name, **{option: value})


@pytest.mark.parametrize("name", ["match-then-average", "match-refit"])
def test_a_budget_below_one_client_is_refused_before_clients_train(name: str) -> None:
    """One that a client just fits is kept; nothing is pruned in rounds."""
    own = 4 * sum(p.numel() for p in small().factory().parameters())
    for budget in ("0.5 params", "0.5 flops", f"{own / 2} B", 0.5):
        with pytest.raises(InputError, match=r"budget: .* which is 2\.00 times that; allow more"):
            made(name, budget=budget)
    for budget in ("1.0 params", "1.0 flops", f"{own} B", 1):
        assert made(name, budget=budget).method.budget == budget


@pytest.mark.parametrize("name", ["match-then-average", "match-refit"])
def test_a_list_is_refused_where_no_score_can_choose_and_one_value_is_no_list(name: str) -> None:
    for option, values in (("budget", ["1.5 params", "2 params"]), ("penalty", [0.1, 0.2])):
        with pytest.raises(InputError, match=f"{option}: a list .* rounds .*; give one value"):
            made(name, **{option: values})
        assert made(name, **{option: values[:1]}).settings() == (
            made(name, **{option: values[0]}).settings()
        )


@pytest.mark.parametrize(
    ("option", "value", "advice"),
    [
        ("budget", "1.5 params", "give max_width"),
        ("budget", 2.0, "give max_width"),
        ("budget", "300 kB", "give max_width"),
        ("tree", 2, "keep= bounds their number"),
        ("ray", "local", "leave it out"),
    ],
)
def test_what_only_a_match_of_all_groups_at_once_can_do_is_refused_layer_by_layer(
    option: str, value: Any, advice: str
) -> None:
    """It changed nothing before, without a word."""
    with pytest.raises(InputError, match=f"{option}: found .* layerwise does not use .*{advice}"):
        made("layerwise", **{option: value})
    with pytest.raises(InputError, match=f"{option}: found"):
        made("layerwise", method=Nafi(**{option: value}))
