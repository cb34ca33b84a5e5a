"""Products with parameters are seen below modules and functional code, and can be changed there."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nafi.graph import Product, sample_rows, watch

CONVOLUTIONS = [
    (nn.Conv1d(4, 8, 5, padding=1, stride=3, groups=4), (3, 4, 19)),
    (nn.Conv2d(4, 6, 3, padding=1, stride=2), (3, 4, 9, 8)),
    (nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2), (3, 4, 9, 8)),
    (nn.Conv2d(4, 6, (2, 3), padding="same"), (3, 4, 9, 8)),
    (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (3, 4, 9, 8)),
    (nn.Conv2d(4, 4, 3, groups=4, bias=False), (3, 4, 9, 8)),
    (nn.Conv3d(4, 8, (2, 3, 1), padding=(1, 0, 2)), (3, 4, 5, 6, 7)),
    (nn.ConvTranspose1d(4, 6, 4, stride=2, padding=1), (3, 4, 5)),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), (3, 4, 5, 6)),
    (nn.ConvTranspose2d(4, 6, 3, stride=3, dilation=2, groups=2), (3, 4, 5, 6)),
    (nn.ConvTranspose3d(2, 4, 2, stride=2), (2, 2, 3, 4, 2)),
]


def seen(model: nn.Module, *inputs: Tensor) -> list[tuple[Product, Tensor]]:
    """Every product with all that it makes."""
    found = []

    def visit(product: Product) -> None:
        rows = torch.arange(product.places)
        found.append((product, product.inputs(rows) @ product.weights))

    watch(model, inputs, visit)
    return found


@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS, ids=lambda value: str(value)[:60])
def test_rows_times_weights_are_the_convolution(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = layer(x)
        if layer.bias is not None:
            expected -= layer.bias.reshape(1, -1, *[1] * (x.ndim - 2))
    ((product, made),) = seen(layer, x)
    # (groups, samples and places, outputs of a group)
    found = made.movedim(0, 1).flatten(1).reshape(len(x), *expected.shape[2:], -1).movedim(-1, 1)
    assert torch.allclose(found, expected, atol=1e-5)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        product.replace(2 * product.weights)
    assert torch.equal(layer.weight, 2 * before)


class Functional(nn.Module):
    """A matrix that is used from either side, transposed, in part, and in an einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(6, 4))
        self.heads = nn.Parameter(torch.randn(4, 2, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, second = self.matrix.chunk(2)
        return (
            F.linear(x, self.matrix),
            (self.matrix @ x.transpose(1, 2)).transpose(1, 2),
            F.linear(x, second),
            torch.einsum("bti,ihd->bthd", x, self.heads).flatten(2),
            x @ first.T,
        )


def test_functional_code_and_views_of_parameters() -> None:
    torch.manual_seed(0)
    model, x = Functional(), torch.randn(7, 3, 4)
    found = seen(model, x)
    for (_, made), expected in zip(found, model(x), strict=True):
        assert torch.allclose(made[0], expected.reshape(-1, expected.shape[-1]), atol=1e-5)
    assert [product.call for product, _ in found] == [0, 1, 2, 0, 3]
    # The second half of the rows; heads and their channels are flat places of axes 1 and 2.
    assert found[2][0].outputs([0]).tolist() == [[3, 4, 5]]
    assert found[3][0].outputs([1, 2]).tolist() == [list(range(10))]
    assert found[3][0].neurons([0]).tolist() == [0, 1, 2, 3]
    assert found[3][0].outputs([0]) is None


def test_a_view_is_written_through() -> None:
    model, x = Functional(), torch.randn(2, 3, 4)
    half = seen(model, x)[2][0]
    kept = model.matrix.detach()[:3].clone()
    with torch.no_grad():
        half.replace(torch.full((1, 4, 3), 7.0))
    assert torch.equal(model.matrix[:3], kept)
    assert bool((model.matrix[3:] == 7).all())


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_weights_are_used_at_every_step(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    calls = Counter(p.name for p, _ in seen(kind(4, 5, num_layers=2), torch.randn(6, 2, 4)))
    assert calls == {"weight_ih_l0": 1, "weight_hh_l0": 6, "weight_ih_l1": 1, "weight_hh_l1": 6}


def test_whole_layers_of_transformers_are_taken_apart() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    names = [p.name for p, _ in seen(nn.TransformerEncoder(layer, 1), torch.randn(3, 5, 8))]
    parts = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight"]
    assert names == [f"layers.0.{part}" for part in [*parts, "linear2.weight"]]
    assert torch.backends.mha.get_fastpath_enabled()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.embedding(tokens) * self.scale, self.embedding.weight)


def test_other_uses_are_told() -> None:
    visited: list[str] = []
    others = watch(Tied(), (torch.arange(6)[None],), lambda p: visited.append(p.name))
    assert visited == ["embedding.weight"]
    assert others == {"embedding.weight", "scale"}


def test_what_is_changed_on_the_way_counts_at_once() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)
    read = []

    def visit(product: Product) -> None:
        read.append(product.inputs(torch.arange(5))[0])
        if product.name == "0.weight":
            product.replace(torch.zeros_like(product.weights))

    watch(model, (x,), visit)
    assert torch.allclose(read[1], model[0].bias.expand(5, 4))


def test_rows_are_the_same_for_everybody_and_in_order() -> None:
    assert sample_rows(5, 8, 1).tolist() == [0, 1, 2, 3, 4]
    rows = sample_rows(1000, 50, 1)
    assert torch.equal(rows, sample_rows(1000, 50, 1))
    assert bool((rows.diff() > 0).all())
    assert not torch.equal(rows, sample_rows(1000, 50, 2))
