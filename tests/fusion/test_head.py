"""The last layer from sums: against closed forms on the samples themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor, nn

import nafi
from nafi.errors import InputError, SpecError
from nafi.fusion import SCALES, FusionWarning, HeadStatistics, fit_head
from nafi.fusion.discriminant import Discriminant, choose_ridge
from nafi.fusion.head import PLACES, _Tried
from nafi.fusion.statistics import RIDGES

CLASSES, INPUTS, HIDDEN = 3, 5, 4


def network(*ending: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)]
    return nn.Sequential(*layers, *ending).eval()


def segmenter(outputs: int = CLASSES) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Conv2d(2, HIDDEN, 3, padding=1), nn.Tanh(), nn.Conv2d(HIDDEN, outputs, 1)]
    return nn.Sequential(*layers).eval()


def samples(count: int = 120, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    inputs = torch.randn(count, INPUTS, generator=generator)
    return inputs + 0.7 * nn.functional.one_hot(labels, INPUTS), labels


def pictures(count: int = 6, outputs: int = CLASSES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 2, 8, 9, generator=generator)
    return inputs, (inputs.sum(dim=1).sigmoid() * max(outputs, 2)).long()


def features(model: nn.Sequential, inputs: Tensor) -> np.ndarray[Any, Any]:
    """What the last linear or convolutional layer reads, one row for each place."""
    with torch.no_grad():
        read = model[:2](inputs).double()
    return np.asarray(read.movedim(1, -1).reshape(-1, HIDDEN))


def gaussian_log_odds(
    rows: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], ridge: float, scale: float
) -> np.ndarray[Any, Any]:
    """(M, C) log densities and priors, of Gaussians fitted to the rows, less those of class 0."""
    classes, n = int(labels.max()) + 1, len(rows)
    means = [rows[labels == k].mean(axis=0) for k in range(classes)]
    within = sum(
        (rows[labels == k] - means[k]).T @ (rows[labels == k] - means[k]) for k in range(classes)
    )
    unit = ((rows - rows.mean(axis=0)) ** 2).sum(axis=0).mean()
    covariance = (within + ridge * unit * np.eye(rows.shape[1])) / (n - classes)
    said = np.stack(
        [
            scale * multivariate_normal(means[k], covariance).logpdf(rows)
            + np.log((labels == k).mean())
            for k in range(classes)
        ],
        axis=1,
    )
    return np.asarray(said - said[:, :1])


@pytest.mark.parametrize("case", [(network, samples), (segmenter, pictures)])
def test_outputs_are_the_log_odds_of_gaussians_fitted_to_the_samples(
    case: tuple[Callable[[], nn.Sequential], Callable[[], tuple[Tensor, Tensor]]],
) -> None:
    model, (inputs, labels) = case[0](), case[1]()
    sums = nafi.statistics(model, [(inputs, labels)])
    fit = fit_head(sums)
    rows = features(model, inputs)
    expected = gaussian_log_odds(rows, labels.numpy().reshape(-1), fit.ridge, fit.scale)
    with torch.no_grad():
        found = nafi.solve_head(model, [sums])(inputs).movedim(1, -1).reshape(-1, CLASSES).numpy()
    assert np.allclose(found - found[:, :1], expected, atol=1e-4)


def test_one_output_has_the_log_odds_of_one_against_zero() -> None:
    model, (inputs, masks) = segmenter(1), pictures(outputs=1)
    sums = nafi.statistics(model, [(inputs, masks[:, None].float())])
    fit = fit_head(sums)
    rows = features(model, inputs)
    expected = gaussian_log_odds(rows, masks.numpy().reshape(-1), fit.ridge, fit.scale)[:, 1]
    with torch.no_grad():
        found = nafi.solve_head(model, [sums])(inputs).reshape(-1).numpy()
    assert np.allclose(found, expected, atol=1e-4)
    assert sums.class_counts.tolist() == [int((masks == 0).sum()), int((masks == 1).sum())]


@pytest.mark.parametrize("ridge", [RIDGES[-1], 1.0])
def test_sums_give_the_ridge_regression_on_the_samples(ridge: float) -> None:
    model, (inputs, labels) = network(), samples()
    sums = nafi.statistics(model, [(inputs, labels)]).sums
    rows = features(model, inputs)
    rows = rows - rows.mean(axis=0)
    targets = np.eye(CLASSES)[labels] - np.eye(CLASSES)[labels].mean(axis=0)
    strength = np.sqrt(ridge * (rows**2).sum(axis=0).mean())
    stacked = np.concatenate([rows, strength * np.eye(HIDDEN)])
    padded = np.concatenate([targets, np.zeros((HIDDEN, CLASSES))])
    expected = np.linalg.lstsq(stacked, padded, rcond=None)[0]
    assert np.allclose(sums.centred().solve(ridge)[0], expected, atol=1e-6)


def test_the_ridge_minimises_the_leave_one_out_error_of_a_hat_matrix() -> None:
    model, (inputs, labels) = network(), samples(60)
    rows = features(model, inputs)
    rows = rows - rows.mean(axis=0)
    targets = np.eye(CLASSES)[labels] - np.eye(CLASSES)[labels].mean(axis=0)
    unit = (rows**2).sum(axis=0).mean()

    def score(ridge: float) -> float:
        hat = rows @ np.linalg.solve(rows.T @ rows + ridge * unit * np.eye(HIDDEN), rows.T)
        left = 1 - (1 + np.trace(hat)) / len(rows)
        return float((((targets - hat @ targets) / left) ** 2).sum())

    chosen = choose_ridge(nafi.statistics(model, [(inputs, labels)]).sums)
    assert chosen == min(RIDGES, key=score)
    assert RIDGES[0] > chosen > RIDGES[-1]


@pytest.mark.filterwarnings("ignore::nafi.fusion.FusionWarning")
def test_more_inputs_than_samples_ask_for_a_ridge() -> None:
    """Samples that are fitted exactly, means and all, are no sign that little ridge is needed."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 2
    inputs = torch.randn(40, 60, generator=generator) + 0.3 * labels[:, None]
    _, sums = through(inputs, labels)
    assert choose_ridge(sums.sums) > 100 * min(RIDGES)
    assert not bool(sums.losses.any())  # too few to say how sure the network may be


