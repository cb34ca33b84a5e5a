"""Regions of a traced network, such as those under autocast, as part of the whole.

Hides: operations that hold a graph of their own. Promises: afterwards their contents stand in the
graph itself, so that all else sees one list of operations. Both branches of a condition are there,
and `where` picks between them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

_REGIONS = (
    "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
    "wrap",
    "invoke_subgraph",
    "tag_activation_checkpoint",
)


def inline_regions(module: GraphModule) -> None:
    """Put the contents of all regions into the graph, innermost ones first."""
    for inner in list(module.children()):
        if isinstance(inner, GraphModule):
            inline_regions(inner)
    for node in list(module.graph.nodes):
        inline = _HOW.get(str(node.target)) if node.op == "call_function" else None
        if inline is not None:
            inline(module, node)


def _inline_region(module: GraphModule, node: Node) -> None:
    graphs, operands = _graphs(module, node.args), _operands(node.args)
    if len(graphs) == 1 and len(operands) == len(_inputs(graphs[0])):
        _replace(node, _copied(node, graphs[0], operands))


def _inline_condition(module: GraphModule, node: Node) -> None:
    """Either branch may be taken, so both hold."""
    where = torch.ops.aten.where.self
    branches = [_copied(node, branch, node.args[3]) for branch in _graphs(module, node.args)]
    made = []
    with node.graph.inserting_before(node):
        for index, (one, two) in enumerate(zip(*branches, strict=True)):
            picked = node.graph.call_function(where, (node.args[0], one, two))
            picked.meta = {**node.meta, "val": node.meta["val"][index]}
            made.append(picked)
    _replace(node, made)


_HOW: dict[str, Callable[[GraphModule, Node], None]] = {
    "cond": _inline_condition,
    **dict.fromkeys(_REGIONS, _inline_region),
}


def _graphs(module: GraphModule, args: Sequence[Any]) -> list[Graph]:
    """The graphs among the arguments of an operation."""
    held = [a for a in args if isinstance(a, Node) and a.op == "get_attr"]
    found = [getattr(module, str(node.target), None) for node in held]
    return [graph.graph for graph in found if isinstance(graph, GraphModule)]


def _operands(args: Sequence[Any]) -> Sequence[Any]:
    """The tensors that a region works on: all that comes after its graph."""
    place = next(i for i, a in enumerate(args) if isinstance(a, Node) and a.op == "get_attr")
    return [a for a in args[place + 1 :] if not isinstance(a, str)]


def _inputs(region: Graph) -> list[Node]:
    return [node for node in region.nodes if node.op == "placeholder"]


def _copied(node: Node, region: Graph, operands: Any) -> list[Any]:
    """Copy a region before a node; what it returns, as nodes of the graph outside."""
    known = dict(zip(_inputs(region), operands, strict=True))
    with node.graph.inserting_before(node):
        result: Any = node.graph.graph_copy(region, known)
    return list(result) if isinstance(result, list | tuple) else [result]


def _replace(node: Node, made: Sequence[Any]) -> None:
    """Let all who read a result of the operation read what was made instead.

    The outputs of the network are known by name, so what it returns keeps its own node.
    """
    for user in list(node.users):
        if user.target is not operator.getitem:
            continue
        source = made[user.args[1]]  # type: ignore[index]
        user.replace_all_uses_with(source, delete_user_cb=lambda reader: reader.op != "output")
        user.target, user.args = torch.ops.aten.alias.default, (source,)
        if not user.users:
            node.graph.erase_node(user)
    if not node.users:
        node.graph.erase_node(node)
