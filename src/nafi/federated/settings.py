"""Settings as plain data, to know a run by in another process.

Promises: equal settings give equal data, whatever process they are made in; no address in memory is
part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np


def plain_data(value: Any) -> Any:
    """A value as JSON has it; functions by their names and what is bound to them."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.generic() | np.ndarray():
            return value.tolist()
        case Mapping():
            return {str(name): plain_data(item) for name, item in value.items()}
        case list() | tuple():
            return [plain_data(item) for item in value]
        case set() | frozenset():
            return sorted(plain_data(item) for item in value)
        case partial():
            bound = {"arguments": list(value.args), **value.keywords}
            return {"function": plain_data(value.func), **plain_data(bound)}
    if is_dataclass(value) and not isinstance(value, type):
        named = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        return {"kind": type(value).__qualname__, **plain_data(named)}
    named_thing = value if hasattr(value, "__qualname__") else type(value)
    return f"{named_thing.__module__}.{named_thing.__qualname__}"
