"""What clients sum over their own samples, as messages.

Hides: how sums are computed, and their names, shapes and precision in messages. Promises: no input,
no label and no gradient leaves a client, only sums over its samples; what a server reads could be
sums over some samples, or an `InputError` says why not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import InputError
from nafi.federated.architecture import (
    Architecture,
    Expected,
    Form,
    Shapes,
    Tensors,
    load_tensors,
)
from nafi.federated.request import Request
from nafi.federated.samples import Samples, in_batches
from nafi.fusion import (
    RIDGES,
    HeadStatistics,
    LayerStatistics,
    Targets,
    are_sums,
    empty_head,
    layer_shapes,
    layer_statistics,
    ridge_errors,
    statistics,
)
from nafi.graph import Inputs

# Correlations in lower precision are symmetric and positive up to this share.
_ROUNDING = {"float64": 1e-8, "float32": 1e-5, "float16": 1e-3}
_HEAD, _PREFIX, _ERRORS = "head", "sums/", "errors"
# In a task's extras: a client's own network, and which outputs of a layer are its own.
OWN, OWNED = "own/", "owned/"


def sums_of(
    model: nn.Module, samples: Samples, request: Request, targets: Targets | None = None
) -> dict[str, Tensor]:
    """A client's answer: sums over its samples, under the names that `expected_sums` has.

    targets: the client's own network, in the form of the model, if what it writes is asked for
    """
    message: dict[str, Tensor] = {}
    if request.head:
        message |= _written(_HEAD, _head_tensors(statistics(model, in_batches(samples))), request)
    if request.inputs:
        inputs = ((batch,) for batch, _ in in_batches(samples))
        for name, parts in layer_statistics(model, inputs, request.inputs, targets).items():
            message |= _written(name, _layer_tensors(parts.whole, request), request)
            if targets is not None:
                with_bias = targets.spec.tensors[name].bias is not None
                errors = ridge_errors(parts.rest, parts.held_out, with_bias=with_bias)
                message[_name(name, _ERRORS)] = errors
    return message


def targets_of(architecture: Architecture, form: Form, extras: Tensors) -> Targets:
    """A client's own network, from the extras of its task."""
    model, spec = architecture.network(form)
    parts = {
        prefix: {n.removeprefix(prefix): t for n, t in extras.items() if n.startswith(prefix)}
        for prefix in (OWN, OWNED)
    }
    return Targets(load_tensors(model, parts[OWN]).eval(), spec, parts[OWNED])


def expected_sums(model: nn.Module, example_inputs: Inputs, request: Request) -> Shapes:
    """What the answer to a request about a network looks like."""
    inputs = probing_inputs(example_inputs)
    tensors = {}
    if request.head:
        tensors[_HEAD] = _head_tensors(empty_head(model, inputs))
    for name, (blocks, reads, writes) in layer_shapes(model, inputs, request.inputs).items():
        empty = LayerStatistics.zeros(blocks, reads, writes)
        tensors[name] = _layer_tensors(empty, request)
        if request.outputs:
            tensors[name][_ERRORS] = torch.zeros(len(RIDGES))
    return {
        name: expected
        for of, sums in tensors.items()
        for name, expected in _expected(of, sums, request).items()
    }


def probing_inputs(example_inputs: Inputs) -> Inputs:
    """Numbers that tell layers apart, in the form of the example inputs, which may be all zeros."""
    generator = torch.Generator().manual_seed(0)

    def drawn(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)

    inputs: Inputs = pytree.tree_map(drawn, example_inputs)
    return inputs


def head_names(model: nn.Module, example_inputs: Inputs) -> list[str]:
    """The tensors of a network's last layer."""
    return empty_head(model, probing_inputs(example_inputs)).tensor_names


def sums_name(weight: str) -> str:
    """What the second moments of a layer are called in a message."""
    return _name(weight, "gram")


def is_sum(name: str) -> bool:
    """Whether something that a task asks for is a sum over samples."""
    return name.startswith(_PREFIX)


def check_sums(message: Tensors, request: Request) -> None:
    """Refuse what cannot be sums over samples; shapes and types were checked before."""
    if request.head:
        tensors = _read(_HEAD, message, request)
        counts, losses = tensors["class_counts"], tensors["losses"]
        whole = bool(((counts >= 0) & (counts == counts.floor())).all())
        if not whole or not counts.any() or bool((losses < 0).any()):
            raise InputError("counts or losses of the sums at the last layer are not such")
        _check(_HEAD, tensors["gram"], tensors["cross"], counts.diag(), request)
    for name in request.inputs:
        read_layer(message, name, request)


def read_head(message: Tensors, request: Request, empty: HeadStatistics) -> HeadStatistics:
    """The labelled sums of a message; empty: those of the network over no samples."""
    parts = _read(_HEAD, message, request)
    return HeadStatistics(empty.layers, empty.body, **parts)


