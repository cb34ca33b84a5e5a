"""Labelled sums of which some are lies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import nafi
from nafi.federated import Trainer, Training, make_strategy
from nafi.fusion import HeadStatistics, Screen, screened_statistics
from tests.federated.networks import CLASSES, population, small

SCREEN = Screen(clip=2.0, trim=0.25)


def body() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval()


def parts(seed: int, clients: int = 8) -> list[HeadStatistics]:
    """Every client has 40 samples of each class, about means that all share."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(3, 6, generator=generator)
    labels = torch.arange(3).repeat(40)
    found = []
    for _ in range(clients):
        inputs = centres[labels] + torch.randn(120, 6, generator=generator)
        found.append(nafi.statistics(body(), [(inputs, labels)]))
    return found


def lie(part: HeadStatistics) -> HeadStatistics:
    """The means turned around, as if of a thousand times the samples."""
    return replace(
        part,
        gram=1000 * part.gram,
        cross=-1000 * part.cross,
        class_counts=1000 * part.class_counts,
        losses=1000 * part.losses.flip(0),
    )


def means(part: HeadStatistics) -> torch.Tensor:
    return part.cross / part.class_counts


def test_of_clients_that_agree_it_is_their_sum() -> None:
    one = parts(0, 1)[0]
    found = screened_statistics([one] * 8, SCREEN)
    for name in ("gram", "cross", "class_counts"):
        torch.testing.assert_close(getattr(found, name), 8 * getattr(one, name))
    assert int(found.losses.argmin()) == int(one.losses.argmin())


@pytest.mark.parametrize("seed", range(3))
def test_liars_move_no_mean_and_no_count_out_of_what_honest_clients_sent(seed: int) -> None:
    sent = parts(seed)
    found = screened_statistics([*sent[:6], lie(sent[6]), lie(sent[7])], SCREEN)
    honest = torch.stack([means(part) for part in sent[:6]])
    assert bool((means(found) >= honest.min(dim=0).values - 1e-9).all())
    assert bool((means(found) <= honest.max(dim=0).values + 1e-9).all())
    assert found.class_counts.tolist() == [8 * 40] * 3
    assert float(torch.linalg.eigvalsh(found.gram).min()) > -1e-6
    apart = torch.stack([part.gram.trace() for part in sent]).max() * 8
    assert float(found.gram.trace()) < 1.5 * float(apart)


def test_a_head_of_screened_sums_is_close_to_that_of_honest_ones() -> None:
    sent = parts(3)
    honest = nafi.solve_head(body(), sent)
    lied = [*sent[:6], lie(sent[6]), lie(sent[7])]
    screened = nafi.solve_head(body(), [screened_statistics(lied, SCREEN)])
    plain = nafi.solve_head(body(), lied)
    x = 2 * torch.randn(500, 6, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        wanted, held, broken = (m(x).argmax(dim=1) for m in (honest, screened, plain))
    assert float((wanted == held).double().mean()) > 0.9
    assert float((wanted == broken).double().mean()) < 0.7


@pytest.mark.parametrize("name", ["fedavg", "layerwise"])
def test_a_strategy_that_trims_solves_the_head_of_clients_that_agree_as_any_other(
    name: str,
) -> None:
    heads = []
    for options in ({}, {"clip": 2.0, "trim": 0.25}):
        training = Training(epochs=1, batch=8)
        strategy = make_strategy(
            name, small(), training, rounds=3, head="statistics", precision="float64", **options
        )
        data = population(4)["0"]
        work = Trainer(strategy.architecture, {str(s): data for s in range(4)}, CLASSES)
        state = strategy.start()
        tasks = {client: strategy.next_task(state, client) for client in "0123"}
        same = {client: replace(task, start=1, seed=1) for client, task in tasks.items()}
        while not state.head:
            state = strategy.advance(state, [work(c, task)[0] for c, task in same.items()])
            tasks = {client: strategy.next_task(state, client) for client in "0123"}
            same = {client: replace(task, seed=1) for client, task in tasks.items()}
        heads.append(state.head)
    for key, tensor in heads[0].items():
        torch.testing.assert_close(heads[1][key], tensor, atol=1e-3, rtol=1e-3)
