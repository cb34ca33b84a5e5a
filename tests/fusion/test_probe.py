"""A probe in every form that people hold inputs in, and what cannot be one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nafi
from nafi.errors import InputError
from nafi.fusion import FusionWarning, read_probe
from tests.fusion.networks import seeded

MODEL = nn.Linear(6, 3)
EXAMPLE = (torch.zeros(2, 6),)
X = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20)


class Pair(nn.Module):
    """Two inputs, tokens and which of them count, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)

    def forward(self, tokens: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return (self.embed(tokens) * mask[..., None]).sum(dim=1) * scale


TOKENS = torch.arange(60).reshape(12, 5) % 9
MASK = (TOKENS > 2).float()
PAIR = (torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5))


@pytest.mark.parametrize(
    "probe",
    [
        X,
        (X,),
        (X, Y),
        {"input": X, "labels": Y},
        [X[:8], X[8:]],
        [(X[:8], Y[:8]), (X[8:], Y[8:])],
        DataLoader(TensorDataset(X, Y), batch_size=7),
        DataLoader(TensorDataset(X), batch_size=7),
        (batch for batch in X.split(3)),
        X.double(),
    ],
)
def test_one_batch_of_whatever_holds_inputs(probe: Any) -> None:
    (found,) = read_probe(probe, MODEL, EXAMPLE)
    assert found.equal(X)


@pytest.mark.parametrize(
    "probe",
    [
        (TOKENS, MASK),
        {"mask": MASK, "tokens": TOKENS, "scale": 3.0},
        [(TOKENS[:4], MASK[:4]), (TOKENS[4:], MASK[4:])],
        [((TOKENS, MASK), torch.zeros(12))],
        [({"tokens": TOKENS, "mask": MASK}, torch.zeros(12))],
        DataLoader(TensorDataset(TOKENS, MASK, torch.zeros(12)), batch_size=5),
        (TOKENS.int(), MASK),
    ],
)
def test_networks_of_several_inputs(probe: Any) -> None:
    tokens, mask = read_probe(probe, Pair(), PAIR)
    assert tokens.equal(TOKENS)
    assert tokens.dtype == torch.long
    assert mask.equal(MASK)


@pytest.mark.parametrize(
    "probe",
    [
        (TOKENS, MASK),
        [((TOKENS, MASK), torch.zeros(12))],
        [({"mask": MASK, "tokens": TOKENS}, torch.zeros(12))],
    ],
)
def test_tuples_go_to_arguments_in_the_order_of_forward(probe: Any) -> None:
    """Whatever the order in which example inputs name them."""
    for example in ({"tokens": PAIR[0], "mask": PAIR[1]}, {"mask": PAIR[1], "tokens": PAIR[0]}):
        found = read_probe(probe, Pair(), example)
        assert isinstance(found, dict)
        assert list(found) == list(example)
        assert found["tokens"].equal(TOKENS)
        assert found["mask"].equal(MASK)


def test_what_is_no_batch_is_kept_as_it_is() -> None:
    """A mask for all inputs and a number are not joined with those of the next batch."""

    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor, scale: float) -> Tensor:
            return x * mask * scale

    example = (torch.zeros(4, 6), torch.ones(6), 1.0)
    mask = torch.arange(6.0)
    batches = [(X[:10], mask, 2.0), (X[10:], mask, 2.0)]
    x, found, scale = read_probe(batches, Masked(), example)
    assert x.equal(X)
    assert found.equal(mask)
    assert scale == 2.0


def test_no_more_is_read_than_is_used() -> None:
    asked = []

    def batches() -> Iterator[Tensor]:
        for batch in X.split(4):
            asked.append(len(batch))
            yield batch

    (found,) = read_probe(batches(), MODEL, EXAMPLE, limit=10)
    assert found.equal(X[:10])
    assert sum(asked) == 12


NAN = torch.where(torch.arange(6) == 2, torch.nan, X)


