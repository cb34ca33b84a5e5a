"""Layer by layer (Algorithm `alg2` of the paper; with pfnm it is FedMA).

Hides: which tensors are settled with a group of neurons, and how each client's other tensors follow
its order. Promises: in every round one group is matched, broadcast and frozen; parallel branches
that share it go together; the last round of a pass averages the output layer by class shares. The
clients' networks are prepared once a round, whoever asks for the global model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any, ClassVar

from torch import Tensor, nn

from nafi.errors import InputError, few
from nafi.federated.architecture import Form, Tensors, load_tensors
from nafi.federated.disk import on_disk
from nafi.federated.kept import KeptModels, networks_of
from nafi.federated.latest import Latest
from nafi.federated.request import Request
from nafi.federated.statistics import expected_sums, probing_inputs, read_layer, sums_name
from nafi.federated.strategies import strategy
from nafi.federated.strategy import (
    State,
    Strategy,
    Task,
    Update,
    check_shapes,
    class_table,
    tensors_of,
)
from nafi.fusion import (
    Bayesian,
    Descent,
    LayerStatistics,
    Method,
    Nafi,
    Networks,
    Screen,
    bounded_sums,
    check_class_axis,
    check_clients,
    check_max_width,
    in_place,
    merge_tensors,
    next_group,
    pool_layers,
    prepare_networks,
    width_limits,
)
from nafi.graph import (
    ModelSpec,
    Placements,
    attach_batchnorm,
    fold_batchnorm,
    in_order,
    named_tensors,
)
from nafi.options import SWITCH, number, one_of, option, optional, whole

Pairs = Sequence[tuple[str, str]]
Places = Sequence[Placements]
# Weight -> what every client summed of what its layer reads.
Moments = Mapping[str, Sequence[LayerStatistics]]

# Options of methods that would change nothing here, each with the reason and what to do.
_UNUSED = {
    "budget": (
        "a layer's width is settled before it is known what the layers above will cost; give "
        "max_width"
    ),
    "tree": "all clients that are remembered are matched at once; keep= bounds their number",
    "ray": "clients are not matched in groups that could be worked on side by side; leave it out",
}


@dataclass(frozen=True, eq=False)
class Member:
    """What the server remembers of a client: its own weights, and its counts.

    tensors: where they differ from those of the state
    """

    tensors: Tensors
    samples: int
    class_counts: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class LayerwiseState(State):
    """form, tensors: of what is settled, and of the global model at the end of a pass.

    matched: the groups whose order is settled in this pass
    members: what is remembered of clients
    """

    matched: tuple[str, ...] = ()
    members: Mapping[str, Member] = field(default_factory=dict)


@strategy("layerwise")
@dataclass(frozen=True, eq=False)
class Layerwise(Strategy[LayerwiseState]):
    """Match a group, broadcast it, freeze it, let clients retrain what follows, go on to the next.

    A pass takes a round for each group and one for the output layer. Rounds beyond that begin
    another pass at the widths of the first; without freezing, they average all layers. A client
    that missed a round counts with the weights it sent last, which the server keeps in the order
    of the global model: it may come back at any time, and a new one begins with the settled layers
    and weights of its own for the rest.

    freeze: whether clients leave settled layers as they are; else they train them on, and these
        layers are averaged in every round
    moments: clients also send second moments of what the next layers read, without labels. A merged
        layer is then the posterior mean in which each client knows its neurons with the precision
        of its own inputs; settled layers must be frozen. ridge: of that, in units of their mean
    keep: how many clients are remembered at most, those that sent last, beside all of a round; None
        for every client until it expires. Where few are sampled of many, it bounds what is kept
        and matched: a client that is no longer remembered comes back as a new one
    method: how groups are matched; with pfnm the strategy is FedMA. A layer's normalisation is
        folded into it, with each client's own statistics, when the layer is matched; its
        batchnorm="attach" gives the final model an identity in its place to train on, "fold"
        leaves it folded. How wide groups may be is said by max_width, not by a budget

    The server keeps one set of weights for every client, on disk.
    """

    state_type: ClassVar[type[State]] = LayerwiseState
    method_kind: ClassVar[type[Method] | None] = Bayesian

    freeze: bool = option(SWITCH, True)
    moments: bool = option(SWITCH, False)
    ridge: float = option(number(above=0), 0.01)
    keep: int | None = option(optional(whole(2)), None)
    method: Bayesian = field(default_factory=Nafi)
    _latest: Latest[Networks] = field(init=False, repr=False, default_factory=Latest)
    _newcomers: Latest[Tensors] = field(init=False, repr=False, default_factory=Latest)
    _requests: Latest[dict[str, Any]] = field(init=False, repr=False, default_factory=Latest)
    _fixed: list[dict[str, str]] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(["attach", "fold"]).check(self.method.batchnorm, "batchnorm")
        one_of(["bottom-up"]).check(self.method.direction, "direction")
        for name, why in _UNUSED.items():
            found = getattr(self.method, name)
            if found is not None:
                raise InputError(f"{name}: found {found!r}, but layerwise does not use it: {why}")
        self.method.check_in_rounds()
        check_max_width(self.method.max_width, self.architecture.spec)
        if self.moments and not self.freeze:
            raise InputError("moments: they need settled layers that stay as they are: freeze=True")
        if self.moments and self.method.trim:
            raise InputError(
                "moments: they would fit outliers that trim leaves out; leave trim out"
            )

    @property
    def screen(self) -> Screen:
        return self.method.screen

    def check_classes(self, classes: int | None) -> None:
        if classes is not None:
            check_class_axis(classes, self.architecture.spec)

    def check_state(self, state: LayerwiseState) -> None:
        super().check_state(state)
        spec = self.architecture.spec_of(state.form)
        unknown = [name for name in state.matched if name not in spec.groups]
        if unknown:
            raise InputError(f"there is no group {few(unknown)}")
        shapes = self.architecture.shapes(state.form)
        for member in state.members.values():
            check_shapes(member.tensors, shapes)
            missing = [n for n in shapes if n not in member.tensors and n not in state.tensors]
            if missing:
                raise InputError(f"{few(missing)} is missing")

    def start(self) -> LayerwiseState:
        return LayerwiseState(0, self.architecture.form)

    def task(self, state: LayerwiseState, client: str) -> Task:
        member = state.members.get(client)
        start = member.tensors if member is not None else self._for_newcomers(state)
        self._latest.forget()  # clients train now, which takes memory
        task = self._task(state, client, {**state.tensors, **start}, self._frozen(state))
        return replace(task, **self._asked(state)) if self.moments else task

    def aggregate(self, state: LayerwiseState, updates: Iterable[Update]) -> LayerwiseState:
        self._latest.forget()
        members = dict(state.members)
        messages = {}
        for update in updates:
            if self.keep is not None:
                members.pop(update.client, None)  # who sent last comes last
            own = on_disk(update.tensors)
            members[update.client] = Member(own, update.samples, update.class_counts)
            messages[update.client] = on_disk(update.extras)
        if self.keep is not None:
            for client in list(members)[: -max(self.keep, len(messages))]:
                del members[client]
        current = replace(state, members=members)
        networks = self._prepared(current)
        if len(state.matched) == len(networks.spec.groups):
            return self._finish_pass(current, networks)
        return self._match_group(current, networks, self._moments_of(state, members, messages))

    def model(self, state: LayerwiseState) -> nn.Module:
        """The global model; the groups that are not matched yet are matched in one shot."""
        if not state.members:
            drawn = self.architecture.drawn(state.form, self.seed)
            return self.architecture.filled(state.form, drawn).eval()
        if not state.matched:
            return self._with_batchnorm(state.form, state.tensors)
        networks = self._screened(self._networks(state))
        descent = self._descent(state, networks)
        descent.run("bottom-up", lambda step, done, total: None)
        tensors = self._merged(networks, descent.placements, self.method.restore_norm)
        return self._with_batchnorm(Form(descent.widths, networks.spec.folded), tensors)

    def _asked(self, state: LayerwiseState) -> dict[str, Any]:
        """The task's entries that ask for moments of what the layers read that may come next."""
        return self._requests.get(state, lambda: self._request(state))

    def _request(self, state: LayerwiseState) -> dict[str, Any]:
        model, spec = self.architecture.network(state.form)
        weights = tuple(name for name in spec.tensors if _is_next(name, spec, state.matched))
        request = Request(inputs=weights, precision=self.precision)
        asks = expected_sums(model, self.architecture.example_inputs, request)
        # What is not multiplied with inputs has none.
        known = tuple(name for name in weights if sums_name(name) in asks)
        return {"asks": asks, "sums": replace(request, inputs=known)}

    def _moments_of(
        self, state: LayerwiseState, members: Iterable[str], messages: Mapping[str, Tensors]
    ) -> Moments:
        """Weight -> the sums of every member; for those that sent none, the mean of the others."""
        if not self.moments:
            return {}
        request = self._asked(state)["sums"]
        moments = {}
        for name in request.inputs:
            sums = [read_layer(message, name, request) for message in messages.values()]
            # Means over inputs: clients count alike, as in a merge.
            means = [each.scaled(1 / float(each.count)) for each in sums]
            if self.method.clip is not None:
                means = bounded_sums(means, self.method.clip**2)
            sent = dict(zip(messages, means, strict=True))
            mean = reduce(add, sent.values()).scaled(1 / len(sent))
            moments[name] = [sent.get(client, mean) for client in members]
        return moments

    @property
    def layers(self) -> int:
        """The rounds of a pass."""
        groups = self.architecture.spec.groups.values()
        return 1 + sum(group.parent is None for group in groups)

    def _frozen(self, state: LayerwiseState) -> Tensors:
        """The tensors that nobody changes any more in this pass."""
        return state.tensors if state.matched and self.freeze else {}

    def _networks(self, state: LayerwiseState) -> Networks:
        """The networks of a state; `aggregate` leaves those of the state it returns."""
        return self._latest.get(state, lambda: self._prepared(state))

    def _prepared(self, state: LayerwiseState) -> Networks:
        """All members' networks, with normalisation folded so that neurons can be compared."""
        members = list(state.members.values())
        if len(members) < 2:
            raise InputError(
                f"found {len(members)} clients that sent weights, expected at least two to match; "
                "let more of them take part in a round"
            )
        states = [{**state.tensors, **member.tensors} for member in members]
        clients = check_clients(
            networks_of(self.architecture, state.form, states, self.method),
            class_table(member.class_counts for member in members),
            [member.samples for member in members],
            [f"client {name}" for name in state.members],
        )
        spec = self.architecture.spec_of(state.form)
        return prepare_networks(
            clients, self.architecture.example_inputs, spec, self.method.batchnorm
        )

    def _networks_after(
        self, networks: Networks, placements: Places, settled: Tensors, form: Form
    ) -> Networks:
        """The networks after a round, from those before: what `_prepared` would make of its state.

        Settled tensors are the same in all, the others follow their neurons.
        """
        original, spec = self.architecture.network(form)
        template, folded = fold_batchnorm(original, spec) if spec.batchnorms else (original, spec)
        count = len(networks.clients)
        states = []
        for before, fitted, places in zip(networks.states, networks.specs, placements, strict=True):
            own = {
                name: in_order(before[name], name, fitted, places)
                for name in fitted.axes
                if name not in settled
            }
            state = {**settled, **on_disk(own)}
            states.append(state | {other: state[name] for other, name in fitted.aliases.items()})
        # Nobody asks for these models: the states have all that is new.
        models: Sequence[nn.Module] = (original,) * count
        if networks.clients.stored:
            models = KeptModels(self.architecture, form, states)
        return replace(
            networks,
            clients=replace(networks.clients, models=models),
            make_template=lambda: template,
            architecture=spec,
            specs=(folded,) * count,
            states=tuple(states),
        )

    def _screened(self, networks: Networks) -> Networks:
        return networks.screened(self.method.screen)

    def _descent(self, state: LayerwiseState, networks: Networks) -> Descent:
        limits = networks.spec.widths if state.round >= self.layers else self._limits(networks)
        method = self.seeded(self.method)
        return method.descent(networks, limits=limits, matched=state.matched)

    def _limits(self, networks: Networks) -> Mapping[str, int]:
        """The widest that groups may be in the first pass."""
        # Which widths its code fixes is the same for a network at all widths. Tied groups are not
        # matched in one round, so that they cannot grow together.
        if not self._fixed:
            tied = (name for tie in networks.tied_widths for name in tie)
            reason = "it is tied to groups that are matched in other rounds"
            self._fixed.append({**dict.fromkeys(tied, reason), **networks.fixed_widths})
        return width_limits(networks, self.method.max_width, self._fixed[0])

    def _match_group(
        self, state: LayerwiseState, prepared: Networks, moments: Moments
    ) -> LayerwiseState:
        """Settle the next group: its own tensors for all, the others in each client's way."""
        networks = self._screened(prepared)
        descent = self._descent(state, networks)
        descent.step(next_group(networks, "bottom-up", state.matched))
        placements = descent.placements
        matched = tuple(placements[0])
        frozen = self._frozen(state)
        names = [
            name
            for name in networks.spec.axes
            if name not in frozen and _is_settled(name, networks.spec, matched)
        ]
        merged = self._merged(networks, placements, self.method.restore_norm, names)
        spec = self.architecture.spec_of(state.form)
        pairs = [
            pair for pair, weight in spec.foldable.items() if _is_settled(weight, spec, matched)
        ]
        form = Form({**state.form.widths, **descent.widths}, (*state.form.folded, *pairs))
        settled = {**frozen, **merged}
        sums = {name: moments[name] for name in merged if name in moments}
        if sums:
            settled |= self._pooled(networks, placements, settled, form, sums)
        members = {
            name: replace(member, tensors=on_disk(_followed(model, spec, pairs, places, settled)))
            for (name, member), model, places in zip(
                state.members.items(), prepared.clients.models, placements, strict=True
            )
        }
        after = LayerwiseState(state.round + 1, form, settled, matched, members)
        return self._remembered(after, prepared, placements)

    def _pooled(
        self,
        networks: Networks,
        placements: Places,
        settled: Tensors,
        form: Form,
        sums: Mapping[str, Sequence[LayerStatistics]],
    ) -> dict[str, Tensor]:
        """The settled tensors, with layers fitted to what members compute on their own inputs."""
        model, spec = self.architecture.network(form)
        load_tensors(model, settled)
        inputs = probing_inputs(self.architecture.example_inputs)
        pool_layers(networks, placements, model, spec, inputs, sums, ridge=self.ridge)
        return tensors_of(model, settled)

    def _finish_pass(self, state: LayerwiseState, prepared: Networks) -> LayerwiseState:
        """Average what no group settles, the output layer above all."""
        networks = self._screened(prepared)
        frozen = self._frozen(state)
        names = [name for name in networks.spec.axes if name not in frozen]
        tensors = {**frozen, **self._averaged(networks, names)}
        form = Form(state.form.widths, networks.spec.folded)
        # All go on from the global model, and nothing is their own any more.
        members = {name: replace(member, tensors={}) for name, member in state.members.items()}
        if self.freeze:  # another pass begins, and the global model is there as it is
            return LayerwiseState(state.round + 1, form, tensors, (), members)
        after = LayerwiseState(state.round + 1, form, tensors, state.matched, members)
        return self._remembered(after, prepared, _all_in_place(prepared))

    def _remembered(
        self, after: LayerwiseState, networks: Networks, placements: Places
    ) -> LayerwiseState:
        """The state, whose networks are made of those before if anybody asks for them."""
        settled, form = after.tensors, after.form
        self._latest.expect(
            after, lambda: self._networks_after(networks, placements, settled, form)
        )
        return after

    def _averaged(self, networks: Networks, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors of networks whose neurons are all in one order."""
        return self._merged(networks, _all_in_place(networks), False, names)

    def _merged(
        self,
        networks: Networks,
        placements: Places,
        restore_norm: bool,
        names: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        return merge_tensors(
            networks, placements, restore_norm=restore_norm, names=names, screen=self.method.screen
        )

    def _for_newcomers(self, state: LayerwiseState) -> Tensors:
        """What a client begins with that sent nothing yet, beside settled layers.

        In a first pass nothing: it draws weights of its own. After that all have the same order,
        and it takes the mean of the others.
        """
        if state.round < self.layers or not state.matched:
            return {}
        sent = list(next(iter(state.members.values())).tensors)
        if not sent:
            return {}
        return self._newcomers.get(
            state, lambda: self._averaged(self._screened(self._networks(state)), sent)
        )

    def _with_batchnorm(self, form: Form, tensors: Tensors) -> nn.Module:
        """The network of this form and these tensors, with an identity for what is folded."""
        model, spec = self.architecture.network(form)
        load_tensors(model, tensors)
        if self.method.batchnorm == "attach" and spec.folded:
            original, _ = self.architecture.network(self.architecture.form)
            model, _ = attach_batchnorm(model, spec, like=original)
        return model.eval()


def _all_in_place(networks: Networks) -> Places:
    return [in_place(spec, spec.groups) for spec in networks.specs]


def _is_next(name: str, spec: ModelSpec, matched: Sequence[str]) -> bool:
    """Whether a weight reads nothing but what is settled, and is part of neurons that are not."""
    meaning, settled = spec.tensors[name], set(matched)
    reads = meaning.groups_on(meaning.reads)
    return bool(meaning.reads) and reads <= settled and not meaning.groups <= settled


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
    placements: Placements,
    settled: Tensors,
) -> dict[str, Tensor]:
    """A client's tensors that are not settled, in the global order of the matched groups."""
    if pairs:
        model, spec = fold_batchnorm(model, spec, pairs)
    return {
        name: in_order(tensor.detach(), name, spec, placements)
        for name, tensor in named_tensors(model).items()
        if name in spec.axes and name not in settled
    }
