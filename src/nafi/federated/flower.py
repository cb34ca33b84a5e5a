"""The same federations on Flower.

Hides: Flower's messages, nodes and records; this is the only file that imports flwr. Promises: the
strategies, checks, records and checkpoints of the runner in one process, and its model for the same
seeds; a round ends at its deadline, whoever is missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import nn

from nafi.checkpoints import save
from nafi.errors import InputError, NafiError, few
from nafi.federated.acceptance import Acceptance, QuorumError, UpdateError
from nafi.federated.architecture import Architecture
from nafi.federated.client import Trainer
from nafi.federated.messages import task_from, task_to, update_from, update_to
from nafi.federated.privacy import Noise
from nafi.federated.run import Evaluate, Outcome, Round, Run, conduct
from nafi.federated.samples import Samples
from nafi.federated.strategies import make_strategy
from nafi.federated.strategy import State, Strategy
from nafi.federated.training import Loss, Training
from nafi.graph.trace import Inputs

try:
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Message,
        MessageType,
        MetricRecord,
        RecordDict,
    )
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import Result
    from flwr.serverapp.strategy import Strategy as FlowerStrategy
except ModuleNotFoundError as error:
    raise NafiError(f"{error.name} is not installed: pip install 'nafi[flower]'") from None

log = logging.getLogger(__name__)
_RECORD, _KEY, _NAME = "nafi", "message", "name"
# A message is one opaque array: Flower cuts arrays into pieces that its servers accept.
_KIND = "nafi.safetensors"
# A message has a header beside its tensors: names, shapes, counts.
_HEADER_BYTES = 2**24
_POLL_SECONDS = 0.05, 2.0


def client_app(
    factory: Callable[[], nn.Module],
    example_inputs: Inputs,
    data: Callable[[Context], Samples],
    *,
    classes: int | None = None,
    loss: Loss = F.cross_entropy,
    device: str = "cpu",
    noise: Noise | None = None,
) -> ClientApp:
    """What runs at each client.

    data: the client's samples; `context.node_config` is what its SuperNode was started with
    noise: clip the client's change and add noise to it before it leaves

    A node is known by its `name` in the node configuration, or by its `partition-id`, or else by
    its number, which may change when it is started again.
    """
    app = ClientApp()
    # Made here and not at the first task: Ray copies what is made here, and would make it again.
    architecture = Architecture(factory, example_inputs)

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        content = RecordDict({_RECORD: ConfigRecord({_NAME: client_name(context)})})
        return Message(content, reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        task = task_from(_unpacked(message))
        work = Trainer(architecture, lambda _: data(context), classes, loss, device, noise=noise)
        update, _ = work(client_name(context), task)
        return Message(_packed(update_to(update)), reply_to=message)

    return app


def client_name(context: Context) -> str:
    """What a node is called."""
    told = context.node_config
    return str(told.get("name", told.get("partition-id", context.node_id)))


def server_app(
    factory: Callable[[], nn.Module],
    example_inputs: Inputs,
    *,
    evaluate: Evaluate | None = None,
    classes: int | None = None,
    name: str | None = None,
    **settings: Any,
) -> ServerApp:
    """What runs at the server.

    evaluate: looks at the global model after each round
    name: "package.module:function" of the factory, to be written into the model's file
    settings: as `Settings` tells; those in the app's configuration, under `nafi`, go before
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        _log_with_flower()
        told = {**settings, **_configured(context.run_config)}
        architecture = Architecture(factory, example_inputs)
        out, federation = _federation(architecture, told, classes)
        federation.start(grid, evaluate=evaluate)
        save(federation.run.model, out, factory=name, example_inputs=example_inputs, overwrite=True)
        log.info("the global model is in %s", out.resolve())

    return app


def _log_with_flower() -> None:
    """What we tell goes where Flower's own messages go: to whoever runs `flwr run --stream`."""
    ours = logging.getLogger("nafi")
    for handler in logging.getLogger("flwr").handlers:
        ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


