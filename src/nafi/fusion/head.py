"""The last layer, solved from sums over all clients' labelled data.

Hides: batches, labels and how sums become weights. Promises: clients give sums only; the solution
depends on all samples together, not on how they fell to clients, but for one number, the scale,
which says how sure the network may be; only its last layer changes; sums of another are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nafi.errors import InputError, SpecError
from nafi.fusion.discriminant import Discriminant, choose_ridge, unit_of
from nafi.fusion.ensemble import EnsembleNetwork
from nafi.fusion.last_layer import Head, LastLayer, Seen, find_heads, fingerprint, members, watched
from nafi.fusion.networks import FusionWarning
from nafi.fusion.statistics import RIDGES, LayerStatistics
from nafi.graph import Product, copy_network, named_tensors

# Of an input with many outputs, such as the pixels of an image, at most so many are summed.
PLACES = 256
# A client's sums over fewer samples of a class come close to showing each of them.
FEW = 10
# Factors of log likelihoods that clients try, on so many samples at least and at most, held out in
# turn. With fewer, a client's own fit says nothing of the one to all clients' samples.
SCALES = tuple(2.0 ** (k / 8) for k in range(-32, 17))
_LEAST_TRIED, _MOST_TRIED, _FOLDS = 50, 4096, 5
# What torch's losses leave out.
_IGNORED = -100


@dataclass(frozen=True, eq=False)
class HeadStatistics:
    """Sums over labelled samples at the last layer of a network.

    layers: the last layer; of networks side by side, that of each: they are solved as one
    gram: (K, K) sum of h h^T of what the layers read; cross: (K, C) sum of h for each class
    class_counts: (C,) samples of each class; a network with one output has the classes 0 and 1
    losses: (len(SCALES),) of held-out samples, if log likelihoods are scaled so; zeros if unknown
    body: tells whether all other tensors of two networks are the same
    """

    layers: tuple[LastLayer, ...]
    body: str
    gram: Tensor
    cross: Tensor
    class_counts: Tensor
    losses: Tensor

    @property
    def samples(self) -> int:
        return int(self.class_counts.sum())

    @property
    def tensor_names(self) -> list[str]:
        """The tensors that are solved from them."""
        parts = [name for layer in self.layers for name in (layer.weight, layer.bias)]
        return [name for name in parts if name is not None]

    @property
    def sums(self) -> LayerStatistics:
        """Of a layer whose outputs are to be one for the sample's class and zero for others."""
        counts = self.class_counts[None]
        inputs = self.cross.sum(dim=1)[None]
        return LayerStatistics(
            self.gram[None], self.cross[None], inputs, counts, counts, counts.sum(dim=1)
        )

    def is_of_same(self, other: HeadStatistics) -> bool:
        """Whether both are of one network."""
        ours, theirs = ((s.layers, s.body, s.cross.shape) for s in (self, other))
        return ours == theirs

    def __add__(self, other: HeadStatistics) -> HeadStatistics:
        if not self.is_of_same(other):
            raise InputError("statistics of different networks cannot be added")
        return HeadStatistics(
            self.layers,
            self.body,
            self.gram + other.gram,
            self.cross + other.cross,
            self.class_counts + other.class_counts,
            self.losses + other.losses,
        )


# ------------------------------------------------------------------------------ a client


