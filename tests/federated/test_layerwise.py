"""Layer by layer: against a run by hand, copies, freezing, absent clients, batch normalisation."""

from __future__ import annotations

import pickle
from itertools import permutations
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.federated import (
    Architecture,
    Layerwise,
    Samples,
    Trainer,
    Training,
    Update,
    simulate,
)
from nafi.fusion import Nafi
from nafi.graph import permute
from nafi.graph.trace import named_tensors
from tests.federated.networks import (
    CLASSES,
    FEATURES,
    Normed,
    Small,
    accuracy,
    blobs,
    normed,
    passed,
    pictures,
    population,
    small,
)

TRAINING = Training(epochs=2, batch=8, rate=0.05, momentum=0.9)


class One(nn.Module):
    """One hidden layer of three neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(FEATURES, 3), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.hidden(x).relu())
        return found


def test_a_run_equals_one_by_hand() -> None:
    """Two clients, one hidden layer: train, match, freeze, train, average by class shares."""
    architecture = Architecture(One, (torch.zeros(2, FEATURES),))
    training = Training(epochs=3, batch=100, rate=0.1)
    method = Nafi(penalty=0.1, max_width=1.0)
    strategy = Layerwise(architecture, training, 2, seed=4, method=method)
    data = {"a": blobs(20, 1), "b": blobs(30, 2, classes=(0, 1))}
    run = simulate(strategy, ["a", "b"], Trainer(architecture, data, CLASSES))

    start = strategy.start()
    models = []
    for client, samples in data.items():
        first = architecture.drawn(start.form, strategy.task(start, client).start)
        models.append(descended(architecture.filled(start.form, first), samples, 3, 0.1))
    one, two = models
    rows = [torch.cat([m.hidden.weight, m.hidden.bias[:, None]], dim=1).detach() for m in models]
    # With no more places than neurons, the cheapest order is that of the smallest distances,
    # weighted: outgoing columns count by the share of their class.
    shares = torch.tensor([[float((s.labels == k).sum()) for k in range(3)] for s in data.values()])
    shares = shares / shares.sum(dim=0)
    out = [m.out.weight.detach() for m in models]
    order = best_order(rows, out, 2 * shares)
    aligned = [rows[0], rows[1][order]]
    mean = sum(aligned) / 2
    norms = [own[:, :-1].norm(dim=1) for own in aligned]
    mean[:, :-1] *= ((norms[0] + norms[1]) / 2 / mean[:, :-1].norm(dim=1))[:, None]
    with torch.no_grad():
        two.out.weight.copy_(two.out.weight[:, order])
        for model in models:
            model.hidden.weight.copy_(mean[:, :-1])
            model.hidden.bias.copy_(mean[:, -1])
            for parameter in model.hidden.parameters():
                parameter.requires_grad_(False)
    for model, samples in zip(models, data.values(), strict=True):
        descended(model, samples, 3, 0.1)
    with torch.no_grad():
        for name in ("weight", "bias"):
            own = [getattr(m.out, name) for m in models]
            share = shares.reshape(2, 3, *[1] * (own[0].ndim - 1))
            getattr(one.out, name).copy_(share[0] * own[0] + share[1] * own[1])
        x = blobs(50, 9).inputs
        torch.testing.assert_close(run.model(x), one(x), rtol=1e-4, atol=1e-5)


def descended(model: Any, samples: Samples, steps: int, rate: float) -> Any:
    learnt = [p for p in model.parameters() if p.requires_grad]
    for _ in range(steps):
        loss = F.cross_entropy(model(samples.inputs), samples.labels)
        with torch.no_grad():
            for parameter, gradient in zip(learnt, torch.autograd.grad(loss, learnt), strict=True):
                parameter -= rate * gradient
    return model


def best_order(rows: list[Tensor], out: list[Tensor], weights: Tensor) -> list[int]:
    """The order of the second client whose precision-weighted distances to the first are least."""

    def distance(order: tuple[int, ...]) -> float:
        own = (rows[0] - rows[1][list(order)]).square().sum()
        # Of two Gaussians with precisions p and q: p q / (p + q) times the squared distance.
        both = 2 * weights[0] * weights[1] / (weights[0] + weights[1])
        read = (both[:, None] * (out[0] - out[1][:, list(order)]).square()).sum()
        return float(own + read)

    return list(min(permutations(range(3)), key=distance))


@pytest.mark.parametrize(
    ("kind", "made", "inputs", "rounds"),
    [
        (Small, small, blobs(20, 3).inputs, 3),
        (Normed, normed, pictures(20, 3).inputs, 4),
    ],
)
@pytest.mark.parametrize("batchnorm", ["attach", "fold"])
def test_permuted_copies_of_one_client_give_that_client(
    kind: Any, made: Any, inputs: Tensor, rounds: int, batchnorm: str
) -> None:
    """With identical clients nothing changes: the mean of equal neurons is not shrunk."""
    torch.manual_seed(5)
    model = kind()
    disturb(model)
    architecture = made()
    spec = architecture.spec
    generator = torch.Generator().manual_seed(1)
    copies = {"0": model}
    for s in (1, 2):
        orders = {
            name: torch.randperm(group.width, generator=generator)
            for name, group in spec.groups.items()
        }
        copies[str(s)] = permute(model, spec, orders)
    strategy = Layerwise(architecture, TRAINING, rounds, method=Nafi(batchnorm=batchnorm))
    state = passed(strategy, copies, (4, 3, 3))
    assert strategy.layers == rounds
    assert dict(state.form.widths) == spec.widths
    with torch.no_grad():
        expected = model.eval()(inputs)
        torch.testing.assert_close(strategy.model(state)(inputs), expected, rtol=1e-4, atol=1e-5)
    names = set(named_tensors(strategy.model(state)))
    assert (names == set(named_tensors(model))) == (batchnorm == "attach" or kind is Small)


def disturb(model: nn.Module) -> None:
    """Statistics that are not those of an untrained network."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_()


