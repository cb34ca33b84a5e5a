"""What a federation does, as explicit state and pure functions over it.

Promises: a state holds all that a strategy knows, so that it can be saved after any round; whoever
carries tasks to clients and their updates back, in this process or over a network, gets the same
global model.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import add
from typing import Any, ClassVar, Generic

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from nafi.errors import InputError, few
from nafi.federated.architecture import Architecture, Form, Shapes, Tensors, load_tensors
from nafi.federated.latest import Latest
from nafi.federated.randomness import derived_seed
from nafi.federated.request import PRECISIONS, Precision, Request
from nafi.federated.statistics import expected_sums, probing_inputs, read_head
from nafi.federated.training import Training
from nafi.fusion import (
    HeadStatistics,
    Method,
    Screen,
    empty_head,
    screened_statistics,
    solve_head,
)
from nafi.graph import named_tensors
from nafi.options import Constraint, Options, one_of, option, plain_data, whole


@dataclass(frozen=True, eq=False)
class Task:
    """What a client is asked to do in a round.

    form: of the network to train
    tensors: its weights; what is not given the client draws itself, from its seed
    frozen: the tensors to leave as they are
    start, seed: of the client's first weights, and of its batches in this round
    extras: what the strategy tells the client beside weights, as control variates
    asks: what the client's update may carry beside weights, as statistics of its data
    sums: which of these are sums over its samples; with everything frozen, a client does not train
    """

    round: int
    form: Form
    tensors: Tensors
    frozen: frozenset[str]
    training: Training
    start: int
    seed: int
    extras: Tensors = field(default_factory=dict)
    asks: Shapes = field(default_factory=dict)
    sums: Request = field(default_factory=Request)


@dataclass(frozen=True, eq=False)
class Update:
    """What a client sends back.

    tensors: its weights after training, without the frozen ones
    samples, class_counts: how many samples it trained on, in all and of each class if there are any
    extras: what its task asks for beside weights
    """

    client: str
    round: int
    tensors: Tensors
    samples: int
    class_counts: tuple[int, ...] | None = None
    extras: Tensors = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class State:
    """What every strategy knows between two rounds; one that knows more adds fields.

    round: how many are finished
    form, tensors: of the global model, as far as there is one
    awaiting: what the round under way still needs of clients once they have trained: "head", or
        what a strategy calls its further messages; nothing between two rounds
    head: the last layer that was solved for the global model, if it was
    """

    round: int
    form: Form
    tensors: Tensors = field(default_factory=dict)
    awaiting: str = field(default="", kw_only=True)
    head: Tensors = field(default_factory=dict, kw_only=True)


# Checkpoints and messages hold no larger one.
LARGEST_SEED = 2**63 - 1
_SHARE = Constraint(
    lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1,
    "more than 0, at most 1",
)
HEAD = "head"
HEADS = ("trained", "statistics")
# A strategy without a parameter is one whose state is not known to the type checker.
StateOf = TypeVar("StateOf", bound=State, default=Any)
_Method = TypeVar("_Method", bound=Method)


@dataclass(frozen=True, eq=False)
class Strategy(Options, ABC, Generic[StateOf]):
    """An algorithm of federated training; its further fields are its options.

    rounds: how often clients train and send; fraction: the share of clients that take part in each
    head: the last layer of the global model, "trained" as all others, or solved after each round
        from the sum of the clients' labelled "statistics", which takes one more message. Training
        goes on from the trained one
    precision: of second moments in messages: float64, float32 or float16

    A subclass may say what its state is (`state_type`, a frozen dataclass), which methods of fusion
    its field `method` may hold (`method_kind`), and where defaults of `Training` and of the method
    are others for it (`defaults`).
    """

    state_type: ClassVar[type[State]] = State
    method_kind: ClassVar[type[Method] | None] = None
    defaults: ClassVar[Mapping[str, Any]] = {}

    architecture: Architecture
    training: Training
    rounds: int = option(whole(1))
    seed: int = option(whole(0, LARGEST_SEED), 0)
    fraction: float = option(_SHARE, 1.0)
    head: str = option(one_of(HEADS), "trained", kw_only=True)
    precision: Precision = option(one_of(PRECISIONS), "float32", kw_only=True)
    _asks: Latest[Shapes] = field(init=False, repr=False, default_factory=Latest)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_instance(self.architecture, Architecture, "architecture")
        check_instance(self.training, Training, "training")
        _check_unseeded(getattr(self, "method", None))

    @property
    def screen(self) -> Screen:
        """What is done against clients that send harmful weights or sums."""
        return Screen()

    @abstractmethod
    def start(self) -> StateOf:
        """Before the first round."""

    @abstractmethod
    def task(self, state: StateOf, client: str) -> Task:
        """What a client is to do in the next round."""

    @abstractmethod
    def aggregate(self, state: StateOf, updates: Iterable[Update]) -> StateOf:
        """The state after a round; updates are taken one at a time, in the order given."""

    @abstractmethod
    def model(self, state: StateOf) -> nn.Module:
        """The global model, in eval mode, as if the run ended now."""

    def next_task(self, state: StateOf, client: str) -> Task:
        """What a client is asked in the next message: carriers call this."""
        return (
            self._head_task(state, client) if state.awaiting == HEAD else self.task(state, client)
        )

    def advance(self, state: StateOf, updates: Iterable[Update]) -> StateOf:
        """The state after all answers to `next_task`: a round later, or in the middle of one."""
        if state.awaiting == HEAD:
            return self._solved(state, updates)
        after = self.aggregate(replace(state, head={}) if state.head else state, updates)
        if self.head == "trained" or after.awaiting or not self._is_whole(after):
            return after
        return replace(after, round=state.round, awaiting=HEAD)

    def with_head(self, state: StateOf, head: Tensors) -> StateOf:
        """The state with a last layer that was solved."""
        return replace(state, head=head)

    def global_model(self, state: StateOf) -> nn.Module:
        """What `model` gives, with the last layer that was solved for it."""
        return load_tensors(self.model(state), state.head)

    def forget(self, state: StateOf, clients: Collection[str]) -> StateOf:
        """The state without what it holds of these clients alone, in `members` if it has them."""
        members = getattr(state, "members", {})
        kept: Any = {name: member for name, member in members.items() if name not in clients}
        return state if len(kept) == len(members) else replace(state, **{"members": kept})

    def check_state(self, state: StateOf) -> None:
        """Refuse a state, as read from a file, that is none of this strategy."""
        shapes = self.architecture.shapes(state.form)
        check_shapes(state.tensors, shapes)
        check_shapes(state.head, shapes)

    def check_classes(self, classes: int | None) -> None:
        """Refuse before any round a number of classes that cannot be used; None: not counted."""

    def settings(self) -> dict[str, Any]:
        """What decides the result, beside data and the number of rounds; plain data."""
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        for name in ("architecture", "rounds"):
            del options[name]
        spec = self.architecture.spec
        shapes = {name: spec.shape(name) for name in spec.axes}
        return {
            "strategy": type(self).__name__,
            "network": f"{len(shapes)} tensors, {zlib.crc32(repr(shapes).encode()):08x}",
            "widths": dict(spec.widths),
            **{name: plain_data(value) for name, value in options.items()},
        }

    def seeded(self, method: _Method) -> _Method:
        """A method with the seed of the strategy, if methods of its kind have one."""
        if "seed" not in method.option_names():
            return method
        return replace(method, **{"seed": self.seed})

    def finished(self, state: StateOf) -> bool:
        """Whether all rounds are done."""
        return state.round >= self.rounds

    def sampled(self, clients: int) -> int:
        """How many take part in a round, of those that are there."""
        return max(1, round(self.fraction * clients))

    def select(self, state: StateOf, clients: Sequence[str]) -> list[str]:
        """Who takes part in the next round, in the order of the clients."""
        count = self.sampled(len(clients))
        if count == len(clients):
            return list(clients)
        rng = np.random.default_rng([self.seed, state.round])
        return [clients[k] for k in sorted(rng.choice(len(clients), count, replace=False))]

    def _is_whole(self, state: State) -> bool:
        """Whether the state holds a global model, not only some of its layers."""
        spec = self.architecture.spec_of(state.form)
        return all(name in state.tensors for name in spec.axes)

    def _head_task(self, state: State, client: str) -> Task:
        """Ask for labelled sums at the last layer of the global model."""
        request = Request(head=True, precision=self.precision)
        asks = self._asks.get(state, lambda: self._expected(state, request))
        return self._task(state, client, state.tensors, state.tensors, asks=asks, sums=request)

    def _expected(self, state: State, request: Request) -> Shapes:
        """What the answer to a request about the global model looks like."""
        model = self.architecture.filled(state.form, state.tensors)
        return expected_sums(model, self.architecture.example_inputs, request)

    def _solved(self, state: StateOf, updates: Iterable[Update]) -> StateOf:
        """The state after a round whose last message were labelled sums."""
        model = self.architecture.filled(state.form, state.tensors).eval()
        request = Request(head=True, precision=self.precision)
        empty = empty_head(model, probing_inputs(self.architecture.example_inputs))
        parts = (read_head(u.extras, request, empty) for u in updates)
        total = self._total(parts, empty)
        solved = named_tensors(solve_head(model, [total]))
        head = plain({name: solved[name] for name in total.tensor_names})
        after = replace(state, round=state.round + 1, awaiting="")
        return self.with_head(after, head)

    def _total(self, parts: Iterable[HeadStatistics], empty: HeadStatistics) -> HeadStatistics:
        """The labelled sums of all clients; with a screen that trims, all are in memory."""
        if not self.screen.trim:
            return reduce(add, parts, empty)
        sent = list(parts)
        return screened_statistics(sent, self.screen) if sent else empty

    def _task(
        self,
        state: State,
        client: str,
        tensors: Tensors,
        frozen: Iterable[str] = (),
        *,
        extras: Tensors | None = None,
        asks: Shapes | None = None,
        sums: Request | None = None,
    ) -> Task:
        who = zlib.crc32(client.encode())
        return Task(
            state.round,
            state.form,
            tensors,
            frozenset(frozen),
            self.training,
            start=derived_seed(self.seed, who),
            seed=derived_seed(self.seed, who, 1 + state.round),
            extras=extras or {},
            asks=asks or {},
            sums=sums or Request(),
        )


def check_instance(value: object, kind: type, name: str) -> None:
    """Refuse a value that is not of a class."""
    if not isinstance(value, kind):
        raise InputError(f"{name}: found {value!r}, expected {kind.__name__}")


def _check_unseeded(method: object) -> None:
    """Refuse a method with a seed of its own: that of the strategy takes its place."""
    if not isinstance(method, Method):
        return
    default = {each.name: each.default for each in fields(method)}.get("seed")
    seed = getattr(method, "seed", default)
    if seed != default:
        raise InputError(f"seed: give it to the strategy; found {seed} in its method")


def check_shapes(tensors: Tensors, shapes: Shapes) -> None:
    """Refuse tensors, as read from a file, that are not those of a network."""
    wrong = [
        name
        for name, tensor in tensors.items()
        if name not in shapes
        or (tuple(tensor.shape), tensor.dtype) != (shapes[name].shape, shapes[name].dtype)
    ]
    if wrong:
        raise InputError(f"{few(wrong)} is not what a network of this form has")


def size_of(tensors: Tensors) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def class_table(counts: Iterable[tuple[int, ...] | None]) -> list[tuple[int, ...]] | None:
    """(S, K) class counts, if all have them."""
    rows = list(counts)
    known = [row for row in rows if row is not None]
    return known if len(known) == len(rows) else None


def plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of their own memory, detached, contiguous and on the CPU."""
    return {n: torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for n, t in tensors.items()}


def tensors_of(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Copies of a model's tensors."""
    tensors = named_tensors(model)
    return plain({name: tensors[name] for name in names})


Records = list[dict[str, Any]]
