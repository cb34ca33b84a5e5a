"""The page of packages that nafi is installed with: versions and licences.

    python tools/dependencies.py    # reads constraints.txt, writes docs/dependencies.md

Hides: where packages say what their licence is. Promises: a row for every pinned package, with what
the installed package says of itself; a package that is not installed, or is of another version, is
an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "dependencies.md"
INTRODUCTION = """# Dependencies

Every package that `make venv` installs, as pinned in `constraints.txt`, with the licence that it
states. That is more than nafi needs: it includes all extras, and the tools for tests and
documentation. `python tools/dependencies.py` writes this page; a test keeps it in step.

To look for known vulnerabilities, run `pip-audit -r constraints.txt --no-deps --disable-pip`. It
asks a service, so it is not part of the tests.

`constraints.txt` has no hashes. pip accepts them only if every requirement has them, and nafi
itself, installed from its folder, cannot have one. PyTorch's wheel also differs between platforms
and between CPU and CUDA.

| package | version | licence |
| --- | --- | --- |
"""


def pinned(text: str) -> Iterator[tuple[str, str]]:
    """Names and versions of a file of constraints."""
    for line in text.splitlines():
        requirement = line.partition("#")[0].strip()
        if requirement:
            name, _, number = requirement.partition("==")
            yield name, number


def licence(name: str) -> str:
    """What an installed package states: an expression, else its classifiers, else a text."""
    stated = metadata(name)
    classifiers = [
        text.rpartition(" :: ")[2]
        for text in stated.get_all("Classifier") or []
        if text.startswith("License :: ")
    ]
    text = stated["License"] or "not stated"
    return stated["License-Expression"] or "; ".join(classifiers) or text.strip().splitlines()[0]


def row(name: str, number: str) -> str:
    return f"| {name} | {number} | {licence(name)} |\n"


def page(constraints: str) -> str:
    packages = list(pinned(constraints))
    for name, number in packages:
        try:
            installed = version(name).partition("+")[0]
        except PackageNotFoundError:
            sys.exit(f"{name} is not installed: make venv")
        if installed != number:
            sys.exit(f"{name}: found version {installed}, expected {number}: make clean venv")
    return INTRODUCTION + "".join(row(name, number) for name, number in packages)


if __name__ == "__main__":
    PAGE.write_text(page((ROOT / "constraints.txt").read_text()), encoding="utf-8")
