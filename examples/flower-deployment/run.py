"""A layer-wise NAFI job in a real federation: TLS, node keys, three clients, on this machine.

    python examples/flower-deployment/run.py
    python examples/flower-deployment/run.py --fault node     # a client is killed in a round
    python examples/flower-deployment/run.py --fault server   # the server is killed in a round

It makes certificates and keys, starts a SuperLink and three SuperNodes, runs the app that
`nafi flower new` writes, and checks that the model is the one that a run in this process comes to.
Nothing is left behind, neither processes nor files.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from deployment import Deployment, deployed

import nafi
from nafi.federated import (
    Architecture,
    Trainer,
    Training,
    make_strategy,
    read_records,
    simulate,
)
from nafi.federated.strategy import Records

NODES = ("east", "north", "south")
SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "epochs": 5,
    "batch": 16,
    "optimiser": "adam",
    "rate": 0.005,
    "penalty": 0.1,
    "max_width": 3.0,
    "moments": True,
    "head": "statistics",
    "seed": 0,
}
TRAINING = ("epochs", "batch", "optimiser", "rate")
RESULT = "digits.safetensors"
CHECKPOINT = "digits-run.safetensors"  # written after each round
START = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=["node", "server"])
    parser.add_argument("--rounds", type=int, default=SETTINGS["rounds"])
    options = parser.parse_args()
    SETTINGS["rounds"] = options.rounds
    torch.set_num_threads(1)  # as clients have, or the last digits of both runs would differ
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that all is cleaned up
    with tempfile.TemporaryDirectory() as folder:
        accuracy, seconds, records = run(Path(folder), options.fault)
    for record in records:
        told = f", refused: {record['refused']}" if record["refused"] else ""
        print(
            f"round {record['round']}: {record['clients']} clients, {record['seconds']:.0f} s{told}"
        )
    print(f"accuracy {accuracy:.1f}% after {seconds:.0f} seconds; the model is the one expected")


def run(folder: Path, fault: str | None = None) -> tuple[float, float, Records]:
    """Run the job, or raise if the model is not the one expected.

    Returns accuracy, seconds and a record for each round.
    """
    app = folder / "digits"
    tell(f"starting a SuperLink and {len(NODES)} SuperNodes")
    with deployed(folder / "federation", NODES) as federation:
        federation.spawn("new", f"nafi flower new {app}")
        assert federation.processes.pop("new").wait() == 0, federation.tail("new")
        start = time.monotonic()
        missing = _job(federation, app, fault)
        seconds = time.monotonic() - start
        tell("comparing with a run in this process")
        sys.path.insert(0, str(app))
        try:
            task = importlib.import_module("app_digits.task")
            model = nafi.load(federation.folder / RESULT, task.network)
            check(model, expected(task, missing))
            return float(task.evaluate(model)["accuracy"]), seconds, _records(federation)
        finally:
            sys.path.remove(str(app))


def _job(federation: Deployment, app: Path, fault: str | None) -> tuple[str | None, int]:
    """Run the app to its end, through a fault; who is missing, from which round on."""
    quorum = 2 if fault == "node" else 3
    # A dead client is waited for once to its deadline, and then for `wait` before each round.
    limits = {"deadline": 60.0, "wait": 30.0} if fault == "node" else {}
    told = {**SETTINGS, "quorum": quorum, "deadline": 180.0, "wait": 180.0, "nodes": 3, **limits}
    tell(f"{SETTINGS['rounds']} rounds of some 40 seconds each")
    number = federation.submit(app, **told)
    if fault is None:
        _completed(federation, number)
        return None, 0
    _wait_for_checkpoint(federation)
    tell(f"a round is done; killing the {fault}")
    if fault == "node":
        federation.kill("south")
        _completed(federation, number)
        return "south", _rounds_with("south", federation)
    federation.kill("server")
    federation.start_server()
    _completed(federation, federation.submit(app, **told))
    return None, 0


def _completed(federation: Deployment, number: str) -> None:
    status = federation.wait(number, 400, federation.folder / RESULT, RoundsSeen(federation).tell)
    if status != "finished:completed":
        raise RuntimeError(f"the run ended as {status}:\n{federation.tail('server')}")


class RoundsSeen:
    """Says of every round when it is done, from the checkpoint that the server writes."""

    def __init__(self, federation: Deployment) -> None:
        self.federation, self.written, self.rounds = federation, 0.0, 0

    def tell(self) -> None:
        file = self.federation.folder / CHECKPOINT
        if not file.exists() or file.stat().st_mtime == self.written:
            return
        self.written = file.stat().st_mtime
        for record in _records(self.federation)[self.rounds :]:
            self.rounds += 1
            place = f"round {self.rounds} of {SETTINGS['rounds']}"
            tell(f"{place} is done, by {record['clients']} clients")


def tell(text: str) -> None:
    """What is going on, with the time since the start."""
    print(f"{time.monotonic() - START:4.0f} s: {text}", flush=True)


def _wait_for_checkpoint(federation: Deployment) -> None:
    end = time.monotonic() + 300
    while not (federation.folder / CHECKPOINT).exists():
        if time.monotonic() > end:
            raise TimeoutError(f"no round in 300 seconds:\n{federation.tail('server')}")
        time.sleep(0.1)


def _rounds_with(name: str, federation: Deployment) -> int:
    """How many rounds a node took part in."""
    records = _records(federation)
    return sum(record["clients"] == 3 and name not in record["refused"] for record in records)


def _records(federation: Deployment) -> Records:
    """What the checkpoint tells of the rounds."""
    return read_records(federation.folder / CHECKPOINT)


def expected(task: Any, missing: tuple[str | None, int]) -> nn.Module:
    """The model of a run in this process; missing: a client, and how many rounds it was there."""
    name, rounds = missing
    shares = {
        node: task.data(Context(1, place, {"partition-id": place}, RecordDict(), {}))
        for place, node in enumerate(NODES)
    }
    architecture = Architecture(task.network, task.INPUTS)
    training = Training(**{key: SETTINGS[key] for key in TRAINING})
    options = {key: value for key, value in SETTINGS.items() if key not in TRAINING}
    strategy = make_strategy("layerwise", architecture, training, **options)
    trainer = Trainer(architecture, shares, task.CLASSES)

    def work(client: str, given: Any) -> Any:
        if client == name and given.round >= rounds:
            raise ConnectionError(f"{client} is gone")
        return trainer(client, given)

    quorum = nafi.federated.Acceptance(quorum=2, classes=task.CLASSES)
    return simulate(
        strategy, sorted(NODES, key=lambda n: (len(n), n)), work, acceptance=quorum
    ).model


def check(found: nn.Module, wanted: nn.Module) -> None:
    theirs, ours = found.state_dict(), wanted.state_dict()
    assert set(theirs) == set(ours)
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], rtol=0, atol=1e-6)


if __name__ == "__main__":
    main()
