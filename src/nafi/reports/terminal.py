"""Tables for a terminal.

Hides: rich's columns. Promises: no text is cut, however narrow the terminal is: long names go on in
the next line; numbers stand on the right.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.table import Table


def terminal_table(title: str, headings: Sequence[str], texts: Collection[str] = ()) -> Table:
    """An empty table. texts: headings of columns of texts, beside the first; others are numbers."""
    table = Table(title=title or None)
    for place, heading in enumerate(headings):
        if place == 0 or heading in texts:
            table.add_column(heading, overflow="fold")
        else:  # as narrow as its numbers are, to leave room for names
            table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    return table