def _configured(config: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"{_RECORD}."
    return {
        key.removeprefix(prefix).replace("-", "_"): value
        for key, value in config.items()
        if key.startswith(prefix)
    }


def _federation(
    architecture: Architecture, told: Mapping[str, Any], classes: int | None
) -> tuple[Path, Federation]:
    """A federation as an app's settings tell, and where its model goes.

    strategy, rounds, seed, fraction and the strategy's options; epochs, batch, rate and the rest of
    `Training`; nodes, wait, deadline, checkpoint of a `Federation`; quorum, max_bytes, max_norm of
    an `Acceptance`; out: the file for the global model.
    """
    given = dict(told)
    out = Path(str(given.pop("out", "global.safetensors")))
    rules = {n: given.pop(n) for n in ("quorum", "max_bytes", "max_norm") if n in given}
    ours = {n: given.pop(n) for n in ("nodes", "wait", "deadline") if n in given}
    checkpoint = given.pop("checkpoint", None)
    training = {f.name: given.pop(f.name) for f in fields(Training) if f.name in given}
    strategy = make_strategy(
        str(given.pop("strategy", "layerwise")),
        architecture,
        Training(**training),
        **{"rounds": 1, **given},
    )
    federation = Federation(
        strategy,
        acceptance=Acceptance(classes=classes, **rules),
        checkpoint=None if checkpoint is None else Path(str(checkpoint)),
        **ours,
    )
    return out, federation


class Federation(FlowerStrategy):
    """One of our strategies as one of Flower's.

    run: what came of it, after `start`
    """

    run: Run

    def __init__(
        self,
        strategy: Strategy,
        *,
        nodes: int = 2,
        wait: float = 120.0,
        deadline: float = 3600.0,
        acceptance: Acceptance | None = None,
        checkpoint: Path | None = None,
    ) -> None:
        """nodes: how many are expected; a round waits for them, but no longer than `wait` seconds.

        deadline: seconds after which a round does without those who have not answered
        acceptance: which updates are used, and how many a round needs; by default all nodes must
            deliver, or the run ends with a `QuorumError`
        checkpoint: a file that holds the run after each round; a run that finds it goes on with it
        """
        if nodes < 1:
            raise InputError(f"nodes: found {nodes}, expected at least 1")
        if not (wait >= 0 and deadline > 0):
            raise InputError(
                f"wait, deadline: found {wait} and {deadline}, expected seconds of at least 0 and "
                "more than 0"
            )
        self.strategy = strategy
        self.nodes = nodes
        self.wait = wait
        self.deadline = deadline
        self.acceptance = acceptance or Acceptance()
        self.needed = self.acceptance.needed(nodes)
        self.checkpoint = checkpoint
        self.names: dict[int, str] = {}
        self._round: Round | None = None
        self._asked: dict[str, str] = {}

    def summary(self) -> None:
        log.info(
            "%s: %d rounds, %d nodes, of which %d are needed, %g seconds a round at most",
            type(self.strategy).__name__,
            self.strategy.rounds,
            self.nodes,
            self.needed,
            self.deadline,
        )

    def start(  # type: ignore[override]
        self, grid: Grid, *, evaluate: Evaluate | None = None
    ) -> Result:
        """Run all rounds, from the checkpoint on if there is one.

        evaluate: looks at the global model after each round; its numbers go into the records
        """
        self.summary()
        self.run = conduct(
            self.strategy,
            lambda: self._present(grid),
            lambda round: self._carry(round, grid),
            evaluate=evaluate,
            checkpoint=self.checkpoint,
            resume=True,
            acceptance=self.acceptance,
            progress=lambda step, done, total: log.info("%s (%d of %d)", step, done, total),
        )
        return _result(self.run)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The round's tasks, one after the other."""
        nodes = {name: node for node, name in self.names.items()}
        for client, task in self._under_way.given():
            yield Message(
                _packed(task_to(task)),
                nodes[client],
                MessageType.TRAIN,
                ttl=self.deadline,
                group_id=str(server_round),
            )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Finish the round; replies that are not to it, or come twice, are not looked at."""
        state, record = self._under_way.finish(self._outcomes(iter(replies)))
        self._finished = state, record
        return ArrayRecord(dict(state.tensors)), _metrics(record)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return None

    @property
    def _under_way(self) -> Round:
        if self._round is None:
            raise NafiError("a Federation runs its own rounds: call its start, not Flower's")
        return self._round

    def _carry(self, round: Round, grid: Grid) -> tuple[State, dict[str, Any]]:
        self._round, self._asked = round, {}
        number = round.state.round + 1
        end = time.monotonic() + self.deadline
        messages = self.configure_train(number, ArrayRecord(), ConfigRecord(), grid)
        for client, message in zip(round.clients, messages, strict=True):
            self._asked[_pushed(grid, message)] = client
        self.aggregate_train(number, _replies(grid, list(self._asked), end))
        self._round = None
        return self._finished

    def _outcomes(self, replies: Iterator[Message]) -> Iterator[Outcome]:
        """What came of each client's task, in the order of the clients."""
        early: dict[str, Message] = {}
        expected = dict(self._asked)
        for client in self._under_way.clients:
            while client not in early and (reply := next(replies, None)) is not None:
                sender = expected.pop(reply.metadata.reply_to_message_id, None)
                if sender is None:
                    log.warning("a reply to no open task is ignored: %s", _told(reply))
                else:
                    early[sender] = reply
            yield self._outcome(early.pop(client, None))
        for reply in replies:
            log.warning("a reply after the last is ignored: %s", _told(reply))

    def _outcome(self, reply: Message | None) -> Outcome:
        if reply is None:
            return TimeoutError(f"no reply within {self.deadline:g} seconds")
        try:
            if reply.has_error():
                raise UpdateError(reply.error.reason or f"error {reply.error.code}")
            limit = self.acceptance.max_bytes
            content = _unpacked(reply, None if limit is None else limit + _HEADER_BYTES)
            return update_from(content), float("nan")
        except Exception as error:  # whatever a client may send
            return error

    def _present(self, grid: Grid) -> Sequence[str]:
        """The names of the nodes that are there, once there are enough of them."""
        end = time.monotonic() + self.wait
        while True:
            here = self._introduced(grid, end)
            if len(here) >= self.nodes:
                return here
            if time.monotonic() >= end:
                break
            time.sleep(min(1.0, self.wait))
        if len(here) >= self.needed:
            log.warning("%d of %d nodes are there: %s", len(here), self.nodes, few(here))
            return here
        raise QuorumError(
            f"{len(here)} of {self.nodes} nodes are there after {self.wait:g} seconds, "
            f"{self.needed} are needed. The rounds before are kept; start the nodes and run again"
        )

    def _introduced(self, grid: Grid, end: float) -> list[str]:
        """The names of the nodes that are there; those that are new are asked."""
        here = set(grid.get_node_ids())
        self.names = {node: name for node, name in self.names.items() if node in here}
        asked: dict[str, int] = {}
        for unknown in sorted(here - set(self.names)):
            question = Message(
                RecordDict(), unknown, MessageType.QUERY, ttl=max(1.0, self.wait), group_id="names"
            )
            asked[_pushed(grid, question)] = unknown
        for reply in _replies(grid, list(asked), end):
            node = asked.get(reply.metadata.reply_to_message_id)
            name = _name_in(reply)
            if node is None or name is None:
                log.warning("node %s is left out: it did not tell its name", node)
            elif name in (other for known, other in self.names.items() if known != node):
                log.warning("node %d is left out: it says it is %r, as another does", node, name)
            else:
                self.names[node] = name
        # "2" before "10", and the same order whenever they came.
        return sorted(self.names.values(), key=lambda name: (len(name), name))


def _pushed(grid: Grid, message: Message) -> str:
    """Send a message; returns its number."""
    found = list(grid.push_messages([message]))
    if len(found) != 1 or not found[0]:
        raise NafiError(
            f"the SuperLink did not take the message to node {message.metadata.dst_node_id}; its "
            "log says why"
        )
    return str(found[0])


def _replies(grid: Grid, sent: Sequence[str], end: float) -> Iterator[Message]:
    """Replies in the order of what was sent, one in memory at a time, until the deadline.

    Those that have come are taken after the deadline, too.
    """
    pause, longest = _POLL_SECONDS
    for number in sent:
        while True:
            late = time.monotonic() >= end
            found = list(grid.pull_messages([number]))
            yield from found
            if found or late:
                break
            time.sleep(min(pause, max(0.0, end - time.monotonic())))
            pause = min(longest, 1.5 * pause)


def _packed(content: bytes) -> RecordDict:
    array = Array(dtype="uint8", shape=(len(content),), stype=_KIND, data=content)
    return RecordDict({_RECORD: ArrayRecord({_KEY: array})})


def _unpacked(message: Message, limit: int | None = None) -> bytes:
    record = message.content.get(_RECORD)
    array = record.get(_KEY) if isinstance(record, ArrayRecord) else None
    if not isinstance(array, Array) or array.stype != _KIND:
        raise UpdateError("it holds no message of nafi")
    if limit is not None and len(array.data) > limit:
        raise UpdateError(f"it has {len(array.data)} bytes, more than the limit of {limit}")
    return bytes(array.data)


def _name_in(reply: Message) -> str | None:
    record = reply.content.get(_RECORD) if reply.has_content() else None
    name = record.get(_NAME) if isinstance(record, ConfigRecord) else None
    return name if isinstance(name, str) and 0 < len(name) <= 200 else None


def _told(reply: Message) -> str:
    about = reply.metadata
    return f"node {about.src_node_id}, group {about.group_id!r}"


def _metrics(record: Mapping[str, Any]) -> MetricRecord:
    told = {n: v for n, v in record.items() if isinstance(v, int | float)}
    return MetricRecord({**told, "refused": len(record["refused"])})


def _result(run: Run) -> Result:
    metrics = {int(record["round"]): _metrics(record) for record in run.records}
    return Result(arrays=ArrayRecord(dict(run.model.state_dict())), train_metrics_clientapp=metrics)
