"""`nafi fuse --dry-run`: what would be done, before any checkpoint is read in full.

Hides: what shapes tell. Promises: no numbers of a checkpoint are read, and nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from nafi.cli.app import print_warnings, waiting
from nafi.reports import terminal_table

if TYPE_CHECKING:
    from nafi.checkpoints import ClientOutlines
    from nafi.fusion import Forecast, Method

_ASSUMED = 256  # inputs of a probe that is not looked at


def dry_run(
    method: Method, clients: ClientOutlines, names: Sequence[str], probe: str | None, as_json: bool
) -> None:
    """Print what `nafi fuse` would match, at which widths, and what it would take.

    names: of the checkpoints
    """
    from nafi.fusion import forecast

    with waiting("finding the neuron groups", as_json), print_warnings():
        inputs = clients.example_inputs
        count, notes = _probe_inputs(probe, inputs)
        found = forecast(method, clients.network, inputs, clients.shapes, names, count)
    if as_json:
        typer.echo(json.dumps({**found.to_dict(), "notes": notes, "dry_run": True}))
        return
    _print(found, method.name, len(names), notes)


def _probe_inputs(probe: str | None, inputs: Any) -> tuple[int, list[str]]:
    """How many inputs a probe has, and what is not known of it."""
    from nafi.fusion import made_up_count
    from nafi.probes import count_probe

    if probe is None:
        return 0, []
    if probe in ("auto", "noise", "synthetic"):
        return made_up_count(inputs), []
    count = count_probe(probe)
    if count is not None:
        return count, []
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
        *([f"layers would be refitted on {found.probe} inputs"] if found.probe else []),
        f"{_seconds(found.seconds)} and {found.bytes / 1e6:,.0f} MB:",
        *(f"- {line}" for line in found.how),
        *notes,
        "This was a dry run: no weights were read, and nothing was written.",
    ]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _seconds(estimate: float) -> str:
    return f"about {estimate:.0f} s" if estimate >= 1 else "less than a second"


def _range(values: Sequence[int]) -> str:
    return " to ".join(map(str, sorted({min(values), max(values)})))
