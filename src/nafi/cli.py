"""The command line: parse, call, print; no logic.

Hides: typer and rich. Promises: exit code 0 only on success; what a user can mend is told in a
line or two on standard error, without a traceback, with exit code 2.
"""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nafi.errors import InputError, NafiError
from nafi.version import __version__

app = typer.Typer(
    help="Fuse neural networks that were trained apart into one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


_INPUT_SHAPE = typer.Option(
    metavar="SIZES",
    help="An input of numbers without its batch, like 3,32,32; once per input. For any other input "
    "write a function example_inputs() beside the factory.",
)


def main() -> None:
    """Run the command line; the entry point of `nafi`."""
    try:
        app()
    except NafiError as error:
        Console(stderr=True, highlight=False).print(f"nafi: {error}", markup=False, soft_wrap=True)
        sys.exit(2)


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


@app.command()
def inspect(
    model: Annotated[str, typer.Option(help="package.module:factory, called without arguments.")],
    input_shape: Annotated[list[str] | None, _INPUT_SHAPE] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the neuron groups of a network: which axes of its parameters belong together."""
    from nafi.factories import load_factory, resolve_inputs
    from nafi.graph import groups
    from nafi.reports.spec import spec_json, spec_tables

    network, example_inputs = load_factory(model)
    with _spec_warnings():
        spec = groups(network, resolve_inputs(input_shape or [], example_inputs))
    coverage = spec.coverage(network.state_dict())
    if as_json:
        typer.echo(json.dumps(spec_json(spec, coverage), indent=2))
        return
    console = Console()
    for table in spec_tables(spec, title=model):
        console.print(table)
    console.print(f"{coverage:.1%} of all parameters lie in tensors with at least one group")


@app.command()
def fuse(
    checkpoints: Annotated[
        list[Path], typer.Argument(help="Two or more files: safetensors, or torch.save of tensors.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write, .safetensors.")],
    model: Annotated[
        str | None,
        typer.Option(help="package.module:factory; not needed if the checkpoints say it."),
    ] = None,
    method: Annotated[str, typer.Option(help="nafi, pfnm, ot, rebasin or fedavg.")] = "nafi",
    penalty: Annotated[
        float | None, typer.Option(help="nafi: more means fewer neurons. Default 0.4.")
    ] = None,
    evidence: Annotated[
        float | None, typer.Option(help="nafi, pfnm: more means more neurons. Default 150.")
    ] = None,
    max_width: Annotated[
        str | None,
        typer.Option(help="nafi, pfnm: most neurons of a group, like 300; or a factor, like 2.5x."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Any other option of the method; see nafi.fuse."),
    ] = None,
    class_counts: Annotated[
        Path | None,
        typer.Option(help="JSON: for each checkpoint the samples per class, [[...], ...]."),
    ] = None,
    batchnorm: Annotated[str, typer.Option(help="attach or fold.")] = "attach",
    input_shape: Annotated[list[str] | None, _INPUT_SHAPE] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides the order of the models.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Also write a page, .html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Fuse checkpoints of one architecture into one that `nafi.load` turns into a model."""
    from nafi.checkpoints import load_clients, save
    from nafi.files import check_writable, read_json
    from nafi.fusion import fuse as fuse_models
    from nafi.reports.fusion import fusion_table, write_fusion_page

    for target in filter(None, [out, report]):
        check_writable(target, force)
    options = _method_options(penalty, evidence, max_width, option or [])
    files = load_clients(checkpoints, model, input_shape or [])
    counts = read_json(class_counts) if class_counts is not None else files.class_counts
    with _spec_warnings(), _progress(as_json) as progress:
        result = fuse_models(
            files.models,
            files.example_inputs,
            method=method,
            class_counts=counts,
            sample_counts=files.sample_counts,
            seed=seed,
            batchnorm=batchnorm,
            names=[str(path) for path in checkpoints],
            progress=progress,
            **options,
        )
    save(
        result,
        out,
        factory=files.factory,
        example_inputs=files.example_inputs,
        class_counts=None
        if counts is None
        else [sum(column) for column in zip(*counts, strict=True)],
        sample_count=None if files.sample_counts is None else sum(files.sample_counts),
        overwrite=force,
    )
    rows, seconds = result.summary(), result.diagnostics["seconds"]
    title = f"{len(checkpoints)} models fused by {method}"
    if report is not None:
        facts = {
            "command": "nafi " + shlex.join(sys.argv[1:]),
            "seconds": f"{seconds:.1f}",
            "checkpoint": str(out),
        }
        write_fusion_page(report, rows, title, facts)
    if as_json:
        told = {"method": method, "options": options, "groups": rows, "seconds": seconds}
        typer.echo(json.dumps({**told, "checkpoint": str(out)}))
        return
    console = Console()
    if rows:
        console.print(fusion_table(rows, title))
    console.print(f'{title} in {seconds:.1f} s: nafi.load("{out}")', soft_wrap=True, markup=False)
    if report is not None:
        console.print(f"The page is in {report}", soft_wrap=True)


def _method_options(
    penalty: float | None, evidence: float | None, max_width: str | None, others: list[str]
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in others:
        name, found, value = text.partition("=")
        if not found:
            raise InputError(f"--option: found {text!r}, expected NAME=VALUE")
        try:
            options[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            options[name.replace("-", "_")] = value
    if penalty is not None:
        options["penalty"] = penalty
    if evidence is not None:
        options["evidence"] = evidence
    if max_width is not None:
        try:
            factor = max_width.endswith("x")
            options["max_width"] = float(max_width[:-1]) if factor else int(max_width)
        except ValueError:
            raise InputError(
                f"--max-width: found {max_width!r}, expected neurons like 300 or a factor like 2.5x"
            ) from None
    return options


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error that says what comes next."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    bar = Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True, disable=quiet
    )
    with bar:
        shown = bar.add_task("reading the network", total=None)
        yield lambda step, done, total: bar.update(
            shown, description=step, completed=done, total=total
        )


@contextmanager
def _spec_warnings() -> Iterator[None]:
    """Tell each warning once, in a line on standard error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ours = [w for w in caught if w.category.__name__ in ("SpecWarning", "FusionWarning")]
    for text in dict.fromkeys(str(w.message) for w in ours):
        Console(stderr=True).print(f"nafi: {text}", markup=False, soft_wrap=True)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The picture to write: .png, .svg or .pdf.")] = Path(
        "nafi-demo.png"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other clients.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Train eight clients apart on small digits and fuse them by every method."""
    from nafi.experiments.demo import run_demo
    from nafi.files import check_writable
    from nafi.reports.figures import check_picture, draw_demo

    check_picture(out)
    check_writable(out, overwrite=True)
    with _progress(as_json) as progress:
        found = run_demo(seed, progress)
    draw_demo(
        [(r.method, r.accuracy, r.neurons) for r in found.rows], found.local, found.counts, out
    )
    if as_json:
        rows = [asdict(row) for row in found.rows]
        typer.echo(json.dumps({"local": found.local, "rows": rows, "picture": str(out)}))
        return
    table = Table(
        title=f"{len(found.local)} clients with digits of their own, fused in one shot",
        caption="No client saw the test digits. The ensemble runs all models side by side.",
    )
    for heading in ["method", "accuracy, %", "hidden neurons", "seconds"]:
        table.add_column(heading, justify="left" if heading == "method" else "right")
    mean = sum(found.local) / len(found.local)
    table.add_row("clients alone, mean", f"{mean:.1f}", "50", "")
    table.add_row("clients alone, best", f"{max(found.local):.1f}", "50", "", end_section=True)
    for row in found.rows:
        table.add_row(row.method, f"{row.accuracy:.1f}", str(row.neurons), f"{row.seconds:.2f}")
    console = Console()
    console.print(table)
    console.print(f"The picture is in {out}", soft_wrap=True)
