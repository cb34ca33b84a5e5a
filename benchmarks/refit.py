"""The refit against one run of all networks over the probe: time, and peak memory.

Random weights: the work is the same. Prints ratios measured in one run.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import nafi
from nafi.experiments.models import UNet, unet_widths


class Block(nn.Module):
    """Two convolutions with normalisation and a way around them."""

    def __init__(self, read: int, written: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(read, written, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(written)
        self.conv2 = nn.Conv2d(written, written, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(written)
        self.around = nn.Sequential()
        if stride > 1:
            conv = nn.Conv2d(read, written, 1, stride, bias=False)
            self.around = nn.Sequential(conv, nn.BatchNorm2d(written))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(inner)) + self.around(x)).relu()


class ResNet18(nn.Module):
    """As for CIFAR-10."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64))
        widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
        pairs = pairwise(widths)
        self.blocks = nn.Sequential(*[Block(a, b, 1 + (a < b)) for a, b in pairs])
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x).relu()).mean(dim=(2, 3)))


CASES: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    "U-Net, 8 clients, 64 photos": (lambda: UNet(unet_widths(8)), 8, (64, 3, 64, 96)),
    "ResNet-18, 2 clients, 256 images": (ResNet18, 2, (256, 3, 32, 32)),
}


def peak(key: str) -> int:
    return int(re.findall(key + r":\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024


def measure(name: str, max_width: float) -> dict[str, float]:
    build, clients, shape = CASES[name]
    torch.manual_seed(0)
    models = [build().eval() for _ in range(clients)]
    probe = torch.randn(shape)
    spec = nafi.groups(models[0], (probe[:2],), check=False)
    with torch.no_grad():
        models[0](probe[:8])
        start = time.perf_counter()
        for model in models:
            model(probe)
        forward = time.perf_counter() - start
    seconds = {}
    before = peak("VmRSS")
    for refit in (False, True):
        start = time.perf_counter()
        options = {"max_width": max_width, "spec": spec}
        given = {"probe": probe} if refit else {}
        nafi.fuse(models, (probe[:2],), **options, **given)
        seconds[refit] = time.perf_counter() - start
    size = sum(t.numel() * t.element_size() for m in models for t in m.state_dict().values())
    return {
        "forward": forward,
        "without": seconds[False],
        "with": seconds[True],
        "ratio": seconds[True] / forward,
        "memory": (peak("VmHWM") - before) / 2**20,
        "models": size / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--max-width", type=float, default=1.0)
    arguments = parser.parse_args()
    if arguments.case:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(arguments.case, arguments.max_width)))
        return
    print("match and refit against one run of all networks over the probe")
    for name in CASES:  # each in a process of its own, for its peak of memory
        command = [sys.executable, __file__, "--case", name]
        row = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        print(
            f"{name:36} {row['with']:6.1f} s, {row['ratio']:5.1f} times one run of all; without a "
            f"probe {row['without']:5.1f} s; {row['memory']:6.0f} MB"
        )


if __name__ == "__main__":
    main()
