"""The examples run and print what they should; how good the models are is for the experiments."""

from __future__ import annotations

import json
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def printed(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> list[str]:
    """The lines that an example prints, without warnings of ours."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def numbers(line: str) -> list[float]:
    return [float(word) for word in re.findall(r"\d+\.?\d*", line)]


@pytest.mark.slow
def test_three_checkpoints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    *clients, fused = printed("three_checkpoints.py", capsys, monkeypatch)
    assert [line[: line.index(":")] for line in clients] == [
        "client 0, digits [0, 1, 2, 3, 4]",
        "client 1, digits [3, 4, 5, 6, 7]",
        "client 2, digits [0, 6, 7, 8, 9]",
    ]
    found = re.fullmatch(r"fused, \{'0': (\d+)\}: ([\d.]+)%", fused)
    assert found is not None
    assert 40 <= int(found[1]) <= 80  # at most twice as wide


@pytest.mark.slow
def test_custom_network(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        line for line in printed("custom_network.py", capsys, monkeypatch) if line.endswith("%")
    ]
    names = [line.partition(":")[0] for line in lines[:3]] + [lines[-1].partition(":")[0]]
    assert names == ["client 0", "client 1", "client 2", "mean of the weights"]
    for line, options in zip(lines[3:-1], ("nafi {}", "nafi {'penalty': 0.1}"), strict=True):
        assert line.startswith(options)
        widths = dict(re.findall(r"'([\w.]+)': (\d+)", line.removeprefix(options)))
        assert list(widths) == ["stem.0", "block.0"]
        assert 12 <= int(widths["stem.0"]) <= 36
        assert 16 <= int(widths["block.0"]) <= 48


@pytest.mark.slow
def test_federation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = r"(.+), round (\d), widths \[(\d+), (\d+)\], (\d+) kB: ([\d.]+)%"
    found = [
        re.fullmatch(pattern, line).groups()  # type: ignore[union-attr]
        for line in printed("federation.py", capsys, monkeypatch)
    ]
    names = ("fedavg", "layerwise", "match-then-average")
    assert [row[:2] for row in found] == [(name, at) for name in names for at in "123"]
    widths = [(int(row[2]), int(row[3])) for row in found]
    assert widths[:3] == [(30, 20)] * 3
    for own in (widths[3:6], widths[6:]):
        assert own[1] == own[2]  # the third round is of the output layer, or averages
        assert 30 <= own[2][0] <= 90
        assert 20 <= own[2][1] <= 60
    parameters = 65 * 30 + 31 * 20 + 21 * 10
    assert [int(row[4]) for row in found[:3]] == [round(6 * 2 * 4 * parameters / 1e3)] * 3


@pytest.mark.slow
def test_monai_unet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed("monai_unet.py", capsys, monkeypatch, "--quick")
    assert lines[0].startswith("4 groups of 24 neurons")
    scores = {line.partition(":")[0]: numbers(line)[-1] for line in lines if "dice" in line}
    assert sum(name.startswith("client") for name in scores) == 4
    widths = {
        name.partition(" ")[0]: int(numbers(name)[0]) for name in scores if "one shot" in name
    }
    assert list(widths) == ["fedavg", "ot", "rebasin", "pfnm", "nafi"]
    assert [widths[name] for name in ("fedavg", "ot", "rebasin")] == [24] * 3
    assert 24 <= widths["nafi"] <= 48
    assert 24 <= widths["pfnm"] <= 48
    assert [name for name in scores if "then averaged" in name] == [
        f"nafi, then averaged, round {at}" for at in (1, 2, 3, 4)
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("real_data")
def test_hugging_face(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders become what networks in memory become."""
    *lines, folders = printed("hugging_face.py", capsys, monkeypatch, "--quick")
    starts = [line for line in lines if line.startswith("clients start from")]
    assert len(starts) == 3
    rows = [line[:28].strip() for line in lines[1:7]]
    assert rows[:3] == ["one client, mean", "one client, best", "ensemble"]
    assert rows[3:] == ["mean of weights (fedavg)", "nafi", "nafi with a probe"]
    (in_memory,) = (numbers(line[28:]) for line in lines[-6:] if line[:28].strip() == "nafi")
    assert folders.startswith("nafi fuse a/ b/ c/ --out fused/")
    assert numbers(folders) == [in_memory[0], in_memory[2]]


def test_follow_a_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = printed("follow_a_run.py", capsys, monkeypatch, "rounds.jsonl")
    records = [json.loads(line) for line in Path("rounds.jsonl").read_text().splitlines()]
    assert [record["round"] for record in records] == [1, 2]
    assert lines[0] == "round 1: client 1, client 2, client 3, client 4"
    assert [line for line in lines if "loss" in line] == [
        f"round {r['round']}: loss {r['loss']:.3f}, widths {r['widths']}" for r in records
    ]
