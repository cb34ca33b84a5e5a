"""Which neurons matter: the greedy order against least squares written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nafi
from nafi.errors import InputError
from nafi.fusion.allocation import Part, cut_to
from nafi.fusion.budget import Size, measured_size, multiplications, read_budget, size_in
from nafi.fusion.selection import (
    RIDGE,
    Reader,
    neuron_orders,
    neurons_along,
    order_neurons,
    with_inputs,
)
from nafi.graph import permute, rebuild
from tests.fusion.networks import MLP, seeded, trained_norms

IMAGES = (torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)),)
PROBE = (torch.randn(40, 3, 6, 6, generator=torch.Generator().manual_seed(1)),)


def reader(seed: int, width: int, columns: int, outputs: int) -> Reader:
    generator = torch.Generator().manual_seed(seed)
    size = width * columns
    mix = torch.randn(size, size, generator=generator, dtype=torch.float64)
    inputs = torch.randn(200, size, generator=generator, dtype=torch.float64) @ mix
    inputs -= inputs.mean(dim=0)
    weights = torch.randn(size, outputs, generator=generator, dtype=torch.float64)
    return Reader(inputs.mT @ inputs, weights, float((inputs @ weights).square().sum()))


def explained(layer: Reader, neurons: list[int], width: int) -> float:
    """By ridge regression on the columns of some neurons."""
    columns = torch.arange(len(layer.gram)).reshape(width, -1)[neurons].flatten()
    ridge = RIDGE * layer.gram.diagonal().mean() * torch.eye(len(columns), dtype=torch.float64)
    cross = (layer.gram @ layer.weights)[columns]
    solved = torch.linalg.solve(layer.gram[columns][:, columns] + ridge, cross)
    return float((cross * solved).sum() / layer.variance)


@pytest.mark.parametrize("seed", range(3))
def test_each_step_takes_the_neuron_that_explains_most(seed: int) -> None:
    width = 6
    layers = [reader(seed, width, 2, 3), reader(seed + 10, width, 3, 5)]
    found = order_neurons(layers, width)
    chosen: list[int] = []
    for place, neuron in enumerate(found.order.tolist()):
        gains = {
            j: sum(explained(layer, [*chosen, j], width) for layer in layers)
            for j in range(width)
            if j not in chosen
        }
        assert neuron == max(gains, key=gains.__getitem__)
        chosen.append(neuron)
        assert found.lost[place + 1] == pytest.approx(2 - gains[neuron], abs=1e-8)
    assert sorted(chosen) == list(range(width))
    assert found.lost[0] == pytest.approx(2)


def test_a_copy_and_a_silent_neuron_are_worth_nothing() -> None:
    layer = reader(0, 4, 1, 3)
    spread = torch.tensor([0, 1, 2, 3, 1])  # the last is a copy of neuron 1, the fourth silent
    gram = layer.gram[spread][:, spread]
    gram[3], gram[:, 3] = 0, 0
    weights = layer.weights[spread]
    variance = float((weights * (gram @ weights)).sum())
    found = order_neurons([Reader(gram, weights, variance)], 5)
    assert set(found.order[3:].tolist()) <= {1, 3, 4}
    assert found.order.tolist()[-1] == 3
    assert found.lost[3] == pytest.approx(found.lost[5], abs=0.01)


def test_what_the_last_layer_reads_counts_as_much_as_what_it_says() -> None:
    layer = reader(0, 5, 1, 2)
    both = order_neurons([with_inputs(layer.gram, layer.weights, layer.variance)], 5)
    said = Reader(layer.gram, layer.weights, layer.variance)
    read = Reader(layer.gram, torch.eye(5, dtype=torch.float64), float(layer.gram.diagonal().sum()))
    apart = order_neurons([said, read], 5)
    assert both.order.tolist() == apart.order.tolist()
    assert both.lost == pytest.approx(apart.lost)
    silent = with_inputs(torch.zeros(5, 5, dtype=torch.float64), layer.weights, 0.0)
    assert order_neurons([silent], 5).lost == (0,) * 6


class Cat(nn.Module):
    """Two groups side by side, one of them flattened with its places."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 5, 3)
        self.both, self.out = nn.Conv2d(9, 6, 3), nn.Linear(6 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.left(x).relu(), self.right(x).relu()], dim=1)
        return self.out(self.both(both).relu().flatten(1))


