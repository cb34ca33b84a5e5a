"""Worker processes: order, and what a piece of work can do to the others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nafi.errors import NafiError
from nafi.workers import Workers
from tests.processes import runs, stop_the_clock


class OddError(Exception):
    """Cannot be unpickled: it wants two arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def work(item: Any) -> Any:
    match item:
        case "exit":
            raise SystemExit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "raise":
            raise ValueError("wrong")
        case "odd":
            raise OddError("very", "odd")
        case "unwritable":
            return lambda: None
        case "die":
            os._exit(7)
        case "hang":
            time.sleep(600)
        case "slow":
            time.sleep(1.0)
    return item


EXPECTED = {
    "exit": "WorkError: SystemExit: 3",
    "interrupt": "WorkError: KeyboardInterrupt: ",
    "raise": "ValueError: wrong",
    "odd": "OddError",
    "unwritable": "pickle",
    "die": "WorkerDiedError: its process died twice (exit code 7)",
    "hang": "TimeoutError: not done within 0.5 seconds",
}


@pytest.mark.slow
def test_every_failure_costs_one_piece_of_work_and_results_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop_the_clock(monkeypatch, hangs=lambda item: item == "hang")
    taken: list[Any] = []

    def items() -> Iterator[Any]:
        for item in ["slow", *range(9), *EXPECTED, 10, 11]:
            taken.append(item)
            yield item

    with Workers(2, work, deadline=0.5) as pool:
        results = pool.results(items())
        first = next(results)
        assert len(taken) <= 6  # few more than there are workers are under way
        rest = list(results)
    assert [first, *rest[:9], *rest[-2:]] == ["slow", *range(9), 10, 11]
    for name, error in zip(EXPECTED, rest[9:-2], strict=True):
        assert isinstance(error, Exception)
        assert EXPECTED[name] in f"{type(error).__name__}: {error}", name


def fails_to_start(state: Any) -> None:
    os._exit(1)


class Unstartable:
    """Ends the process in which it is unpickled."""

    def __reduce__(self) -> Any:
        return fails_to_start, (None,)

    def __call__(self, item: int) -> int:
        return item


@pytest.mark.slow
def test_workers_that_cannot_start_are_told() -> None:
    told = pytest.raises(NafiError, match="die as soon as they are started")
    with Workers(1, Unstartable()) as pool, told:
        list(pool.results([1]))


def stuck(file: Path) -> None:
    """Says which process it is in, then holds Python's lock for ages, as code in C may."""
    file.write_text(str(os.getpid()))
    file.rename(file.with_suffix(".pid"))
    re.match("(a+)+$", "a" * 60 + "b")


STUCK = """
import sys
from pathlib import Path
from tests.test_workers import Workers, stuck

if __name__ == "__main__":
    with Workers(1, stuck) as pool:
        list(pool.results([Path(sys.argv[1])]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_process_that_started_them(
    sent: signal.Signals, tmp_path: Path
) -> None:
    file = tmp_path / "worker.pid"
    main = subprocess.Popen([sys.executable, "-c", STUCK, str(file.with_suffix(".tmp"))])
    deadline = time.monotonic() + 120
    while not file.exists():
        assert main.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    main.send_signal(sent)
    assert main.wait(60) == -sent
    while runs(int(file.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.1)
