"""Fast kernels of torch, switched off for a while.

Hides: that torch keeps these switches in global variables, which all threads share. Promises: a
kernel stays off until the last thread that needs it so is done; then it is as the first found it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Switch:
    """A global variable of torch."""

    def __init__(self, read: Callable[[], bool], write: Callable[[bool], None]) -> None:
        self._read, self._write = read, write
        self._lock = threading.Lock()
        self._users = 0
        self._found = True

    @contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._found = self._read()
                self._write(False)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._write(self._found)


# A whole layer of nn.TransformerEncoder as one operation.
FAST_ATTENTION = Switch(
    torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled
)
# On CPUs, a whole layer of nn.LSTM as one operation.
MKLDNN = Switch(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled)
