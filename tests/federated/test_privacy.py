"""Noise on what leaves a client."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nafi.errors import InputError
from nafi.federated import Noise, Trainer, Training, make_strategy
from tests.federated.networks import CLASSES, normed, pictures, population, small

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


def test_noise_that_is_no_number_is_refused() -> None:
    odd: Any = "a"
    for wrong, name in (((odd, 1), "clip"), ((1, odd), "scale"), ((1, 1, odd), "seed")):
        with pytest.raises(InputError, match=f"{name}: found 'a', expected a"):
            Noise(*wrong)
