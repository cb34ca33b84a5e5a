"""Who is there: Flower's nodes under the names of clients.

Hides: questions to nodes. Promises: one node at most for a name, and none for a name that is
another's (`seats`); a node that does not answer holds nobody up for longer than it was given.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from nafi.federated.post import MORE_SECONDS, NodeError, Post
from nafi.federated.seats import Seats

log = logging.getLogger(__name__)
RECORD, _NAME = "nafi", "name"
_ASK_AGAIN = 60.0  # seconds
# So long may a reply take: a thousand nodes of a simulation answer one after the other.
_PATIENCE = 600.0


def introduction(name: str) -> RecordDict:
    """What a node answers when it is asked for its name."""
    return RecordDict({RECORD: ConfigRecord({_NAME: name})})


class Roster:
    """names: node -> client, of all nodes that were ever there under a name."""

    def __init__(self, seats: Seats) -> None:
        self.seats = seats
        self.names: dict[int, str] = {}
        self._questions: dict[str, tuple[int, float]] = {}  # node, and when it was asked

    @property
    def nodes(self) -> dict[str, int]:
        """Client -> node."""
        return {name: node for node, name in self.names.items()}

    def present(self, post: Post, wanted: int, seconds: float) -> list[str]:
        """The clients that are there, as soon as there are as many as wanted, or after `seconds`.

        Shorter names come first: "2" before "10". The order is the same whenever they came.
        """
        end = time.monotonic() + seconds
        reported = wanted
        while True:
            here = self._introduced(post)
            if len(here) < wanted and len(here) != reported:
                reported = len(here)
                rest = max(0.0, end - time.monotonic())
                log.info("%d of %d nodes are there; waiting %.0f seconds", reported, wanted, rest)
            if len(here) >= wanted or time.monotonic() >= end:
                return sorted(here, key=lambda name: (len(name), name))
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))

    def _introduced(self, post: Post) -> list[str]:
        """The names of the nodes that are online; those that are new are asked."""
        online = post.nodes()
        # A node that was started again has lost the question, one that is slow has not.
        now = time.monotonic()
        self._questions = {
            number: (node, when)
            for number, (node, when) in self._questions.items()
            if node not in self.names and when > now - _PATIENCE
        }
        asked = {node for node, when in self._questions.values() if when > now - _ASK_AGAIN}
        for node in sorted(set(online) - set(self.names) - asked):
            question = Message(
                RecordDict(), node, MessageType.QUERY, ttl=MORE_SECONDS, group_id="names"
            )
            try:
                self._questions[post.send(question)] = node, time.monotonic()
            except NodeError:  # it has gone since it was last seen
                continue
        for number, (node, _) in list(self._questions.items()):
            reply = post.take(number, patience=1.0) if node in online else None
            if reply is not None:
                del self._questions[number]
                self._enter(node, reply, online)
        return [self.names[node] for node in online if node in self.names]

    def _enter(self, node: int, reply: Message | Exception, online: Mapping[int, bytes]) -> None:
        """Take a node's word for its name, unless the name is another's.

        Without keys, a name is its node's only while that is online.
        """
        name = _name_in(reply)
        if name is None:
            log.warning("node %d is left out: it did not tell its name", node)
            return
        holders = [other for other, taken in self.names.items() if taken == name and other != node]
        refusal = self.seats.refusal(name, online[node])
        if refusal is None and any(other in online for other in holders):
            refusal = f"it says it is {name!r}, as another does"
        if refusal is not None:
            log.warning("node %d is left out: %s", node, refusal)
            return
        for other in holders:
            del self.names[other]
        self.names[node] = name
        self.seats.take(name, online[node])


def _name_in(reply: Message | Exception) -> str | None:
    if isinstance(reply, Exception) or not reply.has_content():
        return None
    record = reply.content.get(RECORD)
    name = record.get(_NAME) if isinstance(record, ConfigRecord) else None
    if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
        return None
    return name
