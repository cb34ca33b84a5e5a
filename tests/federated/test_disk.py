"""What the server keeps of clients: on disk, bounded, and without any effect on the result."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.federated import (
    Acceptance,
    Architecture,
    Callback,
    Form,
    Layerwise,
    State,
    Strategy,
    Trainer,
    Training,
    Update,
    averaging,
    disk,
    layerwise,
    make_strategy,
    refit,
    simulate,
)
from nafi.federated.architecture import Tensors
from nafi.federated.checkpoint import read_state
from nafi.federated.disk import on_disk
from nafi.federated.seats import Seat
from tests.federated.networks import CLASSES, blobs, population, small
from tests.federated.test_simulation import OPTIONS, made, work

KEEPERS = [name for name in OPTIONS if not name.startswith("fedavg")]


def scratch(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """A folder for temporary files of one test."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_tensors_on_disk_are_those_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = scratch(monkeypatch, tmp_path)
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool)
    tensors = {str(kind): torch.randn(7, 33).to(kind) for kind in kinds}
    tensors |= {
        "turned": torch.randn(40, 30).T,
        "one": torch.tensor(-0.0),
        "none": torch.zeros(0, 3),
        "nan": torch.tensor([float("nan"), float("inf")]),
    }
    kept = on_disk(tensors)
    assert list(kept) == list(tensors)
    assert not list(folder.iterdir())
    for name, tensor in tensors.items():
        assert (kept[name].dtype, kept[name].shape) == (tensor.dtype, tensor.shape)
        ours, theirs = (t.contiguous().reshape(-1).view(torch.uint8) for t in (kept[name], tensor))
        assert torch.equal(ours, theirs), name
    assert len({kept[name].untyped_storage().data_ptr() for name in kept if name != "none"}) == 1
    kept["one"] += 1
    assert float(on_disk(tensors)["one"]) == 0.0


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = scratch(monkeypatch, tmp_path / "missing")
    with pytest.raises(InputError, match=f"cannot keep what clients sent in {missing}.*TMPDIR"):
        on_disk({"w": torch.zeros(5000)})


def in_memory(
    architecture: Architecture, form: Form, states: list[Tensors], method: object
) -> list[nn.Module]:
    return [architecture.filled(form, state) for state in states]


@pytest.mark.parametrize("name", KEEPERS)
def test_what_is_on_disk_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it on disk and read a client at a time, beside all of it in memory and copied."""
    monkeypatch.setattr(disk, "_SMALLEST", 1)
    strategy = made(name)
    run = simulate(strategy, list(population()), work(strategy))
    for module in (averaging, layerwise, refit):
        monkeypatch.setattr(module, "on_disk", dict)
        monkeypatch.setattr(module, "networks_of", in_memory)
    strategy = made(name)
    plain = simulate(strategy, list(population()), work(strategy))
    ours, theirs = run.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def watched(strategy: Strategy, state: State, clients: int) -> Iterator[Update]:
    """Updates of random weights; when one is asked for, only the last may still be in memory."""
    shapes = strategy.architecture.shapes(state.form)
    sent: list[weakref.ref[Tensor]] = []
    for client in range(clients):
        gc.collect()
        assert sum(tensor() is not None for tensor in sent) <= len(shapes)
        task = strategy.next_task(state, str(client))
        tensors = {n: torch.randn(e.shape) for n, e in shapes.items() if n not in task.frozen}
        sent += [weakref.ref(tensor) for tensor in tensors.values()]
        yield Update(str(client), state.round, tensors, 10, (4, 3, 3))
        del tensors


@pytest.mark.parametrize("name", ["match-then-average", "match-refit", "layerwise"])
def test_a_round_that_needs_all_updates_has_one_in_memory_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_SMALLEST", 1)
    architecture = Architecture(large, (torch.zeros(2, 6),))
    strategy = make_strategy(name, architecture, Training(), rounds=2)
    state = strategy.start()
    for _ in range(2 if name == "layerwise" else 1):
        updates = watched(strategy, state, 6)
        state = strategy.advance(state, updates)
        assert next(updates, None) is None  # all were asked for, and watched


class Sizes(Callback):
    """After each round: bytes of the checkpoint, and of all tensors that are alive."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.files: list[int] = []
        self.tensors: list[int] = []

    def round_finished(self, record: Mapping[str, Any]) -> None:
        gc.collect()
        alive = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in alive}
        self.tensors.append(sum(storage.nbytes() for storage in storages.values()))
        self.files.append(self.file.stat().st_size)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {}),
        ("match-then-average", {"max_width": 1.0}),
        ("match-refit", {"max_width": 1.0}),
        ("layerwise", {"max_width": 1.0, "keep": 4}),
    ],
)
def test_many_clients_of_whom_few_are_sampled_cost_a_line_each(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Between rounds of the same kind, no tensors are added, and to the checkpoint only seats."""
    rounds, clients, sampled = 7, 1000, 4  # the last is the first of a pass of `layerwise`
    architecture = Architecture(large, (torch.zeros(2, 6),))
    training = Training(epochs=1, batch=8, rate=0.05)
    strategy = make_strategy(
        name, architecture, training, rounds=rounds, fraction=sampled / clients, **options
    )
    sizes = Sizes(tmp_path / "run.safetensors")
    run = simulate(
        strategy,
        [str(client) for client in range(clients)],
        Trainer(architecture, lambda client: blobs(12, int(client)), CLASSES),
        checkpoint=sizes.file,
        callbacks=[sizes],
    )
    assert len(run.asked) > 20
    earlier, more = rounds - 4, 4  # rounds of the same kind
    assert sizes.tensors[-1] - sizes.tensors[earlier - 1] < 1000
    seat = '"1000": {"key": "", "missed": 0, "expired": false, "samples": 100, "asked": 10}, '
    line = 1.3 * len(seat)  # JSON within JSON, with its quotes escaped
    record = 500
    assert sizes.files[-1] - sizes.files[earlier - 1] < more * (sampled * line + record)


def test_layerwise_remembers_those_that_sent_last() -> None:
    strategy = Layerwise(small(), Training(epochs=1), 6, keep=3)
    data = population(6)
    trainer, state = Trainer(strategy.architecture, data, CLASSES), strategy.start()
    remembered = []
    for clients in ("01", "23", "0", "1234", "5"):
        updates = [trainer(c, strategy.task(state, c))[0] for c in clients]
        state = strategy.aggregate(state, updates)
        remembered.append("".join(state.members))
    assert remembered == ["01", "123", "230", "1234", "345"]


def test_a_run_that_keeps_few_resumes_with_the_same_bytes(tmp_path: Path) -> None:
    def run(rounds: int, file: Path) -> None:
        strategy = make_strategy(
            "layerwise", small(), Training(epochs=1), rounds=rounds, fraction=0.4, keep=3
        )
        trainer = Trainer(strategy.architecture, population(8), CLASSES)
        rules = Acceptance(classes=CLASSES)
        simulate(
            strategy, list(population(8)), trainer, checkpoint=file, resume=True, acceptance=rules
        )

    for rounds in (2, 5):
        run(rounds, tmp_path / "twice")
    run(5, tmp_path / "once")
    kind = Layerwise.state_type
    states = [read_state(tmp_path / name, kind)[0] for name in ("once", "twice")]
    packed = [state.members for state in states]  # type: ignore[attr-defined]
    assert list(packed[0]) == list(packed[1])
    for name, tensor in states[0].tensors.items():
        assert torch.equal(tensor, states[1].tensors[name]), name


def test_a_seat_is_small() -> None:
    assert not hasattr(Seat(), "__dict__")
