"""Networks of the transformers package from a configuration.

Hides: transformers, its names for tensors, and its talk on the terminal. Promises: the network is
one of transformers' own classes; no code that a folder brings or names is run, nothing is fetched,
and no configuration makes a network larger than its weights; what cannot be used raises a
`CheckpointError` in one line.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from nafi.errors import CheckpointError, few, require
from nafi.graph import first_line
from nafi.huggingface.folders import read_config, read_weights
from nafi.trust import UNTRUSTED, Trust

# What a configuration may say that would choose code or fetch files: other implementations of
# attention come from the hub, and so do backbones that are trained already.
_DROPPED = {
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
    "auto_map",
    "custom_pipelines",
    "distributed_config",
    "fusion_config",
    "use_kernels",
    "use_pretrained_backbone",
    "trust_remote_code",
    "_name_or_path",
    "name_or_path",
}
# Sizes are used in loops before any weight can be seen, and every label gets a name; lengths of
# inputs may be larger.
_LARGEST, _LABELS, _LONGEST = 2**20, 2**16, 2**26
_FLOAT = 4  # bytes of a number of a network that is made
_LENGTHS = ("position", "length", "seq", "n_ctx", "theta", "base", "token", "window")


class FolderWarning(UserWarning):
    """A folder was read, but not all that is in it."""


def is_pretrained(model: nn.Module) -> bool:
    """Whether a network is one of transformers' classes; transformers is not imported to see."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__ == "transformers.modeling_utils"
        for base in type(model).__mro__
    )


def load_folder(folder: Path, trust: Trust = UNTRUSTED) -> nn.Module:
    """The network of a folder, in eval mode and in the precision of its files."""
    return fill_network(read_config(folder), read_weights(folder, trust=trust), str(folder))


def make_network(
    values: Mapping[str, Any], label: str, numbers: int, trust: Trust = UNTRUSTED
) -> nn.Module:
    """A network with weights of no meaning.

    values: as config.json has them; numbers: in the file, whose network may be cut down
    """
    kind, config = _described(values, label)
    asked = _check_size(shapes_of(kind, config, label), 8 * numbers, label)
    trust.check_bytes(asked, f"{label}: the network that its configuration describes", _FLOAT)
    with quiet(label, "its network cannot be made"):
        model: nn.Module = kind(config)
    return model.eval()


def fill_network(values: Mapping[str, Any], state: Mapping[str, Tensor], label: str) -> nn.Module:
    """The network of a configuration with these tensors, under transformers' names for them."""
    kind, config = _described(values, label)
    numbers = sum(tensor.numel() for tensor in state.values())
    _check_size(shapes_of(kind, config, label, len(state)), numbers, label)
    with quiet(label, "its weights cannot be read"):
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            output_loading_info=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,
        )
    _check_loaded(info, label)
    filled: nn.Module = model
    return filled.eval()


def outline(
    values: Mapping[str, Any], state: Mapping[str, Tensor], label: str
) -> dict[str, Tensor]:
    """The tensors that `fill_network` would fill, without numbers. state: those of the files."""
    kind, config = _described(values, label)
    shapes = shapes_of(kind, config, label, len(state))
    _check_size(shapes, sum(tensor.numel() for tensor in state.values()), label)
    _check_shapes([n for n in shapes if n in state and state[n].shape != shapes[n]], label)
    usual = next((tensor.dtype for tensor in state.values()), torch.float32)
    return {
        name: torch.empty(shape, dtype=state[name].dtype if name in state else usual, device="meta")
        for name, shape in shapes.items()
    }


def _check_loaded(info: Mapping[str, Any], label: str) -> None:
    """Refuse networks of which a part would be random."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(f"{label}: the weights lack {few(missing)}; is config.json theirs?")
    mismatched = sorted(str(name) for name, *_ in info["mismatched_keys"])
    _check_shapes(
        mismatched or [first_line(ValueError(text)) for text in info["error_msgs"]], label
    )
    unread = sorted(info["unexpected_keys"])
    if unread:
        text = f"{label}: the network has no place for {few(unread)}; they are left out"
        warnings.warn(text, FolderWarning, stacklevel=4)


def _check_shapes(others: list[str], label: str) -> None:
    if others:
        raise CheckpointError(f"{label}: {few(others)} has another shape than config.json says")


def _described(values: Mapping[str, Any], label: str) -> tuple[Any, Any]:
    """The class of a network, one of transformers' own, and the configuration that it takes."""
    require("transformers")
    if values.get("quantization_config") is not None:
        raise CheckpointError(
            f"{label} is quantised, and such weights cannot be fused; fuse the networks as they "
            "were before"
        )
    config_class = _config_class(values, label)
    cleaned = _cleaned(values, label)
    # Which class makes the network is ours to say, not the configuration's.
    kind = _network_class(values, config_class, label)
    with quiet(label, "config.json cannot be used"):
        config = config_class.from_dict(cleaned)
    return kind, config


