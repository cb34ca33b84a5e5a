"""Every error that nafi raises on purpose.

Catching `NafiError` catches them all; each message names the culprit, what was found,
what was expected and, where it is not obvious, what to do.
"""

from collections.abc import Sequence


class NafiError(Exception):
    """Base of all errors raised on purpose by nafi."""


class InputError(NafiError, ValueError):
    """An argument cannot be used as it is."""


class SpecError(NafiError):
    """A network cannot be analysed, or a specification does not fit it."""


class CheckpointError(NafiError):
    """A file cannot be read as a checkpoint, or not as one of this network."""


def few(names: Sequence[str], shown: int = 3) -> str:
    """The first of some names, and how many more there are."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
