"""What there is to learn, by the name of the data.

Hides: that classes and masks are loaded, shared out, counted and scored differently. Promises: an
entry of `PROBLEMS` is all that a data set needs; whoever runs experiments knows nothing of images.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.experiments.data import (
    CARVANA_SIZE,
    NUCLEI_SIZE,
    Dataset,
    carvana,
    cifar10,
    digits,
    mnist,
    nuclei,
)
from nafi.experiments.entries import Record, accuracy, dice, token_accuracy
from nafi.experiments.models import (
    VGG,
    ConvNet,
    ResNet,
    UNet,
    drawn_mlp,
    resnet_widths,
    unet_widths,
)
from nafi.experiments.partition import (
    Index,
    class_partition,
    dealt_sites,
    dirichlet_partition,
    largest_sites,
    quantity_partition,
    site_partition,
)
from nafi.experiments.sequences import GPT, CharacterLSTM, ViT, transformer_widths
from nafi.experiments.text import CHARACTERS, all_characters, last_characters
from nafi.experiments.training import PAPER
from nafi.federated import Loss, Samples, Training, as_numbers

_PICTURES = 4

Size = tuple[int, int]


@dataclass(frozen=True)
class Network:
    """A network that can learn a problem.

    build: widths of its layers -> one with first weights, from torch's random numbers
    widths: where their number is fixed, unless an experiment gives others
    """

    build: Callable[[Sequence[int]], nn.Module]
    widths: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Problem:
    """A data set and how it is learnt.

    load: width and height of images, None for as they come -> the data
    networks: by name, the usual one first
    partition: (data, clients, alpha, generator) -> each client's samples
    score: (model, samples) -> percent, the higher the better; metric: what it is called
    training: what an experiment does not say about training
    classes: None where targets are no classes
    pictures: (model, samples) -> what a report can draw of a few samples, plain data
    loss_name: what the mean loss on test data is called in records; None where it is of no interest
    """

    load: Callable[[Size | None], Dataset]
    networks: Mapping[str, Network]
    partition: Callable[[Dataset, int, float, np.random.Generator], list[Index]]
    loss: Loss
    score: Callable[[nn.Module, Samples], float]
    metric: str
    training: Training
    classes: int | None
    pictures: Callable[[nn.Module, Samples], list[Record]] | None = None
    loss_name: str | None = None

    @property
    def usual_network(self) -> str:
        """The network of an experiment that names none."""
        return next(iter(self.networks))


def problem_named(name: str) -> Problem:
    """A problem by the name of its data."""
    if name not in PROBLEMS:
        raise InputError(f"there is no data set {name!r}; known: {', '.join(PROBLEMS)}")
    return PROBLEMS[name]


@lru_cache(maxsize=4)
def load_data(
    name: str, samples: int | None = None, seed: int = 0, size: Size | None = None
) -> Dataset:
    """A data set by its name.

    samples: so many of the training data, drawn by the seed; size: width and height of images, for
    data that come in several
    """
    data = problem_named(name).load(size)
    if samples is None:
        return data
    order = np.random.default_rng(seed).permutation(len(data.train))[:samples]
    return data.first(order)


def find_photo(
    sample: int, settings: Mapping[str, Any]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """A test photo, (height, width, 3), and its mask; settings: those of a record."""
    size = settings.get("size")
    test = load_data(settings["data"], size=tuple(size) if size else None).test
    return test.inputs[sample].movedim(0, -1).numpy(), test.labels[sample, 0].numpy()


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
        masks = (model(as_numbers(samples.inputs[chosen])) > 0)[:, 0].numpy()
    return [
        {
            "sample": int(index),
            "shape": list(mask.shape),
            "bits": base64.b64encode(np.packbits(mask).tobytes()).decode(),
        }
        for index, mask in zip(chosen, masks, strict=True)
    ]


def token_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of every place of a sequence; outputs: (N, T, C), labels: (N, T)."""
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def by_class(data: Dataset, clients: int, alpha: float, rng: np.random.Generator) -> list[Index]:
    """Each class shared out by Dir(alpha)."""
    return dirichlet_partition(data.train.labels.numpy(), clients, alpha, rng)


def by_own_classes(
    data: Dataset, clients: int, alpha: float, rng: np.random.Generator
) -> list[Index]:
    """Each class to one client alone, as many classes to each."""
    return class_partition(data.train.labels.numpy(), clients, rng)


def by_quantity(data: Dataset, clients: int, alpha: float, rng: np.random.Generator) -> list[Index]:
    """Samples of one kind shared out by Dir(alpha)."""
    return quantity_partition(len(data.train), clients, alpha, rng)


def by_site(data: Dataset, clients: int, alpha: float, rng: np.random.Generator) -> list[Index]:
    """As the data came to be: a client for each site, or two for the largest."""
    return site_partition(data.sites, clients, rng)


def by_role(data: Dataset, clients: int, alpha: float, rng: np.random.Generator) -> list[Index]:
    """The sites with most samples, a client for each."""
    return largest_sites(data.sites, clients)


def by_dealt_roles(
    data: Dataset, clients: int, alpha: float, rng: np.random.Generator
) -> list[Index]:
    """Each site goes to one client as a whole, about as many samples to each."""
    return dealt_sites(data.sites, clients, rng)


_SEGMENTED: dict[str, Any] = {
    "networks": {"unet": Network(UNet, tuple(unet_widths(8)))},
    "training": Training(),
    "loss": bce_and_dice,
    "score": dice,
    "metric": "test dice",
    "classes": None,
    "pictures": predicted_masks,
}
_CLASSIFIED: dict[str, Any] = {
    "partition": by_class,
    "loss": F.cross_entropy,
    "score": accuracy,
    "metric": "test accuracy",
    "classes": 10,
}

PROBLEMS: dict[str, Problem] = {
    "mnist": Problem(
        load=lambda size: mnist(),
        networks={"mlp": Network(partial(drawn_mlp, 784, 10))},
        training=PAPER,
        **_CLASSIFIED,
    ),
    "digits": Problem(
        load=lambda size: digits(),
        networks={"mlp": Network(partial(drawn_mlp, 64, 10))},
        training=PAPER,
        **_CLASSIFIED,
    ),
    "cifar10": Problem(
        load=lambda size: cifar10(),
        networks={
            "convnet": Network(ConvNet, (6, 16, 120, 84)),
            "vgg": Network(VGG, (16, 16, 32, 32, 64, 64)),
            "resnet": Network(ResNet, tuple(resnet_widths(12))),
            "vit": Network(ViT, tuple(transformer_widths(48, 4, 3))),
        },
        training=Training(),
        **_CLASSIFIED,
    ),
    "carvana": Problem(
        load=lambda size: carvana(*(size or CARVANA_SIZE)),
        partition=by_quantity,
        **_SEGMENTED,
    ),
    "nuclei": Problem(
        load=lambda size: nuclei(*(size or NUCLEI_SIZE)),
        partition=by_site,
        **_SEGMENTED,
    ),
    "shakespeare": Problem(
        load=lambda size: last_characters(),
        networks={"lstm": Network(CharacterLSTM, (8, 64))},
        training=Training(),
        **{**_CLASSIFIED, "partition": by_role, "classes": len(CHARACTERS)},
    ),
    "shakespeare-tokens": Problem(
        load=lambda size: all_characters(),
        networks={"gpt": Network(GPT, tuple(transformer_widths(64, 4, 2)))},
        training=Training(),
        partition=by_dealt_roles,
        loss=token_loss,
        score=token_accuracy,
        metric="test accuracy",
        classes=None,
        loss_name="test_loss",
    ),
}
