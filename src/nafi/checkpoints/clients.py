"""The checkpoints of several clients, and what they say about their data.

Hides: where networks and example inputs come from. Promises: networks of one architecture, each at
its own widths, or an error that names the file.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nafi.checkpoints.loading import from_config, read
from nafi.checkpoints.prefixes import without_prefix
from nafi.checkpoints.restoring import like_weights, restore
from nafi.checkpoints.stored import FileModels
from nafi.errors import InputError, few
from nafi.factories import load_factory, resolve_inputs
from nafi.fusion import FusionWarning
from nafi.graph import Inputs, materialise, named_tensors, unwrapped
from nafi.huggingface import (
    fill_network,
    make_inputs,
    make_network,
    outline,
    unlike_companions,
)
from nafi.manifest import Manifest
from nafi.tensor_files import Reader, read_shapes, read_tensors, tensor_bytes
from nafi.trust import UNTRUSTED, Trust


@dataclass(frozen=True, eq=False)
class ClientFiles:
    """Several checkpoints of one architecture, and what they say about their data.

    factory: makes their network; None if their configurations do
    folders: those that are Hugging Face folders
    """

    models: Sequence[nn.Module]
    example_inputs: Inputs
    factory: str | None
    class_counts: list[list[float]] | None
    sample_counts: list[float] | None
    folders: list[Path]

    @property
    def network(self) -> nn.Module:
        """The first of the models."""
        return self.models[0]


def load_clients(
    paths: Sequence[str | Path],
    factory: str | None,
    shapes: Sequence[str] = (),
    strip_prefix: str | None = None,
    trust: Trust = UNTRUSTED,
) -> ClientFiles:
    """Read the checkpoints of clients, each at its own widths.

    factory: "package.module:function"; if None, the one that the files name, if it is trusted
    shapes: of the inputs, without the batch, like "3,32,32"; if empty, from a function
        example_inputs() beside the factory, or from the files
    strip_prefix: what stands before the names of tensors in the files; guessed if None
    trust: what the files may do, together
    """
    files = _read_all(paths, read_tensors, trust)
    manifests = [manifest for _, manifest in files]
    factory = _factory(factory, paths, manifests, trust)
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    difference = unlike_companions(folders)
    if difference:
        text = f"{difference}: fuse networks that count words in the same way only"
        warnings.warn(text, FusionWarning, stacklevel=2)
    if factory is None:
        models = [
            fill_network(manifest.config or {}, state, str(path))
            if Path(path).is_dir()
            else from_config(state, manifest, str(path), trust)
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
        like_weights(inputs, models[0]),
        factory,
        _from_all(paths, [m.class_counts for m in manifests], "class counts"),
        _from_all(paths, [m.sample_count for m in manifests], "sample counts"),
        folders,
    )


def open_clients(
    paths: Sequence[str | Path],
    factory: str | None,
    shapes: Sequence[str] = (),
    strip_prefix: str | None = None,
    trust: Trust = UNTRUSTED,
) -> ClientFiles:
    """What `load_clients` gives, with models that are read from their files when they are needed.

    The limit of memory is for one file at a time.
    """
    first = read(paths[0], read_shapes, trust)[1]
    factory = _factory(factory, paths[:1], [first], trust)
    if factory is None:
        raise InputError("models that are read a tensor at a time need a factory: give --model")
    inputs = _client_inputs(factory, shapes, [first])
    name = factory
    files = [Path(path) for path in paths]
    models = FileModels(files, lambda: load_factory(name)[0], inputs, strip_prefix, trust)
    return ClientFiles(
        models,
        like_weights(inputs, models[0]),
        factory,
        _from_all(paths, models.class_counts, "class counts"),
        _from_all(paths, models.sample_counts, "sample counts"),
        [],
    )


@dataclass(frozen=True, eq=False)
class ClientOutlines:
    """The shapes of several checkpoints of one architecture.

    network: of their architecture, with weights of no meaning
    shapes: of each checkpoint, under the network's names, as tensors of the device "meta"
    """

    network: nn.Module
    example_inputs: Inputs
    shapes: list[dict[str, Tensor]]


def outline_clients(
    paths: Sequence[str | Path],
    factory: str | None,
    shapes: Sequence[str] = (),
    strip_prefix: str | None = None,
    trust: Trust = UNTRUSTED,
) -> ClientOutlines:
    """What `load_clients` would read, without the numbers of any checkpoint."""
    files = _read_all(paths, read_shapes, trust)
    manifests = [manifest for _, manifest in files]
    factory = _factory(factory, paths, manifests, trust)
    if factory is None:
        state, manifest = files[0]
        numbers = sum(tensor.numel() for tensor in state.values())
        network = make_network(manifest.config or {}, str(paths[0]), numbers, trust)
        inputs: Inputs = resolve_inputs(shapes, lambda: make_inputs(network))
    else:
        network = unwrapped(load_factory(factory)[0])
        inputs = _client_inputs(factory, shapes, manifests)
        materialise(network, inputs)
    names = list(named_tensors(network))
    outlines = []
    for path, (state, manifest) in zip(paths, files, strict=True):
        if factory is None and Path(path).is_dir():
            outlines.append(outline(manifest.config or {}, state, str(path)))
            continue
        shared = {other: state[name] for other, name in (manifest.aliases or {}).items()}
        outlines.append(without_prefix({**state, **shared}, names, strip_prefix, str(path)))
    return ClientOutlines(network, like_weights(inputs, network), outlines)


def _read_all(
    paths: Sequence[str | Path], reader: Reader, trust: Trust
) -> list[tuple[dict[str, Tensor], Manifest]]:
    """What is in each of some files, which have one limit of memory together."""
    files = []
    for path in paths:
        state, manifest = read(path, reader, trust)
        trust = trust.after(tensor_bytes(state.values()))
        files.append((state, manifest))
    return files


def _factory(
    factory: str | None, paths: Sequence[str | Path], manifests: Sequence[Manifest], trust: Trust
) -> str | None:
    """What makes the network of all files; None if the configuration of each does."""
    if factory is None:
        factory = trust.factory({str(p): m.factory for p, m in zip(paths, manifests, strict=True)})
    for path, manifest in zip(paths, manifests, strict=True):
        if manifest.members is not None:
            raise InputError(f"{path} is several networks side by side; fuse its clients instead")
        if factory is None and manifest.config is None:
            raise InputError(f"{path} does not say what makes its network: give --model")
    return factory


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
