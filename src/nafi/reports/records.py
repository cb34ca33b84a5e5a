"""Tables and series from run records: plain data in, plain data out.

Hides: how cells are put together over trials. Promises: every number is a function of the records;
mean and spread over trials, never a single one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, NamedTuple

Record = Mapping[str, Any]


class CellKey(NamedTuple):
    """What records must have in common to be one cell of a table, but for the method.

    problem: where an experiment has several
    """

    clients: int
    hidden: int
    problem: str = ""

    @classmethod
    def of(cls, record: Record) -> CellKey:
        return cls(record["clients"], record["hidden"], record.get("problem") or "")

    @property
    def in_paper(self) -> tuple[int, int]:
        """What the paper tells apart."""
        return self.clients, self.hidden


@dataclass(frozen=True)
class Paper:
    """What the paper has.

    figures: (clients, hidden) -> method -> (mean, spread)
    samples: so many it trained on, None if not known
    note: how far the two can be compared
    """

    figures: Mapping[tuple[int, int], Mapping[str, tuple[float, float]]] = field(
        default_factory=dict
    )
    samples: int | None = None
    note: str = "the paper chose its penalty by test accuracy, ours is chosen on validation data"

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Paper:
        """From the table [report.paper] of an experiment."""
        methods = table["methods"]
        figures = {
            (row["clients"], row.get("hidden", 1)): {
                method: (float(mean), float(spread))
                for method, (mean, spread) in zip(methods, row["figures"], strict=True)
            }
            for row in table["rows"]
        }
        return cls(figures, table.get("samples"), table.get("note") or cls.note)


_ORDER = (
    "local",
    "fedavg",
    "fedavg-wide",
    "fedprox",
    "ot",
    "rebasin",
    "fedma",
    "pfnm-unfrozen",
    "pfnm-public",
    "pfnm-topdown",
    "pfnm",
    "nafi-untuned",
    "nafi-oneshot",
    "nafi-oneshot-calibrated",
    "nafi-layerwise",
    "nafi-average",
    "nafi-refit-early",
    "nafi-refit",
    "nafi-refit-average",
    "nafi",
    "stack-1",
    "stack-2",
    "stack-4",
    "stack",
    "ensemble",
)
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")
# Not one model of the clients' making, so never the best of a row.
NOT_COMPARED = ("local", "ensemble")


@dataclass(frozen=True)
class Summary:
    """A mean over trials, with its spread; the spread of one trial is not known."""

    mean: float
    spread: float | None
    trials: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, len(values))

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (f" ± {self.spread:.2f}" if self.spread is not None else "")


@dataclass(frozen=True)
class TextTable:
    """A table of texts; `best` holds the (row, column) places to stress."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: frozenset[tuple[int, int]] = frozenset()
    note: str = ""


def by_cell(
    records: Iterable[Record], value: Callable[[Record], float]
) -> dict[CellKey, dict[str, Summary]]:
    """Cell -> method -> summary over trials."""
    values_of: dict[CellKey, dict[str, list[float]]] = {}
    for record in records:
        row = values_of.setdefault(CellKey.of(record), {})
        row.setdefault(record["method"], []).append(value(record))
    return {
        key: {method: Summary.of(values) for method, values in row.items()}
        for key, row in sorted(values_of.items(), key=lambda item: item[0][::-1])
    }


def score_table(
    records: Sequence[Record],
    title: str,
    field: str = "test",
    best: Callable[[Iterable[float]], float] = max,
) -> TextTable:
    """Mean ± spread: a row for each method, a column for each cell.

    best: of several means, `min` for losses
    """
    cells = by_cell(records, lambda r: r[field])
    return _summary_table(title, [(cell_name(key), row) for key, row in cells.items()], best)


def site_tables(records: Sequence[Record], title: str) -> list[TextTable]:
    """For each cell, a row for each method and a column for each site, then the worst of a trial.

    title: begins that of every table
    """
    tables = []
    for key in by_cell(records, lambda r: r["test"]):
        of_cell = [r for r in records if CellKey.of(r) == key]
        names = dict.fromkeys(name for r in of_cell for name in r["sites"])
        columns = [
            (name, by_cell([r for r in of_cell if name in r["sites"]], _score_at(name))[key])
            for name in names
        ]
        worst = by_cell(of_cell, lambda r: min(r["sites"].values()))[key]
        tables.append(
            _summary_table(f"{title}, {cell_name(key)}", [*columns, ("worst lab", worst)])
        )
    return tables


def _score_at(site: str) -> Callable[[Record], float]:
    return lambda record: float(record["sites"][site])


def _summary_table(
    title: str,
    columns: Sequence[tuple[str, Mapping[str, Summary]]],
    best_of: Callable[[Iterable[float]], float] = max,
) -> TextTable:
    """Mean ± spread: a row for each method; columns: headings, and a summary for each method."""
    methods = in_order({method for _, column in columns for method in column})
    rows = tuple((m, *(str(column.get(m, "")) for _, column in columns)) for m in methods)
    best = frozenset(
        (methods.index(method), place)
        for place, (_, column) in enumerate(columns, start=1)
        for method in _best_methods(column, best_of)
    )
    note = _range({summary.trials for _, column in columns for summary in column.values()})
    return TextTable(title, ("method", *(heading for heading, _ in columns)), rows, best, note)


def _range(trials: Collection[int]) -> str:
    """How many trials there are: fewest and most of several cells."""
    ends = dict.fromkeys((min(trials), max(trials)))
    return " to ".join(map(str, ends)) + (" trials" if max(trials) > 1 else " trial")


