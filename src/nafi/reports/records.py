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


def paper_mnist() -> dict[tuple[int, int], dict[str, tuple[float, float]]]:
    """(clients, hidden) -> method -> (mean, spread) as the paper has them."""
    found = {}
    for line in _PAPER_MNIST.strip().splitlines():
        clients, hidden, *numbers = line.split()
        pairs = [(float(a), float(b)) for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
        found[int(clients), int(hidden)] = dict(zip(PAPER_METHODS, pairs, strict=True))
    return found


_ORDER = (
    "local",
    "fedavg",
    "fedprox",
    "ot",
    "rebasin",
    "pfnm-public",
    "pfnm-topdown",
    "pfnm",
    "nafi-untuned",
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


def paper_table(records: Sequence[Record]) -> Table:
    """Ours beside the paper's, for the cells and methods that both have."""
    theirs = paper_mnist()
    cells = {k: row for k, row in by_cell(records, lambda r: r["test"]).items() if k in theirs}
    rows = tuple(
        (
            method,
            *(
                f"{row[method].mean:.1f} ({theirs[key][method][0]:.1f})" if method in row else ""
                for key, row in cells.items()
            ),
        )
        for method in PAPER_METHODS
    )
    return Table(
        "Ours, and the paper's in brackets",
        ("method", *map(cell_name, cells)),
        rows if cells else (),
        note="the paper chose its penalty by test accuracy, ours is chosen on validation data",
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
