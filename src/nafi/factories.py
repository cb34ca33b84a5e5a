"""Networks, and other things that users write code for, by name: `package.module:factory`.

Hides: importing the user's code. Promises: an `nn.Module` and example inputs, or a function; or a
one-line error that says what failed: the name, the import or the call. Code that tries to end the
program has failed, too; `sys.path` is left as it was.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    searched = " (searched in the current folder and the installed packages)"
    with user_code(f"cannot import {module_name}", searched, NotImportedError):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(f"{module_name} has no function or class {function_name!r}")
    return function, module


def call_function(function: Callable[..., Any], name: str, *arguments: object) -> Any:
    """What a user's function returns, or a one-line error."""
    called = "without arguments" if not arguments else "with a model"
    with user_code(f"{name} failed", f"; it is called {called}"):
        return function(*arguments)


@contextmanager
def user_code(
    failure: str, advice: str = "", kind: type[InputError] = InputError
) -> Iterator[None]:
    """Run code of the user's, which may import modules of the current folder.

    What it raises, also to end the program, becomes an error of one line; Ctrl-C still interrupts.

    failure, advice: what the error says before and after what was raised
    """
    with _current_folder_on_path():
        try:
            yield
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            raised = " ".join(f"{type(error).__name__}: {error}".split())
            raise kind(f"{failure}: {raised}{advice}") from error


@contextmanager
def _current_folder_on_path() -> Iterator[None]:
    folder = os.getcwd()
    if folder in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:  # unless the user's code has taken it off
            sys.path.remove(folder)


def call_factory(factory: Callable[[], Any], name: str = "factory") -> nn.Module:
    """Call a factory, which must return a network."""
    with user_code(f"{name}() failed", "; the factory is called without arguments"):
        model = factory()
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
    with user_code("example_inputs() failed"):
        inputs = example_inputs()
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