def alike(one: HeadStatistics, other: HeadStatistics) -> bool:
    names = ("gram", "cross", "class_counts")
    return all(torch.allclose(getattr(one, name), getattr(other, name)) for name in names)


def test_halves_add_up_to_the_whole() -> None:
    model, (inputs, labels) = network(), samples()
    whole = nafi.statistics(model, [(inputs, labels)])
    halves = [nafi.statistics(model, [(inputs[s], labels[s])]) for s in (slice(50), slice(50, 120))]
    batches = [(inputs[i : i + 17], labels[i : i + 17]) for i in range(0, 120, 17)]
    assert alike(halves[0] + halves[1], whole)
    assert alike(nafi.statistics(model, batches), whole)
    assert torch.allclose(nafi.statistics(model, batches).losses, whole.losses)


@pytest.mark.parametrize("size", [7, 33, 500])
def test_scales_are_tried_on_the_samples_with_the_lowest_numbers(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However batches are cut, and however often samples are dropped on the way."""
    monkeypatch.setattr("nafi.fusion.head._MOST_TRIED", 40)
    read = torch.arange(500.0)[:, None]
    tried = _Tried()
    for batch in read.split(size):
        tried.add(batch, 2 * batch)
        assert sum(len(kept) for _, kept, _ in tried.parts) <= 80
    numbers = [torch.rand(len(b), generator=g) for g in [seeded()] for b in read.split(size)]
    chosen, targets = tried._choose()
    expected = read[torch.cat(numbers).argsort(stable=True)[:40]]
    assert torch.equal(chosen, expected)
    assert torch.equal(targets, 2 * expected)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_the_solution_does_not_depend_on_how_samples_fell_to_clients() -> None:
    model, (inputs, labels) = network(), samples()
    whole = nafi.statistics(model, [(inputs, labels)])
    by_class = [
        nafi.statistics(model, [(inputs[labels == k], labels[labels == k])]) for k in range(CLASSES)
    ]
    # A client of one class cannot say how sure the network may be.
    assert not any(bool(client.losses.any()) for client in by_class)
    shared = [replace(client, losses=whole.losses / CLASSES) for client in by_class]
    apart, together = nafi.solve_head(model, shared), nafi.solve_head(model, [whole])
    with torch.no_grad():
        assert torch.allclose(apart(inputs), together(inputs), atol=1e-5)
    with pytest.warns(FusionWarning, match="no client has several classes"):
        nafi.solve_head(model, by_class)


def through(inputs: Tensor, labels: Tensor) -> tuple[nn.Sequential, HeadStatistics]:
    """A network whose last layer reads the inputs themselves."""
    classes = int(labels.max()) + 1
    model = nn.Sequential(nn.Flatten(), nn.Linear(inputs.shape[1], classes))
    return model, nafi.statistics(model, [(inputs, labels)])


def test_probabilities_are_those_of_the_samples_where_the_model_is_true() -> None:
    generator = torch.Generator().manual_seed(3)
    labels = (torch.rand(20_000, generator=generator) < 0.2).long()
    inputs = torch.randn(20_000, 2, generator=generator) + 1.5 * labels[:, None]
    model, sums = through(inputs, labels)
    assert fit_head(sums).scale == pytest.approx(1, rel=0.15)
    # Bayes: N(1.5, 1) with share 0.2 against N(0, 1) with share 0.8.
    odds = (1.5 * inputs - 1.5**2 / 2).sum(dim=1) + np.log(0.2 / 0.8)
    with torch.no_grad():
        said = nafi.solve_head(model, [sums])(inputs).softmax(dim=1)[:, 1]
    assert float((said - odds.sigmoid()).abs().max()) < 0.03


def test_the_scale_is_the_best_for_other_samples() -> None:
    """Inputs as a ReLU makes them are not Gaussian: a scale of one is not the best."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(4, (6000,), generator=generator)
    apart = 3 * nn.functional.one_hot(labels, 8)
    inputs = (torch.randn(6000, 8, generator=generator) + apart).relu() ** 2
    model, sums = through(inputs[:2000], labels[:2000])
    chosen = SCALES.index(fit_head(sums).scale)
    losses = []
    for place in range(len(SCALES)):
        scaled = replace(sums, losses=1.0 - torch.eye(len(SCALES))[place])
        with torch.no_grad():
            outputs = nafi.solve_head(model, [scaled])(inputs[2000:])
        losses.append(float(nn.functional.cross_entropy(outputs, labels[2000:])))
    assert abs(chosen - int(np.argmin(losses))) <= 1
    assert losses[chosen] < losses[SCALES.index(1.0)]


@pytest.mark.parametrize("ending", [nn.LogSoftmax(dim=1), nn.Softmax(dim=1)])
def test_a_softmax_may_follow(ending: nn.Module) -> None:
    inputs, labels = samples()
    plain, ended = (
        nafi.solve_head(model, [nafi.statistics(model, [(inputs, labels)])])
        for model in (network(), network(ending))
    )
    with torch.no_grad():
        assert torch.allclose(ended(inputs), ending(plain(inputs)), atol=1e-6)


class Functional(nn.Module):
    """No modules, weights as (inputs, outputs), several zero vectors, outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unused = nn.Parameter(torch.zeros(CLASSES))
        self.shift = nn.Parameter(torch.zeros(CLASSES))
        self.weight = nn.Parameter(torch.randn(INPUTS, CLASSES))
        self.offset = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, values: Tensor) -> dict[str, Tensor]:
        moved = torch.cat([values[:, :CLASSES] + self.shift, values[:, CLASSES:]], dim=1)
        return {"logits": moved.tanh() @ self.weight + self.offset, "other": moved}


def test_functional_code_dicts_of_batches_and_labels_left_out() -> None:
    model, (inputs, labels) = Functional(), samples()
    labels[:20] = -100
    sums = nafi.statistics(model, [{"values": inputs, "y": labels}], labels="y")
    assert (sums.layers[0].weight, sums.layers[0].bias, sums.layers[0].axis) == (
        "weight",
        "offset",
        1,
    )
    assert sums.samples == 100
    assert alike(sums, nafi.statistics(model, [(inputs[20:], labels[20:])]))
    solved = nafi.solve_head(model, [sums])
    with torch.no_grad():
        hits = [
            (m(inputs)["logits"].argmax(1) == labels)[20:].float().mean() for m in (model, solved)
        ]
    assert hits[1] > hits[0]


def test_without_a_bias_weights_come_near_to_one() -> None:
    inputs, labels = samples()
    ones = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1)
    body = nn.Identity()
    model = nn.Sequential(body, nn.Linear(INPUTS + 1, CLASSES, bias=False))
    sums = nafi.statistics(model, [(ones, labels)])
    assert sums.layers[0].bias is None
    weights, bias = Discriminant.of(sums.sums, fit_head(sums).ridge).affine(fit_head(sums).scale)
    with torch.no_grad():
        found = nafi.solve_head(model, [sums])(ones)
    # One of the inputs is always one, which is as good as a bias, but for the ridge.
    assert torch.allclose(found, (ones.double() @ weights + bias).float(), atol=1e-2)


def test_only_some_places_of_a_picture_are_summed() -> None:
    inputs = torch.randn(3, 2, 40, 50)
    masks = (inputs.sum(dim=1) > 0).long()
    model = segmenter(2)
    sums = nafi.statistics(model, [(inputs, masks)])
    assert sums.samples == 3 * PLACES
    assert alike(sums, nafi.statistics(model, [(inputs, masks)]))


def test_only_the_last_layer_changes_and_the_sums_still_fit() -> None:
    model, (inputs, labels) = network(), samples()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sums = nafi.statistics(model, [(inputs, labels)])
    solved = nafi.solve_head(model, [sums])
    changed = {n for n, t in solved.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {"2.weight", "2.bias"}
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    again = nafi.solve_head(solved, [sums])
    assert torch.equal(again[2].weight, solved[2].weight)


def test_a_class_that_nobody_has_is_unlikely() -> None:
    model, (inputs, labels) = network(), samples()
    kept = labels != 1
    solved = nafi.solve_head(model, [nafi.statistics(model, [(inputs[kept], labels[kept])])])
    with torch.no_grad():
        assert float(solved(inputs).softmax(dim=1)[:, 1].max()) < 0.05


def test_few_samples_of_a_class_are_warned_of() -> None:
    inputs, labels = samples()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusionWarning)
        nafi.statistics(network(), [(inputs, labels)])
    some = torch.cat([(labels == 0).nonzero()[:30, 0], (labels == 2).nonzero()[:2, 0]])
    with pytest.warns(FusionWarning, match="2 of class 2"):
        nafi.statistics(network(), [(inputs[some], labels[some])])


class Tied(nn.Module):
    """Looks its inputs up in the weight that makes its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, HIDDEN))

    def forward(self, words: Tensor) -> Tensor:
        return nn.functional.embedding(words, self.weight).tanh() @ self.weight.mT


