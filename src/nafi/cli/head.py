"""`nafi statistics` and `nafi head`: the last layer from all clients' labelled data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nafi.cli.app import AS_JSON, MAX_BYTES, TRUST_FACTORY, app, print_warnings, waiting
from nafi.errors import InputError
from nafi.reports import terminal_table
from nafi.trust import Trust

if TYPE_CHECKING:
    from nafi.fusion import HeadFit, HeadStatistics

_MODEL = typer.Option(help="package.module:factory; not needed for a Hugging Face folder.")
_FORCE = typer.Option("--force", help="Overwrite an existing file.")


@app.command()
def statistics(
    checkpoint: Annotated[Path, typer.Argument(help="The fused network.")],
    data: Annotated[
        str,
        typer.Option(
            help="package.module:function that gives batches (inputs, labels) of your own data, "
            "as a DataLoader does."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The file to write, .stats.")],
    model: Annotated[str | None, _MODEL] = None,
    trust_factory: Annotated[str | None, TRUST_FACTORY] = None,
    max_bytes: Annotated[int | None, MAX_BYTES] = None,
    as_json: Annotated[bool, AS_JSON] = False,
    force: Annotated[bool, _FORCE] = False,
) -> None:
    """Sum up your labelled data at the last layer of a network: what `nafi head` needs of it."""
    with waiting("loading PyTorch", as_json):
        from nafi.checkpoints import load
        from nafi.files import check_writable
        from nafi.fusion import statistics as sum_up
        from nafi.statistics_files import save_statistics

    _check_name(out, ".stats")
    check_writable(out, force)
    network = load(checkpoint, model, trust_factory=trust_factory, max_bytes=max_bytes)
    with print_warnings(), waiting("summing up your data", as_json):
        sums = sum_up(network, _batches(data))
    save_statistics(sums, out, overwrite=force)
    if as_json:
        typer.echo(json.dumps(_facts(out, sums)))
        return
    inputs, classes = sums.cross.shape
    console = Console()
    console.print(_table([(out, sums)], f"Sums for {_weights(sums)}"))
    console.print(
        f"{out} holds sums of products of {inputs} inputs for {classes} classes, and no sample",
        soft_wrap=True,
        markup=False,
    )


@app.command()
def head(
    checkpoint: Annotated[Path, typer.Argument(help="The network that the sums are of.")],
    files: Annotated[list[Path], typer.Argument(help="Files of `nafi statistics`, all clients'.")],
    out: Annotated[Path, typer.Option(help="The file to write, .safetensors.")],
    model: Annotated[str | None, _MODEL] = None,
    trust_factory: Annotated[str | None, TRUST_FACTORY] = None,
    max_bytes: Annotated[int | None, MAX_BYTES] = None,
    as_json: Annotated[bool, AS_JSON] = False,
    force: Annotated[bool, _FORCE] = False,
) -> None:
    """Solve the last layer of a network from the sums of all clients' labelled data."""
    with waiting("loading PyTorch", as_json):
        from nafi.checkpoints import load, save_changed
        from nafi.files import check_writable
        from nafi.fusion import add_statistics, fit_head, solve_head
        from nafi.statistics_files import load_statistics

    _check_name(out, ".safetensors")
    if out.resolve() in [path.resolve() for path in [checkpoint, *files]]:
        raise InputError(f"--out: {out} is one of the files to read; give another name")
    check_writable(out, force)
    network = load(checkpoint, model, trust_factory=trust_factory, max_bytes=max_bytes)
    clients = [(path, load_statistics(path, max_bytes=max_bytes)) for path in files]
    _check_same_network(clients)
    sums = [each for _, each in clients]
    with print_warnings(), waiting("solving the last layer", as_json):
        solved = solve_head(network, sums)
        fit = fit_head(add_statistics(sums))
    save_changed(checkpoint, solved, out, overwrite=force, trust=Trust(max_bytes=max_bytes))
    _tell(clients, fit, out, model or trust_factory, as_json)


def _tell(
    clients: list[tuple[Path, HeadStatistics]],
    fit: HeadFit,
    out: Path,
    factory: str | None,
    as_json: bool,
) -> None:
    from nafi.model_card import load_call

    weight = _weights(clients[0][1])
    if as_json:
        facts = {"weight": weight, "samples": fit.samples, "ridge": fit.ridge, "scale": fit.scale}
        files = [_facts(path, sums) for path, sums in clients]
        typer.echo(json.dumps({**facts, "files": files, "checkpoint": str(out)}))
        return
    console = Console()
    console.print(_table(clients, f"{weight} solved from {fit.samples} samples"))
    console.print(
        f"ridge {fit.ridge:.1g}, scale {fit.scale:.2g}: {load_call(str(out), factory)}",
        soft_wrap=True,
        markup=False,
    )


def _table(clients: list[tuple[Path, HeadStatistics]], title: str) -> Table:
    headings = ["file", "samples", "of each class"]
    table = terminal_table(escape(title), headings, texts=headings)
    for path, sums in clients:
        counts = [int(n) for n in sums.class_counts.tolist()]
        shown = " ".join(map(str, counts[:20])) + (" ..." if len(counts) > 20 else "")
        table.add_row(escape(str(path)), str(sums.samples), shown)
    return table


def _facts(path: Path, sums: HeadStatistics) -> dict[str, Any]:
    counts = [int(n) for n in sums.class_counts.tolist()]
    return {"file": str(path), "samples": sums.samples, "class_counts": counts}


def _check_same_network(clients: list[tuple[Path, HeadStatistics]]) -> None:
    first_path, first = clients[0]
    for path, sums in clients[1:]:
        if not sums.is_of_same(first):
            raise InputError(f"{path} and {first_path} are statistics of different networks")


def _weights(sums: HeadStatistics) -> str:
    return ", ".join(layer.weight for layer in sums.layers)


def _check_name(out: Path, suffix: str) -> None:
    if out.suffix != suffix:
        raise InputError(f"--out: found {out}, expected a name that ends in {suffix}")


def _batches(name: str) -> Iterator[Any]:
    """What the user's function gives."""
    from nafi.factories import call_function, load_function, user_code

    batches = call_function(load_function(name, "function")[0], name)
    with user_code(f"{name} gives no batches (inputs, labels)"):
        yield from batches
