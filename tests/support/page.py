"""The support matrix as text: a line on the terminal, a page of the documentation.

Hides: Markdown. Promises: everything on the page is a function of the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from statistics import median

from tests.support.contracts import Record

CHECKS = ("traced", "permuted", "copies", "apart", "loads")

INTRODUCTION = """\
# Support matrix

Networks that other people wrote, from {packages} packages, under the contracts of nafi. They are
built small, with random weights and random statistics of normalisation, and examined in double
precision, each in a process of its own (at most {seconds} seconds and {gigabytes} GB).
`make support-matrix` writes this page and `tests/support/records.jsonl`.

| column | what is examined |
| --- | --- |
| coverage | share of the parameters in tensors with groups, none of whose axes was given up |
| permuted | all groups in another order: the same outputs |
| copies | two permuted copies, fused by `nafi.fuse`: the same outputs |
| apart | two independent models, all neurons kept apart: the mean of their outputs |
| grows | groups whose width can change, of all groups |
| loads | two independent models, fused, saved and loaded: the outputs of the fused model |
| seconds | of `nafi.groups`, and of everything together |

Outputs are the same if they differ by less than 1e-5 of the largest (1e-3 for a network that runs
in single precision only). Two models have to share the neurons of a group whose width cannot
change, and hidden neurons that are in no group (a layer with one neuron, an order that the code
fixes). They are averaged, which gives no mean of outputs: "equal" in the column apart says that two
equal models were kept apart instead. A network that `nafi.groups` refuses has no entries.
"""

HEAD = """\
| network | parameters | groups | coverage | permuted | copies | apart | grows | loads | seconds |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def line(record: Record) -> str:
    """One network on the terminal."""
    checks = " ".join(name if record[name] else name.upper() for name in CHECKS)
    errors = "; ".join(f"{e['step']}: {e['error']}: {e['text'][:80]}" for e in record["errors"])
    share = f"{record.get('coverage', 0):.0%}"
    return f"{record['network']:45} {checks} {share} {grown(record)} {spent(record)} {errors}"


def grown(record: Record) -> str:
    return f"{int(record['grows'])}/{record.get('groups', 0)}"


def spent(record: Record) -> str:
    """Seconds of the groups, and of everything."""
    seconds = record["seconds"]
    return f"{seconds.get('traced', 0):.1f}, {sum(seconds.values()):.1f}"


def page(records: list[Record], seconds: int, gigabytes: int) -> str:
    """The whole page."""
    packages = len({package(record) for record in records})
    parts = [
        INTRODUCTION.format(packages=packages, seconds=seconds, gigabytes=gigabytes),
        "## Summary\n",
        summary(records),
        *tables(records),
        "## What fails\n",
        failures(records) or "Nothing.",
        "\n## What is left unmatched\n",
        "Networks with a coverage below 90 percent, and what keeps most of it in place.\n",
        gaps(records) or "None.",
    ]
    return "\n".join(parts) + "\n"


def package(record: Record) -> str:
    return str(record["network"]).partition("/")[0]


def summary(records: list[Record]) -> str:
    """The goals, and what was found."""
    known = [r for r in records if r["traced"]]
    attending = [r for r in known if r["transformer"]]
    foreign = sum(error["foreign"] for r in records for error in r["errors"])
    independent = sum(bool(r.get("independent")) for r in known)
    shares = [r["coverage"] for r in known]
    complete = sum(share >= 0.9 for share in shares)
    rows = [
        ("traced", "97%", share_of(records, "traced")),
        ("permuted, of those traced", "100%", share_of(known, "permuted")),
        ("copies", "100%", share_of(known, "copies")),
        ("apart", "100%", f"{share_of(known, 'apart')}; {independent} independent models"),
        ("loads", "100%", share_of(known, "loads")),
        ("transformers with a group that grows", "100%", share_of(attending, "grows")),
        ("errors that are not nafi's", "0", str(foreign)),
        ("coverage", "", f"median {median(shares):.1%}; at least 90% in {complete}"),
    ]
    body = [f"| {name} | {goal} | {found} |" for name, goal, found in rows]
    return "\n".join(["| | goal | found |", "| --- | --- | --- |", *body, ""])


def share_of(records: list[Record], name: str) -> str:
    count = sum(bool(r[name]) for r in records)
    return f"{count} of {len(records)} ({count / max(len(records), 1):.1%})"


def tables(records: list[Record]) -> Iterable[str]:
    """A table for each package."""
    for name, members in groupby(records, key=package):
        yield "\n".join([f"## {name}\n", HEAD, *map(row, members), ""])


def row(record: Record) -> str:
    name = record["network"].partition("/")[2]
    count = f"{record['parameters']:,}" if "parameters" in record else ""
    cells = [name, count, *(cells_of(record) if record["traced"] else ["-"] * 7), spent(record)]
    return f"| {' | '.join(cells)} |"


def cells_of(record: Record) -> list[str]:
    """The columns from groups to loads."""
    apart = "yes" if record.get("independent") else "equal"
    return [
        str(record["groups"]),
        f"{record['coverage']:.1%}",
        mark(record, "permuted"),
        mark(record, "copies"),
        apart if record["apart"] else "**no**",
        grown(record),
        mark(record, "loads"),
    ]


def mark(record: Record, name: str) -> str:
    return "yes" if record[name] else "**no**"


def failures(records: list[Record]) -> str:
    """Every error, and every contract that was broken without one."""
    return listed(records, failures_of)


def failures_of(record: Record) -> list[str]:
    found = [
        f"{e['step']}: {e['error']}{' (not of nafi)' * e['foreign']}: {e['text']}"
        for e in record["errors"]
    ]
    gaps = {name: record[f"{name}_gap"] for name in CHECKS if f"{name}_gap" in record}
    return found + [f"{n}: differs by {gap:.1g}" for n, gap in gaps.items() if not record[n]]


def gaps(records: list[Record]) -> str:
    """The networks of which much is left as it is, with the main reason."""
    partly = [r for r in records if r["traced"] and r["coverage"] < 0.9]
    return listed(partly, lambda r: [f"{r['coverage']:.1%}, {r['left']}"])


def listed(records: list[Record], texts: Callable[[Record], list[str]]) -> str:
    return "\n".join(f"- {r['network']}: {escaped(text)}" for r in records for text in texts(r))


def escaped(text: str) -> str:
    """Text that Markdown does not interpret."""
    return text.replace("`", "'").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
