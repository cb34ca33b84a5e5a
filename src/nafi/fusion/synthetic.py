"""Inputs made of what batch normalisation remembers of the training data, for whoever has none.

Hides: how running statistics are watched and approached. Promises: the batch's statistics are never
further from the running ones than those of the noise it is made of; networks are left as they are;
the same networks give the same inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import InputError
from nafi.fusion.method import Progress
from nafi.fusion.probe import NOISE, SYNTHETIC, is_word, read_probe
from nafi.fusion.running import Remembered, remembers, watched_norms
from nafi.graph import Inputs, call, evaluating

_STEPS, _RATE = 30, 0.1  # of Adam, on inputs of deviation 1
# What a step keeps for its gradient grows with the inputs: fewer of large ones.
_INPUTS, _NUMBERS, _LEAST = 128, 2**21, 16


def read_or_make(
    probe: object, models: Sequence[nn.Module], example_inputs: Inputs, progress: Progress
) -> Inputs:
    """A probe that was given, or the one that "synthetic" stands for."""
    if is_word(probe, SYNTHETIC):
        return synthetic_probe(models, example_inputs, progress)
    return read_probe(probe, models[0], example_inputs)


def synthetic_probe(
    models: Sequence[nn.Module], example_inputs: Inputs, progress: Progress, steps: int = _STEPS
) -> Inputs:
    """Noise that was changed until all models' batch normalisations meet what they know.

    The means and deviations of what enters each normalisation approach the running ones, as in
    DeepInversion (Yin et al., 2020) and Fold-DIR (Wang et al., 2025), in steps of Adam.

    Cost: as many runs of every model as there are steps, forwards and backwards.
    """
    if not all(any(remembers(module) for module in model.modules()) for model in models):
        raise InputError(
            "probe: synthetic inputs are made of the running statistics of batch normalisation, "
            "which these networks do not have; probe='noise' needs none"
        )
    leaves, structure = pytree.tree_flatten(read_probe(NOISE, models[0], example_inputs))
    (noise,) = leaves
    made = noise[: max(_LEAST, min(_INPUTS, _NUMBERS // noise[0].numel()))].clone()
    best, least = made.clone(), float("inf")
    optimiser = torch.optim.Adam([made.requires_grad_()], lr=_RATE)
    for step in range(steps + 1):
        progress("making inputs of running statistics", step, steps)
        distance, made.grad = _distance(models, pytree.tree_unflatten([made], structure), made)
        if distance < least:
            best, least = made.detach().clone(), distance
        optimiser.step()
    inputs: Inputs = pytree.tree_unflatten([best], structure)
    return inputs


def statistics_distance(models: Sequence[nn.Module], inputs: Inputs) -> float:
    """How far the statistics of inputs are from the running ones, over all normalisations.

    The mean of the squared differences of channels' means and deviations, in running deviations.
    """
    return _distance(models, inputs, None)[0]


def _distance(
    models: Sequence[nn.Module], inputs: Inputs, of: Tensor | None
) -> tuple[float, Tensor | None]:
    """The same, with its gradient by a tensor; one model's run is held at a time."""
    total, gradient = 0.0, None if of is None else torch.zeros_like(of)
    for model in models:
        with _watched(model) as found, evaluating(model), torch.set_grad_enabled(of is not None):
            call(model, inputs)
            if not found:
                raise InputError("probe: the networks run none of their batch normalisations")
            mean = torch.stack(found).mean() / len(models)
            if of is not None and gradient is not None:
                gradient += torch.autograd.grad(mean, of)[0]
        total += float(mean.detach())
    return total, gradient


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[Tensor]]:
    """The distances at a model's normalisations, one for each time that one is used."""
    found: list[Tensor] = []

    def visit(remembered: Remembered, values: Tensor) -> None:
        others = [d for d in range(values.ndim) if d != 1]
        variance, mean = torch.var_mean(values, others, correction=0)
        deviation = (remembered.variance + remembered.eps).sqrt()
        shift = (mean - remembered.mean) / deviation
        stretch = (variance + remembered.eps).sqrt() / deviation - 1
        found.append(shift.square().mean() + stretch.square().mean())

    with watched_norms(model, visit):
        yield found
