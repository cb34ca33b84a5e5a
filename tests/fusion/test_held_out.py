"""Which inputs judge: spread over any order, and the same for every layer and network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nafi
from nafi.fusion import refit
from nafi.fusion.held_out import held_out, numbers_of_rows, row_stretches
from nafi.fusion.statistics import LayerStatistics
from nafi.graph import Product, watch
from tests.fusion.networks import seeded

COUNT = 12


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------ the rule


def test_one_of_every_four_inputs_is_held_out() -> None:
    held = held_out(torch.arange(4096))
    assert bool((held.reshape(-1, 4).sum(dim=1) == 1).all())
    assert held_out(torch.arange(2)).tolist() == [False, True]


@pytest.mark.parametrize("classes", [2, 3, 4, 5, 8, 10])
def test_no_class_is_left_out_whether_inputs_are_sorted_or_in_turn(classes: int) -> None:
    numbers = torch.arange(32 * classes)
    held = held_out(numbers)
    for labels in (numbers // 32, numbers % classes):
        shares = torch.stack([held[labels == k].double().mean() for k in range(classes)])
        assert float(shares.min()) > 0.05
        assert float(shares.max()) < 0.45


# ------------------------------------------------------------------------------ whose rows


class Attention(nn.Module):
    """Within it, steps come before inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.attend(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class ClassToken(Attention):
    """The first step is the same in all inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([torch.ones_like(x[:, :1]), x], dim=1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


class Between(nn.Module):
    """Steps before inputs, and more after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(len(x), 3, 2, 3).transpose(0, 1)).transpose(0, 1).flatten(1)


class Frames(nn.Module):
    """A convolution of which every step of every input is a sample."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.conv = nn.Conv2d(1, 2, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        frames = x.transpose(0, 1) if self.first else x
        made = self.conv(frames.flatten(0, 1)).unflatten(0, frames.shape[:2])
        return (made.transpose(0, 1) if self.first else made).flatten(1)


STEPS, IMAGES = drawn(COUNT, 6, 3), drawn(COUNT, 3, 7, 7)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "steps": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), STEPS),
    "attention": (Attention, STEPS),
    "class token": (ClassToken, STEPS),
    "recurrent": (Recurrent, STEPS),
    "between": (Between, STEPS),
    "images": (lambda: nn.Sequential(nn.Conv2d(3, 2, 3, stride=2), nn.ReLU()), IMAGES),
    "transposed": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2), IMAGES),
    "frames": (lambda: Frames(first=False), IMAGES[:, :, None]),
    "frames first": (lambda: Frames(first=True), IMAGES[:, :, None]),
}


def reads(model: nn.Module, inputs: Tensor) -> dict[Any, Tensor]:
    """(M, K) what every use of a weight reads."""
    found: dict[Any, Tensor] = {}

    def visit(product: Product) -> None:
        rows = product.inputs(torch.arange(product.places))
        found[product.name, product.call] = rows.transpose(0, 1).flatten(1)

    watch(model, (inputs,), visit)
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_a_row_is_of_the_input_with_which_it_changes(name: str) -> None:
    torch.manual_seed(0)
    build, inputs = NETWORKS[name]
    model = build().eval()
    stretches = row_stretches(model, (inputs,))
    before = reads(model, inputs)
    for number in range(COUNT):
        changed = inputs.clone()
        changed[number] += 1
        for use, rows in reads(model, changed).items():
            owner = numbers_of_rows(torch.arange(len(rows)), len(rows), COUNT, stretches.get(use))
            other = (rows != before[use]).any(dim=1)
            # The first state of a recurrent layer is that of no input.
            assert set(owner[other].tolist()) == {number} or use == ("lstm.weight_hh_l0", 0)


def test_rows_of_which_nothing_is_known_are_in_the_order_of_the_inputs() -> None:
    found = numbers_of_rows(torch.arange(10), 10, 4, None)
    assert found.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]


# ------------------------------------------------------------------------------ the refit


@pytest.fixture
def judges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[LayerStatistics, LayerStatistics]]:
    """What layers were fitted to, and by what their ridges were chosen, in order."""
    found: list[tuple[LayerStatistics, LayerStatistics]] = []
    fit_layer = refit.fit_layer

    def watched(rest: LayerStatistics, held: LayerStatistics, **known: Any) -> Any:
        found.append((rest, held))
        return fit_layer(rest, held, **known)

    monkeypatch.setattr(refit, "fit_layer", watched)
    return found


def test_the_same_inputs_judge_all_layers(
    judges: list[tuple[LayerStatistics, LayerStatistics]],
) -> None:
    probe = drawn(30, 7)
    models = [seeded(s, 7, 9, 8, 4) for s in range(2)]
    nafi.fuse(models, (probe[:2],), probe=probe)
    held = held_out(torch.arange(30))
    torch.testing.assert_close(judges[0][1].sums[0], probe[held].double().sum(dim=0))
    assert [int(judge.count) for _, judge in judges] == [int(held.sum())] * 3
    assert [int(rest.count) for rest, _ in judges] == [int((~held).sum())] * 3


def test_attention_is_judged_by_whole_inputs(
    judges: list[tuple[LayerStatistics, LayerStatistics]],
) -> None:
    torch.manual_seed(0)
    models = [nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval() for _ in range(2)]
    probe = drawn(30, 5, 4)
    nafi.fuse(models, (probe[:2],), probe=probe, bases="ordered")
    chosen = probe[held_out(torch.arange(30))].flatten(0, 1).double()
    first = next(judge for _, judge in judges if judge.gram.shape[1] == 4)
    torch.testing.assert_close(first.gram[0], chosen.T @ chosen, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:probe. found 1, too few")
def test_a_single_image_is_judged_by_a_part_of_it(
    judges: list[tuple[LayerStatistics, LayerStatistics]],
) -> None:
    torch.manual_seed(0)
    models: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
        for _ in range(2)
    ]
    nafi.fuse(models, (drawn(2, 3, 8, 8),), probe=drawn(1, 3, 8, 8))
    assert [(int(rest.count), int(judge.count)) for rest, judge in judges] == [(48, 16)] * 2
