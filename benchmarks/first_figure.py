"""The first picture of the README: best client, ensemble, and one fused network of a client's size.

    python benchmarks/first_figure.py    # reads results/, writes docs/drawings/first.svg

Hides: how records become dots. Promises: every number is a mean over the committed records, every
problem of the experiment is on it, and of several ways the one with the best mean is shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from oneshot_figure import Records, by_problem

TARGET = Path(__file__).resolve().parent.parent / "docs" / "drawings" / "first.svg"
SERIES = {  # class of its dots -> what it is called, and the methods of which the best is shown
    "alone": ("best client alone", ["local best"]),
    "merged": (
        "fused by nafi: size of one client",
        [
            "nafi 1x pruned probe 256 head",
            "nafi 1x probe 256 head",
            "nafi 1x pruned probe 256 distilled",
            "nafi 1x probe 256 by input distilled",
        ],
    ),
    "stack": (
        "fused by stack: size of one client",
        ["stack 1x probe 256 head", "stack 1x probe 256 distilled"],
    ),
    "ensemble": (
        "ensemble: size of all clients",
        ["ensemble", "ensemble by class", "ensemble by input"],
    ),
}
LEFT, RIGHT, TOP, ROW = 180, 462, 112, 38  # of the scale, and of its rows, in pixels
WIDTH = 560
STYLE = """
  .card { fill: #ffffff; stroke: #d8dee6 } text { font: 14px system-ui, sans-serif; fill: #1b2430 }
  .small { font-size: 12px; fill: #51606f } .strong { font-weight: 700 } .grid { stroke: #e3e8ee }
  .alone { fill: #7d8b9a; stroke: #7d8b9a } .ensemble { fill: none; stroke: #51606f }
  .merged { fill: #1f5fa8; stroke: #1f5fa8 } .stack { fill: #c0392b; stroke: #c0392b }
  circle { stroke-width: 2 } .spread { stroke-width: 1.5; opacity: .5 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #171b22; stroke: #333c48 } text { fill: #e6ebf1 } .small { fill: #a9b5c2 }
    .grid { stroke: #2b333e } .alone { fill: #8fa0b2; stroke: #8fa0b2 }
    .ensemble { fill: none; stroke: #c3ccd6 } .merged { fill: #5aa2f0; stroke: #5aa2f0 }
    .stack { fill: #ef6f5f; stroke: #ef6f5f }
  }
"""


class Score(NamedTuple):
    """Mean and standard deviation over trials."""

    mean: float
    spread: float


def scores(records: Records) -> dict[str, Score]:
    """Each series of one problem; of several methods the one with the best mean."""
    found: dict[str, Score] = {}
    for series, (_, methods) in SERIES.items():
        trials = [[r["test"] for r in records if r["method"] == method] for method in methods]
        found[series] = max(Score(statistics.mean(t), statistics.pstdev(t)) for t in trials if t)
    return found


def place(score: float) -> float:
    """Where a score in percent stands on the scale, which begins at 20."""
    return LEFT + (RIGHT - LEFT) * (min(score, 100) - 20) / 80


def scale(bottom: int) -> Iterator[str]:
    for tick in (20, 40, 60, 80, 100):
        x = place(tick)
        yield f'<line class="grid" x1="{x:.1f}" y1="{TOP - 12}" x2="{x:.1f}" y2="{bottom}"/>'
        yield (
            f'<text class="small" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick}%</text>'
        )


def dot(series: str, x: float, y: float) -> str:
    """A ring for the ensemble, which does not hide what lies below it."""
    radius = 7.5 if series == "ensemble" else 5
    return f'<circle class="{series}" cx="{x:.1f}" cy="{y}" r="{radius}"/>'


def legend() -> Iterator[str]:
    for index, (series, (label, _)) in enumerate(SERIES.items()):
        x, y = 26 + 270 * (index % 2), 30 + 26 * (index // 2)
        yield dot(series, x, y - 4)
        yield f'<text x="{x + 14}" y="{y}">{escape(label)}</text>'


def row(title: str, found: dict[str, Score], y: int) -> Iterator[str]:
    parts = title.split(", ")  # data, network, what else there is to say, clients
    yield f'<text x="18" y="{y}">{escape(", ".join(parts[:2]))}</text>'
    yield f'<text class="small" x="18" y="{y + 16}">{escape(", ".join(reversed(parts[2:])))}</text>'
    for series, (mean, spread) in found.items():
        yield (
            f'<line class="{series} spread" x1="{place(mean - spread):.1f}" y1="{y}" '
            f'x2="{place(mean + spread):.1f}" y2="{y}"/>'
        )
    for series, (mean, _) in found.items():
        about = escape(f"{SERIES[series][0]}: {mean:.1f}%")
        yield f"{dot(series, place(mean), y)[:-2]}><title>{about}</title></circle>"
    change = f"{found['alone'].mean:.0f} → {found['stack'].mean:.0f}"
    yield f'<text class="strong" x="{WIDTH - 18}" y="{y + 4}" text-anchor="end">{change}</text>'


def drawing(problems: dict[str, dict[str, Score]]) -> str:
    """All problems, those with the largest gain first."""
    order = sorted(
        problems, key=lambda name: problems[name]["alone"][0] - problems[name]["stack"][0]
    )
    bottom = TOP + ROW * len(order) - 8
    height = bottom + 56
    rows = [
        part for at, name in enumerate(order) for part in row(name, problems[name], TOP + ROW * at)
    ]
    heading = f'<text class="small" x="{WIDTH - 18}" y="{TOP - 22}" text-anchor="end">'
    note = "Test accuracy, for U-Nets dice; mean and spread over 1 to 3 trials."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img">',
            "<title>Accuracy of the best client, the ensemble and the fused network</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>',
            *legend(),
            f"{heading}client → stack</text>",
            *scale(bottom),
            *rows,
            f'<text class="small" x="18" y="{height - 16}">{note}</text>',
            "</svg>\n",
        ]
    )


def main() -> None:
    problems = {title: scores(records) for title, records in by_problem().items()}
    TARGET.write_text(drawing(problems), encoding="utf-8")


if __name__ == "__main__":
    main()
