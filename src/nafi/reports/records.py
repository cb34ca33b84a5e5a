"""Tables and series from run records: plain data in, plain data out.

Hides: how cells are put together over trials. Promises: every number is a function of the records;
mean and spread over trials, never a single one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

Record = Mapping[str, Any]

PAPER_METHODS = ("local", "fedavg", "fedprox", "ot", "pfnm", "nafi")
# The paper's accuracies on MNIST: clients, hidden layers, then mean and spread of each method.
_PAPER_MNIST = """
15 1  71.90 2.57  75.47 5.90  75.65 5.93  81.44 3.21  83.93 0.14  87.34 0.57
20 1  69.44 2.50  75.02 4.03  75.17 3.99  82.71 3.57  83.23 3.31  86.73 2.15
25 1  67.99 2.00  75.46 3.33  75.24 3.30  82.53 3.05  84.87 1.66  86.46 2.56
30 1  65.90 2.66  73.43 4.49  73.11 4.44  82.74 2.41  83.39 2.23  86.23 2.57
10 2  73.21 3.05  66.56 6.82  66.34 6.75  83.77 4.23  79.09 4.73  84.58 4.54
10 3  70.28 2.97  52.01 6.52  51.79 6.49  67.56 5.64  60.71 4.59  72.04 4.75
"""


def paper_mnist() -> Figures:
    """(clients, hidden) -> method -> (mean, spread) as the paper has them."""
    return _figures(_PAPER_MNIST, PAPER_METHODS, 2)


PAPER_ROUNDS = ("local", "fedavg", "fedprox", "ot", "fedma", "nafi")
# The paper's accuracies on CIFAR-10: clients, then mean and spread of each method.
_PAPER_CIFAR10 = """
 5  25.21 2.30  51.26 2.97  51.43 3.01  52.12 2.78  50.39 0.94  52.56 0.81
10  18.92 1.41  46.78 2.36  46.94 2.32  45.43 3.45  46.27 1.73  47.46 1.42
15  15.85 0.51  42.40 2.25  42.06 2.20  40.79 4.29  42.82 2.46  45.72 1.35
20  14.11 0.53  34.20 2.54  34.02 2.52  37.56 4.13  42.61 2.07  44.96 1.93
"""

# The paper's dice, in percent, on the Carvana photos.
_PAPER_CARVANA = """
 8  67.60 9.38  53.28 10.63  41.53 0.82  63.57 5.48  90.31 2.90  96.47 0.76
