"""`nafi fuse recipe.toml`: a file that says what the command line can say.

Hides: how keys of a file become options of the command. Promises: what is given on the command line
comes before what the recipe says; a key that there is not is refused, with the one that was meant;
paths in a recipe are relative to its folder. A recipe that a user wrote is the user's word; one
that was taken from a file chooses no code that the command line does not name.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from typer.core import TyperCommand

from nafi.errors import InputError, few

_CHECKPOINTS, _OPTION = "checkpoints", "option"
_PATHS = ("checkpoints", "out", "report", "class_counts")
# What is about one run of the command, and not about its result.
_OF_THE_RUN = ("as_json", "force", "only_plan", "help", "ctx", "trust_factory", "max_bytes", "ray")
_CODE = ("model", "probe", "validate")  # which may name functions
_PROBES = ("none", "noise", "synthetic")
_JOINED = ("sample_counts",)  # lists that the command line takes as 1,2,3
_EITHER = ("max_width",)  # a number, or a text such as 2.5x
_WORDS = {"True": "true", "False": "false", "None": "null"}


class RecipeCommand(TyperCommand):
    """A command whose arguments may be a recipe."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._with_recipe(ctx, args))

    def _with_recipe(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The arguments without a recipe, whose values become defaults."""
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        found = given.get(_CHECKPOINTS)
        files = list(map(str, found)) if isinstance(found, list | tuple) else []
        recipes = [file for file in files if file.endswith(".toml")]
        if not recipes:
            return args
        if len(recipes) > 1:
            raise InputError(f"found the recipes {', '.join(recipes)}, expected one")
        values, origin = read_values(Path(recipes[0]), self.params)
        if origin is not None:
            others = {name: value for name, value in values.items() if given.get(name) is None}
            _check_code(recipes[0], origin, others, given.get("trust_factory") or [])
        rest = list(args)
        rest.remove(recipes[0])
        checkpoints = values.pop(_CHECKPOINTS, [])
        if len(files) == 1:  # none on the command line
            rest += [*([] if "--" in rest else ["--"]), *checkpoints]
        ctx.default_map = {**(ctx.default_map or {}), **values}
        return rest


def _check_code(
    recipe: str, origin: str, values: Mapping[str, Any], trusted: Sequence[str]
) -> None:
    """Refuse functions that a recipe names which was taken from a file."""
    named = [str(values[key]) for key in _CODE if ":" in str(values.get(key, ""))]
    unknown = [name for name in dict.fromkeys(named) if name not in trusted]
    if unknown:
        options = shlex.join(part for name in unknown for part in ("--trust-factory", name))
        raise InputError(
            f"{recipe} was taken from {origin} and names {few(unknown)}, but no file may choose "
            f"code; if you trust it, give {options}"
        )


def read_values(file: Path, params: Sequence[click.Parameter]) -> tuple[dict[str, Any], str | None]:
    """Name -> value, as the command takes it, of everything that a recipe says.

    Also the file that the recipe was taken from, or None if a user wrote it.
    """
    from nafi.recipes import read_recipe

    known = {str(param.name): param for param in params if param.name not in _OF_THE_RUN}
    values = {}
    recipe, origin = read_recipe(file)
    for key, value in recipe.items():
        name = key.replace("-", "_")
        if name not in known:
            raise InputError(f"{file}: {_unknown(key, name, known)}")
        values[name] = _value(known[name], value, f"{file}: {key}")
        if name in _PATHS or (name == "probe" and _is_path(value)):
            values[name] = _moved(values[name], file.parent)
    return values, origin


def _unknown(key: str, name: str, known: Mapping[str, click.Parameter]) -> str:
    if name in ("json", "force", "dry_run", "trust_factory", "max_bytes"):
        return f"{key!r} belongs on the command line: --{key.replace('_', '-')}"
    close = get_close_matches(name, known, 1)
    meant = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
    return f"there is no {key!r}{meant}"


def _value(param: click.Parameter, value: Any, place: str) -> Any:
    """A value of TOML, checked, as the command line has it."""
    name = str(param.name)
    if name == _OPTION:
        if not isinstance(value, dict):
            raise InputError(f"{place}: found {value!r}, expected a table [option]")
        return [f"{key}={_word(each, f'{place}.{key}')}" for key, each in value.items()]
    if name in _JOINED and isinstance(value, list):
        return ",".join(map(str, value))
    if name in _EITHER and type(value) in (int, str):
        return str(value)
    several = name == _CHECKPOINTS or (isinstance(param, click.Option) and param.multiple)
    if several and isinstance(value, list):
        return [_scalar(param, each, place) for each in value]
    return [_scalar(param, value, place)] if several else _scalar(param, value, place)


def _scalar(param: click.Parameter, value: Any, place: str) -> Any:
    kinds: tuple[tuple[type, ...], str]
    if isinstance(param, click.Option) and param.is_flag:
        kinds = (bool,), "true or false"
    elif isinstance(param.type, click.types.FloatParamType):
        kinds = (int, float), "a number"
    elif isinstance(param.type, click.types.IntParamType):
        kinds = (int,), "a whole number"
    else:
        kinds = (str,), "text in quotes"
    if type(value) not in kinds[0]:
        raise InputError(f"{place}: found {value!r}, expected {kinds[1]}")
    return value


def _word(value: Any, place: str) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except TypeError:  # of all that TOML has, JSON has no dates
        raise InputError(f"{place}: found {value!s}, expected no date and no time") from None


def _is_path(probe: Any) -> bool:
    return isinstance(probe, str) and probe not in _PROBES and ":" not in probe


def _moved(paths: Any, folder: Path) -> Any:
    return (
        [str(folder / path) for path in paths] if isinstance(paths, list) else str(folder / paths)
    )


def effective_recipe(ctx: click.Context, out: Path) -> dict[str, Any]:
    """What a run of the command was told, by the command line or by its recipe.

    Paths are relative to the folder of the output, where its recipe repeats it.
    """
    folder = out.resolve().parent
    return {name: _plain(name, value, folder) for name, value in _told(ctx)}


def _told(ctx: click.Context) -> Iterator[tuple[str, Any]]:
    sources = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
    for param in ctx.command.params:
        name = str(param.name)
        if name not in _OF_THE_RUN and ctx.get_parameter_source(name) in sources:
            yield name, ctx.params[name]


def _plain(name: str, value: Any, folder: Path) -> Any:
    """A value of the command as TOML has it."""
    if name == _OPTION:
        pairs = (text.partition("=") for text in value)
        # None, which TOML lacks, stays a word.
        return {key: word if read_word(word) is None else read_word(word) for key, _, word in pairs}
    if name in _PATHS or (name == "probe" and _is_path(value)):
        return _relative(value, folder)
    return list(value) if isinstance(value, list | tuple) else value


def read_word(word: str) -> Any:
    """The value of --option NAME=VALUE: JSON or a word of Python, else text."""
    try:
        return json.loads(_WORDS.get(word, word))
    except (ValueError, RecursionError):
        return word


def _relative(paths: Any, folder: Path) -> Any:
    if isinstance(paths, list | tuple):
        return [_relative(path, folder) for path in paths]
    return Path(os.path.relpath(Path(paths).resolve(), folder)).as_posix()
