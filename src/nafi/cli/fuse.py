"""`nafi fuse`: checkpoints in, one checkpoint out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nafi.cli.app import (
    AS_JSON,
    INPUT_SHAPE,
    MAX_BYTES,
    TRUST_FACTORY,
    app,
    command_line,
    print_warnings,
    progress_bar,
    tell,
    waiting,
)
from nafi.cli.dry_run import dry_run
from nafi.cli.fused import save_result, tell_result, write_result_page
from nafi.cli.outputs import (
    check_folder_method,
    check_inputs,
    check_outputs,
    is_folder_output,
    keep_to_fields,
)
from nafi.cli.recipe import RecipeCommand, effective_recipe, read_word
from nafi.errors import InputError, require
from nafi.trust import Trust

if TYPE_CHECKING:
    from nafi.checkpoints import ClientFiles
    from nafi.fusion import FusionResult, Method, Validate


@app.command(cls=RecipeCommand)
def fuse(
    ctx: typer.Context,
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            help="Two or more files, safetensors or torch.save of tensors, or Hugging Face "
            "folders; globs like 'models/*.safetensors'; @list.txt, a file with a path in each "
            "line; or one recipe, .toml, that says all of this. What is given here comes first."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="The file to write, .safetensors; or a folder, if all checkpoints are folders."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="package.module:factory; not needed for Hugging Face folders."),
    ] = None,
    method: Annotated[str, typer.Option(help="A method of `nafi methods`.")] = "nafi",
    penalty: Annotated[
        float | None,
        typer.Option(
            help="nafi: more means fewer neurons. Default 0.4; 0 with a probe and a limit of width."
        ),
    ] = None,
    evidence: Annotated[
        float | None, typer.Option(help="nafi, pfnm: more means more neurons. Default 150.")
    ] = None,
    max_width: Annotated[
        str | None,
        typer.Option(help="nafi, pfnm: most neurons of a group, like 300; or a factor, like 2.5x."),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            help="nafi, pfnm, stack: size of the whole network, like '2.0 params' or '0.5 flops' "
            "(times one checkpoint's) or '300 kB'. Several need --validate: the best is kept."
        ),
    ] = None,
    frontier: Annotated[
        bool,
        typer.Option(
            "--frontier",
            help="Try several budgets with stack and nafi, and draw scores over sizes; needs "
            "--probe and --validate. The best is written.",
        ),
    ] = False,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Any other option: see `nafi methods NAME`."),
    ] = None,
    class_counts: Annotated[
        Path | None,
        typer.Option(help="JSON: for each checkpoint the samples per class, [[...], ...]."),
    ] = None,
    sample_counts: Annotated[
        str | None,
        typer.Option(help="Samples of each checkpoint, like 120,80,40, if there are no classes."),
    ] = None,
    batchnorm: Annotated[
        str | None,
        typer.Option(help="attach (default) or fold; average, for nafi.calibrate afterwards."),
    ] = None,
    probe: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Some dozens of inputs without labels, to match and refit by: a .safetensors or "
            ".npy file, a folder of images, package.module:function, noise or synthetic (made-up "
            "inputs). Default: noise for two or more hidden layers; none merges weights alone.",
        ),
    ] = None,
    distill: Annotated[
        int,
        typer.Option(
            metavar="STEPS",
            min=0,
            help="Train so many steps on the probe towards the ensemble's outputs, like 200.",
        ),
    ] = 0,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure averaged normalisation (--batchnorm average) on the probe; no refit.",
        ),
    ] = False,
    validate: Annotated[
        str | None,
        typer.Option(
            metavar="FUNCTION",
            help="package.module:function of a model, the higher the better: scores the "
            "checkpoints, their ensemble and the result.",
        ),
    ] = None,
    require_better: Annotated[
        bool,
        typer.Option(
            "--require-better",
            help="Exit with 3 and write nothing if the result scores below a checkpoint.",
        ),
    ] = False,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Read checkpoints a tensor at a time: the memory of one, however many there are. "
            "nafi, pfnm and fedavg, by weights alone.",
        ),
    ] = False,
    tree: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            min=2,
            help="nafi, pfnm: match groups of so many checkpoints first, then their posteriors.",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Groups of --tree, or what models do on --probe, on Ray: local, or the address of "
            "a cluster.",
        ),
    ] = None,
    input_shape: Annotated[list[str] | None, INPUT_SHAPE] = None,
    strip_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX",
            help="What stands before the network's names in the files, like model in Lightning's "
            "checkpoints. Default: guessed, and said.",
        ),
    ] = None,
    trust_factory: Annotated[list[str] | None, TRUST_FACTORY] = None,
    max_bytes: Annotated[int | None, MAX_BYTES] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="nafi, pfnm, rebasin: the order of the models.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Also write a page, .html.")] = None,
    only_plan: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Say what would be matched, at which widths, and what it would take; no weights "
            "are read.",
        ),
    ] = False,
    as_json: Annotated[bool, AS_JSON] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Fuse checkpoints of one architecture into one that `nafi.load` turns into a model."""
    with waiting("loading PyTorch", as_json):
        from nafi.checkpoints import load_clients, open_clients, outline_clients
        from nafi.files import expand_paths
        from nafi.fusion import fuse as fuse_models
        from nafi.fusion import make_method
        from nafi.model_card import Origin
        from nafi.recipes import store_recipe

    trust = Trust(tuple(trust_factory or ()), max_bytes)
    checkpoints = expand_paths(checkpoints)
    check_inputs(checkpoints)
    as_folder = is_folder_output(out, checkpoints)
    # A dry run writes nothing, so that nothing is in its way.
    overwrite = force or only_plan
    check_outputs(out, {"--report": report} if report else {}, checkpoints, overwrite)
    by_weights = "--stream" if stream else "--tree" if tree is not None else None
    # Whoever names no inputs has none, most likely; "none" is for those who want none.
    unnamed, probe = probe is None and by_weights is None, None if probe == "none" else probe
    _check_inputs_named(by_weights, probe, frontier, distill)
    if report is not None:
        require("jinja2")
    if require_better and validate is None:
        raise InputError("--require-better needs --validate, which says what is better")
    if class_counts is not None and sample_counts is not None:
        raise InputError("give --class-counts or --sample-counts, not both")
    command_options: dict[str, Any] = {
        "penalty": penalty,
        "evidence": evidence,
        "max_width": max_width,
    }
    command_options |= {"batchnorm": batchnorm, "seed": seed, "tree": tree, "ray": ray}
    if calibrate:
        command_options |= _calibrated(batchnorm, probe)
    if frontier:
        _check_frontier(command_options, method, option, probe, validate)
    elif budget:
        command_options["budget"] = _budgets(budget)
    # Before any file is read.
    chosen = make_method(method, **_method_options(command_options, option or []))
    settings = {} if frontier else chosen.settings()
    if validate is None:
        chosen.check_one_variant()
    chosen.check_uses(class_counts=class_counts, sample_counts=sample_counts, probe=probe)
    if method == "ensemble":
        raise InputError(
            "an ensemble is several models, not one: --method stack writes them as one"
        )
    if as_folder:
        check_folder_method(out, method, budget or None, frontier, batchnorm)
    names, source = [str(path) for path in checkpoints], "auto" if unnamed else probe
    if only_plan:
        if frontier:
            raise InputError("--dry-run says what one fusion would do: leave out --frontier")
        with print_warnings(), waiting("reading headers", as_json):
            outlines = outline_clients(checkpoints, model, input_shape or [], strip_prefix, trust)
            if as_folder:
                chosen, _ = keep_to_fields(chosen, outlines)
        dry_run(chosen, outlines, names, source, as_json)
        return
    scoring = None if validate is None else _scoring(validate)
    with print_warnings(), waiting("reading checkpoints", as_json):
        read = open_clients if stream else load_clients
        files = read(checkpoints, model, input_shape or [], strip_prefix, trust)
        inputs = _inputs(source, files, trust)
        spec = None
        if as_folder:
            chosen, spec = keep_to_fields(chosen, files)
    known, used = _data_of(files, chosen, class_counts, sample_counts)
    common = {**used, "probe": inputs, "validate": scoring, "names": names}
    points: list[dict[str, Any]] = []
    with print_warnings(), progress_bar(as_json) as progress:
        common["progress"] = progress
        if frontier:
            result, points = _best_of_budgets(files, budget, common)
        else:
            common |= {"distill": distill, "spec": spec}
            result = fuse_models(files.models, files.example_inputs, chosen, **common)
    if require_better and result.scores is not None and not result.scores.better:
        tell_result(result, None, None, None, as_json, points)
        tell("nothing is written: the result scores below a checkpoint (--require-better)")
        raise typer.Exit(3)
    if unnamed and result.diagnostics["probe"] == "noise":
        tell(_MADE_UP)
    origin = Origin(names, command_line(), settings, factory=files.factory)
    save_result(result, out, files, known, origin, overwrite=force)
    store_recipe(out, effective_recipe(ctx, out))
    if report is not None:
        write_result_page(result, out, report, points)
    tell_result(result, out, files.factory, report, as_json, points)


