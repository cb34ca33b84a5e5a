"""Networks in files and in Hugging Face folders.

Hides: the formats, and how a network is rebuilt at the widths that it was saved with. Promises:
nothing is ever unpickled; a file that cannot be used raises `CheckpointError` with its name and
what to do; files and folders are written completely or not at all.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.comparison import check_written
from nafi.errors import CheckpointError, InputError, SpecError, few, unlike
from nafi.factories import call_factory, load_factory, resolve_inputs
from nafi.files import atomic_path
from nafi.fusion import Body, EnsembleNetwork, FusionResult, FusionWarning
from nafi.graph import (
    Inputs,
    ModelSpec,
    SpecWarning,
    arguments,
    check_inputs,
    copy_network,
    fold_batchnorm,
    groups,
    has_lazy_layers,
    materialise,
    named_tensors,
    rebuild,
    shared_names,
    unwrapped,
)
from nafi.huggingface import (
    config_of,
    fill_network,
    is_folder,
    is_pretrained,
    load_folder,
    make_inputs,
    make_network,
    read_config,
    read_weights,
    save_folder,
    unlike_companions,
)
from nafi.manifest import Described, Manifest
from nafi.model_card import Origin, model_card
from nafi.prefixes import without_prefix
from nafi.tensor_files import read_tensors

_KEY = "nafi"


def save(
    model: nn.Module | FusionResult,
    path: str | Path,
    *,
    factory: str | None = None,
    example_inputs: Inputs | None = None,
    class_counts: Sequence[float] | None = None,
    sample_count: float | None = None,
    overwrite: bool = False,
    verify: Inputs | None = None,
    files_from: str | Path | None = None,
    card: str | None = None,
) -> None:
    """Write a model, or the result of `nafi.fuse`, with all that `nafi.load` needs.

    A network of transformers becomes a Hugging Face folder, which is always verified, unless the
    path ends in .safetensors; its configuration then stands for a factory.

    factory: "package.module:function" that makes the network; if None, `load` must be given one
    class_counts: (K,) samples per class, sample_count: all samples; `nafi fuse` reads them
    verify: inputs on which the network must do the same once it is read again, before the file
        takes its name; else nothing is written
    files_from: for a folder, another one whose tokenizer and preprocessor files are copied
    card: for a folder, the text of its README.md, instead of what a result knows of itself
    """
    result = model if isinstance(model, FusionResult) else None
    network = result.model if result is not None else model
    target = Path(path)
    if not isinstance(network, nn.Module):
        raise InputError(f"model: found {type(network).__name__}, expected a network")
    network = unwrapped(network)
    if is_folder_name(target) and is_pretrained(network):
        if factory is not None or class_counts is not None or sample_count is not None:
            raise InputError(f"{target}: a folder holds no factory and no counts; save a file")
        if result is not None and result.spec is not None and result.spec.folded:
            raise InputError(
                f"{target}: a folder needs normalisation; fuse with batchnorm='attach'"
            )
        save_folder(
            network,
            target,
            spec=None if result is None else result.spec,
            example_inputs=example_inputs if verify is None else verify,
            files_from=None if files_from is None else Path(files_from),
            texts=_card_of(result, target) if card is None else {"README.md": card},
            overwrite=overwrite,
        )
        return
    if files_from is not None or card is not None:
        raise InputError(f"{target}: files_from and card are for Hugging Face folders")
    if target.exists() and not overwrite:
        raise InputError(f"{target} exists already; choose another name, or overwrite it")
    if factory is not None and (not isinstance(factory, str) or ":" not in factory):
        raise InputError(f"factory: found {factory!r}, expected 'package.module:function'")
    counts = None if class_counts is None else _check_counts(class_counts, "class_counts")
    count = None if sample_count is None else _check_counts([sample_count], "sample_count")[0]
    if example_inputs is not None:
        check_inputs(example_inputs)
    aliases = shared_names(network)
    state = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in named_tensors(network).items()
        if name not in aliases
    }
    several = network if isinstance(network, EnsembleNetwork) else None
    spec = None if result is None else result.architecture
    bodies = () if result is None else result.bodies
    inputs = example_inputs or next(
        (known.example_inputs for known in [spec, *(b.architecture for b in bodies)] if known), None
    )
    manifest = Manifest(
        factory=factory,
        widths=dict(result.widths) if result is not None and several is None else None,
        spec=spec.to_dict() if spec is not None else None,
        folded=bool(result is not None and result.spec is not None and result.spec.folded),
        inputs=_describe(inputs),
        class_counts=counts,
        sample_count=count,
        aliases=aliases or None,
        members=None if several is None else _describe_members(several, bodies),
        average=None if several is None else several.average,
        config=_config(network) if factory is None else None,
    )
    with atomic_path(target) as partial:
        save_file(state, partial, metadata={_KEY: manifest.to_json()})
        if verify is not None:
            check_written(partial, target, load, network, verify)


def is_folder_name(path: Path) -> bool:
    """Whether a network of transformers is written to a folder under this name."""
    return path.suffix != ".safetensors"


def _card_of(result: FusionResult | None, target: Path) -> dict[str, str]:
    if result is None:
        return {}
    return {"README.md": model_card(result, target, Origin(), hub=True)}


def _config(network: nn.Module) -> dict[str, Any] | None:
    """What makes the network, or each of several side by side, if it is one of transformers."""
    one = network.models[0] if isinstance(network, EnsembleNetwork) else network
    return config_of(one) if isinstance(one, nn.Module) and is_pretrained(one) else None


def _describe_members(network: EnsembleNetwork, bodies: Sequence[Body]) -> list[dict[str, Any]]:
    """What is known of each of several networks side by side; shapes tell the rest."""
    if not bodies:
        return [{"spec": None, "folded": False} for _ in network.models]
    return [
        {"spec": body.architecture.to_dict(), "folded": bool(body.spec.folded)} for body in bodies
    ]


def save_changed(
    source: str | Path, model: nn.Module, target: str | Path, *, overwrite: bool = False
) -> None:
    """Write the network of a checkpoint with other weights, and all else that its file says."""
    if Path(source).is_dir():
        save(model, target, overwrite=overwrite)
        return
    state, manifest = read(source)
    path = Path(target)
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists already; choose another name, or overwrite it")
    tensors = named_tensors(model)
    kept = without_prefix(state, tensors, None, str(source))
    changed = {name: tensors[name].detach().cpu().contiguous() for name in kept}
    with atomic_path(path) as partial:
        save_file(changed, partial, metadata={_KEY: manifest.to_json()})


def _check_counts(values: Sequence[float], name: str) -> list[float]:
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        raise InputError(f"{name}: found {values!r}, expected numbers") from None
    if not all(0 <= number < inf for number in numbers):
        raise InputError(f"{name}: found {values!r}, expected numbers of at least 0")
    return numbers


def load(
    path: str | Path,
    factory: str | Callable[[], nn.Module] | None = None,
    *,
    strip_prefix: str | None = None,
) -> nn.Module:
    """The network of a checkpoint, at the widths it was saved with, in eval mode.

    path: a file, or a Hugging Face folder, whose configuration makes the network
    factory: makes the network, instead of the one that the file names: a function without
        arguments, or its name, "package.module:function".
    strip_prefix: what stands before the names of the network's tensors in the file, as "model" in
        checkpoints of Lightning; guessed if None
    """
    if factory is None and is_folder(Path(path)):
        return load_folder(Path(path))
    state, manifest = read(path)
    factory = factory if factory is not None else manifest.factory
    inputs: Inputs | None = manifest.example_inputs()
    if factory is None and manifest.config is not None:
        return _from_config(state, manifest, str(path))
    if factory is None:
        raise CheckpointError(f"{path} does not say what makes its network; give load a factory")
    if not isinstance(factory, str):
        model = call_factory(factory)
    else:
        model, example_inputs = load_factory(factory)
        if not inputs and example_inputs is not None:
            inputs = resolve_inputs([], example_inputs)
    return restore(model, state, manifest, inputs, str(path), strip_prefix)


def _from_config(state: Mapping[str, Tensor], manifest: Manifest, label: str) -> nn.Module:
    """The network of a file that holds the configuration of one of transformers."""
    assert manifest.config is not None
    numbers = sum(tensor.numel() for tensor in state.values())
    network = make_network(manifest.config, label, numbers)
    inputs = manifest.example_inputs() or make_inputs(network)
    return restore(network, state, manifest, inputs, label)


def read(path: str | Path) -> tuple[dict[str, Tensor], Manifest]:
    """The tensors of a file under the names it has for them, and its manifest, perhaps empty.

    Reads safetensors, files of torch.save that hold tensors only (`weights_only=True`), and Hugging
    Face folders.
    """
    file = Path(path)
    if file.is_dir():
        config = read_config(file)
        return read_weights(file), Manifest(config=config)
    state, metadata = read_tensors(file)
    try:
        manifest = Manifest.from_json(metadata[_KEY]) if metadata.get(_KEY) else Manifest()
    except ValueError as error:
        raise CheckpointError(f"{file} has a manifest that cannot be read: {error}") from None
    missing = [name for name in (manifest.aliases or {}).values() if name not in state]
    if missing:
        raise CheckpointError(f"{file} lacks {few(missing)}, to which its aliases refer")
    return state, manifest


@dataclass(frozen=True, eq=False)
class ClientFiles:
    """Several checkpoints of one architecture, and what they say about their data.

    factory: makes their network; None if their configurations do
    folders: those that are Hugging Face folders
    """

    models: list[nn.Module]
    example_inputs: Inputs
    factory: str | None
    class_counts: list[list[float]] | None
    sample_counts: list[float] | None
    folders: list[Path]


def load_clients(
    paths: Sequence[str | Path],
    factory: str | None,
    shapes: Sequence[str] = (),
    strip_prefix: str | None = None,
) -> ClientFiles:
    """Read the checkpoints of clients, each at its own widths.

    factory: "package.module:function"; if None, the one that the files name
    shapes: of the inputs, without the batch, like "3,32,32"; if empty, from a function
        example_inputs() beside the factory, or from the files
    strip_prefix: what stands before the names of tensors in the files; guessed if None
    """
    files = [read(path) for path in paths]
    manifests = [manifest for _, manifest in files]
    factory = factory or next((m.factory for m in manifests if m.factory), None)
    for path, manifest in zip(paths, manifests, strict=True):
        if manifest.members is not None:
            raise InputError(f"{path} is several networks side by side; fuse its clients instead")
        if factory is None and manifest.config is None:
            raise InputError(f"{path} does not say what makes its network: give --model")
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    difference = unlike_companions(folders)
    if difference:
        text = f"{difference}: fuse networks that count words in the same way only"
        warnings.warn(text, FusionWarning, stacklevel=2)
    if factory is None:
        models = [
            fill_network(manifest.config or {}, state, str(path))
            if Path(path).is_dir()
            else _from_config(state, manifest, str(path))
            for path, (state, manifest) in zip(paths, files, strict=True)
        ]
        inputs: Inputs = resolve_inputs(shapes, lambda: make_inputs(models[0]))
    else:
        inputs = _client_inputs(factory, shapes, manifests)
        models = [
            restore(load_factory(factory)[0], state, manifest, inputs, str(path), strip_prefix)
            for path, (state, manifest) in zip(paths, files, strict=True)
        ]
    return ClientFiles(
        models,
        _like_weights(inputs, models[0]),
        factory,
        _from_all(paths, [m.class_counts for m in manifests], "class counts"),
        _from_all(paths, [m.sample_count for m in manifests], "sample counts"),
        folders,
    )


def _client_inputs(factory: str, shapes: Sequence[str], manifests: Iterable[Manifest]) -> Inputs:
    """Example inputs: of the shapes, else from beside the factory, else as the first file says."""
    _, example_inputs = load_factory(factory)
    saved = next((m.example_inputs() for m in manifests if m.inputs), None)
    if saved is not None and not shapes and example_inputs is None:
        return saved
    return resolve_inputs(shapes, example_inputs)


def _from_all(paths: Sequence[str | Path], values: list[Any], what: str) -> list[Any] | None:
    """The values if every file has one, else None, with a warning if only some files have one."""
    missing = [str(path) for path, value in zip(paths, values, strict=True) if value is None]
    if missing and len(missing) < len(values):
        has = "have" if len(missing) > 1 else "has"
        text = f"the {what} of other files are not used, since {few(missing)} {has} none"
        warnings.warn(text, FusionWarning, stacklevel=3)
    return None if missing else values


def _like_weights(inputs: Inputs, model: nn.Module) -> Inputs:
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
    return EnsembleNetwork(networks, shares, class_shares, average=average).eval()


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
    inputs = _like_weights(example_inputs, model)
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


def _describe(inputs: Inputs | None) -> list[Described] | dict[str, Described] | None:
    """Shapes and dtypes of example inputs, or None if some are neither tensors nor switches."""
    args, named = arguments(inputs or ())
    values = (*args, *named.values())
    if inputs is None or not all(isinstance(v, Tensor | bool | None) for v in values):
        return None
    return {name: _shape(value) for name, value in named.items()} or [_shape(x) for x in args]


def _shape(value: Tensor | bool | None) -> Described:
    if not isinstance(value, Tensor):
        return value
    return list(value.shape), str(value.dtype).removeprefix("torch.")
