"""Networks from files and from Hugging Face folders.

Hides: the formats. Promises: nothing is ever unpickled; a file that cannot be used raises
`CheckpointError` with its name and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor, nn

from nafi.checkpoints.restoring import restore
from nafi.errors import CheckpointError, InputError, few
from nafi.factories import NotImportedError, call_factory, load_factory, resolve_inputs
from nafi.graph import Inputs
from nafi.huggingface import (
    is_folder,
    load_folder,
    make_inputs,
    make_network,
    read_config,
    read_weights,
)
from nafi.manifest import Manifest
from nafi.tensor_files import Reader, read_tensors

# Under which the manifest stands in a file of safetensors.
KEY = "nafi"


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
        return from_config(state, manifest, str(path))
    if factory is None:
        raise CheckpointError(f"{path} does not say what makes its network; give load a factory")
    if not isinstance(factory, str):
        model = call_factory(factory)
    else:
        try:
            model, example_inputs = load_factory(factory)
        except NotImportedError as error:
            raise InputError(
                f"{error}; or pass the function itself: nafi.load({str(path)!r}, network)"
            ) from error
        if not inputs and example_inputs is not None:
            inputs = resolve_inputs([], example_inputs)
    return restore(model, state, manifest, inputs, str(path), strip_prefix)


def from_config(state: Mapping[str, Tensor], manifest: Manifest, label: str) -> nn.Module:
    """The network of a file that holds the configuration of one of transformers."""
    assert manifest.config is not None
    numbers = sum(tensor.numel() for tensor in state.values())
    network = make_network(manifest.config, label, numbers)
    inputs = manifest.example_inputs() or make_inputs(network)
    return restore(network, state, manifest, inputs, label)


def read(path: str | Path, reader: Reader = read_tensors) -> tuple[dict[str, Tensor], Manifest]:
    """The tensors of a file under the names it has for them, and its manifest, perhaps empty.

    Reads safetensors, files of torch.save that hold tensors only (`weights_only=True`), and Hugging
    Face folders. reader: `read_tensors`, or `read_shapes` for tensors without numbers.
    """
    file = Path(path)
    if file.is_dir():
        config = read_config(file)
        return read_weights(file, reader), Manifest(config=config)
    state, metadata = reader(file)
    try:
        manifest = Manifest.from_json(metadata[KEY]) if metadata.get(KEY) else Manifest()
    except ValueError as error:
        raise CheckpointError(f"{file} has a manifest that cannot be read: {error}") from None
    missing = [name for name in (manifest.aliases or {}).values() if name not in state]
    if missing:
        raise CheckpointError(f"{file} lacks {few(missing)}, to which its aliases refer")
    return state, manifest
