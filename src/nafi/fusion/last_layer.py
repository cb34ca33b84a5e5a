"""The layer that makes a network's outputs; several of them for networks side by side.

Hides: modules, functional code, reshapes, and a softmax at the end. Promises: the layer that was
found makes the outputs from its inputs and its weights, as compared on numbers; else a `SpecError`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from nafi.errors import InputError, SpecError
from nafi.fusion.ensemble import EnsembleNetwork
from nafi.graph import Product, call, evaluating, first_line, named_tensors, sample_rows, watch

# Outputs of the network that are compared with those of a layer.
_COMPARED = 64


@dataclass(frozen=True)
class LastLayer:
    """The tensors to solve; axis: of the weight, along which the outputs lie."""

    weight: str
    bias: str | None
    axis: int

    def within(self, path: str) -> LastLayer:
        """The same in a network of which its own is a part."""
        return LastLayer(path + self.weight, self.bias and path + self.bias, self.axis)


def _as_it_is(outputs: Tensor) -> Tensor:
    return outputs


# What may follow the last layer: each is at home with log odds.
_ENDINGS: tuple[Callable[[Tensor], Tensor], ...] = (
    _as_it_is,
    partial(torch.log_softmax, dim=-1),
    partial(torch.softmax, dim=-1),
    torch.sigmoid,
)


@dataclass(frozen=True, eq=False)
class Seen:
    """rows: (M,) some places of a product; read: (M, K) what it reads there."""

    rows: Tensor
    read: Tensor

    @classmethod
    def of(cls, product: Product, most: int, seed: int = 0) -> Seen:
        rows = sample_rows(product.places, most, seed)
        return cls(rows, product.inputs(rows)[0])


@dataclass(frozen=True, eq=False)
class Head:
    """The last layer within its network.

    axis: of the network's outputs, along which the classes lie; None if there is one output
    ending: what follows the layer
    """

    layer: LastLayer
    axis: int | None
    ending: Callable[[Tensor], Tensor]

    def by_class(self, outputs: Tensor) -> Tensor:
        """(..., classes)."""
        return outputs[..., None] if self.axis is None else outputs.movedim(self.axis, -1)

    def classes(self, outputs: Tensor) -> int:
        return 2 if self.axis is None else outputs.shape[self.axis]

    def makes(self, tensors: Mapping[str, Tensor], seen: Seen, outputs: Tensor) -> bool:
        """Whether the outputs at some places come from what the layer reads there."""
        weight = tensors[self.layer.weight].detach()
        made = seen.read @ weight.movedim(self.layer.axis, 0).flatten(1).mT
        if self.layer.bias is not None:
            made = made + tensors[self.layer.bias].detach()
        said = self.by_class(outputs).flatten(0, -2)[seen.rows.to(outputs.device)]
        return _alike(self.ending(made), said)


def _alike(one: Tensor, other: Tensor) -> bool:
    size = max(float(other.abs().max()), 1e-6) if other.numel() else 1.0
    near = 1e-4 if other.dtype in (torch.float32, torch.float64) else 2e-2
    return one.shape == other.shape and bool(((one - other).abs() <= near * size).all())


def members(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The networks that run side by side in a model, under their paths; itself, if it is one."""
    if not isinstance(model, EnsembleNetwork):
        return [("", model)]
    return [(f"models.{index}.", member) for index, member in enumerate(model.models)]


def find_heads(model: nn.Module, inputs: Any) -> list[Head]:
    """The last layer of each member, under its name within that."""
    heads = [find_head(member, inputs) for _, member in members(model)]
    if len(heads) > 1 and _outputs(model, inputs) > 1:
        raise SpecError(
            "networks side by side that return several outputs have no one last layer to solve"
        )
    averaged = isinstance(model, EnsembleNetwork) and model.average != "logits"
    if averaged or (len(heads) > 1 and any(head.ending is not _as_it_is for head in heads)):
        raise SpecError(
            "the last layers of several networks are solved together only if their outputs are "
            "added up as they are: let the networks return them before the softmax or sigmoid"
        )
    return heads


def _outputs(model: nn.Module, inputs: Any) -> int:
    """How many tensors of numbers a network returns."""
    with evaluating(model):
        leaves = pytree.tree_leaves(call(model, inputs))
    return sum(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves)


