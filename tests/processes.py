"""Processes that tests start."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nafi.workers import Workers

# A shell lets what it starts in the background ignore Ctrl-C, and so does whatever that starts.
HEED_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def runs(process: int) -> bool:
    """Whether a process is there, and not only its entry in the table of processes."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def stop_the_clock(monkeypatch: pytest.MonkeyPatch, hangs: Callable[[Any], bool]) -> None:
    """Let no time pass for workers until nothing is under way but work that hangs; then ages.

    So their deadline says nothing about how fast this machine is, and may be short.
    """
    pools: list[Workers[Any, Any]] = []
    made, ages = Workers.__init__, itertools.count(1)

    def noted(pool: Workers[Any, Any], *arguments: Any, **options: Any) -> None:
        made(pool, *arguments, **options)
        pools.append(pool)

    def monotonic() -> float:
        jobs = [worker.job for pool in pools for worker in pool._workers]
        items = [job.item for job in jobs if job is not None]
        return 1e6 * next(ages) if len(items) == 1 and hangs(items[0]) else 0.0

    monkeypatch.setattr(Workers, "__init__", noted)
    monkeypatch.setattr("nafi.workers.time", SimpleNamespace(monotonic=monotonic))
