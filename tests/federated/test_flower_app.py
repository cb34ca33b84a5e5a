"""What `nafi flower new` writes, on Flower's own simulation engine."""

from __future__ import annotations

import importlib
import logging
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from typer.testing import CliRunner

import nafi
from nafi.cli.app import app as cli
from nafi.errors import InputError
from nafi.experiments.data import digits
from nafi.federated import (
    STRATEGIES,
    Acceptance,
    Architecture,
    Trainer,
    Training,
    make_strategy,
    simulate,
)
from nafi.federated.flower import Federation
from tests.federated.grids import LocalGrid, Node

SETTINGS: dict[str, Any] = {"epochs": 3, "batch": 16, "optimiser": "adam", "rate": 0.005}
OPTIONS: dict[str, Any] = {
    "rounds": 3,
    "penalty": 0.1,
    "max_width": 3.0,
    "moments": True,
    "head": "statistics",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("flower") / "My digits"
    done = CliRunner().invoke(cli, ["flower", "new", str(folder)])
    assert done.exit_code == 0, done.output
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.startswith("app_my_digits")]:
        del sys.modules[name]


def module(name: str) -> ModuleType:
    return importlib.import_module(f"app_my_digits.{name}")


def reference() -> dict[str, torch.Tensor]:
    """The same federation in this process."""
    task = module("task")
    contexts = [Context(1, s, {"partition-id": s}, RecordDict(), {}) for s in range(3)]
    shares = {str(s): task.data(context) for s, context in enumerate(contexts)}
    architecture = Architecture(task.network, task.INPUTS)
    strategy = make_strategy("layerwise", architecture, Training(**SETTINGS), **OPTIONS)
    return simulate(strategy, list(shares), Trainer(architecture, shares, 10)).model.state_dict()


def test_the_app_is_named_after_its_folder(written: Path) -> None:
    settings = (written / "pyproject.toml").read_text()
    assert 'name = "my-digits"' in settings
    assert f'dependencies = ["nafi[flower,lab]=={nafi.__version__}"]' in settings
    assert all(name in settings for name in STRATEGIES)
    assert (written / "README.md").read_text().startswith("# my-digits")
    assert not [p for p in written.rglob("*.*") if "PACKAGE" in p.read_text(errors="replace")]


def test_the_app_comes_to_the_model_of_a_run_in_one_process(written: Path, tmp_path: Path) -> None:
    out = tmp_path / "global.safetensors"
    told = {f"nafi.{name}": value for name, value in {**SETTINGS, **OPTIONS}.items()}
    told |= {"nafi.nodes": 3, "nafi.out": str(out), "nafi.checkpoint": str(tmp_path / "run")}
    nodes = {10 + s: Node(str(s), config={"partition-id": s}) for s in range(3)}
    grid = LocalGrid(module("client_app").app, nodes)
    module("server_app").app(grid, Context(1, 0, {}, RecordDict(), told))
    found = nafi.load(out, module("task").network).state_dict()
    for name, tensor in reference().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    model, test = nafi.load(out, module("task").network), digits().test
    with torch.no_grad():
        right = int((model(test.inputs).argmax(dim=1) == test.labels).sum())
    assert module("task").evaluate(model) == {"accuracy": pytest.approx(100 * right / len(test))}


@pytest.mark.parametrize(
    ("strategy", "unused"),
    [
        ("fedavg", "penalty, max_width, moments"),
        ("fedadam", "penalty, max_width, moments"),
        ("match-then-average", "moments"),
        ("match-refit", "moments"),
    ],
)
def test_a_run_can_choose_another_strategy(
    written: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    strategy: str,
    unused: str,
) -> None:
    """With the configuration as it was written, for layerwise."""
    settings = tomllib.loads((written / "pyproject.toml").read_text())
    configured = settings["tool"]["flwr"]["app"]["config"]["nafi"]
    out = tmp_path / "global.safetensors"
    chosen = {"strategy": strategy, "epochs": 1, "out": str(out), "checkpoint": f"{out}.run"}
    told = {f"nafi.{name}": value for name, value in {**configured, **chosen}.items()}
    nodes = {10 + s: Node(str(s), config={"partition-id": s}) for s in range(3)}
    logger = logging.getLogger("nafi.federated.flower")
    logger.addHandler(caplog.handler)  # apps log with Flower, past the handlers of the root
    try:
        grid = LocalGrid(module("client_app").app, nodes)
        module("server_app").app(grid, Context(1, 0, {}, RecordDict(), told))
    finally:
        logger.removeHandler(caplog.handler)
    assert nafi.load(out, module("task").network) is not None
    warned = {r.getMessage() for r in caplog.records if r.levelno == logging.WARNING}
    text = f"strategy {strategy} does not use these settings: {unused}"
    assert warned == {text}


def test_protection_is_never_left_out(written: Path) -> None:
    """A strategy that cannot screen updates, with a configuration that asks for it."""
    told = {"nafi.strategy": "fedadam", "nafi.clip": 2.0, "nafi.trim": 0.2}
    with pytest.raises(InputError, match="fedadam cannot screen updates; leave out clip and trim"):
        module("server_app").app(None, Context(1, 0, {}, RecordDict(), told))


@pytest.mark.slow
def test_flowers_simulation_comes_to_the_model_of_a_run_in_one_process(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's workers import the app by its path."""
    monkeypatch.setenv("PYTHONPATH", str(written))
    task = module("task")
    architecture = Architecture(task.network, task.INPUTS)
    strategy = make_strategy("layerwise", architecture, Training(**SETTINGS), **OPTIONS)
    federation = Federation(
        strategy, nodes=3, wait=600.0, deadline=600.0, acceptance=Acceptance(classes=10)
    )
    server = ServerApp()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        federation.start(grid)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, module("client_app").app, 3, backend_config=resources)
    found = federation.run.model.state_dict()
    for name, tensor in reference().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    done = CliRunner().invoke(cli, ["flower", "new", str(tmp_path)])
    assert done.exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
