"""Clients that train alone: one after the other, or all at once.

Hides: that clients' networks can be stacked and their steps taken together. Promises: each client
has its own batches and its own optimiser; sizes may differ. The two ways draw batches from
different seeds, so that their results differ as two seeds do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from nafi.errors import InputError
from nafi.federated import Loss, Samples, Training, make_optimiser, train

Parameters = dict[str, Tensor]
Progress = Callable[[int, int], None]

# As in the paper's MNIST experiments.
PAPER = Training(epochs=10, batch=32, optimiser="adam", rate=0.01, decay=1e-6)


def train_clients(
    models: Sequence[nn.Module],
    data: Sequence[Samples],
    training: Training,
    seed: int,
    progress: Progress | None = None,
) -> list[nn.Module]:
    """Train copies of the models together, each on its own samples, by their cross-entropy.

    seed: with the client's place decides its batches; progress: called with (epochs done, all)
    """
    # Larger clients first: those that still have batches left are then always the first ones.
    order = sorted(range(len(models)), key=lambda s: -len(data[s]))
    clients = _Stack([models[s] for s in order], training)
    generators = [np.random.default_rng([seed, s]) for s in order]
    sizes = [len(data[s]) for s in order]
    inputs = [data[s].inputs for s in order]
    labels = [data[s].labels for s in order]
    for epoch in range(training.epochs):
        if progress is not None:
            progress(epoch, training.epochs)
        orders = [
            torch.from_numpy(g.permutation(n)) for g, n in zip(generators, sizes, strict=True)
        ]
        for start in range(0, sizes[0], training.batch):
            active = sum(n > start for n in sizes)
            chosen = [orders[k][start : start + training.batch] for k in range(active)]
            clients.step(*_padded(chosen, inputs, labels, training.batch))
    trained = [copy.deepcopy(model) for model in models]
    for place, s in enumerate(order):
        weights = {name: value[place] for name, value in clients.parameters.items()}
        trained[s].load_state_dict(weights)
    return trained


def train_in_turn(
    models: Sequence[nn.Module],
    data: Sequence[Samples],
    training: Training,
    seed: int,
    progress: Progress | None = None,
    *,
    loss: Loss = F.cross_entropy,
    device: str = "cpu",
) -> list[nn.Module]:
    """Train copies of the models one after the other: any network and loss, on any device.

    seed: with the client's place decides its batches; progress: called with (clients done, all)
    """
    trained = [copy.deepcopy(model) for model in models]
    for s, (model, samples) in enumerate(zip(trained, data, strict=True)):
        if progress is not None:
            progress(s, len(trained))
        train(model, samples, training, seed=seed + s, loss=loss, device=device)
    return trained


def _padded(
    chosen: list[Tensor], inputs: list[Tensor], labels: list[Tensor], batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(clients, batch, ...) inputs, labels and weights; weight 0 for what only fills a batch up."""
    size = max(len(index) for index in chosen)
    filled = [F.pad(index, (0, size - len(index))) for index in chosen]
    weights = torch.zeros(len(chosen), size)
    for row, index in zip(weights, chosen, strict=True):
        row[: len(index)] = 1 / len(index)
    x = torch.stack([rows[index] for rows, index in zip(inputs, filled, strict=False)])
    y = torch.stack([rows[index] for rows, index in zip(labels, filled, strict=False)])
    return x, y, weights


class _Stack:
    """Networks of one architecture with their parameters stacked.

    The optimiser sees each client's parameters as views of the stack, so it is any of torch's, and
    keeps a state of its own for each client; a client without a gradient is passed over.
    """

    def __init__(self, models: Sequence[nn.Module], training: Training) -> None:
        stacked, buffers = stack_module_state(list(models))
        if buffers:
            raise InputError("train_clients: networks with buffers cannot be trained together")
        self.parameters = {name: value.detach().clone() for name, value in stacked.items()}
        self.proximal = training.proximal
        self.start = {n: p.clone() for n, p in self.parameters.items()} if self.proximal else {}
        self.views = [
            {name: nn.Parameter(value[k]) for name, value in self.parameters.items()}
            for k in range(len(models))
        ]
        parameters = [parameter for view in self.views for parameter in view.values()]
        self.optimiser = make_optimiser(parameters, training)
        skeleton = copy.deepcopy(models[0]).to("meta")

        def loss(weights: Parameters, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            logits = functional_call(skeleton, weights, (x,))
            return (F.cross_entropy(logits, y, reduction="none") * weight).sum()

        self.gradients = vmap(grad(loss))

    def step(self, x: Tensor, y: Tensor, weights: Tensor) -> None:
        """One step of the first clients, as many as there are batches."""
        active = len(x)
        first = {name: value[:active] for name, value in self.parameters.items()}
        gradients = self.gradients(first, x, y, weights)
        for name, start in self.start.items():
            gradients[name] += self.proximal * (first[name] - start[:active])
        for k, view in enumerate(self.views):
            for name, parameter in view.items():
                parameter.grad = gradients[name][k] if k < active else None
        self.optimiser.step()
