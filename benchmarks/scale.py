"""Thousands of models: seconds, peak memory, width and accuracy of fusions from files.

`python benchmarks/scale.py` prints tables in Markdown and draws `docs/scale.png`; needs MNIST
(NAFI_DATA, or a download), Ray, and 4 GB of disk for the models, which are kept in `--folder`.
Every row is a process of its own on one thread; its processor time hardly depends on what else
runs. Rows that are in `--records` already are not run again, so without models the tables and the
figure are made of the records in the repository. Not part of `make bench`: all sizes take about
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
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matching import AGAINST_ROWS, Against, against_rows, rows_table
from safetensors.torch import save_file
from threadpoolctl import threadpool_limits

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
RECORDS = Path(__file__).parent / "records" / "scale.jsonl"
AGAINST = "row by row"
# What is said of a row: the options of `nafi.fuse`, and whether models stay in files.
MODES: dict[str, tuple[dict[str, Any], bool]] = {
    "in memory": ({"sweeps": 0}, False),
    "streamed": ({"sweeps": 0}, True),
    "streamed, 10 sweeps": ({}, True),
    "tree": ({"sweeps": 0, "tree": "groups"}, True),
    "tree, 10 sweeps": ({"tree": "groups"}, True),
}
WORKERS = {"tree, 1 Ray worker": 1, "tree, 2 Ray workers": 2}
MODES |= {mode: ({"sweeps": 0, "tree": "groups", "ray": "local"}, True) for mode in WORKERS}
PLAN = [
    ("descendants", mode, size)
    for size in (10, 100, 1000, 10000)
    for mode in ("in memory", "streamed", "tree", *WORKERS)
    if (mode, size) != ("in memory", 10000)
]
PLAN += [
    ("trained", mode, size)
    for size in (10, 30, 100, 1000)
    for mode in ("streamed", "tree", "streamed, 10 sweeps", "tree, 10 sweeps", *WORKERS)
    if (size == 1000 if mode in WORKERS else size in (30, 100) or "sweeps" not in mode)
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


def start_workers(count: int) -> None:
    """Ray with so many workers that have loaded nafi; what follows uses it."""
    import ray

    paths = os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))
    ray.init(
        address="local",
        num_cpus=count,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )

    @ray.remote(num_cpus=1)
    def load() -> None:
        import_module("nafi.fusion")
        time.sleep(0.5)  # so that no worker gets two

    ray.get([load.remote() for _ in range(count)])


def one(folder: Path, mode: str, size: int) -> dict[str, Any]:
    """Fuse in this process."""
    torch.set_num_threads(1)
    options, streams = MODES[mode]
    options = {k: min(100, size // 2) if v == "groups" else v for k, v in options.items()}
    nafi.fuse([network(), network()], INPUTS)  # what is set up once
    test = mnist().test
    paths = [path_of(folder, s) for s in range(size)]
    begun = time.perf_counter()
    if mode in WORKERS:
        start_workers(WORKERS[mode])
    started = time.perf_counter() - begun
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
        "started": started,
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
    known = {(row["models"], row["mode"], row["size"]) for row in rows if "mode" in row}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment["RAY_worker_niceness"] = "0"  # else they wait for all that others do
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
        rows.append(kept(records, row))
    if not any(row["models"] == AGAINST for row in rows):
        with threadpool_limits(1):
            compared = against_rows(*AGAINST_ROWS[0])
        rows.append(kept(records, {"models": AGAINST, "found": asdict(compared)}))
    return rows


def kept(records: Path, row: dict[str, Any]) -> dict[str, Any]:
    """The row, now that it is recorded."""
    with records.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(row, file=sys.stderr, flush=True)
    return row


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
        on_ray = row["mode"] in WORKERS  # the workers' time is not known
        used = "|" if on_ray else f"{row['processor']:.1f} | {each:.1f}"
        lines.append(
            f"| {row['size']:,} | {row['mode']} | {row['seconds']:.1f} | {used} | "
            f"{row['process']:.0f} | {row['megabytes']:.0f} | {row['width']} | "
            f"{100 * row['accuracy']:.2f} |"
        )
    return "\n".join(lines)


def workers_table(rows: list[dict[str, Any]]) -> str:
    """Two workers against one."""
    lines = [
        "| models | | one worker, s | two, s | ratio | start of Ray, s | ratio with the start |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    found = {
        (row["models"], row["size"], WORKERS[row["mode"]]): row
        for row in rows
        if row.get("mode") in WORKERS
    }
    for kind, size in sorted({key[:2] for key in found}):
        first, second = found[kind, size, 1], found[kind, size, 2]
        whole = [row["seconds"] + row["started"] for row in (first, second)]
        lines.append(
            f"| {size:,} | {kind} | {first['seconds']:.1f} | {second['seconds']:.1f} "
            f"| {second['seconds'] / first['seconds']:.2f} | {first['started']:.1f} and "
            f"{second['started']:.1f} | {whole[1] / whole[0]:.2f} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], target: Path) -> None:
    """Seconds and memory over the number of models, both axes logarithmic."""
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    styles = [
        ("in memory", "s", "-"),
        ("streamed", "o", "-"),
        ("tree", "^", "-"),
        ("tree, 1 Ray worker", "v", ":"),
        ("tree, 2 Ray workers", "D", ":"),
    ]
    for mode, mark, line in styles:
        chosen = [r for r in rows if r["models"] == "descendants" and r["mode"] == mode]
        chosen = sorted(chosen, key=lambda row: row["size"])
        sizes = [row["size"] for row in chosen]
        left.loglog(sizes, [row["seconds"] for row in chosen], line, marker=mark, label=mode)
        right.loglog(sizes, [row["process"] for row in chosen], line, marker=mark, label=mode)
    left.set(xlabel="models", ylabel="seconds")
    right.set(xlabel="models", ylabel="peak memory of the process (MB)", ylim=(300, 2000))
    right.set_yticks([300, 500, 1000, 2000])
    left.legend(fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
            axis.set_minor_formatter(NullFormatter())
    figure.tight_layout()
    figure.savefig(target, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/scale"))
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--figure", type=Path, default=Path("docs/scale.png"))
    parser.add_argument("--largest", type=int, default=10000, help="leave out larger sizes")
    parser.add_argument("--one", nargs=2, metavar=("MODE", "SIZE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(one(chosen.folder, chosen.one[0], int(chosen.one[1]))))
        return
    chosen.folder.mkdir(parents=True, exist_ok=True)
    chosen.records.parent.mkdir(parents=True, exist_ok=True)
    plan = sorted((row for row in PLAN if row[2] <= chosen.largest), key=lambda row: row[2])
    rows = run(chosen.folder, chosen.records, plan)
    for kind, title in [("descendants", "Descendants"), ("trained", "Trained")]:
        print(f"\n{title}\n\n{table(rows, kind)}")
    print(f"\nOn Ray\n\n{workers_table(rows)}")
    compared = [row for row in rows if row["models"] == AGAINST]
    print(
        f"\nAgainst a loop over rows\n\n{rows_table(Against(**row['found']) for row in compared)}"
    )
    draw(rows, chosen.figure)


if __name__ == "__main__":
    main()
