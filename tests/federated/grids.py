"""Flower's messages without its processes: nodes that answer in this one, well or badly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

# What a node makes of a message: replies, as many as it likes; nothing if it keeps silent.
Behaviour = Callable[[Message, Callable[[], Message]], list[Message]]


@dataclass
class Node:
    """A client; behaviour: by default it answers once, as it should; config: of its SuperNode."""

    name: str
    behaviour: Behaviour | None = None
    config: dict[str, Any] | None = None


@dataclass
class LocalGrid(Grid):  # type: ignore[misc]
    """Carries messages to a ClientApp in this process, when they are sent."""

    app: ClientApp
    nodes: dict[int, Node]
    replies: dict[str, list[Message]] = field(default_factory=dict)
    sent: int = 0

    def __post_init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        self.sent += 1
        number = f"message {self.sent}"
        message.metadata.__dict__["_message_id"] = number
        node_id = message.metadata.dst_node_id
        node = self.nodes.get(node_id)
        if node is not None:
            answer = lambda: self._answer(message, node_id, node)  # noqa: E731
            plain: Behaviour = lambda message, answer: [answer()]  # noqa: E731
            self.replies[number] = (node.behaviour or plain)(message, answer)
        return number

    def _answer(self, message: Message, node_id: int, node: Node) -> Message:
        context = Context(1, node_id, node.config or {"name": node.name}, RecordDict(), {})
        try:
            return self.app(message, context)
        except Exception as error:
            return Message(Error(code=1, reason=repr(error)), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [reply for number in message_ids for reply in self.replies.pop(number, [])]

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *args: Any, **kwargs: Any) -> list[Message]:
        raise NotImplementedError
