"""Sums at the layers of a network, over batches that need not be kept.

Hides: where layers are, and which places of large inputs are looked at. Promises: sums of batches
add up, over clients too; two networks of one form are compared at the same inputs and places.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Hashable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import InputError, few
from nafi.fusion.held_out import held_out, numbers_of_rows, row_stretches
from nafi.fusion.probe import batch_size
from nafi.fusion.recording import Use, unlike_rows, written_axes
from nafi.fusion.statistics import LayerStatistics
from nafi.graph import (
    Axis,
    Inputs,
    ModelSpec,
    Placements,
    Product,
    SeenEnough,
    ValueReads,
    copy_network,
    lift_axes,
    named_tensors,
    sample_rows,
    watch,
)

# Of an input with many places, as an image has, so many are summed.
PLACES = 64


@dataclass(frozen=True, eq=False)
class Targets:
    """What layers are to write: those of another network of the same form.

    model: that network; spec: of both
    owned: weight -> (B, N) whether an output is one of its own; others are left as they are
    """

    model: nn.Module
    spec: ModelSpec
    owned: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class LayerParts:
    """Sums over most inputs, and over those that are held out to choose a ridge by."""

    rest: LayerStatistics
    held_out: LayerStatistics

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor, held: Tensor) -> LayerParts:
        """inputs: (B, M, K); targets: (B, M, N); held: (M,) the rows that are held out."""
        parts = (LayerStatistics.of(inputs[:, rows], targets[:, rows]) for rows in (~held, held))
        return cls(*parts)

    @property
    def whole(self) -> LayerStatistics:
        return self.rest + self.held_out

    def __add__(self, other: LayerParts) -> LayerParts:
        return LayerParts(self.rest + other.rest, self.held_out + other.held_out)


def layer_statistics(
    model: nn.Module,
    batches: Iterable[Inputs],
    weights: Collection[str],
    targets: Targets | None = None,
) -> dict[str, LayerParts]:
    """Sums over what layers read; with targets also of what they lack, `z - (h W + b)`.

    batches: arguments of the network; weights: those whose layers are summed

    Cost: one run of each network, and M K (K + N) for a layer with K inputs, N outputs and M
    inputs and places. Where no code looks at values, batches of the shapes of an earlier one run
    up to the last of these layers only. With targets, two runs on two inputs for all such batches.
    """
    sums: dict[str, LayerParts] = {}
    # By the form of a batch: after how many visits to end, and whose rows are whose.
    last: dict[Hashable, int | None] = {}
    stretches: dict[Hashable, Mapping[Use, int]] = {}
    before = 0
    for number, batch in enumerate(batches):
        form, count = _form(batch), batch_size(batch)
        if form not in stretches:
            stretches[form] = {} if targets is None else row_stretches(targets.model, batch)
        run = _Run(model, weights, number, before, count, stretches[form], targets, last.get(form))
        before += count
        reads = ValueReads(model)
        with nullcontext() if form in last else reads:
            if targets is not None:
                watch(targets.model, batch, run.visit_targets)
            watch(model, batch, run.visit)
        last.setdefault(form, None if reads.seen else run.visits_if_once)
        for name, part in run.sums.items():
            sums[name] = sums[name] + part if name in sums else part
    missing = [name for name in weights if name not in sums]
    if missing:
        raise InputError(f"no layer multiplies its inputs with {few(missing)}")
    return sums


def layer_shapes(
    model: nn.Module, inputs: Inputs, weights: Collection[str]
) -> dict[str, tuple[int, int, int]]:
    """Weight -> (B, K, N): blocks, and the numbers that its layer reads and writes in each."""
    shapes: dict[str, tuple[int, int, int]] = {}

    def visit(product: Product) -> None:
        if product.name in weights:
            blocks, reads, writes = product.weights.shape
            shapes[product.name] = blocks, reads, writes

    watch(model, inputs, visit)
    return shapes


# The axes that a layer writes along, and (B, N) the place of each of its outputs.
Written = tuple[tuple[Axis, ...], Tensor]


def refittable(model: nn.Module, spec: ModelSpec, inputs: Inputs) -> dict[str, Written]:
    """The weights that can be fitted to outputs, in the order in which they are first used.

    inputs: any on which the network runs; their numbers must differ. The others are used in another
    way, too, or their outputs are not one to one with neurons. Cost: three runs.
    """
    written: dict[str, Written | None] = {}

    def visit(product: Product) -> None:
        if product.name in spec.tensors and product.call == 0:
            written[product.name] = written_axes(product, spec)

    others = watch(model, inputs, visit)
    along = unlike_rows(model, spec, inputs)
    return {
        name: where
        for name, where in written.items()
        if where is not None and name not in others and name not in along
    }


def recurrent_weights(model: nn.Module, inputs: Inputs) -> frozenset[str]:
    """The weights that read what they made themselves: another weight there, and they read others.

    Cost: a run for each weight that is used several times, and one more.
    """
    seen = _read_again(model, inputs)
    found = set()
    for name, read in seen.items():
        other = copy_network(model)
        with torch.no_grad():
            named_tensors(other)[name].add_(1.0)
        if not torch.equal(_read_again(other, inputs)[name], read):
            found.add(name)
    return frozenset(found)


def _read_again(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Weight -> what it read when it was last used, if that was not the first time."""
    read: dict[str, Tensor] = {}

    def visit(product: Product) -> None:
        if product.call:
            read[product.name] = product.inputs(torch.arange(product.places)).clone()

    watch(model, inputs, visit)
    return read


