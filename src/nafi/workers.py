"""What every worker process begins with.

Promises: one thread, since more threads than cores only wait for each other; a worker ends when
the process that started it does, however that was ended.
"""

from __future__ import annotations

import multiprocessing
import os
import threading

import torch


def begin_worker() -> None:
    """Call this first in a worker process."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # whatever it is at: nobody waits for it any more
