"""The same federations on Flower.

Hides: Flower's messages and records; only this file, `post` and `roster` import flwr. Promises:
the strategies, checks, records and checkpoints of the runner in one process, and its model for the
same seeds; a round ends at its deadline, whoever is missing.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain, repeat
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from nafi.checkpoints import save
from nafi.errors import InputError, NafiError, few
from nafi.federated.acceptance import Acceptance, QuorumError, UpdateError
from nafi.federated.architecture import Architecture
from nafi.federated.callbacks import Callback
from nafi.federated.client import Extras, Trainer
from nafi.federated.messages import task_from, task_to, update_from, update_to
from nafi.federated.privacy import Noise
from nafi.federated.run import Evaluate, Outcome, Round, Run, conduct
from nafi.federated.samples import Samples
from nafi.federated.seats import EXPIRE, Names, Seats
from nafi.federated.strategies import STRATEGIES, make_strategy, option_names
from nafi.federated.strategy import State, Strategy
from nafi.federated.telemetry import switch_off
from nafi.federated.training import Loss, Training
from nafi.files import check_writable
from nafi.graph import Inputs

try:
    from flwr.app import (
        Array,
        ArrayRecord,
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

    from nafi.federated.post import MORE_SECONDS, NodeError, Post, bare
    from nafi.federated.roster import RECORD, Roster, introduction
except ModuleNotFoundError as error:
    raise NafiError(f"{error.name} is not installed: pip install 'nafi[flower]'") from None

switch_off()
log = logging.getLogger(__name__)
_KEY = "message"
# A message is one opaque array: Flower cuts arrays into pieces that its servers accept.
_KIND = "nafi.safetensors"
# A message has a header beside its tensors: names, shapes, counts.
_HEADER_BYTES = 2**24
# What an app's configuration may hold, beside the options of its strategy.
_OF_ACCEPTANCE = "quorum", "max_bytes", "max_norm"
_OF_FEDERATION = "nodes", "wait", "deadline", "expire", "names"
# Against harmful updates: never left out without a word that stops the run.
_GUARDS = ("clip", "trim")
_OTHERS = "rounds", "seed", "fraction", "checkpoint", "out"


def client_app(
    factory: Callable[[], nn.Module],
    example_inputs: Inputs,
    data: Callable[[Context], Samples],
    *,
    classes: int | None = None,
    loss: Loss = F.cross_entropy,
    device: str = "cpu",
    noise: Noise | None = None,
    extras: Extras | None = None,
    statistics: bool = True,
) -> ClientApp:
    """What runs at each client.

    data: the client's samples; `context.node_config` is what its SuperNode was started with
    noise: clip the client's change and add noise to it before it leaves
    extras: computes what the server's strategy asks for beside weights, see `Trainer`
    statistics: whether to answer with sums over the client's samples

    A node is known by its `name` in the node configuration, or by its `partition-id`, or else by
    its number, which may change when it is started again.
    """
    app = ClientApp()
    # Made here and not at the first task: Ray copies what is made here, and would make it again.
    architecture = Architecture(factory, example_inputs)

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        return Message(introduction(client_name(context)), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        try:
            task = task_from(_unpacked(message))
            work = Trainer(
                architecture,
                lambda _: data(context),
                classes,
                loss,
                device,
                noise=noise,
                extras=extras,
                statistics=statistics,
            )
            update, _ = work(client_name(context), task)
        except (NafiError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit, too: it would end more than this task
            # Flower sends an error's text to the server, and this one may quote samples.
            log.exception("training failed")
            raise NafiError(f"{type(error).__name__}; the client's log says more") from None
        return Message(_packed(update_to(update)), reply_to=message)

    return app


def client_name(context: Context) -> str:
    """What a node is called."""
    config = context.node_config
    return str(config.get("name", config.get("partition-id", context.node_id)))


def server_app(
    factory: Callable[[], nn.Module],
    example_inputs: Inputs,
    *,
    evaluate: Evaluate | None = None,
    callbacks: Sequence[Callback] = (),
    classes: int | None = None,
    name: str | None = None,
    **settings: Any,
) -> ServerApp:
    """What runs at the server.

    evaluate: looks at the global model after each round
    callbacks: told of rounds, as those of `simulate`
    name: "package.module:function" of the factory, to be written into the model's file
    settings: strategy, rounds, seed, fraction and the strategy's options; epochs, batch, rate and
        the rest of `Training`; nodes, wait, deadline and checkpoint of a `Federation`; quorum,
        max_bytes and max_norm of an `Acceptance`; out, the file for the global model. What the
        app's configuration has under `nafi` goes before. Options of other strategies are left out,
        with a warning
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        _log_with_flower()
        chosen = {**settings, **_configured(context.run_config)}
        architecture = Architecture(factory, example_inputs)
        out, federation = _federation(architecture, chosen, classes, callbacks)
        check_writable(out, overwrite=True)
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
    prefix = f"{RECORD}."
    return {
        key.removeprefix(prefix).replace("-", "_"): value
        for key, value in config.items()
        if key.startswith(prefix)
    }


