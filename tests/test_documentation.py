"""What README and docs show: every Python block runs as it stands, every command line parses.

The commands of the README run, too, in a folder with the files it speaks of; links lead somewhere.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import nafi
from nafi.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S)


class Block(NamedTuple):
    kind: str
    text: str
    page: Path
    line: int

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("```") % 2 == 0, f"{page}: a block has no end"
        for found in FENCE.finditer(text):
            line = text.count("\n", 0, found.start("text")) + 1
            yield Block(found["kind"], found["text"], page, line)


def commands() -> Iterator[tuple[str, str]]:
    """Each command line of nafi in a block that is no program, and where it stands."""
    for block in blocks():
        if block.kind in ("", "sh", "bash", "shell", "console"):
            for line in block.text.replace("\\\n", " ").splitlines():
                if re.match(r"\s*(\$ )?nafi [a-z-]", line):
                    yield block.place, line.strip().removeprefix("$ ")


# The blocks of the tutorial build on each other; tests/test_tutorial.py runs them as a notebook.
TUTORIAL = ROOT / "docs" / "tutorial.md"
PROGRAMS = [block for block in blocks() if block.kind == "python" and block.page != TUTORIAL]
COMMANDS = list(commands())


def test_there_are_programs_and_commands_to_test() -> None:
    assert {block.page.name for block in PROGRAMS} >= {"README.md", "federated.md"}
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.place)
def test_a_program_runs_as_it_stands(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an empty folder, with names of its own, and numbered as in its page."""
    monkeypatch.chdir(tmp_path)
    source = "\n" * (block.line - 1) + block.text
    exec(compile(source, str(block.page), "exec"), {"__name__": "__main__"})


QUICKSTART = next(block for block in PROGRAMS if block.page.name == "README.md")


def test_the_quickstart_makes_its_point_within_fifteen_lines() -> None:
    """From every start, by a wide margin: 28 to 42 points in eighteen trials."""
    assert sum(bool(line) for line in QUICKSTART.text.splitlines()) <= 15
    for seed in range(3):
        torch.manual_seed(seed)
        names: dict[str, Any] = {}
        exec(compile(QUICKSTART.text, QUICKSTART.place, "exec"), names)
        x, y, test = names["x"], names["y"], names["test"]
        models = [*names["models"], names["result"].model]
        right = [(model(x[test]).argmax(1) == y[test]).double().mean() for model in models]
        assert right[-1] > max(right[:-1]) + 0.15
        assert sum(p.numel() for p in models[-1].parameters()) == 64 * 40 + 40 + 40 * 10 + 10


MINE = """
import torch
from torch import nn

def network():
    return nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10))

def batches():
    inputs = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    yield inputs, torch.arange(200) % 10

def accuracy(model):
    return (model(torch.eye(64)).argmax(1) == torch.arange(64) % 10).double().mean()
"""


@pytest.fixture
def clients_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the README asks a reader to have: networks in files, `mine.py`, counts and inputs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    for name in ("a.safetensors", "b.safetensors", "c.pt"):
        model = nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10))
        if name.endswith(".pt"):
            torch.save(model.state_dict(), name)
        else:
            nafi.save(model, name)
    (tmp_path / "counts.json").write_text(json.dumps([[5] * 10] * 3))
    np.save("inputs.npy", np.random.default_rng(0).normal(size=(32, 64)).astype("float32"))
    return tmp_path


@pytest.mark.filterwarnings("ignore:Worse than a client")
def test_the_commands_of_the_readme_run(clients_folder: Path) -> None:
    """All but the experiments, which take longer and have tests of their own."""
    for place, line in COMMANDS:
        words = shlex.split(line, comments=True)[1:]
        if place.startswith("README.md") and words[0] not in ("run", "report"):
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, f"{place}: {done.output}"
        if words[0] == "statistics" and place.startswith("README.md"):  # so do the other clients
            for other in ("b.stats", "c.stats"):
                shutil.copy("a.stats", other)
    assert nafi.load("solved.safetensors", "mine:network")(torch.zeros(2, 64)).shape == (2, 10)
    assert nafi.load("fused.safetensors", "mine:network")(torch.zeros(2, 64)).shape == (2, 10)
    assert (clients_folder / "fused.html").exists()
    assert (clients_folder / "hospitals" / "README.md").exists()


def test_the_first_picture_is_that_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise run python benchmarks/first_figure.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tool = runpy.run_path(str(ROOT / "benchmarks" / "first_figure.py"))
    problems = {title: tool["scores"](rows) for title, rows in tool["by_problem"]().items()}
    assert tool["drawing"](problems) == tool["TARGET"].read_text(encoding="utf-8")


def test_messages_in_the_faq_are_those_of_the_code() -> None:
    """Strings that continue on the next line are joined first."""
    modules = sorted((ROOT / "src" / "nafi").rglob("*.py"))
    source = "".join(module.read_text(encoding="utf-8") for module in modules)
    source = re.sub(r'"\n\s*f?"', "", source)
    faq = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    messages = re.findall(r"^### `(.+)`$", faq, re.M)
    assert len(messages) > 10
    assert [message for message in messages if message not in source] == []


def anchors(page: Path) -> set[str]:
    """The names under which GitHub links to the headings of a page."""
    text = re.sub(FENCE, "", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """As GitHub follows them; tests/test_site.py looks at those of the site."""
    text = re.sub(FENCE, "", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", link):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), f"{page.name}: {link} leads nowhere"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link} has no heading"


@pytest.mark.parametrize(("place", "line"), COMMANDS, ids=[line for _, line in COMMANDS])
def test_a_command_line_parses(place: str, line: str) -> None:
    """Known commands and options; nothing is run."""
    command: click.Command = typer.main.get_command(app)
    context, words = None, shlex.split(line, comments=True)
    while True:
        context = command.make_context(words[0], words[1:], parent=context)
        words = [*context._protected_args, *context.args]
        if not isinstance(command, click.Group):
            break
        name, command, _ = command.resolve_command(context, words)
        assert command is not None, f"{place}: nafi has no command {name}"
