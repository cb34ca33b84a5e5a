"""A network as a list of operations with named arguments and known shapes.

Hides: how operations are recorded, and torch's habit of leaving default arguments out.
Promises: every operation in execution order, each argument under its schema name, and for every
parameter and buffer the tensor of the module that it is.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nafi.errors import SpecError
from nafi.graph.inputs import Inputs, call, check_inputs, first_line, returned_tensors
from nafi.graph.recording import Recording, exported, followed, line_of, recording_alone


@dataclass(frozen=True)
class Op:
    """One operation.

    name: as in `aten::name`, without a trailing underscore of in-place variants
    arguments: schema name -> constant, `torch.fx.Node`, or list of them
    training: only in training mode does the network do this
    """

    name: str
    node: torch.fx.Node
    arguments: Mapping[str, Any]
    pointwise: bool
    training: bool = False

    @property
    def views(self) -> torch.fx.Node | None:
        """The node whose memory the result shares, if it does."""
        schema = getattr(self.node.target, "_schema", None)
        if schema is None or not any(r.alias_info is not None for r in schema.returns):
            return None
        shared = [a.name for a in schema.arguments if a.alias_info is not None]
        nodes = [self.arguments[name] for name in shared]
        return next((node for node in nodes if isinstance(node, torch.fx.Node)), None)

    @property
    def writes(self) -> list[torch.fx.Node]:
        """The nodes that the operation writes into."""
        schema = getattr(self.node.target, "_schema", None)
        if schema is None:
            return []
        written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        return [n for n in (self.arguments[w] for w in written) if isinstance(n, torch.fx.Node)]

    @property
    def tensors(self) -> list[Tensor]:
        """Each tensor that comes out, without its data."""
        value = self.node.meta.get("val")
        values = value if isinstance(value, list | tuple) else [value]
        return [v for v in values if isinstance(v, Tensor)]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each tensor that comes out."""
        return [tuple(int(n) for n in tensor.shape) for tensor in self.tensors]

    def __str__(self) -> str:
        return f"{self.name} ({self.node.name})"

    @property
    def source(self) -> str | None:
        """The line of the user's code that this came from."""
        return line_of(self.node)


@dataclass(frozen=True)
class Trace:
    """A traced network.

    tensors: graph node -> name of the parameter or buffer it is; names of one tensor share a node
    aliases: every name of a shared tensor -> the name that stands for all of them
    inputs: nodes of the example inputs; constants: of tensors that are not saved with the network
    outputs: nodes returned
    decisions: lines of code where values decide what the network does, followed as they were
    """

    ops: tuple[Op, ...]
    tensors: Mapping[torch.fx.Node, str]
    aliases: Mapping[str, str]
    inputs: tuple[torch.fx.Node, ...]
    constants: Mapping[torch.fx.Node, Tensor]
    outputs: tuple[torch.fx.Node, ...]
    decisions: tuple[str, ...] = ()

    @property
    def used(self) -> list[str]:
        """The tensors in the order in which operations first use them."""
        nodes = (node for op in self.ops for node in op.node.all_input_nodes)
        return list(dict.fromkeys(self.tensors[node] for node in nodes if node in self.tensors))

    def __add__(self, other: Trace) -> Trace:
        """Both, one after the other."""
        return Trace(
            self.ops + other.ops,
            {**self.tensors, **other.tensors},
            self.aliases,
            self.inputs + other.inputs,
            {**self.constants, **other.constants},
            self.outputs + other.outputs,
            tuple(dict.fromkeys(self.decisions + other.decisions)),
        )


def trace(model: nn.Module, example_inputs: Inputs) -> Trace:
    """Record the network in eval mode; the module is left as it was.

    torch.export records it for all values of the inputs. Where it cannot, the network is followed
    on the example inputs as they are. Where eval mode leaves parameters unused, as those of
    auxiliary heads, what the network does in training mode comes after it.
    """
    traced = _traced(model, example_inputs, training=False)
    parameters = dict(model.named_parameters())
    if set(parameters) <= set(traced.used):
        return traced
    try:
        return traced + _traced(model, example_inputs, training=True)
    except SpecError:  # it needs targets for training, say
        return traced


def _traced(model: nn.Module, example_inputs: Inputs, training: bool) -> Trace:
    stored = named_tensors(model)
    aliases = shared_names(model)
    recorded = _recorded(model, check_inputs(example_inputs), stored, training)
    live = _live(recorded.graph.nodes, recorded.outputs)
    return Trace(
        tuple(replace(_op(n), training=training) for n in recorded.graph.nodes if n in live),
        {node: aliases.get(name, name) for node, name in recorded.tensors.items()},
        aliases,
        recorded.inputs,
        recorded.constants,
        recorded.outputs,
        recorded.decisions,
    )


def _recorded(
    model: nn.Module, inputs: Inputs, stored: Mapping[str, Tensor], training: bool
) -> Recording:
    with recording_alone(), evaluating(model):
        if training:
            train_paths(model)
        _check_runs(model, inputs)
        try:
            return exported(model, inputs, stored)
        except Exception as error:
            refusal = first_line(error)
        try:
            return followed(model, inputs, stored)
        except Exception as error:
            raise SpecError(
                f"{type(model).__name__} cannot be traced: {refusal} (torch.export); "
                f"{first_line(error)} (make_fx). Write its forward in operations of torch on "
                "tensors, or write the ModelSpec by hand (docs/graph.md)"
            ) from error


