"""Who is told of a run while it goes on: logs, dashboards, trackers of experiments.

Hides: that an error of a listener is no error of the run. Promises: every round is told once when
it starts, and once when it is complete and its checkpoint is written; then the run, when it is
finished. A run that is resumed tells of the rounds that it does itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nafi.errors import InputError
from nafi.files import check_writable

if TYPE_CHECKING:
    from nafi.federated.run import Run

log = logging.getLogger(__name__)


class Callback(Protocol):
    """Told of a run. Derive from it, and override what you want to hear of.

    What it raises is logged, and the run goes on: it is worth more than its log.
    """

    def round_started(self, number: int, clients: Sequence[str]) -> None:
        """A round begins. number: counted from 1; clients: who takes part."""

    def round_finished(self, record: Mapping[str, Any]) -> None:
        """A round is complete. record: as in `Run.records`, with what `evaluate` found."""

    def run_finished(self, run: Run) -> None:
        """All rounds are done."""


class JsonLines(Callback):
    """Appends the record of every round to a file: one JSON object a line.

    A new file, unless it is to be added to, as by a run that is resumed.
    """

    def __init__(self, path: Path | str, *, append: bool = False) -> None:
        self.path = Path(path)
        check_writable(self.path, overwrite=True)
        if self.path.exists() and not append:
            raise InputError(f"{self.path} exists already: give another name, or append=True")

    def round_finished(self, record: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


class Scalars(Callback):
    """Hands every number of a record to a function of (name, value, round).

    TensorBoard's `SummaryWriter().add_scalar` and MLflow's `mlflow.log_metric` are such functions.

    write: the function; prefix: what names begin with, such as "digits/"
    """

    def __init__(self, write: Callable[[str, float, int], object], prefix: str = "") -> None:
        if not callable(write):
            raise InputError(f"write: found {write!r}, expected a function (name, value, round)")
        self.write, self.prefix = write, prefix

    def round_finished(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            number = isinstance(value, Real) and not isinstance(value, bool)
            if number and isfinite(value) and name != "round":
                self.write(f"{self.prefix}{name}", float(value), int(record["round"]))
        self.write(f"{self.prefix}refused", float(len(record["refused"])), int(record["round"]))


_TOLD = ("round_started", "round_finished", "run_finished")


class Listeners:
    """Several callbacks as one, none of which can end the run."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        for callback in callbacks:
            missing = [name for name in _TOLD if not callable(getattr(callback, name, None))]
            if missing:
                raise InputError(
                    f"callbacks: {type(callback).__name__} lacks {', '.join(missing)}; derive it "
                    "from nafi.federated.Callback"
                )
        self.callbacks = tuple(callbacks)

    def tell(self, what: str, *news: Any) -> None:
        """what: a method of `Callback`; news: its arguments."""
        for callback in self.callbacks:
            # A record is the run's: each gets a copy of its own to do with as it likes.
            copies = [deepcopy(each) if isinstance(each, dict) else each for each in news]
            try:
                getattr(callback, what)(*copies)
            except Exception:
                log.exception("%s.%s failed; the run goes on", type(callback).__name__, what)
