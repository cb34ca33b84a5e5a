"""The tutorial as a notebook, written from its page, so that the two cannot disagree.

    python tools/notebook.py    # reads docs/tutorial.md, writes docs/tutorial.ipynb

Hides: the format of notebooks. Promises: a cell for every Python block and for the text between
them; a text block that follows a Python block is what its cell prints.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tutorial.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
_PYTHON = re.compile(
    r"^```python\n(?P<source>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.M | re.S
)


def notebook(page: str) -> dict[str, Any]:
    """The page as a notebook of format 4.5."""
    cells: list[dict[str, Any]] = []
    begin = 0
    for block in _PYTHON.finditer(page):
        cells += [_text(page[begin : block.start()]), _code(block["source"], block["output"])]
        begin = block.end()
    cells.append(_text(page[begin:]))
    for index, cell in enumerate(cells):
        cell["id"] = f"cell-{index}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _text(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": _lines(text.strip())}


def _code(source: str, output: str | None) -> dict[str, Any]:
    printed = {"name": "stdout", "output_type": "stream", "text": _lines(output or "")}
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [printed] if output else [],
        "source": _lines(source.rstrip()),
    }


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    found = notebook(PAGE.read_text(encoding="utf-8"))
    NOTEBOOK.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
