"""`nafi run` and `nafi report`: experiments, and what came of them."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nafi.cli.app import AS_JSON, app, progress_bar, tell
from nafi.errors import InputError

if TYPE_CHECKING:
    from nafi.reports.records import Table as Summary


@app.command()
def run(
    experiment: Annotated[
        str | None, typer.Argument(help="A name from --list, or a .toml file of your own.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where records go; results/NAME.jsonl by default.")
    ] = None,
    clients: Annotated[
        str | None, typer.Option(help="Numbers of clients instead of its own, like 5,20.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Only these of its methods, like fedavg,nafi.")
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Trials instead of its own.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, with one thread each.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with existing records.")] = False,
    profile: Annotated[
        str | None, typer.Option(help="A profile of the file, like quick, scaled or paper.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where clients train in rounds: cpu, cuda, mps.")
    ] = "cpu",
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Run an experiment: a JSON line for every method, trial and number of clients."""
    from nafi.experiments.config import experiment_names, load_experiment
    from nafi.experiments.runner import run_experiment
    from nafi.federated.training import check_device
    from nafi.reports.records import accuracy_table, metric_of

    if listed:
        for name in experiment_names():
            typer.echo(f"{name}: {load_experiment(name).title}")
        return
    if experiment is None:
        raise InputError(f"give an experiment: {', '.join(experiment_names())}, or a .toml file")
    chosen = load_experiment(
        experiment, profile, trials=trials, clients=clients.split(",") if clients else None
    )
    if methods is not None:
        chosen = chosen.only(methods.split(","))
    check_device(device)
    suffix = f"-{profile}" if profile else ""
    file = out or Path("results") / f"{chosen.name}{suffix}.jsonl"
    try:
        with progress_bar(as_json) as progress:
            records = run_experiment(
                chosen, file, jobs=jobs, resume=resume, progress=progress, device=device
            )
    except KeyboardInterrupt:
        again = ["nafi", "run", experiment, "--resume"]
        again += ["--out", str(out)] if out else []
        for option, value in {
            "--profile": profile,
            "--clients": clients,
            "--methods": methods,
        }.items():
            again += [option, value] if value else []
        tell(f"stopped; finished cells are in {file}. To go on: {shlex.join(again)}")
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps({"records": len(records), "file": str(file)}))
        return
    title = f"{chosen.title}: {metric_of(records)}, {len(records)} cells"
    console = Console()
    console.print(_shown(accuracy_table(records, title)))
    console.print(f"The records are in {file}", soft_wrap=True, markup=False)


def _shown(summary: Summary) -> Table:
    """A table for the terminal, the best in bold."""
    shown = Table(title=summary.title, caption=summary.note)
    for heading in summary.headings:
        shown.add_column(heading, justify="left" if heading == "method" else "right")
    for place, row in enumerate(summary.rows):
        texts = [f"[b]{t}[/b]" if (place, k) in summary.best else t for k, t in enumerate(row)]
        shown.add_row(*texts)
    return shown


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="A folder of records, or one .jsonl file.")],
    out: Annotated[Path, typer.Option(help="The page to write, .html.")] = Path("report.html"),
    markdown: Annotated[
        Path | None, typer.Option(help="Also put the tables between the marks of this file.")
    ] = None,
) -> None:
    """Write one self-contained page of tables and figures from run records."""
    from nafi.experiments.runner import read_runs
    from nafi.files import check_writable
    from nafi.reports.experiments import sections, write_markdown, write_page

    check_writable(out, overwrite=True)
    found = sections(read_runs(results), _photos() if os.environ.get("NAFI_DATA") else None)
    write_page(out, found)
    if markdown is not None:
        write_markdown(markdown, found)
    Console().print(f"The page is in {out}", soft_wrap=True, markup=False)


def _photos() -> Any:
    """Looks up a photo and its mask among the test data; they are never part of records."""
    from nafi.experiments.data import load_data

    def look(sample: int, settings: Mapping[str, Any]) -> tuple[Any, Any]:
        size = settings.get("size")
        test = load_data(settings["data"], size=tuple(size) if size else None).test
        photo = test.inputs[sample].movedim(0, -1).numpy()
        return photo, test.labels[sample, 0].numpy()

    return look
