"""The page of dependencies says what is pinned, and the list of hashes knows its files."""

from __future__ import annotations

import json
import re
import runpy
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOL = runpy.run_path(str(ROOT / "tools" / "dependencies.py"))
PINNED = dict(TOOL["pinned"]((ROOT / "constraints.txt").read_text()))


def rows() -> dict[str, str]:
    lines = TOOL["PAGE"].read_text(encoding="utf-8").splitlines(keepends=True)
    table = lines[lines.index("| --- | --- | --- |\n") + 1 :]
    return {line.split(" | ")[0].removeprefix("| "): line for line in table}


def test_every_pinned_package_is_on_the_page_and_no_other() -> None:
    """Otherwise run python tools/dependencies.py."""
    page = TOOL["PAGE"].read_text(encoding="utf-8")
    assert page.startswith(TOOL["INTRODUCTION"])
    assert {name: line.split(" | ")[1] for name, line in rows().items()} == PINNED
    assert len(PINNED) > 100
    assert all(number[:1].isdigit() for number in PINNED.values())  # a version, not a range


@pytest.mark.parametrize("name", PINNED)
def test_licences_are_those_that_packages_state(name: str) -> None:
    """Of those that are installed: another platform needs others."""
    try:
        metadata(name)
    except PackageNotFoundError:
        return
    assert rows()[name] == TOOL["row"](name, PINNED[name])
    assert "not stated" not in rows()[name]


HASHES = TOOL["HASHES"].read_text(encoding="utf-8")


def test_hashes_are_listed_of_what_is_pinned_and_of_nothing_else() -> None:
    """Otherwise run python tools/dependencies.py --hashes."""
    listed = TOOL["listed"](HASHES)
    pins = {TOOL["canonical"](name): number for name, number in PINNED.items()}
    assert {name: number for name, (number, _) in listed.items()} == pins
    found = [value for _, hashes in listed.values() for value in hashes]
    assert all(hashes for _, hashes in listed.values())
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in found)
    assert len(found) == HASHES.count("--hash=sha256:")
    assert "://" not in HASHES


def installed(name: str, number: str, digest: str) -> dict[str, Any]:
    """As pip reports it."""
    archive = {"hash": f"sha256={digest}", "hashes": {"sha256": digest}}
    metadata = {"name": name, "version": number}
    return {"download_info": {"url": "file:x", "archive_info": archive}, "metadata": metadata}


LISTED = """# all
a-package==1.2 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
another-one==3 --hash=sha256:cc
"""


@pytest.mark.parametrize(
    ("name", "number", "digest", "told"),
    [
        ("another-one", "3", "cc", None),
        ("A.Package", "1.2", "aa", None),
        ("a_package", "1.2+cpu", "bb", None),
        ("a-package", "1.2", "cc", "a-package 1.2: no file of this version has the hash cc"),
        ("another-one", "4", "cc", "another-one 4: expected version 3"),
        ("nobody-s", "1", "cc", "not pinned: nobody-s 1"),
    ],
)
def test_a_file_that_is_not_listed_is_named(
    name: str, number: str, digest: str, told: str | None, tmp_path: Path
) -> None:
    """nafi itself is a folder, which has no hash; without a report there is nothing to say."""
    folder = {"download_info": {"url": "file:.", "dir_info": {}}, "metadata": {"name": "nafi"}}
    report = {"install": [folder, installed("another-one", "3", "cc")]}
    report["install"].append(installed(name, number, digest))
    assert TOOL["complaints"](report, LISTED) == ([told] if told else [])
    file = tmp_path / "report.json"
    TOOL["check"]([file])
    file.write_text(json.dumps(report))
    with pytest.raises(
        SystemExit, match="not pinned: another-one 3"
    ):  # the true list has another one
        TOOL["check"]([file])
