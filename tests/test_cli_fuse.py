"""`nafi fuse` as a user meets it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
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

def inputs():
    return torch.load("inputs.pt")

def batches():
    torch.manual_seed(0)
    x = torch.randn(300, 6)
    torch.save((x, x[:, :3].argmax(1)), "labelled.pt")
    return [(x, x[:, :3].argmax(1))]

def size(model):
    return sum(p.numel() for p in model.parameters())

def smallness(model):
    return -size(model)

def picky(model):
    raise KeyError("labels")

def silent(model):
    pass

class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = net()
        self.register_buffer("shift", torch.randn(3), persistent=False)

    def forward(self, x):
        return self.layers(x) + self.shift

def pictures():
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(5, 2),
    )
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


def test_a_file_that_another_network_would_be_read_from_is_not_written(folder: Path) -> None:
    for name in "ab":
        state = {f"layers.{n}": t for n, t in network(0).state_dict().items()}
        save_file(state, folder / f"{name}.safetensors")
    (folder / "g.safetensors").write_bytes(b"precious")
    done = run(
        "fuse", *FILES[:2], "--model", "networks:Forgetful", "--out", "g.safetensors", "--force",
        cwd=folder,
    )  # fmt: skip
    assert "is not written: read again, the network would not be the same" in done.stderr
    assert done.returncode == 2
    assert (folder / "g.safetensors").read_bytes() == b"precious"


def test_a_fused_file_runs_at_its_new_widths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = ["--class-counts", "counts.json"]
    code, out, err = fused(folder, *counts, "--probe", "none", "--report", "page.html")
    assert code == 0, err
    monkeypatch.chdir(folder)
    model = nafi.load("g.safetensors", "networks:net")
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
    assert 'nafi.load("g.safetensors", "networks:net")' in out
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


def test_streamed_checkpoints_give_the_same_file(folder: Path) -> None:
    nafi.save(network(3), folder / "more-3.safetensors")
    nafi.save(network(4), folder / "more-4.safetensors")
    (folder / "list.txt").write_text("# two of them\n\nmore-3.safetensors\nmore-4.safetensors\n")
    common = ["--model", "networks:net", "--probe", "none"]
    done = run("fuse", "more-*.safetensors", *common, "--out", "x.safetensors", cwd=folder)
    assert done.returncode == 0, done.stderr
    listed = ["fuse", "@list.txt", *common, "--stream", "--out", "y.safetensors"]
    done = run(*listed, cwd=folder)
    assert done.returncode == 0, done.stderr
    one, two = (read(folder / f"{name}.safetensors")[0] for name in "xy")
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    done = run(*listed, "--force", "--probe", "noise", cwd=folder)
    assert "--stream matches by weights alone" in " ".join(done.stderr.split())
    done = run(*listed, "--force", "--ray", "local", cwd=folder)
    assert "give tree or a probe" in " ".join(done.stderr.split())
    done = run("fuse", "@none.txt", *common, "--out", "z.safetensors", cwd=folder)
    assert "@none.txt cannot be read as a list of paths" in " ".join(done.stderr.split())


def test_a_tree_of_checkpoints(folder: Path) -> None:
    for seed in range(3, 8):
        nafi.save(network(seed), folder / f"more-{seed}.safetensors")
    command = ["fuse", "more-*.safetensors", "--model", "networks:net", "--out", "x.safetensors"]
    done = run(*command, "--stream", "--tree", "2", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["options"]["tree"] == 2
    assert all(len(group["local"]) == 5 for group in told["groups"])
    state = read(folder / "x.safetensors")[0]
    models = [network(seed) for seed in range(3, 8)]
    expected = nafi.fuse(models, (torch.zeros(2, 6),), tree=2).model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


def test_what_files_say_of_themselves_need_not_be_said(folder: Path) -> None:
    files = []
    for s, first in enumerate([10, 7]):
        files.append(f"{s}.safetensors")
        nafi.save(
            network(s, first), folder / files[-1], factory="networks:net", class_counts=[s, 1, 2]
        )
    trusted = ["--trust-factory", "networks:net"]
    done = run("fuse", *files, *trusted, "--out", "g.safetensors", "--json", cwd=folder)
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
    "no probe": {"--probe": "inputs.npz"},
    "probe shape": {"--probe": "a.safetensors"},
    "probe foreign": {"--probe": "counts.npy"},
    "probe folder": {"--probe": "."},
    "probe function": {"--probe": "networks:broken"},
    "probe for fedavg": {"--probe": "networks:inputs", "--method": "fedavg"},
    "probe without statistics": {"--probe": "synthetic"},
    "score import": {"--validate": "nonsense:size"},
    "score fails": {"--validate": "networks:picky"},
    "no score": {"--validate": "networks:silent"},
    "better than what": {"--require-better": None},
    "calibrate on what": {"--calibrate": None},
    "calibrate what": {"--calibrate": None, "--probe": "x:y", "--batchnorm": "fold"},
    "budget": {"--budget": "2 miles"},
    "budget as a factor": {"--budget": "1x"},
    "one neuron": {"--max-width": "1"},
    "budget and width": {"--budget": "2 params", "--max-width": "2.0x"},
    "small budget": {"--budget": "0.5 params", "--probe": "none"},
    "tiny budget": {"--budget": "12 B"},
    "budgets": {"--option": 'budget=["1 params", "2 params"]'},
    "frontier of what": {"--frontier": None},
    "distil on what": {"--distill": "10"},
    "frontier and more": {
        "--frontier": None,
        "--probe": "x:y",
        "--validate": "x:y",
        "--penalty": "0.1",
        "--option": "mass=2",
    },
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
    if what == "probe foreign":
        (folder / "counts.npy").write_text("[1, 2]")
    return ["fuse", *files, *(part for pair in options.items() for part in pair if part)]


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
        ("no probe", r"probe: inputs\.npz does not exist; expected a \.safetensors or \.npy file"),
        ("probe shape", r"probe: found 0\.bias, 0\.weight.*expected inputs by the names input"),
        ("probe foreign", r"probe: counts\.npy cannot be read as an array of numbers"),
        ("probe folder", r"probe: \. is a folder, but the network takes no images"),
        ("probe function", r"networks:broken failed: RuntimeError: no weights here"),
        ("probe for fedavg", r"probe: method fedavg does not use"),
        ("probe without statistics", r"batch normalisation, which these networks do not have"),
        ("score import", r"cannot import nonsense"),
        ("score fails", r"networks:picky failed: KeyError: 'labels'; it is called with a model"),
        ("no score", r"validate: returned None, expected a number"),
        ("better than what", r"--require-better needs --validate"),
        ("calibrate on what", r"--calibrate needs --probe"),
        ("calibrate what", r"--calibrate: found --batchnorm fold, expected average"),
        ("budget", r"budget: found '2 miles', expected \"1\.0 params\""),
        ("budget as a factor", r"budget: found '1x',.*\"300 kB\"; did you mean \"1\.0 params\"\?$"),
        ("one neuron", r"max_width: found 1 for group.*, 1x on the command line, for the local"),
        ("budget and width", r"give max_width or budget, not both"),
        (
            "small budget",
            r"budget: found 0\.5 params, but a merged network.*with a probe and a refit",
        ),
        ("tiny budget", r"budget: found 12 bytes, but with the fewest neurons .* allow more"),
        ("budgets", r"budget: a list needs validate="),
        ("distil on what", r"--distill needs --probe"),
        ("frontier of what", r"--frontier needs --probe.* and --validate"),
        ("frontier and more", r"leave out --penalty, --option"),
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
        nafi.save(network(s, 10), folder / file, class_counts=counts)
    common = [*files, "--model", "networks:net", "--out", "g.safetensors", "--force"]
    results = []
    for options in ([], ["--sample-counts", "1,200"]):
        done = run("fuse", *common, *options, cwd=folder)
        assert done.returncode == 0, done.stderr
        results.append(read(folder / "g.safetensors")[0])
    assert any(not results[0][name].equal(results[1][name]) for name in results[0])
    both = ["--sample-counts", "1,2", "--class-counts", "counts.json"]
    done = run("fuse", *files, "--out", "h.safetensors", *both, cwd=folder)
    assert (done.returncode, "not both" in done.stderr) == (2, True)


def test_scores_are_told_and_drawn(folder: Path) -> None:
    """By the number of parameters: a client has 185, their ensemble three times as many."""
    measured = ["--validate", "networks:size", "--probe", "none"]
    code, out, err = fused(folder, *measured, "--report", "page.html")
    assert code == 0, err
    assert "Worse" not in err
    for name in FILES:
        assert re.search(rf"│ {re.escape(name)} +│ +185 │", out), out
    assert re.search(r"│ ensemble +│ +555 │", out)
    assert re.search(r"scores \d+: above the best client \(185\), and below their ensemble", out)
    text = (folder / "page.html").read_text()
    page = Page(text)
    assert page.tags["svg"] == 2 + len(FILES) + 2  # groups; clients, ensemble, fused
    assert 'class="verdict good"' in text
    assert page.fetched == []


def test_a_result_below_a_client_is_said_and_can_be_refused(folder: Path) -> None:
    code, out, err = fused(folder, "--validate", "networks:smallness", "--report", "page.html")
    assert code == 0, err
    assert re.search(r"Worse than a client: the fused model scores -\d+, a.safetensors alone", out)
    assert all(word in err for word in ("max_width", "--probe", "match-then-average"))
    text = (folder / "page.html").read_text()
    assert 'class="verdict bad"' in text
    assert "match-then-average" in text
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    options = ["--validate", "networks:smallness", "--require-better", "--force", "--json"]
    code, out, err = fused(folder, *options, "--report", "page.html")
    assert code == 3
    assert "nothing is written" in err
    told = json.loads(out)
    assert told["checkpoint"] is None
    assert told["scores"]["better"] is False
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before
    code, _, err = fused(folder, "--force", "--validate", "networks:size", "--require-better")
    assert code == 0, err


def test_penalties_can_be_chosen_from(folder: Path) -> None:
    options = ["--option", "penalty=[0.0, 5.0]", "--validate", "networks:size", "--json"]
    code, out, err = fused(folder, *options, "--probe", "none")
    assert code == 0, err
    widest = nafi.fuse([network(s) for s in range(3)], (torch.zeros(2, 6),), penalty=0.0)
    assert [row["width"] for row in json.loads(out)["groups"]] == list(widest.widths.values())


def test_a_stack_within_a_budget_is_written_and_solved(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(torch.randn(40, 6), folder / "inputs.pt")
    stack = ["--method", "stack", "--probe", "networks:inputs", "--budget", "1.5 params"]
    code, out, err = fused(folder, *stack, "--report", "page.html")
    assert code == 0, err
    one = sum(p.numel() for p in network(0).parameters())
    monkeypatch.chdir(folder)
    model = nafi.load("g.safetensors", "networks:net")
    parameters = sum(p.numel() for p in model.parameters())
    assert 1.2 * one < parameters <= 1.5 * one
    assert f"{parameters} parameters, {parameters / one:.2f} times those of one" in " ".join(
        out.split()
    )
    assert "parameters" in (folder / "page.html").read_text()
    solving = ["g.safetensors", "--model", "networks:net"]
    for name in ("north", "south"):
        done = run(
            "statistics", *solving, "--data", "networks:batches", "--out", f"{name}.stats",
            cwd=folder,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    done = run("head", *solving, "north.stats", "south.stats", "--out", "h.safetensors", cwd=folder)
    assert done.returncode == 0, done.stderr
    solved = nafi.load("h.safetensors", "networks:net")
    inputs, labels = torch.load("labelled.pt")
    with torch.no_grad():
        right = [float((m(inputs).argmax(1) == labels).double().mean()) for m in (model, solved)]
    assert right[1] > right[0]


def test_the_frontier_is_told_drawn_and_its_best_written(folder: Path) -> None:
    torch.save(torch.randn(40, 6), folder / "inputs.pt")
    measured = ["--probe", "networks:inputs", "--validate", "networks:smallness", "--json"]
    budgets = ["--budget", "0.7 params", "--budget", "1.5 params"]
    code, out, err = fused(
        folder, "--frontier", *measured, *budgets, "--report", "page.html", "--force"
    )
    assert code == 0, err
    told = json.loads(out)
    sizes = {(point["method"], point["budget"]): point["params"] for point in told["frontier"]}
    assert set(sizes) == {
        *((method, f"{size} params") for method in ("stack", "nafi") for size in (0.7, 1.5)),
        *(("whole clients", f"{k} kept") for k in (1, 2, 3)),
        *(("client", name) for name in FILES), ("ensemble", "all clients"),
    }  # fmt: skip
    assert max(sizes[method, "0.7 params"] for method in ("stack", "nafi")) <= 0.7
    assert sizes["whole clients", "2 kept"] == 2.0
    assert 0.7 < sizes["nafi", "1.5 params"] <= 1.5
    # The smallest is the best by this score.
    smallest = min(("stack", "nafi"), key=lambda method: sizes[method, "0.7 params"])
    assert told["method"] == smallest
    assert told["size"]["params_of_client"] == sizes[smallest, "0.7 params"]
    page = (folder / "page.html").read_text()
    assert page.count("<circle") == 2 * len(told["frontier"]) + 5
    assert "Scores over sizes" in page


def test_without_a_measure_nobody_is_told_of_success(folder: Path) -> None:
    code, out, err = fused(folder, "--probe", "none", "--report", "page.html")
    assert code == 0, err
    assert "noise" not in err
    for text in (out, (folder / "page.html").read_text()):
        assert "Nobody has measured whether this model is any good" in text
        assert "--validate" in text
        assert "--probe" in text
        assert "expect less than of a client" in text
        assert "match-then-average" in text
    assert 'class="verdict unknown"' in (folder / "page.html").read_text()


def test_whoever_names_no_probe_gets_noise_and_is_told(folder: Path) -> None:
    code, out, err = fused(folder, "--json")
    assert code == 0, err
    assert "no --probe: layers were refitted on noise" in err
    assert "--probe none" in err
    told = json.loads(out)
    direct = nafi.fuse(
        [network(s) for s in range(3)], (torch.zeros(2, 6),), probe="noise", names=FILES
    )
    assert direct.agreement is not None
    assert told["probe"] == "noise"
    assert told["advice"] is None
    assert told["agreement"] == direct.agreement.to_dict()
    assert told["fits"] == {name: asdict(fit) for name, fit in direct.fits.items()}
    code, out, err = fused(folder, "--force", "--probe", "noise", "--report", "page.html")
    assert code == 0, err
    assert "no --probe" not in err
    for text in (out, (folder / "page.html").read_text()):
        assert "256 inputs that were made up" in text
        assert "real inputs" in text
    # A stack within a budget cannot do without; other methods do not ask for one.
    stack = ["--force", "--json", "--method", "stack", "--budget", "1.5 params"]
    code, out, err = fused(folder, *stack)
    assert code == 0, err
    assert json.loads(out)["probe"] == "noise"
    code, out, err = fused(folder, *stack, "--probe", "none")
    assert (code, "measured on a probe" in err) == (2, True)
    code, out, err = fused(folder, "--force", "--json", "--method", "fedavg")
    assert code == 0, err
    assert json.loads(out)["probe"] == "none"


def test_one_hidden_layer_is_merged_by_weights_as_ever(images: Path) -> None:
    done = run(*PICTURES[:9], "--json", cwd=images)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["probe"], told["advice"], told["fits"]) == ("none", None, {})
    assert "noise" not in done.stderr
    done = run(*PICTURES[:9], "--json", "--probe", "synthetic", "--force", cwd=images)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["probe"] == "synthetic"


def test_a_probe_by_file_and_by_function(folder: Path) -> None:
    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    save_file({"anything": inputs}, folder / "inputs.safetensors")
    np.save(folder / "inputs.npy", inputs.numpy())
    torch.save(inputs, folder / "inputs.pt")
    models = [network(s) for s in range(3)]
    direct = nafi.fuse(models, (torch.zeros(2, 6),), probe=inputs, names=FILES)
    assert set(direct.fits) == {"0.weight", "2.weight", "4.weight"}
    assert direct.agreement is not None
    for source in ("inputs.safetensors", "inputs.npy", "networks:inputs"):
        code, out, err = fused(folder, "--force", "--probe", source, "--json")
        assert code == 0, err
        told = json.loads(out)
        assert told["agreement"] == direct.agreement.to_dict()
        assert told["verdict"]["tone"] == "unknown"
        assert told["fits"] == {name: asdict(fit) for name, fit in direct.fits.items()}
    code, out, err = fused(folder, "--force", "--probe", "inputs.npy", "--report", "page.html")
    assert code == 0, err
    assert re.search(r"│ 4\.weight +│", out)
    for text in (out, (folder / "page.html").read_text()):
        assert "Nobody has scored this model" in text
        assert f"{direct.agreement.fused:.0%} of the time" in text


@pytest.fixture
def images(folder: Path) -> Path:
    """Two networks for pictures of 8 x 8, and a folder of some that are larger."""
    for s in range(2):
        torch.manual_seed(s)
        layers = [nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(5, 2))
        nafi.save(model, folder / f"{s}.safetensors")
    (folder / "photos").mkdir()
    rng = np.random.default_rng(0)
    for k in range(9):
        pixels = rng.integers(0, 256, size=(16, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{k}.png")
    (folder / "photos" / "notes.txt").write_text("no picture")
    return folder


PICTURES = ["fuse", "0.safetensors", "1.safetensors", "--out", "g.safetensors"]
PICTURES += ["--model", "networks:pictures"]
PICTURES += ["--input-shape", "3,8,8", "--probe", "photos", "--json"]


def test_a_folder_of_images_is_a_probe(images: Path) -> None:
    done = run(*PICTURES, "--calibrate", cwd=images)
    assert done.returncode == 0, done.stderr
    assert "9 images, read as 8 x 8 pixels from 0 to 1" in done.stderr
    told = json.loads(done.stdout)
    assert told["agreement"]["inputs"] == 9
    assert told["options"]["batchnorm"] == "average"
    pixels = [
        np.asarray(Image.open(images / "photos" / f"{k}.png").resize((8, 8))) for k in range(9)
    ]
    probe = torch.from_numpy(np.stack(pixels)).movedim(-1, 1) / 255
    state = read(images / "g.safetensors")[0]
    outputs = nn.functional.conv2d(probe, state["0.weight"], state["0.bias"])
    measured = outputs.mean(dim=(0, 2, 3))
    assert torch.allclose(state["1.running_mean"], measured, atol=1e-5)


@pytest.mark.parametrize("what", ["other size", "broken", "deep", "empty"])
def test_images_that_cannot_be_a_probe(
    images: Path, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photo = images / "photos" / "5.png"
    match what:
        case "other size":
            Image.new("RGB", (12, 12)).save(photo)
            told = r"5\.png has 12 x 12 pixels, others 12 x 16"
        case "broken":
            photo.write_bytes(photo.read_bytes()[:200])
            told = r"5\.png cannot be read as an image"
        case "deep":
            Image.fromarray(np.zeros((16, 12), dtype=np.uint16)).save(photo)
            told = r"5\.png holds other numbers than eight bits"
        case _:
            for file in images.glob("photos/*.png"):
                file.unlink()
            told = "photos holds no images"
    assert re.search(told, complaint(PICTURES, images, monkeypatch, capsys))
    assert not (images / "g.safetensors").exists()


def test_inspect_shows_the_groups_of_a_file_at_its_widths(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nafi.save(network(0, 7), folder / "known.safetensors", factory="networks:net")
    for file, option, first in [("known.safetensors", "trust-factory", 7), ("c.pt", "model", 10)]:
        done = run("inspect", file, f"--{option}", "networks:net", "--json", cwd=folder)
        assert done.returncode == 0, done.stderr
        widths = [group["width"] for group in json.loads(done.stdout)["groups"].values()]
        assert widths == [first, 8]
    told = complaint(["inspect", "a.safetensors"], folder, monkeypatch, capsys)
    assert "a.safetensors does not say what makes its network: give --model" in told
