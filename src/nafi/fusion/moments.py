"""Mean squares of layers' inputs: a statistic that clients can send without their data.

Hides: hooks and sums over batches. Promises: for each layer that multiplies its inputs with a
weight, one number for each input channel, under the name of that weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.fusion.clients import Array
from nafi.fusion.features import INPUT_AXIS
from nafi.fusion.networks import Networks
from nafi.graph import evaluating, named_tensors, run_batches, shared_names

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def input_moments(
    model: nn.Module, batches: Iterable[Any], tensors: Sequence[str] | None = None
) -> dict[str, Array]:
    """Mean square of each input channel of the linear and convolutional layers.

    batches: inputs of the network, or tuples that begin with them, as a DataLoader gives
    tensors: names of the weights to answer for, such as ["fc1.weight"]; None for all

    The result of each client goes to `nafi.fuse(..., input_moments=[...])`.
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            values = inputs[0].detach().double()
            channel = -1 if isinstance(layer, nn.Linear) else 1
            flat = values.movedim(channel, -1).reshape(-1, values.shape[channel])
            sums[name] = sums.get(name, 0.0) + flat.square().sum(dim=0).cpu()
            counts[name] = counts.get(name, 0) + len(flat)

        return hook

    watched = _layers(model)
    unknown = [name for name in tensors or [] if name not in watched]
    if unknown or not watched:
        known = ", ".join(watched) or "none"
        raise InputError(f"input_moments: no layer has {', '.join(unknown)}; known: {known}")
    handles = [
        layer.register_forward_pre_hook(watch(name))
        for name, layer in watched.items()
        if tensors is None or name in tensors
    ]
    try:
        with evaluating(model):
            run_batches(model, batches, "input_moments")
    finally:
        for handle in handles:
            handle.remove()
    return {name: (total / counts[name]).numpy() for name, total in sums.items()}


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Weight -> the layer that multiplies its inputs with it, for plain weights of its own."""
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    shared = {name for pair in shared_names(model).items() for name in pair}
    layers: dict[str, nn.Module] = {}
    for layer in model.modules():
        plain = isinstance(layer, nn.Linear) or (
            isinstance(layer, _CONVOLUTIONS) and layer.groups == 1
        )
        name = names.get(id(layer.weight)) if plain else None
        if name is not None and name not in shared:
            layers[name] = layer
    return layers


def check_moments(networks: Networks) -> dict[str, list[Array]]:
    """The clients' moments by tensor; refuses what does not fit the networks."""
    sent = networks.clients.input_moments
    if sent is None:
        return {}
    clients = networks.clients
    listed = isinstance(sent, Sequence) and all(isinstance(client, Mapping) for client in sent)
    if not listed or len(sent) != len(clients):
        raise InputError(
            f"input_moments: expected a list with a dict for each of the {len(clients)} models"
        )
    by_tensor: dict[str, list[Array]] = {name: [] for name in sent[0]}
    for s, (moments, label) in enumerate(zip(sent, clients.names, strict=True)):
        if set(moments) != set(by_tensor):
            raise InputError(f"input_moments of {label}: found other tensors than in the first")
        for name, values in moments.items():
            spec = networks.specs[s]
            if name not in spec.tensors or len(spec.tensors[name].axes) <= INPUT_AXIS:
                raise InputError(
                    f"input_moments of {label}: {name} is no weight of a linear or convolutional "
                    "layer; nafi.input_moments says which have moments"
                )
            try:
                array = np.asarray(values, dtype=np.float64)
            except (TypeError, ValueError):
                raise InputError(f"input_moments of {label}: {name} needs numbers") from None
            size = spec.shape(name)[INPUT_AXIS]
            if array.shape != (size,) or not np.isfinite(array).all() or (array < 0).any():
                raise InputError(
                    f"input_moments of {label}: {name} needs {size} numbers of at least 0, one for "
                    f"each input, found shape {array.shape}"
                )
            if not array.any():
                raise InputError(f"input_moments of {label}: all inputs of {name} are zero")
            by_tensor[name].append(array)
    return by_tensor