@pytest.mark.parametrize(
    ("probe", "told"),
    [
        (3, "found int, expected a tensor, a tuple"),
        ("inputs.npy", "found str, expected a tensor"),
        ([], "found no inputs"),
        (X[:0], "found no inputs"),
        ([{}], "found nothing, expected inputs by the names input"),
        (X.numpy(), "found ndarray, expected tensors; torch.from_numpy"),
        ([["a"]], "found str, expected tensors"),
        (X[:, :5], r"found shape \(20, 5\), expected \(inputs, 6\)"),
        (TensorDataset(X, Y), "found TensorDataset, expected.*wrap a data set in a DataLoader"),
        (list(TensorDataset(X, Y)), r"found shape \(6,\).*Wrap it in a DataLoader"),
        ((X * 255).byte(), "found torch.uint8, expected torch.float32.*as in training"),
        (NAN, "found NaN"),
        (torch.where(torch.arange(6) == 2, torch.inf, X), "found infinite values"),
        (torch.where(torch.arange(6) == 2, -torch.inf, X), "found infinite values"),
        (torch.ones(20, 6), "all the same"),
        (X[:1].expand(20, 6), "all the same"),
        (torch.zeros(1, 6), "all the same"),
        ({"x": X}, "found x, expected inputs by the names input"),
    ],
)
def test_what_cannot_be_a_probe(probe: Any, told: str) -> None:
    with pytest.raises(InputError, match=f"probe: .*{told}"):
        read_probe(probe, MODEL, EXAMPLE)


def test_a_tensor_without_its_values_cannot_be_a_probe() -> None:
    """Made here: another test counts the tensors that are alive."""
    with pytest.raises(InputError, match=r"found a tensor torch\.sparse_coo, expected a dense one"):
        read_probe(X.to_sparse(), MODEL, EXAMPLE)
    with pytest.raises(InputError, match="found a tensor of the meta device, which holds no"):
        read_probe(X.to("meta"), MODEL, EXAMPLE)


@pytest.mark.parametrize(
    ("probe", "told"),
    [
        (TOKENS, "found batches of 1, expected the network's 2 arguments"),
        ({"tokens": TOKENS}, "found tokens, expected inputs by the names tokens, mask"),
        ((TOKENS.float(), MASK), "found torch.float32, expected torch.int64"),
        ((TOKENS + 9, MASK), "does not run on 12 inputs"),
        ((TOKENS, [MASK]), "other kinds than the example inputs"),
    ],
)
def test_what_cannot_be_a_probe_of_several_inputs(probe: Any, told: str) -> None:
    with pytest.raises(InputError, match=f"probe: .*{told}"):
        read_probe(probe, Pair(), PAIR)


TOO_LARGE = 1e38 + 1e37 * X  # six of them are more than a float32 holds


def test_inputs_that_are_too_large_are_refused() -> None:
    with pytest.raises(InputError, match="returns NaN or infinite values"):
        read_probe(TOO_LARGE, adding(nn.Linear(6, 3)), EXAMPLE)


def test_inputs_that_a_later_layer_bounds_are_still_refused() -> None:
    """After tanh all numbers are finite, and the weights alone would be NaN."""
    one = X.clone()
    one[3, 0] = torch.inf
    bound = [adding(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2)]
    with pytest.raises(InputError, match="probe: found infinite values"):
        nafi.fuse(bound, EXAMPLE, probe=one)
    with pytest.raises(InputError, match=r"probe: 0\.weight gives NaN or infinite values"):
        nafi.fuse(bound, EXAMPLE, probe=TOO_LARGE)


def adding(first: nn.Linear, *others: nn.Module) -> nn.Module:
    """A network whose first layer adds its inputs up."""
    nn.init.ones_(first.weight)
    return nn.Sequential(first, *others)


def test_masks_and_masked_choices_may_be_minus_infinity() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x + mask

    mask = torch.where(torch.arange(6) < torch.arange(1, 21)[:, None] % 6 + 1, 0.0, -torch.inf)
    _, found = read_probe((X, mask), Masked(), (torch.zeros(2, 6), torch.zeros(2, 6)))
    assert found.equal(mask)


def test_few_inputs_are_warned_of() -> None:
    with pytest.warns(FusionWarning, match="found 3, too few"):
        read_probe(X[:3], MODEL, EXAMPLE)


def test_a_method_that_cannot_use_a_probe_refuses_it() -> None:
    models = [seeded(s, 6, 8, 3) for s in range(2)]
    for method in ("fedavg", "ensemble"):
        with pytest.raises(InputError, match=f"probe: method {method} does not use"):
            nafi.fuse(models, EXAMPLE, method, probe=X)
