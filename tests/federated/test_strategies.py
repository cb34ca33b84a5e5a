"""The contract of every strategy, and what is particular to averaging."""

from __future__ import annotations

import gc
import weakref
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from nafi.errors import InputError, NafiError
from nafi.federated import (
    STRATEGIES,
    FedAvg,
    FusionRounds,
    Samples,
    State,
    Strategy,
    Trainer,
    Training,
    Update,
    make_strategy,
    simulate,
)
from nafi.federated.checkpoint import read_state, write_state
from nafi.federated.codec import pack
from nafi.federated.messages import task_from, task_to, update_from, update_to
from nafi.federated.strategy import size_of
from nafi.graph import permute
from nafi.graph.trace import named_tensors
from tests.federated.networks import CLASSES, FEATURES, accuracy, blobs, normed, population, small

TRAINING = Training(epochs=2, batch=8, rate=0.05, momentum=0.9)
ROUNDS = 4


def made(name: str, **options: Any) -> Strategy:
    return make_strategy(name, small(), TRAINING, **{"rounds": ROUNDS, "seed": 1, **options})


def trainer(strategy: Strategy, clients: int = 3, **options: Any) -> Trainer:
    return Trainer(strategy.architecture, population(clients), CLASSES, **options)


def weights(strategy: Strategy, clients: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    run = simulate(
        strategy, [str(s) for s in range(clients)], trainer(strategy, clients), **options
    )
    return dict(run.state.tensors)


def same(one: Any, two: Any) -> bool:
    return set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", STRATEGIES)
class TestEveryStrategy:
    @pytest.mark.slow
    def test_runs_to_a_model_that_has_learnt(self, name: str) -> None:
        """Over eight seeds: 0.969 to 0.976, with a deviation of at most 0.016."""
        scores = []
        for seed in range(3):
            strategy = made(name, epochs=5, seed=seed)
            run = simulate(strategy, ["0", "1", "2"], trainer(strategy))
            assert strategy.finished(run.state)
            assert run.state.round == ROUNDS == len(run.records)
            assert not run.model.training
            scores.append(accuracy(run.model, blobs(200, 50)))
        assert fmean(scores) > 0.85, scores

    @pytest.mark.slow
    def test_gives_the_same_twice(self, name: str) -> None:
        assert same(weights(made(name)), weights(made(name)))

    def test_a_task_and_an_update_survive_the_wire(self, name: str) -> None:
        strategy = made(name)
        work, state = trainer(strategy), strategy.start()
        for _ in range(2):
            tasks = {c: strategy.task(state, c) for c in ("0", "1", "2")}
            for task in tasks.values():
                back = task_from(task_to(task))
                assert same(back.tensors, task.tensors)
                assert (back.form, back.frozen, back.training) == (
                    task.form,
                    task.frozen,
                    task.training,
                )
                assert (back.round, back.start, back.seed) == (task.round, task.start, task.seed)
            updates = [work(client, task)[0] for client, task in tasks.items()]
            for update in updates:
                back_update = update_from(update_to(update))
                assert same(back_update.tensors, update.tensors)
                assert back_update.class_counts == update.class_counts
                assert back_update.samples == update.samples == sum(update.class_counts or ())
            state = strategy.aggregate(state, updates)

    def test_the_state_survives_a_file(self, name: str, tmp_path: Any) -> None:
        strategy = made(name)
        work, state = trainer(strategy), strategy.start()
        file = tmp_path / "run.safetensors"
        for _ in range(ROUNDS):
            updates = [work(c, strategy.task(state, c))[0] for c in ("0", "1", "2")]
            state = strategy.aggregate(state, updates)
            write_state(file, state, [{"round": state.round}], strategy.settings())
            back, records, settings = read_state(file, strategy.state_type)
            assert records == [{"round": state.round}]
            assert settings == strategy.settings()
            assert type(back) is type(state) is strategy.state_type
            strategy.check_state(back)
            (found, tensors), (expected, wanted) = pack(back), pack(state)
            assert found == expected
            assert same(tensors, wanted)
            assert same(named_tensors(strategy.model(back)), named_tensors(strategy.model(state)))

    def test_bytes_are_those_of_the_tensors(self, name: str) -> None:
        strategy = made(name)
        work = trainer(strategy)
        run = simulate(strategy, ["0", "1", "2"], work)
        state = strategy.start()
        for record in run.records:
            down = up = 0
            while state.round < record["round"]:  # a round may take several messages
                tasks = {c: strategy.next_task(state, c) for c in ("0", "1", "2")}
                updates = [work(client, task)[0] for client, task in tasks.items()]
                down += sum(size_of(t.tensors) + size_of(t.extras) for t in tasks.values())
                up += sum(size_of(u.tensors) + size_of(u.extras) for u in updates)
                state = strategy.advance(state, updates)
            assert (record["bytes_down"], record["bytes_up"]) == (down, up)

    @pytest.mark.slow
    def test_half_of_the_clients_will_do(self, name: str) -> None:
        """Over eight seeds: 0.91 to 0.97, with a deviation of at most 0.11."""
        scores = []
        names = [str(s) for s in range(5)]
        for seed in range(3):
            strategy = made(name, fraction=0.5, seed=seed)
            run = simulate(strategy, names, trainer(strategy, 5))
            assert [record["clients"] for record in run.records] == [2] * ROUNDS
            chosen = [tuple(strategy.select(strategy.start(), names)) for _ in range(2)]
            assert chosen[0] == chosen[1]
            scores.append(accuracy(run.model, blobs(200, 50)))
        assert fmean(scores) > 0.5, scores

    def test_odd_clients_are_welcome(self, name: str) -> None:
        """One has a single class, one fewer samples than a batch, one a single sample."""
        strategy = made(name)
        data = {
            "one class": blobs(30, 1, classes=(2,)),
            "few": blobs(3, 2),
            "one sample": blobs(1, 3),
            "all": blobs(60, 4),
        }
        run = simulate(strategy, list(data), Trainer(strategy.architecture, data, CLASSES))
        for tensor in run.state.tensors.values():
            assert torch.isfinite(tensor).all()

    def test_unknown_options_are_named(self, name: str) -> None:
        with pytest.raises(InputError, match=r"colour.*epochs"):
            made(name, colour="red")


def test_unknown_strategies_and_bad_numbers_are_named() -> None:
    with pytest.raises(InputError, match=r"'fedsgd'.*layerwise"):
        made("fedsgd")
    with pytest.raises(InputError, match="rounds"):
        made("fedavg", rounds=0)
    with pytest.raises(InputError, match="fraction"):
        made("fedavg", fraction=0.0)
    with pytest.raises(InputError, match="method"):
        made("layerwise", method="ot")
    with pytest.raises(InputError, match="penalty"):
        made("layerwise", method="pfnm", penalty=0.1)
    for wrong in ({"method": "ensemble"}, {"evidence": -3.0}, {"method": "ot", "penalty": 0.1}):
        with pytest.raises(InputError, match="|".join(wrong)):
            made("match-then-average", **wrong)
    with pytest.raises(InputError, match="differ"):
        simulate(made("fedavg"), ["a", "a"], trainer(made("fedavg")))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("fedavg", {"rounds": "six"}),
        ("fedavg", {"rounds": 2.5}),
        ("fedavg", {"fraction": "x"}),
        ("fedavg", {"fraction": True}),
        ("fedavg", {"seed": -1}),
        ("fedavg", {"seed": "x"}),
        ("fedavg", {"class_shares": "no"}),
        ("layerwise", {"freeze": "no"}),
        ("layerwise", {"batchnorm": "x"}),
        ("layerwise", {"restore_norm": "foo"}),
        ("layerwise", {"max_width": 2}),
        ("layerwise", {"max_width": 0.5}),
        ("layerwise", {"max_width": {"one": 3}}),
        ("match-then-average", {"max_width": 2}),
        ("match-then-average", {"restore_norm": "foo"}),
        ("match-then-average", {"batchnorm": "fold"}),
        ("match-then-average", {"clip": 2.0, "batchnorm": "average"}),
        ("layerwise", {"batchnorm": "average"}),
    ],
)
def test_settings_of_another_kind_are_refused_before_any_round(
    name: str, wrong: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        made(name, **wrong)


@pytest.mark.parametrize("name", ["ot", "rebasin"])
def test_aligned_rounds_average_normalisation_as_it_is(name: str) -> None:
    """Clients that hardly moved since the last round keep their order: the rest is a mean."""
    strategy = make_strategy(name, normed(), TRAINING, rounds=2, restore_norm=False)
    form = strategy.architecture.form
    drawn = [strategy.architecture.drawn(form, seed) for seed in range(2)]
    state = strategy.aggregate(
        strategy.start(), [Update(str(s), 0, t, 10, None) for s, t in enumerate(drawn)]
    )
    moved = [
        {n: t * (1 + 0.01 * s) if t.is_floating_point() else t for n, t in state.tensors.items()}
        for s in range(3)
    ]
    assert (moved[2]["norm1.running_var"] != 1).all()
    found = strategy.aggregate(
        state, [Update(str(s), 1, t, 10 + s, None) for s, t in enumerate(moved)]
    )
    for tensor, expected in ((found.tensors[n], moved[1][n]) for n in moved[1]):
        torch.testing.assert_close(tensor, expected)


def test_a_limit_below_some_layers_may_still_be_right() -> None:
    """The wider ones might keep their width for reasons of their own."""
    assert made("layerwise", max_width=4).method.max_width == 4


def test_samples_have_as_many_labels_as_inputs() -> None:
    with pytest.raises(InputError, match="found 40 inputs, 30 labels"):
        Samples(torch.zeros(40, FEATURES), torch.zeros(30))


def test_fedavg_is_the_mean_by_samples() -> None:
    strategy = made("fedavg")
    work, state = trainer(strategy), strategy.start()
    updates = [work(c, strategy.task(state, c))[0] for c in ("0", "1", "2")]
    after = strategy.aggregate(state, iter(updates))
    shares = np.array([40, 47, 54]) / 141
    for name, tensor in after.tensors.items():
        expected = sum(s * u.tensors[name].double() for s, u in zip(shares, updates, strict=True))
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-7)


