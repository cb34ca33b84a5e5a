"""Flower's messages without its processes: nodes that answer in this one, well or badly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

# What a node makes of a message: replies, as many as it likes; nothing if it keeps silent; an
# exception for what Flower cannot read.
Behaviour = Callable[[Message, Callable[[], Message]], list[Any]]


@dataclass
class Node:
    """A client; behaviour: by default it answers once, as it should; config: of its SuperNode."""

    name: str
    behaviour: Behaviour | None = None
    config: dict[str, Any] | None = None
    key: bytes = b""
    online: bool = True


@dataclass
class LocalGrid(Grid):  # type: ignore[misc]
    """Carries messages to a ClientApp in this process, when they are sent."""

    app: ClientApp
    nodes: dict[int, Node]
    replies: dict[str, list[Any]] = field(default_factory=dict)
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
        if node is None:
            return ""  # as a SuperLink does for a node that it does not know
        if node.online:
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
        found = []
        for number in message_ids:
            content = self.replies.pop(number, [])
            for reply in content:
                if isinstance(reply, Exception):
                    raise reply
                found.append(reply)
        return found

    def get_node_ids(self) -> list[int]:
        return [number for number, node in self.nodes.items() if node.online]

    def get_nodes(self) -> list[NodeInfo]:
        numbers = self.get_node_ids()
        return [NodeInfo(node_id=n, public_key=self.nodes[n].key) for n in numbers]

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *args: Any, **kwargs: Any) -> list[Message]:
        raise NotImplementedError
