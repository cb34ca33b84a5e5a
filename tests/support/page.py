"""The support matrix as a page."""

from __future__ import annotations

from tests.support.contracts import Record


def line(record: Record) -> str:
    """One network on the terminal."""
    cells = " ".join(
        f"{name}:{'+' if record.get(name) else '-'}"
        for name in ("traced", "permuted", "copies", "apart", "loads")
    )
    errors = "; ".join(f"{e['step']}: {e['error']} {e['text'][:100]}" for e in record["errors"])
    share = record.get("coverage", 0)
    grows = f"{record.get('grows', 0)}/{record.get('groups', 0)}"
    return f"{record['network']:50} {cells} {share:.0%} {grows} {record['seconds']}s {errors}"


def page(records: list[Record]) -> str:
    return "\n".join(line(r) for r in records)
