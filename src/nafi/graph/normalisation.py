"""Batch normalisation when networks are fused: folded, put back, averaged, measured anew.

Hides: how scale and shift become weights and biases, and which modules keep statistics.
Promises: in eval mode a folded network computes what it did (Appendix E of the paper), and so does
one whose normalisation was put back; `calibrate` changes nothing but running statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from nafi.errors import InputError, SpecError
from nafi.graph.inputs import Inputs, call, run_batches
from nafi.graph.spec import ModelSpec
from nafi.graph.tensors import Kind, TensorSpec
from nafi.graph.trace import copy_network, evaluating, named_tensors, shared_names

_BatchNorm = nn.modules.batchnorm._BatchNorm
_NORMS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm}
_LAYERS: list[type[nn.Module]] = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]
_LAYERS += [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
_FORWARDS = {kind.forward for kind in _LAYERS}
_ONE_DIMENSIONAL = (nn.Linear, nn.Conv1d, nn.ConvTranspose1d)
_THREE_DIMENSIONAL = (nn.Conv3d, nn.ConvTranspose3d)
# Normalisation -> mean and deviation of each channel that it makes.
OutputMoments = Mapping[str, tuple[Tensor, Tensor]]
# What the tensors of torch's normalisation are for.
_KINDS = {
    "weight": Kind.GAIN,
    "bias": Kind.BIAS,
    "running_mean": Kind.MEAN,
    "running_var": Kind.VARIANCE,
    "num_batches_tracked": Kind.COUNTER,
}


class Normalisation(StrEnum):
    """What becomes of batch normalisation in a fusion.

    Neurons are always matched with their normalisation folded into the layer before it: only then
    are the weights what the network computes. The three ways differ in what is merged and returned.

    attach: the folded networks are merged. A new normalisation that changes nothing is put behind
        every merged layer, so that the result has the modules of the clients and can be trained on.
    fold: the folded networks are merged, and the result stays folded: it has biases instead.
    average: the networks are merged as the clients have them, statistics and gains included, once
        the neurons have their places. Networks that trained on from a common start keep their
        statistics this way; others need `calibrate` afterwards.
    """

    ATTACH = "attach"
    FOLD = "fold"
    AVERAGE = "average"

    def for_matching(self, model: nn.Module, spec: ModelSpec) -> tuple[nn.Module, ModelSpec]:
        """The network to match neurons by, and its spec: folded, whatever becomes of it."""
        return fold_batchnorm(model, spec) if spec.batchnorms else (model, spec)

    @property
    def merges_unfolded(self) -> bool:
        """Whether the networks are merged as the clients have them, not folded."""
        return self is Normalisation.AVERAGE

    def put_back(
        self,
        model: nn.Module,
        spec: ModelSpec,
        like: nn.Module,
        moments: OutputMoments | None = None,
    ) -> tuple[nn.Module, ModelSpec]:
        """A merged network as it is returned; see `attach_batchnorm`.

        like: a client's network from before folding
        """
        if self is Normalisation.ATTACH and spec.folded:
            return attach_batchnorm(model, spec, like=like, moments=moments)
        return model, spec


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
    twin = copy_network(model)
    tensors = dict(spec.tensors)
    wanted = spec.batchnorms if only is None else [p for p in spec.batchnorms if p in only]
    pairs = [pair for pair in wanted if _is_plain(twin, *pair)]
    dropped: set[str] = set()
    for layer_name, norm_name in pairs:
        layer, norm = twin.get_submodule(layer_name), twin.get_submodule(norm_name)
        _fold(layer, norm)
        _replace(twin, norm, nn.Identity())
        weight, bias = _path(layer_name, "weight"), _path(layer_name, "bias")
        channels = tensors[_path(norm_name, "running_mean")].axes
        tensors[bias] = TensorSpec(channels, kind=Kind.BIAS)
        tensors[weight] = replace(tensors[weight], bias=bias)
        dropped |= {_path(norm_name, name) for name in _KINDS}
    kept = tuple(p for p in spec.pinned if p.tensor not in dropped)
    remaining = tuple(pair for pair in spec.batchnorms if pair not in pairs)
    folded = (*spec.folded, *pairs)
    return twin, _described(
        twin, replace(spec, batchnorms=remaining, folded=folded, pinned=kept), tensors
    )


def attach_batchnorm(
    model: nn.Module,
    spec: ModelSpec,
    like: nn.Module | None = None,
    moments: OutputMoments | None = None,
) -> tuple[nn.Module, ModelSpec]:
    """A copy with a normalisation in place of every folded one, so that training can go on.

    Nothing changes in eval mode. With the moments of what the layers make, nothing much changes in
    training mode either: mean and variance are those moments, shift and scale undo them. Without,
    they are 0, 1 - eps, 0 and 1. Where the layer of the network `like`, from before folding, had no
    bias, the bias goes into the normalisation, so that the copy has the tensors of that network
    again.
    """
    twin = copy_network(model)
    tensors = dict(spec.tensors)
    for layer_name, norm_name in spec.folded:
        layer = twin.get_submodule(layer_name)
        bias = getattr(layer, "bias", None)
        if not isinstance(bias, Tensor):
            raise SpecError(f"{layer_name} has no bias, so nothing was folded into it")
        before = like.get_submodule(norm_name) if like is not None else None
        norm = _norm_after(layer, bias, before)
        tensors |= _norm_tensors(norm, norm_name, tensors[_path(layer_name, "bias")])
        if like is not None and like.get_submodule(layer_name).bias is None:
            _shift_by(norm, bias)
            layer.register_parameter("bias", None)
            weight = _path(layer_name, "weight")
            tensors[weight] = replace(tensors[weight], bias=None)
        if moments is not None and norm.affine:
            _set_moments(norm, *moments[norm_name])
        _replace(twin, twin.get_submodule(norm_name), norm)
    back = replace(spec, batchnorms=(*spec.batchnorms, *spec.folded), folded=())
    return twin, _described(twin, back, tensors)


def claimed_moments(
    state: Mapping[str, Tensor], pairs: Collection[tuple[str, str]]
) -> OutputMoments:
    """What a network's normalisations make of their inputs, by their own shift and gain."""
    moments = {}
    for _, name in pairs:
        zero = torch.zeros(state[_path(name, "running_mean")].shape)
        shift, gain = (
            state.get(_path(name, "bias"), zero),
            state.get(_path(name, "weight"), zero + 1),
        )
        moments[name] = shift.detach().cpu().float(), gain.detach().cpu().float().abs()
    return moments


