"""stack: clients side by side, cut down to a budget, under one head, in one file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nafi
from nafi.errors import InputError, SpecError
from nafi.fusion import EnsembleNetwork, FusionWarning, Stack
from nafi.graph import SpecWarning, named_tensors
from tests.fusion.networks import gap, outputs, seeded, trained_norms
from tests.graph import zoo

INPUTS = (torch.randn(60, 7, generator=torch.Generator().manual_seed(3)),)
IMAGES = (torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)),)
PROBE = torch.randn(64, 3, 6, 6, generator=torch.Generator().manual_seed(1))
COUNTS = [[5, 3, 0, 1], [2, 2, 8, 1], [0, 6, 1, 4]]


def clients() -> list[nn.Module]:
    return [seeded(s, 7, 9, 8, 4) for s in range(3)]


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_without_a_budget_it_is_the_ensemble() -> None:
    stack = nafi.fuse(clients(), INPUTS, method="stack", class_counts=COUNTS)
    ensemble = nafi.fuse(
        clients(), INPUTS, method="ensemble", weigh_by="counts", class_counts=COUNTS
    )
    assert gap(stack.model, ensemble.model, INPUTS) == 0
    assert [body.client for body in stack.bodies] == ["model 0", "model 1", "model 2"]


def test_a_budget_for_all_changes_nothing() -> None:
    whole = nafi.fuse(clients(), INPUTS, method="stack")
    found = nafi.fuse(clients(), INPUTS, method="stack", probe=INPUTS[0], budget="3.0 params")
    assert gap(found.model, whole.model, INPUTS) == 0
    assert not found.fits


class Doubled(nn.Module):
    """Every neuron twice, each with half of what the layer above reads: half of them will do."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        conv, inner, head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 3), nn.Linear(5, 3)
        self.conv, self.inner = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 10, 3)
        self.head = nn.Linear(10, 3)
        with torch.no_grad():
            self.conv.weight.copy_(conv.weight.repeat(2, 1, 1, 1))
            self.conv.bias.copy_(conv.bias.repeat(2))
            self.inner.weight.copy_(inner.weight.repeat(2, 2, 1, 1) / 2)
            self.inner.bias.copy_(inner.bias.repeat(2))
            self.head.weight.copy_(head.weight.repeat(1, 2) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.conv(x).relu()).relu().mean(dim=(2, 3)))


def test_neurons_that_are_there_twice_go_without_a_loss() -> None:
    models = [Doubled(s).eval() for s in range(2)]
    half = sum(4 * 27 + 4 + 5 * 36 + 5 + 5 * 3 + 3 for _ in models) / parameters(models[0])
    whole = nafi.fuse(models, IMAGES, method="stack")
    found = nafi.fuse(models, IMAGES, method="stack", probe=PROBE, budget=half)
    assert parameters(found.model) <= half * parameters(models[0])
    assert found.widths == {"conv": 8, "inner": 10}
    # The ridge of the refit is what is left.
    assert gap(found.model, whole.model, (PROBE,)) < 1e-3


@pytest.mark.parametrize("share", [0.9, 1.6])
@pytest.mark.parametrize("unit", ["params", "flops"])
def test_a_budget_is_kept_and_used(share: float, unit: str) -> None:
    models = [trained_norms(s) for s in range(3)]
    found = nafi.fuse(models, IMAGES, method="stack", probe=PROBE, budget=f"{share} {unit}")
    size = found.diagnostics["size"][f"{unit}_of_client"]
    assert 0.85 * share < size <= share
    modules = {type(module).__name__ for module in found.model.modules()}
    assert "BatchNorm2d" in modules
    assert len(found.summary()) == len(found.widths)
    for row in found.summary():
        assert row["shared"] == [row["width"], 0, 0]


def test_normalisation_is_put_back_so_that_training_agrees() -> None:
    models = [trained_norms(s) for s in range(2)]
    found = nafi.fuse(models, IMAGES, method="stack", probe=PROBE, budget="1.0 params").model
    folded = nafi.fuse(
        models, IMAGES, method="stack", probe=PROBE, budget="1.0 params", batchnorm="fold"
    ).model
    with torch.no_grad():
        evaluated = found(PROBE)
        assert torch.allclose(evaluated, folded(PROBE), atol=1e-4)
        trained = found.train()(PROBE)
    assert float((trained - evaluated).abs().max() / evaluated.abs().max()) < 0.05


