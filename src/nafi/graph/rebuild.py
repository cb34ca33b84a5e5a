"""The same network at other widths.

Hides: which attributes of which modules repeat a size that the tensors have already.
Promises: a module that runs, trains, prints and exports like one that was made at these widths, or
an error that names the line of the network's code that stands in the way; never a network whose
code still assumes the old sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from nafi.errors import SpecError
from nafi.graph.blocks import Block, transform
from nafi.graph.check import TOLERANCE, converted, difference, probe_of, run
from nafi.graph.groups import analyse, sized_ops
from nafi.graph.inputs import Inputs, check_inputs, first_line
from nafi.graph.spec import ModelSpec
from nafi.graph.tensors import Segment
from nafi.graph.trace import copy_network, named_tensors

# Says what is wrong with a network, if anything.
_See = Callable[[], str | None]


def rebuild(
    model: nn.Module,
    spec: ModelSpec,
    widths: Mapping[str, int],
    example_inputs: Inputs | None = None,
) -> nn.Module:
    """A copy of the network with some groups at other widths.

    widths: group -> new width; groups not named keep theirs. Neurons are kept from the front, new
        ones are zero (running variances one), so that widening a group that is not rigid leaves
        the function as it was.
    example_inputs: those of `groups`, which the spec remembers, unless others are given.
    """
    inputs = _inputs_of(spec, example_inputs)
    twin, trouble = _rebuilt(model, spec, widths, inputs)
    if trouble is not None:
        changed = [name for name, width in widths.items() if width != spec.groups[name].width]
        raise SpecError(_advice(model, changed, inputs, trouble))
    return twin


def width_trouble(model: nn.Module, spec: ModelSpec, widths: Mapping[str, int]) -> str | None:
    """Why a network cannot have these widths, if it cannot.

    Cheaper than `rebuild`, which looks for the lines of code to blame.
    """
    try:
        return _rebuilt(model, spec, widths, _inputs_of(spec, None))[1]
    except SpecError as error:
        return str(error)


def tied_widths(model: nn.Module, spec: ModelSpec) -> list[tuple[str, ...]]:
    """Groups that must have the same width, because one module has one size for all of them."""
    ties = []
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and not module.proj_size:
            names = [f"{path}.{name}".removeprefix(".") for name, _ in module.named_parameters()]
            units = [
                group
                for name in names
                if "weight_hh" in name
                for group in sorted(spec.tensor(name).groups_on([1]))
            ]
            ties.append(tuple(dict.fromkeys(units)))
    return [tie for tie in ties if len(tie) > 1]


def _inputs_of(spec: ModelSpec, example_inputs: Inputs | None) -> Inputs:
    inputs = spec.example_inputs if example_inputs is None else example_inputs
    if inputs is None:
        raise SpecError("rebuild needs example_inputs to see that the new network runs")
    return check_inputs(inputs)


def _rebuilt(
    model: nn.Module, spec: ModelSpec, widths: Mapping[str, int], inputs: Inputs
) -> tuple[nn.Module, str | None]:
    """The network at other widths, and what is wrong with it, if anything."""
    new_spec = spec.resized(widths)
    changed = [name for name, width in widths.items() if width != spec.groups[name].width]
    state = resize_state(named_tensors(model), spec, widths)
    twin = load_resized(model, spec, new_spec, state)
    if not changed:
        return twin, None
    see = partial(_trouble, model, twin, spec, new_spec, inputs)
    trouble = see()
    for level in (1, 2):
        # Modules of the user's own remember sizes as well, such as a number of heads.
        if trouble is not None:
            owners = _owners_above(spec, changed, level)
            remembered = _remembered(twin, spec, new_spec, changed, owners)
            trouble = _adapt(trouble, remembered, see)
    return twin, trouble


def resize_state(
    state: Mapping[str, Tensor], spec: ModelSpec, widths: Mapping[str, int]
) -> dict[str, Tensor]:
    """A state dict at other widths: neurons kept from the front, new ones zero."""
    spec.check_shapes(state)
    target = spec.resized(widths)
    result = {name: _resized(state[name], name, spec, target) for name in spec.axes}
    return result | {other: result[name] for other, name in spec.aliases.items()}


def _resized(tensor: Tensor, name: str, spec: ModelSpec, target: ModelSpec) -> Tensor:
    """One tensor at other widths."""
    meaning = spec.tensor(name)
    change = _resizer(target.widths, meaning.neutral)
    return transform(tensor, meaning.axes, spec.widths, change, new_widths=target.widths)


def _resizer(target: Mapping[str, int], filling: float) -> Callable[[Tensor, Block], Tensor]:
    def change(unfolded: Tensor, block: Block) -> Tensor:
        shape = [target[f] if isinstance(f, str) else f for f in block.factors]
        if list(unfolded.shape) == shape:
            return unfolded
        kept = [slice(min(old, new)) for old, new in zip(unfolded.shape, shape, strict=True)]
        grown = torch.full(shape, filling, dtype=unfolded.dtype, device=unfolded.device)
        grown[tuple(kept)] = unfolded[tuple(kept)]
        return grown

    return change


def load_resized(
    model: nn.Module, spec: ModelSpec, new_spec: ModelSpec, state: Mapping[str, Tensor]
) -> nn.Module:
    """A copy of the network that holds these tensors, whatever their sizes."""
    old = named_tensors(model)
    # Every tensor is replaced below, so none need be copied.
    twin = copy_network(model, shared=old.values())
    made: dict[str, nn.Parameter] = {}
    owners: dict[nn.Module, str] = {}  # a module with several names once, under its first
    for name in [*spec.axes, *spec.aliases]:
        path, _, attribute = name.rpartition(".")
        owner = twin.get_submodule(path)
        owners.setdefault(owner, path)
        if isinstance(old[name], nn.Parameter):
            kept = spec.aliases.get(name, name)
            if kept not in made:
                made[kept] = nn.Parameter(state[kept], old[name].requires_grad)
            setattr(owner, attribute, made[kept])
        else:
            setattr(owner, attribute, state[name])
    for owner, path in owners.items():
        _update_attributes(owner, path, spec, new_spec)
    for path, module in twin.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            _update_attention(module, path, spec, new_spec)
    return twin


# --------------------------------------------------------------------------- module attributes


def _update_attributes(module: nn.Module, path: str, spec: ModelSpec, new_spec: ModelSpec) -> None:
    """Let the sizes that a module remembers agree with its tensors."""
    weight: Any = getattr(module, "weight", None)
    shape = tuple(weight.shape) if isinstance(weight, Tensor) else ()
    match module:
        case nn.Linear():
            module.out_features, module.in_features = shape
        case nn.Bilinear():
            module.out_features, module.in1_features, module.in2_features = shape
        case nn.modules.conv._ConvNd():
            _update_convolution(module, path, spec, new_spec)
        case nn.modules.batchnorm._NormBase():
            sized = weight if isinstance(weight, Tensor) else module.running_mean
            if isinstance(sized, Tensor):
                module.num_features = len(sized)
        case nn.LayerNorm() | nn.RMSNorm() if shape:
            module.normalized_shape = shape
        case nn.GroupNorm() if shape:
            old = module.num_channels // module.num_groups
            inner = _inner(spec, new_spec, f"{path}.weight", 0, old)
            module.num_channels, module.num_groups = shape[0], shape[0] // inner
        case nn.PReLU():
            module.num_parameters = shape[0]
        case nn.Embedding() | nn.EmbeddingBag():
            module.num_embeddings, module.embedding_dim = shape
        case nn.RNNBase():
            _update_recurrent(module, path)
        case nn.RNNCellBase():
            module.hidden_size, module.input_size = (
                module.weight_hh.shape[1],
                module.weight_ih.shape[1],
            )
        case _ if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
            # transformers' linear layer with transposed weights
            for attribute, size in zip(("nx", "nf"), shape, strict=True):
                setattr(module, attribute, size)


def _inner(spec: ModelSpec, new_spec: ModelSpec, tensor: str, axis: int, old: int) -> int:
    """The new size of what were the innermost `old` positions of an axis."""
    tensor = tensor.removeprefix(".")  # of the root module
    for segment in spec.tensor(tensor).axes[axis]:
        for cut in range(len(segment.factors) + 1):
            tail = Segment(segment.factors[cut:])
            if tail.size(spec.widths) == old:
                return tail.size(new_spec.widths)
    return old


def _update_convolution(
    module: nn.modules.conv._ConvNd, path: str, spec: ModelSpec, new_spec: ModelSpec
) -> None:
    whole, part = module.weight.shape[:2]
    if module.groups > 1:
        # Axis 0 is never divided by the groups: outputs, or the inputs of a transposed one.
        channels = module.in_channels if module.transposed else module.out_channels
        inner = _inner(spec, new_spec, f"{path}.weight", 0, channels // module.groups)
        module.groups = whole // inner
    read, written = (whole, part) if module.transposed else (part, whole)
    module.in_channels = read if module.transposed else read * module.groups
    module.out_channels = written * module.groups if module.transposed else written


def _update_recurrent(module: nn.RNNBase, path: str) -> None:
    if module.proj_size:
        return  # its groups are not known, so nothing of it has changed
    weights = dict(module.named_parameters())
    hidden = {w.shape[1] for name, w in weights.items() if name.startswith("weight_hh")}
    if len(hidden) > 1:
        raise SpecError(
            f"{path}: {type(module).__name__} has one hidden_size for all layers and directions, "
            f"found widths {sorted(hidden)}; give its groups the same width"
        )
    module.input_size = weights["weight_ih_l0"].shape[1]
    module.hidden_size = hidden.pop()


def _update_attention(
    module: nn.MultiheadAttention, path: str, spec: ModelSpec, new_spec: ModelSpec
) -> None:
    width, inner = module.out_proj.weight.shape
    if module.in_proj_weight is not None:
        module.embed_dim = module.kdim = module.vdim = module.in_proj_weight.shape[1]
    else:
        module.embed_dim = module.q_proj_weight.shape[1]
        module.kdim, module.vdim = module.k_proj_weight.shape[1], module.v_proj_weight.shape[1]
    tensor = f"{path}.out_proj.weight"
    module.head_dim = _inner(spec, new_spec, tensor, 1, module.head_dim)
    module.num_heads = inner // module.head_dim
    if not width == inner == module.embed_dim:
        raise SpecError(
            "nn.MultiheadAttention needs heads x head width = embedding = output width, found "
            f"{inner}, {module.embed_dim} and {width} in {path}; change these groups together"
        )


@dataclass(eq=False)
class _Remembered:
    """A size that modules of one class keep in one attribute.

    modules: each with what the size may have to become in it
    """

    attribute: str
    old: Any
    modules: list[tuple[nn.Module, Any]] = field(default_factory=list)

    def change(self) -> None:
        for module, new in self.modules:
            setattr(module, self.attribute, new)

    def restore(self) -> None:
        for module, _ in self.modules:
            setattr(module, self.attribute, self.old)


def _adapt(trouble: str, remembered: list[_Remembered], see: _See) -> str | None:
    """Change what modules remember of sizes, as little as the network needs; what is still wrong.

    A number that happens to equal a size, such as a window, is left alone: an attribute is changed
    only if the network does not run without.
    """
    # All of them, or all but one: a number that only looks like a size spoils the others.
    for spared in [None, *remembered] if remembered else []:
        for size in remembered:
            size.change()
        if spared is not None:
            spared.restore()
        if see() is None:
            for size in remembered:
                size.restore()
                if see() is not None:
                    size.change()
            return None
    for size in remembered:
        size.restore()
    return trouble


def _remembered(
    twin: nn.Module,
    spec: ModelSpec,
    new_spec: ModelSpec,
    changed: list[str],
    paths: Collection[str],
) -> list[_Remembered]:
    """Attributes with the value of a size that changed; equal ones of one class go together.

    A module remembers sizes of the tensors below it: blocks of a network may have other widths.
    """
    sizes_kept: dict[tuple[type, str, Any], _Remembered] = {}
    for path in sorted(paths):
        below = [g for g in changed if any(_is_below(t, path) for t in spec.tensors_of(g))]
        sizes = _changed_sizes(spec, new_spec, below)
        for owner, attribute, old, new in _attributes_of_size(twin.get_submodule(path), sizes):
            key = (type(owner), attribute, old)
            kept = sizes_kept.setdefault(key, _Remembered(attribute, old))
            kept.modules.append((owner, new))
    return list(sizes_kept.values())


def _is_below(tensor: str, path: str) -> bool:
    return not path or tensor.startswith(f"{path}.")


def _attributes_of_size(
    module: nn.Module, sizes: Mapping[int, int]
) -> Iterator[tuple[nn.Module, str, Any, Any]]:
    """(module, attribute, value, new value) of what a module may remember of sizes."""
    if not _is_builtin(module):
        for attribute, value in list(vars(module).items()):
            if type(value) is int and value in sizes:
                yield module, attribute, value, sizes[value]
    for norm in module.children():
        # Without weights there is no tensor that its shape could have been taken from.
        if isinstance(norm, nn.LayerNorm) and norm.weight is None:
            old = tuple(norm.normalized_shape)
            new = tuple(sizes.get(n, n) for n in old)
            if new != old:
                yield norm, "normalized_shape", old, new


def _owners_above(spec: ModelSpec, changed: list[str], level: int) -> set[str]:
    """The modules up to so many levels above those that hold the tensors of some groups."""
    paths = {tensor for group in changed for tensor in spec.tensors_of(group)}
    owners: set[str] = set()
    for step in range(level + 1):
        paths = {path.rpartition(".")[0] for path in paths if path}
        owners |= paths if step else set()
    return owners


def _changed_sizes(spec: ModelSpec, new_spec: ModelSpec, changed: list[str]) -> dict[int, int]:
    """Old size -> new size of every group, block and axis that changes and is not ambiguous."""
    changes: dict[int, set[int]] = {}
    for group in changed:
        for place in spec.places(group):
            axis = spec.axes[place.tensor][place.axis]
            pieces = [axis, *((segment,) for segment in axis)]
            for segment in axis:
                ends = range(len(segment.factors) + 1)
                pieces += [(Segment(segment.factors[a:b]),) for a in ends for b in ends if a < b]
            for piece in pieces:
                old, new = (
                    sum(part.size(widths) for part in piece)
                    for widths in (spec.widths, new_spec.widths)
                )
                if old != new:
                    changes.setdefault(old, set()).add(new)
    return {old: new.pop() for old, new in changes.items() if len(new) == 1}


def _is_builtin(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn")


# ------------------------------------------------------------------------- seeing that it runs


def _trouble(
    model: nn.Module, twin: nn.Module, spec: ModelSpec, new_spec: ModelSpec, inputs: Inputs
) -> str | None:
    """What is wrong with the new network on the example inputs, if anything.

    Cut back to the old widths, the new network must be the old one, for what was cut is zero. This
    is seen with disturbed weights: a layer that starts at zero would hide everything. Where a rigid
    group changed, the new network is analysed instead and must have the groups that were asked for.
    """
    probe, tensors, dtype = probe_of(model, inputs, torch.Generator().manual_seed(0))
    wide = converted(twin, dtype)
    narrow = named_tensors(probe)
    with torch.no_grad():
        for name, tensor in named_tensors(wide).items():
            tensor.copy_(_resized(narrow[name], name, spec, new_spec))
            narrow[name].copy_(_resized(tensor, name, new_spec, spec))
    expected = run(probe, tensors)
    try:
        with _bare_norms_told(wide, twin):
            outputs = run(wide, tensors)
    except Exception as error:
        return f"fails: {first_line(error)}"
    if [t.shape for t in outputs] != [t.shape for t in expected]:
        shapes = [[tuple(t.shape) for t in each] for each in (outputs, expected)]
        return f"returns shapes {shapes[0]} instead of {shapes[1]}"
    if any(group.rigid and group.width != new_spec.widths[n] for n, group in spec.groups.items()):
        derived = analyse(twin, inputs)
        same = derived.axes == new_spec.axes and derived.groups == new_spec.groups
        return None if same else f"takes its neurons apart in another way: {derived.widths}"
    gap = difference(outputs, expected)
    return None if gap <= 10 * TOLERANCE[dtype] else f"computes something else (by {gap:.2g})"


@contextmanager
def _bare_norms_told(model: nn.Module, twin: nn.Module) -> Iterator[None]:
    """Let normalisations without tensors learn their size, in both, when the first one runs."""
    hooks = []
    for path, module in model.named_modules():
        if isinstance(module, _InstanceNorm) and not list(module.buffers()) + list(
            module.parameters()
        ):
            pair = (module, twin.get_submodule(path))
            hooks.append(module.register_forward_pre_hook(partial(_tell_size, pair)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tell_size(norms: Sequence[nn.Module], module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    assert isinstance(module, _InstanceNorm)
    dimension = inputs[0].ndim - module._get_no_batch_dim()  # type: ignore[no-untyped-call]
    for norm in norms:
        norm.num_features = inputs[0].shape[dimension]


def _advice(model: nn.Module, changed: list[str], inputs: Inputs, trouble: str) -> str:
    """Which lines of the network's code fix a size that should follow from the tensors."""
    lines = [
        f"{op.name} to a size with {size} (group {group}) in {op.source or op}"
        for op, size, group in sized_ops(model, inputs, changed)
    ]
    text = f"at other widths of {', '.join(changed)} the network {trouble}."
    if lines:
        text += " Its code may fix a size: " + "; ".join(dict.fromkeys(lines)) + "."
        text += " Write x.flatten(1), or view(x.size(0), -1), or take sizes from x.shape"
    return text
