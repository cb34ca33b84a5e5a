"""What a network multiplies with its parameters while it runs.

Hides: modules, functional code, views of parameters, and the geometry of convolutions. Below all of
them lie two operations: a product of matrices and a convolution.
Promises: every product of inputs with a parameter, or with a view of one, as rows of inputs and a
matrix that can be read and replaced before the network goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nafi.graph.inputs import Inputs, call
from nafi.graph.switches import FAST_ATTENTION, MKLDNN
from nafi.graph.trace import evaluating, named_tensors

_aten = torch.ops.aten

# How many places there are -> those to look at.
Sample = Callable[[int], Tensor]


@dataclass(frozen=True, eq=False)
class Product(ABC):
    """`inputs(rows) @ weights`, for B blocks at once: groups of a convolution, or several matrices.

    name: the parameter that the weights are a view of
    parameter: that tensor
    call: how often it was multiplied in this run before
    """

    name: str
    parameter: Tensor
    call: int

    @property
    @abstractmethod
    def places(self) -> int:
        """How many rows of inputs there are: samples times places."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """How many samples the rows are of, those of one after those of another."""

    @abstractmethod
    def inputs(self, rows: Tensor) -> Tensor:
        """(B, M, K) the inputs at some rows."""

    @abstractmethod
    def responses(self, sample: Sample) -> Tensor:
        """(C, M) what each input neuron does at those of its places that `sample` picks."""

    @property
    @abstractmethod
    def weights(self) -> Tensor:
        """(B, K, N), float."""

    @abstractmethod
    def replace(self, weights: Tensor) -> None:
        """Write other weights (B, K, N) into the parameter."""

    @abstractmethod
    def outputs(self, axes: Sequence[int]) -> Tensor | None:
        """(B, N) which of the places along some axes of the parameter each output is.

        None if an output is made by several of them.
        """

    @abstractmethod
    def neurons(self, axes: Sequence[int]) -> Tensor | None:
        """(C,) which of the places along some axes of the parameter each input neuron is.

        None if that cannot be told.
        """


@dataclass(frozen=True, eq=False)
class MatrixProduct(Product):
    """inputs_: (B, R, K); operand: (B, K, N), a view of the parameter."""

    inputs_: Tensor
    operand: Tensor

    @property
    def places(self) -> int:
        return self.inputs_.shape[1]

    @property
    def samples(self) -> int:
        return self.places  # nobody can tell which rows belong together

    def inputs(self, rows: Tensor) -> Tensor:
        return self.inputs_[:, rows]

    def responses(self, sample: Sample) -> Tensor:
        return self.inputs_[:, sample(self.places)].mT.flatten(0, 1)

    @property
    def weights(self) -> Tensor:
        return self.operand

    def replace(self, weights: Tensor) -> None:
        self.operand.copy_(weights)

    def outputs(self, axes: Sequence[int]) -> Tensor | None:
        seen = self._seen(axes)
        return seen[:, 0] if bool((seen == seen[:, :1]).all()) else None

    def neurons(self, axes: Sequence[int]) -> Tensor | None:
        seen = self._seen(axes)
        return seen[:, :, 0].flatten() if bool((seen == seen[:, :, :1]).all()) else None

    def _seen(self, axes: Sequence[int]) -> Tensor:
        """(B, K, N) where along some axes of the parameter each number of the operand lies."""
        sizes = [n if i in axes else 1 for i, n in enumerate(self.parameter.shape)]
        place = torch.arange(prod(sizes)).reshape(sizes).expand(self.parameter.shape).contiguous()
        offset = self.operand.storage_offset() - self.parameter.storage_offset()
        return place.as_strided(self.operand.shape, self.operand.stride(), offset)


@dataclass(frozen=True, eq=False)
class Convolution(Product):
    """A convolution in any number of dimensions, or a transposed one."""

    inputs_: Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape[2:])

    @property
    def output_axis(self) -> int | None:
        """The axis of the parameter that all outputs lie along, if there is one."""
        if self.transposed:
            return 1 if self.groups == 1 else None
        return 0

    def _size(self, dim: int) -> int:
        """Of the output along a dimension of space."""
        size, kernel = self.inputs_.shape[2 + dim], self.kernel[dim]
        stride, padding, dilation = self.stride[dim], self.padding[dim], self.dilation[dim]
        reach = dilation * (kernel - 1)
        if self.transposed:
            return (size - 1) * stride - 2 * padding + reach + self.output_padding[dim] + 1
        return (size + 2 * padding - reach - 1) // stride + 1

    @property
    def places(self) -> int:
        return self.inputs_.shape[0] * prod(self._size(d) for d in range(len(self.kernel)))

    @property
    def samples(self) -> int:
        return self.inputs_.shape[0]

    @property
    def inputs_read(self) -> int:
        """How often its kernel is applied: at every output, or at every input if transposed."""
        if not self.transposed:
            return self.places
        return self.inputs_.shape[0] * prod(self.inputs_.shape[2:])

    def _taps(self, dim: int) -> Tensor:
        """(out, kernel) the place of the input that each tap reads along a dimension, or -1."""
        size, stride = self.inputs_.shape[2 + dim], self.stride[dim]
        out = torch.arange(self._size(dim))[:, None]
        tap = torch.arange(self.kernel[dim])[None] * self.dilation[dim]
        if self.transposed:
            reach = out + self.padding[dim] - tap
            place = torch.where(reach % stride == 0, reach // stride, -1)
        else:
            place = out * stride - self.padding[dim] + tap
        return torch.where((place >= 0) & (place < size), place, -1)

    def _places_read(self) -> Tensor:
        """(places of an output, taps) the place that each tap reads; one too far for none."""
        sizes = self.inputs_.shape[2:]
        flat = torch.zeros((1, 1), dtype=torch.long)
        valid = torch.ones((1, 1), dtype=torch.bool)
        for dim, size in enumerate(sizes):
            taps = self._taps(dim)[None, :, None, :]
            flat = (flat[:, None, :, None] * size + taps).flatten(2).flatten(0, 1)
            valid = (valid[:, None, :, None] & (taps >= 0)).flatten(2).flatten(0, 1)
        return torch.where(valid, flat, prod(sizes))

    def inputs(self, rows: Tensor) -> Tensor:
        samples, channels = self.inputs_.shape[:2]
        x = self.inputs_.flatten(2).movedim(1, 2)
        x = torch.cat([x, x.new_zeros(samples, 1, channels)], dim=1)  # what lies outside
        table = self._places_read()
        sample, place = rows // len(table), rows % len(table)
        flat = sample[:, None] * x.shape[1] + table[place]
        taken = x.flatten(0, 1).index_select(0, flat.flatten())
        taken = taken.reshape(len(rows), -1, self.groups, channels // self.groups)
        return taken.permute(2, 0, 3, 1).flatten(2)

    def responses(self, sample: Sample) -> Tensor:
        x = self.inputs_.flatten(2)
        chosen = sample(x.shape[0] * x.shape[2])
        return x[chosen // x.shape[2], :, chosen % x.shape[2]].T

    @property
    def weights(self) -> Tensor:
        grouped = self.parameter.reshape(self.groups, -1, *self.parameter.shape[1:]).flatten(3)
        # (groups, outputs, inputs, taps), or inputs before outputs
        order = (0, 1, 3, 2) if self.transposed else (0, 2, 3, 1)
        return grouped.permute(order).flatten(1, 2)

    def replace(self, weights: Tensor) -> None:
        taps = prod(self.kernel)
        grouped = weights.reshape(self.groups, -1, taps, weights.shape[2])
        order = (0, 1, 3, 2) if self.transposed else (0, 3, 1, 2)
        self.parameter.copy_(grouped.permute(order).reshape(self.parameter.shape))

    def outputs(self, axes: Sequence[int]) -> Tensor | None:
        return torch.arange(self.weights.shape[2] * self.groups).reshape(self.groups, -1)

    def neurons(self, axes: Sequence[int]) -> Tensor | None:
        return torch.arange(self.inputs_.shape[1]) if self.groups == 1 else None


def sample_rows(places: int, rows: int, seed: int) -> Tensor:
    """Some of the places, the same in all networks that have as many; in order."""
    if places <= rows:
        return torch.arange(places)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(places, generator=generator)[:rows].sort().values


Visit = Callable[[Product], None]


class SeenEnough(BaseException):
    """Raised by a visitor that needs nothing of what is left of a run.

    It is no error, and no handler within the network may catch it.
    """


# Operations whose result decides what Python code does next, or how large something is.
_READS_VALUES = {
    _aten._local_scalar_dense,
    _aten._pack_padded_sequence,
    _aten._unique2,
    _aten.equal,
    _aten.masked_select,
    _aten.nonzero,
}


class ValueReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether a run looks at values, so that others of its shapes may take other steps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Compiled code may look at values unseen, and does not let `SeenEnough` through.
        self.seen = any(isinstance(m, torch.jit.ScriptModule) for m in model.modules())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen = self.seen or getattr(func, "overloadpacket", None) in _READS_VALUES
        return func(*args, **(kwargs or {}))


def watch(model: nn.Module, inputs: Inputs, visit: Visit) -> frozenset[str]:
    """Run a network in eval mode and visit every product with a parameter just before it is made.

    Returns the parameters that are also used in another way: looked up, scaled, or copied; of a
    run that `SeenEnough` ended, those up to there.
    """
    watching = Watching(model, visit)
    with evaluating(model), plain_kernels(model), suppress(SeenEnough), watching:
        call(model, inputs)
    return frozenset(watching.other_uses)


@contextmanager
def plain_kernels(model: nn.Module) -> Iterator[None]:
    """Without kernels that do a whole layer of a transformer or of an LSTM at once."""
    recurrent = any(isinstance(module, nn.LSTM) for module in model.modules())
    with FAST_ATTENTION.off(), MKLDNN.off() if recurrent else nullcontext():
        yield


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below modules and composite functions."""

    def __init__(self, model: nn.Module, visit: Visit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.visit = visit
        self.calls: Counter[str] = Counter()
        self.other_uses: set[str] = set()
        self.parameters: dict[int, tuple[str, Tensor]] = {}
        shared: set[int] = set()
        for name, tensor in named_tensors(model).items():
            key = memory(tensor)
            if key in self.parameters and self.parameters[key][1] is not tensor:
                shared.add(key)
            self.parameters.setdefault(key, (name, tensor))
        for key in shared:
            del self.parameters[key]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        product = self._product(func, args)
        if product is not None:
            self.calls[product.name] += 1
            self.visit(product)
        result = func(*args, **(kwargs or {}))
        if product is None:
            self.note_use(func, args, result)
        return result

    def _find(self, tensor: Any) -> tuple[str, Tensor] | None:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return None
        found = self.parameters.get(memory(tensor))
        return found if found is not None and found[1].is_contiguous() else None

    def _product(self, func: Any, args: tuple[Any, ...]) -> Product | None:
        packet = getattr(func, "overloadpacket", None)
        if packet is _aten.convolution:
            return self._convolution(*args)
        if packet in (_aten.mm, _aten.bmm):
            return self._matrices(*args[:2])
        if packet in (_aten.addmm, _aten.baddbmm):
            return self._matrices(*args[1:3])
        return None

    def _convolution(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any
    ) -> Product | None:
        found = self._find(weight)
        if found is None or weight.shape != found[1].shape or not inputs.is_floating_point():
            return None
        stride, padding, dilation, transposed, output_padding, groups = geometry
        name, parameter = found
        dims = weight.ndim - 2

        def full(values: Sequence[int]) -> Sequence[int]:
            return list(values) * dims if len(values) == 1 else values

        return Convolution(
            name,
            parameter,
            self.calls[name],
            inputs,
            full(stride),
            full(padding),
            full(dilation),
            transposed,
            full(output_padding),
            groups,
        )

    def _matrices(self, left: Tensor, right: Tensor) -> Product | None:
        if left.ndim == 2:
            left, right = left[None], right[None]
        found = self._find(right)
        if found is None:
            found = self._find(left)
            left, right = right.mT, left.mT
        if found is None or self._find(left) is not None:
            return None
        if right.shape[0] > 1 and right.stride(0) == 0:  # one matrix for all of a batch
            left, right = left.flatten(0, 1)[None], right[:1]
        name, parameter = found
        return MatrixProduct(name, parameter, self.calls[name], left, right)

    def note_use(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Keep which parameters an operation uses that is no product."""
        made = {memory(t) for t in pytree.tree_leaves(result) if isinstance(t, Tensor)}
        for leaf in pytree.tree_leaves(args):
            key = memory(leaf) if isinstance(leaf, Tensor) else None
            if key in self.parameters and key not in made:  # else it is a view
                self.other_uses.add(self.parameters[key][0])


def memory(tensor: Tensor) -> int:
    """What tells tensors with memory of their own apart."""
    return int(tensor.untyped_storage()._cdata)