def test_the_more_is_kept_the_closer_it_is() -> None:
    models = [trained_norms(s, channels=12) for s in range(2)]
    whole = nafi.fuse(models, IMAGES, method="stack").model
    errors = []
    for budget in (0.5, 1.0, 1.9):
        found = nafi.fuse(models, IMAGES, method="stack", probe=PROBE, budget=budget)
        (one,), (other,) = outputs(found.model, (PROBE,)), outputs(whole, (PROBE,))
        errors.append(float((one - other).square().mean()))
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.tested())
def test_every_network_of_the_zoo_is_cut_down_or_left_whole(name: str) -> None:
    model, inputs = zoo.seeded(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecWarning)
        warnings.simplefilter("ignore", FusionWarning)
        spec = zoo.traced(name)
        options: dict[str, Any] = {"spec": spec, "probe": inputs, "budget": "1.7 params"}
        found, refusal = None, ""
        try:
            found = nafi.fuse([model.eval(), model], inputs, method="stack", **options)
        except InputError as error:  # all widths are fixed, or most parameters are in embeddings
            refusal = str(error)
    if found is None:
        assert "even with the fewest neurons" in refusal
        return
    assert found.diagnostics["size"]["params_of_client"] <= 1.7
    assert all(bool(t.isfinite().all()) for t in outputs(found.model, inputs))


# ------------------------------------------------------------------------------ which clients


def test_the_best_are_kept_by_what_is_known_of_them() -> None:
    models, counts = clients(), [5, 1, 9]

    def names(**more: Any) -> list[str]:
        result = nafi.fuse(models, INPUTS, method="stack", **more)
        return [body.client for body in result.bodies]

    assert names(keep=1, sample_counts=counts) == ["model 2"]
    assert names(keep=2, sample_counts=counts) == ["model 0", "model 2"]
    scores = {id(m): s for m, s in zip(models, (0.1, 0.9, 0.2), strict=True)}

    def validate(model: nn.Module) -> float:
        tensors = named_tensors(model)
        return sum(
            scores[id(m)]
            for m in models
            if all(torch.equal(t, tensors.get(n, t + 1)) for n, t in named_tensors(m).items())
        )

    assert names(keep=1, sample_counts=counts, validate=validate) == ["model 1"]
    drawn = {tuple(names(keep=1, choose="random", seed=s)) for s in range(12)}
    assert drawn == {("model 0",), ("model 1",), ("model 2",)}


def test_the_number_of_clients_is_chosen_by_a_score() -> None:
    def few(model: nn.Module) -> float:
        return -float(parameters(model))

    found = nafi.fuse(clients(), INPUTS, method="stack", keep=[1, 2, 3], validate=few)
    assert found.diagnostics["keep"] == 1
    assert len(found.diagnostics["scores"]) == 3


@pytest.mark.parametrize("keep", [[2], (2,), np.array([2]), np.int64(2)])
def test_a_list_of_one_is_no_choice(keep: Any) -> None:
    assert (
        nafi.fuse(clients(), INPUTS, method="stack", keep=keep).diagnostics["options"]
        == (nafi.fuse(clients(), INPUTS, method="stack", keep=2).diagnostics["options"])
    )


def test_an_array_lists_values() -> None:
    assert [variant.keep for variant in Stack(keep=np.array([1, 3])).variants()] == [1, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 4}, "keep: found 4, but there are 3 models"),
        ({"keep": [1, 2]}, "a list needs validate="),
        ({"budget": "1 mile"}, "budget: found '1 mile'"),
        ({"budget": "1.0 params"}, "measured on a probe"),
        ({"probe": INPUTS[0], "budget": "0.01 params"}, r"found 0\.01 params, but 3 clients need"),
        ({"budget": b"1 params"}, r"budget: found b'1 params', expected"),
        ({"batchnorm": "average"}, "batchnorm"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        nafi.fuse(clients(), INPUTS, method="stack", **options)


# ------------------------------------------------------------------------------ the head, files


def labelled(count: int = 400) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 7, generator=generator)
    return inputs, (inputs[:, :4] + 0.3 * torch.randn(count, 4, generator=generator)).argmax(dim=1)


class Joined(nn.Module):
    """What a stack is: the features of all, and one linear layer over them."""

    def __init__(self, models: list[Any]) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(nn.Sequential(*b.layers[:1], nn.ReLU()) for b in models)
        self.tops = nn.ModuleList(nn.Sequential(b.layers[1], nn.ReLU()) for b in models)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(self.bodies, self.tops, strict=True)
        return self.head(torch.cat([top(body(x)) for body, top in pairs], dim=1))


