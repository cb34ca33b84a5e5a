"""Thousands of models: seconds, peak memory, width and accuracy of fusions from files.

`python benchmarks/scale.py` prints tables in Markdown and draws `docs/scale.png`; needs MNIST
(NAFI_DATA, or a download) and 4 GB of disk for the models, which are kept in `--folder`. Every row
is a process of its own on one thread; its processor time hardly depends on what else runs. Rows
that are in `--records` already are not run again. Not part of `make bench`: all sizes take about
half an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from safetensors.torch import save_file

import nafi
from nafi.experiments.data import mnist
from nafi.experiments.models import MLP
from nafi.experiments.training import train_clients
from nafi.federated import Samples, Training

WIDTHS = [784, 100, 10]
INPUTS = (torch.zeros(2, 784),)
TRAINING = Training(epochs=10, batch=32, optimiser="adam", rate=0.01, decay=1e-6)
ANCESTORS, TRAINED = 10, 1000
NOISE = 0.2  # of a descendant, relative to the deviation of each tensor
STACKED = 50  # models that are trained together
# What is said of a row: the options of `nafi.fuse`, and whether models stay in files.
MODES: dict[str, tuple[dict[str, Any], bool]] = {
    "in memory": ({"sweeps": 0}, False),
    "streamed": ({"sweeps": 0}, True),
    "streamed, 10 sweeps": ({}, True),
    "tree": ({"sweeps": 0, "tree": "groups"}, True),
    "tree, 10 sweeps": ({"tree": "groups"}, True),
}
PLAN = [
    ("descendants", mode, size)
    for size in (10, 100, 1000, 10000)
    for mode in ("in memory", "streamed", "tree")
    if (mode, size) != ("in memory", 10000)
]
PLAN += [
    ("trained", mode, size)
    for size in (10, 30, 100, 1000)
    for mode in ("streamed", "tree", "streamed, 10 sweeps", "tree, 10 sweeps")
    if size in (30, 100) or "sweeps" not in mode
]


def network() -> MLP:
    return MLP(WIDTHS)


def trained(shares: list[Samples], seed: int) -> list[Any]:
    """A network for each share, drawn and trained by itself."""
    models = []
    for start in range(0, len(shares), STACKED):
        part = shares[start : start + STACKED]
        torch.manual_seed(seed + start)
        models += train_clients([network() for _ in part], part, TRAINING, seed + start)
    return models


def descendant(ancestor: Any, rng: torch.Generator) -> dict[str, torch.Tensor]:
    """The tensors of a network with noise, its neurons in another order."""
    state = {
        name: t + NOISE * t.std() * torch.randn(t.shape, generator=rng)
        for name, t in ancestor.state_dict().items()
    }
    order = torch.randperm(WIDTHS[1], generator=rng)
    first, bias, last = [name for name, t in state.items() if WIDTHS[1] in t.shape]
    state[first], state[bias], state[last] = (
        state[first][order],
        state[bias][order],
        state[last][:, order],
    )
    return {name: t.contiguous() for name, t in state.items()}


def make_models(folder: Path, kind: str, count: int) -> None:
    """Write models that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [s for s in range(count) if not path_of(folder, s).exists()]
    if not missing:
        return
    data, rng = mnist().train, np.random.default_rng(0)
    order = rng.permutation(len(data.labels))
    if kind == "trained":
        parts = np.array_split(order, TRAINED)
        models = trained([data[part] for part in parts], 0)
        states = [model.state_dict() for model in models]
    else:
        ancestors = trained([data[part] for part in np.array_split(order, ANCESTORS)], 1)
    for s in missing if kind != "trained" else range(TRAINED):
        if kind == "trained":
            state = states[s]
        else:
            state = descendant(ancestors[s % ANCESTORS], torch.Generator().manual_seed(s))
        save_file(state, path_of(folder, s))


def path_of(folder: Path, index: int) -> Path:
    return folder / f"{index:05}.safetensors"


def kilobytes(key: str) -> int:
    found = re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


