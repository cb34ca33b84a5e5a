"""Merging against plain loops, and what restoring norms does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import nafi
from nafi.errors import InputError
from nafi.fusion.clients import check_clients
from nafi.fusion.layer_sums import owned_outputs
from nafi.fusion.merge import finished_network, merge_tensors, merged_network
from nafi.fusion.networks import Networks, prepare_networks
from nafi.fusion.screen import Screen
from nafi.graph.lift import Positions, Shares, lift
from tests.fusion.networks import MLP, seeded

INPUTS = (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),)
COUNTS = [[5, 1, 0], [2, 0, 3]]


def two_clients() -> list[MLP]:
    return [seeded(0, 4, 3, 2, 3), seeded(1, 4, 2, 2, 3)]


# Where the neurons of the two clients go; five and three places.
PLACES = [
    {"layers.0": [0, 2, 4], "layers.1": [1, 0]},
    {"layers.0": [2, 1], "layers.1": [1, 2]},
]
WIDTHS = {"layers.0": 5, "layers.1": 3}


def placements() -> list[dict[str, Positions]]:
    return [
        {name: Positions(torch.tensor(index), WIDTHS[name]) for name, index in own.items()}
        for own in PLACES
    ]


def expected_by_loops(models: list[MLP]) -> dict[str, np.ndarray]:
    """Owners' means with true zeros for absent inputs, and class shares in the last layer."""
    states = [{n: t.double().numpy() for n, t in m.state_dict().items()} for m in models]
    shares = np.array(COUNTS, float) / np.array(COUNTS, float).sum(axis=0)
    result = {}
    for layer, (below, above) in enumerate([(None, "layers.0"), ("layers.0", "layers.1")]):
        columns = 4 if below is None else WIDTHS[below]
        weight, bias = np.zeros((WIDTHS[above], columns)), np.zeros(WIDTHS[above])
        for place in range(WIDTHS[above]):
            owners = [
                (s, PLACES[s][above].index(place)) for s in (0, 1) if place in PLACES[s][above]
            ]
            for s, own in owners:
                bias[place] += states[s][f"layers.{layer}.bias"][own] / len(owners)
                for j, value in enumerate(states[s][f"layers.{layer}.weight"][own]):
                    at = j if below is None else PLACES[s][below][j]
                    weight[place, at] += value / len(owners)
        result[f"layers.{layer}.weight"], result[f"layers.{layer}.bias"] = weight, bias
    weight, bias = np.zeros((3, WIDTHS["layers.1"])), np.zeros(3)
    for s in (0, 1):
        for k in range(3):
            bias[k] += shares[s, k] * states[s]["layers.2.bias"][k]
            for j, value in enumerate(states[s]["layers.2.weight"][k]):
                weight[k, PLACES[s]["layers.1"][j]] += shares[s, k] * value
    return {**result, "layers.2.weight": weight, "layers.2.bias": bias}


def test_outputs_are_a_client_s_own_where_its_neurons_are() -> None:
    clients = check_clients(two_clients(), None, None, None)
    networks = prepare_networks(clients, INPUTS, None, "attach")
    for spec, places, own in zip(networks.specs, placements(), PLACES, strict=True):
        axes = spec.tensors["layers.0.bias"].axes
        found = owned_outputs((axes, torch.tensor([[4, 3, 2, 1, 0]])), spec, places)
        assert found.tolist() == [[place in own["layers.0"] for place in (4, 3, 2, 1, 0)]]


def test_merging_equals_plain_loops() -> None:
    models = two_clients()
    clients = check_clients(models, COUNTS, None, None)
    networks = prepare_networks(clients, INPUTS, None, "attach")
    found = merge_tensors(networks, placements(), restore_norm=False)
    expected = expected_by_loops(models)
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].numpy(), values, atol=1e-6, err_msg=name)


def test_restored_norms_are_the_mean_of_the_members() -> None:
    models = two_clients()
    networks = prepare_networks(check_clients(models, COUNTS, None, None), INPUTS, None, "attach")
    plain = merge_tensors(networks, placements(), restore_norm=False)
    found = merge_tensors(networks, placements(), restore_norm=True)
    norms = [m.state_dict()["layers.0.weight"].norm(dim=1) for m in models]
    shared = float((norms[0][1] + norms[1][0]) / 2)  # both own place 2
    assert float(found["layers.0.weight"][2].norm()) == pytest.approx(shared, rel=1e-5)
    factor = shared / float(plain["layers.0.weight"][2].norm())
    assert factor > 1
    # A mean of numbers that agree is no smaller than they are: a restored bias would be too large.
    assert found["layers.0.bias"].equal(plain["layers.0.bias"])
    for place in (0, 1, 4):  # of one owner alone: nothing was averaged
        assert found["layers.0.weight"][place].allclose(plain["layers.0.weight"][place])
    assert found["layers.2.weight"].equal(plain["layers.2.weight"])  # outputs are no neurons


