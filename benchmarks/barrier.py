"""The loss along the line between two GPTs that were trained apart, aligned in several ways.

    NAFI_DATA=... python benchmarks/barrier.py    # a table, and docs/barrier.png

The networks are those of `nafi run shakespeare`, problem "GPT, same text"; they are trained if they
are not in the cache. A point of a line is the mean of both networks' weights, weighed by 1 - t and
t, in their common bases; refitted, every point is fitted on the probe by itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from nafi.experiments import load_experiment
from nafi.experiments.cells import cells
from nafi.experiments.clients import population
from nafi.experiments.entries import mean_loss
from nafi.experiments.trials import Trial, load_trial
from nafi.fusion import fuse, make_method
from nafi.fusion.clients import check_clients
from nafi.fusion.merge import finished_network, merged_network
from nafi.fusion.method import AligningMethod, Alignment
from nafi.fusion.networks import Networks
from nafi.fusion.refit import refit

TARGET = Path(__file__).resolve().parent.parent / "docs" / "barrier.png"
PROBE = 256
STEPS = np.linspace(0, 1, 9)
# Label -> the method, its options, whether it sees the probe, and whether layers are refitted.
WAYS: Mapping[str, tuple[str, dict[str, object], bool, bool]] = {
    "averaged as they are": ("fedavg", {}, False, False),
    "re-basin": ("rebasin", {}, False, False),
    "nafi, in an order": ("nafi", {"max_width": 1.0, "bases": "ordered"}, False, False),
    "nafi, by weights": ("nafi", {"max_width": 1.0}, False, False),
    "nafi, by what layers do": ("nafi", {"max_width": 1.0}, True, False),
    "nafi, bases learnt": ("nafi", {"max_width": 1.0, "bases": "learned"}, True, False),
    "nafi, refitted": ("nafi", {"max_width": 1.0}, True, True),
}


def two_networks(index: int) -> tuple[Trial, list[nn.Module]]:
    """The clients of one trial."""
    experiment = load_experiment("shakespeare", "scaled", trials=index + 1)
    chosen = experiment.only_problems(["GPT, same text"]).only(["averaged"])
    recipe = cells(chosen)[-1].recipes()[0]
    trial = load_trial(recipe.trial)
    return trial, population(recipe, trial)


def aligned(trial: Trial, models: Sequence[nn.Module], way: str) -> tuple[Networks, Alignment]:
    """The networks of two models, and where their neurons go."""
    name, options, with_probe, _ = WAYS[way]
    method = make_method(name, **options)
    assert isinstance(method, AligningMethod)
    clients = check_clients(models, None, None, None)
    networks = method.prepare(clients, trial.example_inputs, None)
    if with_probe:
        networks = replace(networks, probe=(trial.probe(PROBE),))
    return networks, method.align(networks, lambda *_: None)


def points(
    trial: Trial, models: Sequence[nn.Module], way: str, loss: Callable[[nn.Module], float]
) -> list[float]:
    """The losses on the way from one model to the other, without both ends."""
    shares = [np.array([1 - step, step]) for step in STEPS[1:-1]]
    if WAYS[way][0] == "fedavg":  # nothing to align
        means = (fuse(models, trial.example_inputs, "fedavg", sample_counts=c) for c in shares)
        return [loss(mean.model) for mean in means]
    networks, alignment = aligned(trial, models, way)
    found = []
    for counts in shares:
        weighed = replace(networks, clients=replace(networks.clients, sample_counts=counts))
        places, widths = alignment.placements, alignment.widths
        model = merged_network(weighed, places, widths, restore_norm=False)
        if WAYS[way][-1]:
            refit(weighed, places, model, lambda *_: None)
        found.append(loss(finished_network(weighed, places, widths, model)[0]))
    return found


def draw(lines: Mapping[str, Sequence[float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for (way, losses), marker in zip(lines.items(), "osv^Dph", strict=False):
        axes.plot(STEPS, losses, marker=marker, markersize=4, label=way)
    axes.set_xlabel("share of the second network")
    axes.set_ylabel("loss on test data")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trial", type=int, default=0)
    parser.add_argument("--out", type=Path, default=TARGET)
    arguments = parser.parse_args()
    trial, models = two_networks(arguments.trial)

    def loss(model: nn.Module) -> float:
        return mean_loss(model, trial.test, trial.problem.loss)

    ends = [loss(model) for model in models]
    expected = (1 - STEPS) * ends[0] + STEPS * ends[1]
    lines: dict[str, list[float]] = {}
    print(f"Losses {ends[0]:.3f} and {ends[1]:.3f}; what lies above the line between them:")
    print("\n| way | barrier | in the middle |\n| --- | --- | --- |")
    for way in WAYS:
        lines[way] = [ends[0], *points(trial, models, way, loss), ends[1]]
        above = np.array(lines[way]) - expected
        print(f"| {way} | {above.max():.2f} | {above[len(above) // 2]:.2f} |", flush=True)
    draw(lines, arguments.out)
    print(f"\nThe figure is in {arguments.out}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