def test_columns_are_those_of_the_neuron() -> None:
    torch.manual_seed(0)
    spec = nafi.groups(Cat().eval(), IMAGES)
    assert neurons_along(spec, "both.weight", "left").tolist() == [0, 1, 2, 3, *[-1] * 5]
    assert neurons_along(spec, "both.weight", "right").tolist() == [*[-1] * 4, 0, 1, 2, 3, 4]
    flat = neurons_along(spec, "out.weight", "both")
    assert flat.tolist() == [j for j in range(6) for _ in range(4)]


def test_the_order_follows_the_neurons() -> None:
    model = trained_norms(0)
    spec = nafi.groups(model, IMAGES)
    names = list(spec.groups)
    plain = neuron_orders(model, spec, PROBE, names)
    orders = {name: torch.randperm(spec.groups[name].width) for name in names}
    moved = neuron_orders(permute(model, spec, orders), spec, PROBE, names)
    for name in names:
        assert orders[name][moved[name].order].tolist() == plain[name].order.tolist()
        assert moved[name].lost == pytest.approx(plain[name].lost, abs=1e-5)


def test_a_group_of_which_no_layer_reads_anything_has_no_order() -> None:
    model = seeded(0, 7, 9, 4)
    spec = nafi.groups(model, (torch.randn(2, 7),))
    assert set(neuron_orders(model, spec, (torch.randn(30, 7),), ["layers.0"])) == {"layers.0"}
    assert not neuron_orders(model, spec, (torch.randn(30, 7),), [])


# ------------------------------------------------------------------------------ budgets


@pytest.mark.parametrize(
    ("stated", "amount", "unit"),
    [
        ("1.0 params", 1.0, "params"),
        ("0.5 FLOPS", 0.5, "flops"),
        (2, 2.0, "params"),
        ("300 kB", 3e5, "bytes"),
        ("1.5MB", 1.5e6, "bytes"),
    ],
)
def test_a_budget_is_read(stated: object, amount: float, unit: str) -> None:
    assert (read_budget(stated).amount, read_budget(stated).unit) == (amount, unit)


@pytest.mark.parametrize(
    "stated", ["much", "0 params", "-1 params", "1 mile", True, "1e999 kB", []]
)
def test_what_is_no_budget_is_refused(stated: object) -> None:
    with pytest.raises(InputError, match=r'budget: found .*, expected "1\.0 params"'):
        read_budget(stated)


def test_sizes_are_those_of_the_rebuilt_network() -> None:
    model = trained_norms(0)
    spec = nafi.groups(model, IMAGES)
    widths = {name: width + 3 for name, width in spec.widths.items()}
    wider = rebuild(model, spec, widths)
    expected = measured_size(wider, [model], IMAGES)
    for unit in ("params", "flops"):
        assert size_in(unit, model, spec).of(spec, widths) == expected[unit]
    assert expected["bytes"] == size_in("bytes", model, spec).of(spec, widths)


def test_tied_weights_are_counted_once() -> None:
    model = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 5), nn.Linear(5, 11, bias=False))
    model[2].weight = model[0].weight
    found = measured_size(model, [model], (torch.arange(6).reshape(2, 3),))
    assert found["params"] == 11 * 5 + 5 * 5 + 5
    assert found["bytes"] == 4 * found["params"]


