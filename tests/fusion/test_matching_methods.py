"""nafi and pfnm: scale, dimension, width, order of the groups, options."""

from __future__ import annotations

import warnings
from itertools import permutations as all_orders
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nafi
from nafi.errors import InputError, NafiError
from nafi.fusion import FusionWarning
from nafi.fusion.clients import check_clients
from nafi.fusion.descent import next_group
from nafi.fusion.features import comparable_columns
from nafi.fusion.networks import prepare_networks
from nafi.graph import groups, permute
from nafi.graph.lift import Positions
from tests.fusion.networks import MLP, NormNet, gap, seeded
from tests.graph import zoo

INPUTS = (torch.randn(6, 8, generator=torch.Generator().manual_seed(0)),)


def noisy_clients(noise: float = 0.3, count: int = 5) -> list[MLP]:
    """Noisy, shuffled, partial copies of one network: three of four neurons each."""
    truth = seeded(9, 8, 16, 12, 5)
    rng = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(1)
    models = []
    for _ in range(count):
        first, second = rng.permutation(16)[:12], rng.permutation(12)[:9]
        model = MLP(8, 12, 9, 5)
        with torch.no_grad():
            weights = [layer.weight for layer in truth.layers]
            model.layers[0].weight.copy_(weights[0][first])
            model.layers[0].bias.copy_(truth.layers[0].bias[first])
            model.layers[1].weight.copy_(weights[1][second][:, first])
            model.layers[1].bias.copy_(truth.layers[1].bias[second])
            model.layers[2].weight.copy_(weights[2][:, second])
            model.layers[2].bias.copy_(truth.layers[2].bias)
            for tensor in model.parameters():
                drawn = torch.randn(tensor.shape, generator=generator)
                tensor.add_(noise * tensor.std() * drawn)
        models.append(model)
    return models


@pytest.mark.parametrize("penalty", [0.0, 0.05, 0.1])
def test_partial_copies_are_put_together(penalty: float) -> None:
    """Sixteen and twelve neurons are found again, though no client has all of them."""
    found = nafi.fuse(noisy_clients(0.05), INPUTS, penalty=penalty)
    assert found.widths == {"layers.0": 16, "layers.1": 12}
    assert (found.owners("layers.0") > 1).all()


def test_scaling_all_weights_changes_nothing_of_the_matching() -> None:
    models = noisy_clients()
    plain = nafi.fuse(models, INPUTS)
    for factor in (1e-3, 1e3):
        scaled = noisy_clients()
        with torch.no_grad():
            for model in scaled:
                for tensor in model.parameters():
                    tensor.mul_(factor)
        found = nafi.fuse(scaled, INPUTS)
        for group, clients in plain.assignments.items():
            for one, two in zip(clients, found.assignments[group], strict=True):
                np.testing.assert_array_equal(one, two)


def test_doubling_the_inputs_changes_nothing_of_the_matching() -> None:
    """Every input twice with its weight divided by sqrt 2: the same distances in more columns."""
    wider = []
    for model in noisy_clients():
        other = MLP(16, 12, 9, 5)
        state = model.state_dict()
        state["layers.0.weight"] = state["layers.0.weight"].repeat(1, 2) / 2**0.5
        other.load_state_dict(state)
        wider.append(other)
    plain = nafi.fuse(noisy_clients(), INPUTS)
    found = nafi.fuse(wider, (torch.randn(2, 16),))
    for group, clients in plain.assignments.items():
        for one, two in zip(clients, found.assignments[group], strict=True):
            np.testing.assert_array_equal(one, two)


def test_the_penalty_is_a_dial_of_the_width() -> None:
    models = noisy_clients(0.8)
    widths = [nafi.fuse(models, INPUTS, penalty=p).widths["layers.0"] for p in (0.0, 0.3, 3.0)]
    assert widths[0] > widths[1] > widths[2]
    pfnm = nafi.fuse(models, INPUTS, method="pfnm").widths["layers.0"]
    assert pfnm == widths[0]


