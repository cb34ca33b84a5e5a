"""Clients' sums in files.

Hides: safetensors and the checks of what strangers send. Promises: what is read could be the sums
of some samples, or a `CheckpointError` names the file and what is wrong; nothing is ever unpickled;
files are written completely or not at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nafi.errors import CheckpointError, InputError, unlike
from nafi.files import atomic_path
from nafi.fusion import SCALES, HeadStatistics, LastLayer, are_sums
from nafi.trust import Trust
from nafi.version import __version__

_KEY = "nafi-statistics"
_FORMAT = 2
_TENSORS = ("gram", "cross", "class_counts", "losses")
_FIELDS = ("format", "version", "layers", "body")
_MOST_SAMPLES = 2.0**53  # beyond, doubles skip whole numbers


def save_statistics(
    statistics: HeadStatistics, path: str | Path, *, overwrite: bool = False
) -> None:
    """Write what `nafi.statistics` gave, for `nafi.load_statistics`; 8 K^2 bytes for K inputs."""
    target = Path(path)
    if target.exists() and not overwrite:
        raise InputError(f"{target} exists already; choose another name, or overwrite it")
    fields = {
        "format": _FORMAT,
        "version": __version__,
        "layers": [asdict(layer) for layer in statistics.layers],
        "body": statistics.body,
    }
    tensors = {name: getattr(statistics, name).contiguous() for name in _TENSORS}
    with atomic_path(target) as partial:
        save_file(tensors, partial, metadata={_KEY: json.dumps(fields)})


def load_statistics(path: str | Path, *, max_bytes: int | None = None) -> HeadStatistics:
    """The sums of a client, checked as far as can be without its network.

    max_bytes: refuse a file that would take more memory; by default half of the machine's
    """
    file = Path(path)
    if not file.is_file():
        kind = "is a folder" if file.is_dir() else "does not exist"
        raise CheckpointError(f"{file} {kind}; expected a file of nafi statistics")
    Trust.of(None, max_bytes).check_bytes(file.stat().st_size, str(file))
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; was it cut off?") from None
    if _KEY not in metadata:
        raise CheckpointError(f"{file} holds no statistics; was it written by nafi statistics?")
    try:
        layers, body = _layers(metadata[_KEY])
        _check_tensors(tensors)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None
    return HeadStatistics(layers, body, **tensors)


def _layers(text: str) -> tuple[tuple[LastLayer, ...], str]:
    """Which layers the sums are for, and the fingerprint of the network below them."""
    try:
        fields = json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise ValueError("it is of a format that this version of nafi does not read")
    difference = unlike(fields, dict.fromkeys(_FIELDS))
    if difference:
        raise ValueError(f"what it says about itself {difference}")
    layers, body = fields["layers"], fields["body"]
    _expect(isinstance(layers, list) and len(layers) > 0, "layers", layers, "a list")
    is_digest = _is_text(body) and re.fullmatch("[0-9a-f]{64}", body) is not None
    _expect(is_digest, "body", body, "64 hexadecimal digits")
    return tuple(map(_layer, layers)), body


def _layer(described: Any) -> LastLayer:
    _expect(isinstance(described, dict), "layers", described, "objects")
    difference = unlike(described, dict.fromkeys(("weight", "bias", "axis")))
    if difference:
        raise ValueError(f"one of its layers {difference}")
    weight, bias, axis = (described[name] for name in ("weight", "bias", "axis"))
    _expect(_is_text(weight), "weight", weight, "a name")
    _expect(bias is None or _is_text(bias), "bias", bias, "a name or null")
    _expect(type(axis) is int and 0 <= axis < 8, "axis", axis, "a whole number")
    return LastLayer(weight, bias, axis)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _expect(holds: bool, name: str, found: Any, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name}: found {ascii(found)[:60]}, expected {expected}")


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Whether these are sums of some samples; a `ValueError` names what is not."""
    difference = unlike(tensors, dict.fromkeys(_TENSORS))
    if difference:
        raise ValueError(f"it {difference}")
    inputs, classes = (*tensors["cross"].shape, 0, 0)[:2]
    shapes = [(inputs, inputs), (inputs, classes), (classes,), (len(SCALES),)]
    for name, shape in zip(_TENSORS, shapes, strict=True):
        tensor = tensors[name]
        _expect(tensor.dtype == torch.float64, name, tensor.dtype, "float64")
        _expect(tuple(tensor.shape) == shape, name, tuple(tensor.shape), f"shape {shape}")
        _expect(bool(tensor.isfinite().all()), name, "infinity or NaN", "numbers")
    _expect(inputs > 0 and classes > 1, "cross", (inputs, classes), "inputs and two classes")
    counts = tensors["class_counts"]
    whole = bool(((counts >= 0) & (counts == counts.floor())).all())
    _expect(whole, "class_counts", counts.tolist(), "whole numbers")
    _expect(1 <= float(counts.sum()) < _MOST_SAMPLES, "class_counts", counts.tolist(), "samples")
    _expect(bool((tensors["losses"] >= 0).all()), "losses", "less than 0", "sums of losses")
    if not are_sums(tensors["gram"], tensors["cross"], counts.diag()):
        raise ValueError(
            "gram, cross and class_counts are no sums over samples: together they must be "
            "symmetric and positive semidefinite"
        )