def _best_methods(
    row: Mapping[str, Summary], best_of: Callable[[Iterable[float]], float]
) -> list[str]:
    """The best of a cell, as far as its digits are shown; more than one if they are equal."""
    shown = {m: round(s.mean, 2) for m, s in row.items() if family(m) not in NOT_COMPARED}
    return [m for m in shown if shown[m] == best_of(shown.values())] if len(shown) > 1 else []


def lead_table(
    records: Sequence[Record], leads: Sequence[tuple[str, str]], title: str, field: str = "test"
) -> TextTable:
    """How far one method is ahead of another: the mean and spread of the differences in each trial.

    Clients differ more between trials than methods do among the same clients, so differences vary
    less than the scores. Only trials that both methods have are compared.

    leads: (method, the one it is compared with), a row for each; a column for each cell
    """
    scores = {(CellKey.of(r), r["method"], r["trial"]): float(r[field]) for r in records}
    cells = sorted({cell for cell, _, _ in scores}, key=lambda key: key[::-1])
    trials = sorted({trial for _, _, trial in scores})
    compared: set[int] = set()

    def text(cell: CellKey, method: str, other: str) -> str:
        pairs = [((cell, method, trial), (cell, other, trial)) for trial in trials]
        ahead = [scores[a] - scores[b] for a, b in pairs if a in scores and b in scores]
        if not ahead:
            return ""
        compared.add(len(ahead))
        summary = Summary.of(ahead)
        return f"{summary.mean:+.1f}" + (
            "" if summary.spread is None else f" ± {summary.spread:.1f}"
        )

    rows = [
        (f"{method} over {other}", *(text(cell, method, other) for cell in cells))
        for method, other in leads
    ]
    return TextTable(
        title,
        ("lead, in points", *map(cell_name, cells)),
        tuple(row for row in rows if any(row[1:])),
        note=f"differences within each trial, {_range(compared)}" if compared else "",
    )


def compared_table(records: Sequence[Record], paper: Paper) -> TextTable:
    """Ours beside the paper's, for the cells and methods that both have.

    The paper's nafi stands beside every variant of ours.
    """
    theirs = paper.figures
    ours = by_cell(records, lambda r: r["test"])
    cells = {key: row for key, row in ours.items() if key.in_paper in theirs}

    def text(method: str, key: CellKey) -> str:
        name = "nafi" if method.startswith("nafi") else method
        if method not in cells[key] or name not in theirs[key.in_paper]:
            return ""
        return f"{cells[key][method].mean:.1f} ({theirs[key.in_paper][name][0]:.1f})"

    named = [
        (m, *(text(m, key) for key in cells)) for m in in_order({r["method"] for r in records})
    ]
    return TextTable(
        "Ours, and the paper's in brackets",
        ("method", *map(cell_name, cells)),
        tuple(row for row in named if any(row[1:])),
        note=paper.note + _fewer_samples(records, paper.samples),
    )


def _fewer_samples(records: Sequence[Record], theirs: int | None) -> str:
    """What a note adds where the paper had more to train on."""
    ours = max((r["config"].get("samples") or 0 for r in records), default=0)
    if not ours or theirs is None or ours >= theirs:
        return ""
    return f"; ours trains on {ours} samples, the paper's on all"


def width_table(records: Sequence[Record]) -> TextTable:
    """Mean width of each hidden layer of the fused networks."""
    sized = [record for record in records if record["widths"]]
    layers = range(max((len(r["widths"]) for r in sized), default=0))
    by_layer = [
        by_cell([r for r in sized if len(r["widths"]) > k], lambda r, k=k: r["widths"][k])  # type: ignore[misc]
        for k in layers
    ]
    cells = list(by_layer[0]) if by_layer else []
    rows = tuple(
        (
            method,
            *(
                ", ".join(f"{w[c][method].mean:.0f}" for w in by_layer if method in w.get(c, {}))
                for c in cells
            ),
        )
        for method in in_order({r["method"] for r in sized})
    )
    return TextTable("Widths of the fused networks", ("method", *map(cell_name, cells)), rows)


def metric_of(records: Sequence[Record]) -> str:
    """What the numbers of the records are."""
    return " or ".join(dict.fromkeys(str(r["metric"]) for r in records if "metric" in r)) or (
        "test accuracy"
    )


def cell_name(key: CellKey) -> str:
    """What heads the column of a cell."""
    if key.problem:
        return f"{key.problem}, {key.clients} clients"
    return f"{key.clients} clients" + (f", {key.hidden} hidden" if key.hidden > 1 else "")


def family(method: str) -> str:
    """What a variant such as "nafi 2x" is a variant of."""
    return re.split("[ ,]", method)[0]


def in_order(methods: Iterable[str]) -> list[str]:
    """Methods in the order in which they are best read; unknown ones by name at the end.

    Variants stand behind each other, by name and by the numbers in it.
    """
    known = {method: place for place, method in enumerate(_ORDER)}
    return sorted(methods, key=lambda m: (known.get(family(m), len(known)), _natural(m)))


def _natural(name: str) -> list[tuple[str, float]]:
    """A name as texts and the numbers that follow them."""
    parts = [*_NUMBER.split(name), "-inf"]
    return [(text, float(number)) for text, number in zip(parts[::2], parts[1::2], strict=True)]


def markdown(table: TextTable) -> str:
    """A table in Markdown, the best in bold."""
    lines = [
        f"**{table.title}**" + (f" ({table.note})" if table.note else ""),
        "",
        "| " + " | ".join(table.headings) + " |",
        "| " + " | ".join("---" for _ in table.headings) + " |",
    ]
    for place, row in enumerate(table.rows):
        texts = [f"**{t}**" if (place, k) in table.best else t for k, t in enumerate(row)]
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"
