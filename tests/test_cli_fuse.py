"""`nafi fuse` as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import nafi
from nafi.checkpoints import read
from nafi.fusion import make_method
from tests.pages import Page
from tests.test_cli import WITHOUT_LAB, complaint, run, started

NETWORKS = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))

def example_inputs():
    return torch.zeros(2, 6)

def other():
    return nn.Sequential(nn.Linear(6, 3))

def broken():
    raise RuntimeError("no weights here")
"""


def network(seed: int, first: int = 10) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, first), nn.ReLU(), nn.Linear(first, 8), nn.ReLU(), nn.Linear(8, 3)
    ).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints, one of them of torch.save, and the code of their network."""
    (tmp_path / "networks.py").write_text(NETWORKS)
    for name, seed in [("a", 0), ("b", 1)]:
        nafi.save(network(seed), tmp_path / f"{name}.safetensors")
    torch.save(network(2).state_dict(), tmp_path / "c.pt")
    (tmp_path / "counts.json").write_text("[[5, 1, 0], [1, 5, 1], [0, 1, 5]]")
    return tmp_path


FILES = ["a.safetensors", "b.safetensors", "c.pt"]


def fused(folder: Path, *more: str) -> tuple[int, str, str]:
    done = run(
        "fuse", *FILES, "--model", "networks:net", "--out", "g.safetensors", *more, cwd=folder
    )
    return done.returncode, done.stdout, done.stderr


def test_a_fused_file_runs_at_its_new_widths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = fused(folder, "--class-counts", "counts.json", "--report", "page.html")
    assert code == 0, err
    monkeypatch.chdir(folder)
    model = nafi.load("g.safetensors")
    direct = nafi.fuse(
        [network(s) for s in range(3)],
        (torch.zeros(2, 6),),
        class_counts=[[5, 1, 0], [1, 5, 1], [0, 1, 5]],
    )
    inputs = torch.randn(7, 6)
    with torch.no_grad():
        assert torch.allclose(model(inputs), direct.model(inputs), atol=1e-6)
    widths = list(direct.widths.values())
    assert [model[0].out_features, model[2].out_features] == widths
    for group, width in direct.widths.items():
        assert re.search(rf"│ {group} .*│ +{width} │", out), out
    assert 'nafi.load("g.safetensors")' in out
    page = Page((folder / "page.html").read_text())
    assert page.tags["td"] == 7 * len(widths)
    assert page.tags["svg"] == len(widths)
    assert page.fetched == []


def test_json_and_options(folder: Path) -> None:
    options = ["--max-width", "1.5x", "--option", "mass=2.0", "--option", "restore_norm=False"]
    code, out, err = fused(
        folder, "--json", "--method", "pfnm", *options, "--sample-counts", "10,20,30"
    )
    assert code == 0, err
    told = json.loads(out)
    given = {"mass": 2.0, "max_width": 1.5, "restore_norm": False}
    assert told["options"] == make_method("pfnm", **given).settings()
    assert read(folder / "g.safetensors")[1].sample_count == 60
    assert [row["width"] for row in told["groups"]] == [15, 12]
    assert [sum(row["shared"]) for row in told["groups"]] == [15, 12]


def test_what_files_say_of_themselves_need_not_be_said(folder: Path) -> None:
    files = []
    for s, first in enumerate([10, 7]):
        files.append(f"{s}.safetensors")
        nafi.save(
            network(s, first), folder / files[-1], factory="networks:net", class_counts=[s, 1, 2]
        )
    done = run("fuse", *files, "--out", "g.safetensors", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["groups"][0]["local"] == [10, 7]


# What is wrong with the options alone.
OPTIONS = {
    "factory import": {"--model": "nonsense:net"},
    "factory name": {"--model": "networks:nett"},
    "factory fails": {"--model": "networks:broken"},
    "factory other": {"--model": "networks:other"},
    "folder": {"--out": "no/g.safetensors"},
    "method": {"--method": "magic"},
    "ensemble": {"--method": "ensemble"},
    "width": {"--max-width": "3y"},
    "page": {"--report": "a.safetensors"},
    "suffix": {"--out": "g.pt"},
    "page suffix": {"--report": "page.pdf"},
    "twice": {"--penalty": "0.4", "--option": "penalty=0.1"},
    "moments": {"--option": "input_moments=3"},
    "samples": {"--sample-counts": "3,x"},
}


def spoil(folder: Path, what: str) -> list[str]:
    """Make one thing wrong; the arguments with which a user would run into it."""
    files = list(FILES)
    options = {"--model": "networks:net", "--out": "g.safetensors", **OPTIONS.get(what, {})}
    match what:
        case "nan":
            model = network(1)
            with torch.no_grad():
                model[2].weight[0, 0] = float("nan")
            nafi.save(model, folder / "b.safetensors", overwrite=True)
        case "keys":
            nafi.save(nn.Sequential(nn.Linear(6, 3)), folder / "b.safetensors", overwrite=True)
        case "architecture":
            torch.save(network(0).state_dict(), folder / "c.pt")
            state = network(0).state_dict()
            state["0.weight"] = state["0.weight"][:, :5]
            torch.save(state, folder / "c.pt")
        case "dtype":
            nafi.save(network(1).double(), folder / "b.safetensors", overwrite=True)
        case "truncated":
            whole = (folder / "b.safetensors").read_bytes()
            (folder / "b.safetensors").write_bytes(whole[:-50])
        case "foreign":
            (folder / "b.safetensors").write_text("not a checkpoint")
        case "missing":
            files[1] = "nowhere.safetensors"
        case "one":
            files = files[:1]
        case "counts shape":
            (folder / "counts.json").write_text("[[1, 2, 3]]")
        case "counts negative":
            (folder / "counts.json").write_text("[[1, 2, 3], [1, -2, 3], [1, 2, 3]]")
        case "counts json":
            (folder / "counts.json").write_text("[[1, 2, 3")
        case "exists":
            (folder / "g.safetensors").write_text("mine")
        case "itself":
            return ["fuse", *files, "--model", "networks:net", "--out", files[0], "--force"]
    if what.startswith("counts"):
        options["--class-counts"] = "counts.json"
    return ["fuse", *files, *(part for pair in options.items() for part in pair)]


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("nan", r"b\.safetensors: 2\.weight holds 1 value that is NaN"),
        ("keys", r"b\.safetensors is not a checkpoint of this network: it lacks"),
        ("architecture", r"c\.pt is not a checkpoint of this network: 0\.weight"),
        ("dtype", r"b\.safetensors: 0\.bias is torch\.float64|b\.safetensors: 0\.weight is"),
        ("truncated", r"b\.safetensors cannot be read.*cut off"),
        ("foreign", r"b\.safetensors is neither"),
        ("missing", r"nowhere\.safetensors does not exist"),
        ("one", r"found 1, expected at least two"),
        ("counts shape", r"class_counts: found shape \(1, 3\)"),
        ("counts negative", r"class_counts.*model 1.*at least 0"),
        ("counts json", r"counts\.json is not JSON"),
        ("factory import", r"cannot import nonsense"),
        ("factory name", r"no function or class 'nett'"),
        ("factory fails", r"no weights here"),
        ("factory other", r"a\.safetensors is not a checkpoint of this network"),
        ("folder", r"the folder no does not exist"),
        ("exists", r"g\.safetensors exists already.*--force"),
        ("itself", r"a\.safetensors is one of the checkpoints"),
        ("method", r"found 'magic', expected one of"),
        ("ensemble", r"several models"),
        ("width", r"--max-width: found '3y'"),
        ("page", r"--report: a\.safetensors is one of the checkpoints"),
        ("suffix", r"--out: found g\.pt, expected a name that ends in \.safetensors"),
        ("page suffix", r"--report: found page\.pdf, expected a name that ends in \.html"),
        ("twice", r"penalty is given twice"),
        ("moments", r"method nafi has no option 'input_moments'"),
        ("samples", r"--sample-counts: found '3,x'"),
    ],
)
def test_bad_input_is_told_in_a_line_or_two(
    folder: Path,
    what: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = spoil(folder, what)
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    err = complaint(arguments, folder, monkeypatch, capsys)
    assert re.search(told, err), err
    assert err.count("\n") <= 2
    after = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    assert after == before, "something was written"


def test_force_overwrites(folder: Path) -> None:
    (folder / "g.safetensors").write_text("mine")
    code, _, err = fused(folder, "--force")
    assert code == 0, err
    assert (folder / "g.safetensors").read_bytes()[8:9] == b"{"


@pytest.mark.slow
def test_without_the_laboratory_a_page_is_refused_before_any_work(folder: Path) -> None:
    arguments = ["fuse", *FILES, "--model", "networks:net", "--out", "g.safetensors"]
    done = started(*arguments, "--report", "page.html", cwd=folder, code=WITHOUT_LAB)
    assert done.returncode == 2
    hint = "nafi: this needs jinja2, which is not installed: pip install 'nafi[lab]'\n"
    assert done.stderr == hint
    assert not (folder / "g.safetensors").exists()
    assert started(*arguments, cwd=folder, code=WITHOUT_LAB).returncode == 0


def test_what_the_user_gives_comes_before_what_files_say(folder: Path) -> None:
    """Class counts in the files would count for more than samples on the command line."""
    files = [f"{s}.safetensors" for s in range(2)]
    for s, file in enumerate(files):
        counts = [5 + s, 1, 2]
        nafi.save(network(s, 10), folder / file, factory="networks:net", class_counts=counts)
    results = []
    for options in ([], ["--sample-counts", "1,200"]):
        done = run("fuse", *files, "--out", "g.safetensors", "--force", *options, cwd=folder)
        assert done.returncode == 0, done.stderr
        results.append(read(folder / "g.safetensors")[0])
    assert any(not results[0][name].equal(results[1][name]) for name in results[0])
    both = ["--sample-counts", "1,2", "--class-counts", "counts.json"]
    done = run("fuse", *files, "--out", "h.safetensors", *both, cwd=folder)
    assert (done.returncode, "not both" in done.stderr) == (2, True)
