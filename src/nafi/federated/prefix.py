"""What a network computes from its inputs and frozen weights alone, taken apart from the rest.

Hides: torch.fx. Promises: the two parts together compute what the network does, seen on a batch,
or there is no split; parameters are shared with the network, so training the rest trains it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from nafi.federated.randomness import seeded
from nafi.federated.samples import as_numbers

CACHE_BYTES = 2**30
_RANDOM = ("dropout", "rand", "bernoulli", "normal", "uniform", "multinomial", "noise")
_CHUNK = 256


@dataclass(frozen=True, eq=False)
class Split:
    """first: inputs -> what is known; rest: what is known -> outputs."""

    first: nn.Module
    rest: nn.Module
    bytes_per_sample: int

    def known(self, inputs: Tensor, device: str) -> list[Tensor]:
        """What is known of every sample, on the CPU."""
        with torch.no_grad():
            parts = [
                [value.cpu() for value in self.first(as_numbers(chunk.to(device)))]
                for chunk in torch.split(inputs, _CHUNK)
            ]
        return [torch.cat(values) for values in zip(*parts, strict=True)]


def split(model: nn.Module, frozen: Collection[str], example: Tensor) -> Split | None:
    """Take a network of one input apart; None if it cannot be traced or nothing is known early.

    frozen: names of parameters and buffers; example: (2, ...) inputs to see that it works
    """
    try:
        traced = fx.symbolic_trace(model)
        values = _Values(traced)
        with _evaluating(model, traced):
            expected = model(example)
            values.run(example)
    except Exception:  # whatever a user's forward does that symbols cannot
        return None
    static = _static(traced, frozen)
    known = _frontier(traced, static, values.of, len(example))
    if not known or all(node.op == "placeholder" for node in known):
        return None
    first, rest = _first(traced, known, static), _rest(traced, known, static)
    parts = Split(first, rest, sum(_bytes(values.of[node]) for node in known))
    try:
        return parts if _agrees(parts, example, expected) and _is_constant(first, example) else None
    except Exception:  # a normalisation that cannot do with a single sample, for one
        return None


class _Values(fx.Interpreter):
    """Runs a network and remembers the value of every node."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.of: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.of[n] = value = super().run_node(n)
        return value


def _static(traced: fx.GraphModule, frozen: Collection[str]) -> set[fx.Node]:
    """The nodes that give the same for a sample in every epoch."""
    static: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op == "output" or not all(before in static for before in node.all_input_nodes):
            continue
        if node.op == "call_module":
            fixed = _is_fixed(traced, str(node.target), frozen)
        elif node.op == "get_attr":
            parameters = dict(traced.named_parameters(remove_duplicate=False))
            fixed = node.target in frozen or node.target not in parameters
        else:
            name = getattr(node.target, "__name__", str(node.target))
            fixed = not any(word in name for word in _RANDOM)
        if fixed:
            static.add(node)
    return static


def _is_fixed(traced: fx.GraphModule, path: str, frozen: Collection[str]) -> bool:
    module = traced.get_submodule(path)
    names = [
        name
        for tensors in (module.named_parameters(prefix=path), module.named_buffers(prefix=path))
        for name, _ in tensors
    ]
    random = any(
        word in type(part).__name__.lower() for part in module.modules() for word in _RANDOM
    )
    return not random and all(name in frozen for name in names)


def _frontier(
    traced: fx.GraphModule, static: set[fx.Node], values: dict[fx.Node, Any], batch: int
) -> list[fx.Node] | None:
    """What the rest needs of the static part; None if that is not a row for each sample."""
    needed: list[fx.Node] = []
    waiting = [node for node in traced.graph.nodes if node not in static]
    seen: set[fx.Node] = set()
    while waiting:
        for before in waiting.pop().all_input_nodes:
            if before not in static or before in seen:
                continue
            seen.add(before)
            value = values[before]
            if isinstance(value, Tensor) and before.op != "get_attr":
                if value.ndim == 0 or len(value) != batch or not value.is_floating_point():
                    return None
                needed.append(before)
            else:
                waiting.append(before)  # a size, or a weight: computed again in the rest
    return [node for node in traced.graph.nodes if node in needed]


def _first(traced: fx.GraphModule, known: list[fx.Node], static: set[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        if node in static:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output([copies[node] for node in known])
    return fx.GraphModule(traced, graph)


def _rest(traced: fx.GraphModule, known: list[fx.Node], static: set[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"known_{place}") for place, node in enumerate(known)}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:  # a size or a weight of the static part
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    for node in traced.graph.nodes:
        if node not in static:
            copies[node] = graph.node_copy(node, copied)
    return fx.GraphModule(traced, graph)


def _bytes(value: Tensor) -> int:
    return value[0].numel() * value.element_size()


def _agrees(parts: Split, example: Tensor, expected: Any) -> bool:
    """Whether both parts together give what the network gives."""
    with _evaluating(parts.first, parts.rest):
        outputs = parts.rest(*parts.first(example))
    return isinstance(expected, Tensor) and bool(torch.equal(outputs, expected))


def _is_constant(first: nn.Module, example: Tensor) -> bool:
    """Whether a sample gives the same twice, and alone as in a batch, in the mode of training."""
    with torch.no_grad(), seeded(0):
        once, again = first(example), first(example)
        alone = [first(row[None]) for row in example]
    same = all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    return same and all(
        torch.allclose(torch.cat(rows), together, rtol=1e-3, atol=1e-5)
        for rows, together in zip(zip(*alone, strict=True), once, strict=True)
    )


@contextmanager
def _evaluating(*parts: nn.Module) -> Iterator[None]:
    """All modules in eval mode and without gradients for a while."""
    modes = {module: module.training for part in parts for module in part.modules()}
    for module in modes:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
