"""`nafi run` and `nafi report`: experiments, and what came of them."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nafi.cli.app import AS_JSON, app, progress_bar, tell, waiting
from nafi.cli.tables import text_table
from nafi.errors import InputError


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
    problem: Annotated[
        list[str] | None, typer.Option(help="Only this of its problems; may be given again.")
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Trials instead of its own.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, with one thread each.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from existing records.")] = False,
    profile: Annotated[
        str | None, typer.Option(help="A profile of the file, like quick, scaled or paper.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where clients train, unless together: cpu, cuda, mps.")
    ] = "cpu",
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Run an experiment: a JSON line for every method, trial and number of clients."""
    with waiting("loading PyTorch", as_json):
        from nafi.experiments import experiment_names, load_experiment, run_experiment
        from nafi.federated import check_device
        from nafi.reports import check_views, metric_of, score_table

    if listed:
        for name in experiment_names():
            typer.echo(f"{name}: {load_experiment(name).title}")
        return
    if experiment is None:
        raise InputError(f"give an experiment: {', '.join(experiment_names())}, or a .toml file")
    chosen = load_experiment(
        experiment, profile, trials=trials, clients=clients.split(",") if clients else None
    )
    if problem:
        chosen = chosen.only_problems(problem)
    if methods is not None:
        chosen = chosen.only(methods.split(","))
    check_device(device)
    check_views([*chosen.report.views, *chosen.report.titles])
    file = out or Path("results") / f"{chosen.label}.jsonl"
    try:
        with progress_bar(as_json) as progress:
            records = run_experiment(
                chosen, file, jobs=jobs, resume=resume, progress=progress, device=device
            )
    except KeyboardInterrupt:
        options = {
            "--out": out,
            "--profile": profile,
            "--clients": clients,
            "--methods": methods,
            "--trials": trials,
            "--jobs": jobs if jobs > 1 else None,
            "--device": device if device != "cpu" else None,
        }
        again = _resume(experiment, options, problem or [])
        tell(f"stopped; finished cells are in {file}. To resume: {again}")
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps({"records": len(records), "file": str(file)}))
        return
    title = f"{chosen.title}: {metric_of(records)}, {len(records)} cells"
    console = Console()
    console.print(text_table(score_table(records, title)))
    console.print(f"The records are in {file}", soft_wrap=True, markup=False)


def _resume(experiment: str, options: Mapping[str, object], problems: Sequence[str]) -> str:
    """The command that resumes a run with the options that it had."""
    command = ["nafi", "run", experiment, "--resume"]
    for name in problems:
        command += ["--problem", name]
    for option, value in options.items():
        command += [option, str(value)] if value is not None else []
    return shlex.join(command)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="A folder of records, or one .jsonl file.")],
    out: Annotated[Path, typer.Option(help="The page to write, .html.")] = Path("report.html"),
    markdown: Annotated[
        Path | None, typer.Option(help="Also put the tables between the marks of this file.")
    ] = None,
) -> None:
    """Write one self-contained page of tables and figures from run records."""
    with waiting("loading PyTorch"):
        from nafi.experiments import find_photo, read_runs, report_of
        from nafi.files import check_writable
        from nafi.reports import sections, write_markdown, write_page

    check_writable(out, overwrite=True)
    photos = find_photo if os.environ.get("NAFI_DATA") else None
    with progress_bar(quiet=False) as progress:
        content = sections(read_runs(results), report_of, photos, progress)
    write_page(out, content)
    if markdown is not None:
        write_markdown(markdown, content)
    Console().print(f"The page is in {out}", soft_wrap=True, markup=False)
