"""What callbacks are told of a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from nafi.errors import InputError
from nafi.federated import Callback, JsonLines, Run, Scalars, simulate
from nafi.federated.flower import client_app, server_app
from tests.federated.grids import LocalGrid, Node
from tests.federated.networks import CLASSES, population, small
from tests.federated.test_simulation import ROUNDS, made, work


class Diary(Callback):
    """Everything that it was told, in order."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any]] = []

    def round_started(self, number: int, clients: Sequence[str]) -> None:
        self.entries.append(("started", (number, list(clients))))

    def round_finished(self, record: Mapping[str, Any]) -> None:
        self.entries.append(("finished", record))

    def run_finished(self, run: Run) -> None:
        self.entries.append(("run", run))


@pytest.mark.parametrize("name", ["fedavg", "match-refit"])
def test_every_round_is_told_once_with_its_record(name: str, tmp_path: Path) -> None:
    """However many messages it takes; the second strategy needs several in its first round."""
    diary, clients, strategy = Diary(), list(population()), made(name)
    file = tmp_path / "rounds.jsonl"
    run = simulate(
        strategy,
        clients,
        work(strategy),
        evaluate=lambda model: {"parameters": sum(p.numel() for p in model.parameters())},
        callbacks=[diary, JsonLines(file)],
    )
    kinds = [kind for kind, _ in diary.entries]
    assert kinds == ["started", "finished"] * ROUNDS + ["run"]
    assert [entry for kind, entry in diary.entries if kind == "finished"] == run.records
    started = [entry for kind, entry in diary.entries if kind == "started"]
    assert started == [(number + 1, clients) for number in range(ROUNDS)]
    assert diary.entries[-1][1] is run
    assert all("parameters" in record for record in run.records)
    assert [json.loads(line) for line in file.read_text().splitlines()] == run.records


def test_a_resumed_run_tells_of_its_own_rounds(tmp_path: Path) -> None:
    clients, strategy = list(population()), made("fedavg")
    checkpoint, file = tmp_path / "run.safetensors", tmp_path / "rounds.jsonl"

    class Killed(BaseException):
        pass

    class Killer(Callback):
        def round_finished(self, record: Mapping[str, Any]) -> None:
            if record["round"] == 2:
                raise Killed

    with pytest.raises(Killed):
        simulate(
            strategy,
            clients,
            work(strategy),
            checkpoint=checkpoint,
            callbacks=[JsonLines(file), Killer()],
        )
    with pytest.raises(InputError, match="exists already"):
        JsonLines(file)
    more = JsonLines(file, append=True)
    run = simulate(
        strategy,
        clients,
        work(strategy),
        checkpoint=checkpoint,
        resume=True,
        callbacks=[more],
    )
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, ROUNDS + 1))
    assert lines == run.records


def test_a_callback_that_fails_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Callback):
        def round_finished(self, record: Mapping[str, Any]) -> None:
            record.clear()  # type: ignore[attr-defined]
            raise OSError("the disk is full")

    diary, strategy = Diary(), made("fedavg")
    with caplog.at_level(logging.ERROR):
        run = simulate(strategy, list(population()), work(strategy), callbacks=[Broken(), diary])
    assert len(run.records) == ROUNDS
    assert all(record["clients"] == len(population()) for record in run.records)
    assert caplog.text.count("Broken.round_finished failed; the run goes on") == ROUNDS
    assert [entry for kind, entry in diary.entries if kind == "finished"] == run.records


def test_numbers_go_to_a_function_of_name_value_and_round() -> None:
    told: list[tuple[str, float, int]] = []
    callback = Scalars(lambda *entry: told.append(entry), "digits/")
    record = {"round": 3, "loss": None, "refused": {"b": "late"}, "accuracy": 0.5, "bytes_up": 7}
    callback.round_finished({**record, "widths": [4], "score": float("nan"), "flag": True})
    assert told == [
        ("digits/accuracy", 0.5, 3),
        ("digits/bytes_up", 7.0, 3),
        ("digits/refused", 1.0, 3),
    ]


def test_what_is_no_callback_is_refused_before_any_work() -> None:
    strategy = made("fedavg")
    with pytest.raises(InputError, match="callbacks: function lacks round_started"):
        simulate(strategy, ["a"], work(strategy), callbacks=[print_nothing])  # type: ignore[list-item]
    with pytest.raises(InputError, match="expected a function"):
        Scalars("accuracy")  # type: ignore[arg-type]


def print_nothing() -> None:
    """Not a callback."""


def test_a_federation_on_flower_tells_the_same(tmp_path: Path) -> None:
    shares, architecture = population(), small()
    names = list(shares)
    diary = Diary()
    inputs = architecture.example_inputs
    client = client_app(
        architecture.factory,
        inputs,
        lambda context: shares[str(context.node_config["name"])],
        classes=CLASSES,
    )
    out = str(tmp_path / "g.safetensors")
    settings = {"strategy": "fedavg", "rounds": 2, "nodes": len(names), "out": out}
    app = server_app(architecture.factory, inputs, classes=CLASSES, callbacks=[diary], **settings)
    grid = LocalGrid(client, {10 + s: Node(name) for s, name in enumerate(names)})
    app(grid, Context(1, 0, {}, RecordDict(), {}))
    assert [kind for kind, _ in diary.entries] == ["started", "finished"] * 2 + ["run"]
    assert sorted(diary.entries[0][1][1]) == sorted(names)
    assert diary.entries[-1][1].records == [diary.entries[1][1], diary.entries[3][1]]