def read_errors(message: Tensors, name: str) -> Tensor:
    """(len(RIDGES),) how a client's fits of a layer did on what it held out, for each ridge."""
    return message[_name(name, _ERRORS)]


def read_layer(message: Tensors, name: str, request: Request) -> LayerStatistics:
    """The sums of a message for one layer."""
    tensors = _read(name, message, request)
    if bool((tensors.pop(_ERRORS, torch.zeros(1)) < 0).any()):
        raise InputError(f"the errors for {name} are below zero")
    gram, sums, count = (tensors[part] for part in ("gram", "sums", "count"))
    if not 1 <= float(count) < 2**53:
        raise InputError(f"the sums for {name} are over {float(count):g} inputs")
    for block, means in zip(gram, sums, strict=True):
        _check(name, block, means[:, None], count[:, None], request)
    if not request.outputs:
        empty = LayerStatistics.zeros(len(sums), sums.shape[1], 0)
        return replace(empty, gram=gram, sums=sums, count=count)
    return LayerStatistics(**tensors)


def _check(name: str, gram: Tensor, cross: Tensor, outer: Tensor, request: Request) -> None:
    if not are_sums(gram, cross, outer, _ROUNDING[request.precision]):
        raise InputError(
            f"the sums for {name} are not those of any samples: they must be symmetric and "
            "positive semidefinite"
        )


def _head_tensors(sums: HeadStatistics) -> dict[str, Tensor]:
    return {name: getattr(sums, name) for name in ("gram", "cross", "class_counts", "losses")}


def _layer_tensors(sums: LayerStatistics, request: Request) -> dict[str, Tensor]:
    names = ["gram", "sums", "count"] + ["cross", "totals", "squares"] * request.outputs
    return {name: getattr(sums, name) for name in names}


# ---------------------------------------------------------------------------------- on the wire
#
# G is symmetric: half of it is sent. In double precision sums are sent as they are, so that
# messages of several clients can be added up; in less, products as correlations.


def _written(of: str, tensors: Mapping[str, Tensor], request: Request) -> dict[str, Tensor]:
    parts, dtype = dict(tensors), getattr(torch, request.precision)
    rows, columns = torch.triu_indices(*parts["gram"].shape[-2:])
    if request.precision != "float64":
        scale = parts["gram"].diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
        parts["gram"] = parts["gram"] / _outer(scale, scale)
        if "cross" in parts:
            parts["cross"] = (parts["cross"] / _outer(scale, _sizes(parts))).to(dtype)
        parts["scale"] = scale
    parts["gram"] = parts["gram"][..., rows, columns].to(dtype)
    return {_name(of, name): tensor for name, tensor in parts.items()}


def _read(of: str, message: Tensors, request: Request) -> dict[str, Tensor]:
    prefix = _name(of, "")
    parts = {n.removeprefix(prefix): t for n, t in message.items() if n.startswith(prefix)}
    half = parts["gram"].double()
    size = int((2 * half.shape[-1]) ** 0.5)
    rows, columns = torch.triu_indices(size, size)
    gram = half.new_zeros(*half.shape[:-1], size, size)
    gram[..., rows, columns] = half
    gram[..., columns, rows] = half
    parts["gram"] = gram
    if request.precision != "float64":
        scale = parts.pop("scale")
        parts["gram"] = gram * _outer(scale, scale)
        if "cross" in parts:
            parts["cross"] = parts["cross"].double() * _outer(scale, _sizes(parts))
    return parts


def _sizes(parts: Mapping[str, Tensor]) -> Tensor:
    """Roots of the sums of squares of what a layer is to write."""
    squares = parts["squares"] if "squares" in parts else parts["class_counts"]
    return squares.clamp(min=0).sqrt()


def _outer(rows: Tensor, columns: Tensor) -> Tensor:
    """Products of sizes; one where there is none."""
    products = rows[..., :, None] * columns[..., None, :]
    return torch.where(products > 0, products, 1.0)


def _expected(of: str, sums: Mapping[str, Tensor], request: Request) -> dict[str, Expected]:
    *blocks, size, _ = sums["gram"].shape
    dtype = getattr(torch, request.precision)
    kinds = {n: Expected(tuple(t.shape), torch.float64, total=True) for n, t in sums.items()}
    kinds["gram"] = Expected((*blocks, size * (size + 1) // 2), dtype, total=True)
    if "cross" in kinds:
        kinds["cross"] = Expected(kinds["cross"].shape, dtype, total=True)
    if request.precision != "float64":
        kinds["scale"] = Expected((*blocks, size), torch.float64, variance=True)
    return {_name(of, name): kind for name, kind in kinds.items()}


def _name(of: str, part: str) -> str:
    return f"{_PREFIX}{of}/{part}"
