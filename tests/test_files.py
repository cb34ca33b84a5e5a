"""Files that are written: complete or not at all, closed to whom they were closed, and in place."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import nafi
from nafi.errors import InputError
from nafi.files import atomic_folder, atomic_path, expand_paths, write_text
from tests.test_cli import run


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def write_folder(target: Path, text: str = "new") -> None:
    with atomic_folder(target, overwrite=True, replaced=lambda name: False) as partial:
        assert mode(partial) == (0o700 if target.exists() else 0o755)
        for name in ("weights", "config"):
            (partial / name).write_text(text)
            (partial / name).chmod(0o600 if name == "config" else 0o666)  # as some writers do


def test_a_folder_that_is_replaced_is_open_to_nobody_else(tmp_path: Path) -> None:
    target = tmp_path / "fused"
    write_folder(target)
    assert [mode(target / name) for name in ("weights", "config")] == [0o644, 0o644]
    (target / "weights").chmod(0o600)
    target.chmod(0o750)
    write_folder(target, "newer")
    assert [mode(target), mode(target / "weights"), mode(target / "config")] == [
        0o750,
        0o600,
        0o644,
    ]
    assert (target / "weights").read_text() == "newer"


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    real, link = tmp_path / "disk" / "real.txt", tmp_path / "link.txt"
    link.symlink_to(real)
    for text in ("first", "second"):  # first the link leads nowhere
        write_text(link, text)
        assert link.is_symlink()
        assert real.read_text() == text
        real.chmod(0o600)
    assert mode(real) == 0o600
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["disk", "link.txt", "real.txt"]
    lost = tmp_path / "lost.txt"
    lost.symlink_to(tmp_path / "no" / "x.txt")
    with pytest.raises(InputError, match=r"lost\.txt: the folder .*/no does not exist"):
        write_text(lost, "x")


KILLED = """
import sys, time
from pathlib import Path
from nafi.files import atomic_folder, atomic_path
with atomic_path(Path("x.txt")) as file:
    file.write_text("half")
    with atomic_folder(Path("y"), overwrite=True, replaced=lambda name: False) as folder:
        (folder / "z").write_text("half")
        print("there", flush=True)
        time.sleep(600)
"""


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """What a living one is at is not."""
    command = [sys.executable, "-c", KILLED]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    assert len(list(tmp_path.glob(".*.partial*"))) == 2
    write_text(tmp_path / "x.txt", "whole")
    assert len(list(tmp_path.glob(".*.partial*"))) == 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    write_text(tmp_path / "x.txt", "again")
    write_folder(tmp_path / "y")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["x.txt", "y"]


def test_the_disk_has_a_file_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        steps.append(("sync", os.fstat(handle).st_ino))
        fsync(handle)

    def replaced(source: Path, target: Path) -> None:
        steps.append(("name", os.stat(source).st_ino))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_text(tmp_path / "x.txt", "text")
    file, folder = (tmp_path / "x.txt").stat().st_ino, tmp_path.stat().st_ino
    assert steps == [("sync", file), ("name", file), ("sync", folder)]
    steps.clear()
    write_folder(tmp_path / "y")
    inodes = [each.stat().st_ino for each in (*(tmp_path / "y").iterdir(), tmp_path)]
    assert {("sync", inode) for inode in inodes} <= set(steps)


@contextmanager
def small_disk(most: int) -> Iterator[None]:
    """Files of more bytes cannot be written, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    model, target = nn.Linear(300, 300), tmp_path / "x.safetensors"
    nafi.save(nn.Linear(2, 3), target)
    before = target.read_bytes()
    with small_disk(10_000):
        with pytest.raises(InputError, match=r"^cannot write .*x\.safetensors: File too large$"):
            nafi.save(model, target, overwrite=True)
        for write in (
            lambda file: file.write_bytes(bytes(20_000)),
            lambda file: np.zeros(20_000).tofile(file),
        ):
            with (
                pytest.raises(InputError, match=r"^cannot write .*x\.safetensors: "),
                atomic_path(target) as partial,
            ):
                write(partial)
    assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target]


def test_errors_of_other_files_are_theirs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="other"), atomic_path(tmp_path / "x"):
        (tmp_path / "other").read_text()
    with pytest.raises(ValueError, match="bug"), atomic_path(tmp_path / "x"):
        raise ValueError("bug")


def test_long_names(tmp_path: Path, folder: Path) -> None:
    for name in ("x" * 251 + ".txt", "é" * 127, "x." + "y" * 253):
        write_text(tmp_path / name, "text")
        assert (tmp_path / name).read_text() == "text"
        (tmp_path / name).unlink()
    with pytest.raises(InputError, match=r"cannot write x+: File name too long"):
        write_text(Path("x" * 256), "text")
    long = "x" * 300 + ".safetensors"
    nafi.save(nn.Linear(2, 3), folder / "a.safetensors")
    for arguments in (
        ["fuse", long, "a.safetensors", "--out", "g.safetensors"],
        ["fuse", "a.safetensors", "a.safetensors", "--out", long],
        ["inspect", long],
        ["report", long],
    ):
        done = run(*arguments, cwd=folder)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "File name too long" in done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def test_paths_globs_and_lists_name_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.x", "a.x", "c.y", "[d].x"):
        Path(name).touch()
    Path("list.txt").write_text("# a comment\nc.y\n\n?.x\n", "utf-8")
    assert expand_paths(["@list.txt", "c.y"]) == [Path(n) for n in ("c.y", "a.x", "b.x", "c.y")]
    assert expand_paths(["[d].x", "missing"]) == [Path("[d].x"), Path("missing")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n# nothing\n", "names no file"),
        ("@other.txt", "another list"),
        ("no*", "no file matches"),
    ],
)
def test_lists_without_files_are_refused(
    content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.txt").write_text(content, "utf-8")
    with pytest.raises(InputError, match=message):
        expand_paths(["@list.txt"])
