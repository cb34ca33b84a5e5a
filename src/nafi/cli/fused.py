"""What `nafi fuse` leaves behind: the checkpoint with its card, what it prints, and the page.

Hides: how a result is put into words and tables. Promises: terminal, JSON and page agree.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from nafi.cli.app import command_line
from nafi.cli.outputs import card_of, is_folder_output

if TYPE_CHECKING:
    from nafi.checkpoints import ClientFiles
    from nafi.fusion import FusionResult
    from nafi.model_card import Origin

# A layer whose inputs are all there has nothing to be fitted to.
_NOTHING = 1e-6


def save_result(
    result: FusionResult,
    out: Path,
    files: ClientFiles,
    known: dict[str, Any],
    origin: Origin,
    overwrite: bool,
) -> None:
    """Write the fused network, its card, and the sums of what is known of the clients' data."""
    from nafi.checkpoints import save
    from nafi.files import write_text
    from nafi.huggingface import is_filled_up
    from nafi.model_card import model_card

    counts, samples = known["class_counts"], known["sample_counts"]
    as_folder = is_folder_output(out, files.folders or [out])
    if as_folder and result.spec is not None:
        origin = replace(origin, filled_up=is_filled_up(result.model, result.spec))
    card = model_card(result, out, origin, hub=as_folder)
    if as_folder:
        save(
            result,
            out,
            files_from=files.folders[0],
            card=card,
            verify=files.example_inputs,
            overwrite=overwrite,
        )
        return
    save(
        result,
        out,
        factory=files.factory,
        example_inputs=files.example_inputs,
        class_counts=None
        if counts is None
        else [sum(map(float, column)) for column in zip(*counts, strict=True)],
        sample_count=None if samples is None else sum(samples),
        overwrite=overwrite,
        verify=files.example_inputs,
    )
    write_text(card_of(out), card)


def tell_result(
    result: FusionResult,
    out: Path | None,
    factory: str | None,
    report: Path | None,
    as_json: bool,
    points: list[dict[str, Any]],
) -> None:
    """Print what was done and how good it is. out, report: what was written."""
    if as_json:
        typer.echo(json.dumps(_as_data(result, out) | {"frontier": points}))
        return
    from nafi.fusion import verdict
    from nafi.model_card import load_call
    from nafi.reports import fits_table, frontier_table, fusion_table, judgement_table

    rows, seconds, title = result.summary(), result.diagnostics["seconds"], _title(result)
    console = Console()
    if rows:
        console.print(fusion_table(rows, title))
    changed = {n: asdict(fit) for n, fit in result.fits.items() if fit.before > _NOTHING}
    if changed:
        console.print(fits_table(changed))
    if result.scores is not None:
        console.print(judgement_table(result.scores.to_dict()))
    if points:
        console.print(frontier_table(points))
    written = f": {load_call(str(out), factory)}" if out is not None else ""
    lines = [f"{title} in {seconds:.1f} s{written}", _size(result)]
    if out is not None:
        lines.append(f"Its card is in {card_of(out)}")
    if report is not None:
        lines.append(f"The page is in {report}")
    found = verdict(result)
    lines.append(found.text)
    if found.tone != "bad":  # what to try against a bad result was said in a warning
        lines += [f"- {advice}" for advice in found.advice]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _as_data(result: FusionResult, out: Path | None) -> dict[str, Any]:
    """The same for machines."""
    from nafi.fusion import verdict

    keys = ("method", "options", "seconds", "size", "probe")
    facts = {key: result.diagnostics[key] for key in keys}
    return {
        **facts,
        "groups": result.summary(),
        "checkpoint": None if out is None else str(out),
        "card": None if out is None else str(card_of(out)),
        "scores": None if result.scores is None else result.scores.to_dict(),
        "agreement": None if result.agreement is None else result.agreement.to_dict(),
        "fits": {name: asdict(fit) for name, fit in result.fits.items()},
        "kept": dict(result.kept),
        "verdict": asdict(verdict(result)),
        "advice": result.diagnostics.get("advice"),
    }


def write_result_page(
    result: FusionResult, out: Path, report: Path, points: list[dict[str, Any]]
) -> None:
    from nafi.fusion import verdict
    from nafi.reports import write_fusion_page

    facts = {
        "command": command_line(),
        "seconds": f"{result.diagnostics['seconds']:.1f}",
        "size": _size(result),
        "probe": result.diagnostics["probe"],
        "checkpoint": str(out),
    }
    write_fusion_page(
        report,
        result.summary(),
        _title(result),
        _what(result, out),
        facts,
        verdict=asdict(verdict(result)),
        scores=None if result.scores is None else result.scores.to_dict(),
        agreement=None if result.agreement is None else result.agreement.to_dict(),
        fits={name: asdict(fit) for name, fit in result.fits.items()},
        kept=result.kept,
        frontier=points,
    )


def _title(result: FusionResult) -> str:
    return f"{result.diagnostics['models']} models fused by {result.diagnostics['method']}"


def _what(result: FusionResult, out: Path) -> str:
    """The page in a sentence."""
    models, size = result.diagnostics["models"], result.diagnostics["size"]["params_of_client"]
    return (
        f"This page is about {out.name}: one network that nafi made of {models} checkpoints, with "
        f"{size:.2f} times the parameters of one of them."
    )


def _size(result: FusionResult) -> str:
    """How large the result is, and how many times one checkpoint that is."""
    size = result.diagnostics["size"]
    return (
        f"{size['params']:,.0f} parameters, {size['params_of_client']:.2f} times those of one "
        f"checkpoint; {size['flops']:,.0f} multiply-adds of one input, "
        f"{size['flops_of_client']:.2f} times"
    )
