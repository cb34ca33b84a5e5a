"""Operations that torch itself writes in terms of others.

Hides: how torch takes them apart. Promises: an operation without a rule is seen as those that it
consists of, if it consists of some, so that rules are needed for torch's own words only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from nafi.graph.recording import recording_alone
from nafi.graph.trace import Op

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def taken_apart(op: Op) -> fx.Graph | None:
    """The operations that an operation consists of, with its tensors as inputs; None if of none."""
    target: Any = op.node.target
    composite = isinstance(target, torch._ops.OpOverload) and target.has_kernel_for_dispatch_key(
        _COMPOSITE
    )
    nodes = op.node.all_input_nodes
    sizes = [node.meta.get("val") for node in nodes]
    if not composite or op.writes or not all(isinstance(value, Tensor) for value in sizes):
        return None

    def run(*tensors: Tensor) -> Any:
        given = dict(zip(nodes, tensors, strict=True))
        args, kwargs = fx.map_arg((op.node.args, dict(op.node.kwargs)), given.__getitem__)
        return target(*args, **kwargs)

    try:
        with recording_alone():
            graph: fx.Graph = make_fx(run)(*(_empty(value) for value in sizes)).graph
    except Exception:  # it looks at values, or at where they are kept
        return None
    inner = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    itself = any(node.op != "call_function" or node.target is target for node in inner)
    return None if itself else graph


def _empty(tensor: Any) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
