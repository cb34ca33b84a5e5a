"""What a server refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nafi.errors import InputError
from nafi.federated import Acceptance, Task, Trainer, Training, Update, UpdateError, make_strategy
from nafi.federated.acceptance import MOST, MOST_SAMPLES
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


@pytest.mark.parametrize(
    ("limits", "culprit"),
    [
        ({"max_bytes": 0}, "max_bytes: found 0"),
        ({"max_bytes": 2.5}, r"max_bytes: found 2\.5"),
        ({"classes": -1}, "classes: found -1"),
        ({"classes": True}, "classes: found True"),
        ({"max_norm": 0.0}, r"max_norm: found 0\.0"),
        ({"max_norm": -1}, "max_norm: found -1"),
        ({"max_norm": float("inf")}, "max_norm: found inf"),
        ({"max_norm": float("nan")}, "max_norm: found nan"),
        ({"max_norm": "much"}, "max_norm: found 'much'"),
        ({"quorum": 1.5}, r"quorum: found 1\.5"),
        ({"quorum": 0.0}, r"quorum: found 0\.0"),
        ({"quorum": 0}, "quorum: found 0"),
    ],
)
def test_limits_that_make_no_sense_are_refused_at_once(limits: Any, culprit: str) -> None:
    with pytest.raises(InputError, match=culprit):
        Acceptance(**limits)


def test_the_smallest_limits_are_limits() -> None:
    one = Acceptance(quorum=1, max_bytes=1, classes=1, max_norm=1e-9)
    assert one.needed(5) == 1
    assert Acceptance(max_norm=2).max_norm == 2


def test_counts_are_taken_up_to_their_limit() -> None:
    assert MOST_SAMPLES == 2**48
    task, update, shapes = asked()
    most = replace(update, samples=MOST_SAMPLES, class_counts=(MOST_SAMPLES, 0, 0))
    RULES.check(most, "0", task, shapes)
    one_more = replace(update, samples=MOST_SAMPLES + 1, class_counts=(MOST_SAMPLES + 1, 0, 0))
    with pytest.raises(UpdateError, match="samples: found"):
        RULES.check(one_more, "0", task, shapes)


def test_weights_are_taken_up_to_their_limit_and_variances_up_to_its_square() -> None:
    assert MOST == 1e9
    strategy = make_strategy("fedavg", normed(), Training(epochs=1), rounds=1)
    task = strategy.task(strategy.start(), "0")
    update, _ = Trainer(strategy.architecture, {"0": pictures(10, 0)}, CLASSES)("0", task)
    shapes = strategy.architecture.shapes(task.form)
    for name, most in (("norm2.weight", MOST), ("norm2.running_var", MOST**2)):
        RULES.check(
            with_tensor(update, name, torch.full_like(update.tensors[name], most)),
            "0",
            task,
            shapes,
        )
        beyond = torch.full_like(update.tensors[name], 1.001 * most)
        with pytest.raises(UpdateError, match=f"{name} holds values beyond"):
            RULES.check(with_tensor(update, name, beyond), "0", task, shapes)
