"""Neurons as what they do on a probe.

Hides: where the neurons of a group can be watched. Promises: a row for each neuron of each client,
such that the distance of two rows is that of their responses, whatever their scale and offset.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.linalg import eigh
from torch import Tensor

from nafi.fusion.features import NeuronTable
from nafi.fusion.heads import comparable_heads
from nafi.fusion.networks import Networks
from nafi.fusion.recording import READ, Activity, Recording
from nafi.graph import Block, ModelSpec, Segment, blocks

# The principal directions of all clients' neurons that are kept.
DIRECTIONS = 256


def response_table(networks: Networks, group: str) -> NeuronTable | None:
    """What the neurons of a group do, to be matched by; None if they cannot be watched.

    Neurons are watched where layers read them, after their activation function. Those that are
    silent there, and those that no layer reads, as queries and keys, are watched where layers write
    them. A group that holds others is compared by what is in it.

    Cost: a product of all clients' neurons with each other over `READ` places.
    """
    inside = networks.spec.children(group)
    if inside:
        tables = {name: response_table(networks, name) for name in inside}
        seen_inside = {name: table for name, table in tables.items() if table is not None}
        if len(seen_inside) < len(inside):
            return None
        return comparable_heads(networks, group, None, seen_inside)
    responses = []
    for recording, spec in zip(networks.recordings, networks.specs, strict=True):
        seen = _responses(recording, spec, group)
        if seen is None:
            return None
        responses.append(seen)
    most = max(seen.shape[-1] for seen in responses)  # fewer where no neuron is silent
    rows = principal_directions([_widened(seen.flatten(0, -2), most) for seen in responses])
    neurons = [
        row.reshape(*seen.shape[:-1], -1).numpy() for row, seen in zip(rows, responses, strict=True)
    ]
    return NeuronTable(neurons, [np.ones(neurons[0].shape[-1])] * len(neurons))


def plain_responses(networks: Networks, group: str) -> list[Tensor] | None:
    """(J, M) for each client what layers read of a group's neurons, as it is; None if none do."""
    responses = []
    for recording, spec in zip(networks.recordings, networks.specs, strict=True):
        seen = [recording.read.get(name) for name in spec.tensors_of(group)]
        read = _together(seen, spec, group)
        if read is None:
            return None
        responses.append(read.double())
    return responses


def principal_directions(rows: Sequence[Tensor]) -> list[Tensor]:
    """(J_s, D) for each client's (J_s, M), in the principal directions of all of them.

    Distances are kept as far as `DIRECTIONS` can. Cost: with n the smaller of all rows and M, some
    n^3 for the directions, and a product of all rows with each other, or of all columns.
    """
    stacked = torch.cat(list(rows))
    tall = len(stacked) > stacked.shape[1]
    vectors = _last_eigenvectors(stacked.T @ stacked if tall else stacked @ stacked.T)
    directions = vectors if tall else stacked.T @ vectors
    directions = torch.nn.functional.normalize(directions, dim=0)
    return list(torch.split(stacked @ directions, [len(of_client) for of_client in rows]))


def _last_eigenvectors(gram: Tensor) -> Tensor:
    """(n, DIRECTIONS) those of the largest eigenvalues, or (n, n) all if there are no more."""
    size = len(gram)
    if size < 2 * DIRECTIONS:
        every: Tensor = torch.linalg.eigh(gram)[1]
        return every[:, -DIRECTIONS:]
    # Where many are left out, finding only these takes less than half the time.
    chosen = [size - DIRECTIONS, size - 1]
    vectors = eigh(gram.numpy(), subset_by_index=chosen, driver="evr", overwrite_a=True)[1]
    return torch.from_numpy(vectors)


def _responses(recording: Recording, spec: ModelSpec, group: str) -> Tensor | None:
    """(J, M) responses of a group's neurons, (parent's width, J, M) within a parent.

    Each is centred and of norm one, in further columns if it is silent.
    """
    names = spec.tensors_of(group)
    read = _watched([recording.read.get(name) for name in names], spec, group)
    silent = None if read is None else ~read.any(dim=-1, keepdim=True)
    if silent is not None and not bool(silent.any()):
        return read
    written = _watched([recording.written.get((name, 0)) for name in names], spec, group)
    if read is None or silent is None or written is None:
        return read if written is None else written
    return torch.cat([read, torch.where(silent, written, 0.0)], dim=-1)


def _widened(rows: Tensor, width: int) -> Tensor:
    """With columns of zeros added up to a width."""
    missing = width - rows.shape[-1]
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows


def _watched(seen: Sequence[Activity | None], spec: ModelSpec, group: str) -> Tensor | None:
    together = _together(seen, spec, group)
    return None if together is None else _normalised(together)


def _together(seen: Sequence[Activity | None], spec: ModelSpec, group: str) -> Tensor | None:
    """(..., J, M) what was seen of a group's neurons, at no more than `READ` places or so."""
    parts = [part for activity in seen if activity for part in _parts(activity, spec, group)]
    if not parts:
        return None
    step = -(-sum(part.shape[-1] for part in parts) // READ)
    return torch.cat([part[..., ::step] for part in parts], dim=-1)


def _normalised(responses: Tensor) -> Tensor:
    """Centred and of norm one; a neuron that never changes is zero."""
    centred = responses.double()
    centred = centred - centred.mean(dim=-1, keepdim=True)
    norms = centred.norm(dim=-1, keepdim=True)
    noise = 1e-6 * responses.abs().amax(dim=-1, keepdim=True) * responses.shape[-1] ** 0.5
    return centred.div_(norms).masked_fill_(~(norms > noise), 0.0)


def _parts(seen: Activity, spec: ModelSpec, group: str) -> list[Tensor]:
    """The stretches of what was seen that are the group's neurons, each in a fixed order."""
    rows = (Segment((len(seen.values),)),)
    found = blocks([rows, *seen.axes], spec.widths)
    return [_by_neuron(seen.values, b, spec, group) for b in found if _is_of(b, spec, group)]


def _is_of(block: Block, spec: ModelSpec, group: str) -> bool:
    """Whether a block is the group's, once, and no other's than its parent's."""
    names = [factor for factor in block.factors if isinstance(factor, str)]
    parent = spec.groups[group].parent
    return sorted(names) == sorted(filter(None, [group, parent]))


def _by_neuron(values: Tensor, block: Block, spec: ModelSpec, group: str) -> Tensor:
    unfolded = block.unfold(values, spec.widths)
    parent = spec.groups[group].parent
    names = [name for name in (parent, group) if name is not None]
    first = unfolded.movedim([block.factors.index(n) for n in names], list(range(len(names))))
    return first.flatten(len(names))