def measured_moments(
    model: nn.Module, pairs: Collection[tuple[str, str]], inputs: Inputs
) -> OutputMoments:
    """Means and deviations of what layers make of some inputs. Cost: one run."""
    moments: dict[str, tuple[Tensor, Tensor]] = {}

    def watch_layer(layer: nn.Module, norm: str) -> Any:
        def keep(module: nn.Module, arguments: Any, output: Tensor) -> None:
            rest = [dim for dim in range(output.ndim) if dim != 1]
            deviation, mean = torch.std_mean(output.float(), rest, correction=0)
            moments[norm] = mean, deviation

        return layer.register_forward_hook(keep)

    handles = [watch_layer(model.get_submodule(layer), norm) for layer, norm in pairs]
    try:
        if handles:
            with evaluating(model):
                call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return moments


def calibrate(model: nn.Module, batches: Iterable[Any]) -> nn.Module:
    """Measure the statistics of a network's batch normalisation on some inputs, in place.

    batches: inputs of the network, or tuples that begin with them, as a DataLoader gives; no labels
        are needed, and some dozens of inputs will do, two or more in each batch

    The mean of neurons that differ varies less than they do. Normalisation that was averaged with
    its neurons (`nafi.fuse(..., batchnorm="average")`) gives them back the variance they had, once
    its statistics are those of the fused network (Jordan et al., 2023). Returns the network, in
    eval mode.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if norms and all(map(_is_identity, norms)):
        raise InputError(
            "calibrate: the normalisation of this network was folded and put back as an identity, "
            "so there are no statistics to measure; fuse with probe=, or with batchnorm='average'"
        )
    momenta = [norm.momentum for norm in norms]
    try:
        with evaluating(model):  # which puts statistics back as well, whatever happens
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # the mean over all batches
                norm.train()
            run_batches(model, batches, "calibrate")
            measured = [{n: b.clone() for n, b in norm.named_buffers()} for norm in norms]
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    for norm, statistics in zip(norms, measured, strict=True):
        norm.load_state_dict(statistics, strict=False)
    return model.eval()


def _path(module: str, name: str) -> str:
    """The full name of a module's own tensor; the root module has no name."""
    return f"{module}.{name}".removeprefix(".")


