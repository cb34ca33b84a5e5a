"""The packages that nafi is installed with: versions, licences, and the hashes of their files.

    python tools/dependencies.py            # constraints.txt -> docs/dependencies.md
    python tools/dependencies.py --hashes   # constraints.txt -> hashes.txt; asks the package index
    python tools/dependencies.py --check .venv/ready.json   # reports of pip install, as make hashes

Hides: where packages say what their licence is, and how pip says what it installed.
Promises: a row for every pinned package, with what the installed package says of itself; a package
that is not installed, or is of another version, is an error. Hashes are those of all files of a
pinned version, for every platform. A check needs no package and no network, and itself runs none
of the code that was installed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "dependencies.md"
HASHES = ROOT / "hashes.txt"
REPORTS = ROOT / ".venv" / "ready.json", ROOT / ".venv" / "ready-dev.json"
INTRODUCTION = """# Dependencies

Every package that `make venv` installs, as pinned in `constraints.txt`, with the licence that it
states. That is more than nafi needs: it includes all extras, and the tools for tests and
documentation. `python tools/dependencies.py` writes this page; a test keeps it in step.

## Hashes

`hashes.txt` has the SHA-256 of every file of every pinned version, for all platforms, and of
PyTorch's CPU build for Linux. pip says what it installed, and `make venv` compares that with the
list: a package that is not pinned, or a file that is not listed, is named. `make hashes` does the
same and fails, and so does the gate. It is a check after the installation: wheels run nothing
when they are installed, but pip itself runs in the new environment once more, for the tools. The
setuptools that builds nafi, which pip fetches apart, is pinned but not checked.

The hashes are not in `constraints.txt`, because pip would then refuse to install nafi itself from
its folder, which has no hash. And a build of PyTorch from another index, as for CUDA, is not
listed: that should be told, but should keep nobody from using nafi. If you want pip to refuse
whatever is not listed, on Linux with Python 3.11: install PyTorch first, as pip would prefer the
build for CUDA, then run `pip install --require-hashes --no-deps -r hashes.txt` and
`pip install --no-deps .`

## Known vulnerabilities

`pip-audit -r constraints.txt --no-deps --disable-pip` looks for them. It asks a service for each
version, so it is not part of the tests. Behind a mirror that only has packages, it says that
dependencies were not found and could not be audited: then nothing was looked at.

## Versions and licences

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


# ----------------------------------------------------------------------------------- hashes


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def listed(text: str) -> dict[str, tuple[str, set[str]]]:
    """Package -> its version and hashes, of a file of requirements with hashes."""
    found = {}
    for line in text.replace("\\\n", " ").splitlines():
        requirement, *hashes = line.split(" --hash=sha256:")
        for name, number in pinned(requirement):
            found[canonical(name)] = number, {value.strip() for value in hashes}
    return found


def installed_files(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Name, version and hash of what pip installed, but for folders."""
    for item in report["install"]:
        archive = item["download_info"].get("archive_info")
        if archive is not None:
            stated = item["metadata"]
            yield canonical(stated["name"]), stated["version"], archive["hashes"]["sha256"]


def complaints(report: Mapping[str, Any], hashes: str) -> list[str]:
    """What a report of pip names that is not listed."""
    known, found, unpinned = listed(hashes), [], []
    for name, number, digest in installed_files(report):
        expected, files = known.get(name, ("", set()))
        if not files:
            unpinned.append(f"{name} {number}")
        elif number.partition("+")[0] != expected:
            found.append(f"{name} {number}: expected version {expected}")
        elif digest not in files:
            found.append(f"{name} {number}: no file of this version has the hash {digest}")
    return [*found, f"not pinned: {', '.join(unpinned)}"] if unpinned else found


def check(reports: Sequence[Path]) -> None:
    """Of an environment that is older than reports are, nothing can be said."""
    hashes = HASHES.read_text(encoding="utf-8")
    known = [path for path in reports if path.exists()]
    found = [line for path in known for line in complaints(_json(path), hashes)]
    if found:
        told = "What pip installed is not what hashes.txt lists; docs/dependencies.md says more:"
        sys.exit("\n".join([told, *found]))


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def all_hashes() -> str:
    """What the package index says of the pinned versions, and what is installed of them."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-deps"]
    command += ["--generate-hashes", "--no-header", "--no-annotate", "constraints.txt"]
    found = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    known = listed(found)
    for path in filter(Path.exists, REPORTS):
        for name, number, digest in installed_files(_json(path)):
            if name in known and number.partition("+")[0] == known[name][0]:
                known[name][1].add(digest)  # of another index, as PyTorch's CPU build
    return (
        "# Written by tools/dependencies.py --hashes: all files of the pinned versions.\n"
        + "".join(
            " \\\n    ".join(
                [f"{name}=={number}", *(f"--hash=sha256:{value}" for value in sorted(values))]
            )
            + "\n"
            for name, (number, values) in sorted(known.items())
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hashes", action="store_true", help="write hashes.txt")
    parser.add_argument("--check", nargs="+", type=Path, metavar="REPORT", help="of pip install")
    arguments = parser.parse_args()
    if arguments.check:
        check(arguments.check)
    elif arguments.hashes:
        HASHES.write_text(all_hashes(), encoding="utf-8")
    else:
        PAGE.write_text(page((ROOT / "constraints.txt").read_text()), encoding="utf-8")


if __name__ == "__main__":
    main()
