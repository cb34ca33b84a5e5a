"""Large models from files: ResNet-18 x 50, and four GPTs of 100 million parameters.

`python benchmarks/large.py` prints a table in Markdown; it needs 4 GB of disk for the models, which
are kept in `--folder`. Each is a descendant of one random network: noise, and neurons in another
order. They are fused at the size of one, and each is visited once. Every row is a process of its
own on one thread. Memory is the peak of everything beyond the process after a small fusion. It is
meant to be at most three fused models and one client. `--stages` says where it is. Not part of
`make bench`: all rows take about half an hour.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpts import Stages, gpt, memory
from safetensors.torch import save_file
from torch import Tensor, nn

import nafi
from nafi.experiments.models import Residual
from nafi.experiments.sequences import GPT, transformer_widths
from nafi.experiments.text import LENGTH
from nafi.graph import Inputs, permute_state, random_permutations

NOISE = 0.2  # of a descendant, relative to the deviation of each tensor
TARGET = 3  # fused models, besides one client
WORDS = 10000
OPTIONS: dict[str, Any] = {"max_width": 1.0, "sweeps": 0}


class ResNet18(nn.Module):
    """Four stages of two residual blocks each, and 1,000 classes."""

    def __init__(self, base: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, base, 7, 2, 3, bias=False)
        self.norm, self.pool = nn.BatchNorm2d(base), nn.MaxPool2d(3, 2, 1)
        self.blocks, width = nn.Sequential(), base
        for stage in range(4):
            before, width = width, base * 2**stage
            self.blocks.append(Residual(before, width, width, stride=2 if stage else 1))
            self.blocks.append(Residual(width, width, width))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.norm(self.stem(x)).relu())
        outputs: Tensor = self.head(self.blocks(x).mean(dim=(2, 3)))
        return outputs


@dataclass(frozen=True)
class Kind:
    """A network: small, to begin with, and as large as it is to be."""

    small: Callable[[], nn.Module]
    large: Callable[[], nn.Module]
    ancestor: Callable[[], nn.Module]
    inputs: Inputs


def trained_norms() -> nn.Module:
    """A ResNet-18 whose normalisation has seen something."""
    model = ResNet18().train()
    with torch.no_grad():
        model(torch.randn(8, 3, 64, 64))
    return model.eval()


KINDS = {
    "ResNet-18": Kind(
        lambda: ResNet18(8, 10), ResNet18, trained_norms, (torch.zeros(2, 3, 64, 64),)
    ),
    "GPT": Kind(
        lambda: GPT(transformer_widths(64, 4, 1), 100),
        lambda: GPT(transformer_widths(768, 12, 12), WORDS),
        lambda: gpt(768, 12, 12, WORDS),
        (torch.zeros(2, LENGTH, dtype=torch.long),),
    ),
}
PLAN = [("ResNet-18", 4), ("ResNet-18", 50), ("GPT", 4)]


def make_models(folder: Path, kind: Kind, count: int) -> None:
    """Write models that are not there yet."""
    missing = [s for s in range(count) if not path_of(folder, s).exists()]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    ancestor = kind.ancestor()
    spec = nafi.groups(ancestor, kind.inputs, check=False)
    learnt = {name for name, _ in ancestor.named_parameters()}
    for s in missing:
        rng = torch.Generator().manual_seed(s)
        state = permute_state(ancestor.state_dict(), spec, random_permutations(spec, rng))
        for name, tensor in state.items():
            if name in learnt:
                noise = torch.randn(tensor.shape, generator=rng)
                state[name] = tensor + NOISE * tensor.std() * noise
        save_file({n: t.contiguous() for n, t in state.items()}, path_of(folder, s))


def path_of(folder: Path, index: int) -> Path:
    return folder / f"{index:03}.safetensors"


def one(folder: Path, kind: Kind, count: int, stages: bool) -> dict[str, Any]:
    """Fuse in this process."""
    small = folder / "small.safetensors"
    save_file(kind.small().state_dict(), small)
    nafi.fuse(nafi.open_models([small] * 3, kind.small), kind.inputs, **OPTIONS)
    gc.collect()
    before, watched = memory("VmRSS"), Stages()
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest use so far
    start, used = time.perf_counter(), time.process_time()
    models = nafi.open_models([path_of(folder, s) for s in range(count)], kind.large)
    if stages:
        with watched.watching():
            result = nafi.fuse(models, kind.inputs, **OPTIONS)
    else:
        result = nafi.fuse(models, kind.inputs, **OPTIONS)
    found = {"seconds": time.perf_counter() - start, "processor": time.process_time() - used}
    fused = sum(t.nbytes for t in result.model.state_dict().values())
    client = path_of(folder, 0).stat().st_size
    peak = max([memory("VmHWM"), *watched.peaks.values()]) - before
    over = {label: (top - before) / 1e6 for label, top in watched.peaks.items()}
    return {
        **found,
        "peak": peak / 1e6,
        "fused": fused / 1e6,
        "client": client / 1e6,
        "stages": {label: (watched.seconds[label], over[label]) for label in over},
    }


def run(folder: Path, name: str, count: int, stages: bool) -> dict[str, Any]:
    """The same in a process of its own."""
    make_models(folder, KINDS[name], count)
    # Freed memory goes back to the system at once, so that what is measured is what is in use.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--one", name, str(count), "--folder", str(folder.parent)]
    command += ["--stages"] * stages
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def folder_of(folder: Path, name: str) -> Path:
    return folder / name.lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/large"))
    parser.add_argument("--only", nargs=2, metavar=("NETWORK", "MODELS"), action="append")
    parser.add_argument("--stages", action="store_true", help="seconds and memory of each stage")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if chosen.one:
        name, count = chosen.one[0], int(chosen.one[1])
        found = one(folder_of(chosen.folder, name), KINDS[name], count, chosen.stages)
        print(json.dumps(found))
        return
    print("| network | models | seconds | processor | peak MB | fused models | target |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, count in chosen.only or PLAN:
        row = run(folder_of(chosen.folder, name), name, int(count), chosen.stages)
        target = TARGET + row["client"] / row["fused"]
        print(
            f"| {name} | {count} | {row['seconds']:.0f} | {row['processor']:.0f} "
            f"| {row['peak']:.0f} | {row['peak'] / row['fused']:.1f} | {target:.1f} |",
            flush=True,
        )
        for label, (seconds, peak) in row["stages"].items():
            print(f"    {label}: {seconds:.1f} s, {peak:.0f} MB, {peak / row['fused']:.1f} models")


if __name__ == "__main__":
    main()
