"""Writing files and folders so that no half-written one is ever seen, and reading them.

Hides: the temporary file and its permissions. Promises: the target is either unchanged or
complete, and no more people may read it than before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from secrets import token_hex
from typing import Any

from nafi.errors import InputError

_PARTIAL = ".partial"


@contextmanager
def atomic_path(target: Path, *, private: bool = False) -> Iterator[Path]:
    """A temporary path beside `target` that replaces it when the block ends without an error.

    The new file keeps the permissions of the one it replaces; otherwise the umask decides.

    private: only its owner may read the file
    """
    check_writable(target, overwrite=True)
    partial = target.with_name(f".{target.name}.{token_hex(8)}{_PARTIAL}{target.suffix}")
    try:
        mode = _create(partial, target, private)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from None
    try:
        yield partial
        partial.chmod(mode)  # writers may make another file in its place, as safetensors does
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _create(partial: Path, target: Path, private: bool) -> int:
    """Make an empty file; the permissions that it is to have in the end."""
    replaced = target.stat().st_mode & 0o777 if target.exists() and not private else None
    # What replaces a file is closed to others until it is complete; else the umask is applied.
    mode = 0o600 if private or replaced is not None else 0o666
    handle = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    created = os.fstat(handle).st_mode & 0o777
    os.close(handle)
    return created if replaced is None else replaced


def remove_leftovers(target: Path) -> None:
    """Remove what a process that was killed while writing left; for a file with a single writer."""
    for partial in target.parent.glob(f".{escape(target.name)}.*{_PARTIAL}{target.suffix}"):
        partial.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> None:
    """Write a file of text, completely or not at all; one that exists is replaced."""
    with atomic_path(target) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def atomic_folder(
    target: Path, *, overwrite: bool, replaced: Callable[[str], bool]
) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when the block ends without an error.

    replaced: whether a file of this name in the folder that is there goes even if there is no new
        one of its name; all other files stay
    """
    check_folder_writable(target, overwrite)
    target = target.resolve()
    partial = target.with_name(f".{target.name}.{token_hex(8)}{_PARTIAL}")
    try:
        partial.mkdir()
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from None
    try:
        yield partial
        _take_place(partial, target, replaced)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _take_place(new: Path, target: Path, replaced: Callable[[str], bool]) -> None:
    if not target.exists():
        new.rename(target)
        return
    new.chmod(target.stat().st_mode & 0o777)
    old = new.with_suffix(".replaced")
    target.rename(old)
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise
    for file in list(old.iterdir()):
        if not (target / file.name).exists() and not replaced(file.name):
            file.rename(target / file.name)
    shutil.rmtree(old)


def check_folder_writable(target: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot be written, before the work whose result it is to hold."""
    if not target.resolve().parent.is_dir():
        raise InputError(f"cannot write {target}: the folder {target.parent} does not exist")
    if target.exists() and not target.is_dir():
        raise InputError(f"cannot write {target}: it is a file, give the name of a folder")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise InputError(f"{target} exists already: give another name, or --force to overwrite it")


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
