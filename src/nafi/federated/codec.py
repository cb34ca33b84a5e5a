"""Frozen dataclasses as plain data and named tensors, by the types of their fields.

Hides: how each type is written. Promises: what is read is what was written, and what is written
can be read; a field that is missing, unknown or of another type raises an error that names it, when
it is written as when it is read; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from sys import float_info
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from nafi.errors import InputError, few, unlike

# What seeds and counts may be; numpy and torch take no others.
_LARGEST = 2**63 - 1
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_Kind = TypeVar("_Kind")


def pack(value: object) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A dataclass as plain data, and its tensors under names that tell where they belong."""
    tensors: dict[str, Tensor] = {}
    packed: dict[str, Any] = _packed(type(value), value, "", tensors)
    return packed, tensors


def check_fields(kind: type) -> None:
    """Refuse a dataclass with a field of a type that cannot be written."""
    try:
        _check_kind(kind, "", set())
    except NameError as error:
        raise InputError(f"{kind.__name__}: the type of a field is not known: {error}") from None


def unpack(kind: type[_Kind], data: object, tensors: Mapping[str, Tensor]) -> _Kind:
    """The inverse of `pack`."""
    left = dict(tensors)
    value: _Kind = _unpacked(kind, data, "", left)
    if left:
        raise InputError(f"it has {few([name[:60] for name in left])}, which has no place in it")
    return value


