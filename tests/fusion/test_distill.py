"""Training on a probe towards the ensemble: never further from it on what is held out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nafi
from nafi.errors import InputError
from nafi.fusion import FusionWarning
from nafi.fusion.held_out import held_out
from tests.fusion.networks import MLP, gap, seeded, trained_norms

INPUTS = (torch.randn(4, 7, generator=torch.Generator().manual_seed(3)),)
PROBE = torch.randn(80, 7, generator=torch.Generator().manual_seed(4))
IMAGES = (torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)),)


def clients() -> list[nn.Module]:
    return [seeded(s, 7, 9, 8, 4) for s in range(3)]


def distance(model: nn.Module, other: nn.Module, inputs: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(inputs) - other(inputs)).square().mean())


@pytest.mark.parametrize("method", ["nafi", "stack", "ot"])
def test_the_error_on_held_out_inputs_is_that_of_the_model_and_falls(method: str) -> None:
    options = {"stack": {"budget": "1.0 params"}, "ot": {"refit": False}}.get(method, {})
    counts = None if method == "ot" else [[5, 3, 0, 1], [2, 2, 8, 1], [0, 6, 1, 4]]
    known = {} if counts is None else {"class_counts": counts}
    merged = nafi.fuse(clients(), INPUTS, method=method, probe=PROBE, **options, **known)
    ensemble = nafi.fuse(
        clients(), INPUTS, method="ensemble",
        **({"weigh_by": "counts", **known} if known else {}),
    ).model  # fmt: skip
    found = nafi.distill(merged, clients(), PROBE, steps=60, rate=1e-2, **known)
    told = found.diagnostics["distilled"]
    held = PROBE[held_out(torch.arange(len(PROBE)))]
    assert told["before"] == pytest.approx(distance(merged.model, ensemble, held), rel=1e-4)
    assert told["after"] == pytest.approx(distance(found.model, ensemble, held), rel=1e-4)
    assert told["after"] <= told["before"]
    assert method != "ot" or told["after"] < told["before"] / 2  # far from the ensemble at first
    assert found.agreement is not None


def test_what_does_not_help_is_not_kept_and_told() -> None:
    merged = nafi.fuse(clients(), INPUTS, probe=PROBE)
    with pytest.warns(FusionWarning, match="distill: no step brought the network nearer"):
        found = nafi.distill(merged, clients(), PROBE, steps=10, rate=1e3)
    assert gap(found.model, merged.model, INPUTS) == 0


def test_the_result_itself_and_its_normalisation_are_left_alone() -> None:
    models = [trained_norms(s) for s in range(2)]
    probe = torch.randn(40, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    merged = nafi.fuse(models, IMAGES, probe=probe, max_width=1.5)
    before = {n: t.clone() for n, t in merged.model.state_dict().items()}
    found = nafi.distill(merged, models, probe, steps=20, rate=1e-3)
    assert all(torch.equal(t, before[n]) for n, t in merged.model.state_dict().items())
    after = found.model.state_dict()
    buffers = [name for name, _ in merged.model.named_buffers()]
    assert all(torch.equal(after[name], before[name]) for name in buffers)
    again = nafi.fuse(models, IMAGES, probe=probe, max_width=1.5, distill=20)
    assert again.diagnostics["distilled"]["steps"] == 20


def test_outputs_that_are_no_numbers_to_train_by_are_refused() -> None:
    merged = nafi.fuse(clients(), INPUTS, probe=PROBE)
    with pytest.raises(InputError, match="probe: outputs on it are NaN, or too large"):
        nafi.distill(merged, clients(), 1e20 * PROBE, steps=2)


@pytest.mark.parametrize("method", ["nafi", "stack"])
def test_counts_of_other_classes_are_refused(method: str) -> None:
    merged = nafi.fuse(clients(), INPUTS, method=method, probe=PROBE)
    with pytest.raises(InputError, match="class_counts: found 2 classes, but no layer"):
        nafi.distill(merged, clients(), PROBE, steps=2, class_counts=[[1, 2], [3, 1], [2, 2]])


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"steps": 0}, "a whole number of at least 1"),
        ({"steps": 200.0}, "a whole number of at least 1"),
        ({"batch": 32.0}, "a whole number of at least 1"),
        ({"rate": float("inf")}, "a number above 0"),
        ({"seed": None}, "a whole number from 0"),
        ({"seed": 1.5}, "a whole number from 0"),
        ({"weigh_inputs": "no"}, "True or False"),
        ({"progress": 3}, "a function"),
    ],
)
def test_wrong_options_are_told_before_anything_else(option: Any, expected: str) -> None:
    (name,) = option
    with pytest.raises(InputError, match=f"{name}: found .*, expected {expected}"):
        nafi.distill(None, [], None, **option)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    merged = nafi.fuse(clients(), INPUTS, probe=PROBE, max_width=1.0, refit=False)
    known = {"steps": np.int64(3), "batch": np.int64(8), "seed": np.int64(1)}
    found = nafi.distill(merged, clients(), PROBE, rate=np.float32(1e-3), **known)
    assert type(found.diagnostics["distilled"]["steps"]) is int
    again = nafi.distill(merged, clients(), PROBE, steps=3, batch=8, rate=1e-3, seed=1)
    assert gap(found.model, again.model, INPUTS) < 1e-6


def test_nothing_is_left_of_training_but_the_weights() -> None:
    merged = nafi.fuse(clients(), INPUTS, probe=PROBE)
    found = nafi.distill(merged, clients(), PROBE, steps=3)
    assert all(parameter.grad is None for parameter in found.model.parameters())


class Pair(MLP):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"logits": super().forward(x), "size": x.square().sum(dim=1)}


class Mean(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean(dim=0)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Pair, "model 0 returns 2 tensors; only networks that return one tensor of numbers"),
        (Mean, r"model 0 returns shape \(4,\) for 2 inputs; only networks that return a row"),
    ],
)
def test_networks_that_cannot_be_trained_are_told_before_any_work(
    kind: type[MLP], told: str
) -> None:
    models = [kind(7, 9, 8, 4).eval() for _ in range(2)]
    done: list[str] = []
    with pytest.raises(InputError, match=told):
        nafi.fuse(
            models,
            (PROBE[:2],),
            probe=PROBE,
            distill=5,
            progress=lambda step, *_: done.append(step),
        )
    assert not done


@pytest.mark.filterwarnings("ignore:probe. found 1, too few")
def test_one_input_and_inference_mode_are_refused_before_any_work() -> None:
    done: list[str] = []

    def note(step: str, done_steps: int, total: int) -> None:
        done.append(step)

    with pytest.raises(InputError, match="probe: found one input, expected some dozens"):
        nafi.fuse(clients(), INPUTS, probe=PROBE[:1], distill=5, progress=note)
    with torch.inference_mode(), pytest.raises(InputError, match="call nafi outside of it"):
        nafi.fuse(clients(), INPUTS, probe=PROBE, distill=5, progress=note)
    assert not done
    merged = nafi.fuse(clients(), INPUTS, probe=PROBE)
    with torch.inference_mode(), pytest.raises(InputError, match="call nafi outside of it"):
        nafi.distill(merged, clients(), PROBE)


def test_bad_calls_are_refused() -> None:
    merged = nafi.fuse(clients(), INPUTS, probe=PROBE)
    with pytest.raises(InputError, match="result: found MLP, expected what nafi"):
        nafi.distill(merged.model, clients(), PROBE)  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match=r"model 0 returns shape \(4, 5\), the fused network \(4, 4\)"
    ):
        nafi.distill(merged, [seeded(s, 7, 9, 8, 5) for s in range(2)], PROBE)
    with pytest.raises(InputError, match=r"model 0 does not run on .* the models that were fused"):
        nafi.distill(merged, [seeded(s, 6, 9, 8, 4) for s in range(2)], PROBE)
    with pytest.raises(InputError, match="distill: needs a probe"):
        nafi.fuse(clients(), INPUTS, distill=5)
    with pytest.raises(InputError, match="distill: found -1"):
        nafi.fuse(clients(), INPUTS, probe=PROBE, distill=-1)
    average = nafi.fuse([seeded(0, 7, 9, 4)] * 2, INPUTS, method="fedavg")
    with pytest.raises(InputError, match="method fedavg knows nothing of its inputs"):
        nafi.distill(average, [seeded(0, 7, 9, 4)] * 2, PROBE)
