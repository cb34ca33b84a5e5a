"""The command line: parse, call, print; no logic.

Hides: typer and rich. Promises: exit code 0 only on success; what a user can mend is told in a
line or two on standard error, without a traceback, with exit code 2.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nafi.errors import NafiError
from nafi.version import __version__

app = typer.Typer(
    help="Fuse neural networks that were trained apart into one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
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
    input_shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZES",
            help="An input of numbers without its batch, like 3,32,32; once per input. For any "
            "other input write a function example_inputs() beside the factory.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the neuron groups of a network: which axes of its parameters belong together."""
    from nafi.factories import load_factory, resolve_inputs
    from nafi.graph import groups
    from nafi.reports.spec import spec_json, spec_tables

    network, example_inputs = load_factory(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spec = groups(network, resolve_inputs(input_shape or [], example_inputs))
    for warning in dict.fromkeys(
        str(w.message) for w in caught if w.category.__name__ == "SpecWarning"
    ):
        Console(stderr=True).print(f"nafi: {warning}", markup=False, soft_wrap=True)
    coverage = spec.coverage(network.state_dict())
    if as_json:
        typer.echo(json.dumps(spec_json(spec, coverage), indent=2))
        return
    console = Console()
    for table in spec_tables(spec, title=model):
        console.print(table)
    console.print(f"{coverage:.1%} of all parameters lie in tensors with at least one group")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The picture to write: .png, .svg or .pdf.")] = Path(
        "nafi-demo.png"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other neurons.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Recover known neurons from eight clients' noisy, shuffled, partial copies."""
    from nafi.experiments.demo import SIDE, demo_clients, recovered, run_demo
    from nafi.reports.figures import draw_neurons

    clients = demo_clients(seed)
    rows = run_demo(clients, seed)
    pictures = [(f"client {s + 1}", neurons) for s, neurons in enumerate(clients.neurons)]
    pictures.append(("average by\nposition", rows[0].neurons))
    pictures += [
        (row.method.replace(", ", ",\n"), recovered(clients, row.matching))
        for row in rows
        if row.matching is not None
    ]
    title = "Clients' neurons in their own order; what matching makes of them in that of the truth"
    draw_neurons([*pictures, ("truth", clients.truth)], SIDE, title, out)
    fields = ["method", "width", "agreement", "error", "seconds"]
    if as_json:
        results = [{field: getattr(row, field) for field in fields} for row in rows]
        typer.echo(json.dumps({"truth": len(clients.truth), "rows": results, "picture": str(out)}))
        return
    table = Table(
        title=f"{len(clients.neurons)} clients with {len(clients.neurons[0])} of "
        f"{len(clients.truth)} neurons each, as much noise as signal",
        caption="F1: of all pairs of local neurons, those rightly found to be one. Error: root "
        "mean square distance to the true neuron; the noise is 1.",
    )
    for heading in ["method", "global neurons", "F1", "error", "ms"]:
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in rows:
        cells = [f"{row.agreement:.3f}", f"{row.error:.3f}", f"{1000 * row.seconds:.1f}"]
        table.add_row(row.method, str(row.width), *cells)
    console = Console()
    console.print(table)
    console.print(f"The picture is in {out}", soft_wrap=True)
