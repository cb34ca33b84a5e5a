"""Writing files so that no half-written one is ever seen.

Hides: the temporary file. Promises: the target either is as it was or is complete.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nafi.errors import InputError


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that replaces it when the block ends without an error."""
    if not target.parent.is_dir():
        raise InputError(f"cannot write {target}: the folder {target.parent} does not exist")
    if target.is_dir():
        raise InputError(f"cannot write {target}: it is a folder, give a file name")
    try:
        handle, name = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix
        )
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from None
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o644)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
