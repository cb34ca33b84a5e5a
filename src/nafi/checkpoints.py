"""Networks in files.

Hides: safetensors, torch's own format, and how a network gets back the widths that it was saved
with. Promises: nothing is ever unpickled; a file that cannot be used raises `CheckpointError` with
its name and what to do; files are written whole or not at all.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, prod
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nafi.errors import CheckpointError, InputError, SpecError, few, unlike
from nafi.factories import called, load_factory, resolve_inputs
from nafi.files import atomic_path
from nafi.fusion import FusionResult, FusionWarning
from nafi.graph import fold_batchnorm
from nafi.graph.groups import groups
from nafi.graph.rebuild import rebuild
from nafi.graph.spec import ModelSpec
from nafi.graph.trace import Inputs, named_tensors, shared_names
from nafi.version import __version__

_KEY = "nafi"
# What people call the weights inside of a file that holds more than them.
_NESTED = ("state_dict", "model_state_dict", "model")
# Example inputs are made anew to see that a network runs; no file may ask for more numbers.
_MOST_INPUTS = 2**28
_WRAPPERS = ("_orig_mod.", "module.")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself, as JSON in the metadata of the file.

    factory: package.module:function that makes the network
    widths: neurons of each group, for a fused model
    spec: the groups of its architecture at these widths, for a network that is not as wide as the
        factory makes it
    folded: whether batch normalisation was folded into the layers
    inputs: [shape, type] of each example input, to see that a rebuilt network runs
    class_counts, sample_count: of the data that the model was trained on
    aliases: names of shared tensors, which are stored once
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    factory: str | None = None
    widths: Mapping[str, int] | None = None
    spec: Mapping[str, Any] | None = None
    folded: bool = False
    inputs: Sequence[tuple[list[int], str]] | None = None
    class_counts: Sequence[float] | None = None
    sample_count: float | None = None
    aliases: Mapping[str, str] | None = None
    version: str = __version__

    def example_inputs(self) -> Inputs | None:
        """Zeros of the shapes that were saved."""
        if self.inputs is None:
            return None
        return tuple(torch.zeros(shape, dtype=_dtype(kind)) for shape, kind in self.inputs)


_MANIFEST = TypeAdapter(Manifest)


def _manifest(told: str) -> Manifest:
    """What a file says of itself; files come from strangers."""
    found = _MANIFEST.validate_json(told, strict=True)
    for shape, kind in found.inputs or []:
        _dtype(kind)
        if not all(0 <= size <= _MOST_INPUTS for size in shape) or prod(shape) > _MOST_INPUTS:
            raise ValueError(f"inputs of shape {shape}")
    return found


def _dtype(kind: str) -> torch.dtype:
    found = getattr(torch, kind, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"inputs of type {kind!r}")
    return found


def save(
    model: nn.Module | FusionResult,
    path: str | Path,
    *,
    factory: str | None = None,
    example_inputs: Inputs | None = None,
    class_counts: Sequence[float] | None = None,
    sample_count: float | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model, or what `nafi.fuse` returned, with all that `nafi.load` needs.

    factory: "package.module:function" that makes the network; without it, give it to `load`
    class_counts: (K,) samples per class, sample_count: all samples; `nafi fuse` reads them
    """
    result = model if isinstance(model, FusionResult) else None
    network = result.model if result is not None else model
    target = Path(path)
    if target.exists() and not overwrite:
        raise InputError(f"{target} exists already; choose another name, or overwrite it")
    if not isinstance(network, nn.Module):
        raise InputError(f"model: found {type(network).__name__}, expected a network")
    if result is not None and result.diagnostics.get("method") == "ensemble":
        raise InputError("an ensemble is several models, not one; save each of them instead")
    if factory is not None and (not isinstance(factory, str) or ":" not in factory):
        raise InputError(f"factory: found {factory!r}, expected 'package.module:function'")
    counts = None if class_counts is None else _numbers(class_counts, "class_counts")
    count = None if sample_count is None else _numbers([sample_count], "sample_count")[0]
    aliases = shared_names(network)
    state = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in named_tensors(network).items()
        if name not in aliases
    }
    spec = None if result is None else result.architecture
    inputs = example_inputs or (spec.example_inputs if spec is not None else None)
    manifest = Manifest(
        factory=factory,
        widths=dict(result.widths) if result is not None else None,
        spec=spec.to_dict() if spec is not None else None,
        folded=bool(result is not None and result.spec is not None and result.spec.folded),
        inputs=_described(inputs),
        class_counts=counts,
        sample_count=count,
        aliases=aliases or None,
    )
    told = {key: value for key, value in asdict(manifest).items() if value is not None}
    with atomic_path(target) as partial:
        save_file(state, partial, metadata={_KEY: json.dumps(told)})


