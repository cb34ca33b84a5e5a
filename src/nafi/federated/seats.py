"""Who takes part in a run, by name: what a server remembers of a client beside its weights.

Hides: how long a name is somebody's. Promises: a name that a key has used is that key's, also in a
run that is resumed; a key has one live name at a time; whoever stays away for a number of rounds
is forgotten, and by default the name is still its key's, so that nobody gains a name by waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Literal

from nafi.options import one_of, optional, whole

log = logging.getLogger(__name__)
EXPIRE = 10
Names = Literal["kept", "freed", "claimed"]


@dataclass(frozen=True, slots=True)
class Seat:
    """What is remembered of a client.

    key: a digest of the key that its node has proven, if it has one
    missed: rounds in a row that it was away for, or asked in and did not deliver
    expired: whether it was away for too long, so that nothing private of it is left
    samples: how many it last said it has; asked: in how many rounds it was asked for weights
    """

    key: str = ""
    missed: int = 0
    expired: bool = False
    samples: int = 0
    asked: int = 0


@dataclass(frozen=True)
class SeatTable:
    """Client -> its seat, as checkpoints have them."""

    seats: Mapping[str, Seat] = field(default_factory=dict)


class Seats:
    """The seats of a run under way."""

    def __init__(self, expire: int | None = EXPIRE, names: Names = "kept") -> None:
        """expire: rounds after which a client that stays away is forgotten; None for never.

        names: whose a name is that a key has used: "kept" by it until the run ends, "freed" when
            its client expires, or only "claimed", so that keys mean nothing
        """
        optional(whole(1)).check(expire, "expire")
        one_of(("kept", "freed", "claimed")).check(names, "names")
        self.expire, self.names = expire, names
        self.table: dict[str, Seat] = {}

    def refusal(self, name: str, key: bytes) -> str | None:
        """Why a node may not have a name, if it may not."""
        proven = self._digest(key)
        seat = self.table.get(name, Seat())
        free = not seat.key or (seat.expired and self.names == "freed")
        if not free and seat.key != proven and self.names != "claimed":
            return f"the name {name!r} belongs to another key"
        if proven:
            for other, taken in self.table.items():
                if other != name and taken.key == proven and not taken.expired:
                    return f"it says it is {name!r}, but its key goes by the name {other!r}"
        return None

    def take(self, name: str, key: bytes) -> None:
        """Give a name to a node that may have it."""
        proven = self._digest(key)
        seat = self.table.get(name, Seat())
        if seat.expired:  # it begins anew, as whoever has the name now
            seat = replace(seat if proven == seat.key else Seat(), expired=False, missed=0)
        self.table[name] = replace(seat, key=proven)

    def forgotten(self) -> list[str]:
        """The clients that have just been away for too long; from now on they have expired."""
        if self.expire is None:
            return []
        late = [n for n, s in self.table.items() if s.missed >= self.expire and not s.expired]
        for name in late:
            self.table[name] = replace(self.table[name], expired=True, samples=0)
            log.warning("client %s was away for %d rounds and is forgotten", name, self.expire)
        return late

    def close_round(
        self, present: Collection[str], asked: Collection[str], samples: Mapping[str, int]
    ) -> None:
        """Note who was there; samples: of the clients that delivered."""
        here, chosen = set(present), set(asked)  # there may be thousands
        for name in {**self.table, **dict.fromkeys(asked)}:
            seat = self.table.get(name, Seat())
            if name in samples:
                seat = replace(seat, missed=0, expired=False, samples=samples[name])
            elif name in chosen or name not in here:
                seat = replace(seat, missed=seat.missed + 1)
            self.table[name] = replace(seat, asked=seat.asked + 1) if name in chosen else seat

    def _digest(self, key: bytes) -> str:
        return sha256(key).hexdigest() if key and self.names != "claimed" else ""