def find_head(model: nn.Module, inputs: Any) -> Head:
    """The last layer whose outputs are those of the network on these inputs."""
    outputs, other_uses = watched(model, inputs, lambda product: None)
    tensors = named_tensors(model)
    found: list[tuple[Head, Seen]] = []

    def visit(product: Product) -> None:
        if product.weights.shape[0] == 1:
            found.extend(_explanations(tensors, product, outputs))

    watched(model, inputs, visit)
    heads = [head for head, seen in found if _has_bias(model, head, seen, inputs)]
    if not heads or heads[-1].layer.weight in other_uses:
        raise SpecError(
            f"the outputs of {type(model).__name__} do not come from a linear layer, or a "
            "convolution in one group, with weights of its own: only such a last layer can be "
            "solved. A softmax or sigmoid may follow; let the network return its outputs first"
        )
    return heads[-1]


def _explanations(
    tensors: Mapping[str, Tensor], product: Product, outputs: Tensor
) -> Iterator[tuple[Head, Seen]]:
    """Ways in which a product may make the outputs; those with a bias come last."""
    width = product.weights.shape[2]
    if width * product.places != outputs.numel():
        return
    seen = Seen.of(product, _COMPARED)
    axes = [None] if width == 1 else [a for a, n in enumerate(outputs.shape) if n == width]
    biases = [name for name, tensor in tensors.items() if tensor.shape == (width,)]
    for bias, side, axis, ending in itertools.product(
        [None, *biases], _output_axes(product), axes, _ENDINGS
    ):
        head = Head(LastLayer(product.name, bias, side), axis, ending)
        if head.makes(tensors, seen, outputs):
            yield head, seen


def _output_axes(product: Product) -> list[int]:
    """The axis of the parameter along which its outputs lie, if it is multiplied as a matrix."""
    matrix, parameter = product.weights[0].mT, product.parameter
    sides = [a for a, n in enumerate(parameter.shape) if n == len(matrix)]
    return [a for a in sides if torch.equal(parameter.movedim(a, 0).flatten(1), matrix)][:1]


def _has_bias(model: nn.Module, head: Head, seen: Seen, inputs: Any) -> bool:
    """Whether another bias changes the outputs as it should: many a vector may be zero."""
    name = head.layer.bias
    if name is None:
        return True
    tensors = named_tensors(model)
    bias = tensors[name].detach()
    moved = bias + torch.linspace(0.5, 1.0, bias.numel(), dtype=bias.dtype, device=bias.device)
    arguments = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    with evaluating(model):
        outputs = _first_tensor(functional_call(model, {name: moved}, *arguments))
    return head.makes({**tensors, name: moved}, seen, outputs)


def watched(
    model: nn.Module, inputs: Any, visit: Callable[[Product], None]
) -> tuple[Tensor, frozenset[str]]:
    """Run a network; its outputs, and the parameters that are not only multiplied."""
    returned: list[Any] = []
    hook = model.register_forward_hook(lambda module, given, outputs: returned.append(outputs))
    try:
        with _own_errors():
            other_uses = watch(model, inputs, visit)
    finally:
        hook.remove()
    outputs = _first_tensor(returned[-1]).detach()
    if not bool(outputs.isfinite().all()):
        raise InputError("statistics: the network's outputs for a batch are not finite")
    return outputs, other_uses


def _first_tensor(returned: Any) -> Tensor:
    """What a network that returns several things says first."""
    values = list(returned.values()) if isinstance(returned, Mapping) else returned
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    raise SpecError("the network returns no tensor of numbers")


@contextmanager
def _own_errors() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TypeError, IndexError, KeyError, ValueError, AttributeError) as error:
        raise InputError(
            f"statistics: the network does not run on a batch: {first_line(error)}; expected "
            "batches (inputs, labels)"
        ) from None


def fingerprint(model: nn.Module, layers: Sequence[LastLayer]) -> str:
    """Tells whether all tensors of two networks are the same but those of the last layers.

    What the members of an ensemble count is solved with these.
    """
    tensors = named_tensors(model)
    names = [name for layer in layers for name in (layer.weight, layer.bias) if name is not None]
    solved = {id(tensors[name]) for name in names}
    if isinstance(model, EnsembleNetwork):
        solved |= {id(buffer) for buffer in (model.shares, model.class_shares)}
    digest = sha256()
    for name, tensor in sorted(tensors.items()):
        if id(tensor) not in solved:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            flat = tensor.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
