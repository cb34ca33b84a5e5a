"""Batch normalisation folded into the layer before it, and put back.

Hides: how scale and shift become weights and biases. Promises: in eval mode the folded network
computes what it did (Appendix E of the paper), and so does one whose normalisation was put back.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nafi.errors import SpecError
from nafi.graph.spec import Axis, ModelSpec
from nafi.graph.trace import named_tensors, shared_names

_NORMS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm}
_LAYERS: list[type[nn.Module]] = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]
_LAYERS += [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
_FORWARDS = {kind.forward for kind in _LAYERS}
_ONE_DIMENSIONAL = (nn.Linear, nn.Conv1d, nn.ConvTranspose1d)
_THREE_DIMENSIONAL = (nn.Conv3d, nn.ConvTranspose3d)


def fold_batchnorm(
    model: nn.Module, spec: ModelSpec, only: Collection[tuple[str, str]] | None = None
) -> tuple[nn.Module, ModelSpec]:
    """A copy with every batch normalisation that directly follows a layer folded into it.

    `W' = W gamma / sqrt(var + eps)`, `b' = (b - mean) gamma / sqrt(var + eps) + beta`, with the
    running statistics; a bias is made where there was none. Returns the network and its spec;
    a normalisation that follows no layer (spec.batchnorms lists those that do) stays.
    only: fold these (layer, batchnorm) pairs and leave the others.
    """
    spec.check_shapes(named_tensors(model))
    twin = copy.deepcopy(model)
    axes = dict(spec.axes)
    wanted = spec.batchnorms if only is None else [p for p in spec.batchnorms if p in only]
    pairs = [pair for pair in wanted if _is_plain(twin, *pair)]
    dropped: set[str] = set()
    for layer_name, norm_name in pairs:
        layer, norm = twin.get_submodule(layer_name), twin.get_submodule(norm_name)
        _fold(layer, norm)
        _replace(twin, norm, nn.Identity())
        axes[f"{layer_name}.bias"] = (axes[f"{norm_name}.running_mean"][0],)
        dropped |= {name for name in spec.axes if name.rpartition(".")[0] == norm_name}
    kept = tuple(p for p in spec.pinned if p.tensor not in dropped)
    remaining = tuple(pair for pair in spec.batchnorms if pair not in pairs)
    folded = (*spec.folded, *pairs)
    return twin, _described(
        twin, replace(spec, batchnorms=remaining, folded=folded, pinned=kept), axes
    )


def attach_batchnorm(
    model: nn.Module, spec: ModelSpec, like: nn.Module | None = None
) -> tuple[nn.Module, ModelSpec]:
    """A copy with a normalisation in place of every folded one, so that training can go on.

    Mean 0, variance 1 - eps, scale 1, shift 0: nothing changes in eval mode. Where the layer of the
    network `like`, from before folding, had no bias, the bias goes into the normalisation, so that
    the copy has the tensors of that network again.
    """
    twin = copy.deepcopy(model)
    axes = dict(spec.axes)
    for layer_name, norm_name in spec.folded:
        layer = twin.get_submodule(layer_name)
        bias = getattr(layer, "bias", None)
        if not isinstance(bias, Tensor):
            raise SpecError(f"{layer_name} has no bias, so nothing was folded into it")
        before = like.get_submodule(norm_name) if like is not None else None
        norm = _norm_after(layer, bias, before)
        if like is not None and like.get_submodule(layer_name).bias is None:
            _shift_by(norm, bias)
            layer.register_parameter("bias", None)
        _replace(twin, twin.get_submodule(norm_name), norm)
        for name, tensor in norm.state_dict().items():
            axes[f"{norm_name}.{name}"] = axes[f"{layer_name}.bias"] if tensor.ndim else ()
    back = replace(spec, batchnorms=(*spec.batchnorms, *spec.folded), folded=())
    return twin, _described(twin, back, axes)


def _described(model: nn.Module, spec: ModelSpec, axes: dict[str, tuple[Axis, ...]]) -> ModelSpec:
    """The spec with these axes, for the tensors that the network has now."""
    aliases = shared_names(model)
    names = [name for name in named_tensors(model) if name not in aliases]
    return replace(spec, axes={name: axes[name] for name in names}, aliases=aliases)


def _is_plain(model: nn.Module, layer: str, norm: str) -> bool:
    """Whether both are torch's own modules and do nothing else than their kind does."""
    return (
        type(model.get_submodule(norm)) in _NORMS
        and type(model.get_submodule(layer)).forward in _FORWARDS
    )


def _fold(layer: nn.Module, norm: nn.Module) -> None:
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    weight, bias = layer.weight, layer.bias
    mean, variance = norm.running_mean, norm.running_var
    if not (
        isinstance(weight, Tensor) and isinstance(mean, Tensor) and isinstance(variance, Tensor)
    ):
        raise SpecError(f"{type(norm).__name__} without running statistics cannot be folded")
    # In double: the statistics may span many orders of magnitude.
    scale = (variance.double() + norm.eps).rsqrt()
    scale = scale * norm.weight.double() if norm.weight is not None else scale
    shift = norm.bias.double() if norm.bias is not None else torch.zeros_like(scale)
    before = bias.double() if isinstance(bias, Tensor) else torch.zeros_like(scale)
    with torch.no_grad():
        folded = (before - mean.double()) * scale + shift
        weight.copy_(_scaled_outputs(layer, weight.double(), scale))
        layer.bias = nn.Parameter(folded.to(weight.dtype), weight.requires_grad)


def _scaled_outputs(layer: nn.Module, weight: Tensor, scale: Tensor) -> Tensor:
    """Each output of the layer times its factor."""
    if getattr(layer, "transposed", False):
        groups = int(layer.groups)  # type: ignore[arg-type]
        grouped = weight.reshape(groups, -1, *weight.shape[1:])
        factor = scale.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))
        return (grouped * factor).reshape(weight.shape)
    return weight * scale.reshape(-1, *[1] * (weight.ndim - 1))


def _norm_after(
    layer: nn.Module, bias: Tensor, before: nn.Module | None
) -> nn.modules.batchnorm._BatchNorm:
    """A normalisation that changes nothing in eval mode, in other ways like the one before."""
    kind: type[nn.modules.batchnorm._BatchNorm] = nn.BatchNorm2d
    if isinstance(layer, _ONE_DIMENSIONAL):
        kind = nn.BatchNorm1d
    elif isinstance(layer, _THREE_DIMENSIONAL):
        kind = nn.BatchNorm3d
    options: dict[str, Any] = {"device": bias.device, "dtype": bias.dtype}
    if isinstance(before, nn.modules.batchnorm._BatchNorm):
        options |= {"eps": before.eps, "momentum": before.momentum, "affine": before.affine}
    norm = kind(len(bias), **options)
    assert norm.running_var is not None
    norm.running_var.sub_(norm.eps)
    norm.train(layer.training)
    return norm


def _shift_by(norm: nn.modules.batchnorm._BatchNorm, bias: Tensor) -> None:
    """Let the normalisation add a bias: by its shift, or by its mean if it has none."""
    with torch.no_grad():
        if norm.affine:
            norm.bias.copy_(bias)
        else:
            assert norm.running_mean is not None
            norm.running_mean.copy_(-bias)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, under all its names."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)
