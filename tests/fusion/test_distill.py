"""Training on a probe towards the ensemble: never further from it on what is held out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nafi
from nafi.errors import InputError
from tests.fusion.networks import gap, seeded, trained_norms

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
    assert told["before"] == pytest.approx(distance(merged.model, ensemble, PROBE[:20]), rel=1e-4)
    assert told["after"] == pytest.approx(distance(found.model, ensemble, PROBE[:20]), rel=1e-4)
    assert told["after"] <= told["before"]
    assert method != "ot" or told["after"] < told["before"] / 2  # far from the ensemble at first
    assert found.agreement is not None


def test_what_does_not_help_is_not_kept() -> None:
    merged = nafi.fuse(clients(), INPUTS, probe=PROBE)
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


def test_bad_calls_are_refused() -> None:
    merged = nafi.fuse(clients(), INPUTS, probe=PROBE)
    with pytest.raises(InputError, match="steps: found 0, expected a number above 0"):
        nafi.distill(merged, clients(), PROBE, steps=0)
    with pytest.raises(InputError, match="distill: needs a probe"):
        nafi.fuse(clients(), INPUTS, distill=5)
    with pytest.raises(InputError, match="distill: found -1"):
        nafi.fuse(clients(), INPUTS, probe=PROBE, distill=-1)
    average = nafi.fuse([seeded(0, 7, 9, 4)] * 2, INPUTS, method="fedavg")
    with pytest.raises(InputError, match="method fedavg knows nothing of its inputs"):
        nafi.distill(average, [seeded(0, 7, 9, 4)] * 2, PROBE)
