"""Files: what goes in comes out, and what cannot be used is named."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import nafi
from nafi.checkpoints import load_clients, read
from nafi.errors import CheckpointError, InputError, NafiError
from nafi.files import atomic_path
from nafi.manifest import CHECKS, Manifest
from nafi.trust import Trust
from tests.fusion.networks import gap, seeded, trained_norms
from tests.graph import zoo
from tests.graph.test_rebuild import Renamed

FACTORY = "tests.architectures:mlp"
INPUTS = (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)
IMAGES = (torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)),)


def test_a_model_comes_back(tmp_path: Path) -> None:
    model = seeded(0, 8, 12, 9, 5)
    file = tmp_path / "a.safetensors"
    nafi.save(model, file, factory=FACTORY, class_counts=[1, 2, 3, 4, 5], sample_count=15)
    assert gap(nafi.load(file, FACTORY), model, INPUTS) == 0
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
    loaded = nafi.load(file, trust_factory=FACTORY)
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
    assert gap(nafi.load(file, trust_factory=True), result.model, IMAGES) == 0


@pytest.mark.slow
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


def small_bert() -> nn.Module:
    """Its code has a fixed number of numbers for each head, and the classifier a pooler before."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
    tables = {"vocab_size": 31, "max_position_embeddings": 12, "num_labels": 3}
    return BertForSequenceClassification(BertConfig(num_hidden_layers=2, **sizes, **tables)).eval()


def test_a_fused_bert_comes_back_at_its_heads(tmp_path: Path) -> None:
    """Shapes tell the product of heads and their width alone; what is saved says both."""
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(small_bert())
    words = torch.arange(10).reshape(2, 5)
    inputs = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    result = nafi.fuse(models, inputs)
    heads = [w for name, w in result.widths.items() if name.endswith("self.query")]
    assert max(heads) > 4
    assert result.widths["bert.pooler.dense"] > 16
    file = tmp_path / "fused.safetensors"
    for each in (result, result.model):
        nafi.save(each, file, example_inputs=inputs, overwrite=True)
        loaded = nafi.load(file, small_bert)
        assert gap(loaded, result.model, (words,)) == 0
    again = nafi.fuse([loaded, models[0]], inputs)
    nafi.save(again, file, overwrite=True)
    assert gap(nafi.load(file, small_bert), again.model, (words,)) == 0


class Forgetful(nn.Module):
    """Adds numbers that are in no file, and others whenever it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("shift", torch.randn(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.shift


def test_what_would_not_come_back_is_not_written(tmp_path: Path) -> None:
    file, inputs = tmp_path / "a.safetensors", (torch.zeros(2, 4),)
    factory = "tests.test_checkpoints:Forgetful"
    nafi.save(Forgetful(), file, factory=factory)
    before = file.read_bytes()
    with pytest.raises(CheckpointError, match=r"a\.safetensors is not written.*outputs differ by"):
        nafi.save(Forgetful(), file, factory=factory, overwrite=True, verify=inputs)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(CheckpointError, match=r"is not written.*give load a factory"):
        nafi.save(nn.Linear(4, 3), tmp_path / "b.safetensors", verify=inputs)
    nafi.save(nn.Linear(4, 3), file, factory="torch.nn:Linear", overwrite=True)
    with pytest.raises(CheckpointError, match="is not written"):  # Linear() lacks arguments
        nafi.save(nn.Linear(4, 3), file, factory="torch.nn:Linear", overwrite=True, verify=inputs)


def test_existing_files_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"precious")
    with pytest.raises(InputError, match="exists already"):
        nafi.save(seeded(0, 8, 12, 9, 5), file)
    assert file.read_bytes() == b"precious"
    nafi.save(seeded(0, 8, 12, 9, 5), file, overwrite=True)
    assert len(load_file(file)) == 6


def make_mlp() -> nn.Module:
    return seeded(0, 8, 12, 9, 5)


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_an_ensemble_is_one_file(average: str, tmp_path: Path) -> None:
    models = [seeded(s, 8, 12, 9, 5) for s in range(2)]
    result = nafi.fuse(models, INPUTS, method="ensemble", average=average)
    nafi.save(result, tmp_path / "e.safetensors")
    read = nafi.load(tmp_path / "e.safetensors", make_mlp)
    assert gap(read, result.model, INPUTS) < 1e-6


@pytest.mark.parametrize("tensor", ["shares", "models.1.layers.0.weight"])
def test_an_ensemble_that_lacks_a_tensor_is_refused(tensor: str, tmp_path: Path) -> None:
    models, file = [seeded(s, 8, 12, 9, 5) for s in range(2)], tmp_path / "e.safetensors"
    nafi.save(nafi.fuse(models, INPUTS, method="ensemble"), file)
    with safe_open(file, framework="pt") as handle:
        metadata = handle.metadata()
    state = {name: value for name, value in load_file(file).items() if name != tensor}
    save_file(state, file, metadata=metadata)
    with pytest.raises(CheckpointError, match=r"what each of its 2|lacks layers\.0\.weight"):
        nafi.load(file, make_mlp)


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
    found = load_clients(files, None, trust=Trust((FACTORY,)))
    assert found.factory == FACTORY
    assert found.class_counts == [[1.0] * 5] * 2
    for one, two in zip(found.models, models, strict=True):
        assert gap(one, two, INPUTS) == 0


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(NafiError, match=r"the folder .* does not exist"):
        nafi.save(seeded(0, 8, 12, 9, 5), tmp_path / "no" / "a.safetensors")


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))


def test_a_mixed_precision_file_keeps_the_dtype_of_every_tensor(tmp_path: Path) -> None:
    model = mixed().half()
    model[1].float()
    with torch.no_grad():
        model[1].weight.fill_(1 / 3)  # not a number of float16
    file = tmp_path / "a.safetensors"
    nafi.save(model, file)
    loaded = nafi.load(file, mixed)
    for name, tensor in model.state_dict().items():
        assert loaded.state_dict()[name].dtype == tensor.dtype, name
        assert torch.equal(loaded.state_dict()[name], tensor), name


class Positions(nn.Module):
    """Adds a table that is in no file."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.table)


def test_what_is_in_no_file_follows_the_dtype_of_most_numbers(tmp_path: Path) -> None:
    model = Positions().double()
    model.norm.float()
    file = tmp_path / "a.safetensors"
    nafi.save(model, file)
    loaded = nafi.load(file, Positions)
    assert loaded.table.dtype == torch.float64
    assert loaded.norm.weight.dtype == torch.float32
    assert loaded(torch.zeros(2, 4, dtype=torch.float64)).dtype == torch.float64


def test_other_kinds_of_numbers_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    for dtype in (torch.int32, torch.complex64):
        state = {name: t.to(dtype) for name, t in nn.Linear(2, 2).state_dict().items()}
        torch.save(state, file)
        with pytest.raises(CheckpointError, match=rf"weight is {dtype}, expected torch\.float32"):
            nafi.load(file, lambda: nn.Linear(2, 2))


class Holder(nn.Module):
    """A network whose only child is called as DataParallel calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Tied(nn.Module):
    """Two names for one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("network", [Holder, Tied, mixed])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        nn.DataParallel,
        torch.compile,
        lambda model: torch.compile(nn.DataParallel(model)),
        lambda model: nn.DataParallel(torch.compile(model)),
    ],
    ids=["plain", "parallel", "compiled", "compiled parallel", "parallel compiled"],
)
def test_wrapped_networks_come_back(tmp_path: Path, network: type, wrap: type) -> None:
    """Prefixes of wrappers go, names of the network stay, shared tensors stay shared."""
    model = network()
    for file, write in [
        (tmp_path / "a.safetensors", nafi.save),
        (tmp_path / "a.pt", lambda wrapped, path: torch.save(wrapped.state_dict(), path)),
    ]:
        write(wrap(model), file)
        loaded = nafi.load(file, network)
        assert gap(loaded, model, (torch.randn(3, 4),)) == 0
        assert len(list(loaded.parameters())) == len(list(model.parameters()))


@pytest.fixture
def umask() -> Iterator[None]:
    """Nobody but the owner may read new files."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def permissions(file: Path) -> int:
    return file.stat().st_mode & 0o777


@pytest.mark.usefixtures("umask")
def test_new_files_follow_the_umask(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    nafi.save(seeded(0, 8, 12, 9, 5), file)
    assert permissions(file) == 0o600
    os.umask(0o027)
    nafi.save(seeded(0, 8, 12, 9, 5), tmp_path / "b.safetensors")
    assert permissions(tmp_path / "b.safetensors") == 0o640


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444])
def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"old")
    file.chmod(mode)
    nafi.save(seeded(0, 8, 12, 9, 5), file, overwrite=True)
    assert permissions(file) == mode


def test_while_it_is_written_a_file_is_as_closed_as_before(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.touch(mode=0o600)
    with atomic_path(file) as partial:
        assert permissions(partial) == 0o600
    with atomic_path(tmp_path / "new.txt", private=True) as partial:
        assert permissions(partial) == 0o600
    assert permissions(tmp_path / "new.txt") == 0o600


def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("precious")

    def fail() -> None:
        with atomic_path(file) as partial:
            partial.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert file.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [file]


WRONG_MANIFESTS: list[tuple[object, str]] = [
    ([], "expected a JSON object"),
    (3, "expected a JSON object"),
    ({"odd": 1}, "unknown fields odd"),
    ({"factory": 3}, "factory: found 3, expected package.module:function"),
    ({"folded": None}, "folded: found None, expected true or false"),
    ({"folded": 1}, "folded"),
    ({"version": None}, "version"),
    ({"version": 1}, "version"),
    ({"widths": {"a": 1.0}}, "widths: .*a whole number for each group"),
    ({"widths": {"a": True}}, "widths"),
    ({"widths": [1]}, "widths"),
    ({"spec": []}, "spec"),
    ({"aliases": {"a": 1}}, "aliases"),
    ({"class_counts": [True]}, "class_counts"),
    ({"class_counts": ["1"]}, "class_counts"),
    ({"class_counts": [-1]}, "class_counts"),
    ({"class_counts": [float("inf")]}, "class_counts"),
    ({"class_counts": {"0": 1}}, "class_counts: found an object, expected a list"),
    ({"sample_count": 10**400}, "sample_count"),
    ({"factory": "\ud800"}, "surrogates not allowed"),
    ({"spec": {"\ud800": 1}}, "surrogates not allowed"),
    ({"sample_count": float("nan")}, "sample_count"),
    ({"sample_count": "12"}, "sample_count"),
    ({"inputs": [[2, "float32"]]}, "inputs"),
    ({"inputs": {"x": [2, "float32"]}}, "inputs"),
    ({"inputs": {"x": 3}}, "inputs"),
    ({"inputs": "x"}, "inputs"),
    ({"inputs": [[[2], "float32", 1]]}, "inputs"),
    ({"inputs": [[[2.0], "float32"]]}, "inputs"),
    ({"inputs": [[[True], "float32"]]}, "inputs"),
    ({"inputs": [[[-1], "float32"]]}, "inputs"),
    ({"inputs": [[[2], "nn"]]}, "inputs"),
    ({"inputs": [[[2], "qint8"]]}, "inputs"),
    ({"inputs": [[[0, 2**70], "float32"]]}, "inputs"),
    ({"inputs": [[[2**20, 2**20], "float32"]]}, "inputs: .*at most"),
    ({"inputs": [[[2**28], "float32"], [[1], "float32"]]}, "inputs: .*at most"),
]


@pytest.mark.parametrize(("manifest", "message"), WRONG_MANIFESTS)
def test_every_field_of_a_manifest_is_checked(manifest: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Manifest.from_json(json.dumps(manifest))


@pytest.mark.parametrize("text", ["", "{", "nonsense", "[" * 10**6, '{"spec": ' * 10**5])
def test_what_is_not_json_is_no_manifest(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting|nested too deeply"):
        Manifest.from_json(text)


def test_a_manifest_comes_back() -> None:
    manifest = Manifest(
        factory="a:b",
        widths={"g": 3},
        spec={"axes": [1]},
        folded=True,
        inputs=[([2, 3], "float32"), ([], "int64")],
        class_counts=[1.0, 0.5],
        sample_count=3.0,
        aliases={"x": "y"},
    )
    read_back = Manifest.from_json(manifest.to_json())
    assert read_back.to_json() == manifest.to_json()
    assert [(x.shape, x.dtype) for x in read_back.example_inputs() or ()] == [
        (torch.Size([2, 3]), torch.float32),
        (torch.Size([]), torch.int64),
    ]
    named = Manifest(inputs={"x": ([2, 3], "float32"), "quick": True, "mask": None})
    inputs = Manifest.from_json(named.to_json()).example_inputs()
    assert isinstance(inputs, dict)
    assert inputs.pop("x").equal(torch.zeros(2, 3))
    assert inputs == {"quick": True, "mask": None}
    nothing = Manifest.from_json('{"factory": null, "inputs": null}')
    assert nothing == Manifest()
    assert set(CHECKS) == {field.name for field in fields(Manifest)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["cross_attention", "vit_fused", "einsum", "bert_sdpa", "gpt2", "monai_vit"],
)
@pytest.mark.filterwarnings("ignore::nafi.graph.SpecWarning", "ignore::nafi.fusion.FusionWarning")
def test_networks_with_heads_come_back(name: str, tmp_path: Path) -> None:
    """Heads and head width occur as a product only; what was fused is loaded all the same."""
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(zoo.named(name).build().eval())
    inputs = zoo.named(name).example_inputs()
    result = nafi.fuse(models, inputs, evidence=1000.0)
    grown = [row["group"] for row in result.summary() if row["width"] > row["local"][0]]
    assert grown, "nothing grew, so nothing was rebuilt"
    nafi.save(result, tmp_path / "fused.safetensors", example_inputs=inputs)
    loaded = nafi.load(tmp_path / "fused.safetensors", lambda: zoo.named(name).build())
    assert gap(loaded, result.model, inputs) < 1e-6


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


_WRAPS = {
    "plain": _plain,
    "compiled": lambda: torch.compile(_plain(), backend="eager"),
    "parallel": lambda: nn.DataParallel(_plain()),
}


@pytest.mark.parametrize("saved", _WRAPS)
@pytest.mark.parametrize("made", _WRAPS)
def test_factories_may_compile_or_wrap(tmp_path: Path, saved: str, made: str) -> None:
    models = [_WRAPS[saved]() for _ in range(2)]
    result = nafi.fuse(models, INPUTS, penalty=0.0, evidence=1e5)
    assert result.widths["0"] > 6
    nafi.save(result, tmp_path / "fused.safetensors")
    loaded = nafi.load(tmp_path / "fused.safetensors", _WRAPS[made])
    assert gap(loaded, result.model, INPUTS) == 0
    torch.save(models[0].state_dict(), tmp_path / "client.pt")
    client = nafi.load(tmp_path / "client.pt", _WRAPS[made])
    assert gap(client, models[0], INPUTS) == 0


class Versioned(nn.Module):
    """Takes a file without versions for an old one, as MNASNet does."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 3), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.scale = 1.0 if metadata.get("version") == 2 else 0.5
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_versions_of_modules_do_not_matter(tmp_path: Path) -> None:
    model = Versioned()
    nafi.save(model, tmp_path / "a.safetensors")
    assert gap(nafi.load(tmp_path / "a.safetensors", Versioned), model, INPUTS) == 0


