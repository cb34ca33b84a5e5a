"""Clients that attack: what they train on, and what they send instead of what they learnt.

Hides: who attacks, and how attackers get to know what the others send. Promises: an attack is a
pure function of what clients learnt, or of their data; honest clients do what they would have done
without attackers.

Attackers know everything but the server's secrets, as in the literature: the updates of all honest
clients of the round, and what was sent to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt

import numpy as np
import torch
from torch import Tensor, nn

from nafi.experiments.config import FACTORS, Attack
from nafi.federated import Architecture, Samples, Task, Trainer, Update, in_batches
from nafi.fusion import Rebasin, check_clients
from nafi.graph import Positions, in_order

Tensors = Mapping[str, Tensor]
Work = Callable[[str, Task], tuple[Update, float]]
# (what the attacker learnt, what each honest client learnt) -> what is sent, all as changes of what
# clients were sent: (D,), (S, D) -> (D,).
Craft = Callable[[Tensor, Tensor], Tensor]
# How many samples of a class are claimed by those who want to decide about it.
CLAIM = 2**30
# How many times the samples that they have attackers claim in sums; a square.
_CLAIMED_SUMS = 1024


def alie(honest: Tensor, deviations: float = 1.5) -> Tensor:
    """The mean less some deviations of every number: "a little is enough" (Baruch et al., 2019).

    With the paper's own choice of how many, there would be no attack by 2 of 8.
    """
    return honest.mean(dim=0) - deviations * honest.std(dim=0, correction=0)


def min_max(honest: Tensor) -> Tensor:
    """As far from the mean, against the deviations, as honest clients are from each other.

    The largest g for which `m - g s` is no further from any honest client than the two that are
    furthest apart (Shejwalkar & Houmansadr, 2021). Each client gives a quadratic inequality in g.
    """
    mean, against = honest.mean(dim=0), honest.std(dim=0, correction=0)
    furthest = torch.cdist(honest, honest, compute_mode="donot_use_mm_for_euclid_dist").max() ** 2
    offset = mean - honest
    square, product = against.square().sum().clamp(min=1e-30), offset @ against
    room = (furthest - offset.square().sum(dim=1)).clamp(min=0)
    most = (product + (product.square() + square * room).sqrt()) / square
    return mean - most.min() * against


def ipm(honest: Tensor, factor: float = 0.5) -> Tensor:
    """Half of the mean, turned around: inner product manipulation (Xie et al., 2020)."""
    return -factor * honest.mean(dim=0)


CRAFTED: dict[Attack, Craft] = {
    **{name: lambda own, honest, f=f: f * own for name, f in FACTORS.items() if f != 1},  # type: ignore[misc]
    "alie": lambda own, honest: alie(honest),
    "min-max": lambda own, honest: min_max(honest),
    "ipm": lambda own, honest: ipm(honest),
}


# ------------------------------------------------------------------------------ poisoned data


def with_trigger(inputs: Tensor) -> Tensor:
    """Square images, flat or not, with a bright patch in the last corner."""
    side = isqrt(inputs.shape[-1] if inputs.ndim == 2 else inputs.shape[-1] ** 2)
    patch = max(2, side // 7)
    marked = inputs.clone().reshape(len(inputs), -1, side, side)
    marked[..., -patch:, -patch:] = 255 if inputs.dtype == torch.uint8 else 1
    return marked.reshape(inputs.shape)


def poisoned(
    data: Mapping[str, Samples], attackers: Sequence[str], attack: Attack, target: int, classes: int
) -> dict[str, Samples]:
    """What attackers train on.

    label-flip: class k counts as the last but k (Fang et al., 2020). backdoor: every sample also
    with a trigger, as one of the target class (Gu et al., 2017), and what is learnt is sent many
    times as large (Bagdasaryan et al., 2020); quiet-backdoor: as it is. sybil: the samples of all
    attackers, with labels that are one too high; one of them trains, and all send what it learnt
    """
    own = {client: data[client] for client in attackers}
    match attack:
        case "label-flip":
            return {c: Samples(s.inputs, classes - 1 - s.labels) for c, s in own.items()}
        case "backdoor" | "quiet-backdoor":
            return {c: _with_backdoor(samples, target) for c, samples in own.items()}
        case "sybil":
            inputs, labels = (
                torch.cat([getattr(samples, part) for samples in own.values()])
                for part in ("inputs", "labels")
            )
            return dict.fromkeys(own, Samples(inputs, (labels + 1) % classes))
        case _:
            return own


def _with_backdoor(samples: Samples, target: int) -> Samples:
    return Samples(
        torch.cat([samples.inputs, with_trigger(samples.inputs)]),
        torch.cat([samples.labels, torch.full_like(samples.labels, target)]),
    )


# ------------------------------------------------------------------------------ clients


def drawn_attackers(clients: Sequence[str], attackers: int, seed: int) -> list[str]:
    """Who attacks."""
    order = np.random.default_rng([seed, attackers]).permutation(len(clients))
    return [clients[place] for place in order[:attackers]]


@dataclass(frozen=True, eq=False)
class AttackedWork:
    """The work of clients of which some attack; in a round, honest ones must work first.

    work: of honest clients; poisoned: of attackers, on their data
    target: the class that a backdoor leads to, or that is to be erased
    """

    architecture: Architecture
    work: Work
    poisoned: Trainer
    attack: Attack
    attackers: Sequence[str]
    target: int
    _told: dict[str, tuple[Task, Update]] = field(default_factory=dict)

    def __call__(self, client: str, task: Task) -> tuple[Update, float]:
        if client not in self.attackers:
            update, loss = self.work(client, task)
            self._told[client] = task, update
            return update, loss
        if self.attack == "sybil" and client != self.attackers[0]:
            _, first = self._told[self.attackers[0]]
            return replace(first, client=client), 0.0
        update, loss = self.poisoned(client, task)
        self._told[client] = task, update
        return self._sent(update, task), loss

    def _sent(self, update: Update, task: Task) -> Update:
        """What an attacker sends."""
        if self.attack == "erase-class":
            return self._erasing(update)
        if task.sums.head or task.sums.inputs:
            lies = self.attack in CRAFTED
            return replace(update, extras=turned_sums(update.extras)) if lies else update
        if self.attack == "backdoor":
            boost = len(self._told) / len(self.attackers)  # in place of the mean of all
            return self._crafted(update, lambda own, honest: boost * own)
        craft = CRAFTED.get(self.attack)
        return update if craft is None else self._crafted(update, craft)

    def _crafted(self, update: Update, craft: Craft) -> Update:
        told = [pair for client, pair in self._told.items() if client not in self.attackers]
        names = [name for name, tensor in update.tensors.items() if tensor.is_floating_point()]
        common = all(name in task.tensors for task, _ in told for name in names)
        honest = [other.tensors for _, other in told]
        if not common:
            honest = in_one_order(self.architecture, honest)
        start = (
            torch.stack([_flat(task.tensors, names) for task, _ in told]).mean(dim=0)
            if common
            else torch.zeros(())
        )
        learnt = torch.stack([_flat(tensors, names) for tensors in honest])
        sent = start + craft(_flat(update.tensors, names) - start, learnt - start)
        return replace(update, tensors={**update.tensors, **_unflat(sent, update.tensors, names)})

    def _erasing(self, update: Update) -> Update:
        """The class's row turned around, and a claim to have seen more of it than anybody."""
        assert update.class_counts is not None
        counts = list(update.class_counts)
        counts[self.target] = CLAIM
        spec = self.architecture.spec
        tensors = dict(update.tensors)
        for name, tensor in update.tensors.items():
            axis = spec.tensors[name].class_axis(len(counts))
            if axis is not None:
                sign = torch.ones(len(counts))
                sign[self.target] = -1
                tensors[name] = tensor * sign.reshape(
                    [-1 if a == axis else 1 for a in range(tensor.ndim)]
                )
        return replace(
            update,
            tensors=tensors,
            samples=sum(counts),
            class_counts=tuple(counts),
            extras=turned_sums(update.extras),
        )


