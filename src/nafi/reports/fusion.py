"""What a fusion did, for people and for machines.

Hides: rich and HTML. Promises: for every group the local widths, the fused width and how many
models share its neurons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from nafi.files import atomic_path
from nafi.version import __version__

Rows = Sequence[Mapping[str, Any]]
_HEADINGS = ("group", "local width", "fused width", "factor", "shared by", "by one", "by all")


def fusion_table(rows: Rows, title: str) -> Table:
    """A row a group; `rows` as `FusionResult.summary` gives them."""
    table = Table(title=title)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "group" else "right")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def write_fusion_page(path: Path, rows: Rows, title: str, facts: Mapping[str, Any]) -> None:
    """One self-contained page: the table and, for each group, a bar of who shares its neurons."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # of nafi[lab]; tables need none

    environment = Environment(
        loader=PackageLoader("nafi.reports"), autoescape=True, undefined=StrictUndefined
    )
    groups = [
        {"cells": _cells(row), "bars": _bars(row["shared"]), "name": row["group"]} for row in rows
    ]
    page = environment.get_template("fusion.html").render(
        title=title,
        headings=_HEADINGS,
        groups=groups,
        facts=facts,
        version=__version__,
        models=len(rows[0]["local"]) if rows else 0,
    )
    with atomic_path(path) as partial:
        partial.write_text(page, encoding="utf-8")


def _cells(row: Mapping[str, Any]) -> list[str]:
    local, shared, width = row["local"], row["shared"], row["width"]
    narrow, wide = min(local), max(local)
    total = sum(shared)
    mean = sum((k + 1) * n for k, n in enumerate(shared)) / total if total else 0.0
    return [
        row["group"],
        str(wide) if narrow == wide else f"{narrow}-{wide}",
        str(width),
        f"{width / wide:.2f}x",
        f"{mean:.1f} of {len(local)}",
        f"{shared[0] / total:.0%}" if total else "-",
        f"{shared[-1] / total:.0%}" if total else "-",
    ]


def _bars(shared: Sequence[int]) -> list[dict[str, Any]]:
    """The share of neurons that one, two, ... models own, from left to right."""
    total = sum(shared) or 1
    bars, start = [], 0.0
    for k, count in enumerate(shared):
        size = 100 * count / total
        shade = 92 - 62 * (k + 1) / len(shared)
        label = f"{count} neurons of {k + 1} model{'s' * (k > 0)}"
        bars.append(
            {"start": round(start, 2), "size": round(size, 2), "shade": round(shade), "told": label}
        )
        start += size
    return bars