def _federation(
    architecture: Architecture,
    settings: Mapping[str, Any],
    classes: int | None,
    callbacks: Sequence[Callback],
) -> tuple[Path, Federation]:
    """A federation as an app's settings tell, and where its model goes."""
    chosen = dict(settings)
    name = str(chosen.pop("strategy", "layerwise"))
    left = _understood(name, chosen)
    out = Path(str(left.pop("out", "global.safetensors")))
    rules = {n: left.pop(n) for n in _OF_ACCEPTANCE if n in left}
    ours = {n: left.pop(n) for n in _OF_FEDERATION if n in left}
    checkpoint = left.pop("checkpoint", None)
    strategy = make_strategy(name, architecture, Training(), **{"rounds": 1, **left})
    federation = Federation(
        strategy,
        acceptance=Acceptance(classes=classes, **rules),
        checkpoint=None if checkpoint is None else Path(str(checkpoint)),
        callbacks=callbacks,
        **ours,
    )
    return out, federation


def _understood(strategy: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that only other strategies have; what none has is refused.

    An app's configuration is written for one strategy, and a single run may choose another.
    """
    everywhere = [*_OF_ACCEPTANCE, *_OF_FEDERATION, *_OTHERS]
    known = [*everywhere, *option_names(strategy)]
    others = {option for name in STRATEGIES for option in option_names(name)}
    for name in settings:
        if name not in known and name not in others:
            close = get_close_matches(name, known, 1)
            advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise InputError(f"strategy {strategy} has no setting {name!r}; {advice}")
    unused = [name for name in settings if name not in known]
    if guards := [name for name in unused if name in _GUARDS]:
        raise InputError(
            f"strategy {strategy} cannot screen updates; leave out {' and '.join(guards)}, or "
            "choose another strategy"
        )
    if unused:
        log.warning("strategy %s does not use these settings: %s", strategy, ", ".join(unused))
    return {name: value for name, value in settings.items() if name in known}


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
        expire: int | None = EXPIRE,
        names: Names = "kept",
        acceptance: Acceptance | None = None,
        checkpoint: Path | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """nodes: how many are expected; a round waits for them, but no longer than `wait` seconds.

        deadline: seconds after which a round does without those who have not answered
        expire: rounds after which a client that stays away is forgotten, see `simulate`
        names: whose a name is that a node with a key has used: "kept" by this key until the run
            ends, also if it is resumed; "freed" when its client expires; or only "claimed", by
            nodes that have another key whenever they are started
        acceptance: which updates are used, and how many a round needs; by default all nodes must
            deliver, or the run ends with a `QuorumError`
        checkpoint: a file that holds the run after each round; a run that finds it continues it
        callbacks: told of rounds, as those of `simulate`
        """
        if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
            raise InputError(f"nodes: found {nodes!r}, expected a number of at least 1")
        for name, seconds in (("wait", wait), ("deadline", deadline)):
            if not isinstance(seconds, int | float) or not 0 <= seconds < inf:
                raise InputError(f"{name}: found {seconds!r}, expected seconds of at least 0")
        if deadline == 0:
            raise InputError("deadline: found 0, expected seconds for clients to train in")
        if checkpoint is not None:
            check_writable(checkpoint, overwrite=True)
        self.strategy = strategy
        self.nodes = nodes
        self.wait = wait
        self.deadline = deadline
        self.acceptance = acceptance or Acceptance()
        self.needed = self.acceptance.needed(strategy.sampled(nodes))
        self.checkpoint = checkpoint
        self.callbacks = tuple(callbacks)
        self.seats = Seats(expire, names)
        self.roster = Roster(self.seats)

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
        post = Post(grid)
        waits: Iterator[float] = repeat(self.wait)
        if self.checkpoint is not None and self.checkpoint.exists():
            # Nodes may still be busy with a task of the run that this one resumes.
            waits = chain([max(self.wait, self.deadline)], waits)
        self.run = conduct(
            self.strategy,
            lambda: self._present(post, next(waits)),
            lambda round: self._carry(round, post),
            self.acceptance,
            evaluate=evaluate,
            checkpoint=self.checkpoint,
            resume=True,
            progress=lambda step, done, total: log.info("%s (%d of %d)", step, done, total),
            callbacks=self.callbacks,
            seats=self.seats,
        )
        return _result(self.run)

    def configure_train(self, *args: Any, **options: Any) -> NoReturn:
        self._refuse()

    def aggregate_train(self, *args: Any, **options: Any) -> NoReturn:
        self._refuse()

    def configure_evaluate(self, *args: Any, **options: Any) -> NoReturn:
        self._refuse()

    def aggregate_evaluate(self, *args: Any, **options: Any) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        """Flower's loop holds all replies at once, knows no quorum and no checkpoint."""
        raise NafiError("a Federation runs its own rounds: call its start, not Flower's")

    def _carry(self, round: Round, post: Post) -> tuple[State, dict[str, Any]]:
        """Take a round's tasks to its clients, and finish it with their replies.

        Replies are put on disk: clients answer when they like, but are used in their order.
        """
        end = time.monotonic() + self.deadline
        late = TimeoutError(f"no reply within {self.deadline:g} seconds")
        kept: dict[str, Path | Exception] = dict.fromkeys(round.clients, late)
        asked: dict[str, str] = {}
        nodes = self.roster.nodes
        for client, task in round.hand_out():
            message = Message(
                _packed(task_to(task)),
                nodes[client],
                MessageType.TRAIN,
                ttl=self.deadline + MORE_SECONDS,
                group_id=str(round.state.round + 1),
            )
            try:
                asked[post.send(message)] = client
            except NodeError as error:  # it has gone since it was last seen
                kept[client] = error
        with tempfile.TemporaryDirectory(prefix="nafi-replies-") as folder:
            sent = {number: nodes[client] for number, client in asked.items()}
            for place, (number, answer) in enumerate(post.replies(sent, end)):
                kept[asked[number]] = self._kept(answer, Path(folder) / str(place))
            return round.finish(_outcome(kept[client]) for client in round.clients)

    def _kept(self, answer: Message | Exception, file: Path) -> Path | Exception:
        """A reply's content in a file, or why there is none."""
        try:
            if isinstance(answer, Exception):
                raise answer
            if answer.has_error():
                raise UpdateError(answer.error.reason or f"error {answer.error.code}")
            limit = self.acceptance.max_bytes
            file.write_bytes(_unpacked(answer, None if limit is None else limit + _HEADER_BYTES))
            return file
        except Exception as error:  # whatever a client may send
            return bare(error)

    def _present(self, post: Post, seconds: float) -> Sequence[str]:
        """The names of the nodes that are there, once there are enough of them."""
        here = self.roster.present(post, self.nodes, seconds)
        sampled = self.strategy.sampled(len(here)) if here else 0
        if sampled < self.needed:
            share = f" (a round asks {sampled} of them)" if sampled < len(here) else ""
            raise QuorumError(
                f"{len(here)} of {self.nodes} nodes are there after {seconds:g} seconds{share}, "
                f"{self.needed} are needed. The rounds before are kept; start the nodes and run "
                "again"
            )
        if len(here) < self.nodes:
            log.warning("%d of %d nodes are there: %s", len(here), self.nodes, few(here))
        return here


def _outcome(kept: Path | Exception) -> Outcome:
    try:
        if isinstance(kept, Exception):
            raise kept
        return update_from(kept.read_bytes()), float("nan")
    except Exception as error:  # whatever a client may send
        return bare(error)


def _packed(content: bytes) -> RecordDict:
    array = Array(dtype="uint8", shape=(len(content),), stype=_KIND, data=content)
    return RecordDict({RECORD: ArrayRecord({_KEY: array})})


def _unpacked(message: Message, limit: int | None = None) -> bytes:
    record = message.content.get(RECORD)
    array = record.get(_KEY) if isinstance(record, ArrayRecord) else None
    if not isinstance(array, Array) or array.stype != _KIND:
        raise UpdateError("it holds no message of nafi")
    if limit is not None and len(array.data) > limit:
        raise UpdateError(f"it has {len(array.data)} bytes, more than the limit of {limit}")
    return bytes(array.data)


def _metrics(record: Mapping[str, Any]) -> MetricRecord:
    numbers = {n: v for n, v in record.items() if isinstance(v, int | float)}
    return MetricRecord({**numbers, "refused": len(record["refused"])})


def _result(run: Run) -> Result:
    metrics = {int(record["round"]): _metrics(record) for record in run.records}
    # NumPy, in which Flower's arrays are, has no bfloat16.
    weights = {
        name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        for name, tensor in run.model.state_dict().items()
    }
    return Result(arrays=ArrayRecord(weights), train_metrics_clientapp=metrics)