def _numbers(values: Sequence[float], name: str) -> list[float]:
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        raise InputError(f"{name}: found {values!r}, expected numbers") from None
    if not all(0 <= number < inf for number in numbers):
        raise InputError(f"{name}: found {values!r}, expected numbers of at least 0")
    return numbers


def load(path: str | Path, factory: str | Callable[[], nn.Module] | None = None) -> nn.Module:
    """The network of a checkpoint, at the widths it was saved with, in eval mode.

    factory: makes the network, if the file does not say or to use another one: a function without
        arguments or its name, "package.module:function".
    """
    state, manifest = read(path)
    name = factory if factory is not None else manifest.factory
    if name is None:
        raise CheckpointError(f"{path} does not say what makes its network; give load a factory")
    if isinstance(name, str):
        model, found = load_factory(name)
        inputs = manifest.example_inputs() or (resolve_inputs([], found) if found else None)
    else:
        model, inputs = called(name), manifest.example_inputs()
    return restore(model, state, manifest, inputs, str(path))


def read(path: str | Path) -> tuple[dict[str, Tensor], Manifest]:
    """The tensors of a file and what it says of itself, which may be nothing.

    Reads safetensors, and files of torch.save that hold tensors only (`weights_only=True`).
    """
    file = Path(path)
    if not file.is_file():
        kind = "is a folder" if file.is_dir() else "does not exist"
        raise CheckpointError(f"{file} {kind}; expected a checkpoint")
    with file.open("rb") as handle:
        start = handle.read(9)
    if start[8:9] == b"{":
        return _read_safetensors(file)
    if start[:2] == b"PK" or start[:1] == b"\x80":
        return _read_torch(file), Manifest()
    raise CheckpointError(
        f"{file} is neither a safetensors file nor one of torch.save; was it cut off or renamed?"
    )


@dataclass(frozen=True, eq=False)
class ClientFiles:
    """Several checkpoints of one architecture, and what they say of their data."""

    models: list[nn.Module]
    example_inputs: Inputs
    factory: str
    class_counts: list[list[float]] | None
    sample_counts: list[float] | None


def load_clients(
    paths: Sequence[str | Path], factory: str | None, shapes: Sequence[str] = ()
) -> ClientFiles:
    """Read the checkpoints of clients, each at its own widths.

    factory: "package.module:function"; if None, what the files say
    shapes: of the inputs, without the batch, like "3,32,32"; else from the files or from a
        function example_inputs() beside the factory
    """
    found = [read(path) for path in paths]
    name = factory or next((m.factory for _, m in found if m.factory), None)
    if name is None:
        raise InputError("the checkpoints do not say what makes their network: give --model")
    _, example_inputs = load_factory(name)
    saved = next((m.example_inputs() for _, m in found if m.inputs), None)
    known = None if shapes or example_inputs is not None else saved
    inputs = known if known is not None else resolve_inputs(shapes, example_inputs)
    models = [
        restore(load_factory(name)[0], state, manifest, inputs, str(path))
        for path, (state, manifest) in zip(paths, found, strict=True)
    ]
    return ClientFiles(
        models,
        _like_weights(inputs, models[0]),
        name,
        _of_all(paths, [m.class_counts for _, m in found], "class counts"),
        _of_all(paths, [m.sample_count for _, m in found], "sample counts"),
    )


def _of_all(paths: Sequence[str | Path], values: list[Any], what: str) -> list[Any] | None:
    """What all files say, or nothing, with a warning if only some say it."""
    missing = [str(path) for path, value in zip(paths, values, strict=True) if value is None]
    if missing and len(missing) < len(values):
        has = "have" if len(missing) > 1 else "has"
        text = f"the {what} of other files are not used, since {few(missing)} {has} none"
        warnings.warn(text, FusionWarning, stacklevel=3)
    return None if missing else values


