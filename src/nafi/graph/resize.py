"""A network's tensors at other sizes, and modules of torch that know about it.

Hides: which attributes of torch's modules repeat a size that their tensors have already.
Promises: neurons are kept from the front and new ones are zero; every module of torch prints, runs
and trains like one that was made at these sizes, or an error says which cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from nafi.errors import SpecError
from nafi.graph.blocks import Block, transform
from nafi.graph.inputs import first_line
from nafi.graph.spec import ModelSpec
from nafi.graph.tensors import Segment
from nafi.graph.trace import named_tensors, with_tensors


def resize_state(
    state: Mapping[str, Tensor], spec: ModelSpec, widths: Mapping[str, int]
) -> dict[str, Tensor]:
    """A state dict at other widths: neurons kept from the front, new ones zero."""
    spec.check_shapes(state)
    target = spec.resized(widths)
    result = {name: resized(state[name], name, spec, target) for name in spec.axes}
    return result | {other: result[name] for other, name in spec.aliases.items()}


def resized(tensor: Tensor, name: str, spec: ModelSpec, target: ModelSpec) -> Tensor:
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
    """A copy of the network with these tensors, and modules of torch that know their sizes."""
    twin = with_tensors(model, state, spec.aliases)
    for path, module in twin.named_modules():
        try:
            _update_attributes(module, path, spec, new_spec)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            kind = type(module).__name__
            text = f"{path}: {kind} cannot be given other sizes ({first_line(error)})"
            raise SpecError(text) from error
    return twin


# --------------------------------------------------------------------------- module attributes


def _update_attributes(module: nn.Module, path: str, spec: ModelSpec, new_spec: ModelSpec) -> None:
    """Let the sizes that a module remembers agree with its tensors."""
    name, weight = _stored_weight(module)
    shape = tuple(weight.shape) if weight is not None else ()
    match module:
        case nn.Linear() if len(shape) == 2:
            module.out_features, module.in_features = shape
        case nn.Bilinear() if shape:
            module.out_features, module.in1_features, module.in2_features = shape
        case nn.modules.conv._ConvNd() if shape:
            _update_convolution(module, f"{path}.{name}", shape, spec, new_spec)
        case nn.modules.batchnorm._NormBase():
            sized = module.running_mean if weight is None else weight
            if isinstance(sized, Tensor):
                module.num_features = len(sized)
        case nn.LayerNorm() | nn.RMSNorm() if shape:
            module.normalized_shape = shape
        case nn.GroupNorm() if shape:
            old = module.num_channels // module.num_groups
            inner = _inner(spec, new_spec, f"{path}.weight", 0, old)
            module.num_channels, module.num_groups = shape[0], shape[0] // inner
        case nn.PReLU() if shape:
            module.num_parameters = shape[0]
        case nn.Embedding() | nn.EmbeddingBag() if shape:
            module.num_embeddings, module.embedding_dim = shape
        case nn.RNNBase():
            _update_recurrent(module, path)
        case nn.RNNCellBase():
            module.hidden_size = module.weight_hh.shape[1]
            module.input_size = module.weight_ih.shape[1]
        case nn.MultiheadAttention():
            _update_attention(module, path, spec, new_spec)
        case _ if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
            # transformers' linear layer with transposed weights
            for attribute, size in zip(("nx", "nf"), shape, strict=True):
                setattr(module, attribute, size)


# Where parametrisations, and the older hooks, keep what a weight is computed from.
_STORED = (
    "parametrizations.weight.original1",
    "parametrizations.weight.original",
    "weight_v",
    "weight_orig",
    "weight",
)


def _stored_weight(module: nn.Module) -> tuple[str, Tensor | None]:
    """The tensor with the shape of a module's weight that the module keeps, and its name there."""
    own = named_tensors(module)
    return next(((name, own[name]) for name in _STORED if name in own), ("weight", None))


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
    module: nn.modules.conv._ConvNd,
    tensor: str,
    shape: tuple[int, ...],
    spec: ModelSpec,
    new_spec: ModelSpec,
) -> None:
    whole, part = shape[:2]
    if module.groups > 1:
        # Axis 0 is never divided by the groups: outputs, or the inputs of a transposed one.
        channels = module.in_channels if module.transposed else module.out_channels
        inner = _inner(spec, new_spec, tensor, 0, channels // module.groups)
        module.groups = whole // inner
    read, written = (whole, part) if module.transposed else (part, whole)
    module.in_channels = read if module.transposed else read * module.groups
    module.out_channels = written * module.groups if module.transposed else written


def _update_recurrent(module: nn.RNNBase, path: str) -> None:
    weights = named_tensors(module)
    recurrent = [w for name, w in weights.items() if name.startswith("weight_hh")]
    gates = {nn.LSTM: 4, nn.GRU: 3}.get(type(module), 1)
    hidden = {len(w) // gates for w in recurrent}
    handed_on = {w.shape[1] for w in recurrent}
    if len(hidden) > 1 or len(handed_on) > 1:
        raise SpecError(
            f"{path}: {type(module).__name__} has one hidden_size for all layers and directions, "
            f"found widths {sorted(hidden | handed_on)}; give its groups the same width"
        )
    module.input_size = weights["weight_ih_l0"].shape[1]
    module.hidden_size = hidden.pop()
    module.proj_size = handed_on.pop() if module.proj_size else 0


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
