"""Transformers whose bases differ: fused, they are what they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nafi
from nafi.fusion.rotation import _turned
from nafi.graph import Freedom, Rotated, free_bases, groups, keeping_mean, named_tensors, rotate
from nafi.graph.bases import _mapped
from nafi.graph.check import in_general_position
from nafi.graph.trace import with_tensors
from tests.graph.zoo import named, seeded


def orthogonal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.linalg.qr(torch.randn(*shape, generator=generator, dtype=torch.float64)).Q


def original(name: str) -> tuple[nn.Module, Any]:
    """A network in general position, so that no gain is one by chance."""
    model, inputs = seeded(name)
    return in_general_position(model, torch.float32, torch.Generator().manual_seed(1)), inputs


def turned_copy(model: nn.Module, inputs: Any, seed: int) -> nn.Module:
    """The same function in other bases: rotated streams, any invertible map within heads."""
    generator = torch.Generator().manual_seed(seed)
    spec = groups(model, inputs, check=False)
    bases = free_bases(model, spec, inputs)
    doubles = {
        name: t.double() if t.is_floating_point() else t for name, t in named_tensors(model).items()
    }
    state = bases.canonical(doubles, spec)
    for group, freedom in bases.freedoms.items():
        width, parent = spec.widths[group], spec.groups[group].parent
        if freedom is Freedom.PAIR and parent is not None:
            matrices = orthogonal(generator, spec.widths[parent], width, width)
            stretched = matrices * torch.linspace(0.5, 2.0, width, dtype=torch.float64)
            state = _mapped(state, spec, group, stretched)
        else:
            matrix = orthogonal(generator, width, width)
            state = rotate(state, spec, {group: Rotated(keeping_mean(matrix))})
    like = named_tensors(model)
    return with_tensors(model, {n: t.to(like[n].dtype) for n, t in state.items()}, spec.aliases)


def gap(model: nn.Module, other: nn.Module, inputs: Any) -> float:
    with torch.no_grad():
        expected, outputs = model(*inputs), other(*inputs)
    return float((outputs - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("name", "with_probe"),
    [
        ("vit_fused", False),
        ("vit_sdpa", True),
        ("encoder_pre_norm", False),
        ("encoder_post_norm", True),
        ("self_attention", False),
    ],
)
def test_a_network_fused_with_itself_in_other_bases_is_itself(name: str, with_probe: bool) -> None:
    model, inputs = original(name)
    copies = [turned_copy(model, inputs, seed) for seed in (3, 4)]
    assert all(gap(model, copy, inputs) < 1e-5 for copy in copies)
    probe = tuple(torch.randn(16, *x.shape[1:]) for x in inputs) if with_probe else None
    result = nafi.fuse([model, *copies], inputs, probe=probe, max_width=1.0)
    assert gap(model, result.model, inputs) < 1e-4
    assert result.widths == groups(model, inputs, check=False).widths


def test_an_order_alone_does_not_bring_it_back() -> None:
    """Otherwise the test above would show nothing."""
    model, inputs = original("vit_sdpa")
    other = turned_copy(model, inputs, 3)
    result = nafi.fuse([model, other], inputs, bases="ordered", max_width=1.0)
    assert gap(model, result.model, inputs) > 0.01


def test_a_head_that_nobody_shares_keeps_its_basis() -> None:
    """Two networks without heads in common, all of which are kept."""
    model, inputs = seeded("einsum")
    torch.manual_seed(7)
    other = named("einsum").build()
    result = nafi.fuse([model, other], inputs, penalty=0.0, evidence=1e9)
    assert result.widths["q"] == 2 * groups(model, inputs).widths["q"]


@pytest.mark.parametrize("freedom", [Freedom.ROTATION, Freedom.MEAN])
def test_procrustes_finds_the_maps_that_were_applied(freedom: Freedom) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 40, generator=generator, dtype=torch.float64)
    maps = [orthogonal(generator, 6, 6) for _ in range(3)]
    if freedom is Freedom.MEAN:
        maps = [keeping_mean(matrix) for matrix in maps]
    tables = [rows[None], *[(matrix @ rows)[None] for matrix in maps]]
    found = _turned(tables, [[0]] * 4, range(4), freedom)
    for matrix, (back,) in zip(maps, found[1:], strict=True):
        torch.testing.assert_close(back.T @ matrix, torch.eye(6, dtype=torch.float64))


def test_heads_are_turned_as_if_each_place_were_alone() -> None:
    """Clients are read one after the other, whatever the places of their heads."""
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(2, 5, 30, generator=generator, dtype=torch.float64) for _ in range(4)]
    places = [[0, 1], [1, 0], [1, 2], [0, 1]]
    order = [2, 0, 3, 1]
    together = _turned(tables, places, order, Freedom.ROTATION)
    for place in range(3):
        members = [(s, h) for s in order for h, p in enumerate(places[s]) if p == place]
        alone = _turned(
            [tables[s][h][None] for s, h in members],
            [[0]] * len(members),
            range(len(members)),
            Freedom.ROTATION,
        )
        for (s, head), (matrix,) in zip(members, alone, strict=True):
            assert torch.equal(together[s][head], matrix)