WORDS = (torch.randint(6, (20,)), torch.randint(6, (20,)))
UNSOLVABLE: dict[str, tuple[nn.Module, tuple[Tensor, Tensor]]] = {
    "relu": (network(nn.ReLU()), samples()),
    "norm": (network(nn.LayerNorm(CLASSES)), samples()),
    "bilinear": (segmenter().append(nn.Upsample(scale_factor=2, mode="bilinear")), pictures()),
    "groups": (nn.Conv2d(2, 2, 1, groups=2), pictures()),
    "tied": (Tied(), WORDS),
    "parametrised": (
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(INPUTS, CLASSES))),
        samples(),
    ),
}


@pytest.mark.parametrize("name", UNSOLVABLE)
def test_other_last_layers_are_refused(name: str) -> None:
    model, batch = UNSOLVABLE[name]
    with pytest.raises(SpecError, match="do not come from a linear layer"):
        nafi.statistics(model, [batch])


BAD_BATCHES: dict[str, tuple[list[Any], str]] = {
    "none": ([], "no batch with labels"),
    "all left out": ([(samples()[0], torch.full((120,), -100))], "no batch with labels"),
    "no labels": ([samples()[0]], "expected \\(inputs, labels\\)"),
    "a dict without labels": ([{"input": samples()[0]}], "a dict with 'labels'"),
    "text": ([(samples()[0], "cat")], "expected a tensor"),
    "too few": ([(samples()[0], samples()[1][:7])], "found shape \\(7,\\), expected \\(120,\\)"),
    "unknown class": ([(samples()[0], samples()[1] + 1)], "found 3, expected whole numbers from 0"),
    "half a class": ([(samples()[0], samples()[1] + 0.5)], "expected whole numbers"),
    "other inputs": ([(torch.zeros(4, 2), torch.zeros(4))], "does not run on a batch"),
    "nan": ([(samples()[0] * np.nan, samples()[1])], "not finite"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_bad_batches_are_refused(name: str) -> None:
    batches, message = BAD_BATCHES[name]
    with pytest.raises(InputError, match=message):
        nafi.statistics(network(), batches)


def test_there_must_be_labels() -> None:
    with pytest.raises(InputError, match="there must be some"):
        nafi.statistics(network(), [samples()], labels=False)


def test_statistics_of_another_network_are_refused() -> None:
    model = network()
    sums = nafi.statistics(model, [samples()])
    other = network()
    with torch.no_grad():
        other[0].bias[0] += 1e-6
    with pytest.raises(InputError, match="of another network"):
        nafi.solve_head(other, [sums])
    with pytest.raises(InputError, match="which Sequential does not have"):
        nafi.solve_head(nn.Sequential(nn.Linear(INPUTS, CLASSES)), [sums])
    with pytest.raises(InputError, match="different networks"):
        nafi.solve_head(model, [sums, nafi.statistics(other, [samples()])])
    for nothing in ([], [None]):
        with pytest.raises(InputError, match="expected a list"):
            nafi.solve_head(model, nothing)  # type: ignore[arg-type]