def test_more_evidence_keeps_more_neurons() -> None:
    models = noisy_clients(0.8)
    widths = [
        nafi.fuse(models, INPUTS, method="pfnm", evidence=e).widths["layers.0"] for e in (3, 300)
    ]
    assert widths[0] < widths[1]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (20, [20, 20]),
        (1.5, [18, 13]),
        ({"layers.1": 9}, [None, 9]),
        ({"layers.0": 1.0}, [12, None]),
    ],
)
def test_max_width(limit: object, expected: list[int | None]) -> None:
    models = noisy_clients(1.5)
    free = nafi.fuse(models, INPUTS, method="pfnm").widths
    assert min(free.values()) > 20
    found = nafi.fuse(models, INPUTS, method="pfnm", max_width=limit).widths
    for name, most in zip(found, expected, strict=True):
        if most is not None:
            assert found[name] == most


@pytest.mark.parametrize("limit", [5, 0.5, "wide", True, {"layers.0": 3}])
def test_impossible_max_width(limit: object) -> None:
    with pytest.raises(InputError, match="max_width"):
        nafi.fuse(noisy_clients(), INPUTS, max_width=limit)


def test_a_list_of_penalties_is_chosen_from_by_validation() -> None:
    models = noisy_clients()
    target = 14

    def closeness(model: nn.Module) -> float:
        return -abs(len(model.layers[0].weight) - target)

    found = nafi.fuse(models, INPUTS, penalty=[0.0, 0.3, 5.0], validate=closeness)
    scores = found.diagnostics["scores"]
    assert [entry["penalty"] for entry in scores] == [0.0, 0.3, 5.0]
    assert found.diagnostics["score"] == max(entry["score"] for entry in scores)
    again = nafi.fuse(models, INPUTS, penalty=found.diagnostics["penalty"])
    assert again.widths == found.widths
    with pytest.raises(InputError, match="a list needs validate="):
        nafi.fuse(models, INPUTS, penalty=[0.1, 0.2])


def test_top_down_goes_the_other_way() -> None:
    models = noisy_clients()
    networks = prepare_networks(check_clients(models, None, None, None), INPUTS, None, "attach")
    assert next_group(networks, "bottom-up", []) == "layers.0"
    assert next_group(networks, "top-down", []) == "layers.1"
    # From above, the upper layer is compared by its bias and five outgoing weights alone.
    above = comparable_columns(networks, "layers.1", [{}] * 5)
    assert above is not None
    assert above.neurons[0].shape == (9, 1 + 5)
    matched = [{"layers.0": Positions(torch.arange(12), 20)}] * 5
    below = comparable_columns(networks, "layers.1", matched)
    assert below is not None
    assert below.neurons[0].shape == (9, 20 + 1 + 5)
    assert (below.neurons[0][:, 12:20] == 0).all()  # inputs that the client does not have
    up, down = (
        nafi.fuse(models, INPUTS, method="pfnm", direction=d) for d in ("bottom-up", "top-down")
    )
    assert list(up.matchings) == ["layers.0", "layers.1"]
    assert list(down.matchings) == ["layers.1", "layers.0"]
    with pytest.raises(InputError, match="direction"):
        nafi.fuse(models, INPUTS, direction="sideways")


def test_residual_groups_wait_for_what_feeds_them() -> None:
    """The stream cannot wait for the block that reads it; the block's inside comes second."""
    models = [NormNet().eval() for _ in range(2)]
    images = (torch.randn(2, 3, 6, 6),)
    networks = prepare_networks(check_clients(models, None, None, None), images, None, "attach")
    assert next_group(networks, "bottom-up", []) == "stem"
    assert next_group(networks, "bottom-up", ["stem"]) == "inner"


