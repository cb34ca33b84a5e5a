"""Whether a fused model is any good: scores and agreement against counts made by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nafi
from nafi.fusion import Agreement, FusionResult, FusionWarning, Scores, check_clients, verdict
from nafi.fusion.judge import agreement
from nafi.fusion.statistics import LayerFit
from tests.fusion.networks import seeded, trained_norms

EXAMPLE = (torch.zeros(2, 6),)
X = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))


def clients() -> list[nn.Module]:
    return [seeded(s, 6, 8, 7, 3) for s in range(3)]


def first_class(model: nn.Module) -> float:
    """Of all inputs the share that a model gives the first class."""
    assert not model.training
    with torch.no_grad():
        return float((model(X).argmax(dim=1) == 0).double().mean())


def test_clients_ensemble_and_fused_model_are_scored() -> None:
    models, steps = clients(), []
    found = nafi.fuse(
        models, EXAMPLE, validate=first_class, progress=lambda step, *_: steps.append(step)
    )
    assert found.scores is not None
    assert found.scores.clients == tuple(first_class(model) for model in models)
    with torch.no_grad():
        mean = torch.stack([model(X) for model in models]).mean(dim=0)
    assert found.scores.ensemble == float((mean.argmax(dim=1) == 0).double().mean())
    assert found.scores.fused == first_class(found.model) == found.diagnostics["score"]
    assert found.scores.best == max(found.scores.clients)
    assert [s for s in steps if "scoring" in s] == [
        *(f"scoring model {s}" for s in range(3)),
        "scoring the ensemble",
        "scoring the result",
    ]


def test_the_ensemble_knows_of_classes_what_the_fusion_knows() -> None:
    """Each class is known to one client alone: the mean of equals would be another ensemble."""
    models, counts = clients(), [[9, 0, 0], [0, 5, 0], [0, 0, 7]]
    with torch.no_grad():
        known = torch.stack([model(X)[:, k] for k, model in enumerate(models)], dim=1)
        equal = torch.stack([model(X) for model in models]).mean(dim=0)
    labels = known.argmax(dim=1)
    assert not labels.equal(equal.argmax(dim=1))

    def right(model: nn.Module) -> float:
        with torch.no_grad():
            outputs = model(X)
        assert outputs.dtype == X.dtype
        return float((outputs.argmax(dim=1) == labels).double().mean())

    found = nafi.fuse(models, EXAMPLE, class_counts=counts, validate=right)
    assert found.scores is not None
    assert found.scores.ensemble == 1.0


def test_clients_are_left_as_they_are() -> None:
    models = [trained_norms(s).train() for s in range(2)]
    before = [{n: t.clone() for n, t in model.state_dict().items()} for model in models]
    images = torch.randn(9, 3, 8, 8)

    def careless(model: nn.Module) -> float:
        model.train()(images)
        with torch.no_grad():
            model.get_parameter(next(iter(dict(model.named_parameters())))).zero_()
        return 1.0

    nafi.fuse(models, (images[:2],), validate=careless)
    for model, state in zip(models, before, strict=True):
        assert model.training
        assert all(t.equal(state[name]) for name, t in model.state_dict().items())


def test_worse_than_a_client_is_said_with_what_to_try() -> None:
    models = clients()

    def of_client(model: nn.Module) -> float:
        return float(len(model.layers[0].weight) == 8)

    with pytest.warns(FusionWarning) as told:
        found = nafi.fuse(models, EXAMPLE, validate=of_client, penalty=0.0)
    texts = [str(w.message) for w in told]
    assert any("ensemble cannot be scored: AttributeError" in text for text in texts)
    (worse,) = [text for text in texts if "Worse than a client" in text]
    assert "scores 0, model 0 alone 1" in worse
    assert all(word in worse for word in ("max_width", "probe=", "match-then-average"))
    assert found.scores == Scores((1.0, 1.0, 1.0), None, 0.0, ("model 0", "model 1", "model 2"))
    assert not found.scores.better


class Labels(nn.Module):
    """Returns classes beside the numbers for them: their mean means nothing."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body = seeded(seed, 6, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.body(x)
        return logits, logits.argmax(dim=1)


