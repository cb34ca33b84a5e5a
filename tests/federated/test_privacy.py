"""Noise on what leaves a client."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nafi.errors import InputError
from nafi.federated import (
    Acceptance,
    Noise,
    Samples,
    Trainer,
    Training,
    make_strategy,
    simulate,
)
from nafi.federated.accountant import gaussian_epsilon
from tests.federated.networks import CLASSES, FEATURES, normed, pictures, population, small

BEFORE = {"a": torch.zeros(200, 50), "b": torch.ones(100), "count": torch.tensor(3)}
AFTER = {"a": torch.full((200, 50), 0.3), "b": torch.full((100,), 1.4), "count": torch.tensor(7)}


def change(sent: dict[str, Tensor]) -> Tensor:
    return torch.cat([(sent[name] - BEFORE[name]).double().flatten() for name in ("a", "b")])


def test_a_short_change_without_noise_is_sent_as_it_is() -> None:
    sent = Noise(clip=100.0, scale=0.0).applied(BEFORE, AFTER)
    for name in AFTER:
        torch.testing.assert_close(sent[name], AFTER[name])


def test_a_long_change_is_shortened_and_keeps_its_direction() -> None:
    found, whole = change(Noise(clip=2.0, scale=0.0).applied(BEFORE, AFTER)), change(AFTER)
    assert float(whole.norm()) > 30
    assert float(found.norm()) == pytest.approx(2.0, rel=1e-5)
    assert float(found @ whole / found.norm() / whole.norm()) == pytest.approx(1.0, abs=1e-5)


def test_the_noise_has_the_size_that_was_asked_for() -> None:
    noise = Noise(clip=2.0, scale=0.5, seed=1)
    added = change(noise.applied(BEFORE, AFTER)) - change(Noise(2.0, 0.0).applied(BEFORE, AFTER))
    assert float(added.std()) == pytest.approx(1.0, rel=0.03)
    assert abs(float(added.mean())) < 0.05
    assert int(noise.applied(BEFORE, AFTER)["count"]) == 7


def test_nobody_can_foretell_the_noise() -> None:
    torch.manual_seed(0)
    one = Noise(1.0, 1.0).applied(BEFORE, AFTER)["a"]
    torch.manual_seed(0)
    two = Noise(1.0, 1.0).applied(BEFORE, AFTER)["a"]
    assert float((one - two).abs().mean()) > 0.5


def test_an_update_leaves_with_noise_on_what_was_trained_alone() -> None:
    architecture = small()
    strategy = make_strategy(
        "layerwise", architecture, Training(epochs=1, batch=8, rate=0.05), rounds=3
    )
    state = strategy.start()
    plain = Trainer(architecture, population(), CLASSES)
    state = strategy.aggregate(
        state, [plain(name, strategy.task(state, name))[0] for name in population()]
    )
    task = strategy.task(state, "1")
    noisy = Trainer(architecture, population(), CLASSES, noise=Noise(0.02, 0.0))
    update, loss = noisy("1", task)
    expected, same = plain("1", task)
    assert loss == same
    assert set(update.tensors) == set(expected.tensors)
    assert not set(update.tensors) & set(task.frozen)
    lengths = [
        sum(float((u.tensors[n] - task.tensors[n]).square().sum()) for n in u.tensors) ** 0.5
        for u in (update, expected)
    ]
    assert lengths[1] > 0.05
    assert lengths[0] == pytest.approx(0.02, rel=1e-3)


def test_variances_stay_variances() -> None:
    architecture = normed()
    strategy = make_strategy(
        "fedavg", architecture, Training(epochs=1, batch=8, rate=0.01), rounds=1
    )
    work = Trainer(architecture, {"a": pictures(20, 0)}, CLASSES, noise=Noise(1.0, 5.0, seed=0))
    update, _ = work("a", strategy.task(strategy.start(), "a"))
    variances = [t for n, t in update.tensors.items() if n.endswith("running_var")]
    assert len(variances) == 3
    assert all(float(t.min()) >= 0 for t in variances)
    assert float(update.tensors["conv2.weight"].std()) > 3


@pytest.mark.parametrize(
    ("clip", "scale"), [(0.0, 1.0), (-1.0, 1.0), (1.0, -1.0), (1.0, float("nan"))]
)
def test_bad_settings_are_refused(clip: float, scale: float) -> None:
    with pytest.raises(InputError, match=r"clip|scale"):
        Noise(clip, scale)


LABELS = torch.tensor([0] * 40 + [1] * 7)
SKEWED = {"a": Samples(torch.randn(len(LABELS), FEATURES), LABELS)}


def sent_counts(noise: Noise, classes: int | None = CLASSES) -> tuple[int, Any]:
    architecture = small()
    training = Training(epochs=1, batch=8, rate=0.05)
    strategy = make_strategy("fedavg", architecture, training, rounds=1)
    task = strategy.task(strategy.start(), "a")
    work = Trainer(architecture, SKEWED, classes, noise=noise)
    update, _ = work("a", task)
    shapes = architecture.shapes(task.form)
    Acceptance(classes=classes).check(update, "a", task, shapes)
    return update.samples, update.class_counts


def test_counts_are_exact_noisy_or_withheld() -> None:
    assert sent_counts(Noise(1.0, 0.1)) == (47, (40, 7, 0))
    assert sent_counts(Noise(1.0, 0.1, counts="withheld")) == (3, (1, 1, 1))
    assert sent_counts(Noise(1.0, 0.1, counts="withheld"), None) == (1, None)
    total, counts = sent_counts(Noise(1.0, 0.1, counts="noisy", seed=1))
    assert total == sum(counts)
    assert counts != (40, 7, 0)
    assert sent_counts(Noise(1.0, 0.1, counts="noisy", count_scale=1e-6)) == (47, (40, 7, 0))


def test_the_noise_of_counts_has_the_size_that_was_asked_for() -> None:
    drawn = Noise(1.0, 0.1, seed=3, counts="noisy", count_scale=20.0).disclosed((1000,) * 4000)
    assert np.std(drawn) == pytest.approx(20.0, rel=0.05)
    assert np.mean(drawn) == pytest.approx(1000.0, abs=1.5)
    low = Noise(1.0, 0.1, seed=3, counts="noisy").disclosed((0,) * 50)
    assert min(low) == 0 < sum(low)


def test_a_run_says_for_which_epsilon_it_was() -> None:
    noise = Noise(1.0, 4.0, counts="noisy", count_scale=4.0)
    strategy = make_strategy("fedavg", small(), Training(epochs=1, batch=8, rate=0.05), rounds=3)
    clients = list(population())
    run = simulate(strategy, clients, Trainer(small(), population(), CLASSES, noise=noise))
    assert run.asked == dict.fromkeys(clients, 3)
    epsilon = noise.epsilon(max(run.asked.values()), 1e-5)
    assert epsilon == gaussian_epsilon(4.0, 3, 1e-5) == noise.count_epsilon(3, 1e-5)
    assert Noise(1.0, 4.0).count_epsilon(3, 1e-5) == inf
    assert Noise(1.0, 4.0, counts="withheld").count_epsilon(3, 1e-5) == 0


def test_bad_settings_of_counts_are_refused() -> None:
    odd: Any = "some"
    with pytest.raises(InputError, match="counts: found 'some', expected one of exact, noisy"):
        Noise(1.0, 1.0, counts=odd)
    with pytest.raises(InputError, match="count_scale: found 0"):
        Noise(1.0, 1.0, count_scale=0)


def test_noise_that_is_no_number_is_refused() -> None:
    odd: Any = "a"
    for wrong, name in (((odd, 1), "clip"), ((1, odd), "scale"), ((1, 1, odd), "seed")):
        with pytest.raises(InputError, match=f"{name}: found 'a', expected a"):
            Noise(*wrong)
