"""Tables for people, and a network's neuron groups as data for machines.

Hides: rich. Promises: every group with its width, block and axes, and every pinned axis with
its reason; no name is cut, however narrow the terminal is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from nafi.reports import terminal_table

if TYPE_CHECKING:
    from nafi.graph import ModelSpec
    from nafi.reports import TextTable

# Axes that are inputs, outputs or positions are no news; they are summed up in one line.
_SHOWN_PINS = 40


def spec_tables(spec: ModelSpec, title: str) -> list[Table]:
    """One table of groups; one of what stays in its order, if anything does."""
    headings = ["group", "width", "block", "tensors and axes", "note"]
    groups = terminal_table(f"Neuron groups of {title}", headings, texts=headings[3:])
    for name, group in spec.groups.items():
        note = f"within each of {group.parent}" if group.parent else ""
        if group.rigid:
            note = "; ".join(filter(None, [note, f"width fixed by {group.rigid}"]))
        cells = name, str(group.width), _block(spec, name), _places(spec, name), note
        groups.add_row(*map(escape, cells))
    pinned = terminal_table("Left in their order", ["tensor", "axis", "size", "why"], ["why"])
    for pin in spec.pinned[:_SHOWN_PINS]:
        pinned.add_row(*map(escape, (pin.tensor, str(pin.axis), str(pin.size), pin.reason)))
    if len(spec.pinned) > _SHOWN_PINS:
        pinned.add_row(f"and {len(spec.pinned) - _SHOWN_PINS} more (see --json)", "", "", "")
    return [groups, pinned] if spec.pinned else [groups]


def text_table(table: TextTable, sections: Collection[int] = ()) -> Table:
    """A table for the terminal, the best in bold; sections: rows that start a new part."""
    shown = terminal_table(table.title, table.headings)
    shown.caption = table.note or None
    for place, row in enumerate(table.rows):
        texts = [
            f"[b]{escape(text)}[/b]" if (place, column) in table.best else escape(text)
            for column, text in enumerate(row)
        ]
        shown.add_row(*texts, end_section=place + 1 in sections)
    return shown


def spec_json(spec: ModelSpec, coverage: float) -> dict[str, Any]:
    """The spec as plain data, with the share of parameters that it covers."""
    return spec.to_dict() | {"coverage": coverage}


def _places(spec: ModelSpec, group: str) -> str:
    """`conv1.weight[0] conv1.bias[0] conv2.weight[1]`, the axis in brackets."""
    return " ".join(f"{place.tensor}[{place.axis}]" for place in spec.places(group))


def _block(spec: ModelSpec, group: str) -> str:
    """The largest stretch of an axis that one neuron takes."""
    widths = spec.widths
    largest = 1
    for place in spec.places(group):
        for segment in spec.axes[place.tensor][place.axis]:
            if group in segment.factors:
                inner = segment.factors[segment.factors.index(group) + 1 :]
                size = 1
                for factor in inner:
                    size *= widths[factor] if isinstance(factor, str) else factor
                largest = max(largest, size)
    return str(largest)
