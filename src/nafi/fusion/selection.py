"""Which neurons of a network matter most: an order of each group.

Hides: that a layer reads a neuron at several places, and that several layers may read it.
Promises: the order in which neurons are worth keeping and what is lost with any number of them, so
that one order serves every budget. Only the weights and the second moments of what layers read on a
probe are used: the sums that clients could send.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nafi.fusion.statistics import LayerStatistics
from nafi.graph import Inputs, ModelSpec, Product, blocks, sample_rows, watch

# Inputs and places at which a layer is watched, and the most columns that a group may have in it:
# of those that read a neuron at more places, some places are looked at.
PLACES = 4096
COLUMNS = 4096
# In units of the mean diagonal of the second moments.
RIDGE = 1e-2
_SMALL = 1024


@dataclass(frozen=True, eq=False)
class NeuronOrder:
    """The neurons of a group, those first that are worth most.

    order: (J,) neurons
    lost: (J + 1,) with the first k of them: how much of what the layers above compute cannot be
        had from these, relative to its variance, summed over those layers; falls with k
    """

    order: Tensor
    lost: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Reader:
    """A layer that reads a group.

    gram: (J t, J t) second moments about the mean of the t columns of each neuron, neuron by neuron
    weights: (J t, N) what it multiplies them with
    variance: of all that the layer computes, summed over the N outputs and the samples of `gram`
    """

    gram: Tensor
    weights: Tensor
    variance: float


def order_neurons(readers: Sequence[Reader], width: int) -> NeuronOrder:
    """Greedy: the neuron that explains most of what the chosen ones leave unexplained comes next.

    Orthogonal matching pursuit on groups of columns: what a layer computes from the group is to be
    rebuilt, by least squares with a ridge, from the neurons that are kept.

    Cost for a layer with K = J t columns: K^3 in double precision.
    """
    pursuits = [_Pursuit(reader, width) for reader in readers if reader.variance > 0]
    with _few_threads(max((len(pursuit.gram) for pursuit in pursuits), default=0)):
        return _pursue(pursuits, width)


def _pursue(pursuits: Sequence[_Pursuit], width: int) -> NeuronOrder:
    left = torch.ones(width, dtype=torch.bool)
    order: list[int] = []
    lost = [sum(pursuit.lost for pursuit in pursuits)]
    for _ in range(width):
        gains = torch.zeros(width, dtype=torch.float64)
        for pursuit in pursuits:
            gains += pursuit.gains()
        best = int(torch.where(left, gains, -1.0).argmax())
        left[best] = False
        for pursuit in pursuits:
            pursuit.choose(best)
        order.append(best)
        lost.append(min(lost[-1], sum(pursuit.lost for pursuit in pursuits)))
    return NeuronOrder(torch.tensor(order), tuple(lost))


@contextmanager
def _few_threads(columns: int) -> Iterator[None]:
    """One thread for small matrices: on a busy machine, threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if columns <= _SMALL else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Pursuit:
    """What is still unexplained of one layer; columns of chosen neurons are projected out."""

    def __init__(self, reader: Reader, width: int) -> None:
        self.width, self.variance = width, reader.variance
        self.cross = reader.gram @ reader.weights
        self.lost = max(float((reader.weights * self.cross).sum()) / self.variance, 0.0)
        self.gram = reader.gram.clone()
        diagonal = self.gram.diagonal()
        diagonal += RIDGE * diagonal.mean().clamp(min=torch.finfo(torch.float64).tiny)

    def gains(self) -> Tensor:
        """(J,) how much more each neuron would explain; nothing for those that were chosen."""
        self.factors = self._factors()
        each = self.cross.reshape(self.width, -1, self.cross.shape[1])
        solved: Tensor = torch.linalg.solve_triangular(self.factors, each, upper=False)
        return solved.square().sum(dim=(1, 2)) / self.variance

    def _factors(self) -> Tensor:
        """(J, t, t) Cholesky factors of the neurons' own moments."""
        size = len(self.gram) // self.width
        every = torch.arange(self.width)
        own = self.gram.reshape(self.width, size, self.width, size)[every, :, every]
        # A chosen neuron has nothing left; its own moments only have to be invertible.
        floor = own.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=1e-30)
        own = own + torch.diag_embed((1e-9 * floor)[:, None].expand(-1, size))
        factors: Tensor = torch.linalg.cholesky_ex(own).L
        return factors

    def choose(self, neuron: int) -> None:
        size = len(self.gram) // self.width
        rows = slice(neuron * size, (neuron + 1) * size)
        factor = self.factors[neuron]
        known = torch.linalg.solve_triangular(factor, self.gram[rows], upper=False)
        explained = torch.linalg.solve_triangular(factor, self.cross[rows], upper=False)
        self.lost = max(self.lost - float(explained.square().sum()) / self.variance, 0.0)
        self.cross -= known.mT @ explained
        self.gram -= known.mT @ known
        self.cross[rows] = 0.0
        self.gram[rows] = 0.0
        self.gram[:, rows] = 0.0
        self.gram.diagonal()[rows] = torch.finfo(torch.float64).tiny ** 0.5


