"""Every error that nafi raises on purpose.

Catching `NafiError` catches them all; each message names the culprit, what was found,
what was expected and, where it is not obvious, what to do.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec


class NafiError(Exception):
    """Base of all errors raised on purpose by nafi."""


class InputError(NafiError, ValueError):
    """An argument cannot be used as it is."""


class SpecError(NafiError):
    """A network cannot be analysed, or a specification does not fit it."""


class CheckpointError(NafiError):
    """A file cannot be read as a checkpoint, or not as one of this network."""


# Modules that are not installed with nafi -> the extra that brings them.
EXTRAS = {
    **dict.fromkeys(("jinja2", "matplotlib", "PIL", "pooch", "pydantic", "sklearn"), "lab"),
    "flwr": "flower",
    "ot": "ot",
    "transformers": "hf",
}


def require(*modules: str) -> None:
    """Refuse, before any work, what needs a package that is not installed."""
    for module in modules:
        if find_spec(module) is None:
            raise NafiError(install_hint(module))


def install_hint(module: str) -> str:
    """How to get torch, or a module of `EXTRAS`."""
    if module == "torch":
        return (
            "this needs torch, which is not installed: pip install torch; on a machine without a "
            "GPU, first select CPU at https://pytorch.org/get-started to save gigabytes of CUDA"
        )
    return f"this needs {module}, which is not installed: pip install 'nafi[{EXTRAS[module]}]'"


def few(names: Sequence[str], shown: int = 3) -> str:
    """The first of some names, and how many more there are."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


def unlike(names: Mapping[str, object], expected: Mapping[str, object]) -> str:
    """How names differ from those expected: "lacks a and has b"; empty if they do not."""
    missing = [name for name in expected if name not in names]
    extra = [str(name)[:60] for name in names if name not in expected]
    parts = [f"lacks {few(missing)}"] * bool(missing) + [f"has {few(extra)}"] * bool(extra)
    return " and ".join(parts)
