"""What the site shows of the repository beyond docs/: README, changelog, commands, linked sources.

Hides: that links of the pages are those of the repository, which GitHub follows. Promises: on the
site, a link to a page leads to it, and one to any other file or folder to a page with its text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from nafi.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
}  # of the repository -> of the site
_LINK = re.compile(r"\]\((?!#|[a-z]+:)(?P<path>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.M | re.S)
_SHOWN = {".py": "python", ".toml": "toml", ".md": "markdown"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made of other files."""
    docs = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in MOVED} | docs
    made = {MOVED[name]: pages[name] for name in MOVED} | {"commands.md": commands()}
    for name, text in pages.items():
        for path in linked(name, text):
            target = site_path(path)
            if target.startswith("source/"):
                made[target] = source(path)
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of the repository become links of the site."""
    name = page.file.src_uri
    if name.startswith("source/"):
        return markdown
    origin = next((path for path, moved in MOVED.items() if moved == name), f"docs/{name}")

    def moved(link: re.Match[str]) -> str:
        target = site_path(
            posixpath.normpath(posixpath.join(posixpath.dirname(origin), link["path"]))
        )
        start = posixpath.dirname(name) or "."
        return f"]({posixpath.relpath(target, start)}{link['anchor'] or ''})"

    parts = _FENCE.split(markdown)  # text, block, text, ...: links are in texts
    parts[::2] = [_LINK.sub(moved, text) for text in parts[::2]]
    return "".join(parts)


def linked(origin: str, text: str) -> Iterator[str]:
    """The paths in the repository to which a page links."""
    for link in _LINK.finditer(_FENCE.sub("", text)):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(origin), link["path"]))


def site_path(path: str) -> str:
    """Where a path of the repository is on the site."""
    if path == "docs":
        return "index.md"
    return MOVED.get(path) or (path[5:] if path.startswith("docs/") else f"source/{path}.md")


def source(path: str) -> str:
    """A page with a file, or with the files of a folder; what is no program by name only."""
    place = ROOT / path
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    parts = [f"# {path}\n"]
    for file in files:
        if file.suffix in _SHOWN:
            title = f"## {file.name}\n" if place.is_dir() else ""
            parts.append(f"{title}\n````{_SHOWN[file.suffix]}\n{file.read_text('utf-8')}````\n")
        elif not file.name.startswith(("_", ".")):
            parts.append(f"- `{file.name}`")
    return "\n".join(parts)


def commands() -> str:
    """Every command with its arguments and options, as `--help` has them."""
    parts = ["# Commands\n", "As `nafi COMMAND --help` prints them.\n"]
    parts += [
        _command(command, path) for path, command in _walk(typer.main.get_command(app), "nafi")
    ]
    return "\n".join(parts)


def _walk(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), name)
            if found is not None and not found.hidden:
                yield from _walk(found, f"{path} {name}")
    else:
        yield path, command


def _command(command: click.Command, path: str) -> str:
    rows = [_parameter(parameter) for parameter in command.params if parameter.name != "help"]
    table = ["| option | what it does |", "| --- | --- |", *rows] if rows else []
    return "\n".join([f"## {path}\n", (command.help or "").strip(), "", *table, ""])


def _parameter(parameter: click.Parameter) -> str:
    option = isinstance(parameter, click.Option)
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    shown = names if option else f"`{(parameter.name or '').upper()}`"
    text = (getattr(parameter, "help", None) or "").replace("|", "\\|").replace("\n", " ")
    return f"| {shown} | {text} |"