def test_restored_norms_are_weighed_by_samples_and_zero_stays_zero() -> None:
    """Of what only one client has, its norm is the mean; of what cancels out, there is none."""
    models = two_clients()
    with torch.no_grad():  # both own place 1 of the second layer, and read place 2 alone in it
        for model, column, sign in zip(models, (1, 0), (0.25, -0.75), strict=True):
            model.layers[1].weight[0] = 0
            model.layers[1].weight[0, column] = sign
    clients = check_clients(models, None, [30, 10], None)
    networks = prepare_networks(clients, INPUTS, None, "attach")
    plain = merge_tensors(networks, placements(), restore_norm=False)
    found = merge_tensors(networks, placements(), restore_norm=True)
    norms = [m.layers[0].weight.detach().norm(dim=1) for m in models]
    shared = float(0.75 * norms[0][1] + 0.25 * norms[1][0])
    assert float(found["layers.0.weight"][2].norm()) == pytest.approx(shared, rel=1e-5)
    for place in (0, 1, 4):
        torch.testing.assert_close(found["layers.0.weight"][place], plain["layers.0.weight"][place])
    assert not plain["layers.1.weight"][1].any()
    assert torch.equal(found["layers.1.weight"][1], torch.zeros(5))


class Signed(nn.Module):
    """Neurons each with a whole number that is not trained."""

    def __init__(self, *signs: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, len(signs)), nn.Linear(len(signs), 2)
        self.register_buffer("signs", torch.tensor(signs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(self.one(x).relu() * self.get_buffer("signs"))
        return found


def test_whole_numbers_of_neurons_are_those_of_the_first_that_has_them() -> None:
    models = [Signed(1, 2, 3), Signed(4, 5, 6)]
    networks = prepare_networks(check_clients(models, None, None, None), INPUTS, None, "attach")
    (group,) = networks.spec.groups
    places = [{group: Positions(torch.tensor(own), 5)} for own in ([4, 0, 2], [2, 1, 0])]
    found = merge_tensors(networks, places, restore_norm=False)["signs"]
    assert found.tolist() == [2, 5, 3, 0, 1]


@pytest.mark.parametrize("count", [2, 5])
def test_restored_norms_are_the_data_free_repair_of_just_fold_the_network(count: int) -> None:
    """Fold-AR scales the mean of N channels of mean correlation c by N / sqrt(N + (N^2 - N) c).

    The norm of the mean of N unit vectors is the reciprocal of that.
    """
    models = [seeded(s, 4, 3, 3).double() for s in range(count)]
    for model in models:
        weight = model.layers[0].weight
        with torch.no_grad():
            weight.mul_(1.7 / weight.norm(dim=1, keepdim=True))
    inputs = (INPUTS[0].double(),)
    networks = prepare_networks(check_clients(models, None, None, None), inputs, None, "attach")
    together = [{"layers.0": Positions(torch.arange(3), 3)} for _ in models]
    plain, found = (
        merge_tensors(networks, together, restore_norm=restore)["layers.0.weight"]
        for restore in (False, True)
    )
    for place in range(3):
        rows = torch.stack([model.layers[0].weight[place].detach() for model in models])
        cosines = torch.nn.functional.normalize(rows, dim=1)
        cosines = cosines @ cosines.T
        correlation = (cosines.sum() - count) / (count**2 - count)
        factor = count / (count + (count**2 - count) * correlation).sqrt()
        assert factor > 1.01
        assert torch.allclose(found[place], factor * plain[place], rtol=1e-9)


def test_keeping_all_neurons_is_the_class_weighted_ensemble() -> None:
    """Closed form: with disjoint neurons the fused logits are the clients', weighted by class."""
    models = [seeded(s, 4, 3, 2, 3) for s in range(2)]
    networks = prepare_networks(check_clients(models, COUNTS, None, None), INPUTS, None, "attach")
    apart = [
        {
            "layers.0": Positions(torch.arange(3) + 3 * s, 6),
            "layers.1": Positions(torch.arange(2) + 2 * s, 4),
        }
        for s in (0, 1)
    ]
    state = merge_tensors(networks, apart, restore_norm=True)
    fused = networks.build(state, {"layers.0": 6, "layers.1": 4})
    shares = torch.tensor(COUNTS).float() / torch.tensor(COUNTS).float().sum(dim=0)
    with torch.no_grad():
        expected = sum(share * model(*INPUTS) for share, model in zip(shares, models, strict=True))
        assert torch.allclose(fused(*INPUTS), expected, atol=1e-6)


def test_samples_weigh_where_there_are_no_classes() -> None:
    models = [seeded(s, 4, 3, 3) for s in range(2)]
    networks = prepare_networks(check_clients(models, None, [30, 10], None), INPUTS, None, "attach")
    together = [{"layers.0": Positions(torch.arange(3), 3)} for _ in range(2)]
    state = merge_tensors(networks, together, restore_norm=False)
    for name, tensor in state.items():
        one, two = (m.state_dict()[name] for m in models)
        assert torch.allclose(tensor, 0.75 * one + 0.25 * two, atol=1e-6), name


def test_shares_keep_the_function_of_doubled_neurons() -> None:
    """Two equal neurons transported to one: its readers get the sum of what the two gave."""
    model = seeded(0, 4, 2, 3)
    wide = MLP(4, 4, 3)
    with torch.no_grad():
        wide.layers[0].weight.copy_(model.layers[0].weight.repeat_interleave(2, 0))
        wide.layers[0].bias.copy_(model.layers[0].bias.repeat_interleave(2))
        wide.layers[1].weight.copy_(model.layers[1].weight.repeat_interleave(2, 1) / 2)
        wide.layers[1].bias.copy_(model.layers[1].bias)
    spec = nafi.groups(wide, INPUTS)
    plan = torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]]) / 4
    for name, tensor in wide.state_dict().items():
        lifted = lift(tensor, name, spec, {"layers.0": Shares(plan)})
        assert torch.allclose(lifted, model.state_dict()[name], atol=1e-6), name