def test_batch_normalisation_is_folded_by_each_client_s_own_statistics() -> None:
    """Two clients that compute the same with different statistics are the same to matching."""
    torch.manual_seed(5)
    model, other = Normed(), Normed()
    disturb(model)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.conv2.weight.mul_(3.0)
        other.conv2.bias.mul_(3.0)
        other.norm2.running_mean.mul_(3.0)
        other.norm2.running_var.copy_(9.0 * (other.norm2.running_var + 1e-5) - 1e-5)
    strategy = Layerwise(normed(), TRAINING, 4)
    state = passed(strategy, {"a": model, "b": other}, (4, 3, 3))
    x = pictures(20, 3).inputs
    with torch.no_grad():
        torch.testing.assert_close(strategy.model(state)(x), model.eval()(x), rtol=1e-4, atol=1e-5)


def test_normalisation_stays_until_its_layer_is_matched() -> None:
    strategy = Layerwise(normed(), TRAINING, 4)
    data = {str(s): pictures(20, s) for s in range(2)}
    work, state = Trainer(strategy.architecture, data, CLASSES), strategy.start()
    for folded in (1, 2, 3, 3):
        state = strategy.aggregate(state, [work(c, strategy.task(state, c))[0] for c in data])
        assert len(state.form.folded) == folded
        left = {n for n in strategy.task(state, "0").tensors if n.startswith("norm")}
        assert len(left) == 5 * (3 - folded)


def test_settled_layers_are_frozen_and_the_same_for_all() -> None:
    strategy = Layerwise(small(), TRAINING, 3)
    data = population()
    work, state = Trainer(strategy.architecture, data, CLASSES), strategy.start()
    expected = [set(), {"one.weight", "one.bias"}]
    expected.append(expected[1] | {"two.weight", "two.bias"})
    for frozen in expected:
        before = dict(state.tensors)
        tasks = {c: strategy.task(state, c) for c in data}
        updates = [work(client, task)[0] for client, task in tasks.items()]
        for task, update in zip(tasks.values(), updates, strict=True):
            assert task.frozen == frozen
            assert not frozen & set(update.tensors)
        state = strategy.aggregate(state, updates)
        for name in frozen:
            assert torch.equal(before[name], state.tensors[name]), name
    assert set(state.tensors) == set(named_tensors(Small()))


