"""Two ways in which torch records what a network does.

Hides: torch.export, make_fx, and what both of them print and keep in global variables.
Promises: a graph of torch's own operations, with the shape of every result, that says of each
placeholder what it is.
"""

from __future__ import annotations

import io
import logging
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from nafi.graph.inputs import Inputs, arguments, returned_tensors
from nafi.graph.regions import inline_regions
from nafi.graph.switches import FAST_ATTENTION

# torch keeps what it is recording in global variables.
_RECORDING = threading.Lock()
_TORCH = str(Path(torch.__file__).parent)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Recording:
    """What a network did.

    tensors: placeholder -> name of the parameter or buffer it is
    inputs: nodes of the example inputs; constants: of tensors that are not saved with the network
    outputs: nodes returned
    decisions: lines of code where values decided what was done
    """

    graph: fx.Graph
    tensors: Mapping[fx.Node, str]
    inputs: tuple[fx.Node, ...]
    constants: Mapping[fx.Node, Tensor]
    outputs: tuple[fx.Node, ...]
    decisions: tuple[str, ...] = ()


@contextmanager
def recording_alone() -> Iterator[None]:
    """One thread at a time; what torch has to say comes in the error that it raises."""
    with (
        _RECORDING,
        warnings.catch_warnings(),
        redirect_stderr(io.StringIO()),
        # One operation for a whole layer of nn.TransformerEncoder would say nothing of its axes.
        FAST_ATTENTION.off(),
    ):
        # Read only now: before, another thread that records may have disabled it.
        logged = logging.root.manager.disable
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(logged)


def exported(model: nn.Module, inputs: Inputs, stored: Mapping[str, Tensor]) -> Recording:
    """What the network does for all inputs of these shapes, as torch.export records it.

    stored: parameters and saved buffers by name
    """
    program = torch.export.export(model, *arguments(inputs))
    inline_regions(program.graph_module)
    nodes = {node.name: node for node in program.graph.nodes}
    _check_sizes(program.graph)
    tensors: dict[fx.Node, str] = {}
    fed: list[fx.Node] = []
    constants: dict[fx.Node, Tensor] = {}
    for spec in program.graph_signature.input_specs:
        node = nodes.get(spec.arg.name)
        if node is None:
            continue
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target in stored:
            tensors[node] = str(spec.target)
        elif isinstance(constant := program.constants.get(str(spec.target)), Tensor):
            constants[node] = constant
        else:
            fed.append(node)
    returned = dict.fromkeys(
        spec.arg.name
        for spec in program.graph_signature.output_specs
        if spec.kind == OutputKind.USER_OUTPUT and hasattr(spec.arg, "name")
    )
    outputs = tuple(nodes[name] for name in returned if name in nodes)
    return Recording(program.graph, tensors, tuple(fed), constants, outputs)


def _check_sizes(graph: fx.Graph) -> None:
    """Refuse sizes that only the values of the inputs tell."""
    for node in graph.nodes:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            sizes = leaf.shape if isinstance(leaf, Tensor) else [leaf]
            if any(isinstance(size, _SYMBOLS) for size in sizes):
                raise ValueError(f"the size of {node.name} depends on values")


def followed(model: nn.Module, inputs: Inputs, stored: Mapping[str, Tensor]) -> Recording:
    """What the network does on these very inputs; where values decide, other inputs may differ."""
    leaves, structure = pytree.tree_flatten(arguments(inputs))
    # Copies, since one tensor may be several arguments, and a network may write into them.
    given = [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]
    names: dict[Tensor, str] = {}
    for name, tensor in stored.items():
        names.setdefault(tensor, name)
    held = list(names)

    def run(held: list[Tensor], given: list[Tensor]) -> list[Tensor]:
        # The network holds the very tensors of `held`, so it is recorded what they are used for.
        fed = iter(given)
        filled = [next(fed) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, structure)
        with _Readings():
            return returned_tensors(model(*args, **kwargs))

    recorder = make_fx(
        run, pre_dispatch=True, record_stack_traces=True, _error_on_data_dependent_ops=False
    )
    # Parts that torch.compile made are recorded as they were written.
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        recorded = recorder(held, given)
    inline_regions(recorded)
    graph: fx.Graph = recorded.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    kept, fed = placeholders[: len(held)], placeholders[len(held) :]
    dependent = _dependent(graph, placeholders)
    if not any(node in dependent for node in output.all_input_nodes):
        raise ValueError("nothing that it returns is seen to depend on inputs or weights")
    return Recording(
        graph,
        dict(zip(kept, names.values(), strict=True)),
        tuple(fed),
        _constants(recorded),
        tuple(dict.fromkeys(output.all_input_nodes)),
        _decisions(dependent),
    )


def _constants(recorded: fx.GraphModule) -> dict[fx.Node, Tensor]:
    nodes = [node for node in recorded.graph.nodes if node.op == "get_attr"]
    held = {node: getattr(recorded, str(node.target)) for node in nodes}
    return {node: value for node, value in held.items() if isinstance(value, Tensor)}


class _Readings(TorchFunctionMode):
    """Lets the graph show where all values of a tensor are read, of which torch records nothing."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            args[0].count_nonzero().item()
        return func(*args, **(kwargs or {}))


def _dependent(graph: fx.Graph, placeholders: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """All nodes that depend on inputs, weights or chance, in their order."""
    dependent = dict.fromkeys(placeholders)
    for node in graph.nodes:
        if _is_random(node) or any(source in dependent for source in node.all_input_nodes):
            dependent[node] = None
    return dependent


def _decisions(dependent: Iterable[fx.Node]) -> tuple[str, ...]:
    """The lines where values decide what is done.

    Not those of torch's own layers, which choose between ways to compute the same.
    """
    nodes = [node for node in dependent if _decides(node) and not _is_in_torch(node)]
    return tuple(dict.fromkeys(line_of(node) or node.name for node in nodes))


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _decides(node: fx.Node) -> bool:
    """Whether the code learns a number. Sizes do not count: they are as in the example inputs."""
    return torch.Tag.data_dependent_output in getattr(node.target, "tags", ())


def _is_in_torch(node: fx.Node) -> bool:
    return f"({_TORCH}" in (line_of(node) or "")


def line_of(node: fx.Node) -> str | None:
    """The line of code that a node came from."""
    trace = node.meta.get("stack_trace")
    lines = [line.strip() for line in trace.splitlines()] if trace else []
    files = [i for i, line in enumerate(lines) if line.startswith("File ")]
    if not files or files[-1] + 1 >= len(lines):
        return None
    place = lines[files[-1]].removeprefix("File ").split(", in ")[0].replace('"', "")
    return f"`{lines[files[-1] + 1]}` ({place})"
