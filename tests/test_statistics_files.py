"""Sums in files: what is written is read, and what could be no sums is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import nafi
from nafi.errors import CheckpointError, InputError

KEY = "nafi-statistics"


def sums() -> Any:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    return nafi.statistics(model, [(torch.randn(90, 5), torch.arange(90) % 3)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    nafi.save_statistics(sums(), tmp_path / "north.stats")
    return tmp_path / "north.stats"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path, written = tmp_path / "north.stats", sums()
    nafi.save_statistics(written, path)
    read = nafi.load_statistics(path)
    assert (read.layers, read.body, read.samples) == (written.layers, written.body, 90)
    for name in ("gram", "cross", "class_counts", "losses"):
        assert torch.equal(getattr(read, name), getattr(written, name))
    with pytest.raises(InputError, match="exists already"):
        nafi.save_statistics(written, path)
    nafi.save_statistics(written + written, path, overwrite=True)
    assert nafi.load_statistics(path).samples == 180
    assert list(tmp_path.iterdir()) == [path]


def rewritten(
    file: Path, tensors: Callable[[dict[str, Tensor]], object], **fields: object
) -> CheckpointError:
    """What is said of a file with other content."""
    with safe_open(file, framework="pt") as handle:
        content = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        facts = json.loads(handle.metadata()[KEY]) | fields
    tensors(content)
    facts = {name: value for name, value in facts.items() if value != "missing"}
    save_file(content, file, metadata={KEY: json.dumps(facts)})
    with pytest.raises(CheckpointError) as caught:
        nafi.load_statistics(file)
    assert str(file) in str(caught.value)
    return caught.value


def as_they_are(tensors: dict[str, Tensor]) -> None:
    pass


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


BAD_TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda tensors: tensors.pop("gram"), "lacks gram"),
    "extra": (lambda tensors: tensors.update(inputs=torch.zeros(3)), "has inputs"),
    "single": (put("gram", lambda t: t.float()), "gram: found torch.float32"),
    "nan": (put("cross", lambda t: t * torch.nan), "cross: found 'infinity or NaN'"),
    "infinite": (put("losses", lambda t: t / 0), "losses: found 'infinity or NaN'"),
    "not square": (put("gram", lambda t: t[:3]), r"gram: found \(3, 4\), expected shape \(4, 4\)"),
    "a vector": (put("cross", lambda t: t[0]), "cross|gram"),
    "one class": (put("cross", lambda t: t[:, :1]), "class_counts: found"),
    "scales": (put("losses", lambda t: t[1:]), "losses: found"),
    "negative loss": (put("losses", lambda t: -t), "losses: found 'less than 0'"),
    "negative count": (put("class_counts", lambda t: t - 40), "class_counts: found .*whole"),
    "half a sample": (put("class_counts", lambda t: t + 0.5), "class_counts: found .*whole"),
    "no samples": (put("class_counts", lambda t: t * 0), "class_counts: found .*samples"),
    "not symmetric": (put("gram", lambda t: t + torch.eye(4)[[1, 0, 3, 2]].triu()), "symmetric"),
    "not positive": (put("gram", lambda t: t - 2 * t.diagonal().max() * torch.eye(4)), "positive"),
    "too far apart": (put("cross", lambda t: 10 * t), "positive semidefinite"),
    "too few": (put("class_counts", lambda t: t - 29), "positive semidefinite"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_what_could_be_no_sums_is_refused(name: str, file: Path) -> None:
    change, message = BAD_TENSORS[name]
    assert rewritten(file, change).args[0].partition(": ")[2] != ""
    with pytest.raises(CheckpointError, match=message):
        nafi.load_statistics(file)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 1}, "of a format"),
        ({"layers": []}, "layers: found \\[\\], expected a list"),
        ({"layers": ["weight"]}, "layers: found 'weight', expected objects"),
        ({"layers": [{"weight": "w"}]}, "lacks bias, axis"),
        ({"layers": [{"weight": 3, "bias": None, "axis": 0}]}, "weight: found 3, expected a name"),
        ({"layers": [{"weight": "w", "bias": [1], "axis": 0}]}, "bias: found"),
        ({"layers": [{"weight": "w", "bias": None, "axis": -1}]}, "axis: found -1"),
        ({"body": "../etc"}, "64 hexadecimal digits"),
        ({"body": "missing"}, "lacks body"),
        ({"more": 1}, "has more"),
    ],
)
def test_what_it_says_about_itself_is_checked(
    fields: dict[str, object], message: str, file: Path
) -> None:
    assert rewritten(file, as_they_are, **fields)
    with pytest.raises(CheckpointError, match=message):
        nafi.load_statistics(file)


def test_other_files_are_refused(tmp_path: Path) -> None:
    nafi.save(nn.Linear(2, 2), tmp_path / "model.safetensors")
    torch.save({"gram": torch.zeros(2, 2)}, tmp_path / "torch.stats")
    (tmp_path / "empty.stats").write_bytes(b"")
    for name, message in [
        ("model.safetensors", "holds no statistics"),
        ("torch.stats", "cannot be read"),
        ("empty.stats", "cannot be read"),
        ("none.stats", "does not exist"),
        (".", "is a folder"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            nafi.load_statistics(tmp_path / name)
