"""The demonstration: recover known neurons from noisy, shuffled, partial copies of them.

Hides: the sizes that make it quick and the picture legible. Promises: every row of the result was
computed from the clients' neurons alone; the truth serves only to score.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from nafi.experiments.synthetic import (
    Array,
    SyntheticClients,
    pair_agreement,
    sample_clients,
    stroke_neurons,
)
from nafi.matching import Matching, match

SIDE = 12
NOISE = 1.0


@dataclass(frozen=True, eq=False)
class DemoRow:
    """One method's outcome: its global width, the F1 of its pairs, the error of its neurons."""

    method: str
    width: int
    agreement: float
    error: float
    seconds: float
    neurons: Array
    matching: Matching | None


def demo_clients(seed: int) -> SyntheticClients:
    """Eight clients with 14 of 20 strokes each, as much noise as signal."""
    rng = np.random.default_rng(seed)
    truth = stroke_neurons(20, SIDE, rng)
    return sample_clients(truth, clients=8, width=14, noise=NOISE, rng=rng)


def run_demo(clients: SyntheticClients, seed: int) -> list[DemoRow]:
    """Average by position, as FedAvg would, and match with and without the penalty."""
    rows = [_average_by_position(clients)]
    for method, penalty in [("pfnm", 0.0), ("nafi, penalty 0.1", 0.1), ("nafi, penalty 1", 1.0)]:
        start = time.perf_counter()
        found = match(clients.neurons, precisions=1 / NOISE**2, penalty=penalty, seed=seed)
        seconds = time.perf_counter() - start
        rows.append(
            DemoRow(
                method,
                found.width,
                pair_agreement(found.assignments, clients.owned),
                _error(clients, [found.means[assigned] for assigned in found.assignments]),
                seconds,
                found.means,
                found,
            )
        )
    return rows


def recovered(clients: SyntheticClients, matching: Matching) -> Array:
    """(G, D) for each true neuron the mean of the global neuron that most of its copies went to.

    NaN where the truth was seen by no client.
    """
    rows = np.full_like(clients.truth, np.nan)
    for index in range(len(rows)):
        went = [
            assigned[own == index]
            for assigned, own in zip(matching.assignments, clients.owned, strict=True)
        ]
        votes = np.bincount(np.concatenate(went), minlength=matching.width)
        if votes.any():
            rows[index] = matching.means[np.argmax(votes)]
    return rows


def _average_by_position(clients: SyntheticClients) -> DemoRow:
    start = time.perf_counter()
    mean = np.mean(clients.neurons, axis=0)
    seconds = time.perf_counter() - start
    positions = [np.arange(len(own)) for own in clients.owned]
    return DemoRow(
        "average by position",
        len(mean),
        pair_agreement(positions, clients.owned),
        _error(clients, [mean] * len(clients.neurons)),
        seconds,
        mean,
        None,
    )


def _error(clients: SyntheticClients, fused: list[Array]) -> float:
    """Root mean square distance between what each local neuron became and its true neuron."""
    gaps = [mean - clients.truth[own] for mean, own in zip(fused, clients.owned, strict=True)]
    return float(np.sqrt(np.mean(np.concatenate(gaps) ** 2)))