def test_input_moments_silence_inputs_that_are_always_zero() -> None:
    """Noise on dead inputs hides the copies; with moments they are found again."""
    rng = torch.Generator().manual_seed(0)
    truth = seeded(3, 20, 10, 4)
    models = []
    for s in range(4):
        order = torch.randperm(10, generator=rng)
        model = MLP(20, 10, 4)
        with torch.no_grad():
            model.layers[0].weight.copy_(truth.layers[0].weight[order])
            model.layers[0].weight[:, 10:] = torch.randn(10, 10, generator=rng)
            model.layers[0].bias.copy_(truth.layers[0].bias[order])
            model.layers[1].weight.copy_(truth.layers[1].weight[:, order])
            model.layers[1].bias.copy_(truth.layers[1].bias)
        models.append((model, order, s))
    data = torch.rand(50, 20, generator=rng)
    data[:, 10:] = 0
    moments = [
        nafi.input_moments(m, [data[:25], data[25:]], ["layers.0.weight"]) for m, _, _ in models
    ]
    assert moments[0]["layers.0.weight"] == pytest.approx(data.double().square().mean(0).numpy())

    def agreement(**options: object) -> float:
        found = nafi.fuse([m for m, _, _ in models], (data[:2],), max_width=1.0, **options)
        places = np.stack(
            [
                own[o.argsort().numpy()]
                for own, (_, o, _) in zip(found.assignments["layers.0"], models, strict=True)
            ]
        )
        return float((places == places[0]).mean())

    assert agreement(input_moments=moments) == 1.0
    assert agreement() < 0.8


@pytest.mark.parametrize(
    ("moments", "told"),
    [
        ({}, "a list with a dict"),
        ([{}] * 2, "for each of the 5"),
        ([{"layers.0.weight": np.ones(3)}] * 5, "needs 8 numbers"),
        ([{"layers.0.weight": -np.ones(8)}] * 5, "at least 0"),
        ([{"layers.0.weight": np.zeros(8)}] * 5, "are zero"),
        ([{"layers.0.bias": np.ones(12)}] * 5, "no weight of a linear"),
        ([{"layers.0.weight": np.ones(8)}] * 4 + [{}], "other tensors"),
    ],
)
def test_bad_moments(moments: object, told: str) -> None:
    with pytest.raises(InputError, match=told):
        nafi.fuse(noisy_clients(), INPUTS, input_moments=moments)


def test_absolute_variances_are_those_of_match() -> None:
    """The paper's settings: the first group's matching is that of nafi.match on its columns."""
    models = [seeded(s, 8, 6, 5) for s in range(3)]
    counts = np.array([[3, 1, 1, 2, 0], [1, 1, 4, 0, 2], [2, 2, 2, 2, 2]])
    found = nafi.fuse(
        models, INPUTS, class_counts=counts, noise_precision=2.0, prior_precision=0.5, penalty=0.1
    )
    rows = [
        np.concatenate(
            [
                m.layers[0].weight.detach().double().numpy(),
                m.layers[0].bias.detach().double().numpy()[:, None],
                m.layers[1].weight.detach().double().numpy().T,
            ],
            axis=1,
        )
        for m in models
    ]
    shares = counts / counts.sum(axis=0) * 3
    precisions = [2.0 * np.concatenate([np.ones(9), share]) for share in shares]
    sizes = [sum(float(p.detach().double().square().sum()) for p in m.parameters()) for m in models]
    ranking = sorted(range(3), key=lambda s: -sizes[s])
    expected = nafi.match(
        [rows[s] for s in ranking],
        precisions=[precisions[s] for s in ranking],
        prior_precision=0.5,
        penalty=0.1,
    )
    for place, s in enumerate(ranking):
        np.testing.assert_array_equal(found.assignments["layers.0"][s], expected.assignments[place])


