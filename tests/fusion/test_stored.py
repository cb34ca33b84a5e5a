"""Models that stay in files: the same results as of models in memory, in the memory of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nafi
from nafi.errors import CheckpointError, InputError
from nafi.fusion import FusionResult
from nafi.fusion.judge import verdict
from nafi.graph import named_tensors
from tests.fusion.networks import MLP, NormNet, seeded, trained_norms
from tests.graph.zoo import EinsumAttention, named

IMAGES = (torch.zeros(2, 3, 8, 8),)


class Gains(nn.Module):
    """Gains of a layer norm, which all neurons have in common, and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 6), nn.LayerNorm(6)
        self.lstm, self.last = nn.LSTM(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(self.norm(self.first(x).relu()))[0])


def gains(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Gains().eval()


def stored(models: list[nn.Module], folder: Path, make: Callable[[], nn.Module]) -> object:
    folder.mkdir(exist_ok=True)
    for s, model in enumerate(models):
        nafi.save(model, folder / f"{s:03}.safetensors")
    return nafi.open_models(folder / "*.safetensors", make)


def assert_same(one: FusionResult, two: FusionResult) -> None:
    assert one.widths == two.widths
    for group, places in one.assignments.items():
        for mine, theirs in zip(places, two.assignments[group], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    theirs_by_name = named_tensors(two.model)
    for name, tensor in named_tensors(one.model).items():
        assert torch.equal(tensor, theirs_by_name[name]), name
    assert one.diagnostics["size"] == two.diagnostics["size"]


CASES: dict[str, tuple[Callable[[int], nn.Module], Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "one layer": (lambda s: seeded(s, 7, 8, 3), lambda: MLP(7, 8, 3), (torch.zeros(2, 7),)),
    "two layers": (lambda s: seeded(s, 7, 8, 6, 3), lambda: MLP(7, 8, 6, 3), (torch.zeros(2, 7),)),
    "norms": (trained_norms, NormNet, IMAGES),
    "gains": (gains, Gains, (torch.zeros(2, 3, 5),)),
}


def test_nobody_is_advised_what_files_do_not_allow(tmp_path: Path) -> None:
    files = stored([seeded(s, 7, 8, 3) for s in range(3)], tmp_path, lambda: MLP(7, 8, 3))
    (*_, advice) = verdict(nafi.fuse(files, (torch.zeros(2, 7),))).advice
    assert "load them and give a probe" in advice
    assert "--probe" not in advice


@pytest.mark.parametrize("options", [{}, {"sweeps": 0}, {"method": "pfnm", "max_width": 1.5}])
@pytest.mark.parametrize("case", CASES)
def test_files_give_the_bytes_that_models_in_memory_give(
    case: str, options: dict[str, object], tmp_path: Path
) -> None:
    make, factory, inputs = CASES[case]
    models = [make(s) for s in range(5)]
    files = stored(models, tmp_path, factory)
    assert_same(nafi.fuse(models, inputs, **options), nafi.fuse(files, inputs, **options))


@pytest.mark.parametrize("options", [{}, {"max_width": 1.0, "sweeps": 0}, {"bases": "ordered"}])
@pytest.mark.parametrize("name", ["encoder_pre_norm", "encoder_post_norm", "einsum", "rotary"])
def test_transformers_are_treated_as_in_memory(
    name: str, options: dict[str, object], tmp_path: Path
) -> None:
    """Streams and heads whose bases are turned, heads that have an order, and both in one."""
    models, inputs = [], named(name).example_inputs()
    for seed in range(4):
        torch.manual_seed(seed)
        models.append(named(name).build().eval())
    files = stored(models, tmp_path, named(name).build)
    assert_same(nafi.fuse(models, inputs, **options), nafi.fuse(files, inputs, **options))


def test_different_numbers_of_heads_are_treated_as_in_memory(tmp_path: Path) -> None:
    models = [EinsumAttention(heads=heads).eval() for heads in (3, 5, 4)]
    inputs = named("einsum").example_inputs()
    files = stored(models, tmp_path, EinsumAttention)
    for bases in ("rotated", "ordered"):
        held = nafi.fuse(models, inputs, bases=bases)
        assert_same(held, nafi.fuse(files, inputs, bases=bases))


@pytest.mark.parametrize("batchnorm", ["fold", "average"])
def test_normalisation_is_treated_as_in_memory(batchnorm: str, tmp_path: Path) -> None:
    models = [trained_norms(s) for s in range(4)]
    files = stored(models, tmp_path, NormNet)
    held = nafi.fuse(models, IMAGES, batchnorm=batchnorm)
    assert_same(held, nafi.fuse(files, IMAGES, batchnorm=batchnorm))


def test_counts_widths_and_fedavg_are_treated_as_in_memory(tmp_path: Path) -> None:
    models = [seeded(s, 7, width, 3) for s, width in enumerate((8, 6, 9, 8))]
    inputs, make = (torch.zeros(2, 7),), lambda: MLP(7, 8, 3)
    files = stored(models, tmp_path / "a", make)
    counts = np.random.default_rng(0).integers(1, 50, size=(4, 3))
    held = nafi.fuse(models, inputs, class_counts=counts)
    assert_same(held, nafi.fuse(files, inputs, class_counts=counts))
    models = [seeded(s, 7, 8, 3) for s in range(3)]
    files = stored(models, tmp_path / "b", make)
    known = {"method": "fedavg", "sample_counts": [3, 4, 9]}
    assert_same(nafi.fuse(models, inputs, **known), nafi.fuse(files, inputs, **known))


def test_a_fusion_never_makes_other_networks_than_the_first(tmp_path: Path) -> None:
    models = [seeded(s, 7, 8, 3) for s in range(10)]
    made = []

    def make() -> nn.Module:
        made.append(1)
        return MLP(7, 8, 3)

    files = stored(models, tmp_path, make)
    nafi.fuse(files, (torch.zeros(2, 7),))
    assert len(made) <= 6  # each time that it is needed, since it is not held meanwhile


def test_what_needs_all_models_at_once_is_refused(tmp_path: Path) -> None:
    models = [seeded(s, 7, 8, 3) for s in range(3)]
    files, inputs = stored(models, tmp_path, lambda: MLP(7, 8, 3)), (torch.zeros(2, 7),)
    with pytest.raises(InputError, match="method ot needs all models in memory at once"):
        nafi.fuse(files, inputs, "ot")
    with pytest.raises(InputError, match="probe: what all models do on it"):
        nafi.fuse(files, inputs, probe=torch.randn(9, 7))
    with pytest.raises(InputError, match="clip and trim"):
        nafi.fuse(files, inputs, clip=2.0)
    scored = nafi.fuse(files, inputs, validate=lambda model: 1.0)
    assert scored.scores is not None
    assert len(scored.scores.clients) == 3
    assert scored.scores.ensemble is None


def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    make = lambda: MLP(7, 8, 3)  # noqa: E731
    nafi.save(seeded(0, 7, 8, 3), tmp_path / "good.safetensors")
    broken = seeded(1, 7, 8, 3)
    with torch.no_grad():
        next(broken.parameters())[0, 0] = torch.nan
    nafi.save(broken, tmp_path / "nan.safetensors")
    nafi.save(seeded(0, 7, 8, 8, 3), tmp_path / "other.safetensors")
    torch.save(seeded(0, 7, 8, 3).state_dict(), tmp_path / "old.pt")
    paths = {name: tmp_path / name for name in ("good.safetensors", "nan.safetensors")}
    files = nafi.open_models(list(paths.values()), make)
    with pytest.raises(InputError, match=r"model 1: .* holds 1 value that is NaN"):
        nafi.fuse(files, (torch.zeros(2, 7),))
    with pytest.raises(CheckpointError, match=r"other\.safetensors"):
        nafi.open_models([paths["good.safetensors"], tmp_path / "other.safetensors"], make)
    with pytest.raises(CheckpointError, match=r"old\.pt is no file of safetensors"):
        nafi.open_models(tmp_path / "old.pt", make)
    with pytest.raises(CheckpointError, match=r"gone\.safetensors does not exist"):
        nafi.open_models(tmp_path / "gone.safetensors", make)
    with pytest.raises(InputError, match="no file matches"):
        nafi.open_models(tmp_path / "*.none", make)


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    files = stored([seeded(s, 7, 8, 3) for s in range(3)], tmp_path, lambda: MLP(7, 8, 3))
    (tmp_path / "001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"001\.safetensors"):
        nafi.fuse(files, (torch.zeros(2, 7),))  # type: ignore[arg-type]


MEMORY = """
import gc, json, re, sys
import torch, nafi
from nafi.experiments.models import ResNet, resnet_widths
from nafi.experiments.sequences import GPT, transformer_widths
from nafi.graph import check
from tests.fusion.networks import MLP

def kilobytes(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1))

kinds = {
    "mlp": (lambda: MLP(1500, 400, 10), torch.zeros(2, 1500), {}),
    "resnet": (lambda: ResNet(resnet_widths(96)), torch.zeros(2, 3, 32, 32), {"max_width": 1.0}),
    "gpt": (
        lambda: GPT(transformer_widths(320, 5, 4), 1000),
        torch.zeros(2, 64, dtype=torch.long),
        {"max_width": 1.0},
    ),
}
check._LARGE = 2**22  # networks of more numbers are tested in single precision
make, inputs, options = kinds[sys.argv[1]]
path, count = sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
nafi.save(make().eval(), path)
nafi.fuse(nafi.open_models([path] * 2, make), (inputs,), sweeps=0, **options)
gc.collect()
open("/proc/self/clear_refs", "w").write("5")  # forget the highest use so far
before = kilobytes("VmRSS")
nafi.fuse(nafi.open_models([path] * count, make), (inputs,), sweeps=0, **options)
print(json.dumps((kilobytes("VmHWM") - before) * 1024))
"""


def peak(kind: str, count: int, file: Path) -> float:
    """The most memory that a fusion takes, in files of one model."""
    # Freed memory goes back to the system at once, so that what is measured is what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, kind, str(file), str(count)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return float(json.loads(done.stdout)) / file.stat().st_size


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_many_files_take_the_memory_of_few(tmp_path: Path) -> None:
    few, many = (peak("mlp", count, tmp_path / f"{count}.safetensors") for count in (3, 40))
    assert many - few < 4  # held together, 37 models more would take 37


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("kind", ["resnet", "gpt"])
def test_a_deep_network_takes_the_memory_of_four(kind: str, tmp_path: Path) -> None:
    """Three fused models and one client, and a little for everything else."""
    assert peak(kind, 5, tmp_path / "one.safetensors") < 4.5