def _check_inputs_named(
    by_weights: str | None, probe: str | None, frontier: bool, distill: int
) -> None:
    """Refuse inputs that nothing would be done with, and the lack of those that are needed."""
    if by_weights and (probe is not None or frontier):
        text = "matches by weights alone: leave out --probe and --frontier"
        raise InputError(f"{by_weights} {text}")
    if distill and (probe is None or frontier):
        raise InputError("--distill needs --probe, the inputs to train on, and no --frontier")


def _budgets(texts: list[str]) -> str | list[str]:
    """A budget, or several to try."""
    from nafi.fusion import read_budget

    for text in texts:
        read_budget(text)  # says what can be written here; the method would offer lists, too
    return texts[0] if len(texts) == 1 else texts


def _data_of(
    files: ClientFiles, chosen: Method, class_counts: Path | None, sample_counts: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is known of the clients' data, and what of it the method is given.

    What files know is used where the method can; what the user gives must be.
    """
    from nafi.files import read_json

    known: dict[str, Any] = {
        "class_counts": files.class_counts,
        "sample_counts": files.sample_counts,
    }
    used = chosen.used(**known)
    if class_counts is not None:
        used["class_counts"] = read_json(class_counts)
    if sample_counts is not None:
        # Classes would count for more than samples: what the user gives comes first.
        used = {"sample_counts": _numbers(sample_counts)}
    return known | used, used


def _best_of_budgets(
    files: ClientFiles, budgets: list[str] | None, common: dict[str, Any]
) -> tuple[FusionResult, list[dict[str, Any]]]:
    """The best result of several budgets, and all of them as points of a figure."""
    from nafi.fusion import BUDGETS
    from nafi.fusion import frontier as try_budgets

    tried = try_budgets(files.models, files.example_inputs, budgets=budgets or BUDGETS, **common)
    return tried.best, tried.to_dict()


def _calibrated(batchnorm: str | None, probe: str | None) -> dict[str, Any]:
    """The options of a method whose normalisation is measured on a probe, instead of a refit."""
    if probe is None:
        raise InputError("--calibrate needs --probe, the inputs to measure normalisation on")
    if batchnorm not in (None, "average"):
        raise InputError(f"--calibrate: found --batchnorm {batchnorm}, expected average or nothing")
    return {"batchnorm": "average", "refit": False}


def _check_frontier(
    command_options: dict[str, Any],
    method: str,
    others: list[str] | None,
    probe: str | None,
    validate: str | None,
) -> None:
    """Refuse what --frontier needs and lacks, and what it would not heed."""
    if probe is None or validate is None:
        raise InputError("--frontier needs --probe, to refit by, and --validate, to score by")
    given = [name for name, value in command_options.items() if value is not None]
    if given or others or method != "nafi":
        what = [*(["method"] if method != "nafi" else []), *given, *(["option"] if others else [])]
        listed = ", ".join("--" + name.replace("_", "-") for name in what)
        raise InputError(f"--frontier tries stack and nafi as they are: leave out {listed}")


def _scoring(name: str) -> Validate:
    """A user's function whose errors are told in a line."""
    from nafi.factories import call_function, load_function

    function, _ = load_function(name, "validate")
    return lambda model: call_function(function, name, model)


def _inputs(probe: str | None, files: ClientFiles, trust: Trust) -> Any:
    """A probe as `nafi.fuse` takes it."""
    from nafi.probes import load_probe

    made = probe in (None, "auto", "noise", "synthetic")
    return probe if made else load_probe(str(probe), files.example_inputs, trust)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"--sample-counts: found {text!r}, expected numbers like 120,80,40"
        ) from None


def _method_options(command_options: dict[str, Any], others: list[str]) -> dict[str, Any]:
    """The options of the method, from options of the command and from NAME=VALUE."""
    options: dict[str, Any] = {}
    for text in others:
        name, separator, value = text.partition("=")
        if not separator:
            raise InputError(f"--option: found {text!r}, expected NAME=VALUE")
        options[name.replace("-", "_")] = read_word(value)
    if command_options["max_width"] is not None:
        command_options = {**command_options, "max_width": _max_width(command_options["max_width"])}
    for name in command_options:
        if command_options[name] is not None and name in options:
            raise InputError(f"{name} is given twice, once as --option; give it once")
    return options | {name: value for name, value in command_options.items() if value is not None}


def _max_width(text: str) -> int | float:
    try:
        return float(text[:-1]) if text.endswith("x") else int(text)
    except ValueError:
        raise InputError(
            f"--max-width: found {text!r}, expected neurons like 300 or a factor like 2.5x"
        ) from None


_MADE_UP = (
    "no --probe: layers were refitted on noise, made-up inputs. Real ones are far better; "
    "--probe synthetic is better, too, where there is batch normalisation, and takes longer; "
    "--probe none merges weights alone"
)