def _config_class(values: Mapping[str, Any], label: str) -> Any:
    from transformers import CONFIG_MAPPING

    name = values.get("model_type")
    found = None
    if isinstance(name, str) and name in CONFIG_MAPPING:
        with quiet(label, f"transformers cannot import {name}"):
            found = CONFIG_MAPPING[name]
    if found is not None and found.__module__.startswith("transformers.models."):
        return found
    shown = repr(name[:60]) if isinstance(name, str) else "none"
    raise CheckpointError(f"{label}: transformers has no model type {shown}{_why(values)}")


def _network_class(values: Mapping[str, Any], config_class: Any, label: str) -> Any:
    from transformers import PreTrainedModel

    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str):
        raise CheckpointError(f"{label}: config.json lacks architectures, the class of the network")
    module_name = config_class.__module__.replace(".configuration_", ".modeling_")
    with quiet(label, f"transformers cannot import {module_name}"):
        module = import_module(module_name)
    found = vars(module).get(name)
    if isinstance(found, type) and issubclass(found, PreTrainedModel):
        return found
    raise CheckpointError(
        f"{label}: transformers has no class {name[:60]!r} for {values['model_type']}{_why(values)}"
    )


def _why(values: Mapping[str, Any]) -> str:
    advice = "; give --model package.module:factory, which makes the network, or use nafi.fuse"
    if values.get("auto_map"):
        return f". The folder brings code of its own (auto_map), which nafi never runs{advice}"
    return f", and other code is never run{advice}"


def _cleaned(values: Any, label: str, name: str = "") -> Any:
    """Plain data without what would choose code or fetch files, and of reasonable sizes."""
    if isinstance(values, dict):
        kept = {key: value for key, value in values.items() if key not in _DROPPED}
        return {key: _cleaned(value, label, key) for key, value in kept.items()}
    if isinstance(values, list):
        return [_cleaned(value, label, name) for value in values]
    limit = _LONGEST if any(word in name for word in _LENGTHS) else _LARGEST
    limit = _LABELS if "label" in name else limit
    if isinstance(values, int) and abs(values) > limit and "theta" not in name:
        raise CheckpointError(f"{label}: {name[:60]} is {values}, expected at most {limit}")
    return values


def shapes_of(
    kind: Any, config: Any, label: str, tensors: int | None = None
) -> dict[str, torch.Size]:
    """The shapes of the parameters and saved buffers of a network that is not made in full.

    tensors: how many there are in the files; a network of far more is given up early
    """
    limit = 2**16 if tensors is None else 2 * tensors + 64
    with quiet(label, "its network cannot be made"), _few_parts(limit), torch.device("meta"):
        model = kind(copy.deepcopy(config))
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@contextmanager
def _few_parts(limit: int) -> Iterator[None]:
    """Stop networks that are made of more parameters than this, or of many more modules."""
    counts = {"parameters": 0, "modules": 0}

    def count(what: str, most: int) -> Any:
        def hook(*_: object) -> None:
            counts[what] += 1
            if counts[what] > most:
                raise ValueError(f"it has more than {most} {what}, far more than its weights")

        return hook

    hooks = [
        register_module_parameter_registration_hook(count("parameters", limit)),
        register_module_module_registration_hook(count("modules", 20 * limit)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_size(shapes: Mapping[str, torch.Size], numbers: int, label: str) -> int:
    """Refuse, before memory is taken, networks much larger than their weights; their numbers."""
    asked = sum(shape.numel() for shape in shapes.values())
    if asked > 2 * numbers + 2**16:  # shared tensors count twice
        raise CheckpointError(
            f"{label}: config.json describes {asked:,} parameters, the weights have {numbers:,}"
        )
    return asked


@contextmanager
def quiet(label: str, trouble: str) -> Iterator[None]:
    """Keep transformers from printing, and tell its errors in a line."""
    talk: Any = import_module("transformers.utils.logging")
    level, bars = talk.get_verbosity(), talk.is_progress_bar_enabled()
    talk.set_verbosity(logging.CRITICAL)
    talk.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # whatever transformers finds wrong with what others wrote
        raise CheckpointError(f"{label}: {trouble}: {first_line(error)}") from error
    finally:
        talk.set_verbosity(level)
        if bars:
            talk.enable_progress_bar()