def one(folder: Path, mode: str, size: int) -> dict[str, Any]:
    """Fuse in this process."""
    torch.set_num_threads(1)
    options, streams = MODES[mode]
    options = {k: min(100, size // 2) if v == "groups" else v for k, v in options.items()}
    nafi.fuse([network(), network()], INPUTS)  # what is set up once
    test = mnist().test
    paths = [path_of(folder, s) for s in range(size)]
    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest use so far
    start, used = time.perf_counter(), time.process_time()
    models = nafi.open_models(paths, network) if streams else [nafi.load(p, network) for p in paths]
    found = nafi.fuse(models, INPUTS, **options)
    seconds, processor = time.perf_counter() - start, time.process_time() - used
    peak = kilobytes("VmHWM")
    with torch.no_grad():
        right = found.model(test.inputs).argmax(dim=1) == test.labels
    return {
        "seconds": seconds,
        "processor": processor,
        "megabytes": (peak - before) / 1024,
        "process": peak / 1024,
        "width": next(iter(found.widths.values())),
        "accuracy": float(right.float().mean()),
    }


def run(folder: Path, records: Path, plan: list[tuple[str, str, int]]) -> list[dict[str, Any]]:
    """Every row of the plan, in a process of its own unless it is recorded."""
    rows = (
        [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
    )
    known = {(row["models"], row["mode"], row["size"]) for row in rows}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    for kind, mode, size in plan:
        if (kind, mode, size) in known:
            continue
        make_models(folder / kind, kind, size)
        command = [sys.executable, __file__, "--one", mode, str(size), "--folder"]
        done = subprocess.run(
            [*command, str(folder / kind)],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        row = {"models": kind, "mode": mode, "size": size, **json.loads(done.stdout)}
        rows.append(row)
        with records.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, file=sys.stderr, flush=True)
    return rows


def table(rows: list[dict[str, Any]], kind: str) -> str:
    """A table in Markdown."""
    lines = [
        "| models | mode | seconds | processor | ms per model | peak MB | beyond the start | width "
        "| test % |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    chosen = [row for row in rows if row["models"] == kind]
    for row in sorted(chosen, key=lambda r: (r["size"], list(MODES).index(r["mode"]))):
        each = 1000 * row["processor"] / row["size"]
        lines.append(
            f"| {row['size']:,} | {row['mode']} | {row['seconds']:.1f} | {row['processor']:.1f} "
            f"| {each:.1f} | "
            f"{row['process']:.0f} | {row['megabytes']:.0f} | {row['width']} | "
            f"{100 * row['accuracy']:.2f} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], target: Path) -> None:
    """Seconds and memory over the number of models, both axes logarithmic."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for mode, mark in [("in memory", "s"), ("streamed", "o"), ("tree", "^")]:
        chosen = [r for r in rows if r["models"] == "descendants" and r["mode"] == mode]
        chosen = sorted(chosen, key=lambda row: row["size"])
        sizes = [row["size"] for row in chosen]
        left.loglog(sizes, [row["processor"] for row in chosen], marker=mark, label=mode)
        right.loglog(sizes, [row["process"] for row in chosen], marker=mark, label=mode)
    left.set(xlabel="models", ylabel="processor time (s)")
    right.set(xlabel="models", ylabel="peak memory of the process (MB)")
    left.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(target, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/scale"))
    parser.add_argument("--records", type=Path, default=None)
    parser.add_argument("--figure", type=Path, default=Path("docs/scale.png"))
    parser.add_argument("--largest", type=int, default=10000, help="leave out larger sizes")
    parser.add_argument("--one", nargs=2, metavar=("MODE", "SIZE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(one(chosen.folder, chosen.one[0], int(chosen.one[1]))))
        return
    chosen.folder.mkdir(parents=True, exist_ok=True)
    records = chosen.records or chosen.folder / "records.jsonl"
    plan = sorted((row for row in PLAN if row[2] <= chosen.largest), key=lambda row: row[2])
    rows = run(chosen.folder, records, plan)
    for kind, title in [("descendants", "Descendants"), ("trained", "Trained")]:
        print(f"\n{title}\n\n{table(rows, kind)}")
    draw(rows, chosen.figure)


if __name__ == "__main__":
    main()