@pytest.mark.parametrize("name", ["evidence", "prior_ratio", "noise_precision", "prior_precision"])
@pytest.mark.parametrize("value", [0, -1.0, "much", float("nan")])
def test_bad_numbers(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{name}: found"):
        nafi.fuse(noisy_clients(), INPUTS, **{name: value})


def test_fixed_widths_stay_and_are_told() -> None:
    model, inputs = zoo.seeded("lenet_hard_coded")
    other, _ = zoo.seeded("lenet_hard_coded")
    torch.manual_seed(7)
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.normal_()
    with pytest.warns(FusionWarning, match="the width stays as it is"):
        found = nafi.fuse([model, other], inputs, method="pfnm")
    spec = groups(model, inputs)
    fixed = [name for name in spec.groups if found.widths[name] == spec.widths[name]]
    grown = [name for name in spec.groups if found.widths[name] > spec.widths[name]]
    assert fixed
    assert grown


@pytest.mark.slow
def test_heads_are_matched_as_heads() -> None:
    """Two heads of one client are never mixed: each goes to one fused head, whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, inputs = zoo.seeded("vit_fused")
        others = []
        for seed in range(2):
            torch.manual_seed(seed)
            other, _ = zoo.seeded("vit_fused")
            with torch.no_grad():
                for tensor in other.parameters():
                    tensor.add_(0.1 * tensor.std() * torch.randn_like(tensor))
            others.append(other)
        found = nafi.fuse([model, *others], inputs, bases="ordered")
    spec = found.spec
    assert spec is not None
    inside = {name: g.parent for name, g in spec.groups.items() if g.parent is not None}
    assert inside
    for name, parent in inside.items():
        for heads, within in zip(found.assignments[parent], found.assignments[name], strict=True):
            assert within.shape == (len(heads), spec.groups[name].width)
            for row in within:
                assert len(set(row.tolist())) == len(row)
    assert any(key.endswith("[0]") for key in found.matchings)


def test_transport_is_the_cheapest_of_all_orders() -> None:
    models = [seeded(s, 8, 4, 3) for s in range(2)]
    found = nafi.fuse(models, INPUTS, method="ot", reference=0)
    rows = [
        torch.cat([m.layers[0].weight, m.layers[0].bias[:, None]], dim=1).detach().double()
        for m in models
    ]
    cost = torch.cdist(rows[1], rows[0])
    best = min(all_orders(range(4)), key=lambda o: sum(float(cost[j, i]) for j, i in enumerate(o)))
    assert found.assignments["layers.0"][1].tolist() == list(best)
    expected = (models[0].layers[0].bias + models[1].layers[0].bias[np.argsort(best)]) / 2
    assert torch.allclose(found.model.layers[0].bias, expected)


def test_rebasin_brings_models_closer_than_any_other_order() -> None:
    """One group and two models: the best of all orders, by brute force."""
    models = [seeded(s, 8, 4, 3) for s in range(2)]
    found = nafi.fuse(models, INPUTS, method="rebasin")
    rows = [
        torch.cat([m.layers[0].weight, m.layers[0].bias[:, None], m.layers[1].weight.T], 1).detach()
        for m in models
    ]
    best = max(all_orders(range(4)), key=lambda o: float((rows[0] * rows[1][list(o)]).sum()))
    one, two = (own.tolist() for own in found.assignments["layers.0"])
    assert [two.index(one[i]) for i in range(4)] == list(best)


def test_an_ensemble_can_weigh_classes_by_who_has_seen_them() -> None:
    models = [seeded(s, 8, 12, 3) for s in range(2)]
    counts = [[30, 0, 10], [10, 50, 0]]
    fused = nafi.fuse(models, INPUTS, "ensemble", weigh_by="counts", class_counts=counts).model
    one, two = (model(*INPUTS) for model in models)
    expected = torch.tensor([0.75, 0, 1]) * one + torch.tensor([0.25, 1, 0]) * two
    assert torch.allclose(fused(*INPUTS), expected, atol=1e-6)
    with pytest.raises(InputError, match="weigh_by='counts'"):
        nafi.fuse(models, INPUTS, "ensemble", class_counts=counts)


def test_an_ensemble_is_the_mean() -> None:
    models = [seeded(s, 8, 4, 3) for s in range(3)]
    with torch.no_grad():
        logits = torch.stack([model(*INPUTS) for model in models])
        found = nafi.fuse(models, INPUTS, method="ensemble").model(*INPUTS)
        probable = nafi.fuse(models, INPUTS, method="ensemble", average="probabilities").model(
            *INPUTS
        )
    assert torch.allclose(found, logits.mean(dim=0), atol=1e-6)
    assert torch.allclose(probable.exp(), logits.softmax(dim=2).mean(dim=0), atol=1e-6)


def test_fedavg_by_samples() -> None:
    models = [seeded(s, 8, 4, 3) for s in range(2)]
    found = nafi.fuse(models, INPUTS, method="fedavg", sample_counts=[9, 1]).model
    for name, tensor in found.state_dict().items():
        one, two = (m.state_dict()[name] for m in models)
        assert torch.allclose(tensor, 0.9 * one + 0.1 * two, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m.layers[0].weight.data.fill_(float("nan")), r"model 1: layers.0.weight .* NaN"),
        (lambda m: m.double(), r"model 1: layers.0.weight is torch.float64, in model 0"),
        (lambda m: setattr(m, "more", nn.Linear(2, 2)), r"model 1 has more.weight, more.bias"),
        (lambda m: m.layers.append(nn.Linear(5, 5)), r"model 1 has layers.3"),
    ],
)
def test_models_that_do_not_fit(change: object, told: str) -> None:
    models = noisy_clients()
    change(models[1])  # type: ignore[operator]
    with pytest.raises(NafiError, match=told):
        nafi.fuse(models, INPUTS)


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ([[1, 2, 3, 4, 5]] * 3, r"found shape \(3, 5\), expected \(5, classes\)"),
        ([[1, 2, 3, 4, -5]] * 5, "at least 0"),
        ([[0.0] * 5] + [[1.0] * 5] * 4, "model 0 has no samples"),
        ([["a"] * 5] * 5, "expected numbers"),
        ([1, 2, 3, 4, 5], "expected"),
    ],
)
def test_bad_class_counts(counts: object, told: str) -> None:
    with pytest.raises(InputError, match=told):
        nafi.fuse(noisy_clients(), INPUTS, class_counts=counts)


def test_other_architectures_are_named() -> None:
    models = [seeded(0, 8, 12, 9, 5), seeded(1, 7, 12, 9, 5)]
    with pytest.raises(NafiError, match=r"model 1 is of another architecture.*layers.0.weight"):
        nafi.fuse(models, INPUTS)


def test_fused_networks_can_be_fused_again() -> None:
    one = nafi.fuse(noisy_clients()[:2], INPUTS)
    two = nafi.fuse(noisy_clients()[2:], INPUTS)
    found = nafi.fuse([one.model, two.model], INPUTS)
    assert found.widths["layers.0"] >= max(one.widths["layers.0"], two.widths["layers.0"])
    spec = groups(one.model, INPUTS)
    orders = {n: torch.arange(g.width).flip(0) for n, g in spec.groups.items()}
    again = nafi.fuse([one.model, permute(one.model, spec, orders)], INPUTS)
    assert again.widths == one.widths
    assert gap(again.model, one.model, INPUTS) < 1e-4


def test_a_limit_is_made_use_of_with_a_probe() -> None:
    """Two networks that differ: merged by the penalty of 0.4, kept apart up to the limit by 0."""

    def fused(**options: Any) -> nafi.FusionResult:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3)) for _ in range(2)]
        return nafi.fuse(models, (torch.zeros(2, 6),), **options)

    probe = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    limited = fused(probe=probe, max_width=1.5).widths["0"]
    assert limited == fused(probe=probe, max_width=1.5, penalty=0.0).widths["0"]
    assert limited > fused(probe=probe, max_width=1.5, penalty=0.4).widths["0"]
    assert fused(probe=probe).widths == fused(probe=probe, penalty=0.4).widths
    assert fused(max_width=1.5).widths == fused(max_width=1.5, penalty=0.4).widths
