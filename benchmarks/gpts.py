"""Time and memory of fusing four GPTs of 25 million parameters at the size of one.

Random weights: the work is the same. Prints for each stage of a fusion its processor seconds, how
many runs of all four on the probe that is, and the peak of memory beyond the four models, in units
of one of them. Each way to fuse runs in a process of its own.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nafi
from nafi.experiments.sequences import GPT, transformer_widths
from nafi.experiments.text import LENGTH
from nafi.fusion import api, descent, method, networks
from nafi.graph import Bases

CLIENTS, WORDS, PROBE = 4, 3000, 32
WAYS: dict[str, dict[str, Any]] = {
    "by weights": {},
    "by function": {"probe": True, "refit": False},
    "by function, refitted": {"probe": True},
}
# Where a fusion spends its time: who calls what, and what that is.
STAGES: list[tuple[Any, str, str]] = [
    (networks, "groups", "groups, with their test"),
    (networks, "free_bases", "which bases are free"),
    (Bases, "canonical", "canonical bases"),
    (networks, "record", "running the clients on the probe"),
    (networks, "unlike_rows", "running the clients on the probe"),
    (descent, "common_bases", "rotating"),
    (descent, "circuit_table", "matching: circuits of heads"),
    (descent, "response_table", "matching: responses"),
    (descent, "comparable", "matching: weights"),
    (descent, "match", "matching: assignments"),
    (method, "merged_network", "merging"),
    (method, "refit", "refitting"),
    (method, "finished_network", "finishing"),
    (api, "agreement", "comparing with the ensemble"),
    (api, "measured_size", "measuring its size"),
]
REST = "everything else"


class Stages:
    """Seconds and peak of memory of each stage, without those that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}
        self._open = [REST]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within this, the stages are watched."""
        for owner, name, label in STAGES:
            setattr(owner, name, self._around(getattr(owner, name), label))
        self._restart()
        yield
        self._note()

    def _around(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self._note()
            self._open.append(label)
            try:
                return function(*arguments, **options)
            finally:
                self._note()
                self._open.pop()

        return watched

    def _note(self) -> None:
        """Charge what was used since the last note to the innermost open stage."""
        label = self._open[-1]
        elapsed = time.process_time() - self._start
        self.seconds[label] = self.seconds.get(label, 0.0) + elapsed
        self.peaks[label] = max(self.peaks.get(label, 0), memory("VmHWM"))
        self._restart()

    def _restart(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is used now
        self._start = time.process_time()


def memory(key: str) -> int:
    """Bytes of this process: VmRSS those now, VmHWM the most since the peak was set back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(key)))


def gpt(width: int, blocks: int, heads: int = 8, words: int = WORDS) -> nn.Module:
    """With weights large enough for neurons to differ, and gains that are not one."""
    model = GPT(transformer_widths(width, heads, blocks), words).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                tensor.add_(0.1 * torch.randn_like(tensor))
    return model


def measure(way: str, width: int, blocks: int) -> dict[str, Any]:
    torch.manual_seed(0)
    small = [gpt(64, 1) for _ in range(2)]
    words: Tensor = torch.randint(WORDS, (PROBE, LENGTH))
    options = {"max_width": 1.0, **WAYS[way]}
    if options.pop("probe", False):
        options["probe"] = words
    nafi.fuse(small, (words[:2],), **options)  # loads what torch loads when it is first used
    models = [gpt(width, blocks) for _ in range(CLIENTS)]
    count = sum(p.numel() for p in models[0].parameters())
    with torch.no_grad():
        start = time.process_time()
        for model in models:
            model(words)
        forward = time.process_time() - start
    gc.collect()
    before, stages = memory("VmRSS"), Stages()
    with stages.watching():
        result = nafi.fuse(models, (words[:2],), **options)
    assert sum(p.numel() for p in result.model.parameters()) == count
    over = {label: (peak - before) / (4 * count) for label, peak in stages.peaks.items()}
    return {"count": count, "forward": forward, "seconds": stages.seconds, "peaks": over}


def print_table(way: str, found: dict[str, Any]) -> None:
    print(f"\n| {way} | seconds | runs of all on the probe | peak memory, models |")
    print("| --- | --- | --- | --- |")
    seconds, peaks, forward = found["seconds"], found["peaks"], found["forward"]
    order = dict.fromkeys([*(label for _, _, label in STAGES), REST])
    for label in (label for label in order if label in seconds):
        ratio = seconds[label] / forward
        print(f"| {label} | {seconds[label]:.1f} | {ratio:.1f} | {peaks[label]:.1f} |")
    total = sum(seconds.values())
    print(f"| **all** | {total:.1f} | {total / forward:.1f} | {max(peaks.values()):.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=WAYS, help="only this way, as JSON")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.way:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(arguments.way, arguments.width, arguments.blocks)))
        return
    # Freed memory goes back to the system at once, so that what is measured is what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    sizes = ["--width", str(arguments.width), "--blocks", str(arguments.blocks)]
    for number, way in enumerate(WAYS):
        command = [sys.executable, __file__, "--way", way, *sizes]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
        found = json.loads(done.stdout)
        if number == 0:
            megabytes = 4 * found["count"] / 1e6
            print(
                f"{CLIENTS} GPTs of {found['count'] / 1e6:.1f} million parameters, {megabytes:.0f} "
                f"MB each; a probe of {PROBE} x {LENGTH} words; {torch.get_num_threads()} thread(s)"
            )
        print_table(way, found)


if __name__ == "__main__":
    main()
