"""Recipes: what `nafi fuse` is told, as TOML, and in the files that it writes.

Hides: TOML, and where in a file its recipe stands. Promises: a recipe that is written reads back as
it was; a recipe that comes out of a file says so, and so does one that lies in a folder.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nafi.errors import CheckpointError, InputError
from nafi.files import atomic_path
from nafi.headers import add_note, read_header

_NOTE = "nafi-recipe"
_IN_FOLDER = "nafi-recipe.toml"
_ORIGIN = "taken_from"  # the file that a recipe was taken from
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def read_recipe(path: Path) -> tuple[dict[str, Any], str | None]:
    """The content of a TOML file, and the file that it was taken from, if it was."""
    try:
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not TOML: {error}") from None
    lies_in_folder = str(path) if path.name == _IN_FOLDER else None
    return recipe, recipe.pop(_ORIGIN, lies_in_folder)


def write_toml(recipe: Mapping[str, Any]) -> str:
    """Plain data as TOML: values first, then tables.

    >>> print(write_toml({"out": "g.safetensors", "option": {"sweeps": 3}}), end="")
    out = "g.safetensors"
    <BLANKLINE>
    [option]
    sweeps = 3
    """
    values = {key: value for key, value in recipe.items() if not isinstance(value, Mapping)}
    text = _lines(values)
    for key, table in recipe.items():
        if isinstance(table, Mapping):
            text += f"\n[{_key(key)}]\n{_lines(table)}"
    return text


def store_recipe(output: Path, recipe: Mapping[str, Any]) -> None:
    """Put the recipe that made an output into it: a file's header, or a file in a folder."""
    if not output.is_dir():
        add_note(output, _NOTE, write_toml(recipe))
        return
    with atomic_path(output / _IN_FOLDER) as partial:
        partial.write_text(write_toml(recipe), encoding="utf-8")


def extracted_recipe(output: Path) -> dict[str, Any]:
    """The recipe that made an output, as plain data, with a mark of where it comes from."""
    made = stored_recipe(output)
    return {_ORIGIN: str(output), **{key: made[key] for key in made if key != _ORIGIN}}


def stored_recipe(output: Path) -> dict[str, Any]:
    """The same without the mark."""
    content: bytes | None = None
    if not output.is_dir():
        text = read_header(output).notes.get(_NOTE)
        content = None if text is None else text.encode("utf-8", "surrogatepass")
    elif (output / _IN_FOLDER).is_file():
        content = (output / _IN_FOLDER).read_bytes()
    if content is None:
        raise CheckpointError(f"{output} does not hold the recipe that made it")
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{output} holds a recipe that is not TOML: {error}") from None


def _lines(values: Mapping[str, Any]) -> str:
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in values.items())


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    match value:
        case str():
            return _text(value)
        case Mapping():
            return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
    return str(value)  # dates, which a stranger's recipe may hold


def _text(text: str) -> str:
    """A string as TOML has it, without characters that would command a terminal."""
    escaped = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() or c == " " else _escape(c) for c in escaped)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
