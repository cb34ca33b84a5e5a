"""Layers fitted to what their members compute, against closed forms and invariances."""

from __future__ import annotations

import copy
import gc
import warnings
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nafi
from nafi.errors import InputError
from nafi.fusion import FusionWarning, check_clients, descent, in_place, prepare_networks
from nafi.fusion import refit as refitting
from nafi.fusion.layer_sums import add_to_layer, refittable
from nafi.fusion.recording import Recording, sole_writers
from nafi.fusion.responses import DIRECTIONS, principal_directions
from nafi.fusion.statistics import (
    RIDGES,
    LayerStatistics,
    best_ridge,
    fit_layer,
    with_deviation,
)
from nafi.graph import SpecWarning, groups, permute, random_permutations
from tests.fusion.networks import gap, outputs, seeded, trained_norms
from tests.graph import zoo


def layer(seed: int, samples: int = 40, blocks: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(blocks, samples, 5, generator=generator, dtype=torch.float64) + 3
    targets = torch.randn(blocks, samples, 4, generator=generator, dtype=torch.float64)
    return inputs, targets


def test_statistics_of_two_halves_are_those_of_the_whole() -> None:
    inputs, targets = layer(0)
    whole = LayerStatistics.of(inputs, targets)
    halves = LayerStatistics.of(inputs[:, :17], targets[:, :17]) + LayerStatistics.of(
        inputs[:, 17:], targets[:, 17:]
    )
    for name in ("gram", "cross", "sums", "totals", "squares", "count"):
        assert torch.allclose(getattr(halves, name), getattr(whole, name)), name
    assert torch.allclose(whole.gram, inputs.mT @ inputs)
    assert torch.allclose(whole.cross, inputs.mT @ targets)


def test_outputs_of_sums_are_those_of_the_inputs() -> None:
    """Mean and deviation of what a layer makes, and the sums with that as their targets."""
    draw = torch.Generator().manual_seed(0)
    inputs = 3 + torch.randn(2, 40, 5, dtype=torch.float64, generator=draw)
    weights = torch.randn(2, 5, 3, dtype=torch.float64, generator=draw)
    biases = torch.randn(2, 3, dtype=torch.float64, generator=draw)
    made = inputs @ weights + biases[:, None]
    sums = LayerStatistics.of(inputs, torch.zeros(2, 40, 3, dtype=torch.float64))
    deviation, mean = torch.std_mean(made, dim=1, correction=0)
    for found, expected in zip(sums.outputs(weights, biases), (mean, deviation), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    found, expected = sums.towards(weights, biases), LayerStatistics.of(inputs, made)
    for field in fields(LayerStatistics):
        one, two = getattr(found, field.name), getattr(expected, field.name)
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_large_means_do_not_hide_small_differences() -> None:
    inputs, targets = layer(0)
    shifted = LayerStatistics.of((inputs + 1000).float(), targets.float()).centred()
    expected = LayerStatistics.of(inputs, targets).centred()
    assert torch.allclose(shifted.gram, expected.gram, rtol=1e-3, atol=1e-3)


def test_a_solution_is_the_posterior_mean() -> None:
    inputs, targets = layer(1)
    ridge = 0.3
    found = LayerStatistics.of(inputs, targets).solve(ridge)
    assert found is not None
    for block, h, z in zip(found.numpy(), inputs.numpy(), targets.numpy(), strict=True):
        t = ridge * np.mean(np.diag(h.T @ h))
        assert np.allclose(block, np.linalg.solve(h.T @ h + t * np.eye(5), h.T @ z))


def test_the_error_is_the_sum_of_squares() -> None:
    inputs, targets = layer(2)
    weights = torch.randn(2, 5, 4, dtype=torch.float64)
    error = LayerStatistics.of(inputs, targets).error(weights)
    assert error == pytest.approx(float((targets - inputs @ weights).square().sum()))


@pytest.mark.parametrize("noise", [0.1, 1.0, 10.0])
def test_the_ridge_is_the_best_of_the_grid_on_what_was_held_out(noise: float) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 60, 30, generator=generator, dtype=torch.float64)
    truth = torch.randn(1, 30, 4, generator=generator, dtype=torch.float64)
    targets = inputs @ truth + noise * torch.randn(
        1, 60, 4, generator=generator, dtype=torch.float64
    )
    fitted, judge = (
        LayerStatistics.of(inputs[:, w], targets[:, w]) for w in (slice(45), slice(45, 60))
    )
    ridge, _ = best_ridge(fitted, judge, fitted + judge)
    errors = {r: judge.error(fitted.solve(r)) for r in RIDGES}
    assert ridge == min(errors, key=errors.__getitem__)


@pytest.mark.parametrize(("sign", "end"), [(-1, 0), (1, -1)])
def test_the_ridge_may_be_either_end_of_the_grid(sign: int, end: int) -> None:
    """Where what was held out contradicts the rest, any fit is bad; without noise, none is."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 60, 5, generator=generator, dtype=torch.float64)
    targets = inputs @ torch.randn(1, 5, 4, generator=generator, dtype=torch.float64)
    fitted = LayerStatistics.of(inputs[:, :40], targets[:, :40])
    judge = LayerStatistics.of(inputs[:, 40:], sign * targets[:, 40:])
    ridge, change = best_ridge(fitted, judge, fitted)
    assert ridge == RIDGES[end]
    torch.testing.assert_close(change, fitted.solve(ridge), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ({1: 9.0, 2: 4.0}, 2),  # past one that is worse
        ({1: 9.0, 2: 8.0, 3: 1.0}, 0),  # not past two
        ({-1: 9.0, -2: 4.0, -3: 9.0, -4: 3.0}, -4),  # between them one was better
        ({2: 4.0, -2: 3.0}, -2),  # the better of both ways
        ({-1: 5.0, 1: 5.0}, 0),  # the same is no better
    ],
)
def test_the_search_for_a_ridge_stops_where_it_became_worse_twice(
    errors: dict[int, float], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """errors: by the distance from where it starts, with an error of 5."""
    first = RIDGES.index(0.01)

    def error(fitted: LayerStatistics, judge: LayerStatistics, place: int) -> float:
        return 5.0 if place == first else errors.get(place - first, 6.0)

    monkeypatch.setitem(best_ridge.__globals__, "_error", error)
    inputs, targets = layer(0)
    sums = LayerStatistics.of(inputs, targets)
    ridge, _ = best_ridge(sums, sums, sums)
    assert ridge == RIDGES[first + expected]


def test_a_ridge_that_rounding_hides_is_not_taken() -> None:
    one = torch.ones(1, 20, 3) + 1e-9 * torch.randn(1, 20, 3)
    statistics = LayerStatistics.of(one, one[:, :, :1])
    _, solution = best_ridge(statistics, statistics, statistics)
    assert bool(torch.isfinite(solution).all())


def test_a_fit_with_a_bias_makes_the_means_agree() -> None:
    inputs, residual = layer(3)
    parts = [LayerStatistics.of(inputs[:, w], residual[:, w]) for w in (slice(10, 40), slice(10))]
    change, shifts, fit = fit_layer(*parts, spread=1.0, with_bias=True)
    made = inputs @ change + shifts[:, None]
    assert torch.allclose(made.mean(1), residual.mean(1))
    assert fit.after == pytest.approx(float((residual - made).square().sum()))
    centred = residual - residual.mean(1, keepdim=True)
    assert fit.before == pytest.approx(float(centred.square().sum()))
    assert (fit.inputs, fit.samples) == (5, 40)


def test_outputs_that_are_neurons_vary_as_what_they_are_fitted_to() -> None:
    """Deviations and means against those of the samples, but where outputs would grow too far."""
    draw = torch.Generator().manual_seed(0)
    inputs = 2 + torch.randn(2, 300, 4, generator=draw, dtype=torch.float64)
    noise = torch.randn(2, 300, 3, generator=draw, dtype=torch.float64)
    known = inputs @ torch.randn(2, 4, 3, generator=draw, dtype=torch.float64)
    targets = known * torch.tensor([1.0, 1.0, 0.01]) + noise * torch.tensor([1e-3, 1.0, 1.0])
    weights = torch.randn(2, 4, 3, generator=draw, dtype=torch.float64)
    sums = LayerStatistics.of(inputs, targets - inputs @ weights)
    change, shifts, _ = fit_layer(sums, LayerStatistics.zeros(2, 4, 3), spread=1.0, with_bias=True)
    fitted = inputs @ (weights + change) + shifts[:, None]
    deviation = targets.std(dim=1, correction=0)
    torch.testing.assert_close(sums.deviation(weights), deviation)
    change, shifts = with_deviation(sums, deviation, weights, change, shifts)
    made = inputs @ (weights + change) + shifts[:, None]
    torch.testing.assert_close(made.mean(dim=1), targets.mean(dim=1), rtol=0, atol=1e-8)
    grown = made.std(dim=1) / fitted.std(dim=1)
    assert bool((fitted.std(dim=1) <= targets.std(dim=1) + 1e-8).all())
    torch.testing.assert_close(made.std(dim=1)[:, :2], targets.std(dim=1)[:, :2])
    torch.testing.assert_close(grown[:, 2], torch.full((2,), 5.0, dtype=torch.float64))


class Stream(nn.Module):
    """A residual stream that two layers write to, one that writes to hidden units, and the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up = nn.Linear(5, 6), nn.Linear(6, 8)
        self.down, self.last = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        found: Tensor = self.last(x + self.down(self.up(x).relu()))
        return found


def test_what_several_layers_add_to_and_what_is_returned_keep_the_posterior_mean() -> None:
    model, x = Stream().eval(), torch.randn(4, 5)
    spec = groups(model, (x,))
    written = {n: axes for n, (axes, _) in refittable(model, spec, (x,)).items()}
    assert set(written) == {"first.weight", "up.weight", "down.weight", "last.weight"}
    assert sole_writers(written) == {"up.weight"}
    del written["down.weight"]
    assert sole_writers(written) == {"first.weight", "up.weight"}


def rare(seed: int) -> nn.Module:
    """Two hidden layers whose neurons are on for few inputs, as after long training."""
    model = seeded(seed, 12, 60, 60, 4)
    with torch.no_grad():
        for layer in model.layers[:-1]:
            layer.weight.mul_(3)
            layer.bias.fill_(-1.5)
    return model


def test_neurons_that_are_seldom_on_stay_so_and_are_not_lost() -> None:
    """Fitted by least squares alone, the layers would be on 0.7 and 0.2 times as often."""
    models = [rare(s) for s in range(4)]
    probe = torch.randn(400, 12, generator=torch.Generator().manual_seed(0))
    fused = nafi.fuse(models, (probe[:2],), probe=probe, max_width=1.0).model

    def on(model: nn.Module) -> list[float]:
        with torch.no_grad():
            first = model.layers[0](probe)
            second = model.layers[1](first.relu())
        return [float((values > 0).float().mean()) for values in (first, second)]

    alone = np.mean([on(model) for model in models], axis=0)
    np.testing.assert_allclose(on(fused), alone, rtol=0.4)


def test_a_linear_network_is_fitted_in_closed_form() -> None:
    """Without hidden layers, the best fit to the clients' mean output is the clients' mean."""
    models = [nn.Sequential(nn.Linear(6, 3)) for _ in range(3)]
    probe = torch.randn(50, 6)
    result = nafi.fuse(models, (probe[:2],), probe=probe)
    expected = sum(outputs(model, (probe,))[0] for model in models) / 3
    assert torch.allclose(outputs(result.model, (probe,))[0], expected, atol=1e-5)


def test_a_hidden_layer_is_the_ridge_regression_on_what_lies_below() -> None:
    """The last layer of a fused MLP against numpy, from the fused hidden units themselves."""
    models = [seeded(s, 5, 8, 3) for s in range(2)]
    probe = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    merged, fitted = (
        nafi.fuse(models, (probe[:2],), probe=probe, max_width=1.0, refit=refit)
        for refit in (False, True)
    )
    with torch.no_grad():
        hidden = fitted.model.layers[0](probe).relu().double().numpy()
        clients = [model.layers[-1].weight.T.double() for model in models]
        below = [model.layers[0](probe).relu().double() for model in models]
        target = sum((h @ w).numpy() for h, w in zip(below, clients, strict=True)) / 2
    prior = merged.model.layers[-1].weight.T.detach().double().numpy()
    centred = hidden - hidden.mean(0)
    residual = target - hidden @ prior
    fit = fitted.fits["layers.1.weight"]
    t = fit.ridge * np.mean(np.diag(centred.T @ centred))
    change = np.linalg.solve(
        centred.T @ centred + t * np.eye(8), centred.T @ (residual - residual.mean(0))
    )
    found = fitted.model.layers[-1].weight.T.detach().double().numpy()
    assert np.allclose(found, prior + change, atol=1e-5)


class Siamese(nn.Module):
    """One layer for both halves of an input, and one that reads their difference."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 8)
        self.head = nn.Linear(8, 3)

    def below(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x[:, :5]).relu() - self.inner(x[:, 5:]).relu()
        return found

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.below(x))
        return found


def test_what_reads_a_layer_that_is_used_twice_sees_it_as_it_was_fitted() -> None:
    """Its first use in a run comes before it is fitted, so the network runs again."""
    torch.manual_seed(0)
    models = [Siamese().eval() for _ in range(2)]
    probe = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    merged, fitted = (
        nafi.fuse(models, (probe[:2],), probe=probe, max_width=1.0, refit=refit)
        for refit in (False, True)
    )
    assert set(fitted.fits) == {"inner.weight", "head.weight"}
    assert fitted.fits["inner.weight"].samples == 2 * 64
    with torch.no_grad():
        hidden = fitted.model.below(probe).double().numpy()
        written = [m.below(probe).double() @ m.head.weight.T.double() for m in models]
        target = ((written[0] + written[1]) / 2).numpy()
    prior = merged.model.head.weight.T.detach().double().numpy()
    centred = hidden - hidden.mean(0)
    residual = target - hidden @ prior
    gram = centred.T @ centred
    t = fitted.fits["head.weight"].ridge * np.mean(np.diag(gram))
    change = np.linalg.solve(gram + t * np.eye(8), centred.T @ (residual - residual.mean(0)))
    found = fitted.model.head.weight.T.detach().double().numpy()
    np.testing.assert_allclose(found, prior + change, atol=1e-5)


class Reader(nn.Module):
    """Reads eight steps with an LSTM, and looks at the last."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.body = nn.LSTM(5, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x)[0][:, -1])
        return found


def test_a_recurrence_is_fitted_to_what_it_reads_after_its_own_fit() -> None:
    """Disturbed weights bring states of which one fit gives others; at the end they are right."""
    torch.manual_seed(0)
    model = Reader().eval()
    with torch.no_grad():
        for parameter in model.body.parameters():
            parameter.mul_(3)  # so that states depend on those before
    probe = torch.randn(200, 8, 5, generator=torch.Generator().manual_seed(0))
    clients = check_clients([model, model], None, None, None)
    networks = replace(
        prepare_networks(clients, (probe[:2],), None, "attach"),
        probe=(probe,),
    )
    places = [in_place(spec, spec.groups) for spec in networks.specs]
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.body.weight_hh_l0.mul_(0.3)
    distances = []
    for fits in (1, refitting.FITS):
        fitted = copy.deepcopy(other)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(refitting, "FITS", fits)
            refitting.refit(networks, places, fitted, lambda *_: None)
        with torch.no_grad():
            states, expected = (m.body(probe)[0] for m in (fitted, model))
        distances.append(float((states - expected).square().mean() / expected.var()))
    assert distances[1] < 0.01 * distances[0]
    # The bias is shifted as often as the weights are fitted, but always from where it was.
    biases = (m.body.bias_hh_l0.detach() for m in (fitted, model))
    torch.testing.assert_close(*biases, rtol=0, atol=0.05)


@pytest.mark.parametrize("with_bias", [False, True])
def test_what_is_added_to_a_layer_is_in_its_weights_and_in_its_bias(with_bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, bias=with_bias)).eval()
    x = torch.randn(5, 4)
    spec = groups(model, (x,))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change, shifts = torch.randn(1, 3, 2).double(), torch.randn(1, 2).double()
    weights, biases = add_to_layer(model, spec, (x,), "2.weight", change, shifts)
    after = model.state_dict()
    torch.testing.assert_close(after["2.weight"], before["2.weight"] + change[0].T.float())
    torch.testing.assert_close(weights[0], before["2.weight"].T.double() + change[0])
    if with_bias:
        torch.testing.assert_close(after["2.bias"], before["2.bias"] + shifts[0].float())
        torch.testing.assert_close(biases[0], after["2.bias"].double())
    else:
        assert not biases.any()
    assert all(after[name].equal(before[name]) for name in ("0.weight", "0.bias"))


