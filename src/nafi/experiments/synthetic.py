"""Neurons drawn from the very model that nafi assumes, so that the truth is known.

Hides: how the true neurons look. Promises: S clients that each own a random subset of the same
global neurons, in an order of their own and with noise; the same seed gives the same clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class SyntheticClients:
    """truth: (G, D) the global neurons; neurons, owned: per client (J, D) and the true index."""

    truth: Array
    neurons: list[Array]
    owned: list[Index]


def sample_clients(
    truth: Array, clients: int, width: int, noise: float, rng: np.random.Generator
) -> SyntheticClients:
    """Each client sees `width` of the true neurons, shuffled, with Gaussian noise."""
    owned = [rng.permutation(len(truth))[:width] for _ in range(clients)]
    neurons = [truth[own] + noise * rng.standard_normal((width, truth.shape[1])) for own in owned]
    return SyntheticClients(truth, neurons, owned)


def stroke_neurons(count: int, side: int, rng: np.random.Generator) -> Array:
    """(count, side * side) smooth strokes at random places and angles, of unit mean square."""
    row, column = np.mgrid[:side, :side] / (side - 1) - 0.5
    angle = rng.uniform(0, np.pi, (count, 1, 1))
    centre = rng.uniform(-0.25, 0.25, (2, count, 1, 1))
    along = (column - centre[0]) * np.cos(angle) + (row - centre[1]) * np.sin(angle)
    across = (row - centre[1]) * np.cos(angle) - (column - centre[0]) * np.sin(angle)
    phase = rng.uniform(0, 2 * np.pi, (count, 1, 1))
    strokes = np.cos(9 * across + phase) * np.exp(-6 * along**2 - 14 * across**2)
    flat = strokes.reshape(count, -1)
    return np.asarray(flat / np.sqrt((flat**2).mean(axis=1, keepdims=True)))


def pair_agreement(found: Sequence[Index], owned: Sequence[Index]) -> float:
    """F1 over pairs of local neurons: are they one global neuron, as found and in truth?"""
    found_of, true_of = np.concatenate(list(found)), np.concatenate(list(owned))
    table = np.zeros((found_of.max() + 1, true_of.max() + 1))
    np.add.at(table, (found_of, true_of), 1)

    def pairs(counts: Array) -> float:
        return float((counts * (counts - 1) / 2).sum())

    possible = pairs(table.sum(axis=1)) + pairs(table.sum(axis=0))
    return 2 * pairs(table) / possible if possible else 1.0
