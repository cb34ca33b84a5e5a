"""`nafi demo`: the main job on digits that come with scikit-learn."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nafi.cli.app import AS_JSON, app, progress_bar


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The picture to write: .png, .svg or .pdf.")] = Path(
        "nafi-demo.png"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other clients.")] = 0,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Train eight clients apart on small digits and fuse them by every method."""
    from nafi.experiments import run_demo
    from nafi.files import check_writable
    from nafi.reports import check_picture, draw_demo

    check_picture(out)
    check_writable(out, overwrite=True)
    with progress_bar(as_json) as progress:
        result = run_demo(seed, progress)
    draw_demo(
        [(r.method, r.accuracy, r.neurons) for r in result.rows], result.local, result.counts, out
    )
    if as_json:
        rows = [asdict(row) for row in result.rows]
        typer.echo(json.dumps({"local": result.local, "rows": rows, "picture": str(out)}))
        return
    table = Table(
        title=f"{len(result.local)} clients with digits of their own, fused in one shot",
        caption="No client saw the test digits. The ensemble runs all models side by side.",
    )
    for heading in ["method", "accuracy, %", "hidden neurons", "seconds"]:
        table.add_column(heading, justify="left" if heading == "method" else "right")
    mean = sum(result.local) / len(result.local)
    table.add_row("clients alone, mean", f"{mean:.1f}", "50", "")
    table.add_row("clients alone, best", f"{max(result.local):.1f}", "50", "", end_section=True)
    for row in result.rows:
        table.add_row(row.method, f"{row.accuracy:.1f}", str(row.neurons), f"{row.seconds:.2f}")
    console = Console()
    console.print(table)
    console.print(f"The picture is in {out}", soft_wrap=True)
