"""How long fusions take: thirty MNIST-sized models, and a pair of ResNet-18s.

`make bench` prints tables in Markdown. Ratios are of one run; seconds depend on the machine.
"""

from __future__ import annotations

import os
import time
import warnings

import numpy as np
import torch
from monai.networks.nets import resnet18
from torch import nn

import nafi
from nafi.experiments.models import MLP, draw_weights
from nafi.fusion import descent


class Stopwatch:
    """Adds up the time spent in a function."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function):
        def timed(*arguments, **options):
            start = time.perf_counter()
            result = function(*arguments, **options)
            self.seconds += time.perf_counter() - start
            return result

        return timed


def like_clients(count: int, noise: float) -> list[nn.Module]:
    """Networks with partly shared neurons in orders of their own, as trained ones have."""
    truth = draw_weights(MLP([784, 300, 10]), torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    models = []
    for _ in range(count):
        own = torch.randperm(300, generator=generator)[:100]
        model = MLP([784, 100, 10])
        with torch.no_grad():
            model.layers[0].weight.copy_(truth.layers[0].weight[own])
            model.layers[1].weight.copy_(truth.layers[1].weight[:, own])
            for tensor in model.parameters():
                tensor.add_(noise * torch.randn(tensor.shape, generator=generator))
        models.append(model.eval())
    return models


def thirty_models() -> None:
    models = like_clients(30, noise=0.05)
    counts = np.random.default_rng(0).integers(0, 200, (30, 10))
    inputs = (torch.zeros(2, 784),)
    nafi.fuse(models[:2], inputs)  # torch.export sets itself up once
    print("| 30 models, 784-100-10 | seconds | in nafi.match | ratio | target |")
    print("| --- | --- | --- | --- | --- |")
    for method in ("nafi", "pfnm"):
        watch, plain = Stopwatch(), descent.match
        descent.match = watch.around(plain)
        start = time.perf_counter()
        found = nafi.fuse(models, inputs, method=method, class_counts=counts)
        seconds = time.perf_counter() - start
        descent.match = plain
        width = found.widths["layers.0"]
        print(
            f"| {method}, {width} neurons | {seconds:.2f} | {watch.seconds:.2f} "
            f"| {seconds / watch.seconds:.2f}x | 5x |"
        )


def two_resnets() -> None:
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(resnet18(spatial_dims=2, n_input_channels=3, num_classes=1000).eval())
    inputs = (torch.randn(2, 3, 64, 64),)
    count = sum(p.numel() for p in models[0].parameters()) / 1e6
    print(
        f"\n| two ResNet-18s of {count:.1f} million parameters | seconds | widest group | target |"
    )
    print("| --- | --- | --- | --- |")
    for method in ("nafi", "pfnm", "ot", "rebasin", "fedavg"):
        start = time.perf_counter()
        found = nafi.fuse(models, inputs, method=method)
        seconds = time.perf_counter() - start
        widest = max(found.widths.values(), default=512)
        print(f"| {method} | {seconds:.1f} | {widest} | 60 s |")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(f"{torch.get_num_threads()} threads of {os.cpu_count()} cores\n")
    thirty_models()
    two_resnets()
