"""Statistics of batch normalisation, measured anew.

Hides: which modules keep statistics, and batches. Promises: nothing but running statistics changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from nafi.fusion.moments import run_batches
from nafi.graph.trace import evaluating

_BatchNorm = nn.modules.batchnorm._BatchNorm


def calibrate(model: nn.Module, batches: Iterable[Any]) -> nn.Module:
    """Measure the statistics of a network's batch normalisation on some inputs, in place.

    batches: inputs of the network, or tuples that begin with them, as a DataLoader gives; no labels
        are needed, and some dozens of inputs will do, two or more in each batch

    The mean of neurons that differ varies less than they do. Normalisation that was averaged with
    its neurons (`nafi.fuse(..., batchnorm="average")`) gives them back the variance they had, once
    its statistics are those of the fused network (Jordan et al., 2023). Returns the network, in
    eval mode.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    try:
        with evaluating(model):  # which puts statistics back as well, whatever happens
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # the mean over all batches
                norm.train()
            run_batches(model, batches, "calibrate")
            found = [{n: b.clone() for n, b in norm.named_buffers()} for norm in norms]
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    for norm, statistics in zip(norms, found, strict=True):
        norm.load_state_dict(statistics, strict=False)
    return model.eval()
