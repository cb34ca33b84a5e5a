"""Checkpoints of runs: damage, other versions, other runs, other servers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nafi.errors import CheckpointError, InputError
from nafi.federated import Architecture, Noise, Samples, Strategy, make_strategy, simulate
from nafi.federated.checkpoint import checksum
from nafi.federated.fingerprint import described
from nafi.locks import locked
from tests.federated.networks import FEATURES, population
from tests.federated.test_simulation import made, work

CLIENTS = list(population())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.safetensors"
    strategy = made("fedavg")
    simulate(strategy, CLIENTS, work(strategy), checkpoint=path)
    return path


def resume(file: Path, strategy: Strategy | None = None, **changes: object) -> None:
    strategy = strategy or made("fedavg")
    trainer = replace(work(strategy), **changes)  # type: ignore[arg-type]
    simulate(strategy, CLIENTS, trainer, checkpoint=file, resume=True)


def test_a_bit_that_fell_over_is_noticed(file: Path) -> None:
    content = file.read_bytes()
    for place in (len(content) - 2, len(content) // 2):
        bad = bytearray(content)
        bad[place] ^= 16
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"is damaged.*put back a copy of it, or"):
            resume(file)
    file.write_bytes(content[:-3])
    with pytest.raises(CheckpointError, match="is damaged"):
        resume(file)
    file.write_bytes(content)
    resume(file)


@pytest.mark.parametrize(("format", "written"), [("4", '"format": 4'), ("x", '"format": "x"')])
def test_another_format_is_told(format: str, written: str, file: Path) -> None:
    with safe_open(file, framework="pt") as handle:
        text = handle.metadata()["nafi"].replace('"format": 3', written)
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    save_file(tensors, file, metadata={"nafi": text, "sha256": checksum(text, tensors)})
    why = f"has format {format}, but this version of nafi reads 3; finish the run with the version"
    with pytest.raises(CheckpointError, match=why):
        resume(file)


def halved(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels) / 2


class Other(nn.Module):
    """The tensors of the network of the tests, and another activation."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.one, self.two, self.activation = nn.Linear(FEATURES, 5), nn.Linear(5, 3), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.activation(self.one(x)))


def architecture(activation: nn.Module) -> Architecture:
    return Architecture(lambda: Other(activation), (torch.zeros(2, FEATURES),))


def test_another_loss_noise_or_sample_count_is_named(file: Path) -> None:
    what_to_do = "; put that back to continue the run, or give another name for the checkpoint"
    changes = {
        "loss was torch.nn.functional.cross_entropy, now it is halved": {"loss": halved},
        "noise was None, now it is Noise": {"noise": Noise(1.0, 0.1)},
    }
    for why, change in changes.items():
        with pytest.raises(InputError, match=f"of another run: {why}.*{what_to_do}"):
            resume(file, **change)
    samples = population()["1"]
    fewer = population() | {"1": Samples(samples.inputs[:-1], samples.labels[:-1])}
    size = len(samples)
    with pytest.raises(
        InputError, match=rf"samples\.1 was {size}, now it is {size - 1}{what_to_do}"
    ):
        resume(file, data=fewer)
    resume(file)


def test_other_code_of_the_network_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"

    def of(activation: nn.Module) -> Strategy:
        training = made("fedavg").training
        return make_strategy("fedavg", architecture(activation), training, rounds=2, seed=1)

    simulate(of(nn.ReLU()), CLIENTS, work(of(nn.ReLU())), checkpoint=file)
    resume(file, of(nn.ReLU()))
    for activation in (nn.Tanh(), nn.LeakyReLU(0.2)):
        with pytest.raises(InputError, match="of another run: code of the network was"):
            resume(file, of(activation))


def laid_out() -> Callable[[Tensor, Tensor], Tensor]:
    def halved(outputs: Tensor, labels: Tensor) -> Tensor:
        # The same code, with a comment.

        return F.cross_entropy(
            outputs,
            labels,
        ) / 2  # fmt: skip

    return halved


def test_a_function_is_known_by_its_code_not_by_its_layout() -> None:
    assert described(halved).startswith("halved ")
    assert described(halved).split()[-1] == described(laid_out()).split()[-1]
    assert described(F.mse_loss) == "torch.nn.functional.mse_loss"
    more = lambda x: x + 1  # noqa: E731
    less = lambda x: x - 1  # noqa: E731
    assert described(more) != described(less)


def test_a_loss_with_weights_is_known_by_them() -> None:
    equal, other = (nn.CrossEntropyLoss(torch.tensor(w)) for w in ([1.0, 1.0], [1.0, 2.0]))
    assert described(equal) != described(other)
    assert described(equal) == described(nn.CrossEntropyLoss(torch.ones(2)))


def test_a_second_server_on_one_checkpoint_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    strategy = made("fedavg")
    refusals = []

    def second(step: str, done: int, total: int) -> None:
        if done == 4:
            with pytest.raises(
                InputError, match=r"run.safetensors is in use by another run"
            ) as why:
                resume(file)
            refusals.append(str(why.value))

    simulate(strategy, CLIENTS, work(strategy), checkpoint=file, progress=second)
    assert refusals
    assert "wait until it ends, or give another name" in refusals[0]
    assert list(tmp_path.iterdir()) == [file]  # no lock is left
    resume(file)


HOLDS = """
import os, signal, sys
from pathlib import Path
from nafi.locks import locked

with locked(Path(sys.argv[1])):
    print(os.getpid(), flush=True)
    signal.pause()
"""


def test_a_lock_names_its_process_and_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    command = [sys.executable, "-c", HOLDS, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        number = holder.stdout.readline().strip()
        with pytest.raises(InputError, match=rf"another run \(process {number}\)"), locked(file):
            raise AssertionError
        holder.kill()
    with locked(file):
        pass
    assert not list(tmp_path.iterdir())


def test_where_no_lock_can_be_made_the_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "folder").touch()
    why = pytest.raises(InputError, match=r"cannot lock .*: Not a directory")
    with why, locked(tmp_path / "folder" / "file"):
        raise AssertionError
