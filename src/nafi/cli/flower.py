"""`nafi flower new`: a Flower app to start from."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from nafi.cli.app import app, tell, waiting
from nafi.errors import InputError
from nafi.files import atomic_path
from nafi.version import __version__

flower = typer.Typer(no_args_is_help=True, suggest_commands=False, help="Federations on Flower.")
app.add_typer(flower, name="flower")

_SUFFIX = ".tmpl"
_FILES = (
    "pyproject.toml",
    "README.md",
    "package/__init__.py",
    "package/task.py",
    "package/client_app.py",
    "package/server_app.py",
)


@flower.command()
def new(
    folder: Annotated[Path, typer.Argument(help="Where to write it: a new or empty folder.")],
) -> None:
    """Write a Flower app that fuses models by neuron matching, and runs as it is."""
    with waiting("loading PyTorch"):
        from nafi.federated import STRATEGIES  # it imports torch

    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    if not name:
        raise InputError(f"{folder}: cannot name an app after this folder; use letters and digits")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists already; choose a new or empty folder")
    # Each app has its own package name: Ray's workers might import another app's otherwise.
    package = f"app_{name.replace('-', '_')}"
    source = files("nafi.cli") / "flower_app"
    for path in _FILES:
        text = (source / f"{path}{_SUFFIX}").read_text(encoding="utf-8")
        text = text.replace("NAME", name).replace("PACKAGE", package)
        text = text.replace("VERSION", __version__)
        text = text.replace("STRATEGIES", ", ".join(STRATEGIES))
        target = folder / path.replace("package", package)
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target) as partial:
            partial.write_text(text, encoding="utf-8")
    tell(f"{folder} is a Flower app; its README.md says how to run it")
