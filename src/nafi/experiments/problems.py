"""What there is to learn: data, network, loss and score, by the name of the data.

Hides: that classes and masks are shared out, counted and scored differently. Promises: whoever runs
rounds asks a `Problem` and knows nothing of images.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nafi.experiments.data import Dataset
from nafi.experiments.entries import Record, accuracy, dice
from nafi.experiments.models import ConvNet, UNet
from nafi.experiments.partition import Index, dirichlet_partition, quantity_partition
from nafi.federated.samples import Samples, as_numbers
from nafi.federated.training import Loss

_PICTURES = 4

Partition = Callable[[Dataset, int, float, np.random.Generator], list[Index]]


def bce_and_dice(outputs: Tensor, masks: Tensor) -> Tensor:
    """Binary cross-entropy plus one minus the soft dice of the batch."""
    wanted = masks.float()
    shares = outputs.sigmoid()
    overlap = 2 * (shares * wanted).sum() + 1
    soft = overlap / (shares.sum() + wanted.sum() + 1)
    return F.binary_cross_entropy_with_logits(outputs, wanted) + 1 - soft


def predicted_masks(model: nn.Module, samples: Samples) -> list[Record]:
    """Masks of a few samples that lie far apart: where they lie, their size, and packed bits."""
    chosen = torch.linspace(0, len(samples) - 1, _PICTURES + 2).long()[1:-1]
    with torch.no_grad():
        found = (model(as_numbers(samples.inputs[chosen])) > 0)[:, 0].numpy()
    return [
        {
            "sample": int(index),
            "shape": list(mask.shape),
            "bits": base64.b64encode(np.packbits(mask).tobytes()).decode(),
        }
        for index, mask in zip(chosen, found, strict=True)
    ]


@dataclass(frozen=True)
class Problem:
    """A data set and how it is learnt.

    network: widths of its groups -> a network
    partition: (data, clients, alpha, generator) -> each client's samples
    score: (model, samples) -> percent, the higher the better; metric: what it is called
    classes: None where targets are no classes
    pictures: (model, samples) -> what a report can draw of a few samples, plain data
    """

    network: Callable[[Sequence[int]], nn.Module]
    partition: Partition
    loss: Loss
    score: Callable[[nn.Module, Samples], float]
    metric: str
    classes: int | None
    pictures: Callable[[nn.Module, Samples], list[Record]] | None = None


def _by_class(data: Dataset, clients: int, alpha: float, rng: np.random.Generator) -> list[Index]:
    return dirichlet_partition(data.train.labels.numpy(), clients, alpha, rng)


def _by_quantity(
    data: Dataset, clients: int, alpha: float, rng: np.random.Generator
) -> list[Index]:
    return quantity_partition(len(data.train), clients, alpha, rng)


PROBLEMS = {
    "cifar10": Problem(ConvNet, _by_class, F.cross_entropy, accuracy, "test accuracy", 10),
    "carvana": Problem(UNet, _by_quantity, bce_and_dice, dice, "test dice", None, predicted_masks),
}
