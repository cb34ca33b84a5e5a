"""Writing files and folders so that no half-written one is ever seen, and reading them.

Hides: the temporary file, its name and its permissions. Promises: the target is either unchanged or
complete, also after a crash of the machine; no more people may read it than before; a link stays,
and what it leads to is replaced. What killed processes left beside a target is removed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import escape, glob
from hashlib import sha256
from pathlib import Path
from platform import node
from secrets import token_hex
from typing import Any

from nafi.errors import InputError

_PARTIAL = ".partial"
_LONG = 180  # bytes of a name to which more can be added; systems allow 255
# What a disk, and not a program, is to blame for.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@contextmanager
def atomic_path(target: Path, *, private: bool = False) -> Iterator[Path]:
    """A temporary path beside `target` that replaces it when the block ends without an error.

    The new file keeps the permissions of the one it replaces; otherwise the umask decides.

    private: only its owner may read the file
    """
    check_writable(target, overwrite=True)
    place = Path(os.path.realpath(target))
    _remove_orphans(place)
    partial = place.with_name(f"{_prefix(place)}{_writer()}-{token_hex(8)}{_ending(place)}")
    try:
        with _write_errors(target, partial):
            mode = _create(partial, place, private)
            yield partial
            partial.chmod(mode)  # writers may make another file in its place, as safetensors does
            _sync(partial)
            partial.replace(place)
            _sync(place.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _write_errors(target: Path, partial: Path) -> Iterator[None]:
    """Say in one line that a file cannot be written."""
    try:
        yield
    except OSError as error:
        if error.filename not in (None, str(partial)):  # of another file
            raise
        raise InputError(f"cannot write {target}: {error.strerror or error}") from None
    except Exception as error:  # writers have exceptions of their own
        full = [os.strerror(code) for code in DISK_ERRORS if os.strerror(code) in str(error)]
        if not full:
            raise
        raise InputError(f"cannot write {target}: {full[0]}") from None


def _create(partial: Path, target: Path, private: bool) -> int:
    """Make an empty file; the permissions that it is to have in the end."""
    replaced = target.stat().st_mode & 0o777 if target.exists() and not private else None
    # What replaces a file is closed to others until it is complete; else the umask is applied.
    mode = 0o600 if private or replaced is not None else 0o666
    handle = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    created = os.fstat(handle).st_mode & 0o777
    os.close(handle)
    return created if replaced is None else replaced


def _sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder, before anything else is done."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prefix(target: Path) -> str:
    """How the names of temporary files for a target begin."""
    name = target.name
    return f".{name if len(os.fsencode(name)) <= _LONG else sha256(os.fsencode(name)).hexdigest()}."


def _ending(target: Path) -> str:
    """How they end: as the target, because writers choose formats by that."""
    return _PARTIAL + (target.suffix if len(os.fsencode(target.suffix)) < 20 else "")


def _writer(process: int | None = None) -> str:
    """The process of this machine that writes a temporary file, in its name."""
    machine = sha256(node().encode()).hexdigest()[:8]
    return f"{machine}-{os.getpid() if process is None else process}"


def _temporary(target: Path) -> list[Path]:
    return list(target.parent.glob(f"{escape(_prefix(target))}*{escape(_ending(target))}"))


def _remove_orphans(target: Path) -> None:
    """Remove what processes of this machine left that no longer run."""
    for partial in _temporary(target):
        machine, process, *_ = [*partial.name.removeprefix(_prefix(target)).split("-"), ""]
        here = process.isdecimal() and f"{machine}-{process}" == _writer(int(process))
        if here and not _runs(int(process)):
            _remove(partial)


def _runs(process: int) -> bool:
    if os.name != "posix":  # where there is no way to ask
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # of another user
        return True
    return True


def _remove(partial: Path) -> None:
    if partial.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        partial.unlink(missing_ok=True)


def remove_leftovers(target: Path) -> None:
    """Remove what any process left that was killed while writing; for a file of a single writer."""
    for partial in _temporary(Path(os.path.realpath(target))):
        _remove(partial)


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
    _remove_orphans(target)
    partial = target.with_name(f"{_prefix(target)}{_writer()}-{token_hex(8)}{_ending(target)}")
    try:
        with _write_errors(target, partial):
            # What replaces a folder is closed to others until it is complete.
            partial.mkdir(0o700 if target.exists() else 0o777)
            yield partial
            _open_like(partial, target)
            for file in (*partial.rglob("*"), partial):
                _sync(file)
            _take_place(partial, target, replaced)
            _sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _open_like(new: Path, target: Path) -> None:
    """Give files in a new folder the permissions of those they replace; else the umask decides."""
    probe = new / token_hex(8)
    probe.touch()
    usual = probe.stat().st_mode & 0o777
    probe.unlink()
    for file in new.rglob("*"):
        if file.is_file():
            before = target / file.relative_to(new)
            file.chmod(before.stat().st_mode & 0o777 if before.is_file() else usual)


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
    with _write_errors(target, target):
        target.exists()
    if not target.resolve().parent.is_dir():
        raise InputError(f"cannot write {target}: the folder {target.parent} does not exist")
    if target.exists() and not target.is_dir():
        raise InputError(f"cannot write {target}: it is a file, give the name of a folder")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise InputError(f"{target} exists already: give another name, or --force to overwrite it")


def check_writable(target: Path, overwrite: bool) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold."""
    with _write_errors(target, target):
        target.exists()  # which fails for a name that is too long
    parent = Path(os.path.realpath(target)).parent
    if not parent.is_dir():
        shown = parent if target.is_symlink() else target.parent
        raise InputError(f"cannot write {target}: the folder {shown} does not exist")
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


def expand_paths(patterns: Sequence[str | Path]) -> list[Path]:
    """The files that some paths, globs and lists of paths name, in order.

    A glob is as "models/*.safetensors"; what it finds is sorted. A list is "@list.txt", a text file
    with a path or glob in each line; empty lines and those that begin with # are skipped. Paths in
    it are relative to the current folder, as they would be on the command line.
    """
    found: list[Path] = []
    for pattern in patterns:
        text = str(pattern)
        path = Path(text)
        if path.name.startswith("@") and not path.exists():
            found += expand_paths(_listed(path.with_name(path.name[1:])))
        elif any(mark in text for mark in "*?[") and not path.exists():
            matches = sorted(Path(name) for name in glob(text, recursive=True))
            if not matches:
                raise InputError(f"no file matches {text}")
            found += matches
        else:
            found.append(path)
    return found


def _listed(file: Path) -> list[str]:
    """The lines of a list of paths."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"@{file} cannot be read as a list of paths: {error}") from None
    nested = next((line for line in lines if line.startswith("@")), None)
    if nested is not None:
        raise InputError(f"@{file} names {nested}, another list; a list may name files only")
    paths = [line for line in lines if line and not line.startswith("#")]
    if not paths:
        raise InputError(f"@{file} names no file; expected a path or a glob in each line")
    return paths