def probe_like(inputs: tuple[Tensor, ...], count: int = 24) -> tuple[Tensor, ...]:
    """Inputs of the same kind: random numbers, or the tokens of the example in other orders."""
    generator = torch.Generator().manual_seed(3)
    return tuple(
        torch.randn(count, *x.shape[1:], generator=generator)
        if x.is_floating_point()
        else x.flatten()[torch.randint(x.numel(), (count, *x.shape[1:]), generator=generator)]
        for x in inputs
    )


FAST = {"mlp_2", "lenet_flatten", "resnet_basic", "vit_sdpa", "lstm", "einsum", "mobilenet"}
# These weights also make the neurons that they read, or are looked up: they cannot change.
KEPT = {
    "tied_autoencoder": {"outer.weight", "inner.weight"},
    "tied_language_model": {"embedding.weight"},
    "gpt2_language_model": {"transformer.wte.weight"},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(entry.name, marks=() if entry.name in FAST else pytest.mark.slow)
        for entry in zoo.OURS + zoo.FOREIGN
        if entry.name != "graph_net"  # its inputs are one graph, not a batch
    ],
)
def test_permuted_copies_fuse_back_with_a_refit(name: str) -> None:
    model, inputs = zoo.seeded(name)
    model = model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecWarning)
        warnings.simplefilter("ignore", FusionWarning)
        spec = zoo.traced(name)
        generator = torch.Generator().manual_seed(1)
        copies = [permute(model, spec, random_permutations(spec, generator)) for _ in range(2)]
        options = {"prior_ratio": 100.0, "max_width": 1.0}
        result = nafi.fuse(copies, inputs, spec=spec, probe=probe_like(inputs), **options)
    assert gap(result.model, model, inputs) < 1e-4
    for group in spec.groups:
        assert (result.owners(group) == len(copies)).all(), group
    assert set(result.kept) == KEPT.get(name, set())
    assert result.fits or result.kept