def test_the_head_over_a_stack_is_one_layer_over_all_features() -> None:
    models, batches = clients(), [labelled()]
    stack = nafi.fuse(models, INPUTS, method="stack", class_counts=COUNTS).model
    solved = nafi.solve_head(stack, [nafi.statistics(stack, batches)])
    joined = Joined(models)
    expected = nafi.solve_head(joined, [nafi.statistics(joined, batches)])
    assert gap(solved, expected, INPUTS) < 1e-4
    # Sums of the solved network are those of the other: clients can be added later.
    again = nafi.solve_head(solved, [nafi.statistics(stack, batches)])
    assert gap(again, solved, INPUTS) == 0


def test_labels_at_the_server_solve_the_head() -> None:
    inputs, labels = labelled()
    before = nafi.fuse(clients(), INPUTS, method="stack")
    found = nafi.fuse(clients(), INPUTS, method="stack", head=[(inputs, labels)])
    with torch.no_grad():
        right = [
            float((m(inputs).argmax(1) == labels).double().mean())
            for m in (before.model, found.model)
        ]
    assert right[1] > right[0] + 0.2
    merged = nafi.fuse(clients(), INPUTS, head=[(inputs, labels)])
    with torch.no_grad():
        assert float((merged.model(inputs).argmax(1) == labels).double().mean()) > right[0]


def test_outputs_behind_a_softmax_cannot_be_solved_together() -> None:
    models = [
        nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 4), nn.Softmax(1)) for _ in "ab"
    ]
    stack = nafi.fuse(models, INPUTS, method="stack").model
    with pytest.raises(SpecError, match="before the softmax"):
        nafi.statistics(stack, [labelled()])


def make_norms() -> nn.Module:
    return trained_norms(0)


@pytest.mark.parametrize("batchnorm", ["attach", "fold"])
def test_a_stack_is_one_file(batchnorm: str, tmp_path: Path) -> None:
    models = [trained_norms(s) for s in range(3)]
    found = nafi.fuse(
        models, IMAGES, method="stack", probe=PROBE, budget="1.5 params", batchnorm=batchnorm
    )
    nafi.save(found, tmp_path / "stack.safetensors")
    read = nafi.load(tmp_path / "stack.safetensors", make_norms)
    assert isinstance(read, EnsembleNetwork)
    assert gap(read, found.model, IMAGES) < 1e-6
    nafi.save(found.model, tmp_path / "model.safetensors", example_inputs=IMAGES)
    if batchnorm == "attach":
        assert gap(nafi.load(tmp_path / "model.safetensors", make_norms), read, IMAGES) < 1e-6


def test_options_are_documented() -> None:
    assert all(info.meaning for info in Stack.describe())