def test_class_counts_must_fit_the_outputs() -> None:
    with pytest.raises(InputError, match="found 5 classes, but no layer"):
        nafi.fuse(two_clients(), INPUTS, class_counts=[[1] * 5] * 2)
    clients = check_clients(two_clients(), [[1] * 5] * 2, None, None)
    networks = prepare_networks(clients, INPUTS, None, "attach")
    with pytest.raises(InputError, match="found 5 classes, but no layer"):
        merge_tensors(networks, placements(), restore_norm=False)


def normed(seed: int) -> nn.Sequential:
    """Three neurons whose normalisation has numbers of its own everywhere."""
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(3)
    for tensor in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
        assert tensor is not None
        tensor.uniform_(0.5, 2.0)
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.fill_(10 + 6 * seed)
    return nn.Sequential(nn.Linear(4, 3), norm, nn.ReLU(), nn.Linear(3, 2)).eval()


# Five places; both own place 2, nobody owns place 4.
NORMED_PLACES = [[0, 2, 3], [2, 1, 0]]
OWNERS = {0: [(0, 0), (1, 2)], 1: [(1, 1)], 2: [(0, 1), (1, 0)], 3: [(0, 2)]}


def normed_networks(batchnorm: str) -> tuple[list[nn.Sequential], Networks]:
    models = [normed(s) for s in range(2)]
    clients = check_clients(models, None, None, None)
    return models, prepare_networks(clients, INPUTS, None, batchnorm)


def normed_places() -> list[dict[str, Positions]]:
    return [{"0": Positions(torch.tensor(places), 5)} for places in NORMED_PLACES]


def owners_mean(models: list[nn.Sequential], name: str, place: int) -> float:
    found = [float(models[s].state_dict()[name][own]) for s, own in OWNERS[place]]
    return sum(found) / len(found)


def test_normalisation_is_put_back_with_the_moments_that_owners_claim() -> None:
    models, networks = normed_networks("attach")
    merged = merged_network(networks, normed_places(), {"0": 5}, restore_norm=False)
    found, *_ = finished_network(networks, normed_places(), {"0": 5}, merged)
    norm = found.get_submodule("1")
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    for place in OWNERS:
        mean, gain = (owners_mean(models, f"1.{kind}", place) for kind in ("bias", "weight"))
        assert float(norm.running_mean[place]) == pytest.approx(mean, rel=1e-5)
        assert float(norm.running_var[place]) == pytest.approx(gain**2, rel=1e-4)
    assert torch.allclose(found(INPUTS[0]), merged(INPUTS[0]), atol=1e-5)


