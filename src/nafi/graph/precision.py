"""Double precision throughout, whatever a network's code says.

Hides: the operations that ask for less, such as norms that compute in float32.
Promises: within the block, every floating-point number is computed in double precision; the
network and its inputs are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class DoublePrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A block in which operations read and make nothing but double precision.

    Operations that take functions, such as `torch.cond`, are left as they are.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # torch.compile within a network goes on within the block

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not isinstance(func, torch._ops.OpOverload) or _shares_memory(func):
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map(_raised, (tuple(args), dict(kwargs or {})))
        return pytree.tree_map(_raised, func(*args, **kwargs))


def _shares_memory(func: Any) -> bool:
    """Whether an operation writes into its arguments, or returns a view of them."""
    schema = func._schema
    return any(part.alias_info is not None for part in (*schema.arguments, *schema.returns))


def _raised(leaf: Any) -> Any:
    """A tensor, or the name of a type, in double precision if it has less."""
    if isinstance(leaf, torch.dtype):
        return _double(leaf)
    return leaf.to(_double(leaf.dtype)) if isinstance(leaf, Tensor) else leaf


def _double(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype
