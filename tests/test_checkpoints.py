"""Files: what goes in comes out, and what cannot be used is named."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import nafi
from nafi.checkpoints import load_clients, read
from nafi.errors import CheckpointError, InputError, NafiError
from tests.fusion.networks import gap, seeded, trained_norms
from tests.graph import zoo

FACTORY = "tests.architectures:mlp"
INPUTS = (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)
IMAGES = (torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)),)


def test_a_model_comes_back(tmp_path: Path) -> None:
    model = seeded(0, 8, 12, 9, 5)
    file = tmp_path / "a.safetensors"
    nafi.save(model, file, factory=FACTORY, class_counts=[1, 2, 3, 4, 5], sample_count=15)
    assert gap(nafi.load(file), model, INPUTS) == 0
    _, manifest = read(file)
    assert manifest.factory == FACTORY
    assert manifest.class_counts == [1, 2, 3, 4, 5]
    assert manifest.sample_count == 15
    assert manifest.version == nafi.__version__


@pytest.mark.parametrize("method", ["nafi", "pfnm", "ot", "rebasin", "fedavg"])
def test_a_fused_model_comes_back_at_its_widths(tmp_path: Path, method: str) -> None:
    result = nafi.fuse([seeded(s, 8, 12, 9, 5) for s in range(3)], INPUTS, method=method)
    file = tmp_path / "fused.safetensors"
    nafi.save(result, file, factory=FACTORY)
    loaded = nafi.load(file)
    assert gap(loaded, result.model, INPUTS) == 0
    assert not loaded.training
    if method in ("nafi", "pfnm"):
        assert loaded.layers[0].out_features == result.widths["layers.0"] > 12


@pytest.mark.parametrize("batchnorm", ["attach", "fold", "average"])
def test_batch_normalisation_comes_back(tmp_path: Path, batchnorm: str) -> None:
    models = [trained_norms(s) for s in range(2)]
    result = nafi.fuse(models, IMAGES, method="pfnm", batchnorm=batchnorm)
    assert result.widths["stem"] > 6
    file = tmp_path / "fused.safetensors"
    nafi.save(result, file, factory="tests.fusion.networks:NormNet")
    assert gap(nafi.load(file), result.model, IMAGES) == 0


@pytest.mark.parametrize("name", ["unet_bilinear", "vit_fused", "lstm", "tied_language_model"])
def test_other_networks_come_back(tmp_path: Path, name: str) -> None:
    """Concatenations, heads, recurrent layers, shared tensors; at other widths where they may."""
    model, inputs = zoo.seeded(name)
    other, _ = zoo.seeded(name)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * tensor.std())
    result = nafi.fuse([model, other], inputs, method="pfnm")
    file = tmp_path / "fused.safetensors"
    nafi.save(result, file)
    loaded = nafi.load(file, factory=lambda: zoo.seeded(name)[0])
    assert gap(loaded, result.model, inputs) == 0
    names = dict(loaded.named_parameters(remove_duplicate=False))
    assert len({id(p) for p in names.values()}) == len(list(model.parameters()))


def test_existing_files_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"precious")
    with pytest.raises(InputError, match="exists already"):
        nafi.save(seeded(0, 8, 12, 9, 5), file)
    assert file.read_bytes() == b"precious"
    nafi.save(seeded(0, 8, 12, 9, 5), file, overwrite=True)
    assert len(load_file(file)) == 6


def test_an_ensemble_is_not_one_model(tmp_path: Path) -> None:
    result = nafi.fuse([seeded(s, 8, 12, 9, 5) for s in range(2)], INPUTS, method="ensemble")
    with pytest.raises(InputError, match="several models"):
        nafi.save(result, tmp_path / "e.safetensors")
    assert not list(tmp_path.iterdir())


def test_torch_files_hold_tensors_or_are_refused(tmp_path: Path) -> None:
    model = seeded(0, 8, 12, 9, 5)
    plain, nested, whole = (tmp_path / n for n in ("a.pt", "b.pt", "c.pt"))
    torch.save(model.state_dict(), plain)
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, nested)
    torch.save(model, whole)
    for file in (plain, nested):
        assert gap(nafi.load(file, FACTORY), model, INPUTS) == 0
    with pytest.raises(CheckpointError, match=r"c\.pt cannot be read with weights_only=True"):
        nafi.load(whole, FACTORY)


class Trap:
    """Writes a file if it is ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    file = tmp_path / "trap.pt"
    file.write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(CheckpointError):
        nafi.load(file, FACTORY)
    torch.save({"w": Trap(sprung)}, file)
    with pytest.raises(CheckpointError):
        nafi.load(file, FACTORY)
    assert not sprung.exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "neither a safetensors file nor"),
        (b"hello world, this is text", "neither a safetensors file nor"),
        (b"PK\x03\x04nonsense", "cannot be read"),
        ((10**6).to_bytes(8, "little") + b"{broken", "cannot be read"),
    ],
)
def test_foreign_files_are_named(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"x\.safetensors.*{told}"):
        nafi.load(file, FACTORY)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    nafi.save(seeded(0, 8, 12, 9, 5), file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"x\.safetensors cannot be read.*cut off"):
        nafi.load(file, FACTORY)


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    with pytest.raises(CheckpointError, match="does not exist"):
        nafi.load(file)
    with pytest.raises(CheckpointError, match="is a folder"):
        nafi.load(tmp_path)
    nafi.save(seeded(0, 8, 12, 9, 5), file)
    with pytest.raises(CheckpointError, match="give load a factory"):
        nafi.load(file)
    with pytest.raises(CheckpointError, match=r"lacks .*weight.* and has layers\.0\.bias"):
        nafi.load(file, lambda: nn.Sequential(nn.Linear(8, 5)))
    save_file({"layers.0.weight": torch.ones(2)}, file, metadata={"nafi": json.dumps({"odd": 1})})
    with pytest.raises(CheckpointError, match="manifest"):
        nafi.load(file)
    save_file({}, file)
    with pytest.raises(CheckpointError, match="no tensors"):
        nafi.load(file)


def test_clients_of_other_widths_are_read_at_their_own(tmp_path: Path) -> None:
    models = [seeded(0, 8, 12, 9, 5), seeded(1, 8, 7, 9, 5)]
    files = [tmp_path / f"{s}.safetensors" for s in range(2)]
    for model, file in zip(models, files, strict=True):
        nafi.save(model, file, factory=FACTORY, class_counts=[1] * 5)
    found = load_clients(files, None)
    assert found.factory == FACTORY
    assert found.class_counts == [[1.0] * 5] * 2
    for one, two in zip(found.models, models, strict=True):
        assert gap(one, two, INPUTS) == 0


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(NafiError, match=r"the folder .* does not exist"):
        nafi.save(seeded(0, 8, 12, 9, 5), tmp_path / "no" / "a.safetensors")
