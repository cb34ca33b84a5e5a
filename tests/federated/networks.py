"""Small networks and clients for federated tests; module-level, so that processes can have them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nafi.federated import Architecture, Samples, State, Strategy, Update
from nafi.graph.trace import named_tensors

FEATURES, CLASSES = 6, 3


class Small(nn.Module):
    """Two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(FEATURES, 5)
        self.two = nn.Linear(5, 4)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.two(self.one(x).relu()).relu())
        return found


class Normed(nn.Module):
    """Two convolutions with batch normalisation, the second one reading both inputs and skip."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 5, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(5)
        self.conv3 = nn.Conv2d(9, 6, 3, padding=1)
        self.norm3 = nn.BatchNorm2d(6)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        early = self.norm1(self.conv1(x)).relu()
        late = self.norm2(self.conv2(early)).relu()
        both = torch.cat([early, late], dim=1)
        found: Tensor = self.out(self.norm3(self.conv3(both)).relu().mean((2, 3)))
        return found


def small() -> Architecture:
    return Architecture(Small, (torch.zeros(2, FEATURES),))


def normed() -> Architecture:
    return Architecture(Normed, (torch.zeros(2, 1, 8, 8),))


def blobs(count: int, seed: int, classes: tuple[int, ...] = tuple(range(CLASSES))) -> Samples:
    """Points around a centre for each class, easy to tell apart."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(99))
    labels = torch.tensor(classes)[torch.randint(len(classes), (count,), generator=generator)]
    return Samples(centres[labels] + torch.randn(count, FEATURES, generator=generator), labels)


def pictures(count: int, seed: int) -> Samples:
    """Noise with a bright stripe whose place is the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    images = 0.5 * torch.randn(count, 1, 8, 8, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, 2 * label : 2 * label + 2] += 1.5
    return Samples(images, labels)


def population(clients: int = 3, count: int = 40) -> dict[str, Samples]:
    """Clients of unequal sizes."""
    return {str(s): blobs(count + 7 * s, seed=s) for s in range(clients)}


def accuracy(model: nn.Module, samples: Samples) -> float:
    with torch.no_grad():
        return float((model(samples.inputs).argmax(dim=1) == samples.labels).double().mean())


def passed(
    strategy: Strategy, models: Mapping[str, nn.Module], counts: tuple[int, ...] | None = None
) -> State:
    """All rounds of a strategy in which nobody trains: each client begins with its model."""
    state = strategy.start()
    while not strategy.finished(state):
        updates = []
        for client, model in models.items():
            task = strategy.task(state, client)
            own = task.tensors if state.round else named_tensors(model)
            sent = {n: t.detach().clone() for n, t in own.items() if n not in task.frozen}
            updates.append(Update(client, state.round, sent, 10, counts))
        state = strategy.aggregate(state, updates)
    return state
