"""What a federation does, as explicit state and pure functions over it.

Hides: nothing of the state; it can be saved after any round. Promises: whoever carries tasks to
clients and their updates back, in this process or over a network, gets the same global model.
"""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.federated.architecture import Architecture, Form, Tensors
from nafi.federated.randomness import derived_seed
from nafi.federated.training import Training
from nafi.graph.trace import named_tensors
from nafi.options import whole


@dataclass(frozen=True, eq=False)
class Task:
    """What a client is asked to do in a round.

    form: of the network to train
    tensors: its weights; what is not given the client draws itself, from its seed
    frozen: the tensors to leave as they are
    start, seed: of the client's first weights, and of its batches in this round
    """

    round: int
    form: Form
    tensors: Tensors
    frozen: frozenset[str]
    training: Training
    start: int
    seed: int


@dataclass(frozen=True, eq=False)
class Update:
    """What a client sends back.

    tensors: its weights after training, without the frozen ones
    samples, class_counts: how many samples it trained on, in all and of each class if there are any
    """

    client: str
    round: int
    tensors: Tensors
    samples: int
    class_counts: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class Member:
    """What the server remembers of a client: its own weights, and its counts."""

    tensors: Tensors
    samples: int
    class_counts: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class State:
    """All that a federation knows between two rounds.

    round: how many are finished
    form, tensors: of the global model, as far as there is one
    matched: the groups whose order is settled in this pass, for strategies that go layer by layer
    members: what is remembered of clients, for strategies that give each its own weights
    """

    round: int
    form: Form
    tensors: Tensors = field(default_factory=dict)
    matched: tuple[str, ...] = ()
    members: Mapping[str, Member] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Strategy(ABC):
    """An algorithm of federated training.

    rounds: how often clients train and send; fraction: the share of clients that take part in each
    """

    architecture: Architecture
    training: Training
    rounds: int
    seed: int = 0
    fraction: float = 1.0

    def __post_init__(self) -> None:
        whole(1).check(self.rounds, "rounds")
        whole(0).check(self.seed, "seed")
        share = isinstance(self.fraction, int | float) and not isinstance(self.fraction, bool)
        if not share or not 0 < self.fraction <= 1:
            raise InputError(f"fraction: found {self.fraction!r}, expected more than 0, at most 1")

    @abstractmethod
    def start(self) -> State:
        """Before the first round."""

    @abstractmethod
    def task(self, state: State, client: str) -> Task:
        """What a client is to do in the next round."""

    @abstractmethod
    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """The state after a round; updates are taken one at a time, in the order given."""

    @abstractmethod
    def model(self, state: State) -> nn.Module:
        """The global model, in eval mode, as if the run ended now."""

    def settings(self) -> dict[str, Any]:
        """What decides the result, beside data and the number of rounds; plain data."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("architecture", "rounds"):
            del own[name]
        plain_data = {n: asdict(v) if is_dataclass(v) else v for n, v in own.items()}  # type: ignore[arg-type]
        named = json.dumps(plain_data, default=lambda v: getattr(v, "__qualname__", str(v)))
        spec = self.architecture.spec
        shapes = {name: spec.shape(name) for name in spec.axes}
        return {
            "strategy": type(self).__name__,
            "network": f"{len(shapes)} tensors, {zlib.crc32(repr(shapes).encode()):08x}",
            "widths": spec.widths,
            **json.loads(named),
        }

    def finished(self, state: State) -> bool:
        """Whether all rounds are done."""
        return state.round >= self.rounds

    def sampled(self, clients: int) -> int:
        """How many take part in a round, of those that are there."""
        return max(1, round(self.fraction * clients))

    def select(self, state: State, clients: Sequence[str]) -> list[str]:
        """Who takes part in the next round, in the order of the clients."""
        count = self.sampled(len(clients))
        if count == len(clients):
            return list(clients)
        rng = np.random.default_rng([self.seed, state.round])
        return [clients[k] for k in sorted(rng.choice(len(clients), count, replace=False))]

    def _task(
        self, state: State, client: str, tensors: Tensors, frozen: Iterable[str] = ()
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
        )


def size_of(tensors: Tensors) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def class_table(members: Sequence[Update | Member]) -> list[tuple[int, ...]] | None:
    """(S, K) class counts, if all have them."""
    found = [m.class_counts for m in members]
    return None if any(c is None for c in found) else [c for c in found if c is not None]


def plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of their own memory, detached, contiguous and on the CPU."""
    return {n: torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for n, t in tensors.items()}


def tensors_of(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Copies of a model's tensors."""
    found = named_tensors(model)
    return plain({name: found[name] for name in names})


Records = list[dict[str, Any]]
