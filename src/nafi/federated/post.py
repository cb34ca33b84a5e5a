"""Messages to Flower's nodes, and their replies.

Hides: polling, nodes that go offline, replies that cannot be read or never become whole. Promises:
no call takes much longer than it was given; whatever a node sends, it is a reply or an exception,
never the end of the run. A SuperLink that cannot be reached ends it with an error that says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import TypeVar

import httpx
from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from nafi.errors import NafiError

log = logging.getLogger(__name__)
# Flower forgets a message and its reply when their time is over; ours is kept by the server, so
# theirs is longer. Clocks may differ by about as much.
MORE_SECONDS = 3600.0
# For a reply that is on its way: others wait so long for it, and so does the end of a round.
_GRACE = 20.0
_SUPERLINK_SECONDS = 600.0
_POLL_SECONDS = 0.05, 2.0

_PUBLIC_KEY = b"-----BEGIN PUBLIC KEY-----"

_Result = TypeVar("_Result")


class NodeError(NafiError):
    """A node cannot be sent a message."""


class Post:
    """A grid, with limits."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._pulls: dict[str, Future[list[Message]]] = {}

    def nodes(self) -> dict[int, bytes]:
        """The nodes that are online, and the key that each has proven, if it has one."""
        return {int(node.node_id): _key_of(node) for node in _soon(self.grid.get_nodes)}

    def send(self, message: Message) -> str:
        """Send a message; returns its number."""
        numbers = _soon(lambda: list(self.grid.push_messages([message])))
        if len(numbers) != 1 or not numbers[0]:
            raise NodeError(
                f"the SuperLink did not take the message to node {message.metadata.dst_node_id}; "
                "its log says why"
            )
        return str(numbers[0])

    def take(self, number: str, patience: float) -> Message | Exception | None:
        """The reply to a message, if there is one.

        patience: seconds to wait for a reply that has begun to come; if it is not whole by then,
            it comes on beside, and is only looked for the next time
        """
        pull = self._pulls.get(number)
        if pull is None:
            pull = self._pulls[number] = _begun(lambda: list(self.grid.pull_messages([number])))
            wait([pull], patience)
        if not pull.done():
            return None
        del self._pulls[number]
        error = pull.exception()
        if error is not None:
            return _of_one_reply(error)
        replies = pull.result()
        ours = [reply for reply in replies if reply.metadata.reply_to_message_id == number]
        for _ in range(len(replies) - len(ours[:1])):
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
            rest = end - time.monotonic()
            online = self.nodes()
            for number, node in list(left.items()):
                if node in online or rest <= 0:
                    reply = self.take(number, max(0.0, min(_GRACE, end - time.monotonic())))
                    if reply is not None:
                        del left[number]
                        yield number, reply
            if rest <= 0:
                break
            time.sleep(max(0.0, min(pause, end - time.monotonic())) if left else 0.0)
            pause = min(longest, 1.5 * pause)
        yield from self._last(left)

    def _last(self, left: Mapping[str, int]) -> Iterator[tuple[str, Message | Exception]]:
        """What is on its way when the time is over, given the same grace for all."""
        coming = {number: self._pulls[number] for number in left if number in self._pulls}
        wait(coming.values(), _GRACE)
        for number in coming:
            reply = self.take(number, 0.0)
            if self._pulls.pop(number, None) is not None:
                reply = TimeoutError("its reply has begun to come, but is not whole")
            if reply is not None:
                yield number, reply


def _key_of(node: NodeInfo) -> bytes:
    """The public key of a node; those of Flower's simulation have random bytes in its place."""
    key = bytes(node.public_key)
    return key if key.startswith(_PUBLIC_KEY) else b""


def _begun(work: Callable[[], _Result]) -> Future[_Result]:
    """Work in a thread that nobody need wait for: Flower's calls may take hours, or never end."""
    future: Future[_Result] = Future()

    def done() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=done, daemon=True).start()
    return future


def _soon(work: Callable[[], _Result]) -> _Result:
    """What the SuperLink answers, if it does."""
    future = _begun(work)
    wait([future], _SUPERLINK_SECONDS)
    if not future.done():
        raise NafiError(
            f"the SuperLink has not answered for {_SUPERLINK_SECONDS:g} seconds. The rounds before "
            "are kept; start it and run again"
        )
    return future.result()


def _of_one_reply(error: BaseException) -> Exception:
    """An error that says something of one reply; any other is raised, as it is the SuperLink's."""
    of_link = isinstance(error, httpx.HTTPError) and not isinstance(error, httpx.HTTPStatusError)
    if of_link or not isinstance(error, Exception):
        raise error
    return bare(error)


def bare(error: Exception) -> Exception:
    """An error that holds on to nothing of what a client sent."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
