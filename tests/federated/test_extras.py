"""What tasks and updates carry beside weights, by a strategy with state of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.federated import (
    STRATEGIES,
    Acceptance,
    Expected,
    FedAvg,
    Noise,
    Samples,
    State,
    Task,
    Trainer,
    Training,
    Update,
    UpdateError,
    make_strategy,
    simulate,
    strategy,
)
from nafi.federated.architecture import Tensors
from tests.federated.networks import CLASSES, FEATURES, population, small

RULES = Acceptance(classes=CLASSES)


@dataclass(frozen=True, eq=False)
class MeanState(State):
    """mean: of all clients' inputs so far; seen: how many samples it is of."""

    mean: Tensors = field(default_factory=dict)
    seen: int = 0


@dataclass(frozen=True, eq=False)
class Means(FedAvg):
    """fedavg that learns the mean of all inputs, and tells clients what it is so far."""

    state_type: ClassVar[type[State]] = MeanState

    def start(self) -> MeanState:
        start = super().start()
        return MeanState(0, start.form, start.tensors, {"mean": torch.zeros(FEATURES)})

    def task(self, state: Any, client: str) -> Task:
        asks = {
            "mean": Expected((FEATURES,)),
            "seconds": Expected((), torch.float64, required=False),
            "spread": Expected((FEATURES,), variance=True, required=False),
        }
        return replace(super().task(state, client), extras=state.mean, asks=asks)

    def aggregate(self, state: Any, updates: Iterable[Update]) -> MeanState:
        total, seen = state.mean["mean"] * state.seen, state.seen

        def counted() -> Iterator[Update]:
            nonlocal total, seen
            for update in updates:
                total = total + update.samples * update.extras["mean"]
                seen += update.samples
                yield update

        after = super().aggregate(state, counted())
        return MeanState(after.round, after.form, after.tensors, {"mean": total / seen}, seen)


def means(model: nn.Module, samples: Samples, task: Task) -> dict[str, Tensor]:
    assert not model.training
    assert task.extras["mean"].shape == (FEATURES,)
    return {"mean": samples.inputs.mean(dim=0)}


def made(rounds: int = 3) -> Means:
    return Means(small(), Training(epochs=1, batch=8, rate=0.05), rounds)


def work(architecture: Any, **options: Any) -> Trainer:
    return Trainer(architecture, population(), CLASSES, **{"extras": means, **options})


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_statistics_reach_the_server_and_come_back_in_tasks(workers: int) -> None:
    algorithm = made()
    run = simulate(algorithm, list(population()), work(algorithm.architecture), workers=workers)
    inputs = torch.cat([samples.inputs for samples in population().values()])
    torch.testing.assert_close(run.state.mean["mean"], inputs.mean(dim=0))  # type: ignore[attr-defined]
    assert run.state.seen == 3 * len(inputs)  # type: ignore[attr-defined]
    weights = sum(4 * t.numel() for t in run.state.tensors.values())
    for record in run.records:
        assert record["bytes_up"] == record["bytes_down"] == 3 * (weights + 4 * FEATURES)


def test_a_state_of_its_own_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole.safetensors", tmp_path / "halves.safetensors"
    clients = list(population())
    simulate(made(), clients, work(small()), checkpoint=whole)
    simulate(made(rounds=1), clients, work(small()), checkpoint=halves)
    simulate(made(), clients, work(small()), checkpoint=halves, resume=True)
    one, two = load_file(whole), load_file(halves)
    assert "mean/mean" in one
    assert set(one) == set(two)
    assert all(torch.equal(one[name], two[name]) for name in one)


def exchange() -> tuple[Task, Update, Any]:
    algorithm = made()
    state = algorithm.start()
    task = algorithm.task(state, "0")
    return (
        task,
        work(algorithm.architecture)("0", task)[0],
        algorithm.architecture.shapes(task.form),
    )


@pytest.mark.parametrize(
    ("extras", "why"),
    [
        ({}, "it lacks mean among its extras"),
        ({"mean": torch.ones(FEATURES), "x": torch.ones(1)}, "it has x among its extras"),
        (
            {"mean": torch.ones(2)},
            r"extra mean: found shape \(2,\) .*, expected \(6,\)",
        ),
        ({"mean": torch.ones(FEATURES).double()}, "extra mean: found .*float64"),
        ({"mean": torch.full((FEATURES,), torch.nan)}, "extra mean holds values that are NaN"),
        ({"mean": torch.full((FEATURES,), 1e30)}, "extra mean holds values beyond"),
        ({"mean": [1.0] * FEATURES}, "extra mean is list, expected a tensor"),
        ([], "extra tensors: found list, expected a table"),
        (
            {"mean": torch.ones(FEATURES), "spread": -torch.ones(FEATURES)},
            "extra spread holds negative variances",
        ),
    ],
)
def test_extras_that_were_not_asked_for_are_refused(extras: Any, why: str) -> None:
    task, update, shapes = exchange()
    RULES.check(update, "0", task, shapes)
    RULES.check(
        replace(update, extras={**update.extras, "seconds": torch.ones((), dtype=torch.float64)}),
        "0",
        task,
        shapes,
    )
    with pytest.raises(UpdateError, match=why):
        RULES.check(replace(update, extras=extras), "0", task, shapes)
    with pytest.raises(UpdateError, match="it has mean among its extras"):
        RULES.check(update, "0", replace(task, asks={}), shapes)


def test_extras_count_among_the_bytes() -> None:
    task, update, shapes = exchange()
    size = sum(4 * t.numel() for t in (*update.tensors.values(), *update.extras.values()))
    replace(RULES, max_bytes=size).check(update, "0", task, shapes)
    with pytest.raises(UpdateError, match=f"it has {size} bytes"):
        replace(RULES, max_bytes=size - 1).check(update, "0", task, shapes)


def test_a_client_that_cannot_answer_says_so_before_it_trains() -> None:
    task, _, _ = exchange()

    def data(client: str) -> Samples:
        raise AssertionError("it asked for samples")

    with pytest.raises(InputError, match="asks for mean beside weights"):
        Trainer(small(), data, CLASSES)("0", task)
    with pytest.raises(InputError, match="extras would leave without noise"):
        Trainer(small(), data, CLASSES, extras=means, noise=Noise(1.0, 1.0))("0", task)


def test_a_strategy_is_one_class_and_one_decorator() -> None:
    """Its name and its options are then known everywhere."""
    try:
        strategy("means")(Means)
        algorithm = make_strategy("means", small(), Training(), rounds=2, clip=3.0, epochs=7)
        assert type(algorithm) is Means
        assert (algorithm.clip, algorithm.training.epochs) == (3.0, 7)
        with pytest.raises(InputError, match="there is one already, Means"):
            strategy("means")(FedAvg)
    finally:
        STRATEGIES.pop("means", None)