def test_without_a_mean_there_is_no_ensemble() -> None:
    models = [Labels(s) for s in range(2)]
    found = nafi.fuse(models, EXAMPLE, probe=X, validate=lambda model: 1.0)
    assert found.scores is not None
    assert found.scores.ensemble is None
    assert found.agreement is None


def test_agreement_on_classes_by_hand() -> None:
    models = clients()
    found = nafi.fuse(models, EXAMPLE, probe=X).agreement
    with torch.no_grad():
        said = torch.stack([model(X) for model in models]).mean(dim=0).argmax(dim=1)
        alone = [float((m(X).argmax(dim=1) == said).double().mean()) for m in models]
    assert found is not None
    assert (found.of, found.inputs) == ("classes", 30)
    assert found.clients == pytest.approx(alone)
    same = agreement(check_clients(models, None, None, None), models[0], (X,))
    assert same is not None
    assert same.fused == pytest.approx(alone[0])


def test_agreement_is_with_those_who_know_a_class() -> None:
    """Each class is known to one client alone, so the ensemble has its logits of that class."""
    models = clients()
    found = nafi.fuse(models, EXAMPLE, probe=X, class_counts=[[9, 0, 0], [0, 5, 0], [0, 0, 7]])
    with torch.no_grad():
        known = torch.stack([model(X)[:, k] for k, model in enumerate(models)], dim=1)
        alone = [float((known.argmax(1) == m(X).argmax(1)).double().mean()) for m in models]
    assert found.agreement is not None
    assert found.agreement.clients == pytest.approx(alone)


def test_agreement_weighs_clients_by_their_samples() -> None:
    models = check_clients([Two(0.0, 0.0), Two(2.0, 0.0)], None, [3, 1], None)
    found = agreement(models, Two(0.5, 0.0), (X,))
    assert found is not None
    assert found.fused == pytest.approx(1.0)


class Two(nn.Module):
    """Two outputs, of other sizes and far from zero."""

    def __init__(self, weight: float, shift: float) -> None:
        super().__init__()
        self.weight, self.shift = weight, shift

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x * self.weight + 100, {"sum": x.sum(dim=1) + self.shift}


def test_agreement_on_values_by_hand() -> None:
    """y = w x + c: the error of another w is (w - w')^2 of the variance, that of a shift c^2."""
    # The mean has weight 1 and shift 0.
    models = check_clients([Two(0.5, 1.0), Two(1.5, -1.0)], None, None, None)
    spread = float(X.double().sum(dim=1).var(correction=0))
    inputs = X - X.mean(dim=0)
    for weight, shift in [(1.0, 0.0), (0.7, 0.0), (1.2, 0.5)]:
        found = agreement(models, Two(weight, shift), (inputs,))
        assert found is not None
        assert found.of == "values"
        expected = 1 - ((weight - 1) ** 2 + shift**2 / spread) / 2
        assert found.fused == pytest.approx(expected, abs=1e-5)
    broken = agreement(models, Two(float("nan"), 0.0), (inputs,))
    assert broken is not None
    assert broken.fused == -inf
    assert broken.to_dict()["fused"] is None


def test_averaged_normalisation_is_measured_on_the_probe() -> None:
    models = [trained_norms(s) for s in range(3)]
    images = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    found = nafi.fuse(models, (images[:2],), batchnorm="average", probe=images, refit=False)
    with torch.no_grad():
        stem: Any = found.model.stem(images)
    assert torch.allclose(found.model.norm.running_mean, stem.mean(dim=(0, 2, 3)), atol=1e-5)
    assert not found.model.training


GOOD = Scores((0.2, 0.4), 0.3, 0.5, ("a", "b"))


