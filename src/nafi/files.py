"""Writing files so that no half-written one is ever seen, and reading them.

Hides: the temporary file. Promises: the target either is as it was or is complete.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from nafi.errors import InputError

_PARTIAL = ".partial"


@contextmanager
def atomic_path(target: Path, *, private: bool = False) -> Iterator[Path]:
    """A temporary path beside `target` that replaces it when the block ends without an error.

    private: a file that its owner alone may read
    """
    check_writable(target, overwrite=True)
    try:
        handle, name = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name}.", suffix=_PARTIAL + target.suffix
        )
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from None
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        if not private:
            partial.chmod(0o644)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def remove_leftovers(target: Path) -> None:
    """Remove what a process that was killed while writing left; for a file of one writer."""
    for partial in target.parent.glob(f".{escape(target.name)}.*{_PARTIAL}{target.suffix}"):
        partial.unlink(missing_ok=True)


def check_writable(target: Path, overwrite: bool) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold."""
    if not target.parent.is_dir():
        raise InputError(f"cannot write {target}: the folder {target.parent} does not exist")
    if target.is_dir():
        raise InputError(f"cannot write {target}: it is a folder, give a file name")
    if target.exists() and not overwrite:
        raise InputError(f"{target} exists already: give another name, or --force to overwrite it")


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
