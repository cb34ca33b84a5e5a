"""Layer by layer (Algorithm `alg2` of the paper; with pfnm it is FedMA).

Hides: which tensors are settled with a group of neurons, and how each client's other tensors follow
its order. Promises: in every round one group is matched, broadcast and frozen; parallel branches
that share it go together; the last round of a pass averages the output layer by class shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.federated.architecture import Form, Tensors, load_tensors
from nafi.federated.strategy import Member, State, Strategy, Task, Update, class_table
from nafi.fusion import Bayesian, Nafi
from nafi.fusion.clients import check_clients
from nafi.fusion.descent import Descent, in_place, next_group
from nafi.fusion.merge import merge
from nafi.fusion.networks import Networks
from nafi.fusion.widths import check_max_width
from nafi.graph import Normalisation, attach_batchnorm, fold_batchnorm
from nafi.graph.lift import Positions, lift, lifted_rows
from nafi.graph.spec import ModelSpec
from nafi.graph.trace import named_tensors
from nafi.options import SWITCH, one_of

Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True, eq=False)
class Layerwise(Strategy):
    """Match a group, broadcast it, freeze it, let clients retrain what follows, go on to the next.

    A pass takes a round for each group and one for the output layer. Rounds beyond that begin
    another pass at the widths of the first; without freezing, they average all layers. A client
    that missed a round counts with the weights it sent last, which the server keeps in the order
    of the global model: it may come back at any time, and a new one begins with the settled layers
    and weights of its own for the rest.

    freeze: whether clients leave settled layers as they are; else they train them on, and these
        layers are averaged in every round
    method: how groups are matched; with pfnm the strategy is FedMA. A layer's normalisation is
        folded into it, with each client's own statistics, when the layer is matched; its
        batchnorm="attach" gives the final model an identity in its place to train on, "fold"
        leaves it folded

    The server holds one set of weights for every client.
    """

    freeze: bool = True
    method: Bayesian = field(default_factory=Nafi)

    def __post_init__(self) -> None:
        super().__post_init__()
        SWITCH.check(self.freeze, "freeze")
        one_of(["attach", "fold"]).check(self.method.batchnorm, "batchnorm")
        one_of(["bottom-up"]).check(self.method.direction, "direction")
        self.method.check_one_variant()
        check_max_width(self.method.max_width, self.architecture.spec)

    def start(self) -> State:
        return State(0, self.architecture.form)

    def task(self, state: State, client: str) -> Task:
        member = state.members.get(client)
        own = member.tensors if member is not None else self._for_newcomers(state)
        return self._task(state, client, {**state.tensors, **own}, self._frozen(state))

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        members = dict(state.members)
        for update in updates:
            members[update.client] = Member(update.tensors, update.samples, update.class_counts)
        current = replace(state, members=members)
        networks = self._networks(current)
        if len(state.matched) == len(networks.spec.groups):
            return self._finish_pass(current, networks)
        return self._match_group(current, networks)

    def _frozen(self, state: State) -> Tensors:
        """The tensors that nobody changes any more in this pass."""
        return state.tensors if state.matched and self.freeze else {}

    def model(self, state: State) -> nn.Module:
        """The global model; the groups that are not matched yet are matched in one shot."""
        if not state.members:
            drawn = self.architecture.drawn(state.form, self.seed)
            return self.architecture.filled(state.form, drawn).eval()
        if not state.matched:
            model, spec = self.architecture.network(state.form)
            return self._with_batchnorm(model, spec, state.tensors)
        networks = self._networks(state)
        descent = self._descent(state, networks)
        descent.run("bottom-up", lambda step, done, total: None)
        tensors = self._merged(networks, descent.placements, self.method.restore_norm)
        folded = replace(networks, batchnorm=Normalisation.FOLD)
        model, spec, _ = folded.build(tensors, descent.widths)
        return self._with_batchnorm(model, spec, {})

    @property
    def layers(self) -> int:
        """The rounds of a pass."""
        groups = self.architecture.spec.groups.values()
        return 1 + sum(group.parent is None for group in groups)

    def _networks(self, state: State) -> Networks:
        """All members' networks, with normalisation folded so that neurons can be compared."""
        members = list(state.members.values())
        if len(members) < 2:
            raise InputError(
                f"found {len(members)} clients that sent weights, expected at least two to match; "
                "let more of them take part in a round"
            )
        clients = check_clients(
            [self.architecture.filled(state.form, {**state.tensors, **m.tensors}) for m in members],
            class_table(members),
            [member.samples for member in members],
            [f"client {name}" for name in state.members],
        )
        _, spec = self.architecture.network(state.form)
        return self.method.prepare(clients, self.architecture.example_inputs, spec)

    def _descent(self, state: State, networks: Networks) -> Descent:
        limits = None if state.round < self.layers else networks.spec.widths
        method = replace(self.method, seed=self.seed)
        return method.descent(networks, limits=limits, matched=state.matched)

    def _match_group(self, state: State, networks: Networks) -> State:
        """Settle the next group: its own tensors for all, the others in each client's way."""
        descent = self._descent(state, networks)
        descent.step(next_group(networks, "bottom-up", state.matched))
        matched = tuple(descent.placements[0])
        widths = {**state.form.widths, **descent.widths}
        frozen = self._frozen(state)
        names = [
            name
            for name in networks.spec.axes
            if name not in frozen and _is_settled(name, networks.spec, matched)
        ]
        merged = self._merged(networks, descent.placements, self.method.restore_norm, names)
        settled = {**frozen, **merged}
        _, spec = self.architecture.network(state.form)
        pairs = [
            pair for pair, weight in spec.foldable.items() if _is_settled(weight, spec, matched)
        ]
        members = {
            name: replace(
                member, tensors=_followed(networks.clients.models[s], spec, pairs, places, settled)
            )
            for s, ((name, member), places) in enumerate(
                zip(state.members.items(), descent.placements, strict=True)
            )
        }
        form = Form(widths, (*state.form.folded, *pairs))
        return State(state.round + 1, form, settled, matched, members)

    def _finish_pass(self, state: State, networks: Networks) -> State:
        """Average what no group settles, the output layer above all."""
        frozen = self._frozen(state)
        names = [name for name in networks.spec.axes if name not in frozen]
        tensors = {**frozen, **self._averaged(networks, names)}
        form = Form(state.form.widths, networks.spec.folded)
        members = {
            name: replace(member, tensors={n: t.clone() for n, t in tensors.items()})
            for name, member in state.members.items()
        }
        matched = () if self.freeze else state.matched
        return State(state.round + 1, form, tensors, matched, members)

    def _averaged(self, networks: Networks, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors of networks whose neurons are all in one order."""
        placements = [in_place(spec, spec.groups) for spec in networks.specs]
        return self._merged(networks, placements, False, names)

    def _merged(
        self,
        networks: Networks,
        placements: Sequence[Mapping[str, Positions]],
        restore_norm: bool,
        names: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        return merge(
            networks, placements, restore_norm=restore_norm, names=names, screen=self.method.screen
        )

    def _for_newcomers(self, state: State) -> dict[str, Tensor]:
        """What a client begins with that sent nothing yet, beside settled layers.

        In a first pass nothing: it draws weights of its own. After that all have the same order,
        and it takes the mean of the others.
        """
        if state.round < self.layers or not state.matched:
            return {}
        sent = next(iter(state.members.values())).tensors
        return self._averaged(self._networks(state), list(sent))

    def _with_batchnorm(self, model: nn.Module, spec: ModelSpec, tensors: Tensors) -> nn.Module:
        load_tensors(model, tensors)
        if self.method.batchnorm == "attach" and spec.folded:
            original, _ = self.architecture.network(self.architecture.form)
            model, _ = attach_batchnorm(model, spec, like=original)
        return model.eval()


def _is_settled(name: str, spec: ModelSpec, matched: Sequence[str]) -> bool:
    """Whether a tensor is part of neurons whose order, and that of all they read, is settled.

    A bias is settled with its weights.
    """
    if not spec.tensors[name].rows or not spec.tensors[name].groups <= set(matched):
        return False
    weights = [other for other in spec.tensors if spec.bias_of(other) == name]
    return all(_is_settled(other, spec, matched) for other in weights)


def _followed(
    model: nn.Module,
    spec: ModelSpec,
    pairs: Pairs,
    placements: Mapping[str, Positions],
    settled: Tensors,
) -> dict[str, Tensor]:
    """A client's tensors that are not settled, in the global order of the matched groups."""
    if pairs:
        model, spec = fold_batchnorm(model, spec, pairs)
    found: dict[str, Tensor] = {}
    for name, tensor in named_tensors(model).items():
        if name in spec.axes and name not in settled:
            lifted = lift(tensor.detach(), name, spec, placements)
            if spec.tensors[name].neutral:
                owned = lifted_rows(name, spec, placements) > 0
                lifted = torch.where(owned, lifted, spec.tensors[name].neutral)
            found[name] = lifted
    return found
