"""What files may do: no file chooses code, and none takes more memory than it may."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import nafi
from nafi.checkpoints import load_clients
from nafi.errors import CheckpointError, InputError
from nafi.factories import load_factory
from nafi.memory import machine_memory, text_of_size
from nafi.recipes import store_recipe
from tests.processes import HEED_CTRL_C
from tests.test_cli import RUN, run

# Says in a file that it was imported, and that its function ran.
MARKED = """
from pathlib import Path
import torch
from torch import nn
Path("imported").touch()

def net():
    from beside import WIDTH
    Path("called").touch()
    return nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))

def example_inputs():
    return torch.zeros(2, 6)

def leave():
    raise SystemExit(0)

def vanish():
    raise BaseException("gone\\nfor good")

def sleep():
    import time
    Path("called").touch()
    time.sleep(600)

def score(model):
    raise SystemExit(0)
"""


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two checkpoints that name a function in a module beside them."""
    (tmp_path / "marked.py").write_text(MARKED)
    (tmp_path / "beside.py").write_text("WIDTH = 5")
    for name in "ab":
        nafi.save(network(), tmp_path / f"{name}.safetensors", factory="marked:net")
    monkeypatch.chdir(tmp_path)
    for module in ("marked", "beside"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


A, B = "a.safetensors", "b.safetensors"
COMMANDS = {
    "fuse": ["fuse", A, B, "--out", "g.safetensors"],
    "dry run": ["fuse", A, B, "--out", "g.safetensors", "--dry-run"],
    "inspect": ["inspect", A],
    "statistics": ["statistics", A, "--data", "json:loads", "--out", "a.stats"],
    "head": ["head", A, "a.stats", "--out", "g.safetensors"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_what_a_file_names(command: str, folder: Path) -> None:
    before = sorted(folder.iterdir())
    done = run(*COMMANDS[command], cwd=folder)
    assert done.returncode == 2
    assert done.stderr == (
        "nafi: a.safetensors names marked:net as what makes its network, but no file may choose "
        "code; if you trust it, give --trust-factory marked:net (in Python, "
        'trust_factory="marked:net")\n'
    )
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("name", ["http.server:test", "sys:exit", "os:abort", "marked:net"])
def test_nothing_that_a_file_names_is_imported_or_called(folder: Path, name: str) -> None:
    nafi.save(network(), A, factory=name, overwrite=True)
    for trusted in (None, False, "marked:other"):
        with pytest.raises(CheckpointError, match=rf"a\.safetensors names {name} .*trust_factory="):
            nafi.load(A, trust_factory=trusted)
    with pytest.raises(CheckpointError, match=rf"names {name}"):
        load_clients([A], None)
    assert not (folder / "imported").exists()


def test_what_the_user_names_runs(folder: Path) -> None:
    path = list(sys.path)
    for arguments in ({"factory": "marked:net"}, {"trust_factory": "marked:net"}):
        assert nafi.load(A, **arguments)(torch.zeros(2, 6)).shape == (2, 3)
    assert nafi.load(A, network, trust_factory=False)(torch.zeros(2, 6)).shape == (2, 3)
    assert nafi.load(A, trust_factory=True)[0].out_features == 5
    assert sys.path == path
    done = run(*COMMANDS["fuse"], "--trust-factory", "marked:net", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert 'nafi.load("g.safetensors", "marked:net")' in done.stdout
    with pytest.raises(InputError, match=r"trust_factory: found 3, expected"):
        nafi.load(A, trust_factory=3)  # type: ignore[arg-type]


def test_files_that_disagree_are_refused(folder: Path) -> None:
    nafi.save(network(), B, factory="other:net", overwrite=True)
    done = run(*COMMANDS["fuse"], "--trust-factory", "marked:net", cwd=folder)
    assert done.returncode == 2
    assert "a.safetensors names marked:net" in done.stderr
    assert "b.safetensors names other:net: give --model" in done.stderr
    assert not (folder / "imported").exists()
    done = run(*COMMANDS["fuse"], "--model", "marked:net", cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", ["a:b; rm -rf x", "a:b\n", "a b:c", "a:", "x" * 10**4 + ":f", "$(x):f"]
)
def test_a_name_that_could_harm_whoever_pastes_it_is_no_name(folder: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"expected 'package\.module:function'"):
        nafi.save(network(), A, factory=name, overwrite=True)

    save_file({"x": torch.zeros(1)}, A, metadata={"nafi": json.dumps({"factory": name})})
    with pytest.raises(CheckpointError, match="factory: found") as refused:
        nafi.load(A)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("marked:leave", "marked:leave() failed: SystemExit: 0; the factory"),
        ("marked:vanish", "marked:vanish() failed: BaseException: gone for good; the factory"),
        ("leaving:net", "cannot import leaving: SystemExit: 0 (searched"),
    ],
)
def test_code_that_ends_the_program_is_an_error(folder: Path, name: str, words: str) -> None:
    (folder / "leaving.py").write_text("import sys; sys.exit(0)")
    path = list(sys.path)
    with pytest.raises(InputError, match=r"SystemExit|BaseException") as failed:
        load_factory(name)
    assert words in str(failed.value)
    assert sys.path == path
    done = run(*COMMANDS["fuse"], "--model", name, cwd=folder)
    assert done.returncode == 2
    assert done.stderr.startswith(f"nafi: {words}")
    assert done.stderr.count("\n") == 1
    assert not (folder / "g.safetensors").exists()


def test_a_score_that_ends_the_program_is_an_error(folder: Path) -> None:
    options = ["--model", "marked:net", "--validate", "marked:score"]
    done = run(*COMMANDS["fuse"], *options, cwd=folder)
    assert (done.returncode, "marked:score failed: SystemExit: 0" in done.stderr) == (2, True)


def test_the_user_can_still_interrupt_a_factory(folder: Path) -> None:
    code = HEED_CTRL_C + RUN
    command = [sys.executable, "-c", code, *COMMANDS["inspect"], "--model", "marked:sleep"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    while not (folder / "called").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode not in (0, 2)


RECIPE = {
    "checkpoints": [A, B],
    "out": "g.safetensors",
    "model": "marked:net",
    "validate": "marked:score",
    "taken_from": "nowhere",
}


def test_a_recipe_taken_from_a_file_runs_no_code(folder: Path) -> None:
    store_recipe(folder / A, RECIPE)
    (folder / "again.toml").write_text(run("inspect", A, "--recipe", cwd=folder).stdout)
    (folder / "c").mkdir()
    for place, origin in [("again.toml", A), ("c/nafi-recipe.toml", "c/nafi-recipe.toml")]:
        if origin != A:
            store_recipe(folder / "c", {k: v for k, v in RECIPE.items() if k != "taken_from"})
        done = run("fuse", place, cwd=folder)
        assert done.returncode == 2
        assert done.stderr == (
            f"nafi: {place} was taken from {origin} and names marked:net, marked:score, but no "
            "file may choose code; if you trust it, give --trust-factory marked:net "
            "--trust-factory marked:score\n"
        )
        assert not (folder / "imported").exists()
    done = run("fuse", "again.toml", "--model", "marked:net", cwd=folder)
    assert "names marked:score, but" in done.stderr
    trusted = ["--trust-factory", "marked:net", "--trust-factory", "marked:score"]
    assert "marked:score failed" in run("fuse", "again.toml", *trusted, cwd=folder).stderr
    (folder / "own.toml").write_text("trust_factory = ['marked:net']")
    refused = run("fuse", "own.toml", cwd=folder).stderr
    assert "'trust_factory' belongs on the command line: --trust-factory" in refused


HUGE = 10**6  # squared, as floats: 4 TB
MB = 10**6


def stride_bomb(file: Path) -> None:
    """One number that claims to be a matrix."""
    torch.save({"0.weight": torch.zeros(1).expand(HUGE, HUGE)}, file)


def deflated_bomb(file: Path) -> None:
    """100 MB of zeros in 100 kB."""
    torch.save({"0.weight": torch.zeros(25 * MB)}, file)
    with zipfile.ZipFile(file) as archive:
        parts = {each.filename: archive.read(each) for each in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    assert file.stat().st_size < MB


def old_bomb(file: Path) -> None:
    """A file of the format before archives whose storage claims to hold 8 GB."""
    torch.save({"x": torch.zeros(MB)}, file, _use_new_zipfile_serialization=False)
    content = file.read_bytes()
    size, claimed = (b"J" + number.to_bytes(4, "little") for number in (MB, 2**31 - 1))
    file.write_bytes(content.replace(size, claimed))


def inputs_bomb(file: Path) -> None:
    """A small network that asks to be run on 40 MB, which takes a multiple of them."""
    described = json.dumps({"inputs": [[[10**5, 100], "float32"]]})
    save_file(network().state_dict(), file, metadata={"nafi": described})


def honest_giant(file: Path) -> None:
    save_file({"0.weight": torch.zeros(25 * MB)}, file)


@pytest.mark.parametrize("bomb", [stride_bomb, deflated_bomb, old_bomb, inputs_bomb, honest_giant])
def test_a_file_takes_no_more_memory_than_it_may(
    bomb: Callable[[Path], None], tmp_path: Path
) -> None:
    file = tmp_path / "x.safetensors" if bomb in (inputs_bomb, honest_giant) else tmp_path / "x.pt"
    bomb(file)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(CheckpointError, match=rf"{file.name}.*limit.* 50\.0 MB.*--max-bytes"):
        nafi.load(file, network, max_bytes=50 * MB)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start < 60_000  # kB
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_the_usual_limit_is_half_of_the_memory(tmp_path: Path) -> None:
    stride_bomb(tmp_path / "x.pt")
    half = text_of_size(machine_memory() // 2)
    with pytest.raises(CheckpointError, match=rf"limit is {half}, half of this machine's memory"):
        nafi.load(tmp_path / "x.pt", network)
    for wrong in (0, -1, True, 2.5, "1"):
        with pytest.raises(InputError, match="max_bytes: found"):
            nafi.load(tmp_path / "x.pt", network, max_bytes=wrong)  # type: ignore[arg-type]


def test_who_follows_refusals_gets_there(folder: Path) -> None:
    """Both files count; the one that would be too much is named."""
    arguments = [*COMMANDS["fuse"], "--model", "marked:net", "--max-bytes"]
    limit, refused = "9", []
    while (done := run(*arguments, limit, cwd=folder)).returncode == 2 and len(refused) < 9:
        refused.append(done.stderr)
        limit = done.stderr.split("--max-bytes ")[1].split()[0]
    assert done.returncode == 0, done.stderr
    assert refused[0].startswith("nafi: a.safetensors would take")
    assert refused[-1].startswith("nafi: b.safetensors")
    assert "with the files before it" in refused[-1]
    assert {each.count("\n") for each in refused} == {1}


@pytest.mark.parametrize("command", ["dry run", "inspect", "statistics", "head"])
def test_every_command_has_the_limit(command: str, folder: Path) -> None:
    done = run(*COMMANDS[command], "--model", "marked:net", "--max-bytes", "9", cwd=folder)
    assert (done.returncode, "the limit is 9 bytes" in done.stderr) == (2, True)


def test_a_shape_without_numbers_is_no_tensor(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.empty(HUGE, HUGE, device="meta")}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"x\.pt: 0\.weight has a shape, but no numbers"):
        nafi.load(tmp_path / "x.pt", network)


def test_statistics_have_the_same_limit(tmp_path: Path) -> None:
    honest_giant(tmp_path / "x.stats")
    with pytest.raises(CheckpointError, match=r"x\.stats would take 100\.0 MB of memory"):
        nafi.load_statistics(tmp_path / "x.stats", max_bytes=50 * MB)
