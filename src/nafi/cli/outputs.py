"""Where `nafi fuse` writes: a file, or a Hugging Face folder.

Hides: what a folder cannot hold, and what is done so that it can. Promises: what cannot be written
is refused before any work.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nafi.cli.app import tell
from nafi.errors import InputError, few

if TYPE_CHECKING:
    from nafi.checkpoints import ClientFiles, ClientOutlines
    from nafi.fusion import Method
    from nafi.graph import ModelSpec


def is_folder_output(out: Path, checkpoints: list[Path]) -> bool:
    """Whether a folder is to be written: all checkpoints are folders, and the name is no file's."""
    return out.suffix != ".safetensors" and all(path.is_dir() for path in checkpoints)


def card_of(out: Path) -> Path:
    """Where the card of an output is: within a folder, beside a file."""
    return out / "README.md" if out.is_dir() else out.with_suffix(".md")


def check_inputs(checkpoints: list[Path]) -> None:
    """Refuse checkpoints that are not there, before anything that follows from them."""
    missing = [str(path) for path in checkpoints if not path.exists()]
    if missing:
        does = "does" if len(missing) == 1 else "do"
        raise InputError(f"{few(missing)} {does} not exist; expected checkpoints")


def check_outputs(out: Path, pages: dict[str, Path], checkpoints: list[Path], force: bool) -> None:
    """Refuse what cannot be written, and what would take the place of a checkpoint.

    pages: .html files to write, by the option that names them
    """
    from nafi.files import check_folder_writable, check_writable

    taken = [path.resolve() for path in checkpoints]
    for option, path in {"--out": out, **pages}.items():
        if path.resolve() in taken:
            raise InputError(f"{option}: {path} is one of the checkpoints; give another name")
    if is_folder_output(out, checkpoints):
        within = [path for path in taken if out.resolve() in path.parents]
        if within:
            raise InputError(
                f"--out: {out} holds {within[0].name}, a checkpoint; give another name"
            )
        check_folder_writable(out, force)
    elif out.suffix != ".safetensors":
        raise InputError(
            f"--out: found {out}, expected a name that ends in .safetensors; or a folder, if all "
            "checkpoints are Hugging Face folders"
        )
    else:
        check_writable(out, force)
        check_writable(card_of(out), force)
    for option, path in pages.items():
        if path.suffix != ".html":
            raise InputError(f"{option}: found {path}, expected a name that ends in .html")
        check_writable(path, force)


def check_folder_method(
    out: Path, method: str, budget: object, frontier: bool, batchnorm: str | None
) -> None:
    """Refuse what makes networks that the configuration of a folder could not describe."""
    wrong = next(
        (
            text
            for text, is_given in [
                (f"--method {method}", method in ("stack", "ensemble")),
                ("--budget", budget is not None),
                ("--frontier", frontier),
                ("--batchnorm fold", batchnorm == "fold"),
            ]
            if is_given
        ),
        None,
    )
    if wrong:
        raise InputError(
            f"--out: {out} would be a folder, whose configuration cannot say what {wrong} makes; "
            f"give --max-width 1x instead, or --out {out.name}.safetensors, which nafi.load reads"
        )


def keep_to_fields(
    method: Method, clients: ClientFiles | ClientOutlines
) -> tuple[Method, ModelSpec]:
    """The method with the widths kept that the configuration has no field for, and the groups."""
    from nafi.graph import groups
    from nafi.huggingface import limited, width_fields

    spec = groups(clients.network, clients.example_inputs)
    if not hasattr(method, "max_width") or method.max_width == 1.0:
        return method, spec
    fields = width_fields(clients.network, spec)
    names = [field.name for field in fields]
    if names:
        what = f"config.json has fields for {few(names)}; all other widths stay as they are"
    else:
        what = "config.json has no field for the width of a layer; all widths stay as they are"
    tell(f"{what} (--max-width 1x: all of them)" if names else what)
    options: dict[str, Any] = {"max_width": limited(spec, fields, method.max_width)}
    return replace(method, **options), spec
