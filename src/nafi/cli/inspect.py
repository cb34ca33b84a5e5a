"""`nafi inspect`: the neuron groups of a network."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from nafi.cli.app import AS_JSON, INPUT_SHAPE, app, print_warnings, waiting


@app.command()
def inspect(
    model: Annotated[str, typer.Option(help="package.module:factory, called without arguments.")],
    input_shape: Annotated[list[str] | None, INPUT_SHAPE] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Show the neuron groups of a network: which axes of its parameters belong together."""
    with waiting("loading PyTorch", as_json):
        from nafi.cli.tables import spec_json, spec_tables
        from nafi.factories import load_factory, resolve_inputs
        from nafi.graph import groups

    network, example_inputs = load_factory(model)
    with print_warnings(), waiting("finding the neuron groups", as_json):
        spec = groups(network, resolve_inputs(input_shape or [], example_inputs))
    coverage = spec.coverage(network.state_dict())
    if as_json:
        typer.echo(json.dumps(spec_json(spec, coverage), indent=2))
        return
    console = Console()
    for table in spec_tables(spec, title=model):
        console.print(table)
    console.print(f"{coverage:.1%} of all parameters lie in tensors with groups and without gaps")
