"""A budget shared out among the layers of several networks.

Promises: neurons go where the least is lost for what they cost, so that widths follow the data and
not one factor for all layers; groups that are tied keep widths that agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, lcm

from nafi.errors import InputError
from nafi.fusion.budget import Size
from nafi.graph import ModelSpec, Tie

# A group with more neurons than these loses several at a time.
_STEPS = 64


@dataclass(frozen=True)
class Part:
    """One of several networks.

    lost: group -> (J + 1,) what is lost with so many of its neurons; other groups keep theirs
    weight: what a loss of this network counts
    """

    spec: ModelSpec
    lost: Mapping[str, Sequence[float]]
    weight: float = 1.0


def cut_to(
    limit: float, parts: Sequence[Part], size: Size, ties: Sequence[Tie] = (), stated: str = ""
) -> list[dict[str, int]]:
    """Group -> width, for each network, such that all together cost no more than the limit.

    Greedy: from the full widths on, the step is taken that loses least for what it saves.

    stated: what an error calls the limit
    """
    networks = [_Shrinking(part, size, ties) for part in parts]
    cost = sum(network.cost for network in networks)
    while cost > limit:
        rate, network = min(((n.rate, n) for n in networks), key=lambda pair: pair[0])
        if rate == inf:
            several = len(parts) > 1
            raise InputError(
                f"budget: found {stated or format(limit, '.4g')}, but "
                + (f"{len(parts)} clients need" if several else "the network needs")
                + f" {cost / limit:.2f} times that even with the fewest neurons; "
                + ("keep fewer of them (keep=), or allow more" if several else "allow more")
            )
        cost -= network.shrink()
    return [network.widths for network in networks]


class _Shrinking:
    """A network on its way down; `rate` is the loss of its best step for what that saves."""

    def __init__(self, part: Part, size: Size, ties: Sequence[Tie]) -> None:
        self.part, self.size = part, size
        self.widths = dict(part.spec.widths)
        self.cost = size.of(part.spec, self.widths)
        self.steps = list(_steps(part, ties))
        self._find_best()

    def shrink(self) -> float:
        """Take the best step; what it saves."""
        assert self.best is not None
        saved, self.widths = self.best
        self._find_best()
        return saved

    def _find_best(self) -> None:
        self.rate, self.best = inf, None
        for step in self.steps:
            fewer = {name: self.widths[name] - count for name, count in step.items()}
            if len(fewer) == 1:  # the last step takes what is left but for one
                fewer = {name: max(1, width) for name, width in fewer.items()}
            if min(fewer.values()) < 1 or all(fewer[name] == self.widths[name] for name in fewer):
                continue
            after = self.widths | fewer
            spec = self.part.spec
            touched = list(dict.fromkeys(t for name in step for t in spec.tensors_of(name)))
            of = self.size.of
            saved = of(spec, self.widths, touched) - of(spec, after, touched)
            loss = sum(
                self.part.lost[name][fewer[name]] - self.part.lost[name][self.widths[name]]
                for name in step
            )
            rate = self.part.weight * loss / saved if saved > 0 else inf
            if rate < self.rate:
                self.rate, self.best = rate, (saved, after)


def _steps(part: Part, ties: Sequence[Tie]) -> Iterator[dict[str, int]]:
    """The ways to make a network narrower: group -> how many of its neurons go."""
    tied = {name for tie in ties for name in tie}
    for name in part.lost:
        if name not in tied:
            yield {name: max(1, part.spec.widths[name] // _STEPS)}
    for tie in ties:
        if all(name in part.lost for name in tie):
            unit = lcm(*tie.values())
            yield {name: unit // places for name, places in tie.items()}