@pytest.mark.parametrize(
    ("scores", "tone", "told"),
    [
        (GOOD, "good", "0.5: above the best client (0.4), and above their ensemble (0.3)."),
        (replace(GOOD, fused=0.4, ensemble=0.45), "good", "level with the best client (0.4), and"),
        (replace(GOOD, ensemble=None), "good", "above the best client (0.4)."),
        (replace(GOOD, ensemble=0.5), "good", "above the best client (0.4), and level with their"),
        (replace(GOOD, fused=0.39), "bad", "scores 0.39, b alone 0.4."),
        (replace(GOOD, fused=-inf), "bad", "scores NaN"),
    ],
)
def test_a_verdict_says_what_was_scored(scores: Scores, tone: str, told: str) -> None:
    found = verdict(FusionResult(nn.Identity(), scores=scores))
    assert found.tone == tone
    assert told in found.text
    below = scores.ensemble is not None and scores.fused < scores.ensemble
    assert bool(found.advice) == (tone == "bad" or below)
    assert any("nafi head" in advice for advice in found.advice) == bool(found.advice)


def test_counts_of_classes_are_advised_where_they_would_count_and_are_missing() -> None:
    models = [nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)) for _ in range(2)]
    worse = iter([1.0, 1.0, 1.0, 0.0] * 3)
    inputs = (torch.zeros(2, 2),)
    for method, counts, advised in (
        ("nafi", None, True),
        ("nafi", [[9, 0], [0, 9]], False),
        ("rebasin", None, False),
    ):
        with pytest.warns(FusionWarning, match="Worse than a client") as caught:
            found = nafi.fuse(
                models, inputs, method, validate=lambda _: next(worse), class_counts=counts
            )
        assert any("--class-counts" in advice for advice in verdict(found).advice) == advised
        assert any("--class-counts" in str(warning.message) for warning in caught) == advised
        unscored = verdict(replace(found, scores=None))
        assert any("--class-counts" in advice for advice in unscored.advice) == advised


def test_a_verdict_without_scores_is_none() -> None:
    nothing = verdict(FusionResult(nn.Identity()))
    assert nothing.tone == "unknown"
    assert "Nobody has measured" in nothing.text
    assert any("--validate" in advice for advice in nothing.advice)
    classes = Agreement("classes", 0.875, (0.5, 0.75), 64, ("a", "b"))
    agreed = FusionResult(nn.Identity(), agreement=classes)
    found = verdict(agreed)
    assert found.tone == "unknown"
    assert "64 inputs" in found.text
    assert "88% of the time; clients alone do 50% to 75%" in found.text
    assert "fitted" not in found.text
    fit = LayerFit(ridge=0.1, before=0.5, after=0.1, inputs=3, samples=64)
    assert "to which its layers were fitted" in verdict(replace(agreed, fits={"0": fit})).text
    values = replace(agreed, agreement=replace(classes, of="values", fused=0.9))
    assert "0.90 of the variance" in verdict(values).text


@pytest.mark.parametrize(
    ("fused", "probe", "tone"),
    [
        (0.49, "inputs", "bad"),
        (0.5, "inputs", "unknown"),
        (0.49, "noise", "unknown"),  # who says what on noise tells little
    ],
)
def test_less_like_the_ensemble_than_every_client_is_a_bad_sign(
    fused: float, probe: str, tone: str
) -> None:
    agreed = Agreement("classes", fused, (0.5, 0.75), 64, ("a", "b"))
    result = FusionResult(nn.Identity(), agreement=agreed, diagnostics={"probe": probe})
    found = verdict(result)
    assert found.tone == tone
    assert ("Probably worse than its clients" in found.text) == (tone == "bad")
    assert any("method stack" in advice for advice in found.advice) == (tone == "bad")
    scored = verdict(replace(result, scores=Scores((0.3,), None, 0.4, ("a",))))
    assert scored.tone == "good"
