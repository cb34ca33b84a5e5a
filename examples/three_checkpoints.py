"""Fuse three checkpoints from Python.

Trains three small classifiers apart, each on digits of its own, saves them as files, and fuses the
files into one model: run `python examples/three_checkpoints.py`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import nafi


def make_network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10))


def train(inputs: torch.Tensor, labels: torch.Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = make_network()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(200):
        optimiser.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimiser.step()
    return model


def main() -> None:
    digits = load_digits()
    inputs = torch.from_numpy(digits.data).float() / 16
    labels = torch.from_numpy(digits.target)
    test = torch.arange(len(labels)) % 4 == 0
    # Each client has seen some of the digits only.
    known = [[0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [0, 6, 7, 8, 9]]
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for seed, classes in enumerate(known):
            mine = ~test & torch.isin(labels, torch.tensor(classes))
            model = train(inputs[mine], labels[mine], seed)
            files.append(Path(folder) / f"client{seed}.safetensors")
            nafi.save(model, files[-1])
            accuracy = (model(inputs[test]).argmax(1) == labels[test]).double().mean()
            print(f"client {seed}, digits {classes}: {accuracy:.1%}")

        models = [nafi.load(file, make_network) for file in files]
        counts = [
            torch.bincount(labels[~test & torch.isin(labels, torch.tensor(c))], minlength=10)
            for c in known
        ]
        result = nafi.fuse(
            models, (inputs[:2],), class_counts=torch.stack(counts).numpy(), max_width=2.0
        )
        nafi.save(result, Path(folder) / "global.safetensors")
        fused = nafi.load(Path(folder) / "global.safetensors", make_network)
    accuracy = (fused(inputs[test]).argmax(1) == labels[test]).double().mean()
    print(f"fused, {result.widths}: {accuracy:.1%}")


if __name__ == "__main__":
    main()
