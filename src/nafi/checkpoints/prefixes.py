"""What stands before the names of a network's tensors in a file.

Hides: who put it there: torch.compile and other wrappers, or a training framework that keeps the
network in an attribute, as Lightning does. Promises: names of the network itself, if they can be
told from the file; whatever is guessed or left out is said.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

from torch import Tensor

from nafi.errors import CheckpointError, few

# What torch.compile, DataParallel and Opacus put before every name.
_WRAPPERS = ("_orig_mod.", "module.", "_module.")


class PrefixWarning(UserWarning):
    """A file was read with other names than it has for its tensors."""


def without_prefix(
    state: Mapping[str, Tensor], names: Iterable[str], prefix: str | None, label: str
) -> dict[str, Tensor]:
    """The tensors of a file under the names that a network has for them.

    names: of the network; prefix: what is before them in the file; if None, it is guessed, where no
        name of the network is in the file
    """
    own = dict.fromkeys(names)
    if prefix is not None:
        return _stripped(state, prefix, label)
    state = _unwrap(state, own)
    if not own or state.keys() & own.keys():
        return state
    found = _prefixes(state, list(own))
    if len(found) > 1:
        raise CheckpointError(
            f"{label} holds several networks of this kind, under {few(found)}; say which: "
            f"--strip-prefix {found[0]}"
        )
    if not found:
        return state
    others = [name for name in state if not name.startswith(found[0])]
    left = f"; {few(others)} left out" if others else ""
    text = f"{label}: the network's names stand behind {found[0]!r} (--strip-prefix){left}"
    warnings.warn(text, PrefixWarning, stacklevel=4)
    return _stripped(state, found[0], label)


def _stripped(state: Mapping[str, Tensor], prefix: str, label: str) -> dict[str, Tensor]:
    prefix = prefix.rstrip(".") + "."
    kept = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
    if not kept:
        raise CheckpointError(f"{label} has no names behind {prefix}; it has {few([*state])}")
    return kept


def _prefixes(state: Mapping[str, Tensor], names: list[str]) -> list[str]:
    """All that may stand before the names of a network, behind which are these and no others."""
    first = names[0]
    candidates = [name.removesuffix(first) for name in state if name.endswith(f".{first}")]
    return [
        prefix
        for prefix in candidates
        if {prefix + name for name in names} == {n for n in state if n.startswith(prefix)}
    ]


def _unwrap(state: Mapping[str, Tensor], names: Mapping[str, object]) -> dict[str, Tensor]:
    """Take off what wrappers put before every name, until a name is one of the network's."""
    state = dict(state)
    while state and not state.keys() & names.keys():
        prefix = next((p for p in _WRAPPERS if all(name.startswith(p) for name in state)), None)
        if prefix is None:
            break
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state
