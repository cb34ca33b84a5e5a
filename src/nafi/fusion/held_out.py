"""Which inputs judge what is fitted to the others.

Hides: the rule, and which input a row of a layer is of: some layers have the steps of sequences
before the inputs. Promises: one of every four inputs that follow each other, the same ones for all
layers and networks; evenly spread over inputs that are sorted, and over those whose classes come in
turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor, nn

from nafi.fusion.recording import Use, chosen_inputs
from nafi.graph import Inputs, Product, watch

_EVERY = 4
_GOLDEN = (sqrt(5) - 1) / 2
# What a row holds of two inputs differs by more than this share of it, or it is rounding.
_TOLERANCE = 1e-4


def held_out(numbers: Tensor) -> Tensor:
    """Whether the inputs of these numbers are held out; of two inputs, the second is.

    Which of four it is follows multiples of the golden section by squares, which have no period. A
    fixed place would meet the same classes again and again where these come in turn.
    """
    square = (numbers // _EVERY).double().square()
    place = _EVERY * ((_GOLDEN * square + 1 / _EVERY) % 1)
    return numbers % _EVERY == place.long()


def numbers_of_rows(rows: Tensor, places: int, count: int, stretch: int | None) -> Tensor:
    """The number of the input that each of some rows of a layer is of.

    places: how many rows there are; count: how many inputs
    stretch: how many rows of an input follow each other, from `row_stretches`; None where that is
        not known, and rows are taken to be in the order of the inputs
    """
    if stretch is None or places % (count * stretch):
        return rows * count // places
    return rows // stretch % count


def row_stretches(model: nn.Module, inputs: Inputs) -> dict[Use, int]:
    """For each use of a weight, how many rows of an input follow each other.

    All that it has, or one where steps come before inputs. Uses of which it cannot be told are left
    out. Cost: two runs on two inputs, the first and the last: once more with the last in the place
    of the first, whose rows are those that change.
    """
    try:
        one, two = (_read(model, chosen_inputs(inputs, pair)) for pair in ([0, -1], [-1, -1]))
    except (IndexError, RuntimeError, ValueError):  # as of the nodes of a graph
        return {}
    return {
        use: stretch
        for use in one.keys() & two.keys()
        if (stretch := _stretch(one[use], two[use])) is not None
    }


def _read(model: nn.Module, inputs: Inputs) -> Mapping[Use, tuple[int, Tensor]]:
    """For each use of a weight, its rows, and (2, M) sums over what it reads at each place."""
    read: dict[Use, tuple[int, Tensor]] = {}

    def visit(product: Product) -> None:
        values = product.responses(torch.arange)
        mixed = torch.arange(len(values)).cos().to(values) @ values
        sums = torch.stack([mixed, values.norm(dim=0)])
        read[product.name, product.call] = product.places, sums

    watch(model, inputs, visit)
    return read


def _stretch(one: tuple[int, Tensor], two: tuple[int, Tensor]) -> int | None:
    """The most rows of the first of two inputs after which rows of the other may come."""
    (places, (mixed, size)), (_, (other, _)) = one, two
    if mixed.shape != other.shape or len(mixed) % 2:
        return None
    changed = (mixed - other).abs() > _TOLERANCE * size
    number, half = torch.arange(len(changed)), len(changed) // 2
    for length in range(half, 0, -1):
        # A convolution reads at other places than it writes.
        fits = half % length == 0 and length * places % len(changed) == 0
        if fits and not bool(changed[number // length % 2 == 1].any()):
            return length * places // len(changed) if bool(changed.any()) else None
    return None
