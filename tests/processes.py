"""Processes that tests start."""

from __future__ import annotations

from pathlib import Path


def runs(process: int) -> bool:
    """Whether a process is there, and not only its entry in the table of processes."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
