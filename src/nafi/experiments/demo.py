"""The demonstration: eight clients with digits of their own, fused by every method.

Hides: the sizes that make it quick. Promises: what a user would get with the defaults of each
method; the test digits are looked at once, and nothing is chosen by them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nafi.experiments.data import digits
from nafi.experiments.entries import accuracy
from nafi.experiments.methods import fuse_clients
from nafi.experiments.models import MLP, draw_weights
from nafi.experiments.partition import class_counts, dirichlet_partition
from nafi.experiments.training import PAPER, train_clients
from nafi.fusion import method_names

CLIENTS = 8
ALPHA = 0.5
WIDTH = 50
TRAINING = replace(PAPER, epochs=20)

# Shows that the penalty is the dial of the width.
_STRICTER = ("nafi, penalty 0.2", "nafi", {"penalty": 0.2})


def _rows() -> list[tuple[str, str, dict[str, Any]]]:
    """Label, method and options of every row: each method as it comes, the ensemble at the end."""
    # Optimal transport needs a package of its own.
    names = [name for name in method_names() if name != "ot" or find_spec("ot") is not None]
    names.remove("ensemble")
    plain: list[tuple[str, str, dict[str, Any]]] = [(n, n, {}) for n in reversed(names)]
    return [*plain, _STRICTER, ("ensemble", "ensemble", {})]


@dataclass(frozen=True)
class DemoRow:
    """One method: accuracy in percent on the test digits, hidden neurons in all, seconds."""

    method: str
    accuracy: float
    neurons: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Demo:
    """local: accuracy of each client's own model; counts: (S, K) digits per client and class."""

    rows: list[DemoRow]
    local: list[float]
    counts: npt.NDArray[np.int64]


def run_demo(seed: int, progress: Callable[[str, int, int], None]) -> Demo:
    """Train eight clients apart on scikit-learn's digits and fuse them by every method."""
    methods = _rows()
    steps = len(methods) + 1
    data = digits(seed)
    labels = data.train.labels.numpy()
    parts = dirichlet_partition(labels, CLIENTS, ALPHA, np.random.default_rng(seed))
    counts = class_counts(labels, parts, data.train.classes)
    progress(f"training {CLIENTS} clients", 0, steps)
    first = [
        draw_weights(MLP([64, WIDTH, 10]), torch.Generator().manual_seed(CLIENTS * seed + s))
        for s in range(CLIENTS)
    ]
    models = train_clients(first, [data.train[part] for part in parts], TRAINING, seed)
    rows = []
    for done, (label, method, options) in enumerate(methods):
        progress(label, done + 1, steps)
        start = time.perf_counter()
        result = fuse_clients(method, models, (data.test.inputs[:2],), seed, options, counts)
        seconds = time.perf_counter() - start
        neurons = sum(result.widths.values()) or WIDTH * (CLIENTS if method == "ensemble" else 1)
        rows.append(DemoRow(label, accuracy(result.model, data.test), neurons, seconds))
    return Demo(rows, [accuracy(model, data.test) for model in models], counts)
