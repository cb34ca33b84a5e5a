"""What a function is, in a line of text, so that another one in its place is noticed.

Promises: the same line for the same code, however it is laid out or commented.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from nafi.graph import named_tensors, without_addresses


def described(function: Callable[..., Any]) -> str:
    """A function's name and, unless it is torch's, letters that tell its code."""
    if isinstance(function, partial):
        given = without_addresses((function.args, function.keywords))
        return f"{described(function.func)} with {given}"
    if isinstance(function, nn.Module):
        numbers = [tensor.tolist() for tensor in named_tensors(function).values()]
        return _named(without_addresses(function), repr(numbers) if numbers else "")
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", None) or ""
    if module.split(".")[0] == "torch":
        return f"{module}.{name}"
    return _named(name, _code(function))


def _named(name: str, detail: str) -> str:
    return f"{name} {zlib.crc32(detail.encode()):08x}" if detail else name


def _code(function: Callable[..., Any]) -> str:
    """A function's code without its layout; of a function in the middle of a line, what it runs."""
    try:
        source = inspect.getsource(function if inspect.isroutine(function) else type(function))
        return ast.dump(ast.parse(textwrap.dedent(source)))
    except (OSError, TypeError, SyntaxError):
        code = getattr(function, "__code__", None)
        return repr((code.co_code, code.co_names)) if code is not None else ""
