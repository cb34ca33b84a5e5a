"""`nafi fuse --dry-run`: what would be done, before any checkpoint is read in full.

Hides: what headers tell. Promises: of safetensors files only headers are read; nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from nafi.cli.app import print_warnings, waiting
from nafi.errors import InputError
from nafi.reports import terminal_table

if TYPE_CHECKING:
    from nafi.fusion import Forecast, Method
    from nafi.headers import Header

_ASSUMED = 256  # inputs of a probe that is not looked at


def dry_run(
    method: Method,
    checkpoints: Sequence[Path],
    model: str | None,
    input_shape: Sequence[str],
    probe: str | None,
    as_json: bool,
) -> None:
    """Print what `nafi fuse` would match, at which widths, and what it would take."""
    with waiting("finding the neuron groups", as_json), print_warnings():
        found, notes = _forecast(method, checkpoints, model, input_shape, probe)
    if as_json:
        typer.echo(json.dumps({**found.to_dict(), "notes": notes, "dry_run": True}))
        return
    _print(found, method.name, len(checkpoints), notes)


def _forecast(
    method: Method,
    checkpoints: Sequence[Path],
    model: str | None,
    input_shape: Sequence[str],
    probe: str | None,
) -> tuple[Forecast, list[str]]:
    from nafi.factories import load_factory, resolve_inputs
    from nafi.fusion import forecast
    from nafi.headers import manifest_of, meta_tensors, read_header

    headers: list[Header] = []
    for path in checkpoints:
        if path.suffix != ".safetensors":
            raise InputError(
                f"--dry-run: {path} has no header to read; give .safetensors files, as nafi.save "
                "writes them"
            )
        headers.append(read_header(path))
    saved = [manifest_of(header, path) for header, path in zip(headers, checkpoints, strict=True)]
    factory = model or next((each.factory for each in saved if each.factory), None)
    if factory is None:
        raise InputError("the checkpoints do not say what makes their network: give --model")
    network, example_inputs = load_factory(factory)
    inputs = next((each.example_inputs() for each in saved if each.inputs), None)
    if inputs is None or input_shape or example_inputs is not None:
        inputs = resolve_inputs(input_shape, example_inputs)
    count, notes = _probe_inputs(probe, inputs)
    pairs = zip(headers, saved, strict=True)
    shapes = [meta_tensors(header, manifest.aliases) for header, manifest in pairs]
    names = [str(path) for path in checkpoints]
    return forecast(method, network, inputs, shapes, names, count), notes


def _probe_inputs(probe: str | None, inputs: Any) -> tuple[int, list[str]]:
    """How many inputs a probe has, and what is not known of it."""
    from nafi.fusion import PROBE_LIMIT, made_up_count
    from nafi.headers import read_header

    if probe is None:
        return 0, []
    if probe in ("auto", "noise", "synthetic"):
        return made_up_count(inputs), []
    path = Path(probe)
    if path.suffix == ".safetensors" and path.is_file():
        sizes = [shape[0] for shape in read_header(path).shapes.values() if shape]
        return min([PROBE_LIMIT, *sizes]), []
    return _ASSUMED, [f"the probe {probe} is not looked at: {_ASSUMED} inputs are assumed"]


def _print(found: Forecast, method: str, clients: int, notes: Sequence[str]) -> None:
    console = Console()
    console.print(f"{clients} models would be fused by {method}", highlight=False)
    table = terminal_table("", ["group", "local width", "fused width"])
    for group in found.groups:
        table.add_row(escape(group.name), _range(group.local), _range((group.least, group.most)))
    if found.groups:
        console.print(table)
    size = " to ".join(dict.fromkeys(f"{params:,.0f}" for params in found.params))
    lines = [
        f"{size} parameters; the first checkpoint has {found.of_client:,.0f}",
        f"about {found.seconds:.0f} s and {found.bytes / 1e6:,.0f} MB, of which:",
        *(f"- {line}" for line in found.how),
        *notes,
        "This was a dry run: only headers were read, and nothing was written.",
    ]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _range(values: Sequence[int]) -> str:
    return " to ".join(map(str, sorted({min(values), max(values)})))
