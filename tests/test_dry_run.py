"""`nafi fuse --dry-run`: what would be done, from headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import nafi
from tests.test_cli import complaint, run
from tests.test_cli_fuse import folder, network

__all__ = ["folder"]  # a fixture

FILES = ["0.safetensors", "1.safetensors"]
MODEL = ["--model", "networks:net"]


@pytest.fixture
def clients(folder: Path) -> Path:
    """Two checkpoints of different widths."""
    for s, first in enumerate([10, 7]):
        nafi.save(network(s, first), folder / FILES[s])
    return folder


def planned(folder: Path, *more: str, files: list[str] = FILES) -> dict[str, Any]:
    before = sorted(folder.iterdir())
    arguments = ["fuse", *files, *MODEL, "--out", "g.safetensors", *more]
    done = run(*arguments, "--dry-run", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert sorted(folder.iterdir()) == before, "something was written"
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize(
    "options",
    [
        ["--probe", "none"],
        ["--probe", "none", "--max-width", "1.3x"],
        ["--probe", "noise", "--budget", "1.5 params"],
        ["--probe", "noise", "--budget", "0.6 params"],
        ["--probe", "noise", "--budget", "0.8 flops"],
        ["--probe", "noise", "--max-width", "1.0x", "--option", "prune_from=1.5"],
        ["--probe", "none", "--method", "pfnm"],
        ["--probe", "none", "--method", "ot"],
        ["--probe", "none", "--method", "stack"],
    ],
)
def test_the_fused_widths_lie_within_the_forecast(options: list[str], clients: Path) -> None:
    plan = planned(clients, *options)
    assert [group["local"] for group in plan["groups"]] == [[10, 7], [8, 8]]
    done = run("fuse", *FILES, *MODEL, "--out", "g.safetensors", *options, "--json", cwd=clients)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    widths = {row["group"]: row["width"] for row in told["groups"]}
    for group in plan["groups"]:
        assert group["least"] <= widths.get(group["name"], 18) <= group["most"]
    least, most = plan["params"]
    assert least <= told["size"]["params"] <= most
    assert plan["of_client"] == sum(p.numel() for p in network(0).parameters())
    assert plan["seconds"] > 0
    copies = sum(p.numel() for s in (10, 7) for p in network(0, s).parameters()) * 4
    assert plan["bytes"] >= copies


@pytest.mark.parametrize("option", [["--probe", "none"], ["--option", "prune_from=1"]])
def test_a_budget_that_the_fusion_would_refuse_is_refused(option: list[str], clients: Path) -> None:
    arguments = ["fuse", *FILES, *MODEL, "--out", "g.safetensors", "--budget", "0.5 params"]
    refused = [run(*arguments, *option, *dry, cwd=clients) for dry in ([], ["--dry-run"])]
    assert [done.returncode for done in refused] == [2, 2]
    assert refused[0].stderr == refused[1].stderr
    assert "a merged network is as wide as its widest client" in " ".join(refused[0].stderr.split())


def test_only_headers_are_read(clients: Path) -> None:
    """A checkpoint of NaN, which a fusion refuses, is no news to a dry run."""
    for file in FILES:
        tensors = load_file(clients / file)
        save_file(
            {name: torch.full_like(t, torch.nan) for name, t in tensors.items()}, clients / file
        )
    assert len(planned(clients, "--probe", "none")["groups"]) == 2
    done = run("fuse", *FILES, *MODEL, "--out", "g.safetensors", "--probe", "none", cwd=clients)
    assert done.returncode == 2
    assert "NaN" in done.stderr


def test_a_recipe_can_be_tried_and_people_are_told(clients: Path) -> None:
    (clients / "r.toml").write_text(
        f"checkpoints = {FILES}\nmodel = 'networks:net'\nout = 'g.safetensors'\nprobe = 'x.npy'"
    )
    np.save(clients / "x.npy", np.zeros((30, 6), np.float32))
    done = run("fuse", "r.toml", "--dry-run", cwd=clients)
    assert done.returncode == 0, done.stderr
    assert "0.0 s" not in done.stdout
    for words in [
        "2 models would be fused by nafi",
        "7 to 10",
        "10 to 17",
        "layers would be refitted on 30 inputs",
        " MB:",
        "- memory: ",
        "nothing was written",
    ]:
        assert words in done.stdout
    assert not (clients / "g.safetensors").exists()


def test_inputs_of_a_probe_are_counted(clients: Path) -> None:
    save_file({"x": torch.zeros(40, 6)}, clients / "x.safetensors")
    torch.save({"x": torch.zeros(50, 6)}, clients / "x.pt")
    for rows in (60, 2000):
        np.save(clients / f"{rows}.npy", np.zeros((rows, 6), np.float32))
    counts = {"x.safetensors": 40, "x.pt": 50, "60.npy": 60, "2000.npy": 1024, "noise": 256}
    for probe, count in counts.items():
        assert planned(clients, "--probe", probe)["probe"] == count
    plan = planned(clients, "--probe", "networks:inputs")
    assert plan["probe"] == 256
    assert plan["notes"] == ["the probe networks:inputs is not looked at: 256 inputs are assumed"]
    (clients / "bad.npy").write_bytes(b"no array")
    for probe, words in [("bad.npy", "cannot be read as an array"), ("no.npy", "does not exist")]:
        arguments = ["fuse", *FILES, *MODEL, "--out", "g.safetensors", "--probe", probe]
        assert words in run(*arguments, "--dry-run", cwd=clients).stderr


def test_an_output_that_exists_is_in_no_dry_runs_way(clients: Path) -> None:
    (clients / "g.safetensors").write_bytes(b"precious")
    assert planned(clients, "--probe", "none")["groups"]
    assert (clients / "g.safetensors").read_bytes() == b"precious"


def test_files_of_torch_are_looked_at_under_the_names_of_the_network(clients: Path) -> None:
    """Wrapped as torch.compile does it, as Lightning does it, and in the format of old."""
    state = network(2).state_dict()
    torch.save(
        {f"_orig_mod.{n}": torch.full_like(t, torch.nan) for n, t in state.items()},
        clients / "a.pt",
    )
    torch.save({"state_dict": {f"net.{n}": t for n, t in state.items()}}, clients / "b.ckpt")
    torch.save(network(3, 5).state_dict(), clients / "old.pt", _use_new_zipfile_serialization=False)
    files = [FILES[1], "a.pt", "b.ckpt", "old.pt"]
    plan = planned(clients, "--probe", "none", files=files)
    assert [group["local"] for group in plan["groups"]] == [[7, 10, 10, 5], [8] * 4]
    two = {f"{each}.{n}": t for n, t in state.items() for each in ("student", "teacher")}
    torch.save(two, clients / "two.pt")
    arguments = ["fuse", "two.pt", "two.pt", "--model", "networks:net", "--out", "g.safetensors"]
    done = run(*arguments, "--dry-run", cwd=clients)
    assert "under student., teacher.; say which" in done.stderr
    assert run(*arguments, "--dry-run", "--strip-prefix", "teacher", cwd=clients).returncode == 0


def test_what_is_no_checkpoint_or_has_other_tensors_is_named(
    clients: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"0.weight": torch.zeros(3, 3)}, clients / "odd.safetensors")
    state = network(0).state_dict()
    save_file({**state, "9.weight": torch.zeros(1)}, clients / "more.safetensors")
    save_file({**state, "0.weight": torch.zeros(10, 5)}, clients / "five.safetensors")
    for files, words in [
        (["networks.py", *FILES], "networks.py is neither a safetensors file nor"),
        (
            [FILES[0], "odd.safetensors"],
            "odd.safetensors is not a checkpoint of this network: the state dict lacks 0.bias, "
            "2.weight, 2.bias and 2 more, which the network has",
        ),
        ([FILES[0], "more.safetensors"], "more.safetensors is not a checkpoint of this network: "),
        ([FILES[0], "more.safetensors"], ": the network has no 9.weight"),
        (
            [FILES[0], "five.safetensors"],
            ": 0.weight: found shape (10, 5), the network has (10, 6)",
        ),
        (["no.safetensors", FILES[0]], "no.safetensors does not exist"),
    ]:
        arguments = ["fuse", *files, *MODEL, "--out", "g.safetensors", "--dry-run"]
        assert words in complaint(arguments, clients, monkeypatch, capsys)
    unnamed = ["fuse", *FILES, "--out", "g.safetensors", "--dry-run"]
    assert "give --model" in complaint(unnamed, clients, monkeypatch, capsys)
    several = ["--frontier", "--probe", "noise", "--validate", "networks:size", "--dry-run"]
    arguments = ["fuse", *FILES, "--out", "g.safetensors", *several]
    assert "leave out --frontier" in complaint(arguments, clients, monkeypatch, capsys)