def test_class_shares_weigh_the_rows_of_the_output_layer() -> None:
    strategy = FedAvg(small(), TRAINING, 1, class_shares=True)
    state = strategy.start()
    counts = [(10, 0, 0), (30, 5, 0)]
    tensors = [{n: torch.randn_like(t) for n, t in state.tensors.items()} for _ in counts]
    updates = [
        Update(str(s), 0, own, sum(c), c)
        for s, (own, c) in enumerate(zip(tensors, counts, strict=True))
    ]
    after = strategy.aggregate(state, updates).tensors
    for name in ("out.weight", "out.bias"):
        one, two = (own[name] for own in tensors)
        torch.testing.assert_close(after[name][0], 0.25 * one[0] + 0.75 * two[0])
        torch.testing.assert_close(after[name][1], two[1])
        torch.testing.assert_close(after[name][2], state.tensors[name][2])  # nobody has seen it
    torch.testing.assert_close(
        after["one.weight"], (tensors[0]["one.weight"] + tensors[1]["one.weight"]) / 2
    )


def test_class_shares_need_class_counts_that_fit() -> None:
    strategy = FedAvg(small(), TRAINING, 1, class_shares=True)
    state = strategy.start()
    for counts, why in [(None, "client 0 sent no class counts"), ((5, 0, 0, 0), "found 4 classes")]:
        with pytest.raises(InputError, match=why):
            strategy.aggregate(state, [Update("0", 0, state.tensors, 5, counts)])


