"""`nafi statistics` and `nafi head` as clients and a server meet them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import nafi
from nafi.checkpoints import read
from tests.test_cli import run

NETWORKS = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

def example_inputs():
    return torch.zeros(2, 6)

def samples(seed, weights):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(torch.tensor(weights), 100, replacement=True, generator=generator)
    inputs = torch.randn(100, 6, generator=generator)
    return inputs + 2 * nn.functional.one_hot(labels, 6), labels

def north():
    inputs, labels = samples(1, [0.8, 0.2, 0.0])
    return [(inputs[:60], labels[:60]), (inputs[60:], labels[60:])]

def south():
    yield samples(2, [0.0, 0.5, 0.5])

def broken():
    raise RuntimeError("no disk")

def half():
    yield samples(2, [0.0, 0.5, 0.5])
    raise OSError("disk is gone")

def nothing():
    return None
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A fused network, wider than its factory makes it, and what makes clients' data."""
    (tmp_path / "networks.py").write_text(NETWORKS)
    namespace: dict[str, object] = {}
    exec(NETWORKS, namespace)
    torch.manual_seed(0)
    clients = [namespace["net"]().eval() for _ in range(2)]  # type: ignore[operator]
    fused = nafi.fuse(clients, (torch.zeros(2, 6),), max_width=2.0, evidence=10_000.0)
    nafi.save(fused, tmp_path / "fused.safetensors", factory="networks:net", class_counts=[1, 2, 3])
    return tmp_path


FUSED = ["fused.safetensors", "--model", "networks:net"]


def summed(folder: Path, name: str, *more: str) -> tuple[int, str, str]:
    arguments = ["--data", f"networks:{name}", "--out", f"{name}.stats"]
    done = run("statistics", *FUSED, *arguments, *more, cwd=folder)
    return done.returncode, done.stdout, done.stderr


def test_a_head_is_solved_from_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = summed(folder, "north")
    assert code == 0, err
    assert "100" in out
    assert "no sample" in out
    code, out, err = summed(folder, "south", "--json")
    assert code == 0, err
    assert json.loads(out)["samples"] == sum(json.loads(out)["class_counts"]) == 100
    files = ["north.stats", "south.stats"]
    done = run("head", *FUSED, *files, "--out", "final.safetensors", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "3.weight solved from 200 samples" in done.stdout
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "networks", raising=False)
    names = ("fused.safetensors", "final.safetensors")
    fused, final = (nafi.load(name, "networks:net") for name in names)
    networks = sys.modules.pop("networks")  # which load imported
    clients = [nafi.statistics(fused, batches()) for batches in (networks.north, networks.south)]
    expected = nafi.solve_head(fused, clients)
    inputs, labels = networks.samples(3, [1.0, 1.0, 1.0])
    with torch.no_grad():
        assert torch.equal(final(inputs), expected(inputs))
        assert (final(inputs).argmax(dim=1) == labels).float().mean() > 0.75
    assert read("final.safetensors")[1] == read("fused.safetensors")[1]


def complaint(folder: Path, *arguments: str) -> str:
    done = run(*arguments, cwd=folder)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


def test_what_cannot_be_done_is_said(folder: Path) -> None:
    def refused(data: str, out: str = "x.stats") -> str:
        return complaint(folder, "statistics", *FUSED, "--data", data, "--out", out)

    assert "ends in .stats" in refused("networks:north", "x.safetensors")
    assert "RuntimeError: no disk" in refused("networks:broken")
    assert "gives no batches (inputs, labels): TypeError" in refused("networks:nothing")
    assert "OSError: disk is gone" in refused("networks:half")
    assert "has no function" in refused("networks:west")
    assert "expected package.module:function" in refused("networks")
    assert not (folder / "x.stats").exists()
    assert summed(folder, "north")[0] == 0
    assert "exists already" in summed(folder, "north")[2]
    assert summed(folder, "north", "--force")[0] == 0

    def unsolved(*files: str, out: str = "y.safetensors") -> str:
        return complaint(folder, "head", *FUSED, *files, "--out", out)

    assert "ends in .safetensors" in unsolved("north.stats", out="y.stats")
    assert "one of the files to read" in unsolved("north.stats", out="fused.safetensors")
    assert "holds no statistics" in unsolved("north.stats", "fused.safetensors")
    other = nn.Sequential(nn.Linear(6, 3))
    nafi.save_statistics(
        nafi.statistics(other, [(torch.randn(60, 6), torch.arange(60) % 3)]), folder / "o.stats"
    )
    assert "o.stats and north.stats are statistics of different" in unsolved(
        "north.stats", "o.stats"
    )
    assert "does not have" in unsolved("o.stats")
    assert not (folder / "y.safetensors").exists()
