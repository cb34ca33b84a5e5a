"""What batch normalisation remembers of a network's training data: its running statistics.

Hides: how they are found while a network runs. Promises: networks are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

_BatchNorm = nn.modules.batchnorm._BatchNorm


class Remembered(NamedTuple):
    """(C,) means and variances of each channel; eps: what is added to variances."""

    mean: Tensor
    variance: Tensor
    eps: float


def remembers(module: nn.Module) -> bool:
    """Whether a module is a batch normalisation with running statistics."""
    return isinstance(module, _BatchNorm) and module.running_mean is not None


@contextmanager
def watched_norms(model: nn.Module, visit: Callable[[Remembered, Tensor], None]) -> Iterator[None]:
    """While it lasts, every use of such a normalisation is shown, with the values that enter it."""

    def show(norm: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(norm, _BatchNorm)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        visit(Remembered(norm.running_mean, norm.running_var, norm.eps), arguments[0])

    with ExitStack() as stack:
        for module in filter(remembers, model.modules()):
            stack.callback(module.register_forward_pre_hook(show).remove)
        yield
