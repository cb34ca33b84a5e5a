"""Gains of normalisation, folded into the layers that read what is normalised.

Hides: who reads what a normalisation gives, in modules and in functional code. Promises: folding
changes no function, and a gain is left alone if anything but layers reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.graph.inputs import Inputs, call
from nafi.graph.products import Convolution, MatrixProduct, Product, Watching, memory, plain_kernels
from nafi.graph.spec import ModelSpec
from nafi.graph.tensors import Kind
from nafi.graph.trace import evaluating

_aten = torch.ops.aten
_NORMALISE = {_aten.native_layer_norm, getattr(_aten, "_fused_rms_norm", None)} - {None}
_COPY = {_aten.clone, _aten._to_copy}
# A gain this much smaller than the largest one counts as this large, where it must be divided by.
_LEAST = 1e-6


@dataclass(frozen=True)
class Gain:
    """A gain that can be folded.

    name: of the gain; shift: what is added after it, if anything is
    readers: the weights that read what comes out
    """

    name: str
    shift: str | None
    readers: tuple[str, ...]


def foldable_gains(model: nn.Module, spec: ModelSpec, inputs: Inputs) -> tuple[Gain, ...]:
    """The gains that only layers read, found by running the network once."""
    reading = _Reading(model, spec)
    with evaluating(model), plain_kernels(model), reading:
        call(model, inputs)
    return reading.foldable()


def fold_gains(
    state: Mapping[str, Tensor], spec: ModelSpec, gains: Sequence[Gain]
) -> dict[str, Tensor]:
    """A state dict with gains of one; those that were are in the columns of their readers.

    `W' = W diag(g)`; the shift goes into the readers' biases, `b' = b + W c`, or stays as `c / g`
    where one of them has none.
    """
    folded = {name: tensor.detach() for name, tensor in state.items()}
    for gain in gains:
        value = state[gain.name].detach().double()
        biases = [spec.tensors[reader].bias for reader in gain.readers]
        shift = None if gain.shift is None else folded[gain.shift].double()
        if shift is not None and None in biases:
            least = _LEAST * float(value.abs().max().clamp(min=1e-30))
            value = torch.where(value.abs() < least, least, value)
        for reader, bias in zip(gain.readers, biases, strict=True):
            weight, axis = folded[reader].double(), spec.tensors[reader].reads[0]
            if shift is not None and None not in biases:
                assert bias is not None
                added = torch.tensordot(weight, shift, dims=([axis], [0]))
                folded[bias] = (folded[bias].double() + added).to(state[bias].dtype)
            along = value.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])
            folded[reader] = (weight * along).to(state[reader].dtype)
        folded[gain.name] = torch.ones_like(state[gain.name])
        if gain.shift is not None and shift is not None:
            rest = shift / value if None in biases else torch.zeros_like(shift)
            folded[gain.shift] = rest.to(state[gain.shift].dtype)
    return folded | {other: folded[name] for other, name in spec.aliases.items()}


class _Reading(Watching):  # type: ignore[no-untyped-call]
    """Follows what gains make until layers read it.

    made: memory -> the gain whose output lies there; readers: gain -> weights
    """

    def __init__(self, model: nn.Module, spec: ModelSpec) -> None:
        self.made: dict[int, str] = {}
        self.readers: dict[str, list[str]] = {}
        self.spoilt: set[str] = set()
        # Not a method: what refers to itself is freed late, with all that it has seen.
        super().__init__(model, partial(_read, self.made, self.readers, self.spoilt))
        self.spec = spec
        self._alive: list[Any] = []  # so that no memory is used twice

    def foldable(self) -> tuple[Gain, ...]:
        counts: dict[str, int] = {}
        for readers in self.readers.values():
            for reader in set(readers):
                counts[reader] = counts.get(reader, 0) + 1
        return tuple(
            Gain(gain, self.spec.tensors[gain].bias, tuple(dict.fromkeys(readers)))
            for gain, readers in self.readers.items()
            if gain not in self.spoilt
            and all(map(self._plain, readers))
            # A layer that reads two normalisations cannot take the gains of both.
            and all(counts[r] == 1 and self.calls[r] == readers.count(r) for r in readers)
        )

    def _plain(self, reader: str) -> bool:
        """Whether a weight does nothing but read a vector along one of its axes."""
        meaning = self.spec.tensors.get(reader)
        return meaning is not None and len(meaning.reads) == 1 and reader not in self.other_uses

    def note_use(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        self._alive.append(result)
        packet = getattr(func, "overloadpacket", None)
        first = next((t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)), None)
        tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor)]
        if first is None:
            return
        gains = self._of_kind(tensors, Kind.GAIN)
        sources = {self.made[memory(t)] for t in tensors if memory(t) in self.made}
        for gain in gains if memory(first) not in map(memory, tensors) else []:
            if packet in _NORMALISE or packet is _aten.mul:
                self.made[memory(first)] = gain
            else:
                self.spoilt.add(gain)
        for gain in sources:
            added = packet is _aten.add and self.spec.tensors[gain].bias in self._names(tensors)
            if packet in _COPY or added or _pools(packet, args):
                self.made[memory(first)] = gain
            elif self.made.get(memory(first)) != gain:  # else it is a view
                self.spoilt.add(gain)
        super().note_use(func, args, result)

    def _names(self, tensors: Sequence[Tensor]) -> list[str]:
        return [self.parameters[memory(t)][0] for t in tensors if memory(t) in self.parameters]

    def _of_kind(self, tensors: Sequence[Tensor], kind: Kind) -> list[str]:
        """The parameters of a kind among some tensors that have one number for each neuron."""
        names = [name for name in self._names(tensors) if name in self.spec.tensors]
        return [
            name
            for name in names
            if self.spec.tensors[name].kind is kind and len(self.spec.tensors[name].axes) == 1
        ]


def _read(
    made: Mapping[int, str], readers: dict[str, list[str]], spoilt: set[str], product: Product
) -> None:
    """Note who reads what a gain made."""
    assert isinstance(product, MatrixProduct | Convolution)
    gain = made.get(memory(product.inputs_))
    if gain is not None:
        readers.setdefault(gain, []).append(product.name)
        if isinstance(product, Convolution):
            spoilt.add(gain)


def _pools(packet: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation is a mean or a sum over places, not over neurons, which come last."""
    if packet not in (_aten.mean, _aten.sum) or len(args) < 2 or not args[1]:
        return False
    return all(dim % args[0].ndim != args[0].ndim - 1 for dim in args[1])
