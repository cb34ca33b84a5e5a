"""The tutorial: its notebook is that of its page, runs, and prints what the page shows."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
TOOL = runpy.run_path(str(ROOT / "tools" / "notebook.py"))
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def printed(cell: Any) -> str:
    return "".join(output["text"] for output in cell.outputs if output.get("name") == "stdout")


def test_the_notebook_is_that_of_the_page() -> None:
    """Otherwise run python tools/notebook.py."""
    written = json.loads(TOOL["NOTEBOOK"].read_text(encoding="utf-8"))
    assert written == TOOL["notebook"](TOOL["PAGE"].read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_notebook_prints_what_the_page_shows(tmp_path: Path) -> None:
    """Word for word; numbers may differ as trainings on other processors do."""
    pages = nbformat.read(TOOL["NOTEBOOK"], as_version=4)
    run = nbformat.read(TOOL["NOTEBOOK"], as_version=4)
    NotebookClient(run, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for shown, cell in zip(pages.cells, run.cells, strict=True):
        if cell.cell_type == "code":
            expected, found = printed(shown), printed(cell)
            assert NUMBER.sub("#", found) == NUMBER.sub("#", expected)
            gaps = [
                abs(float(one) - float(two))
                for one, two in zip(NUMBER.findall(found), NUMBER.findall(expected), strict=True)
            ]
            assert max(gaps, default=0) <= 15
