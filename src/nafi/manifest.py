"""What a checkpoint says about itself, as JSON in the metadata of the file.

Hides: the format and its checks. Promises: a `Manifest` whose fields all have the types they are
declared with, or a `ValueError` that names the field: files come from strangers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from sys import float_info
from typing import Any

import torch

from nafi.errors import few
from nafi.version import __version__

# Example inputs are made to check that a network runs; no file may ask for more numbers.
_MOST_INPUTS = 2**28
# The sizes of a tensor and the name of its type; or a switch, as in forward(x, use_cache=False).
Described = tuple[list[int], str] | bool | None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    factory: package.module:function that makes the network
    widths: neurons of each group, for a fused model
    spec: the groups of its architecture at these widths, for a network that is not as wide as the
        factory makes it
    folded: whether batch normalisation was folded into the layers
    inputs: (shape, dtype) of each example input, in order or by name, to check that a rebuilt
        network runs; true, false and null stand for themselves
    class_counts, sample_count: of the data that the model was trained on
    aliases: other name -> stored name of shared tensors, which are stored once
    members: spec and folded of each network, for several that run side by side
    average: what is added up of these: logits, or probabilities; by_input: whether those count more
        that know the like of an input
    config: what makes a network of transformers, as config.json has it, instead of a factory
    """

    factory: str | None = None
    widths: Mapping[str, int] | None = None
    spec: Mapping[str, Any] | None = None
    folded: bool = False
    inputs: Sequence[Described] | Mapping[str, Described] | None = None
    class_counts: Sequence[float] | None = None
    sample_count: float | None = None
    aliases: Mapping[str, str] | None = None
    members: Sequence[Mapping[str, Any]] | None = None
    average: str | None = None
    by_input: bool | None = None
    config: Mapping[str, Any] | None = None
    version: str = __version__

    def to_json(self) -> str:
        return json.dumps({key: value for key, value in asdict(self).items() if value is not None})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Check every field; a `ValueError` names the first that is not what it should be."""
        try:
            values = json.loads(text)
            json.dumps(values, ensure_ascii=False).encode()  # refuses half a surrogate pair
        except RecursionError:
            raise ValueError("its JSON is nested too deeply") from None
        if not isinstance(values, dict):
            raise ValueError(f"found {type(values).__name__}, expected a JSON object")
        unknown = [name[:60] for name in values if name not in CHECKS]
        if unknown:
            raise ValueError(f"unknown fields {few(unknown)}; was it written by a newer nafi?")
        optional = {field.name for field in fields(cls) if field.default is None}
        for name, value in values.items():
            is_valid, expected = CHECKS[name]
            if not (is_valid(value) or (value is None and name in optional)):
                raise ValueError(f"{name}: found {_show(value)}, expected {expected}")
        return cls(**values)

    @property
    def input_bytes(self) -> int:
        """The memory that the example inputs take."""
        return sum(prod(sizes) * getattr(torch, kind).itemsize for sizes, kind in self._tensors())

    def _tensors(self) -> Iterator[tuple[list[int], str]]:
        inputs = self.inputs.values() if isinstance(self.inputs, Mapping) else self.inputs or ()
        return (each for each in inputs if each is not None and not isinstance(each, bool))

    def example_inputs(self) -> tuple[Any, ...] | dict[str, Any] | None:
        """Zeros of the shapes that were saved."""
        if self.inputs is None:
            return None
        if isinstance(self.inputs, Mapping):
            return {name: _zeros(value) for name, value in self.inputs.items()}
        return tuple(map(_zeros, self.inputs))


def _zeros(described: Described) -> torch.Tensor | bool | None:
    if described is None or isinstance(described, bool):
        return described
    shape, kind = described
    return torch.zeros(shape, dtype=getattr(torch, kind))


def _show(value: Any) -> str:
    """A value in an error; lists and objects may be long, and nested deeply."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return repr(value[:60] if isinstance(value, str) else value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_function_name(value: Any) -> bool:
    """Whether this could name a function: package.module:function."""
    return isinstance(value, str) and re.fullmatch(r"[\w.-]{1,200}:\w{1,200}", value) is not None


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    """A finite number of at least 0, as `nafi.save` writes it."""
    return (_is_whole(value) or isinstance(value, float)) and 0 <= value <= float_info.max


def _is_list_of_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)  # JSON's keys are text


def _is_object_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _is_members(value: Any) -> bool:
    """At least one object of a spec, which may be null, and folded."""
    return isinstance(value, list) and len(value) > 0 and all(map(_is_member, value))


def _is_member(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"spec", "folded"}
        and (value["spec"] is None or _is_object(value["spec"]))
        and _is_bool(value["folded"])
    )


def _is_average(value: Any) -> bool:
    return value in ("logits", "probabilities")


def _is_inputs(value: Any) -> bool:
    if not isinstance(value, list | dict):
        return False
    inputs = value.values() if isinstance(value, dict) else value
    tensors = [each for each in inputs if each is not None and not _is_bool(each)]
    return all(map(_is_input, tensors)) and sum(prod(s) for s, _ in tensors) <= _MOST_INPUTS


def _is_input(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], list)
        and all(_is_whole(size) and 0 <= size <= _MOST_INPUTS for size in value[0])
        and isinstance(value[1], str)
        and _is_dtype(value[1])
    )


def _is_dtype(name: str) -> bool:
    """Whether torch makes tensors of this type; of its quantised types it does not."""
    dtype = getattr(torch, name, None)
    return isinstance(dtype, torch.dtype) and not name.startswith(("qint", "quint"))


# Every field of `Manifest`: its check, and what it should be.
CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "factory": (is_function_name, "package.module:function"),
    "widths": (_is_object_of(_is_whole), "a whole number for each group"),
    "spec": (_is_object, "a JSON object"),
    "folded": (_is_bool, "true or false"),
    "inputs": (_is_inputs, f"[sizes, dtype] of each, at most {_MOST_INPUTS} numbers in all"),
    "class_counts": (_is_list_of_counts, "a list of numbers of at least 0"),
    "sample_count": (_is_count, "a number of at least 0"),
    "aliases": (_is_object_of(_is_text), "a name for each name"),
    "members": (_is_members, "a list of objects of spec and folded"),
    "average": (_is_average, "logits or probabilities"),
    "by_input": (_is_bool, "true or false"),
    "config": (_is_object, "a JSON object"),
    "version": (_is_text, "text"),
}
