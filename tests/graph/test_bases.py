"""What may be done to neurons beyond changing their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nafi.graph import (
    Bases,
    Freedom,
    Rotated,
    free_bases,
    groups,
    keeping_mean,
    named_tensors,
    rotate,
    sides,
)
from nafi.graph.bases import _mapped
from nafi.graph.check import difference, in_general_position, run
from nafi.graph.gains import fold_gains, foldable_gains
from nafi.graph.trace import with_tensors
from tests.graph.zoo import seeded

TRANSFORMERS = ["vit_fused", "vit_sdpa", "encoder_pre_norm"]


def general(name: str) -> tuple[nn.Module, Any, Any]:
    """A network of the zoo in double precision and in general position, its inputs, its spec."""
    model, inputs = seeded(name)
    spec = groups(model, inputs, check=False)
    model = in_general_position(model, torch.float64, torch.Generator().manual_seed(1))
    return model, tuple(x.double() if x.is_floating_point() else x for x in inputs), spec


def orthogonal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.linalg.qr(torch.randn(*shape, generator=generator, dtype=torch.float64)).Q


def same(model: nn.Module, inputs: Any, state: dict[str, Tensor], spec: Any) -> float:
    """How much a network changes with other tensors, relative to its outputs."""
    twin = with_tensors(model, state, spec.aliases)
    return difference(run(twin, inputs), run(model, inputs))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_gains_are_folded_into_what_reads_them(name: str) -> None:
    model, inputs, spec = general(name)
    gains = foldable_gains(model, spec, inputs)
    folded = fold_gains(named_tensors(model), spec, gains)
    assert len(gains) == 5
    for gain in gains:
        assert torch.equal(folded[gain.name], torch.ones_like(folded[gain.name]))
        assert gain.shift is not None
        with_biases = all(spec.tensors[reader].bias for reader in gain.readers)
        assert bool(folded[gain.shift].any()) == (not with_biases)
    assert same(model, inputs, folded, spec) < 1e-12


def test_a_shift_stays_where_a_reader_has_no_bias() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
            self.one, self.two = nn.Linear(6, 5, bias=False), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.embed(x))
            return torch.relu(self.one(y)) + torch.relu(self.two(y))

    torch.manual_seed(0)
    plain = Net()
    inputs = (torch.randn(3, 4, dtype=torch.float64),)
    spec = groups(plain, (inputs[0].float(),), check=False)
    model = in_general_position(plain, torch.float64, torch.Generator().manual_seed(1))
    gains = foldable_gains(model, spec, inputs)
    folded = fold_gains(named_tensors(model), spec, gains)
    assert [set(gain.readers) for gain in gains] == [{"one.weight", "two.weight"}]
    assert same(model, inputs, folded, spec) < 1e-12
    assert folded["norm.bias"].any()


class Skip(nn.Module):
    """What is normalised is read by a layer and added to what comes after."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.embed(x))
        return self.head(y + torch.relu(self.layer(y)))


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(self.embed(x)), self.embed.weight)


@pytest.mark.parametrize(
    ("kind", "inputs"), [(Skip, torch.zeros(3, 4)), (Tied, torch.arange(5)[None])]
)
def test_gains_stay_that_others_read_too(kind: type[nn.Module], inputs: Tensor) -> None:
    model = kind()
    spec = groups(model, (inputs,), check=False)
    assert foldable_gains(model, spec, (inputs,)) == ()
    assert Freedom.MEAN not in free_bases(model, spec, (inputs,)).freedoms.values()


