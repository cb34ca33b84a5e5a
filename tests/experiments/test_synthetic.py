"""The score of a matching against cases worked by hand, and the sampler's promises."""

from __future__ import annotations

import numpy as np
import pytest

from nafi.experiments.synthetic import pair_agreement, sample_clients, stroke_neurons


def test_pair_agreement_by_hand() -> None:
    owned = [np.array([0, 1]), np.array([1, 0])]  # true pairs: (0a, 1b), (0b, 1a)
    assert pair_agreement([np.array([0, 1]), np.array([1, 0])], owned) == 1.0
    assert pair_agreement([np.array([5, 3]), np.array([3, 5])], owned) == 1.0
    assert pair_agreement([np.array([0, 1]), np.array([0, 1])], owned) == 0.0
    # One of two true pairs found and nothing else: precision 1, recall 1/2.
    assert pair_agreement([np.array([0, 1]), np.array([1, 2])], owned) == pytest.approx(2 / 3)


def test_clients_see_true_neurons_with_the_stated_noise() -> None:
    rng = np.random.default_rng(0)
    truth = stroke_neurons(30, 10, rng)
    np.testing.assert_allclose((truth**2).mean(axis=1), 1.0)
    clients = sample_clients(truth, clients=40, width=20, noise=0.5, rng=rng)
    residual = np.concatenate(clients.neurons) - truth[np.concatenate(clients.owned)]
    assert residual.std() == pytest.approx(0.5, rel=0.01)
    assert all(len(set(own.tolist())) == 20 for own in clients.owned)
