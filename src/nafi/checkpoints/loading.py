"""Networks from files and from Hugging Face folders.

Hides: the formats. Promises: nothing is ever unpickled; no file chooses code or takes more memory
than it may; a file that cannot be used raises `CheckpointError` with its name and what to do.
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
from nafi.tensor_files import Reader, read_tensors, tensor_bytes
from nafi.trust import UNTRUSTED, Trust

# Under which the manifest stands in a file of safetensors.
KEY = "nafi"
# So many times the bytes of JSON are taken by what is read from it, and so many times those of
# inputs by a network that runs on them.
_JSON, _RUN = 32, 16


def load(
    path: str | Path,
    factory: str | Callable[[], nn.Module] | None = None,
    *,
    strip_prefix: str | None = None,
    trust_factory: str | bool | None = None,
    max_bytes: int | None = None,
) -> nn.Module:
    """The network of a checkpoint, at the widths it was saved with, in eval mode.

    path: a file, or a Hugging Face folder, whose configuration makes the network
    factory: makes the network: a function without arguments, or its name,
        "package.module:function"
    strip_prefix: what stands before the names of the network's tensors in the file, as "model" in
        checkpoints of Lightning; guessed if None
    trust_factory: without a factory, run the function of this name if it is the one that the file
        names; True for any that it names, which may be any code on this machine
    max_bytes: refuse a file that would take more memory; by default half of the machine's
    """
    trust = Trust.of(trust_factory, max_bytes)
    if factory is None and is_folder(Path(path)):
        return load_folder(Path(path), trust)
    state, manifest = read(path, trust=trust)
    if factory is None:
        factory = trust.factory({str(path): manifest.factory})
    inputs: Inputs | None = manifest.example_inputs()
    if factory is None and manifest.config is not None:
        return from_config(state, manifest, str(path), trust)
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


def from_config(
    state: Mapping[str, Tensor], manifest: Manifest, label: str, trust: Trust = UNTRUSTED
) -> nn.Module:
    """The network of a file that holds the configuration of one of transformers."""
    assert manifest.config is not None
    numbers = sum(tensor.numel() for tensor in state.values())
    network = make_network(manifest.config, label, numbers, trust)
    inputs = manifest.example_inputs() or make_inputs(network)
    return restore(network, state, manifest, inputs, label)


def read(
    path: str | Path, reader: Reader = read_tensors, trust: Trust = UNTRUSTED
) -> tuple[dict[str, Tensor], Manifest]:
    """The tensors of a file under the names it has for them, and its manifest, perhaps empty.

    Reads safetensors, files of torch.save that hold tensors only (`weights_only=True`), and Hugging
    Face folders. reader: `read_tensors`, or `read_shapes` for tensors without numbers.
    """
    file = Path(path)
    if file.is_dir():
        config = read_config(file)
        return read_weights(file, reader, trust), Manifest(config=config)
    state, metadata = reader(file, trust)
    trust.check_bytes(len(metadata.get(KEY, "")), f"{file}: its manifest", _JSON)
    try:
        manifest = Manifest.from_json(metadata[KEY]) if metadata.get(KEY) else Manifest()
    except ValueError as error:
        raise CheckpointError(f"{file} has a manifest that cannot be read: {error}") from None
    missing = [name for name in (manifest.aliases or {}).values() if name not in state]
    if missing:
        raise CheckpointError(f"{file} lacks {few(missing)}, to which its aliases refer")
    _check_memory(file, state, manifest, trust)
    return state, manifest


def _check_memory(
    file: Path, state: Mapping[str, Tensor], manifest: Manifest, trust: Trust
) -> None:
    """Refuse a file whose manifest asks for much more memory than its tensors."""
    trust.check_bytes(manifest.input_bytes, f"{file}: running its network on its inputs", _RUN)
    # Every network of several gets tensors of its own, also those that the file holds once.
    shared = (state[name] for name in (manifest.aliases or {}).values())
    if manifest.members is not None:
        needed = tensor_bytes(state.values()) + tensor_bytes(shared)
        trust.check_bytes(needed, f"{file}: its {len(manifest.members)} networks")
