"""Networks, and other things that users write code for, by name: `package.module:factory`.

Hides: importing the user's code. Promises: an `nn.Module` and example inputs, or a function; or a
one-line error that says what failed: the name, the import or the call.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from nafi.errors import InputError


class NotImportedError(InputError):
    """The module of a function that a user named cannot be imported."""


def load_factory(name: str) -> tuple[nn.Module, Callable[[], Any] | None]:
    """Call the factory; also return the function `example_inputs` of its module, if any."""
    factory, module = load_function(name, "factory")
    return call_factory(factory, name), getattr(module, "example_inputs", None)


def load_function(name: str, what: str) -> tuple[Callable[..., Any], ModuleType]:
    """The function of this name, and its module. what: what errors call it."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name or module_name.endswith(".py"):
        hint = f"; write {module_name[:-3]}:{function_name}" if module_name.endswith(".py") else ""
        raise InputError(f"{what}: found {name!r}, expected package.module:{what}{hint}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise NotImportedError(
            f"cannot import {module_name}: {type(error).__name__}: {error} (searched in "
            "the current folder and the installed packages)"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(f"{module_name} has no function or class {function_name!r}")
    return function, module


def call_function(function: Callable[..., Any], name: str, *arguments: object) -> Any:
    """What a user's function returns, or a one-line error."""
    try:
        return function(*arguments)
    except Exception as error:
        called = "without arguments" if not arguments else "with a model"
        raise InputError(
            f"{name} failed: {type(error).__name__}: {error}; it is called {called}"
        ) from error


def call_factory(factory: Callable[[], Any], name: str = "factory") -> nn.Module:
    """Call a factory, which must return a network."""
    try:
        model = factory()
    except Exception as error:
        raise InputError(
            f"{name}() failed: {type(error).__name__}: {error}; the factory is called without "
            "arguments"
        ) from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{name}() returned {type(model).__name__}, expected nn.Module")
    return model


def resolve_inputs(
    shapes: Sequence[str], example_inputs: Callable[[], Any] | None, batch: int = 2
) -> tuple[Any, ...] | dict[str, Any]:
    """Zeros of these shapes (written without the batch), or what `example_inputs` returns."""
    if shapes:
        return tuple(torch.zeros(batch, *_shape(text)) for text in shapes)
    if example_inputs is None:
        raise InputError(
            "the network's inputs are unknown: give --input-shape 3,32,32 (without the batch), or "
            "write a function example_inputs() beside the factory"
        )
    try:
        inputs = example_inputs()
    except Exception as error:
        raise InputError(f"example_inputs() failed: {type(error).__name__}: {error}") from error
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


def _shape(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise InputError(f"--input-shape: found {text!r}, expected sizes like 3,32,32")
    return sizes