def _like_weights(inputs: Inputs, model: nn.Module) -> Inputs:
    """Inputs in the precision of the network's weights."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(kinds) != 1:
        return inputs
    kind = kinds.pop()
    return tuple(
        x.to(kind) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
    )


def restore(
    model: nn.Module,
    state: Mapping[str, Tensor],
    manifest: Manifest,
    example_inputs: Inputs | None,
    label: str,
) -> nn.Module:
    """The network with these tensors, made as wide as they are; the network given may change.

    label: what errors call the file.
    """
    full = {**state, **{other: state[name] for other, name in (manifest.aliases or {}).items()}}
    own = named_tensors(model)
    same = set(own) == set(full) and all(own[name].shape == full[name].shape for name in own)
    if not same:
        _check_keys(own, full, manifest, label)
        model = _resized(model, full, manifest, example_inputs, label)
    for name, tensor in named_tensors(model).items():
        if tensor.dtype != full[name].dtype:
            if tensor.is_floating_point() != full[name].is_floating_point():
                raise CheckpointError(
                    f"{label}: {name} is {full[name].dtype}, expected {tensor.dtype}"
                )
            model = model.to(full[name].dtype) if tensor.is_floating_point() else model
    model.load_state_dict(full)
    return model.eval()


def _resized(
    model: nn.Module,
    state: Mapping[str, Tensor],
    manifest: Manifest,
    example_inputs: Inputs | None,
    label: str,
) -> nn.Module:
    """The network at the widths of the tensors, with batch normalisation folded if theirs was."""
    if example_inputs is None:
        raise CheckpointError(
            f"{label} has other widths than its network, and rebuilding needs example inputs: "
            "write a function example_inputs() beside the factory"
        )
    try:
        if manifest.spec is not None:
            spec = ModelSpec.from_dict(manifest.spec).fitted(named_tensors(model))
        else:
            spec = groups(model, example_inputs)
        if manifest.folded:
            model, spec = fold_batchnorm(model, spec)
        widths = spec.fitted(state).widths
        return rebuild(model, spec, widths, _like_weights(example_inputs, model))
    except SpecError as error:
        raise CheckpointError(f"{label} is not a checkpoint of this network: {error}") from None


def _check_keys(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], manifest: Manifest, label: str
) -> None:
    if manifest.folded:
        return
    told = unlike(state, own)
    if told:
        raise CheckpointError(
            f"{label} is not a checkpoint of this network: it {told}; is the factory the right one?"
        )


def _unwrapped(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names as the network has them, without what DataParallel or torch.compile put before them."""
    for prefix in _WRAPPERS:
        if state and all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def _described(inputs: Inputs | None) -> list[tuple[list[int], str]] | None:
    """Shapes and types of example inputs, if tensors are all they are."""
    if inputs is None or not all(isinstance(value, Tensor) for value in inputs):
        return None
    return [(list(value.shape), str(value.dtype).removeprefix("torch.")) for value in inputs]


def _read_safetensors(file: Path) -> tuple[dict[str, Tensor], Manifest]:
    try:
        with safe_open(file, framework="pt") as handle:
            told = (handle.metadata() or {}).get(_KEY)
            state = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; was it cut off?") from None
    if not state:
        raise CheckpointError(f"{file} holds no tensors")
    try:
        manifest = _manifest(told) if told else Manifest()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file} has a manifest that cannot be read: {error}") from None
    lost = [name for name in (manifest.aliases or {}).values() if name not in state]
    if lost:
        raise CheckpointError(f"{file} lacks {few(lost)}, of which it has other names")
    return _unwrapped(state), manifest


def _read_torch(file: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch finds wrong with the file
        raise CheckpointError(
            f"{file} cannot be read with weights_only=True ({type(error).__name__}): it is cut off "
            "or holds more than tensors; save model.state_dict(), nothing else is ever unpickled"
        ) from None
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{file} holds {type(content).__name__}, expected a state dict")
    for name, value in content.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{file}: {name} is {type(value).__name__}, expected tensors only; save "
                "model.state_dict()"
            )
    return _unwrapped({name: value.detach() for name, value in content.items()})