def statistics(
    model: nn.Module, batches: Iterable[Any], *, labels: bool | str = True
) -> HeadStatistics:
    """Sums of a client's labelled data, from which `nafi.solve_head` solves the last layer.

    batches: tuples (inputs, ..., labels) as a DataLoader gives, or dicts of inputs and labels
    labels: the name of the labels in dicts; True for "labels"

    Labels are classes, one for each output of the last layer; -100 for those to leave out. For a
    network with one output they are 0 or 1.
    """
    if labels is False:
        raise InputError("labels: the last layer is solved from labels, so there must be some")
    key = labels if isinstance(labels, str) else "labels"
    heads: list[Head] = []
    parts: list[HeadStatistics] = []
    tried = _Tried()
    networks = members(model)
    for number, batch in enumerate(batches):
        inputs, wanted = _inputs_and_labels(batch, key)
        heads = heads or find_heads(model, inputs)
        rows = [
            _labelled_rows(network, head, inputs, wanted, number)
            for (_, network), head in zip(networks, heads, strict=True)
        ]
        read, targets = torch.cat([each for each, _ in rows], dim=1), rows[0][1]
        tried.add(read, targets)
        pairs = zip(networks, heads, strict=True)
        layers = tuple(head.layer.within(path) for (path, _), head in pairs)
        parts = [reduce(add, [*parts, _sums(layers, read, targets)])]
    if not parts or not parts[0].samples:
        raise InputError("statistics: found no batch with labels, expected (inputs, labels)")
    _warn_of_few(parts[0])
    body = fingerprint(model, parts[0].layers)
    return replace(parts[0], body=body, losses=tried.losses())


def empty_head(model: nn.Module, inputs: Any) -> HeadStatistics:
    """Sums over no samples; inputs: arguments of the network, to find its last layer by."""
    heads, networks = find_heads(model, inputs), members(model)
    layers = tuple(head.layer.within(path) for (path, _), head in zip(networks, heads, strict=True))
    tensors = named_tensors(model)
    weights = [tensors[layer.weight].movedim(layer.axis, 0).flatten(1) for layer in layers]
    reads, outputs = sum(w.shape[1] for w in weights), len(weights[0])
    nothing = torch.zeros(0, reads, dtype=torch.float64)
    no_labels = torch.zeros(0, max(outputs, 2), dtype=torch.float64)
    return replace(_sums(layers, nothing, no_labels), body=fingerprint(model, layers))


def _sums(layers: tuple[LastLayer, ...], read: Tensor, targets: Tensor) -> HeadStatistics:
    """read: (M, K) what the layers read; targets: (M, C) one-hot."""
    gram, cross = read.mT @ read, read.mT @ targets
    unknown = torch.zeros(len(SCALES), dtype=torch.float64)
    return HeadStatistics(layers, "", gram, cross, targets.sum(dim=0), unknown)


def _warn_of_few(total: HeadStatistics) -> None:
    few = {k: int(n) for k, n in enumerate(total.class_counts.tolist()) if 0 < n < FEW}
    if few:
        counts = ", ".join(f"{n} of class {k}" for k, n in few.items())
        warnings.warn(
            f"the sums are over few samples ({counts}): whoever reads them learns the mean of what "
            "the last layer reads for those; leave such classes out (-100) if that is too much",
            FusionWarning,
            stacklevel=3,
        )


def _inputs_and_labels(batch: Any, key: str) -> tuple[Any, Tensor]:
    if isinstance(batch, Mapping) and key in batch:
        inputs: Any = {name: value for name, value in batch.items() if name != key}
        labels = batch[key]
    elif isinstance(batch, list | tuple) and len(batch) > 1:
        inputs, labels = tuple(batch[:-1]), batch[-1]
    else:
        raise InputError(
            f"a batch is {type(batch).__name__}: expected (inputs, labels), or a dict with {key!r}"
        )
    try:
        return inputs, torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"labels: found {type(labels).__name__}, expected a tensor") from None


