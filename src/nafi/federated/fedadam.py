"""FedAdam: the server takes a step of Adam along the clients' mean change (Reddi et al., 2021).

Promises: the whole strategy is in this file, the state of its own included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from nafi.federated.architecture import Tensors
from nafi.federated.averaging import average
from nafi.federated.strategies import strategy
from nafi.federated.strategy import State, Strategy, Task, Update, check_shapes
from nafi.graph import holds_numbers
from nafi.options import number, option

_SHARE = number(at_least=0, below=1)


@dataclass(frozen=True, eq=False)
class AdamState(State):
    """first, second: moments of the mean change, for every tensor that has one."""

    first: Tensors = field(default_factory=dict)
    second: Tensors = field(default_factory=dict)


@strategy("fedadam")
@dataclass(frozen=True, eq=False)
class FedAdam(Strategy[AdamState]):
    """All start from the same weights `x`; with `d` the mean by samples of the clients' changes,

        m <- beta1 m + (1 - beta1) d,  v <- beta2 v + (1 - beta2) d^2,
        x <- x + server_rate m / (sqrt(v) + tau).

    As in the paper's Algorithm 2: `m` begins at 0, `v` at tau^2, and neither is corrected for its
    start. Statistics of normalisation, which no gradient moves, are the mean of the clients'.

    server_rate: eta; tau: how adaptive steps are, less means more
    """

    state_type: ClassVar[type[State]] = AdamState

    server_rate: float = option(number(above=0), 0.1)
    beta1: float = option(_SHARE, 0.9)
    beta2: float = option(_SHARE, 0.99)
    tau: float = option(number(above=0), 1e-3)

    def start(self) -> AdamState:
        form = self.architecture.form
        tensors = self.architecture.drawn(form, self.seed)
        learnt = self._learnt(tensors)
        first = {name: torch.zeros_like(tensor) for name, tensor in learnt.items()}
        second = {name: torch.full_like(t, self.tau**2) for name, t in learnt.items()}
        return AdamState(0, form, tensors, first, second)

    def task(self, state: AdamState, client: str) -> Task:
        return self._task(state, client, state.tensors)

    def aggregate(self, state: AdamState, updates: Iterable[Update]) -> AdamState:
        tensors = average(updates, self.architecture.spec, state.tensors, class_shares=False)
        first, second = {}, {}
        for name in state.first:
            before = state.tensors[name]
            change = tensors[name] - before
            first[name] = self.beta1 * state.first[name] + (1 - self.beta1) * change
            second[name] = self.beta2 * state.second[name] + (1 - self.beta2) * change.square()
            step = first[name] / (second[name].sqrt() + self.tau)
            tensors[name] = before + self.server_rate * step
        return AdamState(state.round + 1, state.form, tensors, first, second)

    def model(self, state: AdamState) -> nn.Module:
        return self.architecture.filled(state.form, state.tensors).eval()

    def check_state(self, state: AdamState) -> None:
        super().check_state(state)
        shapes = self.architecture.shapes(state.form)
        for moments in (state.first, state.second):
            check_shapes(moments, shapes)

    def _learnt(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters among the tensors of a network."""
        model, _ = self.architecture.network(self.architecture.form)
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        return {n: t for n, t in tensors.items() if n in names and holds_numbers(t)}
