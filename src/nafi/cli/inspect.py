"""`nafi inspect`: the neuron groups of a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from nafi.cli.app import (
    AS_JSON,
    INPUT_SHAPE,
    MAX_BYTES,
    TRUST_FACTORY,
    app,
    print_warnings,
    waiting,
)
from nafi.errors import InputError
from nafi.trust import Trust


@app.command()
def inspect(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A checkpoint, with --model, or a Hugging Face folder, which needs none."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="package.module:factory, called without arguments.")
    ] = None,
    input_shape: Annotated[list[str] | None, INPUT_SHAPE] = None,
    trust_factory: Annotated[str | None, TRUST_FACTORY] = None,
    max_bytes: Annotated[int | None, MAX_BYTES] = None,
    recipe: Annotated[
        bool,
        typer.Option("--recipe", help="Print the recipe that made FILE, for `nafi fuse`."),
    ] = False,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Show the neuron groups of a network or checkpoint, or the recipe that made a fused file."""
    if recipe:
        _print_recipe(file, model, as_json)
        return
    with waiting("loading PyTorch", as_json):
        from nafi.cli.tables import spec_json, spec_tables
        from nafi.graph import groups

    with print_warnings():
        trust = Trust.of(trust_factory, max_bytes)
        network, inputs = _network(file, model, input_shape or [], trust)
    with print_warnings(), waiting("finding the neuron groups", as_json):
        spec = groups(network, inputs)
    coverage = spec.coverage(network.state_dict())
    if as_json:
        typer.echo(json.dumps(spec_json(spec, coverage), indent=2))
        return
    console = Console()
    for table in spec_tables(spec, title=str(file or model)):
        console.print(table)
    console.print(f"{coverage:.1%} of all parameters lie in tensors with groups and without gaps")


def _network(
    file: Path | None, model: str | None, input_shape: Sequence[str], trust: Trust
) -> tuple[Any, Any]:
    """The network of a checkpoint, at its widths, or of a factory; and its inputs."""
    from nafi.checkpoints import load_clients
    from nafi.factories import load_factory, resolve_inputs
    from nafi.graph import materialise

    if file is not None:
        clients = load_clients([file], model, input_shape, trust=trust)
        return clients.network, clients.example_inputs
    if model is None:
        raise InputError("give --model package.module:factory, or a checkpoint")
    network, example_inputs = load_factory(model)
    inputs = resolve_inputs(input_shape, example_inputs)
    materialise(network, inputs)
    return network, inputs


def _print_recipe(file: Path | None, model: str | None, as_json: bool) -> None:
    """Print what made a file, marked as its word; nothing that it names is imported."""
    if file is None or model is not None:
        raise InputError("to see what made a file, give the file and --recipe alone")
    from nafi.recipes import extracted_recipe, write_toml

    made = extracted_recipe(file)
    typer.echo(json.dumps(made, default=str) if as_json else write_toml(made), nl=as_json)