def _labelled_rows(
    model: nn.Module, head: Head, inputs: Any, labels: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """What the last layer reads, (M, K), and what it should say, (M, C) one-hot."""
    found: list[Seen] = []
    most = PLACES * (len(labels) if labels.ndim else 1)

    def visit(product: Product) -> None:
        if product.name == head.layer.weight:
            found.append(Seen.of(product, most, seed))

    outputs, _ = watched(model, inputs, visit)
    if len(found) != 1 or not head.makes(named_tensors(model), found[0], outputs):
        raise SpecError(
            f"{head.layer.weight} does not only make the outputs of the network, or not for every "
            "batch: it cannot be solved"
        )
    classes = _classes(head, outputs, labels)[found[0].rows]
    kept = classes != _IGNORED
    read = found[0].read.cpu().double()[kept]
    return read, F.one_hot(classes[kept], head.classes(outputs)).double()


def _classes(head: Head, outputs: Tensor, labels: Tensor) -> Tensor:
    """(places,) the class of each of the layer's outputs."""
    expected, classes = head.by_class(outputs).shape[:-1], head.classes(outputs)
    if _sizes(labels.shape) != _sizes(expected):
        raise InputError(
            f"labels: found shape {tuple(labels.shape)}, expected {tuple(expected)}: a class for "
            f"each of the outputs, of shape {tuple(outputs.shape)}"
        )
    flat = labels.detach().cpu().flatten()
    whole = flat.long()
    fits = ((whole >= 0) & (whole < classes)) | (whole == _IGNORED)
    if not bool((fits & (whole == flat)).all()):
        wrong = flat[~(fits & (whole == flat))][0].item()
        raise InputError(
            f"labels: found {wrong}, expected whole numbers from 0 to {classes - 1}, or -100 for "
            "those to leave out"
        )
    return whole


def _sizes(shape: Sequence[int]) -> list[int]:
    """Without axes of one place, which masks have or do not have."""
    return [size for size in shape if size != 1]


class _Tried:
    """Some of a client's samples, on which scales are tried; all are as likely to be among them."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self.samples = 0

    def add(self, read: Tensor, targets: Tensor) -> None:
        self.parts.append((torch.rand(len(read), generator=self.generator), read, targets))
        self.samples += len(read)
        if self.samples > 2 * _MOST_TRIED:  # not at every batch: it copies all that is kept
            self._choose()

    def _choose(self) -> tuple[Tensor, Tensor]:
        """What is read, and targets, of the samples with the lowest numbers; forget the others."""
        drawn, read, targets = (torch.cat(parts) for parts in zip(*self.parts, strict=True))
        kept = drawn.argsort(stable=True)[:_MOST_TRIED]
        self.parts = [(drawn[kept], read[kept], targets[kept])]
        self.samples = len(kept)
        return read[kept], targets[kept]

    def losses(self) -> Tensor:
        """(len(SCALES),) each part judged by what the client's other parts make of it."""
        read, targets = self._choose()
        if len(read) < _LEAST_TRIED or int((targets.sum(dim=0) > 0).sum()) < 2:
            return torch.zeros(len(SCALES), dtype=torch.float64)
        parts = list(zip(read.chunk(_FOLDS), targets.chunk(_FOLDS), strict=True))
        sums = [LayerStatistics.of(read[None], targets[None]) for read, targets in parts]
        ridge = choose_ridge(reduce(add, sums))
        total = torch.zeros(len(SCALES), dtype=torch.float64)
        for held, (read, targets) in enumerate(parts):
            fit = Discriminant.of(reduce(add, sums[:held] + sums[held + 1 :]), ridge)
            found = fit.likelihoods(read)
            total += torch.stack(
                [-((s * found + fit.priors).log_softmax(1) * targets).sum() for s in SCALES]
            )
        return total


@dataclass(frozen=True, eq=False)
class HeadFit:
    """A solved last layer: weights (K, C) and bias (C,) of log odds, and how they were found.

    scale: of log likelihoods, which are too sure of themselves where inputs are not Gaussian
    """

    weights: Tensor
    bias: Tensor
    ridge: float
    scale: float
    samples: int


def fit_head(statistics: HeadStatistics) -> HeadFit:
    """The discriminant of all samples, in units that make a softmax mean what it says."""
    sums = statistics.sums
    ridge = choose_ridge(sums)
    scale = 1.0
    if bool(statistics.losses.any()):
        scale = SCALES[int(statistics.losses.argmin())]
    else:
        warnings.warn(
            "no client has several classes and enough samples to say how sure the network may be: "
            "its probabilities may be too near to 0 and 1",
            FusionWarning,
            stacklevel=3,
        )
    weights, bias = Discriminant.of(sums, ridge).affine(scale)
    if all(layer.bias is None for layer in statistics.layers):
        weights = weights + _nearest_to_one(sums)[:, None] * bias
    return HeadFit(weights, bias, ridge, scale, statistics.samples)


def _nearest_to_one(sums: LayerStatistics) -> Tensor:
    """(K,) weights whose output is as nearly one as it can be: they stand for a bias."""
    gram = sums.gram[0].clone()
    gram.diagonal().add_(min(RIDGES) * unit_of(sums))
    nearest: Tensor = torch.linalg.solve(gram, sums.sums[0])
    return nearest


def solve_head(model: nn.Module, statistics: Sequence[HeadStatistics]) -> nn.Module:
    """A copy of the network with the last layer that fits the data of all clients.

    statistics: what `nafi.statistics` gave each client for this network
    """
    total = add_statistics(statistics)
    check_statistics(model, total)
    fit = _finite_fit(total)
    solved = copy_network(model)
    _write_head(solved, total.layers, fit)
    return solved


def _write_head(model: nn.Module, layers: Sequence[LastLayer], fit: HeadFit) -> None:
    """Share the weights out among the last layers; the first that has a bias gets all of it."""
    tensors, start, bias = named_tensors(model), 0, fit.bias
    for layer in layers:
        weight = tensors[layer.weight].detach().movedim(layer.axis, 0)
        inputs = weight.numel() // len(weight)
        weights = fit.weights[start : start + inputs].mT
        start += inputs
        weight.copy_(_odds(weights, len(weight)).reshape(weight.shape))
        if layer.bias is not None:
            tensors[layer.bias].detach().copy_(_odds(bias, len(weight)))
            bias = torch.zeros_like(bias)
    if isinstance(model, EnsembleNetwork):
        for shares in (model.shares, model.class_shares):
            if shares is not None:
                shares.fill_(1.0)


def _odds(values: Tensor, outputs: int) -> Tensor:
    """By class; for a network with one output those of 1 against 0."""
    return values[1:] - values[:1] if outputs == 1 else values


def _finite_fit(statistics: HeadStatistics) -> HeadFit:
    try:
        fit = fit_head(statistics)
    except RuntimeError:  # torch finds no solution
        fit = None
    if fit is None or not all(bool(t.float().isfinite().all()) for t in (fit.weights, fit.bias)):
        raise InputError(
            "the statistics give no finite weights: some client's sums are absurdly large or small"
        )
    return fit


def add_statistics(statistics: Sequence[HeadStatistics]) -> HeadStatistics:
    """Of all clients together."""
    if isinstance(statistics, HeadStatistics):
        return statistics
    if not statistics or not all(isinstance(each, HeadStatistics) for each in statistics):
        raise InputError("statistics: expected a list of what nafi.statistics gives")
    return reduce(add, statistics)


def check_statistics(model: nn.Module, statistics: HeadStatistics) -> None:
    """Refuse sums that are not of this network."""
    tensors, layers = named_tensors(model), statistics.layers
    inputs, classes = statistics.cross.shape
    found = [_inputs_of(tensors, layer, classes) for layer in layers]
    if None in found or sum(filter(None, found)) != inputs:
        named = ", ".join(layer.weight for layer in layers)
        raise InputError(
            f"the statistics are for {named} of {inputs} inputs and {classes} classes, which "
            f"{type(model).__name__} does not have"
        )
    if fingerprint(model, layers) != statistics.body:
        raise InputError(
            "the statistics are of another network: every client must run nafi.statistics on the "
            "network whose last layer is solved"
        )


def _inputs_of(tensors: Mapping[str, Tensor], layer: LastLayer, classes: int) -> int | None:
    """How many numbers a last layer reads; None if there is none like it."""
    weight = tensors.get(layer.weight)
    bias = None if layer.bias is None else tensors.get(layer.bias)
    widths = (1, 2) if classes == 2 else (classes,)
    if weight is None or layer.axis >= weight.ndim or weight.shape[layer.axis] not in widths:
        return None
    outputs = weight.shape[layer.axis]
    fits = layer.bias is None or _shape(bias) == (outputs,)
    return weight.numel() // outputs if fits else None


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)