def test_multiplications_are_counted_for_one_input() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(36, 5))
    assert multiplications(model, IMAGES) == {"0.weight": 9.0, "2.weight": 1.0}
    back = nn.ConvTranspose2d(3, 6, 3, stride=2)
    assert multiplications(back, IMAGES) == {"weight": 36.0}  # once for each input
    grouped = nn.Conv1d(4, 8, 3, groups=2)
    assert multiplications(grouped, (torch.randn(5, 4, 10),)) == {"weight": 8.0}


def parts() -> tuple[list[Part], Size]:
    model = MLP(7, 9, 8, 4)
    spec = nafi.groups(model.eval(), (torch.randn(2, 7),))
    first, second = spec.groups
    steep = {first: [2.0 - 0.2 * k for k in range(10)], second: [0.8 - 0.1 * k for k in range(9)]}
    return [Part(spec, steep), Part(spec, steep, weight=0.1)], size_in("params", model, spec)


@pytest.mark.parametrize("share", [1.0, 0.7, 0.3])
def test_neurons_go_until_the_budget_is_kept_and_not_further(share: float) -> None:
    both, size = parts()
    whole = sum(size.of(part.spec, part.spec.widths) for part in both)
    widths = cut_to(share * whole, both, size)
    cost = sum(size.of(part.spec, at) for part, at in zip(both, widths, strict=True))
    # The last step saved at most one neuron with all that reads it.
    assert share * whole - 17 <= cost <= share * whole
    assert sum(widths[1].values()) <= sum(widths[0].values())


def test_what_is_lost_for_nothing_goes_first() -> None:
    both, size = parts()
    spec = both[0].spec
    first, second = spec.groups
    free = Part(spec, {first: [1.0] * 5 + [0.0] * 5, second: [0.8 - 0.1 * k for k in range(9)]})
    limit = size.of(spec, {first: 6, second: 8})
    assert cut_to(limit, [free], size) == [{first: 6, second: 8}]


def test_tied_groups_shrink_together() -> None:
    both, size = parts()
    first, second = both[0].spec.groups
    (widths,) = cut_to(60.0, both[:1], size, [{first: 1, second: 2}])
    # Two of the first go with each of the second.
    assert (9 - widths[first], 8 - widths[second]) in [(2 * k, k) for k in range(1, 5)]


def test_a_budget_that_nothing_fits_is_refused() -> None:
    both, size = parts()
    with pytest.raises(InputError, match=r"2 clients need .* keep fewer of them"):
        cut_to(10.0, both, size)


# ------------------------------------------------------------------------------ noise


def test_noise_has_the_spectrum_of_photographs() -> None:
    from nafi.fusion.probe import noise_inputs

    noise = noise_inputs((torch.zeros(2, 3, 64, 64),))
    assert noise.shape == (256, 3, 64, 64)
    assert float(noise.mean()) == pytest.approx(0, abs=0.1)
    assert float(noise.std()) == pytest.approx(1, abs=0.1)
    assert torch.equal(noise, noise_inputs((torch.zeros(1, 3, 64, 64),)))
    power = torch.fft.rfft(noise, dim=3).abs().square().mean(dim=(0, 1, 2))
    # The amplitude falls as the frequency to the power of 1.5; a row of an image mixes frequencies.
    slope = float((power[20] / power[5]).log() / torch.tensor(4.0).log())
    assert -3.0 < slope < -1.0
    alike = F.cosine_similarity(noise[:, 0].flatten(1), noise[:, 1].flatten(1)).mean()
    assert 0.6 < float(alike) < 0.95


def test_noise_stands_for_numbers_only() -> None:
    from nafi.fusion.probe import noise_inputs

    assert noise_inputs((torch.zeros(2, 7),)).shape == (256, 7)
    for inputs in [(torch.zeros(2, 7, dtype=torch.long),), (torch.zeros(2, 7), torch.zeros(2, 7))]:
        with pytest.raises(InputError, match="noise stands for a single input"):
            noise_inputs(inputs)
