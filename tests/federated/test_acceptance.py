"""What a server refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nafi.errors import InputError
from nafi.federated import Acceptance, Task, Trainer, Training, Update, UpdateError, make_strategy
from tests.federated.networks import CLASSES, normed, pictures, population, small

RULES = Acceptance(classes=CLASSES)


def asked(frozen: bool = False) -> tuple[Task, Update, Any]:
    """A task, the update that answers it, and what its tensors must look like."""
    strategy = make_strategy("layerwise", small(), Training(epochs=1), rounds=3)
    work, state = Trainer(strategy.architecture, population(), CLASSES), strategy.start()
    if frozen:
        updates = [work(c, strategy.task(state, c))[0] for c in population()]
        state = strategy.aggregate(state, updates)
    task = strategy.task(state, "0")
    return task, work("0", task)[0], strategy.architecture.shapes(state.form)


def with_tensor(update: Update, name: str, tensor: Any) -> Update:
    return replace(update, tensors={**update.tensors, name: tensor})


def without(update: Update, name: str) -> Update:
    return replace(update, tensors={n: t for n, t in update.tensors.items() if n != name})


def spoilt(update: Update, value: float) -> Update:
    tensor = update.tensors["two.bias"].clone()
    tensor[1] = value
    return with_tensor(update, "two.bias", tensor)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_was_asked_for_is_taken(frozen: bool) -> None:
    task, update, shapes = asked(frozen)
    RULES.check(update, "0", task, shapes)
    replace(RULES, max_bytes=10**6, max_norm=100.0).check(update, "0", task, shapes)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda u: replace(u, client="7"), "from '7'"),
        (lambda u: replace(u, round=3), "for round 3, expected 0"),
        (lambda u: replace(u, round=True), "for round True"),
        (lambda u: replace(u, samples=0), "found 0"),
        (lambda u: replace(u, samples=-4), "found -4"),
        (lambda u: replace(u, samples=2.5), r"found 2\.5"),
        (lambda u: replace(u, samples=2**60), "found"),
        (lambda u: replace(u, class_counts=None), "missing, expected 3"),
        (lambda u: replace(u, class_counts=(40, 0)), "found 2, expected 3"),
        (lambda u: replace(u, class_counts=(50, -10, 0)), "expected counts"),
        (lambda u: replace(u, class_counts=(20.0, 20.0, 0.0)), "expected counts"),
        (lambda u: replace(u, class_counts="abc"), "expected counts"),
        (lambda u: replace(u, class_counts=(0, 0, 0)), "sum is 0, but there are 40"),
        (lambda u: without(u, "out.bias"), "lacks out.bias"),
        (lambda u: with_tensor(u, "x" * 500, torch.zeros(1)), "has x{60}$"),
        (lambda u: with_tensor(u, "two.bias", torch.zeros(5)), r"two.bias: found shape \(5,\)"),
        (lambda u: with_tensor(u, "two.bias", torch.zeros(4).double()), "torch.float64, expected"),
        (lambda u: with_tensor(u, "two.bias", torch.zeros(4).int()), "torch.int32"),
        (lambda u: with_tensor(u, "two.bias", [0.0] * 4), "list, expected a tensor"),
        (lambda u: spoilt(u, float("nan")), "two.bias holds values that are NaN"),
        (lambda u: spoilt(u, float("inf")), "two.bias holds values that are NaN or infinite"),
    ],
)
def test_anything_else_is_refused(change: Any, why: str) -> None:
    task, update, shapes = asked()
    with pytest.raises(UpdateError, match=why):
        RULES.check(change(update), "0", task, shapes)


def test_frozen_tensors_are_not_taken_back() -> None:
    task, update, shapes = asked(frozen=True)
    changed = with_tensor(update, "one.bias", task.tensors["one.bias"] + 1)
    with pytest.raises(UpdateError, match=r"it has one\.bias"):
        RULES.check(changed, "0", task, shapes)


def test_limits_of_bytes_and_of_norm() -> None:
    task, update, shapes = asked(frozen=True)
    size = sum(4 * t.numel() for t in update.tensors.values())
    replace(RULES, max_bytes=size).check(update, "0", task, shapes)
    with pytest.raises(UpdateError, match=f"it has {size} bytes"):
        replace(RULES, max_bytes=size - 1).check(update, "0", task, shapes)
    moved = sum(float((t - task.tensors[n]).square().sum()) for n, t in update.tensors.items())
    replace(RULES, max_norm=1.001 * moved**0.5).check(update, "0", task, shapes)
    with pytest.raises(UpdateError, match="moved by"):
        replace(RULES, max_norm=0.999 * moved**0.5).check(update, "0", task, shapes)


def test_negative_variances_are_refused() -> None:
    strategy = make_strategy("fedavg", normed(), Training(epochs=1), rounds=1)
    task = strategy.task(strategy.start(), "0")
    update, _ = Trainer(strategy.architecture, {"0": pictures(10, 0)}, CLASSES)("0", task)
    shapes = strategy.architecture.shapes(task.form)
    RULES.check(update, "0", task, shapes)
    bad = with_tensor(update, "norm2.running_var", -update.tensors["norm2.running_var"])
    with pytest.raises(UpdateError, match="negative variances"):
        RULES.check(bad, "0", task, shapes)


def test_a_quorum_is_a_number_or_a_share() -> None:
    assert Acceptance().needed(7) == 7
    assert Acceptance(quorum=3).needed(7) == 3
    assert Acceptance(quorum=0.5).needed(7) == 4
    assert Acceptance(quorum=1.0).needed(7) == 7
    assert Acceptance(quorum=0.07).needed(100) == 7
    for quorum in (0, 8, 0.0, 1.5, -1):
        with pytest.raises(InputError, match="quorum"):
            Acceptance(quorum=quorum).needed(7)
