"""`nafi demo`: the main job on digits that come with scikit-learn."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from nafi.cli.app import AS_JSON, app, command_line, progress_bar, waiting
from nafi.cli.tables import text_table
from nafi.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="The page to write, .html; the picture goes beside it, .png.")
    ] = Path("nafi-demo.html"),
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other clients.")] = 0,
    trials: Annotated[
        int, typer.Option(min=1, help="Draws of clients, to take the mean over.")
    ] = 3,
    show: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open",
            help="Open the page in a browser. By default: on a desktop, from a terminal.",
        ),
    ] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Train eight clients apart on small digits and fuse them by every method, in half a minute."""
    with waiting("loading PyTorch", as_json):
        from nafi.experiments import run_demo
        from nafi.files import check_writable
        from nafi.reports import demo_notes, demo_score, demo_table, draw_demo, write_demo_page

    if out.suffix != ".html":
        raise InputError(f"--out: found {out}, expected a name that ends in .html")
    picture = out.with_suffix(".png")
    for target in (out, picture):
        check_writable(target, overwrite=True)
    with progress_bar(as_json) as progress:
        found = run_demo(seed, progress, trials).to_dict()
    draw_demo(found, picture)
    write_demo_page(out, found, command_line())
    if as_json:
        typer.echo(json.dumps({**found, "page": str(out), "picture": str(picture)}))
    else:
        console = Console()
        console.print(text_table(demo_table(found), sections=[len(found["references"])]))
        for line in [*demo_notes(found), "", demo_score(found)]:
            console.print(line, markup=False, highlight=False)
        for what, file in [("page", out), ("picture", picture)]:
            console.print(f"The {what} is in {file}", soft_wrap=True, markup=False)
    if show or (show is None and not as_json and has_desktop(os.environ, sys.stdout.isatty())):
        open_page(out)


def has_desktop(environment: Mapping[str, str], terminal: bool) -> bool:
    """Whether a person sits before a terminal on a machine with a screen."""
    if not terminal or environment.get("CI"):
        return False
    if sys.platform in ("darwin", "win32"):
        return not environment.get("SSH_CONNECTION")
    return bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


def open_page(page: Path) -> None:
    """In the user's browser; never in a CI job, where nobody would close it."""
    if not os.environ.get("CI"):
        typer.launch(page.resolve().as_uri())