def test_averaging_holds_one_update_at_a_time() -> None:
    strategy = made("fedavg")
    state = strategy.start()
    alive: list[Any] = []

    def updates() -> Any:
        for s in range(20):
            gc.collect()
            alive.append(sum(reference() is not None for reference in references))
            tensors = {n: t + s for n, t in state.tensors.items()}
            references.append(weakref.ref(tensors["one.weight"]))
            yield Update(str(s), 0, tensors, 5, (5, 0, 0))

    references: list[Any] = []
    gc.freeze()  # what is there already need not be looked through each time
    try:
        strategy.aggregate(state, updates())
    finally:
        gc.unfreeze()
    assert max(alive) <= 2  # the first, whose types are kept, and the last


def test_fedprox_holds_clients_to_the_global_model_and_fedavg_does_not() -> None:
    """What a client does with `proximal` has a closed form in test_training."""
    plain = weights(made("fedavg", rounds=2))
    assert same(weights(made("fedprox", rounds=2, proximal=0.0)), plain)
    strategy = made("fedprox", rounds=2, proximal=1.0)
    assert strategy.task(strategy.start(), "0").training.proximal == 1.0
    assert made("fedavg").task(made("fedavg").start(), "0").training.proximal == 0.0
    assert not same(weights(strategy), plain)


