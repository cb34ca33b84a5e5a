"""The command line as a user meets it: in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nafi


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    code = "from nafi.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        check=False,
    )


def test_demo_writes_a_picture_and_recovers_the_neurons(tmp_path: Path) -> None:
    done = run("demo", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = {row["method"]: row for row in result["rows"]}
    assert rows["nafi"]["error"] < rows["pfnm"]["error"] < rows["average by position"]["error"]
    assert rows["nafi"]["agreement"] > 0.8
    assert (tmp_path / "nafi-demo.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["nafi-demo.png"]


def test_what_a_user_can_mend_is_told_in_a_line(tmp_path: Path) -> None:
    for arguments, words in [
        (["demo", "--out", str(tmp_path / "no" / "x.png")], "does not exist"),
        (["demo", "--out", str(tmp_path / "x.docx")], "use .png, .svg or .pdf"),
        (["demo", "--out", str(tmp_path)], "unknown picture format"),
    ]:
        done = run(*arguments)
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_unknown_command_and_version() -> None:
    assert run("demoo").returncode == 2
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"nafi {nafi.__version__}\n")