def test_without_freezing_settled_layers_go_on_learning() -> None:
    strategy = Layerwise(small(), TRAINING, 3, freeze=False)
    data = population()
    work, state = Trainer(strategy.architecture, data, CLASSES), strategy.start()
    state = strategy.aggregate(state, [work(c, strategy.task(state, c))[0] for c in data])
    before = state.tensors["one.weight"].clone()
    tasks = [strategy.task(state, c) for c in data]
    assert all(not task.frozen for task in tasks)
    assert all(torch.equal(task.tensors["one.weight"], before) for task in tasks)
    updates = [work(c, task)[0] for c, task in zip(data, tasks, strict=True)]
    after = strategy.aggregate(state, updates).tensors["one.weight"]
    assert after.shape == before.shape
    assert not torch.equal(after, before)


def test_absent_inputs_of_the_next_layer_are_zeros() -> None:
    """With so much evidence that nothing merges, each client reads its own neurons alone."""
    method = Nafi(penalty=0.0, evidence=1e7)
    strategy = Layerwise(small(), Training(epochs=1, batch=8), 3, method=method)
    data = population(2)
    work, state = Trainer(strategy.architecture, data, CLASSES), strategy.start()
    updates = [work(c, strategy.task(state, c))[0] for c in data]
    state = strategy.aggregate(state, updates)
    assert state.form.widths["one"] > 5  # 8 or 9 in each of eight seeds
    for update in updates:
        lifted = strategy.task(state, update.client).tensors["two.weight"]
        read = lifted.abs().sum(dim=0) > 0
        assert int(read.sum()) == 5
        torch.testing.assert_close(
            lifted[:, read].sum(dim=1), update.tensors["two.weight"].sum(dim=1)
        )


def test_a_client_that_missed_a_round_is_brought_up_to_date() -> None:
    """Accuracies over eight seeds: 0.92, with a deviation of 0.05."""
    data, scores = population(4), []
    for seed in range(3):
        strategy = Layerwise(small(), TRAINING, 3, seed=seed)
        work, state = Trainer(strategy.architecture, data, CLASSES), strategy.start()
        for present in (["0", "1", "2"], ["0", "1"], ["0", "1", "2", "3"]):
            tasks = {c: strategy.task(state, c) for c in present}
            for task in tasks.values():  # the newcomer "3" has all settled layers, too
                assert task.form == state.form
                assert all(torch.equal(task.tensors[n], t) for n, t in state.tensors.items())
            state = strategy.aggregate(state, [work(c, t)[0] for c, t in tasks.items()])
        assert list(state.members) == ["0", "1", "2", "3"]
        scores.append(accuracy(strategy.model(state), blobs(200, 50)))
    assert fmean(scores) > 0.7, scores


def test_further_passes_keep_the_widths() -> None:
    """Accuracies over eight seeds: 0.97, with a deviation of 0.01; the first width: 8 to 13."""
    data, scores, grown = population(), [], []
    for seed in range(3):
        method = Nafi(penalty=0.0, evidence=500.0)
        strategy = Layerwise(small(), TRAINING, 7, seed=seed, method=method)
        run = simulate(strategy, list(data), Trainer(strategy.architecture, data, CLASSES))
        widths = [record["widths"] for record in run.records]
        assert widths[2] == widths[-1]
        assert run.state.matched  # in the middle of the third pass
        grown.append(widths[-1][0] - 5)
        scores.append(accuracy(run.model, blobs(200, 50)))
    assert fmean(grown) > 1, grown  # so that there were widths to keep
    assert fmean(scores) > 0.85, scores


