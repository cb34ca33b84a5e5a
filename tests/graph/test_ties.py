"""Widths that agree: closed forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import nafi
from nafi.graph import equal_widths, tied_limits
from nafi.graph.ties import width_constraints

sizes = st.integers(1, 60)


@given(sizes, sizes, st.integers(1, 6), st.integers(1, 6))
def test_widths_of_a_tie_agree_and_lose_nothing(a: int, b: int, one: int, two: int) -> None:
    tie, widths = {"a": one, "b": two}, {"a": a, "b": b, "c": 1}
    found = equal_widths(tie, widths)
    assert found["a"] * one == found["b"] * two
    assert found["a"] >= a
    assert found["b"] >= b
    step = {"a": found["a"] - two, "b": found["b"] - one}
    assert step["a"] < a or step["b"] < b  # no more than what is needed


@given(sizes, sizes, st.integers(1, 6), st.integers(1, 6))
def test_limits_of_a_tie_agree_and_exceed_nothing(a: int, b: int, one: int, two: int) -> None:
    found = tied_limits({"a": one, "b": two}, {"a": a, "b": b})
    assert found["a"] * one == found["b"] * two
    assert found["a"] <= a
    assert found["b"] <= b


class Twice(nn.Module):
    """Two attentions over one stream, of heads of other widths."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(5, 12), nn.Linear(12, 3)
        self.one, self.two = (nn.MultiheadAttention(12, heads) for heads in (4, 3))
        self.norm = nn.LayerNorm(12) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x))
        for attention in (self.one, self.two):
            x = x + attention(x, x, x)[0]
        return self.out(x)


def test_attentions_over_one_stream_are_one_tie() -> None:
    model = Twice(norm=False)
    found = width_constraints(model, nafi.groups(model, (torch.randn(7, 2, 5),)))
    (tie,) = found.ties
    assert tie == {"embed": 1, "one": 3, "two": 4}
    assert set(found.fixed) == {"one/2", "one/3", "two/2", "two/3"}


def test_a_norm_holds_all_that_is_tied_to_its_stream() -> None:
    model = Twice(norm=True)
    found = width_constraints(model, nafi.groups(model, (torch.randn(7, 2, 5),)))
    assert not found.ties
    assert "layer_norm fixes the width" in found.fixed["one"]
    assert "heads x head width = embedding" in found.fixed["one"]


@pytest.mark.parametrize("layers", [1, 3])
def test_layers_of_a_recurrent_module_are_one_tie(layers: int) -> None:
    model = nn.Sequential(nn.LSTM(4, 6, layers, bidirectional=True), First(), nn.Linear(12, 2))
    found = width_constraints(model, nafi.groups(model, (torch.randn(5, 2, 4),)))
    assert [set(tie.values()) for tie in found.ties] == [{1}]
    assert len(found.ties[0]) == 2 * layers


class First(nn.Module):
    def forward(self, x: tuple[Tensor, object]) -> Tensor:
        return x[0]
