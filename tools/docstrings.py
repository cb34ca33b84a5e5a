"""How mkdocstrings reads nafi's docstrings.

Hides: the convention that a class documents its fields as `name: text`, one after the other.
Promises: they are shown as a list; all other docstrings as they are.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# "name, other: text", and the indented lines that continue it, as nafi.options reads them; sections
# such as "Args:" begin with a capital letter.
_FIELD = re.compile(r"^(?P<names>[a-z]\w*(?:, \w+)*): (?P<text>.*(?:\n +.*)*)", re.MULTILINE)


class FieldLists(griffe.Extension):
    """Fields of classes, and what functions say in the same way, become lists."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None and not obj.is_module:
            obj.docstring.value = as_list(obj.docstring.value)


def as_list(text: str) -> str:
    """Fields that follow each other become the items of one list, with an empty line before it."""
    parts, end = [], 0
    for found in _FIELD.finditer(text):
        before = text[end : found.start()]
        parts += [before, "" if before == "\n" and parts else "\n", _item(found)]
        end = found.end()
    return "".join([*parts, text[end:]])


def _item(field: re.Match[str]) -> str:
    names = ", ".join(f"`{name}`" for name in field["names"].split(", "))
    return f"- {names}: " + re.sub(r"\n +", "\n    ", field["text"])