def test_match_then_average_matches_once_and_then_keeps_its_widths() -> None:
    """Nobody trains: how many neurons are the same depends on the first weights alone."""
    strategy = made("match-then-average", evidence=1e5, penalty=0.0, epochs=0)
    run = simulate(strategy, ["0", "1", "2"], trainer(strategy))
    assert run.records[0]["bytes_down"] == 0  # clients draw their own first weights
    widths = run.records[0]["widths"]
    assert widths == run.records[-1]["widths"]
    assert widths[0] > 5
    assert widths[1] > 4
    assert run.records[1]["bytes_down"] == 3 * size_of(run.state.tensors)


@pytest.mark.parametrize("limit", [{"max_width": 1.0}, {"budget": "1.0 params"}])
@pytest.mark.parametrize("name", ["match-then-average", "match-refit"])
def test_a_late_client_joins_the_global_model(name: str, limit: dict[str, Any]) -> None:
    """One with the same neurons in another order: they find their places, the function stays."""
    strategy = made(name, **limit)
    assert isinstance(strategy, FusionRounds)
    run = simulate(strategy, ["0", "1", "2"], trainer(strategy))
    orders = {"one": torch.tensor([3, 0, 4, 2, 1]), "two": torch.tensor([2, 3, 1, 0])}
    shuffled = permute(run.model, strategy.architecture.spec, orders)
    late = Update("late", 0, named_tensors(shuffled), 50, None)
    joined = strategy.join(run.state, late, weight=141)
    assert joined.round == run.state.round
    assert joined.form.widths == run.state.form.widths
    x = blobs(200, 50).inputs
    with torch.no_grad():
        torch.testing.assert_close(strategy.model(joined)(x), run.model(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="first round"):
        strategy.join(strategy.start(), late, weight=1)


def test_labels_beyond_the_classes_are_refused() -> None:
    strategy = made("fedavg")
    with pytest.raises(NafiError, match="class 2, expected less than 2"):
        Trainer(strategy.architecture, population(), 2)("0", strategy.task(strategy.start(), "0"))


@pytest.mark.parametrize(
    ("name", "options", "averaged"),
    [
        ("match-then-average", {"batchnorm": "average"}, True),
        ("match-then-average", {}, False),
        ("match-then-average", {"method": "ot", "batchnorm": "average"}, True),
        ("ot", {}, True),
        ("rebasin", {"batchnorm": "attach"}, False),
        ("fedavg", {}, False),
    ],
)
def test_a_late_client_s_normalisation_is_treated_as_in_rounds(
    name: str, options: dict[str, Any], averaged: bool
) -> None:
    """Joined by its own copy, an averaged normalisation is as before; an attached one is not."""
    strategy = make_strategy(name, normed(), TRAINING, rounds=1, **options)
    assert isinstance(strategy, FusionRounds)
    architecture = strategy.architecture
    tensors = architecture.drawn(architecture.form, 3)
    tensors["norm2.running_var"] = torch.linspace(0.5, 2.0, 5)
    tensors["norm2.running_mean"] = torch.linspace(-1.0, 1.0, 5)
    state = State(1, architecture.form, tensors)
    joined = strategy.join(state, Update("late", 0, tensors, 10, None), weight=10)
    for key in ("norm2.running_var", "norm2.running_mean"):
        kept = torch.allclose(joined.tensors[key], tensors[key])
        assert kept == averaged, key
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = strategy.model(state)(x)
        torch.testing.assert_close(strategy.model(joined)(x), expected, rtol=1e-4, atol=1e-5)
