"""How much memory there is, and a cap on how much more may be taken.

Hides: what the operating system calls it. Promises: within a cap, what asks for more gets a
`MemoryError` and the machine does not run out; systems other than Linux have no cap.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import RLock

_UNKNOWN = 8 * 2**30  # bytes, for machines that do not say how much memory they have
_CGROUP = Path("/sys/fs/cgroup/memory.max")  # the limit of a container
_STATM = Path("/proc/self/statm")  # pages of this process; the first number: of its addresses
_SLACK = 2**30  # addresses that are taken without memory: stacks of threads, pools of malloc
_one_at_a_time = RLock()  # the cap is that of the whole process


@cache
def machine_memory() -> int:
    """Bytes of memory of the machine, or of the container that this runs in."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        memory = _UNKNOWN
    try:
        return min(memory, int(_CGROUP.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return memory


@contextmanager
def memory_cap(more: int) -> Iterator[None]:
    """Let this process take so many bytes more, and no others."""
    if not _STATM.exists():
        yield
        return
    import resource

    with _one_at_a_time:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        taken = int(_STATM.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        others = [known for known in (soft, hard) if known != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([taken + more + _SLACK, *others]), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def text_of_size(count: int) -> str:
    """Bytes in words.

    >>> text_of_size(999), text_of_size(1_500_000), text_of_size(4 * 10**12)
    ('999 bytes', '1.5 MB', '4,000.0 GB')
    """
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} bytes"
