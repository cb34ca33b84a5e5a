"""Files as training frameworks write them, and networks as people write them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nafi
from nafi.checkpoints import PrefixWarning
from nafi.errors import CheckpointError, InputError
from tests.fusion.networks import gap, seeded
from tests.test_cli import run

NETWORKS = """
import torch
from torch import nn
from tests.test_training_files import ByName, lazy
from tests.fusion.networks import MLP

def net():
    return MLP(8, 12, 9, 5)

def other():
    return nn.Sequential(nn.Linear(8, 5))

def named():
    return ByName()

def example_inputs():
    return torch.zeros(2, 8)
"""
NAMED = """
from tests.test_training_files import ByName as named, INPUTS
def example_inputs():
    return INPUTS
"""
INPUTS = {"x": torch.zeros(2, 8), "scale": torch.ones(2, 1)}
ONE = (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)


class ByName(nn.Module):
    """Takes keyword arguments alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, *, x: Tensor, scale: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * scale


def lazy() -> nn.Module:
    return nn.Sequential(
        nn.LazyConv1d(6, 3),
        nn.LazyBatchNorm1d(),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(5),
    )


def lightning(model: nn.Module, prefix: str = "model.", **more: Any) -> dict[str, Any]:
    """A checkpoint with what Lightning puts into one."""
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    score = torch.tensor(0.5)
    callback = {"monitor": "val_loss", "best_model_score": score, "best_model_path": "/x/y.ckpt"}
    optimiser = torch.optim.Adam(model.parameters()).state_dict()
    return {
        "epoch": 3,
        "global_step": 120,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": state | {"criterion.weight": torch.ones(5)},
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 4}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'val_loss'}": callback},
        "optimizer_states": [optimiser],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 1e-3, "widths": [12, 9]},
        **more,
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With a module of factories that is not mistaken for that of another folder."""
    (tmp_path / "networks.py").write_text(NETWORKS)
    for seed, name in enumerate("ab"):
        torch.save(lightning(seeded(seed, 8, 12, 9, 5)), tmp_path / f"{name}.ckpt")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "networks", raising=False)
    yield tmp_path
    sys.modules.pop("networks", None)


def fuse(folder: Path, *more: str, network: str = "net") -> tuple[int, str]:
    options = ["--model", f"networks:{network}", "--out", "g.safetensors", "--force", *more]
    done = run("fuse", "a.ckpt", "b.ckpt", *options, cwd=folder)
    return done.returncode, done.stderr


def test_the_prefix_of_lightning_is_guessed_and_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, told = fuse(folder, "--probe", "none")
    assert code == 0, told
    said = "a.ckpt: the network's names stand behind 'model.' (--strip-prefix); criterion.weight"
    assert said in told
    monkeypatch.chdir(folder)
    direct = nafi.fuse([seeded(s, 8, 12, 9, 5) for s in range(2)], ONE)
    assert gap(nafi.load("g.safetensors", "networks:net"), direct.model, ONE) < 1e-6
    code, told = fuse(folder, "--probe", "none", "--strip-prefix", "model")
    assert (code, "stand behind" in told) == (0, False)


def test_a_prefix_that_does_not_fit_names_both_sides(folder: Path) -> None:
    code, told = fuse(folder, "--strip-prefix", "net.")
    assert code == 2
    assert "a.ckpt has no names behind net.; it has model.layers.0.weight" in told
    code, told = fuse(folder, network="other")
    assert code == 2
    assert re.search(r"a\.ckpt is not a checkpoint .* lacks 0\.weight.* has model\.layers\.0", told)
    assert told.count("\n") == 1


def test_two_networks_in_a_file_are_not_guessed_between(tmp_path: Path) -> None:
    models = [seeded(seed, 8, 12, 9, 5) for seed in range(2)]
    content = lightning(models[0])
    content["state_dict"] |= {f"ema.{n}": t for n, t in models[1].state_dict().items()}
    torch.save(content, tmp_path / "a.ckpt")
    factory = "tests.architectures:mlp"
    with pytest.raises(CheckpointError, match=r"several networks .* under model\., ema\.; say"):
        nafi.load(tmp_path / "a.ckpt", factory)
    for name, model in zip(["model", "ema."], models, strict=True):
        assert gap(nafi.load(tmp_path / "a.ckpt", factory, strip_prefix=name), model, ONE) == 0


@pytest.mark.parametrize("prefix", ["net.", "model._orig_mod.", "model.module.", "a.b.c."])
def test_any_prefix_is_found(tmp_path: Path, prefix: str) -> None:
    model = seeded(0, 8, 12, 9, 5)
    torch.save(lightning(model, prefix), tmp_path / "a.ckpt")
    with pytest.warns(PrefixWarning, match=re.escape(repr(prefix))):
        assert gap(nafi.load(tmp_path / "a.ckpt", "tests.architectures:mlp"), model, ONE) == 0


def test_what_would_run_code_is_named(tmp_path: Path) -> None:
    """Hyperparameters may be of any class; the tensors beside them are refused with them."""
    content = lightning(seeded(0, 8, 12, 9, 5), hyper_parameters=argparse.Namespace(lr=1))
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"more than tensors \(argparse\.Namespace\); save"):
        nafi.load(tmp_path / "a.ckpt", "tests.architectures:mlp")


def test_forwards_of_keywords_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "networks.py").write_text(NAMED)
    models = []
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        models.append(ByName().eval())
        torch.save(lightning(models[-1], "net."), folder / f"{name}.ckpt")
    code, told = fuse(folder, "--probe", "none", network="named")
    assert code == 0, told
    monkeypatch.chdir(folder)
    fused, direct = nafi.load("g.safetensors", "networks:named"), nafi.fuse(models, INPUTS).model
    inputs = {"x": ONE[0], "scale": torch.rand(4, 1)}
    with torch.no_grad():
        assert torch.allclose(fused(**inputs), direct(**inputs), atol=1e-6)
    assert fused.first.out_features == direct.first.out_features > 12


def trained_lazy(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = lazy()
    model(torch.randn(7, 4, 8))  # gives its layers their sizes
    return model.eval()


def test_lazy_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [trained_lazy(seed) for seed in range(2)]
    for model, name in zip(models, "ab", strict=True):
        torch.save(model.state_dict(), folder / f"{name}.ckpt")
    shape = ["--input-shape", "4,8", "--probe", "none"]
    code, told = fuse(folder, *shape, network="lazy")
    assert code == 0, told
    monkeypatch.chdir(folder)
    fused = nafi.load("g.safetensors", "networks:lazy")
    inputs = (torch.randn(3, 4, 8),)
    direct = nafi.fuse(models, inputs)
    assert gap(fused, direct.model, inputs) < 1e-5
    # Weights that were loaded into lazy layers: these do not know their sizes yet.
    loaded = [lazy() for _ in models]
    for copy, model in zip(loaded, models, strict=True):
        copy.load_state_dict(model.state_dict())
    assert gap(nafi.fuse(loaded, inputs).model, direct.model, inputs) == 0
    with pytest.raises(InputError, match="model 1 has lazy layers that never ran"):
        nafi.fuse([models[0], lazy()], inputs)
    with pytest.raises(CheckpointError, match=r"a\.ckpt: the network has lazy layers, which need"):
        nafi.load("a.ckpt", lazy)
    done = run("inspect", "--model", "networks:lazy", "--input-shape", "4,8", cwd=folder)
    assert done.returncode == 0, done.stderr