class Mixer(nn.Module):
    """A layer along tokens: its rows are channels, which each client has in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.mix = nn.Linear(5, 5)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).relu()
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2).relu()
        return self.head(x.mean(dim=1))


def test_a_layer_along_neurons_is_kept_and_told() -> None:
    torch.manual_seed(0)
    models = [Mixer().eval() for _ in range(2)]
    probe = torch.randn(32, 5, 4)
    result = nafi.fuse(models, (probe[:2],), probe=probe, max_width=1.0)
    assert result.kept == {"mix.weight": "it runs along neurons"}
    assert set(result.fits) == {"embed.weight", "head.weight"}


def test_a_refit_explains_more_of_every_layer() -> None:
    models = [trained_norms(seed) for seed in range(3)]
    probe = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    result = nafi.fuse(models, (probe[:2],), probe=probe, max_width=1.0)
    assert set(result.fits) == {"stem.weight", "inner.weight", "back.weight", "head.weight"}
    for fit in result.fits.values():
        assert fit.after < fit.before


def test_normalisation_is_attached_so_that_training_mode_agrees() -> None:
    models = [trained_norms(seed) for seed in range(3)]
    probe = torch.randn(256, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    result = nafi.fuse(models, (probe[:2],), probe=probe, max_width=2.0)
    with torch.no_grad():
        evaluated = result.model(probe)
        trained = result.model.train()(probe)
    assert torch.allclose(trained, evaluated, atol=1e-3 * float(evaluated.abs().max()))


def test_calibration_of_a_refitted_network_changes_little() -> None:
    models = [trained_norms(seed) for seed in range(3)]
    probe = torch.randn(256, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    result = nafi.fuse(models, (probe[:2],), probe=probe, max_width=2.0)
    with torch.no_grad():
        before = result.model(probe)
        after = nafi.calibrate(result.model, [probe])(probe)
    assert torch.allclose(after, before, atol=0.01 * float(before.abs().max()))


def test_without_a_probe_normalisation_has_its_members_moments() -> None:
    """Copies of one client keep its own shift and gain as mean and deviation."""
    models = [trained_norms(0) for _ in range(2)]
    x = torch.randn(2, 3, 8, 8)
    fused = nafi.fuse(models, (x,), max_width=1.0).model
    claimed = sorted(models[0].norm.weight.abs().tolist())
    assert sorted(fused.norm.weight.tolist()) == pytest.approx(claimed, rel=1e-5)
    assert gap(fused, models[0], (x,)) < 1e-4


def test_what_cannot_be_refitted_is_refused_before_any_work() -> None:
    models, x = [seeded(s, 4, 6, 2) for s in range(3)], torch.randn(20, 4)
    with pytest.raises(InputError, match=r"refit: .*batchnorm='attach'"):
        nafi.fuse(models, (x,), probe=x, batchnorm="average")
    with pytest.raises(InputError, match=r"refit: .*trim"):
        nafi.fuse(models, (x,), probe=x, trim=0.2)
    with pytest.raises(InputError, match="probe: method fedavg does not use"):
        nafi.fuse(models, (x,), "fedavg", probe=x)


def test_neurons_are_matched_by_what_they_do_not_by_their_scale() -> None:
    """Units scaled up and read scaled down are the same function: responses see that."""
    model = seeded(0, 5, 8, 3)
    other = seeded(0, 5, 8, 3)
    factors = torch.rand(8, generator=torch.Generator().manual_seed(0)) * 10 + 0.1
    with torch.no_grad():
        other.layers[0].weight.mul_(factors[:, None])
        other.layers[0].bias.mul_(factors)
        other.layers[1].weight.div_(factors)
    probe = torch.randn(100, 5, generator=torch.Generator().manual_seed(1))
    result = nafi.fuse([model, other], (probe[:2],), probe=probe, max_width=1.0, prior_ratio=100.0)
    one, two = result.assignments["layers.0"]
    assert (one == two).all()


def test_a_silent_neuron_is_known_by_what_it_would_have_said() -> None:
    model = seeded(0, 5, 8, 3)
    with torch.no_grad():
        model.layers[0].bias[:3] -= 100
    spec = groups(model, (torch.randn(2, 5),))
    order = {"layers.0": torch.tensor([2, 0, 1, 3, 4, 5, 7, 6])}
    copy = permute(model, spec, order)
    probe = torch.randn(100, 5, generator=torch.Generator().manual_seed(1))
    result = nafi.fuse([model, copy], (probe[:2],), probe=probe, max_width=1.0, prior_ratio=100.0)
    one, two = result.assignments["layers.0"]
    assert (one[order["layers.0"].numpy()] == two).all()


def test_a_neuron_that_is_silent_in_one_model_alone_disturbs_no_other() -> None:
    model = seeded(0, 5, 8, 3)
    spec = groups(model, (torch.randn(2, 5),))
    order = {"layers.0": torch.tensor([2, 0, 1, 3, 4, 5, 7, 6])}
    copy = permute(model, spec, order)
    with torch.no_grad():
        copy.layers[0].bias[4] -= 100
    probe = torch.randn(100, 5, generator=torch.Generator().manual_seed(1))
    result = nafi.fuse([model, copy], (probe[:2],), probe=probe, max_width=1.0, prior_ratio=100.0)
    one, two = result.assignments["layers.0"]
    assert (one[order["layers.0"].numpy()] == two).all()


@pytest.mark.parametrize("places", [600, 900])
def test_of_many_neurons_the_principal_directions_are_those_of_all(places: int) -> None:
    """Against a singular value decomposition; more places than neurons, and fewer."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(700, places, dtype=torch.float64, generator=draw)
    rows *= torch.linspace(1.0, 0.1, 700, dtype=torch.float64)[:, None]
    found = principal_directions(list(rows.split([300, 400])))
    assert [part.shape for part in found] == [(300, DIRECTIONS), (400, DIRECTIONS)]
    left, values, _ = torch.linalg.svd(rows, full_matrices=False)
    best = left[:, :DIRECTIONS] * values[:DIRECTIONS]
    both = torch.cat(found)
    torch.testing.assert_close(both @ both.T, best @ best.T, rtol=1e-9, atol=1e-9)


def test_what_was_recorded_is_gone_before_the_result_is_compared() -> None:
    """It can be many times as large as the models."""
    held: dict[str, int] = {}

    def count(step: str, done: int, total: int) -> None:
        held[step] = sum(type(thing) is Recording for thing in gc.get_objects())

    probe = torch.randn(50, 5, generator=torch.Generator().manual_seed(1))
    models = [seeded(s, 5, 8, 3) for s in range(2)]
    gc.collect()  # what tests before have left
    gc.disable()  # at once, not when a collector comes by
    try:
        nafi.fuse(models, (probe[:2],), probe=probe, progress=count)
    finally:
        gc.enable()
    assert held["merging"] == 2
    assert held["comparing with the ensemble"] == 0


def test_a_limit_of_width_is_made_use_of(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [seeded(s, 5, 8, 3) for s in range(3)]
    probe = torch.randn(100, 5, generator=torch.Generator().manual_seed(1))

    def width() -> int:
        return nafi.fuse(models, (probe[:2],), probe=probe, max_width=2.0).widths["layers.0"]

    filled = width()
    monkeypatch.setattr(descent, "FILLING", ())
    assert width() < filled <= 16
