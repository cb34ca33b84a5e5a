"""Methods that other packages bring, by the entry-point group `nafi.methods`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "method-plugin"

USE = """
import torch
from torch import nn
import nafi
from nafi.errors import InputError
from nafi.federated import Architecture, Training, make_strategy
from nafi.fusion import METHODS, option_names
from nafi.graph import permute

ours = ["nafi", "pfnm", "ot", "rebasin", "fedavg", "stack", "ensemble"]
assert list(METHODS)[:7] == ours
assert set(METHODS) - set(ours) == {"greedy", "broken", "liar"}
assert option_names("greedy") == ("batchnorm", "restore_norm", "refit", "weigh_inputs", "reference")

factory = lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
torch.manual_seed(0)
model, x = factory(), torch.randn(5, 6)
spec = nafi.groups(model, (x,))
copy = permute(model, spec, {"0": torch.randperm(8)})
fused = nafi.fuse([model, copy], (x,), "greedy")
assert torch.allclose(fused.model(x), model(x), atol=1e-6)
assert fused.diagnostics["method"] == "greedy"

strategy = make_strategy(
    "match-then-average", Architecture(factory, (x,)), Training(), rounds=1, method="greedy"
)
assert strategy.method.name == "greedy"

def refused(method, text, **options):
    try:
        nafi.fuse([model, copy], (x,), method, **options)
    except InputError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{method} was not refused")

refused("greedy", "reference: found -1, expected a whole number of at least 0", reference=-1)
refused("greedy", "method greedy has no option 'penalty'", penalty=1)
refused("broken", "method broken (missing_module:Nothing) cannot be imported")
refused("liar", "liar: builtins:dict is not a class derived from nafi.fusion.Method")
refused("gready", "expected one of nafi, pfnm, ot, rebasin, fedavg, stack, ensemble")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as pip installs it, and two packages that are not what they say."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options]
    source = tmp_path_factory.mktemp("source")
    for file in EXAMPLE.iterdir():  # a copy, since a build leaves files beside the source
        if file.is_file():
            (source / file.name).write_bytes(file.read_bytes())
    subprocess.run([*command, str(folder), str(source)], check=True, timeout=120)
    for name, target in (("broken", "missing_module:Nothing"), ("liar", "builtins:dict")):
        info = folder / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[nafi.methods]\n{name} = {target}\n")
    return folder


@pytest.mark.slow
def test_an_installed_method_is_one_like_any_other(installed: Path) -> None:
    path = os.pathsep.join([str(installed), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", USE],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
