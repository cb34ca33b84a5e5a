"""The page of dependencies says what is pinned."""

from __future__ import annotations

import runpy
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

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
