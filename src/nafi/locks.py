"""A file that one process works on at a time.

Hides: the lock beside the file. Promises: whoever comes second is refused at once, with the number
of the process that is at it; a process that was killed holds nothing. Where there are no such
locks, as on Windows, nobody is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nafi.errors import InputError

try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Have a file to oneself; it need not exist."""
    if fcntl is None:  # pragma: no cover
        yield
        return
    path = target.resolve()
    lock = path.with_name(f".{path.name}.lock")
    handle = _taken(lock, target)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # while it is ours: nobody else can hold what is removed
        os.close(handle)


def _taken(lock: Path, target: Path) -> int:
    while True:
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise InputError(f"cannot lock {target}: {error.strerror}") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 20).decode(errors="replace").strip()
            os.close(handle)
            raise InputError(
                f"{target} is in use by another run (process {holder or 'unknown'}); wait until it "
                "ends, or give another name"
            ) from None
        if _is_still(handle, lock):
            os.truncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
            return handle
        os.close(handle)  # its last holder removed it between our two steps


def _is_still(handle: int, lock: Path) -> bool:
    """Whether a file that was opened is the one of that name."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(lock))
    except FileNotFoundError:
        return False
