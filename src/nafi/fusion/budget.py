"""How large a network may be, in units that people think in.

Hides: which tensors make up parameters, multiply-adds and bytes. Promises: a budget is read once,
with an error that lists the units; the size of a network at any widths follows from its spec alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from numbers import Real

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import InputError
from nafi.fusion.stored import outlines
from nafi.graph import Convolution, Inputs, ModelSpec, Product, named_tensors, watch
from nafi.options import Constraint

_BYTES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_EXPECTED = '"1.0 params" or "0.5 flops" (times those of one client), or a size such as "300 kB"'


@dataclass(frozen=True)
class Budget:
    """unit: params or flops, as a multiple of one client's; or bytes."""

    amount: float
    unit: str

    def __str__(self) -> str:
        return f"{self.amount:g} {self.unit}"


def read_budget(stated: object) -> Budget:
    """A budget as users write it; a number alone counts parameters.

    >>> read_budget("0.5 flops")
    Budget(amount=0.5, unit='flops')
    """
    if isinstance(stated, Real) and not isinstance(stated, bool):
        stated = f"{float(stated)} params"
    words = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([A-Za-z]+)\s*", str(stated))
    try:
        amount = float(words[1]) if words else inf
    except ValueError:
        amount = inf
    unit = words[2].lower() if words else ""
    known = unit in ("params", "flops", *_BYTES)
    if not isinstance(stated, str) or not 0 < amount < inf or not known:
        meant = f'; did you mean "{amount} params"?' if unit == "x" and amount < inf else ""
        raise InputError(f"budget: found {stated!r}, expected {_EXPECTED}{meant}")
    if unit in ("params", "flops"):
        return Budget(amount, unit)
    return Budget(amount * _BYTES[unit], "bytes")


def _is_budget(value: object) -> bool:
    try:
        return value is None or bool(read_budget(value))
    except InputError:
        return False


BUDGET = Constraint(_is_budget, f"{_EXPECTED}, or None")


@dataclass(frozen=True)
class Size:
    """What a network costs: a sum over its tensors of how many numbers they hold.

    worth: tensor -> what one of its numbers costs: 1 for a parameter, its bytes, or how often it
        is multiplied for one input
    """

    worth: Mapping[str, float]

    def of(self, spec: ModelSpec, widths: Mapping[str, int], names: Sequence[str] = ()) -> float:
        """At these widths; names: of these tensors only."""
        return sum(
            self.worth[name] * prod(spec.tensors[name].shape(widths))
            for name in names or spec.tensors
            if name in self.worth
        )


def size_in(unit: str, model: nn.Module, spec: ModelSpec) -> Size:
    """How to count a network in a unit; spec: its groups, with example inputs."""
    tensors = {n: t for n, t in named_tensors(model).items() if n in spec.tensors}
    if unit == "bytes":
        return Size({name: float(tensor.element_size()) for name, tensor in tensors.items()})
    if unit == "params":
        learnt = {name for name, _ in model.named_parameters()}
        return Size({name: 1.0 for name in tensors if name in learnt})
    assert spec.example_inputs is not None
    return Size(multiplications(model, spec.example_inputs))


def multiplications(model: nn.Module, inputs: Inputs) -> dict[str, float]:
    """Weight -> how often each of its numbers is multiplied for one input.

    Weights that are computed before they are used, as with weight norm, are not counted.
    """
    counted: dict[str, float] = {}
    tensors = (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))
    batch = next((len(leaf) for leaf in tensors if leaf.ndim), 1)

    def visit(product: Product) -> None:
        places = product.inputs_read if isinstance(product, Convolution) else product.places
        times = places * product.weights.numel() / product.parameter.numel() / batch
        counted[product.name] = counted.get(product.name, 0.0) + times

    watch(model, inputs, visit)
    return counted


def measured_size(
    model: nn.Module, clients: Sequence[nn.Module], inputs: Inputs
) -> dict[str, float]:
    """Parameters, multiply-adds of one input, and bytes of a network.

    The first two also relative to the mean of its clients, as a `Budget` has them.
    """
    own, others = _counts(model, inputs), _counts_of_all(clients, inputs)
    params, flops = (sum(each[k] for each in others) / len(others) for k in range(2))
    # A tensor of several names, as a tied embedding, is stored once.
    stored = {id(tensor): tensor for tensor in named_tensors(model).values()}
    return {
        "params": own[0],
        "flops": own[1],
        "bytes": float(sum(t.numel() * t.element_size() for t in stored.values())),
        "params_of_client": own[0] / max(params, 1),
        "flops_of_client": own[1] / max(flops, 1),
    }


def _counts_of_all(clients: Sequence[nn.Module], inputs: Inputs) -> list[tuple[float, float]]:
    """Of each client; those of the same shapes cost the same."""
    known: dict[tuple[torch.Size, ...], tuple[float, float]] = {}
    counts = []
    for s, outline in enumerate(outlines(clients)):
        shapes = tuple(tensor.shape for tensor in outline.values())
        if shapes not in known:
            known[shapes] = _counts(clients[s], inputs)
        counts.append(known[shapes])
    return counts


def _counts(model: nn.Module, inputs: Inputs) -> tuple[float, float]:
    tensors = named_tensors(model)
    times = multiplications(model, inputs)
    flops = sum(count * tensors[name].numel() for name, count in times.items())
    return float(sum(p.numel() for p in model.parameters())), flops