def test_names_of_a_state_dict_are_for_its_modules_to_know(tmp_path: Path) -> None:
    model, inputs = Renamed(), (torch.randn(4, 5),)
    assert "layer0.weight" in model.state_dict()
    torch.save(model.state_dict(), tmp_path / "a.pt")
    assert gap(nafi.load(tmp_path / "a.pt", Renamed), model, inputs) == 0
    nafi.save(model, tmp_path / "a.safetensors")
    assert gap(nafi.load(tmp_path / "a.safetensors", Renamed), model, inputs) == 0


class SquareHeads(nn.Module):
    """As many heads as each is wide."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 3
        self.q, self.k, self.v = (nn.Linear(5, 9) for _ in range(3))
        self.out = nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        form = (*x.shape[:2], -1, self.width)
        q, k, v = (layer(x).view(form).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = (q @ k.transpose(2, 3)).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_a_double_file_and_more_heads(tmp_path: Path) -> None:
    """Shapes tell of 5 heads of 3 as of 3 heads of 5; the factory is in single precision."""
    inputs = (torch.randn(2, 4, 5, dtype=torch.float64),)
    models = [SquareHeads().double() for _ in range(2)]
    spec = nafi.groups(models[0], inputs)
    limits = {name: 5 if group.parent is None else 3 for name, group in spec.groups.items()}
    result = nafi.fuse(models, inputs, spec=spec, penalty=0.0, evidence=1e6, max_width=limits)
    assert result.widths == limits
    nafi.save(result, tmp_path / "a.safetensors")
    loaded = nafi.load(tmp_path / "a.safetensors", SquareHeads)
    assert loaded.width == 3
    assert gap(loaded, result.model, inputs) == 0


def test_a_factory_that_cannot_be_imported_may_be_passed_instead(tmp_path: Path) -> None:
    model, path = nn.Linear(2, 3), tmp_path / "m.safetensors"
    nafi.save(model, path, factory="not_here:network")
    with pytest.raises(InputError, match=r"cannot import not_here: .* or pass the function itself"):
        nafi.load(path, "not_here:network")
    loaded = nafi.load(path, lambda: nn.Linear(2, 3))
    assert torch.equal(loaded.get_parameter("weight"), model.weight)
