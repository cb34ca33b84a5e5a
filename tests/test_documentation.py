"""What README and docs show: every Python block runs as it stands, every command line parses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import typer

from nafi.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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


PROGRAMS = [block for block in blocks() if block.kind == "python"]
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
