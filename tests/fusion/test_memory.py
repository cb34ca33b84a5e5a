"""What a fusion needs beside its inputs, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from nafi.fusion import METHODS as REGISTRY

PROBE = """
import copy, gc, json, re, sys
import torch, nafi
from tests.fusion.networks import MLP

def kilobytes(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1))

torch.manual_seed(0)
truth = MLP(1500, 400, 400, 10)
models = [copy.deepcopy(truth).eval() for _ in range(8)]
with torch.no_grad():  # neurons that clients share, as trained ones do: else all would be kept
    for model in models:
        for tensor in model.parameters():
            tensor.add_(0.3 * tensor.std() * torch.randn_like(tensor))
size = sum(t.numel() * t.element_size() for m in models for t in m.state_dict().values())

def ratio(method):
    warm = [MLP(20, 30, 5) for _ in range(2)]
    nafi.fuse(warm, (torch.zeros(2, 20),), method=method)  # imports, and what torch sets up once
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # forget the highest use so far
    before = kilobytes("VmRSS")
    found = nafi.fuse(models, (torch.zeros(2, 1500),), method=method)
    assert method == "stack" or max(found.widths.values(), default=400) < 800
    return (kilobytes("VmHWM") - before) * 1024 / size

print(json.dumps({method: ratio(method) for method in sys.argv[1:]}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_stays_within_three_times_the_inputs() -> None:
    # Freed memory goes back to the system at once, so that what is measured is what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *REGISTRY],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    ratios = json.loads(done.stdout)
    assert set(ratios) == set(REGISTRY)
    assert max(ratios.values()) < 3.0, ratios
