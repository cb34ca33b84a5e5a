"""What is published: a wheel and a source distribution that are complete."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import nafi

ROOT = Path(__file__).parent.parent
FILES = ["pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"]


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both, built from a copy without a network: everything is installed."""
    copy = tmp_path_factory.mktemp("copy")
    for name in [*FILES, "constraints.txt", "hashes.txt", "Makefile"]:
        shutil.copy(ROOT / name, copy)
    nothing = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=nothing)
    run("build", "--no-isolation", "--outdir", "dist", cwd=copy)
    return copy / "dist"


@pytest.mark.slow
def test_what_is_built_can_be_published(built: Path) -> None:
    names = sorted(path.name for path in built.iterdir())
    version = nafi.__version__
    assert names == [f"nafi-{version}-py3-none-any.whl", f"nafi-{version}.tar.gz"]
    told = run("twine", "check", "--strict", *names, cwd=built)
    assert told.count("PASSED") == 2, told


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(built: Path) -> None:
    """Templates, experiments and the marker of types, too."""
    source = ROOT / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "nafi").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {"nafi/py.typed", "nafi/reports/templates/demo.html"} <= wanted
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(next(n for n in names if n.endswith("dist-info/METADATA"))).decode()
    assert {name for name in names if name.startswith("nafi/")} == wanted
    told = Parser().parsestr(metadata)
    assert told["Version"] == nafi.__version__
    assert told["License-Expression"] == "Apache-2.0"
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in wanted} | set(FILES) <= packed


def test_the_version_is_told_the_same_everywhere() -> None:
    """Its one place is nafi.version; files that cannot read it are held to it."""
    version = nafi.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    attribute = project["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attribute == "nafi.version.__version__"
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if "## " in line]
    assert next(line for line in headings if line.startswith("## ")) == f"## {version}"