def _norm_tensors(norm: nn.Module, path: str, like: TensorSpec) -> dict[str, TensorSpec]:
    """The tensors of a normalisation of the same channels as a bias."""
    state = norm.state_dict()
    bias = _path(path, "bias") if "bias" in state else None
    return {
        _path(path, name): TensorSpec(
            like.axes if tensor.ndim else (),
            kind=_KINDS[name],
            bias=bias if _KINDS[name] is Kind.GAIN else None,
        )
        for name, tensor in state.items()
    }


def _described(model: nn.Module, spec: ModelSpec, tensors: dict[str, TensorSpec]) -> ModelSpec:
    """The spec of the tensors that the network has now."""
    aliases = shared_names(model)
    names = [name for name in named_tensors(model) if name not in aliases]
    return replace(spec, tensors={name: tensors[name] for name in names}, aliases=aliases)


def _is_plain(model: nn.Module, layer: str, norm: str) -> bool:
    """Whether both are torch's own modules and do nothing else than their kind does."""
    return (
        type(model.get_submodule(norm)) in _NORMS
        and type(model.get_submodule(layer)).forward in _FORWARDS
    )


def _fold(layer: nn.Module, norm: nn.Module) -> None:
    assert isinstance(norm, _BatchNorm)
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
        weight.copy_(_scaled_outputs(layer, weight.detach().to(scale, copy=True), scale))
        layer.bias = nn.Parameter(folded.to(weight.dtype), weight.requires_grad)


def _scaled_outputs(layer: nn.Module, weight: Tensor, scale: Tensor) -> Tensor:
    """Each output of the layer times its factor; may change the weight."""
    if getattr(layer, "transposed", False):
        groups = int(layer.groups)  # type: ignore[arg-type]
        grouped = weight.reshape(groups, -1, *weight.shape[1:])
        factor = scale.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))
        return (grouped * factor).reshape(weight.shape)
    return weight.mul_(scale.reshape(-1, *[1] * (weight.ndim - 1)))


def _norm_after(layer: nn.Module, bias: Tensor, before: nn.Module | None) -> _BatchNorm:
    """A normalisation that changes nothing in eval mode, in other ways like the one before."""
    kind: type[_BatchNorm] = nn.BatchNorm2d
    if isinstance(layer, _ONE_DIMENSIONAL):
        kind = nn.BatchNorm1d
    elif isinstance(layer, _THREE_DIMENSIONAL):
        kind = nn.BatchNorm3d
    options: dict[str, Any] = {"device": bias.device, "dtype": bias.dtype}
    if isinstance(before, _BatchNorm):
        options |= {"eps": before.eps, "momentum": before.momentum, "affine": before.affine}
    norm = kind(len(bias), **options)
    assert norm.running_var is not None
    norm.running_var.sub_(norm.eps)
    norm.train(layer.training)
    return norm


def _is_identity(norm: _BatchNorm) -> bool:
    """Whether a normalisation is as `attach_batchnorm` makes it where it knows no moments."""
    assert norm.running_var is not None
    unit = torch.ones_like(norm.running_var) - norm.eps
    return bool(torch.equal(norm.running_var, unit))


def _set_moments(norm: _BatchNorm, mean: Tensor, deviation: Tensor) -> None:
    """Other statistics and the gain and shift that undo them; the function stays as it is.

    mean, deviation: of what comes out. A neuron that never changes is left as it is.
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, deviation = mean.to(norm.running_mean), deviation.to(norm.running_var)
    varies = deviation.square() > norm.eps
    with torch.no_grad():
        norm.running_mean.add_(torch.where(varies, mean - norm.bias, 0.0))
        norm.bias.copy_(torch.where(varies, mean, norm.bias))
        norm.running_var.copy_(torch.where(varies, deviation.square() - norm.eps, norm.running_var))
        norm.weight.copy_(torch.where(varies, deviation, norm.weight))


def _shift_by(norm: _BatchNorm, bias: Tensor) -> None:
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
