"""What views are made of, and how they are known by name.

Hides: the register of views. Promises: an unknown name is refused, and the known ones are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nafi.errors import InputError
from nafi.reports.records import Paper, Record, TextTable, metric_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = npt.NDArray[np.uint8]
# (sample, settings of the experiment) -> photo (height, width, 3) and mask (height, width)
Photos = Callable[[int, Mapping[str, Any]], tuple[Picture, Picture]]


@dataclass(frozen=True)
class Material:
    """What views are made of.

    photos: looks up what is not in records, for pictures of samples
    leads: (method, the one it is compared with)
    """

    records: Sequence[Record]
    paper: Paper = field(default_factory=Paper)
    photos: Photos | None = None
    leads: Sequence[tuple[str, str]] = ()

    @property
    def in_rounds(self) -> list[Record]:
        """Records of methods that have a curve over rounds."""
        return [r for r in self.records if r.get("rounds") and not is_one_shot(r)]

    @property
    def metric(self) -> str:
        """What the numbers of the records are."""
        return metric_of(self.records)


View = Callable[[Material], "Iterator[TextTable | Figure]"]
VIEWS: dict[str, View] = {}
# What is shown of an experiment that does not say.
USUAL = ("score", "paper", "best-round", "widths", "bytes", "test-picked", "curves", "pictures")


def view(name: str) -> Callable[[View], View]:
    """Make a view known by its name."""

    def register(function: View) -> View:
        VIEWS[name] = function
        return function

    return register


def check_views(names: Sequence[str]) -> None:
    """Refuse names of views that there are not."""
    for name in names:
        if name not in VIEWS:
            known = ", ".join(sorted(VIEWS))
            raise InputError(f"report: there is no view {name!r}; known: {known}")


def is_one_shot(record: Record) -> bool:
    """Whether a method had one round, among others that have more: it has no curve and no best."""
    return len(record.get("rounds") or []) == 1 < int(record["config"].get("rounds") or 1)