def test_normalisation_is_put_back_with_the_moments_that_a_probe_shows() -> None:
    _, networks = normed_networks("attach")
    probe = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    networks = replace(networks, probe=(probe,))
    merged = merged_network(networks, normed_places(), {"0": 5}, restore_norm=False)
    found, *_ = finished_network(networks, normed_places(), {"0": 5}, merged)
    norm, made = found.get_submodule("1"), merged.get_submodule("0")(probe).detach()
    owned = list(OWNERS)
    mean, variance = made.mean(dim=0), made.var(dim=0, correction=0)
    torch.testing.assert_close(norm.running_mean[owned], mean[owned])
    torch.testing.assert_close(norm.running_var[owned], variance[owned], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("screen", [None, Screen(trim=0.3)])  # which trims nobody of two
def test_normalisation_that_is_averaged_is_neutral_where_nobody_has_a_neuron(
    screen: Screen | None,
) -> None:
    models, networks = normed_networks("average")
    found = merge_tensors(networks.merging, normed_places(), restore_norm=False, screen=screen)
    for kind, neutral in (("weight", 0), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
        expected = [owners_mean(models, f"1.{kind}", place) for place in OWNERS]
        torch.testing.assert_close(found[f"1.{kind}"], torch.tensor([*expected, neutral]))
    assert found["1.num_batches_tracked"].equal(torch.tensor(10))  # no number to average


# ---------------------------------------------------------------------------------- trimmed

# Seven clients of one larger network with six neurons: where the neurons of each go. One turns its
# neurons around, or has few of them; nobody has the last neuron, or two have, one of whom alone
# knows a class.
AROUND = [[0, 1, 2], [2, 1, 3], [0, 2, 3], [2, 0, 3], [1, 2, 0], [0, 2, 1], [2, 4, 0]]
FEW = [[0, 1, 2, 3, 5], [5, 3, 2, 1, 0], *[[2, 0, 3, 1, 4], [4, 3, 2, 1, 0]] * 2, [3, 1]]
TRIM = Screen(trim=0.28)  # two of seven


def like_each_other(places: list[list[int]], last: int) -> list[MLP]:
    """Neurons of the larger network, with noise; last: the sign of the last client's."""
    truth, models = seeded(0, 4, 6, 3), []
    for s, own in enumerate(places):
        model = seeded(1 + s, 4, len(own), 3)
        wanted = [truth.layers[0].weight[own], truth.layers[0].bias[own]]
        wanted += [truth.layers[1].weight[:, own], truth.layers[1].bias]
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), wanted, strict=True):
                parameter.copy_((last if s == 6 else 1) * (value + 0.2 * parameter))
        models.append(model)
    return models


def trimmed_mean(values: list[float], weights: list[float], cut: int) -> float:
    """Without so many at either end; of few, their median."""
    order = sorted(range(len(values)), key=values.__getitem__)
    out = min(cut, (len(values) - 1) // 2)
    kept = order[out : len(order) - out]
    return sum(weights[i] * values[i] for i in kept) / sum(weights[i] for i in kept)


def trimmed_by_loops(
    models: list[MLP], places: list[list[int]], heard: list[int], cut: int
) -> dict[str, np.ndarray]:
    """Each number by itself: whose it is, who has its input, and what is left of them."""
    own = [{place: i for i, place in enumerate(of_client)} for of_client in places]
    shares = COUNTS_OF_SEVEN / COUNTS_OF_SEVEN.sum(axis=0)
    states = [{n: t.double().numpy() for n, t in m.state_dict().items()} for m in models]
    found = {n: np.zeros(s) for n, s in (("0.weight", (6, 4)), ("0.bias", (6,)))}
    found |= {"1.weight": np.zeros((3, 6)), "1.bias": np.zeros(3)}
    for place in range(6):
        owners = [s for s in heard if place in own[s]]
        ones = [1.0] * len(owners)
        for j in range(4) if owners else ():
            values = [states[s]["layers.0.weight"][own[s][place], j] for s in owners]
            found["0.weight"][place, j] = trimmed_mean(values, ones, cut)
        if owners:
            values = [states[s]["layers.0.bias"][own[s][place]] for s in owners]
            found["0.bias"][place] = trimmed_mean(values, ones, cut)
    for k in range(3):
        voters = [s for s in heard if shares[s, k] > 0]
        weights = {s: shares[s, k] for s in voters}
        values = [states[s]["layers.1.bias"][k] for s in voters]
        found["1.bias"][k] = trimmed_mean(values, [weights[s] for s in voters], cut)
        for place in range(6):
            having = [s for s in voters if place in own[s]]
            rare = sum(place in of_client for of_client in own) <= 2
            if not having or (rare and len(having) < len(voters)):
                continue
            values = [states[s]["layers.1.weight"][k, own[s][place]] for s in having]
            mean = trimmed_mean(values, [weights[s] for s in having], cut)
            found["1.weight"][k, place] = mean * len(having) / len(voters)
    return {f"layers.{name}": values for name, values in found.items()}


def six_places(places: list[list[int]]) -> list[dict[str, Positions]]:
    return [{"layers.0": Positions(torch.tensor(own), 6)} for own in places]


COUNTS_OF_SEVEN = np.array([[5, 1, 2], *[[5, 0, 2]] * 3, [2, 0, 0], [9, 0, 1], [8, 0, 8]])


@pytest.mark.parametrize(
    ("places", "last", "heard", "cut"), [(AROUND, -1, range(6), 1), (FEW, 1, range(7), 2)]
)
def test_trimming_equals_plain_loops(
    places: list[list[int]], last: int, heard: range, cut: int
) -> None:
    """Of two that may be harmful, those who are not heard are not left out once more."""
    models = like_each_other(places, last)
    clients = check_clients(models, COUNTS_OF_SEVEN, None, None)
    networks = prepare_networks(clients, INPUTS, None, "attach")
    found = merge_tensors(networks, six_places(places), restore_norm=False, screen=TRIM)
    expected = trimmed_by_loops(models, places, list(heard), cut)
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].numpy(), values, atol=1e-6, err_msg=name)


