"""Examine every network in a process of its own: `python -m tests.support`.

Hides: limits of time and memory, and what was done before. Promises: a line of JSON for every
network, also for one whose process had to be killed; then the page with all of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import resource
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from signal import SIGXCPU

import torch
from torch import nn

import nafi
from tests.support import page
from tests.support.contracts import STEPS, Record, blank, examine, failed
from tests.support.networks import BY_LABEL, NETWORKS, Network

ROOT = Path(__file__).parent.parent.parent
RECORDS = Path(__file__).parent / "records.jsonl"
PAGE = ROOT / "docs" / "support.md"
SECONDS, BYTES = 120, 3 * 2**30


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.support", description=__doc__)
    parser.add_argument("--only", default="*", help="networks whose name fits, like 'timm/*'")
    parser.add_argument("--resume", action="store_true", help="leave out those with a record")
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2))
    parser.add_argument("--seconds", type=int, default=SECONDS, help="for each network")
    parser.add_argument("--packages", help="a folder with packages, searched last")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--page", type=Path, default=PAGE)
    return parser.parse_args()


def main() -> None:
    chosen = options()
    if chosen.packages:
        sys.path.append(chosen.packages)
    known = {record["network"]: record for record in read(chosen.records)}
    todo = [n for n in NETWORKS if fnmatch(n.label, chosen.only)]
    if chosen.resume:
        todo = [n for n in todo if n.label not in known]
    warm_up(todo)
    examined = partial(isolated, seconds=chosen.seconds)
    with ThreadPoolExecutor(chosen.processes) as pool:
        for done, record in enumerate(pool.map(examined, todo), start=1):
            known[record["network"]] = record
            with chosen.records.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            print(f"{done:3}/{len(todo)} {page.line(record)}", flush=True)
    records = [known[label] for label in BY_LABEL if label in known]
    chosen.records.write_text("".join(json.dumps(record) + "\n" for record in records))
    chosen.page.write_text(rendered(records), encoding="utf-8")


def read(path: Path) -> Iterator[Record]:
    """The records of a file; the last of a network counts."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def rendered(records: list[Record]) -> str:
    return page.page(records, SECONDS, BYTES >> 30)


def warm_up(networks: list[Network]) -> None:
    """Import here what each process would import again: packages, and what tracing needs."""
    for network in networks:
        with suppress(Exception):  # told of when the network is examined
            network.build()
    nafi.groups(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), (torch.zeros(2, 2),))


def isolated(network: Network, seconds: int) -> Record:
    """The record of a network, from a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(network, sender, seconds))
    process.start()
    sender.close()
    record = last(receiver, blank(network))
    process.join()

    if process.exitcode:
        causes = {-SIGXCPU: f"more than {seconds} s", 1: "does not build or run"}
        step = next(s.__name__ for s in STEPS if s.__name__ not in record["seconds"])
        failed(record, step, "Stopped", causes.get(process.exitcode, "out of memory?"))
    return record


def last(receiver: Connection, record: Record) -> Record:
    """The last record that a process sent before it ended."""
    try:
        while True:
            record = receiver.recv()
    except EOFError:
        return record


def child(network: Network, sender: Connection, seconds: int) -> None:
    """Examine within the limits, silently."""
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    logging.disable(logging.ERROR)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    for record in examine(network):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        sender.send({**record, "megabytes": peak})
    os._exit(0)  # what libraries do at exit does not survive a fork


if __name__ == "__main__":
    main()
