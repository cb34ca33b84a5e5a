"""Every error that nafi raises on purpose.

Catching `NafiError` catches them all; each message names the culprit, what was found,
what was expected and, where it is not obvious, what to do.
"""


class NafiError(Exception):
    """Base of all errors raised on purpose by nafi."""


class InputError(NafiError, ValueError):
    """An argument cannot be used as it is."""


class SpecError(NafiError):
    """A network cannot be analysed, or a specification does not fit it."""
