"""Names of a package that are imported when they are first used (PEP 562).

Hides: `__getattr__` and `__dir__` of a module. Promises: importing the package imports none of its
modules; every name is looked up once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    modules: each module of the package -> the names that the package exports from it
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def get_name(name: str) -> object:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules, *module_of})

    return get_name, list_names