def test_one_client_alone_cannot_be_matched() -> None:
    strategy = Layerwise(small(), TRAINING, 3)
    data = population(1)
    with pytest.raises(InputError, match=r"found 1 clients .* at least two"):
        simulate(strategy, list(data), Trainer(strategy.architecture, data, CLASSES))


def test_without_freezing_an_absent_client_counts_with_what_all_have() -> None:
    """Two of three send back what they got: settled layers stay as they are."""
    strategy = Layerwise(small(), TRAINING, 3, freeze=False)
    data = population()
    work, state = Trainer(strategy.architecture, data, CLASSES), strategy.start()
    state = strategy.aggregate(state, [work(c, strategy.task(state, c))[0] for c in data])
    same = [Update(c, 1, dict(strategy.task(state, c).tensors), 10, (4, 3, 3)) for c in ("0", "1")]
    after = strategy.aggregate(state, same)
    torch.testing.assert_close(after.tensors["one.weight"], state.tensors["one.weight"])


class Residual(nn.Module):
    """A stream that two layers write to, and one within that is matched after it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.inner = nn.Conv2d(4, 5, 3, padding=1)
        self.back = nn.Conv2d(5, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = x + self.norm(self.back(self.inner(x).relu()))
        found: Tensor = self.out(x.relu().mean((2, 3)))
        return found


def test_a_layer_that_reads_what_is_not_matched_is_not_settled_in_parts() -> None:
    """`back` writes to the matched stream but reads `inner`: weight, bias and norm wait for it."""
    torch.manual_seed(2)
    model = Residual()
    disturb(model)
    x = pictures(10, 0).inputs
    architecture = Architecture(Residual, (x[:2],))
    strategy = Layerwise(architecture, TRAINING, 3)
    generator = torch.Generator().manual_seed(1)
    spec = architecture.spec
    orders = {n: torch.randperm(g.width, generator=generator) for n, g in spec.groups.items()}
    models = {"a": model, "b": permute(model, spec, orders)}
    state = strategy.start()
    sent = [
        Update(c, 0, {n: t.detach().clone() for n, t in named_tensors(m).items()}, 10, (4, 3, 3))
        for c, m in models.items()
    ]
    state = strategy.aggregate(state, sent)
    assert set(state.tensors) == {"stem.weight", "stem.bias"}
    assert not state.form.folded
    final = passed(strategy, models, (4, 3, 3))
    assert final.form.folded == (("back", "norm"),)
    with torch.no_grad():
        torch.testing.assert_close(strategy.model(final)(x), model.eval()(x), rtol=1e-4, atol=1e-5)


def test_a_newcomer_of_a_second_pass_has_no_dead_neurons() -> None:
    method = Nafi(penalty=0.0, evidence=500.0)
    strategy = Layerwise(small(), TRAINING, 6, method=method)
    data = population()
    work, state = Trainer(strategy.architecture, data, CLASSES), strategy.start()
    for _ in range(4):
        state = strategy.aggregate(state, [work(c, strategy.task(state, c))[0] for c in data])
    task = strategy.task(state, "new")
    members = [m.tensors["two.weight"] for m in state.members.values()]
    torch.testing.assert_close(task.tensors["two.weight"], sum(members) / 3)
    assert set(task.tensors) == set(named_tensors(Small()))


def test_a_strategy_can_be_pickled_and_its_copy_does_the_same() -> None:
    strategy = Layerwise(small(), TRAINING, 3, method=Nafi(penalty=0.0, evidence=500.0))
    models: dict[str, nn.Module] = {"a": Small(), "b": Small()}
    state = passed(strategy, models)
    strategy.model(state)
    copy: Layerwise = pickle.loads(pickle.dumps(strategy))
    assert copy.settings() == strategy.settings()
    again = passed(copy, models)
    assert list(again.tensors) == list(state.tensors)
    for name, tensor in again.tensors.items():
        assert torch.equal(tensor, state.tensors[name]), name
