"""Segmentation in rounds: a U-Net with skips and normalisation, no word of which is in the code."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import nafi
from nafi.experiments import load_experiment
from nafi.experiments.models import UNet, unet_widths
from nafi.experiments.problems import bce_and_dice
from nafi.federated import (
    Architecture,
    Layerwise,
    Samples,
    Task,
    Trainer,
    Training,
    Update,
    make_strategy,
    simulate,
)
from nafi.graph import fold_batchnorm, groups, permute
from nafi.graph.permute import permute_state
from nafi.graph.spec import ModelSpec
from tests.federated.networks import passed

WIDTHS = unet_widths(2)
SIDE = 32


def shapes(count: int, seed: int, bright: float) -> Samples:
    """Boxes on noise, as bytes; bright: how they differ from the ground, above or below it."""
    generator = torch.Generator().manual_seed(seed)
    images = 110 + 30 * torch.randn(count, 3, SIDE, SIDE, generator=generator)
    masks = torch.zeros(count, 1, SIDE, SIDE, dtype=torch.uint8)
    for image, mask in zip(images, masks, strict=True):
        top, left = torch.randint(0, SIDE - 16, (2,), generator=generator).tolist()
        high, wide = torch.randint(8, 16, (2,), generator=generator).tolist()
        image[:, top : top + high, left : left + wide] += bright
        mask[:, top : top + high, left : left + wide] = 1
    return Samples(images.clamp(0, 255).to(torch.uint8), masks)


def with_statistics(transposed: bool = False) -> nn.Module:
    """A small U-Net with weights and statistics of its own."""
    torch.manual_seed(0)
    model = UNet(WIDTHS, transposed=transposed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return nafi.calibrate(model.eval(), [shapes(24, 0, 80.0).inputs.float() / 255])


def test_the_widths_of_the_paper() -> None:
    model = UNet(unet_widths(64))
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 19
    assert [c.out_channels for c in convolutions[:10]] == [
        64, 64, 128, 128, 256, 256, 512, 512, 512, 512
    ]  # fmt: skip
    assert convolutions[10].in_channels == 1024  # 512 from below, 512 of the skip
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 18
    for profile, base in (("scaled", 8), ("paper", 64)):
        experiment = load_experiment("carvana", profile)
        assert experiment.widths == unet_widths(base)


@pytest.mark.parametrize("transposed", [False, True])
def test_folding_keeps_the_masks(transposed: bool) -> None:
    model = with_statistics(transposed)
    x = shapes(4, 9, 80.0).inputs.float() / 255
    spec = groups(model, (x,))
    folded, folded_spec = fold_batchnorm(model, spec)
    assert len(folded_spec.folded) == 18
    with torch.no_grad():
        torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)


def copies(model: nn.Module, spec: ModelSpec, count: int) -> list[nn.Module]:
    generator = torch.Generator().manual_seed(3)
    return [
        permute(
            model,
            spec,
            {n: torch.randperm(g.width, generator=generator) for n, g in spec.groups.items()},
        )
        for _ in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("method", ["nafi", "ot"])
def test_permuted_copies_fuse_to_the_same_masks(method: str, transposed: bool) -> None:
    model = with_statistics(transposed)
    x = shapes(6, 9, 80.0).inputs.float() / 255
    spec = groups(model, (x[:2],))
    result = nafi.fuse([model, *copies(model, spec, 2)], (x[:2],), method=method)
    with torch.no_grad():
        found, expected = result.model(x), model(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_decoder_reads_both_groups_each_at_its_offset() -> None:
    """Skip and below have different widths and orders: a wrong offset gives another function."""
    model = with_statistics()
    x = shapes(4, 9, 80.0).inputs.float() / 255
    architecture = Architecture(partial(UNet, WIDTHS), (x[:2],))
    spec = architecture.spec
    decoder = spec.axes["up.1.conv1.weight"][1]
    assert [segment.groups for segment in decoder] == [("down.2.conv2",), ("up.0.conv2",)]
    clients = dict(zip("abc", [model, *copies(model, spec, 2)], strict=True))
    strategy = Layerwise(architecture, Training(), 19)
    assert strategy.layers == 19
    state = passed(strategy, clients)
    with torch.no_grad():
        torch.testing.assert_close(strategy.model(state)(x), model(x), rtol=1e-4, atol=1e-4)
        wrong = swapped(state.tensors, spec)
        other = architecture.filled(state.form, wrong)
        assert (other.eval()(x) - model(x)).abs().max() > 1e-2


def swapped(tensors: dict[str, Tensor] | object, spec: ModelSpec) -> dict[str, Tensor]:
    """The decoder's two inputs the other way round."""
    assert isinstance(tensors, dict)
    weight = tensors["up.1.conv1.weight"]
    first = spec.groups["down.2.conv2"].width
    turned = torch.cat([weight[:, first:], weight[:, :first]], dim=1)
    return {**tensors, "up.1.conv1.weight": turned}


def precise(samples: Samples) -> Samples:
    return Samples(samples.inputs.double() / 255, samples.labels.double())


@pytest.mark.slow
def test_the_order_of_a_client_s_neurons_matters_in_no_round() -> None:
    """Two clients train in all rounds; one of them comes with its neurons in another order.

    In double precision: training makes more of rounding errors with every step.
    """
    data = {str(s): precise(shapes(6, s, bright)) for s, bright in enumerate((90.0, -90.0))}
    x = precise(shapes(4, 9, 80.0)).inputs
    architecture = Architecture(lambda: UNet(WIDTHS).double(), (x[:2],))
    training = Training(epochs=1, batch=3, rate=0.01)
    strategy = make_strategy("layerwise", architecture, training, rounds=19, max_width=1.5)
    work = Trainer(architecture, data, loss=bce_and_dice)
    spec, generator = architecture.spec, torch.Generator().manual_seed(3)
    orders = {n: torch.randperm(g.width, generator=generator) for n, g in spec.groups.items()}

    def shuffled(client: str, task: Task) -> tuple[Update, float]:
        update, loss = work(client, task)
        if task.round == 0 and client == "1":
            update = replace(update, tensors=permute_state(update.tensors, spec, orders))
        return update, loss

    one, two = (simulate(strategy, list(data), train) for train in (work, shuffled))
    assert [r["widths"] for r in one.records] == [r["widths"] for r in two.records]
    assert one.records[-1]["widths"] != list(spec.widths.values())
    with torch.no_grad():
        torch.testing.assert_close(one.model(x), two.model(x), rtol=1e-6, atol=1e-6)
