"""Whose word counts for an input: that of the clients that have seen its like.

Hides: how an input is compared with what a client was trained on. Promises: weights of clients for
each input, from the networks alone; None where they do not remember their inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nafi.fusion.probe import batch_size
from nafi.fusion.running import Remembered, watched_norms
from nafi.graph import Inputs, call, evaluating

# No client is left out altogether: it may be the only one that knows a class.
_LEAST = 1e-12


def familiarity(models: Sequence[nn.Module], inputs: Inputs) -> Tensor | None:
    """(S, N) how much each client's word counts for each input; the most familiar one counts 1.

    `w_s(x) = exp(-d_s(x))` up to a factor for each x, with d_s as in `watched_distances`. With the
    clients' shares of all samples as a prior, `share_s w_s(x)` is a tempered posterior of whose
    data x is of. None if a network runs no batch normalisation that has running statistics.

    Cost: one run of every model.
    """
    distances = []
    for model in models:
        with watched_distances(model) as found, evaluating(model):
            call(model, inputs)
        if not found or len(found[0]) != batch_size(inputs):
            return None
        distances.append(found[0])
    return as_weights(distances)


def as_weights(distances: Sequence[Tensor]) -> Tensor:
    """(S, N) weights of each client's (N,) distances."""
    stacked = torch.stack(list(distances))
    return torch.exp(stacked.amin(dim=0) - stacked).clamp(min=_LEAST)


@contextmanager
def watched_distances(model: nn.Module) -> Iterator[list[Tensor]]:
    """While a model runs once, how far every input is from what the model was trained on: [(N,)].

    At the first batch normalisation that runs, an input has a mean and a variance over its places
    in each channel, and so have all inputs of the training data, the running ones. The distance is
    `KL(N(mean, variance) || N(running mean, running variance))`, the mean over channels; for an
    input of a single place, which has no variance, only half of its squared distance from the
    mean. Later normalisations see what clients made of an input, and tell less.
    """
    found: list[Tensor] = []

    def visit(remembered: Remembered, values: Tensor) -> None:
        if not found:
            found.append(_distance(remembered, values.detach()))

    with watched_norms(model, visit):
        yield found


def _distance(remembered: Remembered, values: Tensor) -> Tensor:
    """(N,) of values (N, C, ...)."""
    places = values.reshape(*values.shape[:2], -1)
    expected = remembered.variance.double() + remembered.eps
    mean = places.mean(dim=-1).double()
    distance = (mean - remembered.mean.double()).square() / expected
    if places.shape[-1] > 1:
        ratio = (places.var(dim=-1, correction=0).double() + remembered.eps) / expected
        distance = distance + ratio - 1 - ratio.log()
    return distance.mean(dim=1) / 2
