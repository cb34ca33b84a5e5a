"""Attackers do what the literature says, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nafi.errors import InputError
from nafi.experiments import Experiment, load_experiment, run_experiment
from nafi.experiments.attacks import (
    CLAIM,
    AttackedWork,
    alie,
    backdoor_success,
    drawn_attackers,
    in_one_order,
    ipm,
    min_max,
    poisoned,
    recalls,
    turned_sums,
    with_trigger,
)
from nafi.experiments.cells import cells
from nafi.experiments.config import Attack
from nafi.experiments.controls import CONTROLS, as_control, krum_order
from nafi.federated import Acceptance, Samples, Task, Trainer, Training, Update, make_strategy
from nafi.graph import permute_state
from tests.federated.networks import CLASSES, population, small

HONEST = torch.randn(6, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_alie_and_ipm_are_their_formulas() -> None:
    values = HONEST.numpy()
    np.testing.assert_allclose(alie(HONEST, 0.7), values.mean(axis=0) - 0.7 * values.std(axis=0))
    np.testing.assert_allclose(ipm(HONEST, 0.3), -0.3 * values.mean(axis=0))


def test_min_max_goes_as_far_as_the_two_that_are_furthest_apart() -> None:
    furthest = torch.cdist(HONEST, HONEST).max()
    sent = min_max(HONEST)
    distances = (HONEST - sent).norm(dim=1)
    assert float(distances.max()) == pytest.approx(float(furthest))
    offset = sent - HONEST.mean(dim=0)
    deviation = HONEST.std(dim=0, correction=0)
    torch.testing.assert_close(offset / deviation, (offset / deviation).mean().expand(40))
    assert float(offset[0]) < 0


def test_min_max_of_clients_that_agree_is_what_they_send() -> None:
    same = HONEST[:1].expand(4, -1)
    torch.testing.assert_close(min_max(same), HONEST[0])


def test_a_trigger_is_a_patch_in_the_last_corner() -> None:
    flat = with_trigger(torch.zeros(3, 64)).reshape(3, 8, 8)
    assert float(flat.sum()) == 3 * 4
    assert bool((flat[:, 6:, 6:] == 1).all())
    images = with_trigger(torch.zeros(2, 3, 28, 28, dtype=torch.uint8))
    assert int((images == 255).sum()) == 2 * 3 * 16


def test_poisoned_data() -> None:
    data = {
        name: Samples(torch.rand(5, 64), torch.tensor([0, 1, 2, 2, 1])) for name in ("a", "b", "c")
    }
    flipped = poisoned(data, ["b"], "label-flip", 0, 3)
    assert list(flipped) == ["b"]
    assert flipped["b"].labels.tolist() == [2, 1, 0, 0, 1]
    marked = poisoned(data, ["a"], "backdoor", 1, 3)["a"]
    assert marked.labels.tolist() == [0, 1, 2, 2, 1] + [1] * 5
    torch.testing.assert_close(marked.inputs[5:], with_trigger(data["a"].inputs))
    one = poisoned(data, ["a", "c"], "sybil", 0, 3)
    assert one["a"].labels.tolist() == [1, 2, 0, 0, 2] * 2
    assert one["a"] is one["c"]
    quiet = poisoned(data, ["a"], "quiet-backdoor", 1, 3)["a"]
    torch.testing.assert_close(quiet.inputs, marked.inputs)
    assert poisoned(data, ["a"], "alie", 0, 3)["a"] is data["a"]


def attacked(attack: Attack, attackers: list[str], **options: Any) -> tuple[list[Update], Task]:
    """What clients send in the first round."""
    name = options.pop("name", "fedavg")
    strategy = make_strategy(name, small(), Training(epochs=1, batch=8, rate=0.05), rounds=2)
    data = population(6)
    trainer = Trainer(strategy.architecture, data, CLASSES)
    harmful = poisoned(data, attackers, attack, 0, CLASSES)
    work = AttackedWork(
        strategy.architecture, trainer, replace(trainer, data=harmful), attack, attackers, 0
    )
    state = strategy.start()
    clients = [*(c for c in data if c not in attackers), *attackers]
    tasks = {client: strategy.task(state, client) for client in clients}
    sent = [work(client, tasks[client])[0] for client in clients]
    acceptance = Acceptance(classes=CLASSES)
    shapes = strategy.architecture.shapes(state.form)
    for update in sent:
        acceptance.check(update, update.client, tasks[update.client], shapes)
    strategy.aggregate(state, sent)
    return sent, tasks[clients[0]]


def flat(update: Update) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for tensor in update.tensors.values()])


ALL: list[Attack] = [
    "flip",
    "flip-1000",
    "scale",
    "alie",
    "min-max",
    "ipm",
    "label-flip",
    "erase-class",
    "sybil",
]


@pytest.mark.parametrize("name", ["fedavg", "layerwise"])
@pytest.mark.parametrize("attack", ALL)
def test_attacks_pass_the_checks_and_leave_honest_clients_alone(attack: Attack, name: str) -> None:
    without, _ = attacked("none", ["1", "4"], name=name)
    sent, _ = attacked(attack, ["1", "4"], name=name)
    assert [update.client for update in sent] == ["0", "2", "3", "5", "1", "4"]
    for before, after in zip(without[:4], sent[:4], strict=True):
        assert torch.equal(flat(before), flat(after))
    for before, after in zip(without[4:], sent[4:], strict=True):
        assert not torch.equal(flat(before), flat(after))


def test_what_is_crafted_is_a_change_of_what_clients_were_sent() -> None:
    without, task = attacked("none", ["1", "4"])
    start = torch.cat([task.tensors[n].double().flatten() for n in without[0].tensors])
    changes = torch.stack([flat(update) - start for update in without])
    scaled, _ = attacked("scale", ["1", "4"])
    torch.testing.assert_close(flat(scaled[5]) - start, 10 * changes[5], atol=1e-5, rtol=1e-5)
    alike, _ = attacked("alie", ["1", "4"])
    for update in alike[4:]:
        torch.testing.assert_close(flat(update) - start, alie(changes[:4]), atol=1e-5, rtol=1e-5)


def test_sybils_send_the_same_and_erasers_claim_the_class() -> None:
    sent, _ = attacked("sybil", ["1", "4"])
    assert torch.equal(flat(sent[4]), flat(sent[5]))
    erasing, _ = attacked("erase-class", ["1"])
    counts = erasing[-1].class_counts
    assert counts is not None
    assert counts[0] == CLAIM


def test_networks_in_one_order_are_those_that_were_permuted() -> None:
    architecture = small()
    drawn = architecture.drawn(architecture.form, 3)
    group, width = next(iter(architecture.spec.widths.items()))
    order = torch.randperm(width, generator=torch.Generator().manual_seed(0))
    other = permute_state(drawn, architecture.spec, {group: order})
    one, two = in_one_order(architecture, [drawn, other])
    for name in one:
        torch.testing.assert_close(one[name], two[name])


def test_turned_sums_are_those_of_many_samples_with_opposite_outputs() -> None:
    message = {
        "sums/a/gram": torch.ones(3),
        "sums/a/cross": torch.ones(2, dtype=torch.float64),
        "sums/a/count": torch.ones(1, dtype=torch.float64),
        "sums/a/scale": torch.ones(2, dtype=torch.float64),
    }
    turned = turned_sums(message)
    assert [float(tensor.flatten()[0]) for tensor in turned.values()] == [1, -1024, 1024, 32]


def test_measures() -> None:
    class Constant(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.stack([inputs[:, -1], 0.5 - inputs[:, -1]], dim=1)

    samples = Samples(torch.zeros(4, 64), torch.tensor([0, 1, 1, 1]))
    assert recalls(Constant(), samples, 3) == [0.0, 100.0, 0.0]
    assert backdoor_success(Constant(), samples, 0) == 100.0
    assert backdoor_success(Constant(), samples, 1) == 0.0


def test_attackers_are_drawn_once_each() -> None:
    names = [str(s) for s in range(15)]
    drawn = drawn_attackers(names, 3, 7)
    assert len(set(drawn)) == 3
    assert drawn == drawn_attackers(names, 3, 7) != drawn_attackers(names, 3, 8)


def test_krum_leaves_out_those_that_are_far_from_all() -> None:
    values = HONEST.clone()
    values[2] += 10
    values[4] -= 10
    assert sorted(krum_order(values, 2)[:4]) == [0, 1, 3, 5]


@pytest.mark.parametrize("name", list(CONTROLS))
def test_controls_withstand_one_that_is_far_off(name: str) -> None:
    fedavg = make_strategy("fedavg", small(), Training(epochs=1, batch=8), rounds=1, trim=0.2)
    strategy = as_control(fedavg, name)
    state = strategy.start()
    trainer = Trainer(strategy.architecture, population(6), CLASSES)
    sent = [trainer(client, strategy.task(state, client))[0] for client in population(6)]
    far = replace(sent[0], tensors={n: t + 1e6 for n, t in sent[0].tensors.items()})
    found = strategy.aggregate(state, [far, *sent[1:]])
    honest = {n: torch.stack([u.tensors[n] for u in sent[1:]]) for n in far.tensors}
    for key, tensor in found.tensors.items():
        assert bool((tensor <= honest[key].max(dim=0).values + 1e-6).all())
        assert bool((tensor >= honest[key].min(dim=0).values - 1e-6).all())


def test_the_median_is_that_of_every_number() -> None:
    strategy = as_control(
        make_strategy("fedavg", small(), Training(epochs=1, batch=8), rounds=1), "coordinate-median"
    )
    state = strategy.start()
    sent = [
        Update(str(s), 0, {n: torch.full_like(t, s) for n, t in state.tensors.items()}, 1)
        for s in (0, 1, 5, 100)
    ]
    found = strategy.aggregate(state, sent)
    assert all(bool((tensor == 3).all()) for tensor in found.tensors.values())


@pytest.mark.slow
def test_the_quick_profile_runs(tmp_path: Path) -> None:
    experiment = load_experiment("digits-attacks", "quick")
    records = run_experiment(
        experiment, tmp_path / "q.jsonl", jobs=1, resume=False, progress=lambda *_: None
    )
    assert len(records) == len(cells(experiment))
    for record in records:
        assert len(record["recalls"]) == 10
        assert 0 <= record["backdoor"] <= 100
        attack = record.get("attack")
        assert (" under " in record["method"]) == (attack is not None)
        assert attack is None or record["method"].endswith(f" under {attack}")


ROUNDS: dict[str, Any] = {
    "name": "small",
    "title": "Small",
    "data": "digits",
    "rounds": 2,
    "clients": [4],
    "attackers": 1,
    "methods": [{"name": "fedavg", "method": "fedavg"}],
}


def test_attacks_of_a_file_are_methods() -> None:
    experiment = Experiment(**ROUNDS, attacks=["flip", "sybil"])
    assert [(m.name, m.attack) for m in experiment.methods] == [
        ("fedavg", "none"),
        ("fedavg under flip", "flip"),
        ("fedavg under sybil", "sybil"),
    ]
    assert experiment.agrees(experiment.settings())


def test_attacks_that_cannot_be_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    method = '[[methods]]\nname = "nafi"\nmethod = "nafi"\nattack = "alie"\n'
    file.write_text('name = "x"\ntitle = "x"\nclients = [4]\nattackers = 1\n' + method)
    with pytest.raises(InputError, match="the attack alie needs rounds"):
        load_experiment(str(file))
    with pytest.raises(ValueError, match="attacks: expected a list"):
        Experiment(**ROUNDS, attacks="flip")
