"""A short version of `make soak`, and that it would notice what it looks for."""

from __future__ import annotations

import importlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tool as a module, which workers can import too."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("soak")


@pytest.mark.slow
def test_a_run_with_killed_processes_is_the_undisturbed_one(soak: Any, tmp_path: Path) -> None:
    """The server is killed in round 3, a worker in round 4, and clients fail in both runs."""
    process = soak.server(tmp_path, Namespace(rounds=4), "layerwise", 1, 0)
    calm = soak.federation("layerwise", 4)
    assert soak.run_through(process, 3, 2)
    assert not soak.outlived(process)
    rough = soak.federation(
        "layerwise", 4, workers=2, kill_every=4, checkpoint=tmp_path / "run.safetensors"
    )
    files = tmp_path / "calm.safetensors", tmp_path / "rough.safetensors"
    assert soak.digest(calm, files[0]) == soak.digest(rough, files[1])
    assert files[0].read_bytes() == files[1].read_bytes()
    assert soak.without_seconds(calm) == soak.without_seconds(rough)
    reasons = [reason for record in calm.records for reason in record["refused"].values()]
    assert len(reasons) >= 3


def test_a_server_that_grows_is_noticed(soak: Any) -> None:
    def held(resident: float, tensors: float) -> dict[str, float]:
        return {"round": 1, "resident": resident, "tensors": tensors}

    flat = [held(900, 9.0), held(400, 0.3), held(405, 0.31), held(400, 0.3), held(410, 0.32)]
    assert soak.grown("calm", soak.early_and_late(flat)) == []
    for late, what in ((held(450, 0.3), "resident"), (held(400, 0.4), "tensors")):
        (problem,) = soak.grown("calm", soak.early_and_late([*flat, late]))
        assert problem.startswith(f"the calm server grew: {what}")


def test_the_server_is_killed_at_different_times_early_enough_to_live_on(soak: Any) -> None:
    rounds = soak.killed_rounds(200, 5, seed=1)
    assert len(set(rounds)) == 5
    assert min(rounds) >= 2
    assert max(rounds) < 150
    assert rounds == soak.killed_rounds(200, 5, seed=1) != soak.killed_rounds(200, 5, seed=2)
