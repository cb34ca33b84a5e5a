"""The command line as a user meets it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import nafi
from nafi.cli import main
from nafi.cli.app import app, command_line, progress_bar
from nafi.cli.demo import has_desktop, open_page
from nafi.cli.tables import spec_tables
from nafi.fusion import METHODS, make_method
from nafi.graph import ModelSpec
from nafi.reports import demo_score, demo_table, fits_table, fusion_table, judgement_table
from tests.pages import Page

RUN = "from nafi.cli import main; main()"


def started(
    *arguments: str, cwd: Path | None = None, code: str = RUN
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
    )


@contextmanager
def own_modules(folder: Path, patched: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of a folder are not mistaken for those of the same name in another one."""
    names = [file.stem for file in folder.glob("*.py")]
    for name in names:
        patched.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same in this process, which saves its start."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(out), redirect_stderr(err):
        patched.chdir(cwd)
        patched.setattr(sys, "argv", ["nafi", *arguments])
        patched.setattr(sys, "path", list(sys.path))
        patched.setattr(sys, "dont_write_bytecode", True)
        with own_modules(cwd, patched):
            try:
                main()
            except SystemExit as stopped:
                code = int(stopped.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def complaint(
    arguments: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """What is told of arguments that cannot be: in this process, which saves its start."""
    with monkeypatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "argv", ["nafi", *arguments])
        patched.setattr(sys, "path", list(sys.path))
        patched.setattr(sys, "dont_write_bytecode", True)
        with own_modules(folder, patched), pytest.raises(SystemExit) as stopped:
            main()
    told = capsys.readouterr().err
    assert stopped.value.code == 2, told
    assert "Traceback" not in told
    return told


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of one demonstration, and what it found; POT is not there for it."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "ot", None)
        done = run("demo", "--json", "--trials", "2", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.mark.slow
def test_the_demo_compares_all_methods_at_one_size(
    demonstrated: tuple[Path, dict[str, Any]],
) -> None:
    """Over six seeds nafi is 18 points better than clients alone (sd 2), and fedavg far worse."""
    _, found = demonstrated
    methods = {row["method"]: row for row in found["methods"]}
    assert list(methods) == [name for name in METHODS if name != "ensemble"]
    ran = {name: row for name, row in methods.items() if not row["missing"]}
    assert all(0.97 < row["size"] <= 1.0 for row in ran.values())
    alone, _, ensemble = found["references"]
    assert (alone["size"], ensemble["size"]) == (1.0, 8.0)
    for name in ("nafi", "pfnm", "stack"):
        assert ran[name]["accuracy"]["mean"] > alone["accuracy"]["mean"] + 8
        assert ran[name]["uses_probe"]
    assert not ran["fedavg"]["uses_probe"]
    assert ran["stack"]["without_probe"] is None
    sizes = {name: [size for size, _ in curve] for name, curve in found["curves"].items()}
    assert sizes["nafi"][0] < 0.51
    assert sizes["stack"][0] < 0.51
    assert max(map(max, sizes.values())) <= 4.0


@pytest.mark.slow
def test_the_demo_says_what_is_missing_on_its_page(
    demonstrated: tuple[Path, dict[str, Any]],
) -> None:
    folder, found = demonstrated
    assert sorted(path.name for path in folder.iterdir()) == ["nafi-demo.html", "nafi-demo.png"]
    text = (folder / "nafi-demo.html").read_text()
    page = Page(text)
    assert (page.tags["svg"], page.tags["table"], page.fetched) == (2, 1, [])
    assert "method ot needs the POT package: pip install" in text
    assert "nafi demo --json --trials 2" in text
    rows = {row[0]: row[1] for row in demo_table(found).rows}
    assert rows["ot"] == "not installed"
    assert f"{rows['nafi']}</td>" in text
    lead = text.index(demo_score(found))  # what it is, then the score, then the picture
    assert text.index("share no data") < lead < text.index("<svg") < text.index("<table")


@pytest.mark.parametrize(
    ("environment", "terminal", "opened"),
    [
        ({"DISPLAY": ":0"}, True, True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, True, True),
        ({"DISPLAY": ":0"}, False, False),
        ({}, True, False),
        ({"DISPLAY": ":0", "CI": "true"}, True, False),
    ],
)
def test_a_page_opens_only_before_a_person(
    environment: dict[str, str], terminal: bool, opened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert has_desktop(environment, terminal) == opened


def test_no_page_opens_in_a_ci_job(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("typer.launch", opened.append)
    monkeypatch.setenv("CI", "true")
    open_page(Path("page.html"))
    monkeypatch.delenv("CI")
    open_page(Path("page.html"))
    assert opened == [(Path.cwd() / "page.html").as_uri()]


def test_what_a_user_can_mend_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in [
        (["demo", "--out", str(tmp_path / "no" / "x.html")], "does not exist"),
        (["demo", "--out", str(tmp_path / "x.png")], "expected a name that ends in .html"),
        (["demo", "--out", str(tmp_path)], "expected a name that ends in .html"),
    ]:
        told = complaint(arguments, tmp_path, monkeypatch, capsys)
        assert words in told
        assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_unknown_command_and_version() -> None:
    assert started("demoo").returncode == 2
    done = started("--version")
    assert (done.returncode, done.stdout) == (0, f"nafi {nafi.__version__}\n")


def test_a_mistyped_command_gets_one_suggestion() -> None:
    for arguments, meant in [(["demoo"], "demo"), (["flower", "nw"], "new")]:
        told = CliRunner().invoke(app, arguments).output
        assert told.count(f"Did you mean '{meant}'?") == 1


def test_the_package_runs_as_the_command_does() -> None:
    """And a page it writes says so."""
    done = subprocess.run(
        [sys.executable, "-m", "nafi", "--help"], capture_output=True, text=True, check=True
    )
    assert "Usage: nafi [OPTIONS] COMMAND" in done.stdout


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/usr/bin/nafi", "fuse", "my model.pt"], "nafi fuse 'my model.pt'"),
        (["/x/nafi/__main__.py", "demo"], "python -m nafi demo"),
    ],
)
def test_provenance_is_the_command_that_was_run(
    argv: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert command_line() == command


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    script = CliRunner().invoke(app, ["--show-completion"], prog_name="nafi")
    assert script.exit_code == 0, script.output
    assert f"_NAFI_COMPLETE=complete_{shell}" in script.output


def test_commands_are_completed() -> None:
    words = {"_NAFI_COMPLETE": "complete_bash", "COMP_WORDS": "nafi me", "COMP_CWORD": "1"}
    found = subprocess.run(
        [sys.executable, "-c", RUN],
        capture_output=True,
        text=True,
        env={**os.environ, **words},
        check=False,
    )
    assert found.stdout.split() == ["methods"], found.stderr


def test_long_names_are_not_cut_on_80_columns(tmp_path: Path) -> None:
    """Every character is there, if on several lines."""
    name = "encoder_of_the_first_stage.block_with_normalisation.a_layer"
    rows = [{"group": name, "local": [64, 64], "width": 128, "shared": [100, 28]}]
    fit = {"before": 0.5, "after": 0.1, "ridge": 1e-5, "inputs": 1024, "samples": 10**6}
    scores = {"clients": [{"name": name, "score": 0.5}], "ensemble": None, "fused": 0.5}
    spec = ModelSpec.from_dict(
        {
            "groups": {name: {"width": 4, "parent": None, "rigid": None}},
            "axes": {f"{name}.weight": [[[name]], [[3]]]},
        }
    )
    for table in [
        fusion_table(rows, "t"),
        fits_table({name: fit}),
        judgement_table(scores),
        *spec_tables(spec, "t"),
    ]:
        console = Console(width=80, file=io.StringIO(), color_system=None)
        console.print(table)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "…" not in text
        first = [line.split("│")[1].strip() for line in text.splitlines() if "│" in line]
        assert name in "".join(first)


def write_network(folder: Path) -> None:
    (folder / "networks.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def lenet():\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))\n"
        "def broken():\n    raise RuntimeError('no weights here')\n"
        "def number():\n    return 3\n"
        "def odd():\n"
        "    class Odd(nn.Module):\n"
        "        def __init__(self):\n"
        "            super().__init__()\n"
        "            self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 2)\n"
        "        def forward(self, x):\n"
        "            return self.two(torch.renorm(self.one(x), 2, 0, 1.0))\n"
        "    return Odd()\n"
    )


def test_inspect_prints_groups_for_people_and_machines(tmp_path: Path) -> None:
    write_network(tmp_path)
    arguments = ["inspect", "--model", "networks:lenet", "--input-shape", "1,8,8"]
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Neuron groups of networks:lenet" in done.stdout
    assert "model output" in done.stdout
    assert "99.4% of all parameters" in done.stdout
    data = json.loads(run(*arguments, "--json", cwd=tmp_path).stdout)
    assert data["groups"] == {"0": {"width": 4, "parent": None, "rigid": None}}
    assert data["axes"]["3.weight"] == [[[3]], [["0", 36]]]
    assert abs(data["coverage"] - (36 + 4 + 432) / (36 + 4 + 432 + 3)) < 1e-9


def test_inspect_takes_keyword_arguments_from_the_module(tmp_path: Path) -> None:
    write_network(tmp_path)
    with (tmp_path / "networks.py").open("a") as file:
        file.write("def example_inputs():\n    return {'input': torch.zeros(2, 1, 8, 8)}\n")
    done = run("inspect", "--model", "networks:lenet", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["groups"]) == ["0"]


def test_inspect_takes_example_inputs_from_the_module_and_warns_of_gaps(tmp_path: Path) -> None:
    write_network(tmp_path)
    with (tmp_path / "networks.py").open("a") as file:
        file.write("def example_inputs():\n    return (torch.zeros(2, 4),)\n")
    done = run("inspect", "--model", "networks:odd", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("nafi: no rule for renorm")
    assert "one.weight axis 0" in done.stderr


def test_inspect_says_what_is_wrong_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_network(tmp_path)
    shape = ["--input-shape", "1,8,8"]
    for arguments, words in [
        (["networks"], "expected package.module:factory"),
        (["networks.py:lenet"], "write networks:lenet"),
        (["nowhere:net"], "cannot import nowhere"),
        (["networks:lent", *shape], "networks has no function or class 'lent'"),
        (["networks:broken", *shape], "networks:broken() failed: RuntimeError: no weights here"),
        (["networks:number", *shape], "returned int, expected nn.Module"),
        (["networks:lenet"], "--input-shape 3,32,32"),
        (["networks:lenet", "--input-shape", "1,x"], "found '1,x'"),
        (["networks:lenet", "--input-shape", "1,9,9"], "does not run on the example inputs"),
    ]:
        told = complaint(["inspect", "--model", *arguments], tmp_path, monkeypatch, capsys)
        assert words in told
        assert told.count("\n") == 1


def test_a_log_gets_lines_of_what_was_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard error is no terminal here: a line at most every ten seconds, and no bar."""
    clock = iter([0.0, 4.0, 12.0, 15.0, 90.0, 120.0])
    monkeypatch.setattr("nafi.cli.app.time.monotonic", lambda: next(clock))
    with progress_bar(False) as show:
        for step, done in [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("d", 4)]:
            show(step, done, 9)
    lines = ["nafi: 2 of 9 after 0.2 min: b", "nafi: 4 of 9 after 1.5 min: d"]
    assert capsys.readouterr().err.splitlines() == lines


def test_help_says_what_arguments_are() -> None:
    for command, words in {
        "fuse": "Two or more files",
        "run": "A name from --list",
        "report": "A folder of records",
    }.items():
        assert words in CliRunner().invoke(app, [command, "--help"]).output


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    return done.output


def test_methods_lists_the_registry() -> None:
    table = printed("methods")
    for name, method in METHODS.items():
        assert re.search(rf"│ {name} +│ {re.escape((method.__doc__ or '').split()[0])}", table)
    described = json.loads(printed("methods", "--json"))
    assert [method["name"] for method in described] == list(METHODS)
    for method in described:
        made = make_method(method["name"])
        defaults = {option["name"]: option["default"] for option in method["options"]}
        assert defaults == made.settings()
        assert all(option["meaning"] for option in method["options"]), method["name"]


def test_methods_shows_the_options_of_one() -> None:
    table = printed("methods", "nafi")
    assert "It uses class_counts, input_moments, probe, sample_counts." in table
    assert re.search(r"│ penalty +│ None +│ a number of at least 0, or a list", table)
    assert re.search(r"│ trim +│ 0\.0 +│ .*│ see clip", table)
    assert "It has no options." in printed("methods", "fedavg")


def test_an_unknown_method_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = complaint(["methods", "magic"], tmp_path, monkeypatch, capsys)
    assert "found 'magic', expected one of nafi, pfnm" in told


WITHOUT_LAB = """
import sys
sys.modules |= dict.fromkeys(["jinja2", "matplotlib", "PIL", "pooch", "pydantic", "sklearn"])
from nafi.cli import main
main()
"""


def test_without_torch_one_is_told_how_to_get_it_with_and_without_cuda(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from nafi.cli import main; main()"
    done = started("methods", cwd=tmp_path, code=code)
    assert done.returncode == 2
    assert done.stderr.startswith("nafi: this needs torch, which is not installed: pip install")
    assert "CPU" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["demo", "run --list", "report ."])
def test_what_needs_the_laboratory_says_how_to_install_it(command: str, tmp_path: Path) -> None:
    done = started(*command.split(), cwd=tmp_path, code=WITHOUT_LAB)
    assert done.returncode == 2
    hint = r"nafi: this needs \w+, which is not installed: pip install 'nafi\[lab\]'\n"
    assert re.fullmatch(hint, done.stderr), done.stderr
    assert list(tmp_path.iterdir()) == []