def test_norms_are_restored_to_the_trimmed_mean_of_those_that_are_heard() -> None:
    models = like_each_other(AROUND, -1)
    networks = prepare_networks(check_clients(models, None, None, None), INPUTS, None, "attach")
    plain, found = (
        merge_tensors(networks, six_places(AROUND), restore_norm=restore, screen=TRIM)
        for restore in (False, True)
    )
    for place in range(6):
        owners = [s for s in range(6) if place in AROUND[s]]
        before, after = (state["layers.0.weight"][place] for state in (plain, found))
        if not owners:  # a client's that is not heard, or nobody's
            assert not after.any()
            continue
        rows = [models[s].layers[0].weight[AROUND[s].index(place)].detach() for s in owners]
        wanted = trimmed_mean([float(row.norm()) for row in rows], [1.0] * len(rows), 1)
        torch.testing.assert_close(after, before * wanted / before.norm())
    assert found["layers.0.bias"].equal(plain["layers.0.bias"])


def test_no_more_are_silenced_over_all_layers_than_may_be_harmful() -> None:
    """One of five: whom the first layer gives away; another one, in the second, is heard on."""
    truth, models = seeded(0, 4, 6, 5, 3), []
    for s in range(5):
        model = seeded(1 + s, 4, 6, 5, 3)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), truth.parameters(), strict=True):
                parameter.copy_(value + 0.2 * parameter)
            if s > 2:
                model.layers[s - 3].weight.neg_()
        models.append(model)
    places = [
        {"layers.0": Positions(torch.arange(6), 6), "layers.1": Positions(torch.arange(5), 5)}
        for _ in models
    ]
    networks = prepare_networks(check_clients(models, None, None, None), INPUTS, None, "attach")
    found = merge_tensors(networks, places, restore_norm=False, screen=Screen(trim=0.2))
    for name, tensor in found.items():
        mean = torch.stack([models[s].state_dict()[name] for s in (0, 1, 2, 4)]).mean(dim=0)
        torch.testing.assert_close(tensor, mean)


def test_a_neuron_of_which_most_members_are_silent_is_not_stretched() -> None:
    """Their usual norm is zero, which would make nothing of what the others agree on."""
    models = [seeded(s, 4, 2, 3, 3) for s in range(5)]
    with torch.no_grad():
        for s, model in enumerate(models):
            model.layers[1].weight.zero_()
            model.layers[1].weight[:, 0] = [1.0, 2.0, 0.0, 0.0, 0.0][s]
    # Three have the first place below, where only the first two read something.
    below = [[0, 1], [0, 2], [0, 1], [1, 2], [2, 1]]
    places = [
        {
            "layers.0": Positions(torch.tensor(own), 3),
            "layers.1": Positions(torch.arange(3), 3),
        }
        for own in below
    ]
    networks = prepare_networks(check_clients(models, None, None, None), INPUTS, None, "attach")
    for restore in (False, True):
        found = merge_tensors(networks, places, restore_norm=restore, screen=Screen(trim=0.4))
        expected = torch.zeros(3, 3)
        expected[:, 0] = 1.0 * 3 / 5  # the median of 1, 2 and 0, by three of five
        torch.testing.assert_close(found["layers.1.weight"], expected)
