"""Widths that grow together: layers of one recurrent module, heads of several blocks."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import nafi
from nafi.fusion import FusionResult, FusionWarning
from tests.fusion.networks import gap
from tests.graph import zoo


def built(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return zoo.named(name).build().eval()


def fused(name: str, **options: object) -> FusionResult:
    models = [built(name, seed) for seed in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusionWarning)
        return nafi.fuse(models, zoo.named(name).example_inputs(), **options)


@pytest.mark.parametrize("name", ["lstm", "lstm_bidirectional", "gru"])
def test_layers_of_one_module_grow_to_one_width(name: str, tmp_path: Path) -> None:
    """One `hidden_size` for all: the narrower are filled up with units that nobody owns."""
    result = fused(name, evidence=1000.0, max_width=1.8)
    inputs = zoo.named(name).example_inputs()
    recurrent = next(m for m in result.model.modules() if isinstance(m, nn.RNNBase))
    rows = [row for row in result.summary() if row["group"].startswith(name[:3])]
    assert len(rows) == recurrent.num_layers * (1 + recurrent.bidirectional)
    assert {row["width"] for row in rows} == {recurrent.hidden_size}
    assert recurrent.hidden_size > rows[0]["local"][0]
    nafi.save(result, tmp_path / "fused.safetensors", example_inputs=inputs)
    loaded = nafi.load(tmp_path / "fused.safetensors", lambda: built(name, 0))
    assert gap(loaded, result.model, inputs) == 0


@pytest.mark.slow
def test_blocks_may_have_different_numbers_of_heads() -> None:
    """A module remembers the heads of its own block, and no others."""
    heads = {f"encoder.layer.{k}.attention.self.query": 5 + 2 * k for k in range(2)}
    result = fused("bert_sdpa", penalty=0.0, evidence=1e5, max_width=heads)
    assert {name: result.widths[name] for name in heads} == heads
    attention = [layer.attention.self for layer in result.model.encoder.layer]
    assert [module.query.out_features for module in attention] == [5 * 6, 7 * 6]


class Fixed(nn.Module):
    """Two layers whose code fixes their width, and one that may grow."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 9)
        self.out = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).relu().view(-1, 8)
        x = self.b(x).relu().view(-1, 6)
        return self.out(self.c(x).relu())


def test_what_cannot_grow_does_not_hold_up_the_rest() -> None:
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(Fixed())
    with pytest.warns(FusionWarning, match=r"^a, b: the width stays as it is.*view\(-1, 8\)"):
        result = nafi.fuse(models, (torch.randn(4, 5),), penalty=0.0, evidence=1e5)
    assert (result.widths["a"], result.widths["b"]) == (8, 6)
    assert result.widths["c"] > 9