def neuron_orders(
    model: nn.Module, spec: ModelSpec, probe: Inputs, names: Collection[str]
) -> dict[str, NeuronOrder]:
    """The orders of some groups of a network; those that no layer reads are left out.

    Cost: one run of the network, and `order_neurons` for each group. Memory: 8 K^2 bytes for
    every layer that reads K of these neurons' columns, K at most `COLUMNS`.
    """
    watched = _Watched(spec, names)
    watch(model, probe, watched.visit)
    return {
        name: order_neurons([seen.reader() for seen in readers.values()], spec.groups[name].width)
        for name, readers in watched.readers.items()
        if readers
    }


@dataclass
class _Seen:
    """What one layer reads of a group.

    columns: (J, t) of its inputs
    last: whether it makes outputs of the network
    """

    columns: Tensor
    weights: Tensor
    last: bool
    sums: LayerStatistics | None = None
    variance: float = 0.0

    def add(self, inputs: Tensor) -> None:
        """inputs: (M, K) of the whole layer. The variance of its outputs is summed beside them."""
        outputs = inputs @ self.weights
        chosen = inputs[:, self.columns.flatten()]
        # Moments only: what the layer makes of them follows from its weights.
        found = LayerStatistics.of(chosen[None], outputs[None, :, :0])
        spread = outputs.double().var(dim=0, correction=0).sum() * len(outputs)
        self.sums = found if self.sums is None else self.sums + found
        self.variance += float(spread)

    def reader(self) -> Reader:
        assert self.sums is not None
        own = self.weights[self.columns.flatten()].double()
        gram = self.sums.centred().gram[0]
        return (
            with_inputs(gram, own, self.variance) if self.last else Reader(gram, own, self.variance)
        )


def with_inputs(gram: Tensor, weights: Tensor, variance: float) -> Reader:
    """A layer that is to hand on what it reads besides what it computes, both counting the same.

    Of what the last layer reads, a network's few outputs need little; but the layer may be solved
    anew for all clients together, which needs what they do not have in common.
    """
    spread = float(gram.diagonal().sum())
    if not variance > 0 or not spread > 0:
        return Reader(gram, weights, 0.0)
    identity = torch.eye(len(gram), dtype=gram.dtype)
    return Reader(gram, torch.cat([weights / variance**0.5, identity / spread**0.5], dim=1), 1.0)


def _groups_read(
    product: Product, spec: ModelSpec, names: Collection[str]
) -> tuple[list[str], Tensor | None]:
    """Which of some groups a product reads, and where each of its inputs lies; None if nowhere."""
    meaning = spec.tensors.get(product.name)
    if meaning is None or product.weights.shape[0] > 1:
        return [], None
    groups = [group for group in meaning.groups_on(meaning.reads) if group in names]
    return groups, product.neurons(meaning.reads) if groups else None


def ordered_groups(
    model: nn.Module, spec: ModelSpec, inputs: Inputs, names: Collection[str]
) -> set[str]:
    """Those of some groups that `neuron_orders` has an order of. Cost: one run of the network."""
    found: set[str] = set()

    def visit(product: Product) -> None:
        groups, place = _groups_read(product, spec, names)
        found.update(groups if place is not None else ())

    watch(model, inputs, visit)
    return found


class _Watched:
    """Sees every layer that reads one of some groups; each use of a weight adds to its sums."""

    def __init__(self, spec: ModelSpec, names: Collection[str]) -> None:
        self.spec = spec
        self.readers: dict[str, dict[str, _Seen]] = {name: {} for name in names}

    def visit(self, product: Product) -> None:
        groups, place = _groups_read(product, self.spec, self.readers)
        if place is None:
            return
        meaning = self.spec.tensors[product.name]
        rows = sample_rows(product.places, PLACES, zlib.crc32(product.name.encode()))
        inputs = product.inputs(rows)[0]
        for group in groups:
            seen = self.readers[group].get(product.name)
            if seen is None:
                neuron = neurons_along(self.spec, product.name, group)[place]
                columns = _columns(neuron, self.spec.groups[group].width, inputs.shape[1])
                weights = product.weights[0].detach().clone()
                seen = _Seen(columns, weights, last=not meaning.rows)
                self.readers[group][product.name] = seen
            seen.add(inputs)


def neurons_along(spec: ModelSpec, tensor: str, group: str) -> Tensor:
    """(places,) the neuron of a group at each place along the axes that a tensor reads, or -1."""
    meaning = spec.tensors[tensor]
    axes = [meaning.axes[i] for i in meaning.reads]
    sizes = [sum(segment.size(spec.widths) for segment in axis) for axis in axes]
    found = torch.full(sizes, -1)
    for block in blocks(axes, spec.widths):
        if block.factors.count(group) != 1:
            continue
        form = [spec.widths[f] if isinstance(f, str) else f for f in block.factors]
        index = [1] * len(form)
        index[block.factors.index(group)] = -1
        neurons = torch.arange(spec.groups[group].width).reshape(index).expand(form)
        found[block.where] = neurons.reshape(block.size(spec.widths))
    return found.flatten()


def _columns(neuron: Tensor, width: int, inputs: int) -> Tensor:
    """(J, t) the columns of each neuron among the inputs of a layer, at most `COLUMNS` in all."""
    taps = inputs // len(neuron)
    owned = neuron.argsort(stable=True)[int((neuron < 0).sum()) :].reshape(width, -1, 1)
    columns = (owned * taps + torch.arange(taps)).flatten(1)
    step = -(-columns.numel() // COLUMNS)
    return columns[:, ::step]
