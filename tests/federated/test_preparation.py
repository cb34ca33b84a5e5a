"""How often networks are prepared and rebuilt in a round, and that it makes no difference."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nafi.federated import Layerwise, Trainer, Training, simulate
from nafi.federated.codec import pack, unpack
from nafi.fusion import Nafi
from nafi.graph.trace import named_tensors
from tests.federated.networks import CLASSES, blobs, normed, pictures, small

TRAINING = Training(epochs=1, batch=8, rate=0.05)
COUNTED = {"rebuild": "nafi.graph.rebuild", "prepare_networks": "nafi.fusion.networks"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts calls of these functions, wherever they were imported to."""
    count: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            count[name] += 1
            return function(*args, **options)

        return counted

    for name, home in COUNTED.items():
        function = getattr(importlib.import_module(home), name)
        counted = counting(name, function)
        for module in [m for n, m in sys.modules.items() if n.split(".")[0] == "nafi"]:
            if getattr(module, name, None) is function:
                monkeypatch.setattr(module, name, counted)
    return count


@pytest.mark.parametrize(("make", "data", "layers"), [(small, blobs, 3), (normed, pictures, 4)])
def test_an_evaluated_round_prepares_once(
    make: Any, data: Any, layers: int, calls: Counter[str]
) -> None:
    """Version 0.1.0 prepared twice and rebuilt four to eight times in a round that matches."""
    method = Nafi(penalty=0.0, evidence=500.0)
    strategy = Layerwise(make(), TRAINING, 2 * layers, method=method)
    clients = {str(s): data(30, s) for s in range(3)}
    rounds: list[Counter[str]] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        rounds.append(Counter(calls))
        calls.clear()
        return {}

    calls.clear()
    simulate(
        strategy, list(clients), Trainer(strategy.architecture, clients, CLASSES), evaluate=evaluate
    )
    assert not calls  # the model of the last round is that of its evaluation
    assert [count["prepare_networks"] for count in rounds] == [1] * 2 * layers
    rebuilt = [count["rebuild"] for count in rounds]
    assert rebuilt[0] <= 3  # which widths are fixed, the widths after the round, and the model's
    assert all(count <= 2 for count in rebuilt[1:layers])
    assert rebuilt[layers:] == [0] * layers


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"clip": 2.0, "trim": 0.34, "max_width": 1.5}])
@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize(("make", "data", "layers"), [(small, blobs, 3), (normed, pictures, 4)])
def test_shared_networks_are_those_of_the_state(
    make: Any, data: Any, layers: int, freeze: bool, options: dict[str, Any]
) -> None:
    """The model of a state that was written and read, which has nothing to share, is the same."""
    method = Nafi(penalty=0.0, evidence=500.0, **options)
    strategy = Layerwise(make(), TRAINING, layers + 2, freeze=freeze, method=method)
    clients = {str(s): data(30, s) for s in range(3)}
    work, state = Trainer(strategy.architecture, clients, CLASSES), strategy.start()
    while not strategy.finished(state):
        state = strategy.aggregate(state, [work(c, strategy.task(state, c))[0] for c in clients])
        shared = named_tensors(strategy.model(state))
        read = unpack(type(state), *pack(state))
        for asked in (read, state):  # the second time, nothing is kept of it either
            found = named_tensors(strategy.model(asked))
            assert all(torch.equal(shared[name], found[name]) for name in shared)


def test_newcomers_of_a_round_share_their_weights(calls: Counter[str]) -> None:
    strategy = Layerwise(small(), TRAINING, 6, method=Nafi(penalty=0.0, evidence=500.0))
    clients = {str(s): blobs(30, s) for s in range(3)}
    work, state = Trainer(strategy.architecture, clients, CLASSES), strategy.start()
    for _ in range(4):
        state = strategy.aggregate(state, [work(c, strategy.task(state, c))[0] for c in clients])
    calls.clear()
    tasks = [strategy.task(state, f"new {s}") for s in range(3)]
    assert not calls["prepare_networks"]  # those of the round before are still there
    for task in tasks[1:]:
        assert torch.equal(task.tensors["two.weight"], tasks[0].tensors["two.weight"])


def test_evaluate_may_spoil_its_model() -> None:
    strategy = Layerwise(small(), TRAINING, 3)
    clients = {str(s): blobs(30, s) for s in range(3)}
    work = Trainer(strategy.architecture, clients, CLASSES)

    def spoil(model: nn.Module) -> dict[str, float]:
        nn.init.zeros_(next(model.parameters()))
        model.train()
        return {}

    found = simulate(strategy, list(clients), work, evaluate=spoil)
    expected = simulate(strategy, list(clients), work)
    assert not found.model.training
    for key, tensor in expected.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[key], tensor)
