"""`nafi methods`: what models can be fused by."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from nafi.cli.app import AS_JSON, app, tell, waiting
from nafi.reports import terminal_table

if TYPE_CHECKING:
    from nafi.fusion import Method


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="A method, to see its options.")] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """List the methods of fusion, or the options of one of them."""
    with waiting("loading PyTorch", as_json):
        from nafi.fusion import METHODS, method_names, option_names

    if name is not None:
        option_names(name)  # which refuses an unknown one
    known = [name] if name else method_names()
    for broken in set(METHODS) - set(method_names()) if name is None else ():
        tell(f"method {broken} cannot be imported: nafi methods {broken} says why")
    described = [_describe(METHODS[method]) for method in known]
    if as_json:
        typer.echo(json.dumps(described[0] if name else described, indent=2, default=str))
    elif name is None:
        _print_methods(described)
    else:
        _print_options(described[0])


def _describe(method: type[Method]) -> dict[str, Any]:
    """A method as plain data; an option that must be given has no default."""
    options = []
    for option in method.describe():
        values = dataclasses.asdict(option)
        if option.default is dataclasses.MISSING:
            del values["default"]
        options.append(values)
    summary = (method.__doc__ or "").partition("\n")[0]
    return {
        "name": method.name,
        "summary": summary,
        "uses": sorted(method.uses),
        "options": options,
    }


def _print_methods(described: list[dict[str, Any]]) -> None:
    headings = ["method", "what it does", "uses"]
    table = terminal_table("Methods of nafi fuse and nafi.fuse", headings, texts=headings)
    for method in described:
        table.add_row(method["name"], escape(method["summary"]), ", ".join(method["uses"]) or "-")
    console = Console()
    console.print(table)
    console.print("nafi methods NAME lists the options of a method", markup=False)


def _print_options(method: dict[str, Any]) -> None:
    console = Console()
    console.print(f"{method['name']}: {method['summary']}", markup=False, soft_wrap=True)
    uses = ", ".join(method["uses"]) or "none of class_counts and sample_counts"
    console.print(f"It uses {uses}.", markup=False, soft_wrap=True)
    if not method["options"]:
        console.print("It has no options.")
        return
    headings = ["option", "default", "values", "meaning"]
    table = terminal_table(f"Options of {method['name']}", headings, texts=headings)
    first_with: dict[str, str] = {}  # meaning -> the option that it was printed for
    for option in method["options"]:
        first = first_with.setdefault(option["meaning"], option["name"])
        meaning = option["meaning"] if first == option["name"] else f"see {first}"
        default = str(option["default"]) if "default" in option else "must be given"
        table.add_row(*map(escape, (option["name"], default, option["expected"], meaning)))
    console.print(table)
