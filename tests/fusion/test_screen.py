"""Harmful models: what a screen does to them, and what it leaves alone."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import nafi
from nafi.errors import InputError
from nafi.federated import Trainer, Training, Update, make_strategy
from nafi.federated.averaging import average, screened_average
from nafi.fusion.screen import CHANGES_AGREE, NETWORKS_AGREE, Screen
from nafi.graph import ModelSpec, groups
from tests.federated.networks import CLASSES, population, small

INPUTS = (torch.zeros(2, 6),)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval()


def times(model: nn.Module, factor: float) -> nn.Module:
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in scaled.parameters():
            parameter.mul_(factor)
    return scaled


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 12), st.floats(0, 1), st.floats(0.01, 0.99))
def test_the_trimmed_mean_is_scipys(seed: int, clients: int, part: float, between: float) -> None:
    """A share is rounded up, as long as somebody is left."""
    trim = min(0.49, (int(part * clients / 2) + between) / clients)
    cut = min(math.ceil(trim * clients), (clients - 1) // 2)
    values = np.random.default_rng(seed).normal(size=(clients, 4, 3))
    ones = torch.ones(clients, 1, 1, dtype=torch.float64)
    found = Screen(trim=trim).mean(torch.from_numpy(values), ones > 0, ones)
    wanted = stats.trim_mean(values, (cut + 0.25) / clients, axis=0)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-12)


@pytest.mark.parametrize("clients", range(3, 31))
def test_a_share_of_some_out_of_all_leaves_out_so_many_at_either_end(clients: int) -> None:
    """Also where the share is a little less for being a number of a computer: 0.29 of 100 is 29.

    There scipy leaves out one less; what is meant is what counts here.
    """
    values = torch.arange(clients, dtype=torch.float64).square().reshape(-1, 1)
    ones = torch.ones(clients, 1, dtype=torch.float64)
    for cut in range(1, (clients + 1) // 2):
        for trim in (cut / clients, float(np.nextafter(cut / clients, 0))):
            found = Screen(trim=trim).mean(values.flip(0), ones > 0, ones)
            assert float(found) == pytest.approx(float(values[cut : clients - cut].mean()))


def test_a_share_is_never_nobody_and_never_half_of_the_clients() -> None:
    assert [Screen(trim=0.49).cut(clients) for clients in range(1, 8)] == [0, 0, 1, 1, 2, 2, 3]
    assert [Screen(trim=0.01).cut(clients) for clients in (2, 3, 100, 101)] == [0, 1, 1, 2]
    assert Screen(clip=2.0).cut(9) == 0


def test_a_trimmed_mean_weighs_those_that_are_left_and_only_those_who_have_the_number() -> None:
    values = torch.tensor([[5.0, 1.0], [1.0, 2.0], [2.0, 3.0], [4.0, 4.0], [99.0, 99.0]])
    present = torch.tensor([[True, True]] * 4 + [[True, False]])
    weights = torch.tensor([[1.0], [1.0], [3.0], [1.0], [1.0]])
    found = Screen(trim=0.2).mean(values.double(), present, weights.double())
    # Left over: 2, 4 and 5 with the weights 3, 1, 1; and 2 and 3 with the weights 1 and 3.
    torch.testing.assert_close(found, torch.tensor([15 / 5, 11 / 4], dtype=torch.float64))


def whole(state: Any) -> Tensor:
    """The lengths of the hidden neurons, bias included."""
    rows = torch.cat([state["0.weight"], state["0.bias"].unsqueeze(1)], dim=1)
    return rows.norm(dim=1)


def test_long_neurons_are_shortened_with_their_bias_and_others_left_alone() -> None:
    models = [network(seed) for seed in range(5)]
    with torch.no_grad():
        models[4][0].weight[2].mul_(50)
        models[4][0].bias[2].mul_(50)
    spec = groups(models[0], INPUTS)
    before = [dict(model.state_dict()) for model in models]
    found = Screen(clip=2.0).clipped(before, [spec] * 5)
    lengths = [whole(state) for state in before]
    limit = max(
        2.0 * torch.stack([own.median() for own in lengths]).median(),
        torch.stack([own.max() for own in lengths]).median(),
    )
    assert float(whole(found[4])[2]) == pytest.approx(float(limit), rel=1e-5)
    ratio = found[4]["0.bias"][2] / before[4]["0.bias"][2]
    assert float(ratio) == pytest.approx(float(limit / lengths[4][2]), rel=1e-5)
    for s, state in enumerate(found):
        for name in state:
            same = torch.ones(len(state[name]), dtype=torch.bool)
            same[2] = s != 4 or not name.startswith("0.")
            assert torch.equal(state[name][same], before[s][name][same])


def test_a_model_that_is_scaled_up_counts_as_if_it_were_not() -> None:
    """All neurons of one model are ten times as long: clipped to the median, it is as before."""
    models = [network(0) for _ in range(5)]
    attacked = [*models[:4], times(models[4], 10.0)]
    options: dict[str, Any] = {"method": "pfnm", "max_width": 5, "restore_norm": False}
    plain = nafi.fuse(attacked, INPUTS, **options)
    held = nafi.fuse(attacked, INPUTS, clip=1.0, **options)
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = models[0](x)
        off, close = ((r.model(x) - wanted).abs().mean() for r in (plain, held))
    assert float(off) > 1.0
    assert float(close) < 0.2


def test_a_huge_bias_is_held_too() -> None:
    models = [network(0) for _ in range(5)]
    with torch.no_grad():
        models[2][0].bias.fill_(1e6)
    found = nafi.fuse(models, INPUTS, method="pfnm", max_width=5, clip=2.0, restore_norm=False)
    assert float(found.model[0].bias.detach().abs().max()) < 2  # type: ignore[index]


def test_a_norm_without_weights_is_held_as_a_whole() -> None:
    def normed(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))

    models = [normed(s) for s in range(5)]
    with torch.no_grad():
        for model in models:
            model[1].bias.fill_(0.1)
        models[4][1].weight.fill_(1e6)
        models[4][1].bias.fill_(1e6)
    spec = groups(models[0], INPUTS)
    found = Screen(clip=2.0).clipped([dict(m.state_dict()) for m in models], [spec] * 5)
    torch.testing.assert_close(found[4]["1.weight"], torch.full((5,), 2.0))
    torch.testing.assert_close(found[4]["1.bias"], torch.full((5,), 0.2))
    torch.testing.assert_close(found[0]["1.weight"], models[0][1].weight.detach())


def test_layers_of_mostly_dead_neurons_stay() -> None:
    models = [network(s) for s in range(4)]
    with torch.no_grad():
        for model in models:
            for parameter in (model[0].weight, model[0].bias):
                parameter[:4] = 0
    spec = groups(models[0], INPUTS)
    before = [dict(model.state_dict()) for model in models]
    for old, new in zip(before, Screen(clip=2.0).clipped(before, [spec] * 4), strict=True):
        assert float(new["0.weight"][4].norm()) >= 0.5 * float(old["0.weight"][4].norm()) > 0


def test_whoever_alone_knows_a_class_is_heard() -> None:
    """Four clients never saw class 0: they are no voters on its row."""
    models = [network(0) for _ in range(5)]
    with torch.no_grad():
        models[4][2].weight[0].fill_(3.0)
    counts = np.array([[0, 10, 10]] * 4 + [[10, 10, 10]])
    found = nafi.fuse(
        models, INPUTS, method="pfnm", max_width=5, trim=0.2, class_counts=counts
    ).model[2]  # type: ignore[index]
    torch.testing.assert_close(found.weight[0].detach(), torch.full((5,), 3.0))


def test_attackers_who_gather_in_one_neuron_are_still_trimmed() -> None:
    """Three of fifteen clients, but three of the seven that own a number."""
    values = torch.tensor([0.0] * 4 + [100.0] * 3 + [0.0] * 8, dtype=torch.float64).reshape(-1, 1)
    present = torch.tensor([True] * 7 + [False] * 8).reshape(-1, 1)
    ones = torch.ones(15, 1, dtype=torch.float64)
    assert float(Screen(trim=0.2).mean(values, present, ones)) == 0


def test_a_claim_of_many_samples_does_not_silence_the_others() -> None:
    """Nine of ten agree, whatever the tenth claims: it is not heard."""
    models = [network(1) for _ in range(9)] + [times(network(2), 3.0)]
    options: dict[str, Any] = {"penalty": 0.0, "evidence": 500.0, "trim": 0.1, "clip": 2.0}
    found = nafi.fuse(models, INPUTS, sample_counts=[10] * 9 + [2**40], **options)
    assert sorted(found.owners("0").tolist()) == [1] * 5 + [9] * 5
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(found.model(x), models[0](x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["fedavg", "match-then-average", "layerwise"])
def test_strategies_withstand_a_client_that_sends_huge_weights(name: str) -> None:
    strategy = make_strategy(
        name, small(), Training(epochs=1, batch=8, rate=0.05), rounds=6, clip=2.0, trim=0.2
    )
    work = Trainer(strategy.architecture, population(6), CLASSES)
    state = strategy.start()
    for _ in range(5):
        sent = []
        for client in population(6):
            update, _ = work(client, strategy.task(state, client))
            if client == "0":
                update = replace(update, tensors={n: 1e6 + t for n, t in update.tensors.items()})
            sent.append(update)
        state = strategy.aggregate(state, sent)
    for tensor in strategy.model(state).state_dict().values():
        assert float(tensor.abs().max()) < 10
    for tensor in strategy.task(state, "new").tensors.values():
        assert float(tensor.abs().max()) < 10


def test_counts_are_held_to_the_median() -> None:
    screen = Screen(clip=2.0)
    found = screen.counts(np.array([10.0, 20.0, 30.0, 1e12]))
    np.testing.assert_allclose(found, [10, 20, 30, 50])
    table = screen.counts(np.array([[1.0, 1.0], [2.0, 2.0], [0.0, 600.0]]))
    np.testing.assert_allclose(table, [[1, 1], [2, 2], [0, 8]])
    found = Screen(trim=0.2).counts(np.array([10.0, 20.0, 30.0, 1e12]))
    np.testing.assert_allclose(found, [10, 20, 30, 250])
    assert Screen().counts(np.array([1.0, 1e12]))[1] == 1e12


def test_a_screen_changes_nothing_where_all_agree() -> None:
    models = [network(3) for _ in range(4)]
    plain = nafi.fuse(models, INPUTS).model.state_dict()
    held = nafi.fuse(models, INPUTS, clip=1.5, trim=0.25).model.state_dict()
    for name in plain:
        torch.testing.assert_close(held[name], plain[name])


def test_a_neuron_of_few_clients_is_read_by_nobody() -> None:
    """Four models agree; one has neurons of its own, pointing elsewhere."""
    models = [network(1) for _ in range(4)] + [times(network(2), 3.0)]
    plain = nafi.fuse(models, INPUTS, penalty=0.0, evidence=500.0)
    held = nafi.fuse(models, INPUTS, penalty=0.0, evidence=500.0, trim=0.2)
    alone = torch.from_numpy(plain.owners("0") == 1)
    assert alone.sum() == 5
    assert float(plain.model[2].weight[:, alone].detach().abs().max()) > 0.1  # type: ignore[index]
    assert torch.equal(held.model[2].weight[:, alone], torch.zeros(3, 5))  # type: ignore[index]
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # The four agree, so the fifth is not heard at all.
        torch.testing.assert_close(held.model(x), models[0](x), atol=1e-5, rtol=1e-5)


@cache
def one_weight() -> ModelSpec:
    """Of the network, the hidden layer's weight alone."""
    spec = groups(network(0), INPUTS)
    return replace(spec, tensors={"0.weight": spec.tensors["0.weight"]})