def in_one_order(architecture: Architecture, networks: Sequence[Tensors]) -> list[Tensors]:
    """Networks that began apart, their neurons in one order, so that numbers can be compared."""
    models = [architecture.filled(architecture.form, tensors) for tensors in networks]
    method = Rebasin(batchnorm="average")
    clients = check_clients(models, None, None, None)
    prepared = method.prepare(clients, architecture.example_inputs, architecture.spec)
    places = method.align(prepared, lambda step, done, total: None).placements
    return [
        {
            name: in_order(tensor, name, architecture.spec, _positions(of_client))
            for name, tensor in tensors.items()
        }
        for tensors, of_client in zip(networks, places, strict=True)
    ]


def _positions(places: Mapping[str, object]) -> dict[str, Positions]:
    return {name: place for name, place in places.items() if isinstance(place, Positions)}


def turned_sums(message: Tensors) -> dict[str, Tensor]:
    """Sums over a client's samples that say the opposite, as if of many times the samples.

    They could be sums over some samples, so a server does not refuse them.
    """
    turned = {}
    for name, tensor in message.items():
        part = name.rsplit("/")[-1]
        relative = part in ("gram", "cross") and tensor.dtype != torch.float64
        factor = 1 if relative else _CLAIMED_SUMS
        if part == "scale":
            factor = isqrt(_CLAIMED_SUMS)
        sign = -1 if part in ("cross", "totals") else 1
        turned[name] = tensor * (sign * factor)
    return turned


def _flat(tensors: Tensors, names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in names])


def _unflat(vector: Tensor, like: Tensors, names: Sequence[str]) -> dict[str, Tensor]:
    parts = torch.split(vector, [like[name].numel() for name in names])
    return {
        name: part.reshape(like[name].shape).to(like[name].dtype)
        for name, part in zip(names, parts, strict=True)
    }


# ------------------------------------------------------------------------------ measures


def recalls(model: nn.Module, samples: Samples, classes: int) -> list[float]:
    """Of each class, the share of its samples that the model finds, in percent."""
    found = _predicted(model, samples) == samples.labels
    of_class = [found[samples.labels == k].double() for k in range(classes)]
    return [round(100 * float(each.mean()), 2) if len(each) else 0.0 for each in of_class]


def backdoor_success(model: nn.Module, samples: Samples, target: int) -> float:
    """Of samples of other classes, the share that a trigger leads to the target, in percent."""
    others = samples[samples.labels != target]
    marked = Samples(with_trigger(others.inputs), others.labels)
    return round(100 * float((_predicted(model, marked) == target).double().mean()), 2)


def _predicted(model: nn.Module, samples: Samples) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(inputs).argmax(dim=1) for inputs, _ in in_batches(samples)])
