"""Networks to files and to Hugging Face folders.

Hides: the formats. Promises: files and folders are written completely or not at all, with all that
`load` needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nafi.checkpoints.loading import KEY, load, read
from nafi.checkpoints.prefixes import without_prefix
from nafi.comparison import check_written
from nafi.errors import InputError
from nafi.files import atomic_path
from nafi.fusion import Body, EnsembleNetwork, FusionResult
from nafi.graph import (
    Inputs,
    arguments,
    check_inputs,
    named_tensors,
    shared_names,
    unwrapped,
)
from nafi.huggingface import config_of, is_filled_up, is_pretrained, save_folder
from nafi.manifest import Described, Manifest, is_function_name
from nafi.model_card import Origin, model_card
from nafi.trust import UNTRUSTED, Trust


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

    factory: "package.module:function" that makes the network; what `load` is to be given
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
        texts = _card_of(result, target) if card is None else {"README.md": card}
        inputs = example_inputs if verify is None else verify
        _save_folder(network, result, target, inputs, files_from, texts, overwrite)
        return
    if files_from is not None or card is not None:
        raise InputError(f"{target}: files_from and card are for Hugging Face folders")
    if target.exists() and not overwrite:
        raise InputError(f"{target} exists already; choose another name, or overwrite it")
    if factory is not None and not is_function_name(factory):
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
    manifest = replace(
        _manifest(network, result, example_inputs),
        factory=factory,
        class_counts=counts,
        sample_count=count,
        aliases=aliases or None,
        config=_config(network) if factory is None else None,
    )
    with atomic_path(target) as partial:
        save_file(state, partial, metadata={KEY: manifest.to_json()})
        if verify is not None:
            check_written(partial, target, lambda file: load(file, factory), network, verify)


def _save_folder(
    network: nn.Module,
    result: FusionResult | None,
    target: Path,
    inputs: Inputs | None,
    files_from: str | Path | None,
    texts: Mapping[str, str],
    overwrite: bool,
) -> None:
    if result is not None and result.spec is not None and result.spec.folded:
        raise InputError(f"{target}: a folder needs normalisation; fuse with batchnorm='attach'")
    save_folder(
        network,
        target,
        spec=None if result is None else result.spec,
        example_inputs=inputs,
        files_from=None if files_from is None else Path(files_from),
        texts=texts,
        overwrite=overwrite,
    )


def _manifest(
    network: nn.Module, result: FusionResult | None, example_inputs: Inputs | None
) -> Manifest:
    """What is known of the form of a network, or of each of several: groups, widths, inputs."""
    several = network if isinstance(network, EnsembleNetwork) else None
    spec = None if result is None else result.architecture
    bodies = () if result is None else result.bodies
    inputs = example_inputs or next(
        (known.example_inputs for known in [spec, *(b.architecture for b in bodies)] if known), None
    )
    return Manifest(
        widths=dict(result.widths) if result is not None and several is None else None,
        spec=spec.to_dict() if spec is not None else None,
        folded=bool(result is not None and result.spec is not None and result.spec.folded),
        inputs=_describe(inputs),
        members=None if several is None else _describe_members(several, bodies),
        average=None if several is None else several.average,
        by_input=True if several is not None and several.by_input else None,
    )


def is_folder_name(path: Path) -> bool:
    """Whether a network of transformers is written to a folder under this name."""
    return path.suffix != ".safetensors"


def _card_of(result: FusionResult | None, target: Path) -> dict[str, str]:
    if result is None:
        return {}
    filled_up = result.spec is not None and is_filled_up(result.model, result.spec)
    return {"README.md": model_card(result, target, Origin(filled_up=filled_up), hub=True)}


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
    source: str | Path,
    model: nn.Module,
    target: str | Path,
    *,
    overwrite: bool = False,
    trust: Trust = UNTRUSTED,
) -> None:
    """Write the network of a checkpoint with other weights, and all else that its file says."""
    if Path(source).is_dir():
        save(model, target, overwrite=overwrite)
        return
    state, manifest = read(source, trust=trust)
    path = Path(target)
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists already; choose another name, or overwrite it")
    tensors = named_tensors(model)
    kept = without_prefix(state, tensors, None, str(source))
    changed = {name: tensors[name].detach().cpu().contiguous() for name in kept}
    with atomic_path(path) as partial:
        save_file(changed, partial, metadata={KEY: manifest.to_json()})


def _check_counts(values: Sequence[float], name: str) -> list[float]:
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        raise InputError(f"{name}: found {values!r}, expected numbers") from None
    if not all(0 <= number < inf for number in numbers):
        raise InputError(f"{name}: found {values!r}, expected numbers of at least 0")
    return numbers


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