def owned_outputs(where: Written, spec: ModelSpec, places: Placements) -> Tensor:
    """(B, N) whether an output of a layer is one of a client's own neurons.

    spec: of the client; places: where its neurons went
    """
    axes, positions = where
    widths = [sum(segment.size(spec.widths) for segment in axis) for axis in axes]
    lifted = lift_axes(torch.ones(1, *widths), axes, spec, places)
    return lifted.flatten()[positions] > 0


def layer_weights(model: nn.Module, inputs: Inputs, name: str) -> Tensor:
    """(B, K, N) what a layer multiplies its inputs with, in double precision."""
    found: list[Tensor] = []

    def visit(product: Product) -> None:
        if product.name == name and not product.call:
            found.append(product.weights.double())

    watch(model, inputs, visit)
    return found[0]


def add_to_layer(
    model: nn.Module, spec: ModelSpec, inputs: Inputs, name: str, change: Tensor, shifts: Tensor
) -> tuple[Tensor, Tensor]:
    """Add to a layer's weights (B, K, N) and bias (B, N), in place; both as they are then."""
    added: list[tuple[Tensor, Tensor]] = []

    def visit(product: Product) -> None:
        if product.name != name or product.call:
            return
        weights = product.weights.double() + change
        product.replace(weights.to(product.weights.dtype))
        bias, where = spec.tensors[name].bias, written_axes(product, spec)
        if bias is None or where is None:
            added.append((weights, torch.zeros_like(shifts)))
            return
        vector = named_tensors(model)[bias].detach().view(-1)
        vector[where[1].flatten()] += shifts.flatten().to(vector.dtype)
        added.append((weights, vector[where[1]].double()))

    watch(model, inputs, visit)
    return added[0]


@dataclass
class _Run:
    """One batch through a network, and before that through the one with the targets.

    before, count: inputs in earlier batches and in this one; stretches: from `row_stretches`
    expected: how often the layers run, if a batch of this form has told; the run ends after that
    """

    model: nn.Module
    weights: Collection[str]
    number: int
    before: int
    count: int
    stretches: Mapping[Use, int]
    targets: Targets | None
    expected: int | None
    wanted: dict[Use, Tensor] = field(default_factory=dict)
    sums: dict[str, LayerParts] = field(default_factory=dict)
    visits: int = 0

    @property
    def visits_if_once(self) -> int | None:
        """How often the layers ran; None where one did not run exactly once, as in a loop."""
        return self.visits if self.visits == len(self.sums) == len(self.weights) else None

    def visit_targets(self, product: Product) -> None:
        assert self.targets is not None
        if product.name in self.weights:
            inputs = product.inputs(self._rows(product))
            made = _affine(product, inputs, self.targets.model, self.targets.spec)
            self.wanted[product.name, product.call] = made
            if len(self.wanted) == self.expected:
                raise SeenEnough

    def visit(self, product: Product) -> None:
        name = product.name
        if name not in self.weights:
            return
        rows, use = self._rows(product), (name, product.call)
        inputs = product.inputs(rows)
        lacking = inputs[:, :, :0]
        if self.targets is not None:
            made = _affine(product, inputs, self.model, self.targets.spec)
            owned = self.targets.owned[name][:, None]
            lacking = (self.wanted[use] - made) * owned
        numbers = numbers_of_rows(rows, product.places, self.count, self.stretches.get(use))
        part = LayerParts.of(inputs, lacking, held_out(self.before + numbers))
        self.sums[name] = self.sums[name] + part if name in self.sums else part
        self.visits += 1
        if self.visits == self.expected:
            raise SeenEnough

    def _rows(self, product: Product) -> Tensor:
        """The places to look at, the same in all networks of a form."""
        seed = zlib.crc32(f"{product.name} {product.call} {self.number}".encode())
        return sample_rows(product.places, PLACES * self.count, seed)


def _form(batch: Inputs) -> Hashable:
    """The structure of a batch and the shapes in it.

    A network that looks at nothing else runs the same operations on all batches of one form.
    """
    leaves, structure = pytree.tree_flatten(batch)
    return str(structure), tuple(tuple(x.shape) for x in leaves if isinstance(x, Tensor))


def _affine(product: Product, inputs: Tensor, model: nn.Module, spec: ModelSpec) -> Tensor:
    """(B, M, N) what a layer writes, with its bias."""
    made = inputs @ product.weights
    bias = spec.tensors[product.name].bias
    where = None if bias is None else written_axes(product, spec)
    if bias is None or where is None:
        return made
    return made + named_tensors(model)[bias].detach().flatten()[where[1]][:, None]
