"""FedAdam against a loop by hand, and its name wherever strategies are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nafi.errors import InputError
from nafi.federated import STRATEGIES, FedAdam, Trainer, Training, Update, make_strategy, simulate
from nafi.federated.flower import _understood
from nafi.federated.strategies import option_names
from tests.federated.networks import CLASSES, normed, pictures, population, small

TRAINING = Training(epochs=1, batch=8, rate=0.05)
SETTINGS = {"server_rate": 0.2, "beta1": 0.7, "beta2": 0.8, "tau": 0.05}


def made(**options: Any) -> FedAdam:
    strategy = make_strategy("fedadam", small(), TRAINING, **{"rounds": 3, "seed": 1, **options})
    assert isinstance(strategy, FedAdam)
    return strategy


def test_three_rounds_equal_a_loop_by_hand() -> None:
    strategy = made(**SETTINGS)
    rng = np.random.default_rng(0)
    state = strategy.start()
    x = {n: t.double().numpy() for n, t in state.tensors.items()}
    m = {n: np.zeros_like(t) for n, t in x.items()}
    v = {n: np.full_like(t, 0.05**2) for n, t in x.items()}
    for round in range(3):
        changes = [{n: rng.normal(size=t.shape) for n, t in x.items()} for _ in range(2)]
        sent = [{n: (x[n] + change[n]).astype(np.float32) for n in x} for change in changes]
        updates = [
            Update(str(s), round, {n: torch.from_numpy(t) for n, t in own.items()}, 10 + 20 * s)
            for s, own in enumerate(sent)
        ]
        state = strategy.aggregate(state, updates)
        for n in x:
            d = (10 * sent[0][n].astype(float) + 30 * sent[1][n].astype(float)) / 40 - x[n]
            m[n] = 0.7 * m[n] + 0.3 * d
            v[n] = 0.8 * v[n] + 0.2 * d**2
            x[n] = x[n] + 0.2 * m[n] / (np.sqrt(v[n]) + 0.05)
            for found, expected in ((state.tensors, x), (state.first, m), (state.second, v)):
                np.testing.assert_allclose(found[n].numpy(), expected[n], rtol=1e-4, atol=1e-5)
    assert state.round == 3


def test_one_step_of_a_constant_change_is_closed_form() -> None:
    """The first step is eta (1 - beta1) d / (sqrt(beta2 tau^2 + (1 - beta2) d^2) + tau)."""
    strategy = made(**SETTINGS)
    start = strategy.start()
    moved = {n: t + 0.5 for n, t in start.tensors.items()}
    after = strategy.aggregate(start, [Update("a", 0, moved, 3)])
    step = 0.2 * 0.3 * 0.5 / ((0.8 * 0.05**2 + 0.2 * 0.25) ** 0.5 + 0.05)
    for name, tensor in after.tensors.items():
        torch.testing.assert_close(tensor - start.tensors[name], torch.full_like(tensor, step))


def test_statistics_are_averaged_and_counters_stay() -> None:
    """Adam would make a negative variance of a falling one."""
    strategy = make_strategy("fedadam", normed(), TRAINING, rounds=2)
    start = strategy.start()
    assert not [name for name in start.first if "running" in name or "num" in name]
    data = {c: pictures(20, int(c)) for c in "01"}
    work = Trainer(strategy.architecture, data, CLASSES)
    updates = [work(c, strategy.task(start, c))[0] for c in data]
    after = strategy.aggregate(start, updates)
    name = "norm1.running_var"
    mean = (updates[0].tensors[name] + updates[1].tensors[name]) / 2
    torch.testing.assert_close(after.tensors[name], mean)
    run = simulate(strategy, list(data), work)
    assert float(run.model.get_buffer(name).min()) > 0


@pytest.mark.parametrize("stopped", [1, 2])
def test_it_resumes_to_the_same_bytes(stopped: int, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole.safetensors", tmp_path / "halves.safetensors"
    clients, work = list(population()), Trainer(small(), population(), CLASSES)
    run = simulate(made(), clients, work, checkpoint=whole)
    simulate(made(rounds=stopped), clients, work, checkpoint=halves)
    again = simulate(made(), clients, work, checkpoint=halves, resume=True)
    one, two = load_file(whole), load_file(halves)
    assert {name.partition("/")[0] for name in one} == {"tensors", "first", "second"}
    assert set(one) == set(two)
    assert all(torch.equal(one[name], two[name]) for name in one)
    for key, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[key])


def test_moments_of_another_shape_are_refused() -> None:
    strategy = made()
    state = strategy.start()
    wrong = {**state.first, "one.bias": torch.zeros(7)}
    with pytest.raises(InputError, match=r"one\.bias is not what a network"):
        strategy.check_state(type(state)(0, state.form, state.tensors, wrong, state.second))


@pytest.mark.parametrize(
    "wrong", [{"beta1": 1.0}, {"beta2": -0.1}, {"tau": 0.0}, {"server_rate": "x"}]
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        made(**wrong)


def test_its_name_and_its_options_are_known_by_themselves() -> None:
    assert STRATEGIES["fedadam"] is FedAdam
    assert option_names("fedadam")[:4] == list(SETTINGS)
    known = {**SETTINGS, "epochs": 3, "rounds": 2}
    assert _understood("fedadam", known) == known
    with pytest.raises(InputError, match="did you mean server_rate"):
        _understood("fedadam", {"server_rates": 1})