def updates(tensors: list[Tensor], samples: list[int]) -> list[Update]:
    return [
        Update(str(s), 0, {"0.weight": tensor}, count, (count, 0, 0))
        for s, (tensor, count) in enumerate(zip(tensors, samples, strict=True))
    ]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(-1e6, 1e6))
def test_a_screened_average_stays_within_what_honest_clients_sent(seed: int, harm: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    honest = [torch.randn(5, 6, generator=generator) for _ in range(6)]
    sent = updates([*honest, torch.full((5, 6), harm)], [10] * 6 + [2**40])
    found = screened_average(Screen(clip=2.0, trim=0.2), sent, one_weight(), {}, False)["0.weight"]
    stacked = torch.stack(honest)
    assert bool((found >= stacked.min(dim=0).values - 1e-5).all())
    assert bool((found <= stacked.max(dim=0).values + 1e-5).all())


def test_without_harm_a_screened_average_is_close_to_the_average() -> None:
    small = one_weight()
    sent = updates([torch.full((5, 6), float(value)) for value in (1, 2, 3)], [10, 20, 10])
    plain = average(sent, small, {}, False)["0.weight"]
    held = screened_average(Screen(clip=5.0), sent, small, {}, False)["0.weight"]
    torch.testing.assert_close(held, plain)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"clip": 0}, "clip"),
        ({"clip": "2"}, "clip"),
        ({"trim": 0.5}, "trim"),
        ({"trim": -1}, "trim"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        nafi.fuse([network(0), network(1)], INPUTS, **options)


def crowd(seed: int, clients: int = 8) -> Tensor:
    """Honest clients: a common direction, and as much of their own."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(400, generator=generator, dtype=torch.float64)
    own = torch.randn(clients, 400, generator=generator, dtype=torch.float64)
    return common + own


def everything(values: Tensor) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool)


@pytest.mark.parametrize("seed", range(5))
def test_who_contradicts_the_others_is_not_heard(seed: int) -> None:
    values = crowd(seed)
    screen = Screen(trim=0.25)
    assert screen.heard(values, everything(values), 1 / 3).all()
    values[6:] *= -1
    assert screen.heard(values, everything(values), 1 / 3).tolist() == [True] * 6 + [False] * 2


@pytest.mark.parametrize("seed", range(5))
def test_of_copies_one_is_heard(seed: int) -> None:
    """Two clients send the same, as far from the mean as others: the attack ALIE."""
    values = crowd(seed)
    values[6:] = values[:6].mean(dim=0) - 1.5 * values[:6].std(dim=0)
    heard = Screen(trim=0.25).heard(values, everything(values), 1 / 3)
    assert heard[:6].all()
    assert heard[6:].sum() == 1


def test_no_more_are_silenced_than_may_be_harmful_and_nobody_where_nobody_agrees() -> None:
    values = crowd(0)
    values[4:] *= -1
    assert (~Screen(trim=0.125).heard(values, everything(values), 1 / 3)).sum() <= 1
    noise = torch.randn(8, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert Screen(trim=0.25).heard(noise, everything(noise), 1 / 3).all()
    assert Screen(clip=2.0).heard(values, everything(values), 1 / 3).all()


def agreeing(usual: float, clients: int = 8) -> Tensor:
    """Clients of which any two agree by about this cosine."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(5000, generator=generator, dtype=torch.float64)
    own = torch.randn(clients, 5000, generator=generator, dtype=torch.float64)
    return math.sqrt(usual) * common + math.sqrt(1 - usual) * own


@pytest.mark.parametrize(
    ("agree", "share", "heard"),
    [
        (CHANGES_AGREE, 0.45, True),
        (CHANGES_AGREE, 0.2, False),
        (NETWORKS_AGREE, 0.73, True),
        (NETWORKS_AGREE, 0.47, False),
    ],
)
def test_who_agrees_a_little_less_is_heard_and_who_agrees_much_less_is_not(
    agree: float, share: float, heard: bool
) -> None:
    """share: of the usual agreement; honest clients had 0.47 of it and more, and 0.73."""
    values = agreeing(0.5)
    generator = torch.Generator().manual_seed(1)
    common, own = values[:7].mean(dim=0), torch.randn(5000, generator=generator).double()
    weight = share * math.sqrt(0.5)  # the cosine with what is common
    part = common - (common @ own) / (own @ own) * own
    values[7] = weight * part / part.norm() + math.sqrt(1 - weight**2) * own / own.norm()
    found = Screen(trim=0.25).heard(values, everything(values), agree)
    assert found.tolist() == [True] * 7 + [heard]


@pytest.mark.parametrize(("usual", "heard"), [(0.05, True), (0.2, False)])
def test_where_hardly_anyone_agrees_nobody_contradicts(usual: float, heard: bool) -> None:
    values = agreeing(usual)
    values[7] *= -1
    assert bool(Screen(trim=0.25).heard(values, everything(values), 1 / 3)[7]) == heard


@pytest.mark.parametrize(("alike", "heard"), [(0.65, 8), (0.8, 7)])
def test_who_deviates_in_the_same_way_counts_as_one(alike: float, heard: int) -> None:
    """alike: about how much two of them differ from the others in the same way."""
    generator = torch.Generator().manual_seed(2)
    values = agreeing(0.5)
    shared, *own = torch.randn(3, 5000, generator=generator).double()
    for s in (6, 7):
        apart = math.sqrt(alike) * shared + math.sqrt(1 - alike) * own[s - 6]
        values[s] = values[:6].mean(dim=0) + math.sqrt(0.5) * apart
    assert int(Screen(trim=0.25).heard(values, everything(values), 1 / 3).sum()) == heard


def test_what_a_client_lacks_says_nothing_about_it() -> None:
    values, present = crowd(1), everything(crowd(1))
    values[3, 200:], present[3, 200:] = 0, False
    assert Screen(trim=0.25).heard(values, present, 1 / 3).all()


def test_claims_are_bounded_by_the_largest_that_must_be_honest() -> None:
    counts = np.array([[5.0, 0.0], [9.0, 3.0], [2.0, 1.0], [1e9, 0.0], [1e12, 7.0]])
    found = Screen(trim=0.4).claims(counts)
    np.testing.assert_array_equal(found, [[5, 0], [9, 1], [2, 1], [9, 0], [9, 1]])


def test_changes_are_shortened_by_neuron_and_not_by_layer() -> None:
    spec = one_weight()
    change = torch.ones(5, 5, 6, dtype=torch.float64)
    change[4, 2] = 50.0
    change[:, 0] *= 0.01  # what changes little for all is not taken for small
    found = Screen(clip=2.0).clipped_changes({"0.weight": change}, spec.tensors)["0.weight"]
    wanted = change.clone()
    wanted[4, 2] = 2.0
    torch.testing.assert_close(found, wanted)


def test_a_class_is_not_erased_by_those_who_only_claim_it() -> None:
    """Two of eight turn the row of class 0 around and claim more samples of it than all others."""
    generator = torch.Generator().manual_seed(0)
    model = network(0)
    spec = groups(model, INPUTS)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shift = {n: torch.randn(t.shape, generator=generator) for n, t in before.items()}
    sent = []
    for s in range(8):
        tensors = {
            n: t + shift[n] + 0.5 * torch.randn(t.shape, generator=generator)
            for n, t in before.items()
        }
        counts = (10, 20, 20)
        if s > 5:
            for name in ("2.weight", "2.bias"):
                tensors[name][0] = before[name][0] - 3 * shift[name][0]
            counts = (2**30, 0, 0)
        sent.append(Update(str(s), 0, tensors, sum(counts), counts))
    found = screened_average(Screen(clip=2.0, trim=0.25), sent, spec, before, True)["2.weight"]
    moved = (found - before["2.weight"])[0]
    assert float(nn.functional.cosine_similarity(moved, shift["2.weight"][0], dim=0)) > 0.8
    plain = average(sent, spec, before, True)["2.weight"]
    assert float(((plain - before["2.weight"])[0] * shift["2.weight"][0]).sum()) < 0
