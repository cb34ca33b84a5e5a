"""The report of experiments: one page, and the same tables in Markdown.

Hides: HTML, and the marks in Markdown. Promises: one self-contained file that needs no network;
every number comes from the records, and which views are shown from the experiment's [report] table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nafi.errors import InputError, require
from nafi.files import atomic_path
from nafi.reports import figures
from nafi.reports.pages import write_html
from nafi.reports.records import Paper, Record, TextTable, markdown
from nafi.reports.views import USUAL, VIEWS, Material, Photos, check_views

if TYPE_CHECKING:
    from matplotlib.figure import Figure

require("jinja2")

_BEGIN, _END = "<!-- generated: begin -->", "<!-- generated: end -->"

# The [report] table for a record, as plain data; without "views" for the usual ones, and with what
# `nafi run` is given under "run", where that is known.
ReportOf = Callable[[Record], Mapping[str, Any]]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Section:
    """One experiment: its tables, its figures as SVG, and how it was run."""

    title: str
    command: str
    tables: tuple[TextTable, ...]
    figures: tuple[str, ...]
    versions: str


def own_report(record: Record) -> Mapping[str, Any]:
    """The [report] table that a record carries itself."""
    report: Mapping[str, Any] = record.get("report") or {}
    return report


def sections(
    runs: Mapping[str, Sequence[Record]],
    report_of: ReportOf = own_report,
    photos: Photos | None = None,
    progress: Progress | None = None,
) -> list[Section]:
    """A section for each experiment, in the order of their names.

    photos: looks up what is not in records, for pictures of samples
    progress: told which experiment is drawn, how many are done, and how many there are
    """
    found = []
    some = [(name, records) for name, records in sorted(runs.items()) if records]
    for done, (name, records) in enumerate(some):
        if progress is not None:
            progress(f"drawing {name}", done, len(some))
        found.append(_section(name, records, report_of(records[0]), photos))
    return found


def write_page(path: Path, content: Sequence[Section]) -> None:
    """All sections as one HTML file."""
    write_html(path, "experiments.html", sections=content)


def write_markdown(path: Path, content: Sequence[Section]) -> None:
    """All tables, between the marks of a Markdown file; what stands around them is kept."""
    lines = [_BEGIN, ""]
    for section in content:
        lines += [f"### {section.title}", "", f"`{section.command}`, {section.versions}", ""]
        lines += [markdown(table) for table in section.tables]
    body = "\n".join([*lines, _END])
    try:
        old = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if old.count(_BEGIN) != 1 or old.count(_END) != 1:
        raise InputError(f"{path} needs the lines {_BEGIN} and {_END} once each, for the tables")
    before, after = old[: old.index(_BEGIN)], old[old.index(_END) + len(_END) :]
    with atomic_path(path) as partial:
        partial.write_text(before + body + after, encoding="utf-8")


def _section(
    name: str, records: Sequence[Record], report: Mapping[str, Any], photos: Photos | None
) -> Section:
    config = records[0]["config"]
    tables, drawn = [], []
    for shown in _shown(records, report, photos):
        if isinstance(shown, TextTable):
            tables += [shown] if shown.rows else []
        else:
            drawn.append(figures.svg(shown))
    versions = ", ".join(f"{n} {number}" for n, number in records[0]["versions"].items())
    command = _command(report.get("run") or name, records)
    return Section(config["title"], command, tuple(tables), tuple(drawn), versions)


def _shown(
    records: Sequence[Record], report: Mapping[str, Any], photos: Photos | None
) -> list[TextTable | Figure]:
    """What the views of a report make of the records."""
    views = report.get("views") or USUAL
    check_views(views)
    paper = Paper.of(report["paper"]) if report.get("paper") else Paper()
    leads = [(method, other) for method, other in report.get("leads") or []]
    material = Material(records, paper, photos, leads)
    titles = report.get("titles") or {}
    return [
        shown for view in views for shown in _titled(list(VIEWS[view](material)), titles.get(view))
    ]


def _titled(made: list[TextTable | Figure], title: str | None) -> list[TextTable | Figure]:
    """What a view made, with another title: of its tables, or of its figure if it has none."""
    if title is None:
        return made
    if any(isinstance(shown, TextTable) for shown in made):
        return [replace(s, title=title) if isinstance(s, TextTable) else s for s in made]
    for shown in made:
        if not isinstance(shown, TextTable):
            shown.suptitle(title)
    return made


def _command(name: str, records: Sequence[Record]) -> str:
    """The command that runs the experiment again."""
    profile = records[0]["config"].get("profile")
    run = f"{name.removesuffix(f'-{profile}')} --profile {profile}" if profile else name
    return f"nafi run {run} --trials {1 + max(r['trial'] for r in records)}"
