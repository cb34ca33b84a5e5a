"""Messages to Flower's nodes, and their replies.

Hides: polling, nodes that go offline, replies that cannot be read. Promises: no call takes much
longer than it was given; whatever a node sends, it is a reply or an exception, never the end of the
run. A SuperLink that cannot be reached raises its own error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from nafi.errors import NafiError

log = logging.getLogger(__name__)
# Flower forgets a message and its reply when their time is over; ours is kept by the server, so
# theirs is longer. Clocks may differ by about as much.
MORE_SECONDS = 3600.0
# For a reply that is on its way when the time is over.
_GRACE = 20.0
_POLL_SECONDS = 0.05, 2.0


class Post:
    """A grid, with limits."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def nodes(self) -> dict[int, bytes]:
        """The nodes that are online, and the key that each has proven, if it has one."""
        return {int(node.node_id): bytes(node.public_key) for node in self.grid.get_nodes()}

    def send(self, message: Message) -> str:
        """Send a message; returns its number."""
        found = list(self.grid.push_messages([message]))
        if len(found) != 1 or not found[0]:
            raise NafiError(
                f"the SuperLink did not take the message to node {message.metadata.dst_node_id}; "
                "its log says why"
            )
        return str(found[0])

    def take(self, number: str, end: float) -> Message | Exception | None:
        """The reply to a message, if there is one.

        end: when to give up a reply that has begun to come, by the monotonic clock
        """
        box: list[Any] = []

        def pull() -> None:
            try:
                box.append(list(self.grid.pull_messages([number])))
            except BaseException as error:  # told to whoever waits
                box.append(error)

        # Flower may wait for hours for a reply that was announced and is not sent.
        thread = threading.Thread(target=pull, daemon=True)
        thread.start()
        thread.join(max(0.0, end - time.monotonic()) + _GRACE)
        if not box:
            return TimeoutError("its reply has begun to come, but is not whole")
        found = box[0]
        if isinstance(found, httpx.HTTPError) or not isinstance(found, Exception | list):
            raise found
        if isinstance(found, Exception):
            return found  # what came cannot be read
        ours = [reply for reply in found if reply.metadata.reply_to_message_id == number]
        for _ in range(len(found) - len(ours[:1])):
            log.warning("a reply to no open message is ignored")
        return ours[0] if ours else None

    def replies(
        self, sent: Mapping[str, int], end: float
    ) -> Iterator[tuple[str, Message | Exception]]:
        """Numbers of messages and the replies to them, as they come, until all have or `end`.

        sent: number -> node. A node that is offline may come back: Flower, if asked, would give up
        its message, so it is asked only at the end.
        """
        left = dict(sent)
        pause, longest = _POLL_SECONDS
        while left:
            late = time.monotonic() >= end
            online = self.nodes()
            for number, node in list(left.items()):
                if node not in online and not late:
                    continue
                found = self.take(number, end)
                if found is not None:
                    del left[number]
                    yield number, found
            if late:
                return
            time.sleep(max(0.0, min(pause, end - time.monotonic())) if left else 0.0)
            pause = min(longest, 1.5 * pause)
