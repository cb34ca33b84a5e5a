"""Training one network on one client's samples.

Hides: batches, optimisers, and that what is frozen is computed once. Promises: frozen tensors are
bit for bit as before; the result depends on the weights, the samples and the seed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.federated.prefix import CACHE_BYTES, Split, split
from nafi.federated.randomness import seeded
from nafi.federated.samples import Samples, as_numbers
from nafi.graph import holds_numbers, named_tensors

Loss = Callable[[Tensor, Tensor], Tensor]
Optimiser = Literal["sgd", "adam", "rmsprop"]


@dataclass(frozen=True)
class Training:
    """How a client trains in one round.

    momentum: of sgd and rmsprop; decay: of all weights; adam keeps the maximum of its second
        moments (amsgrad), as in the paper's MNIST experiments
    proximal: mu of FedProx, which adds `mu/2 ||w - w_start||^2` to the loss
    """

    epochs: int = 10
    batch: int = 32
    optimiser: Optimiser = "sgd"
    rate: float = 0.01
    momentum: float = 0.0
    decay: float = 0.0
    proximal: float = 0.0

    def __post_init__(self) -> None:
        if self.optimiser not in get_args(Optimiser):
            known = ", ".join(get_args(Optimiser))
            raise InputError(f"optimiser: found {self.optimiser!r}, expected one of {known}")
        for name, least in (("epochs", 0), ("batch", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InputError(f"{name}: found {value!r}, expected a whole number from {least}")
        for name in ("rate", "momentum", "decay", "proximal"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value < inf
            ):
                raise InputError(f"{name}: found {value!r}, expected a number of at least 0")


def make_optimiser(parameters: Iterable[Tensor], training: Training) -> torch.optim.Optimizer:
    """The optimiser of a training, fused where torch can."""
    trained, rate, decay = list(parameters), training.rate, training.decay
    match training.optimiser:
        case "sgd":
            return torch.optim.SGD(
                trained, rate, momentum=training.momentum, weight_decay=decay, fused=True
            )
        case "adam":
            return torch.optim.Adam(trained, rate, weight_decay=decay, amsgrad=True, fused=True)
        case "rmsprop":
            return torch.optim.RMSprop(
                trained, rate, momentum=training.momentum, weight_decay=decay, foreach=True
            )


def train(
    model: nn.Module,
    samples: Samples,
    training: Training,
    *,
    seed: int,
    frozen: Collection[str] = (),
    loss: Loss = F.cross_entropy,
    device: str = "cpu",
    cache_bytes: int = CACHE_BYTES,
) -> float:
    """Train a network in place; returns the mean loss of the last epoch.

    frozen: tensors that keep their values, beside parameters that require no gradient. What the
        network computes from them and the inputs alone is computed once for all epochs, if it takes
        no more than `cache_bytes`.
    """
    if not len(samples):
        raise InputError("a client without samples cannot train")
    check_device(device)
    # Convolutions are faster with the channels of images last.
    images = samples.inputs.ndim == 4 and all(p.ndim < 5 for p in model.parameters())
    layout = torch.channels_last if images else torch.contiguous_format
    model.to(device).to(memory_format=layout).train()  # type: ignore[call-overload]
    mean = float("nan")
    with _frozen(model, frozen):
        learnt = [p for p in model.parameters() if p.requires_grad]
        if learnt:
            inputs = samples.inputs.contiguous(memory_format=layout)
            outputs_of = _cached(model, inputs, frozen, device, cache_bytes) if frozen else None
            if outputs_of is None:
                outputs_of = lambda index: model(as_numbers(inputs[index].to(device)))  # noqa: E731
            values = lambda index: loss(outputs_of(index), samples.labels[index].to(device))  # noqa: E731
            with seeded(seed, device):  # for what networks draw themselves, as dropout does
                mean = _descend(values, learnt, len(samples), training, seed)
    model.to("cpu").to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
    return mean


def _descend(
    values: Callable[[Tensor], Tensor],
    learnt: Sequence[Tensor],
    count: int,
    training: Training,
    seed: int,
) -> float:
    """All epochs; returns the mean loss of the last.

    values: the loss of samples by their numbers; learnt: the parameters to train
    """
    pulled = [(p, p.detach().clone()) for p in learnt] if training.proximal else []
    optimiser = make_optimiser(learnt, training)
    rng = np.random.default_rng(seed)
    total = 0.0
    for _ in range(training.epochs):
        total = 0.0
        for index in batches(count, training.batch, rng):
            value = values(index)
            _step(optimiser, value, pulled, training.proximal)
            total += float(value.detach()) * len(index)
    return total / count


def _step(
    optimiser: torch.optim.Optimizer,
    value: Tensor,
    pulled: Sequence[tuple[Tensor, Tensor]],
    proximal: float,
) -> None:
    """One step down the loss and, for FedProx, towards where each parameter started."""
    optimiser.zero_grad()
    value.backward()  # type: ignore[no-untyped-call]
    for parameter, before in pulled:
        if parameter.grad is not None:
            parameter.grad.add_(parameter.detach() - before, alpha=proximal)
    optimiser.step()


def check_device(name: str) -> None:
    """Refuse a device that torch does not know or that is not here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InputError(f"device: {name!r} cannot be used here; cpu always can") from None


def batches(count: int, size: int, rng: np.random.Generator) -> Iterator[Tensor]:
    """The samples of an epoch in random order.

    A last sample that would be alone joins the batch before: its variance could not be normalised.
    """
    order = torch.from_numpy(rng.permutation(count))
    cuts = list(range(size, count, size))
    if cuts and count - cuts[-1] == 1:
        cuts.pop()
    yield from torch.tensor_split(order, cuts)


@contextmanager
def _frozen(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let nothing change some tensors for a while: neither gradients nor running statistics.

    A normalisation whose statistics are frozen uses them, as it will in the global model.
    Parameters that learnt before learn again afterwards; what the user froze stays so.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    held = [p for name, p in parameters.items() if name in names and p.requires_grad]
    for parameter in held:
        parameter.requires_grad_(False)
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            buffers = module.named_buffers(prefix=path, recurse=False)
            statistics = [name for name, buffer in buffers if holds_numbers(buffer)]
            if statistics and all(name in names for name in statistics):
                module.eval()
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)


def _cached(
    model: nn.Module, inputs: Tensor, frozen: Collection[str], device: str, limit: int
) -> Callable[[Tensor], Tensor] | None:
    """The network as a function of sample numbers, with its frozen part computed beforehand."""
    names = {name for name in frozen if name in named_tensors(model)}
    parts: Split | None = split(model, names, as_numbers(inputs[:2].to(device)))
    if parts is None or parts.bytes_per_sample * len(inputs) > limit:
        return None
    known = parts.known(inputs, device)
    return lambda index: parts.rest(*(values[index].to(device) for values in known))
