"""What a client's network does on a probe.

Hides: where in a network its neurons can be watched, and that only some places are kept.
Promises: what every layer reads and writes, its neurons along named axes; the rows stand for the
same inputs and places in the recordings of all clients.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import InputError
from nafi.graph import (
    Axis,
    Convolution,
    Inputs,
    ModelSpec,
    Positions,
    Product,
    call,
    evaluating,
    lift_axes,
    permute,
    random_permutations,
    sample_rows,
    watch,
)

# Inputs and places at which a layer is watched: what it writes, for a refit, and what it reads, to
# tell neurons apart.
WRITTEN = 8192
READ = 4096
_TOLERANCE = 1e-3

# A weight, and how often it was multiplied before in the same run.
Use = tuple[str, int]


@dataclass(frozen=True, eq=False)
class Activity:
    """values: (M, ...) what neurons do at M places, with a dimension for each of the axes."""

    axes: tuple[Axis, ...]
    values: Tensor


@dataclass(eq=False)
class Recording:
    """One network on some inputs.

    written: what layers write, without their biases; read: what they read when first used
    places: how many rows there are; uses: how often a weight is multiplied
    kept: weight -> why it cannot be refitted
    """

    written: dict[Use, Activity] = field(default_factory=dict)
    read: dict[str, Activity] = field(default_factory=dict)
    places: dict[Use, int] = field(default_factory=dict)
    uses: Counter[str] = field(default_factory=Counter)
    kept: dict[str, str] = field(default_factory=dict)

    def add(self, product: Product, spec: ModelSpec) -> None:
        """Keep what a product reads and writes."""
        use = (product.name, product.call)
        self.uses[product.name] += 1
        self.places[use] = product.places
        written = _written(product, spec)
        if written is not None and not bool(torch.isfinite(written.values).all()):
            raise InputError(
                f"probe: {product.name} gives NaN or infinite values on these inputs; are they "
                "prepared as in training?"
            )
        if written is None:
            self.kept[product.name] = "its outputs are not one to one with its neurons"
        else:
            self.written[use] = written
        read = _read(product, spec) if product.call == 0 else None
        if read is not None:
            self.read[product.name] = read


def record(model: nn.Module, spec: ModelSpec, probe: Inputs) -> Recording:
    """Run a network once and keep what its layers do at some places.

    Memory: 4 bytes for each of `WRITTEN` outputs and `READ` inputs of every neuron.
    """
    recording = Recording()

    def visit(product: Product) -> None:
        if product.name in spec.tensors:
            recording.add(product, spec)

    for name in watch(model, probe, visit) & set(recording.uses):
        recording.kept[name] = "it is used in another way, too"
    return recording


def rows_of(product: Product) -> Tensor:
    """The places at which a product is watched, the same in all networks; in order."""
    seed = zlib.crc32(f"{product.name} {product.call}".encode())
    return sample_rows(product.places, WRITTEN, seed)


def written_axes(product: Product, spec: ModelSpec) -> tuple[tuple[Axis, ...], Tensor] | None:
    """What the outputs of a product lie along, and (B, N) the place of each; None if unknown."""
    meaning = spec.tensors[product.name]
    if isinstance(product, Convolution) and meaning.bias is not None:
        axes = spec.tensors[meaning.bias].axes
    elif isinstance(product, Convolution):
        if product.output_axis is None:
            return None
        axes = (meaning.axes[product.output_axis],)
    else:
        axes = tuple(axis for i, axis in enumerate(meaning.axes) if i not in meaning.reads)
    index = product.outputs([i for i in range(len(meaning.axes)) if i not in meaning.reads])
    return None if index is None else (axes, index)


def sole_writers(written: Mapping[str, Sequence[Axis]]) -> frozenset[str]:
    """The weights that make neurons which no other weight adds to.

    written: weight -> the axes that its layer writes along. What a network returns is no neuron; a
    residual stream and the gates of a recurrent layer have several writers.
    """
    groups = {
        name: {group for axis in axes for segment in axis for group in segment.groups}
        for name, axes in written.items()
    }
    writers = Counter(group for of_weight in groups.values() for group in of_weight)
    return frozenset(
        name
        for name, of_weight in groups.items()
        if of_weight and all(writers[g] == 1 for g in of_weight)
    )


def _written(product: Product, spec: ModelSpec) -> Activity | None:
    where = written_axes(product, spec)
    if where is None:
        return None
    axes, index = where
    outputs = product.inputs(rows_of(product)) @ product.weights
    return _activity(outputs.movedim(0, 1).flatten(1), index.flatten(), axes, spec)


def _read(product: Product, spec: ModelSpec) -> Activity | None:
    reads = spec.tensors[product.name].reads
    index = product.neurons(reads) if reads else None
    if index is None:
        return None
    seed = zlib.crc32(product.name.encode())
    responses = product.responses(lambda places: sample_rows(places, READ, seed))
    axes = tuple(spec.tensors[product.name].axes[i] for i in reads)
    return _activity(responses.T, index, axes, spec)


def _activity(values: Tensor, index: Tensor, axes: Sequence[Axis], spec: ModelSpec) -> Activity:
    """(M, ...) from (M, C) and the places of its columns; what is nowhere is zero."""
    shape = torch.Size(sum(segment.size(spec.widths) for segment in axis) for axis in axes)
    full = values.new_zeros(len(values), shape.numel())
    full[:, index] = values
    return Activity(tuple(axes), full.reshape(len(values), *shape))


def unlike_rows(model: nn.Module, spec: ModelSpec, probe: Inputs) -> dict[str, str]:
    """The weights whose outputs do not follow when the neurons of a network change their order.

    A layer that runs along neurons, as one that mixes tokens runs along channels, has rows that
    mean something else in every client. Cost: two runs on the first two inputs.
    """
    orders = random_permutations(spec, torch.Generator().manual_seed(0))
    places = {
        name: Positions(order.argsort(dim=-1), spec.groups[name].width)
        for name, order in orders.items()
    }
    few = _runnable(model, probe)
    plain, permuted = (record(m, spec, few) for m in (model, permute(model, spec, orders)))
    return {
        name: "it runs along neurons"
        for (name, call), written in plain.written.items()
        if not _close(
            permuted.written[name, call].values,
            lift_axes(written.values, written.axes, spec, places),
        )
    }


def _runnable(model: nn.Module, probe: Inputs) -> Inputs:
    """Two inputs; all of them where these are not independent, as the nodes of a graph are not."""
    few = chosen_inputs(probe, slice(2))
    try:
        with evaluating(model):
            call(model, few)
    except (IndexError, RuntimeError, ValueError):
        return probe
    return few


def chosen_inputs(inputs: Inputs, chosen: Tensor | Sequence[int] | slice) -> Inputs:
    """Some inputs of a batch; what is not of the batch, as a mask that holds for all, stays."""
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    size = next((len(leaf) for leaf in leaves if leaf.ndim), 0)

    def choose(leaf: object) -> object:
        batched = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == size
        return leaf[chosen] if batched else leaf  # type: ignore[index]

    part: Inputs = pytree.tree_map(choose, inputs)
    return part


def _close(values: Tensor, expected: Tensor) -> bool:
    if not values.numel():
        return True
    return bool((values - expected).abs().max() <= _TOLERANCE * expected.abs().max())
