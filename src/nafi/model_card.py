"""The model card of a fused network: what it was made of and how, and how good it is.

Hides: Markdown, and the front matter of the Hugging Face hub. Promises: names that others chose,
such as those of files, are shown as they are and can be neither markup nor YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nafi.fusion import FusionResult, verdict
from nafi.version import __version__

# What a folder does to layers that have one field in its configuration.
_EQUALISED = [
    "",
    "`config.json` has one width for all layers: narrower ones were filled up with neurons that "
    "are zero, which changes no output.",
]


@dataclass(frozen=True)
class Origin:
    """What a result does not know of itself.

    parents: names of the fused networks, as the user wrote them
    command: the command line that repeats it
    options: of the method, if others than the result's are to be shown
    filled_up: whether layers of a folder were made equally wide
    factory: "package.module:function" that makes the network, if its configuration does not
    """

    parents: Sequence[str] = ()
    command: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    filled_up: bool = False
    factory: str | None = None


def model_card(result: FusionResult, target: Path, origin: Origin, hub: bool) -> str:
    """The text of a card. hub: for a folder that transformers reads, with front matter."""
    facts = result.diagnostics
    parts = [
        f"# {_code(target.name)}",
        f"{facts['models']} networks, trained apart, fused into one by nafi {__version__}.",
        _judged(result),
        *_section("Parents", [f"- {_code(name)}" for name in origin.parents]),
        *_section("Scores", _scores(result)),
        *_section("Method", _method(facts, origin.options)),
        *_section("Widths", _widths(result) + _EQUALISED * origin.filled_up),
        *_section("Size", _size(facts.get("size"))),
        *_section("Use", [_block("python", _loading(result, target, origin.factory, hub))]),
        *_section("Repeat", [_block("sh", _visible(origin.command))] if origin.command else []),
    ]
    front = [_front_matter(origin.parents)] if hub else []
    return "\n\n".join([*front, *parts]) + "\n"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "\n".join(lines)] if lines else []


def _judged(result: FusionResult) -> str:
    """What is known of how good it is; names of parents are in the table alone."""
    if result.scores is None:
        return _plain(verdict(result).text)
    fused, best = result.scores.fused, result.scores.best
    compared = "at least as good as" if result.scores.better else "worse than"
    return f"It scores {fused:.4g}, {compared} its best parent, which scores {best:.4g}."


def _scores(result: FusionResult) -> list[str]:
    if result.scores is None:
        return []
    scores = result.scores
    parents = zip(scores.names, scores.clients, strict=True)
    rows = [(f"before: {_plain(name)}", f"{score:.4g}") for name, score in parents]
    if scores.ensemble is not None:
        rows.append(("ensemble of all parents", f"{scores.ensemble:.4g}"))
    return _table(("network", "score"), [*rows, ("after: fused", f"{scores.fused:.4g}")])


def _method(facts: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    shown = options or facts["options"]
    values = [(_plain(k), _plain(json.dumps(v, default=str))) for k, v in shown.items()]
    used = f"`{facts['method']}`; inputs to refit by: {_plain(str(facts['probe']))}."
    return [used, "", *_table(("option", "value"), values)] if values else [used]


def _widths(result: FusionResult) -> list[str]:
    rows = [
        (_plain(row["group"]), ", ".join(map(str, row["local"])), str(row["width"]))
        for row in result.summary()
    ]
    return _table(("group of neurons", "parents", "fused"), rows) if rows else []


def _size(size: Mapping[str, Any] | None) -> list[str]:
    if size is None:
        return []
    times = f"{size['params_of_client']:.2f} times those of a parent"
    return [f"{size['params']:,.0f} parameters, {times}; {size['flops']:,.0f} multiply-adds."]


def load_call(path: str, factory: str | None) -> str:
    """How to load a network in Python.

    >>> load_call("g.safetensors", "mine:network")
    'nafi.load("g.safetensors", "mine:network")'
    """
    return f"nafi.load({', '.join(json.dumps(_visible(x)) for x in (path, factory) if x)})"


def _loading(result: FusionResult, target: Path, factory: str | None, hub: bool) -> str:
    path, call = json.dumps(_visible(target.name)), load_call(target.name, factory)
    if not hub:
        return f"import nafi\n\nmodel = {call}"
    kind = type(result.model).__name__
    return (
        f"from transformers import {kind}\n\nmodel = {kind}.from_pretrained({path})\n"
        f"# or: import nafi; model = {call}"
    )


def _front_matter(parents: Sequence[str]) -> str:
    """What the Hugging Face hub reads."""
    named = ["base_model:", *(f"- {_quoted(name)}" for name in parents)] if parents else []
    lines = ["---", "library_name: transformers", "tags:", "- nafi", "- merge", *named, "---"]
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# --------------------------------------------------------------------------- text of others


def _visible(text: str) -> str:
    """Text in one line, with everything that cannot be seen, and half a character, written out."""
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\U{number:08x}" if number > 0xFFFF else f"\\u{number:04x}"


def _quoted(text: str) -> str:
    """A double-quoted scalar of YAML."""
    return '"' + "".join(f"\\{c}" if c in '"\\' else _visible(c) for c in text) + '"'


def _fence(text: str, least: int) -> str:
    """More backticks than text has in a row, so that it cannot end the code it is in."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return "`" * max(least, longest + 1)


def _code(text: str) -> str:
    shown = _visible(text)
    fence = _fence(shown, 1)
    space = " " if shown[:1] in ("`", " ", "") or shown[-1:] in ("`", " ") else ""
    return f"{fence}{space}{shown}{space}{fence}"


def _block(kind: str, text: str) -> str:
    shown = "\n".join(map(_visible, text.split("\n")))
    fence = _fence(shown, 3)
    return f"{fence}{kind}\n{shown}\n{fence}"


def _plain(text: str) -> str:
    """Text without markup, also in a table."""
    shown = _MARKUP.sub(r"\\\g<0>", _visible(text))
    return re.sub(r"^([0-9]+)([.)])(?= |$)", r"\1\\\2", shown)  # an item of a list


# What can become markup where it stands; any other sign is easier to read without a backslash.
_MARKUP = re.compile(
    r"[\\|`*<\[~$&@]"
    r"|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"  # within words it is no emphasis
    r"|^[#>=+]|^-(?![0-9])"  # headings, quotes, lists and lines
    r"|:(?=//|[\w+-]+:)|(?<=www)\."  # addresses become links by themselves, words emojis
)
