"""What a network's code does, in a few letters.

Promises: the same letters on every machine for code that calls the same functions of torch on the
same tensors in the same order, however it is written; others, almost surely, where an operation,
one of its settings or a layer differs. Weights do not count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from nafi.graph.inputs import Inputs, call
from nafi.graph.trace import evaluating, named_tensors

_LETTERS = 12
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def fingerprint(model: nn.Module, inputs: Inputs) -> str:
    """Letters for what a network is made of, and does on these inputs."""
    calls = _Calls(named_tensors(model))
    with evaluating(model), calls:
        call(model, inputs)
    return sha256(repr([without_addresses(model), calls.lines]).encode()).hexdigest()[:_LETTERS]


def without_addresses(value: object) -> str:
    """What an object prints as, without where it lies in memory."""
    return _ADDRESS.sub("", repr(value))


class _Calls(TorchFunctionMode):
    """Notes every call of a function of torch; lines: one for each."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.lines: list[str] = []
        # Tensors are held, so that no two have the same id.
        self._known = {id(tensor): (name, tensor) for name, tensor in tensors.items()}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        name = resolve_name(func) or getattr(func, "__qualname__", type(func).__name__)
        leaves = [self._written(leaf) for leaf in pytree.tree_leaves((args, given))]
        self.lines.append(f"{name} {' '.join(leaves)} {' '.join(given)}")
        return func(*args, **given)

    def _written(self, leaf: object) -> str:
        if not isinstance(leaf, Tensor):
            return without_addresses(leaf)
        count = len(self._known)
        return self._known.setdefault(id(leaf), (f"tensor {count} {tuple(leaf.shape)}", leaf))[0]