class Several(nn.Module):
    """Classes, and beside them a value, or which class it is."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.body, self.out, self.value = nn.Linear(7, 9), nn.Linear(9, 4), nn.Linear(9, 1)
        self.whole = whole

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).relu()
        logits = self.out(hidden)
        return logits, logits.argmax(dim=1) if self.whole else self.value(hidden)


def test_a_head_over_several_outputs_is_refused() -> None:
    torch.manual_seed(0)
    models = [Several() for _ in range(2)]
    with pytest.raises(SpecError, match="several outputs have no one last layer"):
        nafi.fuse(models, INPUTS, method="stack", head=[labelled()])
    with pytest.raises(InputError, match="head: found int"):
        nafi.fuse(clients(), INPUTS, method="stack", head=5)


def test_whole_numbers_that_differ_cannot_be_added_up() -> None:
    torch.manual_seed(0)
    with pytest.raises(InputError, match="whole numbers or masks that differ"):
        nafi.fuse([Several(whole=True) for _ in range(2)], INPUTS, method="ensemble")


@pytest.mark.parametrize("tokens", [3, 5])
def test_classes_of_tokens_are_weighed_along_the_last_axis(tokens: int) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 4)) for _ in range(2)]
    inputs = torch.randn(6, tokens, 7)
    counts = [[9, 9, 0, 0], [0, 0, 9, 9]]
    found = nafi.fuse(models, (inputs,), method="stack", class_counts=counts).model
    with torch.no_grad():
        one, two = (model(inputs) for model in models)
        assert torch.allclose(found(inputs), torch.cat([one[..., :2], two[..., 2:]], dim=-1))


def test_a_budget_is_one_of_all_clients_and_of_all_that_is_stored() -> None:
    models = [seeded(s, 7, width, 4) for s, width in enumerate((10, 40, 12))]
    options: dict[str, Any] = {"keep": 1, "sample_counts": [1, 9, 1], "probe": INPUTS[0]}
    found = nafi.fuse(models, INPUTS, method="stack", budget="1.0 params", **options)
    assert found.diagnostics["size"]["params_of_client"] <= 1.0
    counts = torch.ones(8, 50).tolist()
    many = [seeded(s, 7, 8, 50) for s in range(8)]
    stored = nafi.fuse(
        many, INPUTS, method="stack", probe=INPUTS[0], budget="8 kB", class_counts=counts
    )
    assert stored.diagnostics["size"]["bytes"] <= 8000


def test_a_wide_layer_can_be_cut_to_one_neuron() -> None:
    models = [seeded(s, 7, 1000, 4) for s in range(2)]
    found = nafi.fuse(models, INPUTS, method="stack", probe=INPUTS[0], budget="0.003 params")
    assert found.widths == {"layers.0": 2}


def test_groups_that_cannot_shrink_are_named() -> None:
    models = [
        nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 4))
        for _ in range(2)
    ]
    with pytest.raises(InputError, match=r"fewest neurons.*the width of 0 cannot change"):
        nafi.fuse(models, INPUTS, method="stack", probe=INPUTS[0], budget="1.5 params")


# ------------------------------------------------------------------------------ the frontier


def test_budgets_share_what_they_have_in_common_and_all_are_scored() -> None:
    models = [trained_norms(s) for s in range(2)]
    found = nafi.frontier(
        models,
        IMAGES,
        validate=lambda model: -float(parameters(model)),
        probe=PROBE,
        budgets=["0.6 params", "1.4 params"],
    )
    alone = nafi.fuse(models, IMAGES, method="stack", probe=PROBE, budget="1.4 params")
    by_name = {(point.method, point.budget): point for point in found.points}
    assert by_name["stack", "1.4 params"].score == -parameters(alone.model)
    assert by_name["stack", "0.6 params"].params <= 0.6
    assert by_name["nafi", "0.6 params"].params <= 0.6
    assert by_name["client", "model 1"].params == by_name["whole clients", "1 kept"].params == 1.0
    smallest = max(by_name[method, "0.6 params"].score for method in ("stack", "nafi"))
    assert parameters(found.best.model) == -smallest
    with pytest.raises(InputError, match="not bytes"):
        nafi.frontier(models, IMAGES, validate=len, probe=PROBE, budgets=["3 kB"])
    with pytest.raises(InputError, match="budgets: found none"):
        nafi.frontier(models, IMAGES, validate=len, probe=PROBE, budgets=[])
    with pytest.raises(InputError, match="probe: found none"):
        nafi.frontier(models, IMAGES, validate=len, probe=None)
    with pytest.raises(InputError, match="method: found 'magic'"):
        nafi.frontier(models, IMAGES, validate=parameters, probe=PROBE, methods=["magic"])


def test_budgets_that_a_method_cannot_keep_are_left_out() -> None:
    models = [seeded(s, 7, width, 4) for s, width in enumerate((10, 40, 12))]
    batches = (INPUTS[0][i : i + 20] for i in (0, 20, 40))  # can be read once
    found = nafi.frontier(
        models, INPUTS, validate=lambda model: 0.0, probe=batches, budgets=["0.07 params", 3]
    )
    fused = {(p.method, p.budget) for p in found.points if p.method in ("stack", "nafi")}
    # With one neuron each, three clients have 48 parameters, what they merge into 16; the mean
    # client has 248, of which 17 are allowed.
    assert fused == {("nafi", "0.07 params"), ("stack", "3"), ("nafi", "3")}


@pytest.mark.parametrize(("budget", "factor"), [("4.0 params", 2.0), ("9.0 flops", 3.0)])
def test_a_budget_of_a_merged_network_is_a_width(budget: str, factor: float) -> None:
    models = [trained_norms(s, channels=12) for s in range(4)]
    options = {"penalty": 0.0, "evidence": 1e6, "prune_from": 1.0}
    found = nafi.fuse(models, IMAGES, probe=PROBE, budget=budget, **options)
    amount, unit = budget.split()
    size = found.diagnostics["size"][f"{unit}_of_client"]
    assert 0.8 * float(amount) < size <= float(amount)
    assert found.widths["stem"] >= 12 * factor
