"""The application that commands are part of, and what they share.

Hides: how errors, warnings and progress reach a terminal. Promises: standard output holds only the
result; everything else goes to standard error.
"""

from __future__ import annotations

import errno
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from nafi.errors import EXTRAS, NafiError, install_hint
from nafi.files import DISK_ERRORS
from nafi.version import __version__

app = typer.Typer(
    help="Fuse neural networks that were trained apart into one.",
    no_args_is_help=True,
    suggest_commands=False,  # click does, and would do so twice
    pretty_exceptions_enable=False,
)

INPUT_SHAPE = typer.Option(
    metavar="SIZES",
    help="An input of numbers without its batch, like 3,32,32; once per input. For any other input "
    "write a function example_inputs() beside the factory.",
)
AS_JSON = typer.Option("--json", help="Print JSON instead of a table.")
TRUST_FACTORY = typer.Option(
    metavar="MODULE:FUNCTION",
    help="Run this function if a file names it. Otherwise no file chooses code.",
)
MAX_BYTES = typer.Option(
    min=1, help="Most memory that files may take. Default: half of the machine's."
)


def main() -> None:
    """Run the command line; the entry point of `nafi`."""
    try:
        app(prog_name="nafi")
    except NafiError as error:
        tell(str(error))
        sys.exit(2)
    except OSError as error:
        if error.errno not in (*DISK_ERRORS, errno.ENAMETOOLONG):
            raise
        tell(": ".join(str(part)[:80] for part in (error.filename, error.strerror) if part))
        sys.exit(2)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in {**EXTRAS, "torch": ""}:
            raise
        tell(install_hint(module))
        sys.exit(2)


def tell(text: str) -> None:
    """Print a line on standard error."""
    Console(stderr=True, highlight=False).print(f"nafi: {text}", markup=False, soft_wrap=True)


def command_line() -> str:
    """The command that is running, as a shell takes it."""
    program = ["python", "-m", "nafi"] if Path(sys.argv[0]).name == "__main__.py" else ["nafi"]
    return shlex.join([*program, *sys.argv[1:]])


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nafi {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Fuse neural networks that were trained apart into one."""


# What is going on, how many steps are done, and how many there are.
ShowProgress = Callable[[str, int, int], None]
_LINE_EVERY = 10.0  # seconds


@contextmanager
def progress_bar(quiet: bool) -> Iterator[ShowProgress]:
    """A bar on standard error: what is going on and how much time is left.

    If standard error is not a terminal but, say, a log: a line now and then instead of a bar.
    """
    console = Console(stderr=True)
    if not quiet and not console.is_terminal:
        yield _progress_lines()
        return
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    bar = Progress(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet,
    )
    with bar:
        task = bar.add_task("starting", total=None)
        yield lambda step, done, total: bar.update(
            task, description=step, completed=done, total=total
        )


@contextmanager
def waiting(what: str, quiet: bool = False) -> Iterator[None]:
    """A sign of life on a terminal while something takes seconds that cannot be counted."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def _progress_lines() -> ShowProgress:
    """Print what is done, at most every ten seconds: short work prints no lines."""
    start = last = time.monotonic()
    most = all_steps = 0

    def show(step: str, done: int, total: int) -> None:
        nonlocal last, most, all_steps
        if total != all_steps:  # other work began, which counts anew
            most, all_steps = 0, total
        now = time.monotonic()
        if done > most and now - last >= _LINE_EVERY:
            tell(f"{done} of {total} after {(now - start) / 60:.1f} min: {step}")
            last = now
        most = max(most, done)

    return show


@contextmanager
def print_warnings() -> Iterator[None]:
    """Print each of nafi's warnings once, in a line; those of other packages are dropped."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ours = [w for w in caught if w.category.__module__.partition(".")[0] == "nafi"]
    for text in dict.fromkeys(str(w.message) for w in ours):
        tell(text)
