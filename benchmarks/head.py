"""The last layer from everybody's labels: accuracy and calibration under label skew.

CIFAR-10 over five clients (Dirichlet 0.5), a VGG with batch normalisation and the paper's ConvNet.
Some minutes for each seed: python benchmarks/head.py [seeds] [images]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nafi
from nafi.experiments.models import ConvNet
from nafi.experiments.training import train_in_turn
from nafi.experiments.trials import Trial, TrialSettings, load_trial
from nafi.federated import Samples, Training, as_numbers
from nafi.fusion import add_statistics, fit_head

PROBE, TEST = 256, 4000


class VGG(nn.Module):
    """Six convolutions with batch normalisation, and the mean over all places."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 16, 32, 32, 64, 64)
        pairs = list(itertools.pairwise(widths))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        for place, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x)).relu()
            if place in (1, 3):
                x = F.max_pool2d(x, 2)
        return self.head(x.mean(dim=(2, 3)))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "VGG": (VGG, 10),
    "ConvNet": (ConvNet, 15),
}


def clients(trial: Trial, network: Callable[[], nn.Module], epochs: int) -> list[nn.Module]:
    seed = trial.settings.seed
    models = []
    for place in range(len(trial.data)):
        torch.manual_seed(1000 * seed + place)
        models.append(network())
    training = Training(epochs=epochs, batch=32, optimiser="adam", rate=1e-3)
    data = list(trial.data.values())
    return [m.eval() for m in train_in_turn(models, data, training, seed, loss=trial.problem.loss)]


def batches(samples: Samples) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(samples), 256):
        batch = samples[slice(start, start + 256)]
        yield as_numbers(batch.inputs), batch.labels


def judge(model: nn.Module, samples: Samples) -> tuple[float, float, float]:
    """Accuracy in percent, mean negative log likelihood, expected calibration error in percent."""
    with torch.no_grad():
        outputs = torch.cat([model(inputs) for inputs, _ in batches(samples)])
    labels = samples.labels.long()
    sure, said = outputs.softmax(dim=1).max(dim=1)
    right = (said == labels).double()
    bins = (sure * 15).ceil().long().clamp(1, 15)
    gaps = [float((right - sure)[bins == b].sum().abs()) for b in range(1, 16)]
    loss = float(F.cross_entropy(outputs, labels))
    return 100 * float(right.mean()), loss, 100 * sum(gaps) / len(labels)


def show(name: str, figures: tuple[float, float, float]) -> None:
    accuracy, loss, calibration = figures
    print(f"  {name:28} {accuracy:5.1f} {loss:6.3f} {calibration:5.1f}", flush=True)


def one(name: str, seed: int, images: int) -> None:
    trial = load_trial(TrialSettings("cifar10", 5, seed, 0.5, 0.1, images, seed))
    models = clients(trial, *NETWORKS[name])
    test = trial.test[slice(TEST)]
    print(f"{name}, seed {seed}: accuracy, negative log likelihood, calibration error")
    for place, model in enumerate(models):
        show(f"client {place}", judge(model, test))
    show("ensemble", judge(nafi.fuse(models, trial.example_inputs, "ensemble").model, test))
    inputs = torch.cat([as_numbers(samples.inputs) for samples in trial.data.values()])
    probe = inputs[np.random.default_rng(0).permutation(len(inputs))[:PROBE]]
    for width in (1.0, 2.0):
        fused = nafi.fuse(
            models,
            trial.example_inputs,
            max_width=width,
            class_counts=trial.class_counts,
            probe=probe,
        ).model
        show(f"refitted, {width:.0f}x", judge(fused, test))
        sums = [nafi.statistics(fused, batches(samples)) for samples in trial.data.values()]
        show(f"with the head, {width:.0f}x", judge(nafi.solve_head(fused, sums), test))
        fit = fit_head(add_statistics(sums))
        print(f"    ridge {fit.ridge:.1g}, scale {fit.scale:.2f}")


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    images = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
    for name in NETWORKS:
        for seed in range(seeds):
            one(name, seed, images)


if __name__ == "__main__":
    main()