@pytest.mark.parametrize("name", [*TRANSFORMERS, "self_attention", "encoder_post_norm", "einsum"])
def test_any_map_of_a_groups_freedom_leaves_the_function_as_it_is(name: str) -> None:
    """Maps that were not those of the trial, and all groups at once."""
    model, inputs, spec = general(name)
    bases = free_bases(model, spec, inputs)
    state = fold_gains(named_tensors(model), spec, bases.gains)
    assert Freedom.PAIR in bases.freedoms.values()
    before = name in [*TRANSFORMERS, "self_attention"]  # a norm that only layers read
    assert (Freedom.MEAN in bases.freedoms.values()) == before
    for group, freedom in bases.freedoms.items():
        width = spec.widths[group]
        if freedom is Freedom.PAIR:
            heads = spec.widths[spec.groups[group].parent]
            state = _mapped(state, spec, group, 2 * orthogonal(heads, width, width).tril() + 1)
        else:
            matrix = orthogonal(width, width)
            state = rotate(state, spec, {group: Rotated(keeping_mean(matrix))})
    assert same(model, inputs, state, spec) < 1e-8


def test_layer_norm_takes_no_rotation_that_moves_the_mean_and_rms_norm_does() -> None:
    class Net(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.embed, self.norm, self.head = nn.Linear(4, 6), norm, nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.embed(x)))

    def freedom(norm: nn.Module) -> Freedom:
        model, inputs = Net(norm), (torch.zeros(3, 4),)
        return free_bases(model, groups(model, inputs), inputs).freedoms["embed"]

    assert freedom(nn.LayerNorm(6)) is Freedom.MEAN
    assert freedom(nn.RMSNorm(6)) in (Freedom.ROTATION, Freedom.PAIR)


class Rotary(nn.Module):
    """One layer of attention whose queries and keys are turned by their places."""

    def __init__(self, heads: int = 2, inner: int = 4) -> None:
        super().__init__()
        self.heads, width = heads, heads * inner
        self.embed = nn.Linear(5, width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.embed(x))
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.tensor(
            [1.0, 0.1, 1.0, 0.1]
        )
        mixed = nn.functional.scaled_dot_product_attention(turned(q, angles), turned(k, angles), v)
        return self.head(x + self.out(mixed.transpose(1, 2).flatten(2)))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    one, two = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-two, one], dim=-1) * angles.sin()


def test_with_rotary_places_only_values_have_a_free_basis() -> None:
    """Queries and keys take only maps that commute with those of their places: none is tried."""
    torch.manual_seed(0)
    model, inputs = Rotary(), (torch.randn(2, 7, 5),)
    spec = groups(model, inputs)
    free = free_bases(model, spec, inputs).freedoms
    tensors = {name for group in free for name in spec.tensors_of(group)}
    assert tensors == {"v.weight", "v.bias", "out.weight"}
    assert set(free.values()) == {Freedom.PAIR}


@pytest.mark.parametrize("name", ["mlp_2", "resnet_basic", "gru"])
def test_neurons_with_an_activation_function_have_an_order(name: str) -> None:
    model, inputs = seeded(name)
    spec = groups(model, inputs, check=False)
    assert free_bases(model, spec, inputs) == Bases()


def test_canonical_pairs_are_balanced_and_do_not_depend_on_the_map_that_was_applied() -> None:
    model, inputs, spec = general("vit_fused")
    bases = free_bases(model, spec, inputs)
    state = named_tensors(model)
    group = next(name for name, free in bases.freedoms.items() if free is Freedom.PAIR)
    heads, width = spec.widths[spec.groups[group].parent], spec.widths[group]
    other = _mapped(state, spec, group, 2 * orthogonal(heads, width, width).tril() + 1)
    first, second = (bases.canonical(tensors, spec) for tensors in (state, other))
    assert same(model, inputs, second, spec) < 1e-10
    for tensors in (first, second):
        one, two = (side.rows(tensors, spec) for side in sides(spec, group, tensors))
        torch.testing.assert_close(one @ one.mT, two @ two.mT)
    squares = [
        side.rows(tensors, spec).square().sum(dim=-1).sort().values
        for tensors in (first, second)
        for side in sides(spec, group, tensors)
    ]
    for found in squares[1:]:
        torch.testing.assert_close(found, squares[0])