16  27.84 12.16  42.62 0.87  48.50 9.52  54.49 5.62  75.47 3.54  83.46 3.41
"""

Figures = dict[tuple[int, int], dict[str, tuple[float, float]]]


def paper_cifar10() -> Figures:
    """(clients, 1) -> method -> (mean, spread) as the paper has them."""
    return _figures(_PAPER_CIFAR10, PAPER_ROUNDS, 1)


def paper_carvana() -> Figures:
    """The same for the Carvana photos."""
    return _figures(_PAPER_CARVANA, PAPER_ROUNDS, 1)


def _figures(text: str, methods: Sequence[str], keys: int) -> Figures:
    """A table of the paper's: so many numbers that name a row, then pairs of mean and spread."""
    found = {}
    for line in text.strip().splitlines():
        words = line.split()
        numbers = [float(word) for word in words[keys:]]
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
        hidden = int(words[1]) if keys == 2 else 1
        found[int(words[0]), hidden] = dict(zip(methods, pairs, strict=True))
    return found


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
    "nafi",
    "ensemble",
)
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
class Table:
    """A table of texts; `best` holds the (row, column) places to stress."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: frozenset[tuple[int, int]] = frozenset()
    note: str = ""


def by_cell(
    records: Iterable[Record], value: Callable[[Record], float]
) -> dict[tuple[int, int], dict[str, Summary]]:
    """(clients, hidden) -> method -> summary over trials, in the order of the records."""
    found: dict[tuple[int, int], dict[str, list[float]]] = {}
    for record in records:
        row = found.setdefault((record["clients"], record["hidden"]), {})
        row.setdefault(record["method"], []).append(value(record))
    return {
        key: {method: Summary.of(values) for method, values in row.items()}
        for key, row in sorted(found.items(), key=lambda item: (item[0][1], item[0][0]))
    }


def accuracy_table(records: Sequence[Record], title: str, field: str = "test") -> Table:
    """Mean ± spread: a row for each method, a column for each number of clients and layers."""
    cells = by_cell(records, lambda r: r[field])
    methods = in_order({r["method"] for r in records})
    rows = tuple((m, *(str(row.get(m, "")) for row in cells.values())) for m in methods)
    best = set()
    for column, row in enumerate(cells.values(), start=1):
        compared = [m for m in methods if m in row and m not in NOT_COMPARED]
        if len(compared) > 1:
            best.add((methods.index(max(compared, key=lambda m: row[m].mean)), column))
    trials = sorted({summary.trials for row in cells.values() for summary in row.values()})
    note = " to ".join(str(t) for t in dict.fromkeys((trials[0], trials[-1])))
    note += " trials" if trials[-1] > 1 else " trial"
    return Table(title, ("method", *map(cell_name, cells)), rows, frozenset(best), note)


def compared_table(records: Sequence[Record], theirs: Figures) -> Table:
    """Ours beside the paper's, for the cells and methods that both have.

    The paper's nafi stands beside every variant of ours.
    """
    cells = {k: row for k, row in by_cell(records, lambda r: r["test"]).items() if k in theirs}

    def text(method: str, key: tuple[int, int]) -> str:
        family = "nafi" if method.startswith("nafi") else method
        if method not in cells[key] or family not in theirs[key]:
            return ""
        return f"{cells[key][method].mean:.1f} ({theirs[key][family][0]:.1f})"

    named = [
        (m, *(text(m, key) for key in cells)) for m in in_order({r["method"] for r in records})
    ]
    rows = tuple(row for row in named if any(row[1:]))
    note = "the paper chose its penalty by test accuracy, ours is chosen on validation data"
    configs = [record["config"] for record in records]
    samples = {c.get("samples") for c in configs if c.get("profile") != "paper"} - {None}
    if samples:
        note += f"; ours trains on {max(samples)} samples, the paper's on all"
    return Table(
        "Ours, and the paper's in brackets",
        ("method", *map(cell_name, cells)),
        rows if cells else (),
        note=note,
    )


def width_table(records: Sequence[Record]) -> Table:
    """Mean width of each hidden layer of the fused networks."""
    sized = [record for record in records if record["widths"]]
    layers = range(max((len(r["widths"]) for r in sized), default=0))
    found = [
        by_cell([r for r in sized if len(r["widths"]) > k], lambda r, k=k: r["widths"][k])  # type: ignore[misc]
        for k in layers
    ]
    cells = list(found[0]) if found else []
    rows = tuple(
        (
            method,
            *(
                ", ".join(f"{f[c][method].mean:.0f}" for f in found if method in f.get(c, {}))
                for c in cells
            ),
        )
        for method in in_order({r["method"] for r in sized})
    )
    return Table("Widths of the fused networks", ("method", *map(cell_name, cells)), rows)


def metric_of(records: Sequence[Record]) -> str:
    """What the numbers of the records are."""
    return next((str(r["metric"]) for r in records if "metric" in r), "test accuracy")


def cell_name(key: tuple[int, int]) -> str:
    """What heads the column of a cell."""
    return f"{key[0]} clients" + (f", {key[1]} hidden" if key[1] > 1 else "")


def in_order(methods: Iterable[str]) -> list[str]:
    """Methods in the order in which they are best read; unknown ones by name at the end."""
    known = {method: place for place, method in enumerate(_ORDER)}
    return sorted(methods, key=lambda m: (known.get(m, len(known)), m))


def markdown(table: Table) -> str:
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