def _packed(kind: Any, value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Field names, places and, last, names of tensors make up a path: no two are the same."""
    origin, args = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _packed_fields(kind, value, path, tensors)
    if origin in (Union, UnionType):
        return None if value is None else _packed(_present(kind, path), value, path, tensors)
    if origin is Mapping and args[1] is Tensor:
        return _packed_tensors(value, path, tensors)
    if origin is Mapping:
        _check(isinstance(value, Mapping), value, path, "a table")
        return {
            _text(name, path): _packed(args[1], item, f"{path}{place}/", tensors)
            for place, (name, item) in enumerate(value.items())
        }
    if origin is frozenset:
        _check(isinstance(value, set | frozenset), value, path, "a set")
        return sorted(_packed(args[0], item, path, tensors) for item in value)
    if origin is tuple:
        _check(isinstance(value, tuple | list), value, path, "a tuple")
        kinds = _kinds(args, len(value))
        _check(len(kinds) == len(value), value, path, f"{len(kinds)} values")
        return [
            _packed(item_kind, item, f"{path}{place}/", tensors)
            for place, (item_kind, item) in enumerate(zip(kinds, value, strict=True))
        ]
    return _packed_scalar(kind, value, path)


def _packed_fields(kind: Any, value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    _check(isinstance(value, kind), value, path, f"a {kind.__name__}")
    return {
        name: _packed(hint, getattr(value, name), f"{path}{name}/", tensors)
        for name, hint in _fields(kind).items()
    }


def _packed_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> list[str]:
    _check(isinstance(value, Mapping), value, path, "tensors by name")
    for name, tensor in value.items():
        _check(isinstance(tensor, Tensor), tensor, f"{path}{_text(name, path)}", "a tensor")
        tensors[f"{path}{name}"] = tensor
    return list(value)


def _packed_scalar(kind: Any, value: Any, path: str) -> Any:
    if isinstance(value, torch.dtype):
        value = str(value).removeprefix("torch.")
    elif isinstance(value, float):  # numpy's are, too
        value = float(value)
    _scalar(kind, value, path)
    return value


def _check_kind(kind: Any, path: str, seen: set[Any]) -> None:
    """Refuse a type that cannot be written; seen: the dataclasses it is part of."""
    origin, args = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        if kind not in seen:
            for name, hint in _fields(kind).items():
                _check_kind(hint, f"{path}{name}/", seen | {kind})
    elif origin in (Union, UnionType):
        _check_kind(_present(kind, path), path, seen)
    elif origin is Mapping and args[0] is str:
        if args[1] is not Tensor:
            _check_kind(args[1], path, seen)
    elif origin is tuple:
        for item in _kinds(args, 1):
            _check_kind(item, path, seen)
    elif not _is_scalar(args[0] if origin is frozenset else kind):
        raise _unwritable(kind, path)


def _is_scalar(kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return all(type(word) is str for word in get_args(kind))
    return kind in (str, bool, int, float, torch.dtype)


def _unwritable(kind: Any, path: str) -> InputError:
    return InputError(f"{_place(path)}: a field of type {kind} cannot be written")


def _unpacked(kind: Any, data: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Tensors that are used are taken out."""
    origin, args = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass(kind, data, path, tensors)
    if origin in (Union, UnionType):
        return None if data is None else _unpacked(_present(kind, path), data, path, tensors)
    if origin is Mapping and args[1] is Tensor:
        return _tensors(data, path, tensors)
    if origin is Mapping:
        _check(isinstance(data, dict), data, path, "a table")
        return {
            _text(name, path): _unpacked(args[1], item, f"{path}{place}/", tensors)
            for place, (name, item) in enumerate(data.items())
        }
    if origin is frozenset:
        return frozenset(_unpacked(tuple[args[0], ...], data, path, tensors))  # type: ignore[valid-type]
    if origin is tuple:
        _check(isinstance(data, list), data, path, "a list")
        kinds = _kinds(args, len(data))
        _check(len(kinds) == len(data), data, path, f"{len(kinds)} values")
        return tuple(
            _unpacked(item_kind, item, f"{path}{place}/", tensors)
            for place, (item_kind, item) in enumerate(zip(kinds, data, strict=True))
        )
    return _scalar(kind, data, path)


def _dataclass(kind: Any, data: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    _check(isinstance(data, dict), data, path, "a table")
    hints = _fields(kind)
    difference = unlike(data, hints)
    if difference:
        raise InputError(f"{_place(path)} {difference}")
    return kind(
        **{
            name: _unpacked(hint, data[name], f"{path}{name}/", tensors)
            for name, hint in hints.items()
        }
    )


def _tensors(names: Any, path: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    _check(isinstance(names, list), names, path, "names of tensors")
    taken: dict[str, Tensor] = {}
    for name in names:
        key = f"{path}{_text(name, path)}"
        _check(key in tensors, name, path, "the name of a tensor, once")
        taken[name] = tensors.pop(key)
    return taken


def _scalar(kind: Any, data: Any, path: str) -> Any:
    if kind is str:
        return _text(data, path)
    if kind is bool:
        _check(isinstance(data, bool), data, path, "true or false")
    elif kind is int:
        whole = type(data) is int and 0 <= data <= _LARGEST
        _check(whole, data, path, f"a whole number from 0 to {_LARGEST}")
    elif kind is float:
        number = type(data) in (int, float) and abs(data) <= float_info.max
        _check(number, data, path, "a number")
    elif get_origin(kind) is Literal:
        known = get_args(kind)
        _check(type(data) is str and data in known, data, path, f"one of {', '.join(known)}")
    elif kind is torch.dtype:
        _check(type(data) is str and data in _DTYPES, data, path, "a type of torch")
        return _DTYPES[data]
    else:
        raise _unwritable(kind, path)
    return data


def _text(data: Any, path: str) -> str:
    """A string that can be written again; a lone half of a surrogate pair cannot."""
    whole = isinstance(data, str) and not any("\ud800" <= letter <= "\udfff" for letter in data)
    _check(whole, data, path, "text")
    return str(data)


def _check(holds: bool, data: Any, path: str, expected: str) -> None:
    if not holds:
        raise InputError(f"{_place(path)}: found {ascii(data)[:60]}, expected {expected}")


def _place(path: str) -> str:
    return path.rstrip("/").replace("/", ".") or "it"


def _fields(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass and their types."""
    return _hints(kind)


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}


def _kinds(args: tuple[Any, ...], count: int) -> list[Any]:
    """The types of a tuple's items."""
    return [args[0]] * count if args[1:] == (...,) else list(args)


def _present(kind: Any, path: str) -> Any:
    """The type that is not None, of two."""
    present = [each for each in get_args(kind) if each is not NoneType]
    if len(present) != 1:
        raise _unwritable(kind, path)
    return present[0]
