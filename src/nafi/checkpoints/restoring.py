"""A network that is there, with the tensors of a file.

Hides: how a network is rebuilt at the widths that it was saved with. Promises: the network computes
what the one that was saved did, or a `CheckpointError` says why it cannot.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.checkpoints.prefixes import without_prefix
from nafi.errors import CheckpointError, SpecError, unlike
from nafi.fusion import EnsembleNetwork
from nafi.graph import (
    Inputs,
    ModelSpec,
    SpecWarning,
    check_inputs,
    copy_network,
    fold_batchnorm,
    groups,
    has_lazy_layers,
    materialise,
    named_tensors,
    rebuild,
    unwrapped,
)
from nafi.manifest import Manifest


def restore(
    model: nn.Module,
    state: Mapping[str, Tensor],
    manifest: Manifest,
    example_inputs: Inputs | None,
    label: str,
    prefix: str | None = None,
) -> nn.Module:
    """The network with these tensors, at their widths and dtypes; changes the network in place.

    What torch.compile or DataParallel put around it is taken off. label: what errors call the file;
    prefix: what stands before the names in it; guessed if None.
    """
    model = _materialised(unwrapped(model), example_inputs, label)
    tensors = named_tensors(model)
    shared = {other: state[name] for other, name in (manifest.aliases or {}).items()}
    if manifest.members is not None:
        return _side_by_side(model, {**state, **shared}, manifest, example_inputs, label)
    state = without_prefix({**state, **shared}, tensors, prefix, label)
    if _shapes(tensors) != _shapes(state):
        if _loads_by_itself(model, state):
            return model.eval()
        if not manifest.folded:
            _check_names(tensors, state, label)
        model = _resize(model, state, manifest, example_inputs, label)
        _check_names(named_tensors(model), state, label)
    _convert(model, state, label)
    # Not by load_state_dict: without the versions of modules, some would take the file for old.
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            tensor.copy_(state[name])
    return model.eval()


def _materialised(model: nn.Module, inputs: Inputs | None, label: str) -> nn.Module:
    """The network with sizes for all its layers."""
    if has_lazy_layers(model):
        if inputs is None:
            raise CheckpointError(
                f"{label}: the network has lazy layers, which need example inputs: write a "
                "function example_inputs() beside the factory"
            )
        materialise(model, inputs)
    return model


def _side_by_side(
    model: nn.Module,
    state: Mapping[str, Tensor],
    manifest: Manifest,
    example_inputs: Inputs | None,
    label: str,
) -> nn.Module:
    """Several networks in one, each at its own widths."""
    assert manifest.members is not None
    shares, class_shares = state.get("shares"), state.get("class_shares")
    count, networks, read = len(manifest.members), [], 0
    by_class = class_shares is None or (class_shares.ndim == 2 and len(class_shares) == count)
    if shares is None or shares.shape != (count,) or not by_class:
        raise CheckpointError(f"{label} does not say what each of its {count} networks counts")
    for index, member in enumerate(manifest.members):
        path = f"models.{index}."
        own = {name.removeprefix(path): t for name, t in state.items() if name.startswith(path)}
        part = Manifest(spec=member["spec"], folded=member["folded"])
        read += len(own)
        networks.append(restore(copy_network(model), own, part, example_inputs, f"{label}, {path}"))
    if read + 1 + (class_shares is not None) != len(state):
        raise CheckpointError(f"{label} holds tensors of more than its {count} networks")
    average = manifest.average or "logits"
    by_input = bool(manifest.by_input)
    return EnsembleNetwork(networks, shares, class_shares, average, by_input).eval()


def _loads_by_itself(model: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Whether the modules rename tensors in their state dict, and take these; if so, they have."""
    own = model.state_dict()
    renamed = own.keys() != named_tensors(model).keys()
    if not renamed or _shapes(own) != _shapes(state):
        return False
    versioned = OrderedDict(state)
    versioned._metadata = own._metadata  # type: ignore[attr-defined]
    try:
        model.load_state_dict(versioned)
    except (RuntimeError, KeyError, ValueError):
        return False
    return True


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _convert(model: nn.Module, state: Mapping[str, Tensor], label: str) -> None:
    """Give every tensor of the network the dtype that it has in the file."""
    tensors = named_tensors(model)
    for name, tensor in tensors.items():
        if _number_kind(tensor) != _number_kind(state[name]):
            dtype = state[name].dtype
            raise CheckpointError(f"{label}: {name} is {dtype}, expected {tensor.dtype}")
    floats = {name: t.dtype for name, t in state.items() if t.is_floating_point()}
    if all(tensors[name].dtype == dtype for name, dtype in floats.items()):
        return
    # First to the dtype of most numbers, for what is in no file: buffers that are not persistent.
    numbers: Counter[torch.dtype] = Counter()
    for name, dtype in floats.items():
        numbers[dtype] += state[name].numel()
    model.to(numbers.most_common(1)[0][0])
    for name, tensor in named_tensors(model).items():
        tensor.data = tensor.data.to(floats.get(name, tensor.dtype))


def _number_kind(tensor: Tensor) -> str:
    return "complex" if tensor.is_complex() else "real" if tensor.is_floating_point() else "whole"


def _resize(
    model: nn.Module,
    state: Mapping[str, Tensor],
    manifest: Manifest,
    example_inputs: Inputs | None,
    label: str,
) -> nn.Module:
    """The network at the widths of the tensors, batch normalisation folded if it was in theirs."""
    if example_inputs is None:
        raise CheckpointError(
            f"{label} has other widths than its network, and rebuilding needs example inputs: "
            "write a function example_inputs() beside the factory"
        )
    inputs = like_weights(example_inputs, model)
    try:
        saved = None if manifest.spec is None else ModelSpec.from_dict(manifest.spec)
        spec = _spec_of(model, saved, inputs)
        if manifest.folded:
            model, spec = fold_batchnorm(model, spec)
        widths = spec.fitted(state).widths if saved is None else saved.widths
        spec.resized(widths).check_shapes(state)
        return rebuild(model, spec, widths, inputs)
    except SpecError as error:
        raise CheckpointError(f"{label} is not a checkpoint of this network: {error}") from None


def like_weights(inputs: Inputs, model: nn.Module) -> Inputs:
    """Inputs in the precision of the network's weights, if they all have the same."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(dtypes) != 1:
        return inputs
    dtype = dtypes.pop()
    converted: Inputs = pytree.tree_map(
        lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x,
        check_inputs(inputs),
    )
    return converted


def _spec_of(model: nn.Module, saved: ModelSpec | None, example_inputs: Inputs) -> ModelSpec:
    """The groups of a network; saved: those of the same network at other widths, if known."""
    if saved is None:
        return groups(model, example_inputs)
    if any(len(s.groups) > 1 for axes in saved.axes.values() for axis in axes for s in axis):
        # Shapes tell of heads and their width as a product only.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SpecWarning)
            known = groups(model, example_inputs, check=False)
        if known.axes == saved.axes:
            return known
    return saved.fitted(named_tensors(model))


def _check_names(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], label: str) -> None:
    difference = unlike(state, tensors)
    if difference:
        raise CheckpointError(
            f"{label} is not a checkpoint of this network: it {difference}; is the factory the "
            f"right one?{_prefix_hint(state, tensors)}"
        )


def _prefix_hint(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """What to do about names that all begin with the same attribute, as in files of Lightning."""
    first = {name.partition(".")[0] for name in state}
    own = {name.partition(".")[0] for name in tensors}
    if len(first) != 1 or first & own:
        return ""
    return f" If its names stand behind {first.pop()}. there, give --strip-prefix"
