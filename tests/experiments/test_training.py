"""Clients trained together get what each would have got alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nafi.errors import InputError
from nafi.experiments.data import digits
from nafi.experiments.models import MLP, draw_weights
from nafi.experiments.training import PAPER, train_clients
from nafi.federated.samples import Samples
from nafi.federated.training import Training


def alone(model: nn.Module, data: Samples, training: Training, seed: int, place: int) -> nn.Module:
    """A plain loop over one client, with torch's own optimiser."""
    model = copy.deepcopy(model)
    start = [p.detach().clone() for p in model.parameters()]
    optimiser = torch.optim.Adam(
        model.parameters(), lr=training.rate, weight_decay=training.decay, amsgrad=True
    )
    rng = np.random.default_rng([seed, place])
    for _ in range(training.epochs):
        order = torch.from_numpy(rng.permutation(len(data)))
        for at in range(0, len(data), training.batch):
            batch = data[order[at : at + training.batch]]
            loss = F.cross_entropy(model(batch.inputs), batch.labels)
            pull = sum(
                (p - q).square().sum() for p, q in zip(model.parameters(), start, strict=True)
            )
            optimiser.zero_grad()
            (loss + 0.5 * training.proximal * pull).backward()
            optimiser.step()
    return model


@pytest.mark.parametrize("proximal", [0.0, 0.5])
def test_together_equals_alone(proximal: float) -> None:
    """Sizes differ, so batches run out at different times and are not always full."""
    data = digits().train
    sizes = [50, 131, 7, 64]
    starts = np.cumsum([0, *sizes])
    parts = [data[slice(int(a), int(b))] for a, b in pairwise(starts)]
    models = [draw_weights(MLP([64, 20, 10]), torch.Generator().manual_seed(s)) for s in range(4)]
    training = replace(PAPER, epochs=3, proximal=proximal)
    together = train_clients(models, parts, training, seed=5)
    for place, (model, part) in enumerate(zip(models, parts, strict=True)):
        expected = alone(model, part, training, 5, place)
        for one, two in zip(together[place].parameters(), expected.parameters(), strict=True):
            assert torch.allclose(one, two, atol=2e-4), place


def test_training_leaves_the_models_given_as_they_were() -> None:
    model = draw_weights(MLP([64, 5, 10]), torch.Generator().manual_seed(0))
    before = copy.deepcopy(model.state_dict())
    seen: list[tuple[int, int]] = []
    train_clients(
        [model], [digits().train[:40]], replace(PAPER, epochs=2), 0, lambda *a: seen.append(a)
    )
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert seen == [(0, 2), (1, 2)]


def test_networks_with_buffers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Linear(5, 10))
    with pytest.raises(InputError, match="buffers"):
        train_clients([model], [digits().train[:40]], PAPER, 0)