def _check_runs(model: nn.Module, inputs: Inputs) -> None:
    try:
        result = call(model, inputs)
    except Exception as error:
        raise SpecError(
            f"{type(model).__name__} does not run on the example inputs: {first_line(error)}"
        ) from error
    if not returned_tensors(result):
        raise SpecError(
            f"{type(model).__name__} returns {type(result).__name__} without a tensor to be seen; "
            "return tensors, also in tuples, lists, dicts or dataclasses"
        )


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers under all their names, as the tensors that the module holds.

    A name is the way from attribute to attribute. Some modules rename or join tensors in their
    `state_dict`, where they could not be found again.
    """
    if not isinstance(model, nn.Module):
        raise SpecError(f"expected an nn.Module, found {type(model).__name__}")
    return {
        f"{path}.{name}".removeprefix("."): tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in _own_tensors(module)
    }


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a module itself keeps, under its own names."""
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield name, tensor


def unwrapped(model: nn.Module) -> nn.Module:
    """The network itself, without torch.compile and modules that spread it over devices."""
    while isinstance(model, nn.Module):
        if type(model).__name__ == "OptimizedModule":  # whose import takes seconds
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            break
    return model


def with_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]
) -> nn.Module:
    """A copy of the network that holds these tensors, whatever their sizes; none are copied.

    tensors: by name; aliases: other names of the same -> these
    """
    made: dict[str, Tensor] = {}
    replaced: dict[int, Tensor] = {}
    for name, tensor in named_tensors(model).items():
        kept = aliases.get(name, name)
        if kept not in made:
            new = tensors[kept]
            is_learnt = isinstance(tensor, nn.Parameter)
            made[kept] = nn.Parameter(new, tensor.requires_grad) if is_learnt else new
        replaced[id(tensor)] = made[kept]
    return copy_network(model, replaced)


def copy_network(model: nn.Module, replaced: Mapping[int, Tensor] | None = None) -> nn.Module:
    """A deep copy, also of a network that was just trained.

    replaced: by their id, tensors in whose place the copy has others. Hooks such as torch's older
    weight and spectral norms keep a computed weight in their module, which `copy.deepcopy` refuses;
    it is made again by every run.
    """
    memo: dict[int, Any] = dict(replaced or {})
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(model, memo)


def shared_names(model: nn.Module) -> dict[str, str]:
    """Every name of a tensor that has several -> the first of them."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in named_tensors(model).items():
        aliases[name] = first.setdefault(id(tensor), name)
    return {name: kept for name, kept in aliases.items() if name != kept}


def _live(nodes: Iterable[torch.fx.Node], outputs: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """The operations that outputs depend on, and whatever writes into its arguments."""
    calls = [node for node in nodes if node.op == "call_function"]
    live: set[torch.fx.Node] = set()
    wanted = [*outputs, *(node for node in calls if _writes(node))]
    while wanted:
        node = wanted.pop()
        if node.op == "call_function" and node not in live:
            live.add(node)
            wanted += node.all_input_nodes
    return live


def _writes(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and fixed random numbers within the block; modes and buffers are put back."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            _seed_devices_of(model)
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _seed_devices_of(model: nn.Module) -> None:
    """Fix random numbers where a network runs.

    On CPUs only their own generator: seeding devices that nobody uses costs as much as a batch.
    """
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        torch.default_generator.manual_seed(0)
    else:
        torch.manual_seed(0)


# What training mode makes random, or dependent on the rest of the batch.
_EVALUATED = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)


def train_paths(model: nn.Module) -> None:
    """Training mode for all but normalisation and dropout: other paths, the same functions."""
    for module in model.modules():
        module.training = not isinstance(module, _EVALUATED)


def part_of(op: Op, node: torch.fx.Node) -> Op:
    """One of the operations that another one consists of, in the same line of code."""
    node.meta.setdefault("stack_trace", op.node.meta.get("stack_trace"))
    return replace(_op(node), training=op.training)


def _op(node: torch.fx.Node) -> Op:
    target: Any = node.target
    if target is operator.getitem:
        return Op("getitem", node, {"self": node.args[0], "index": node.args[1]}, False)
    if not isinstance(target, torch._ops.OpOverload):
        name = getattr(target, "__name__", str(target))
        return Op(name, node, dict(enumerate(node.args)) | dict(node.kwargs), False)  # type: ignore[arg-type]
    schema = target._schema
    arguments: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if argument.name in node.kwargs:
            arguments[argument.name] = node.kwargs[argument.name]
        elif position < len(node.args):
            arguments[argument.name] = node.args[position]
        else:
            arguments[argument.name] = argument.default_value
    name = schema.name.split("::")[1]
    name = name.rstrip("_") if not name.startswith("_") else name
    random = torch.Tag.nondeterministic_seeded in target.tags
    return Op(name, node, arguments, torch.Tag.pointwise in target.tags and not random)
