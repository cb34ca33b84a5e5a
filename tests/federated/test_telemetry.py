"""Flower reports nothing wherever nafi is in its process, and wherever nafi starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.supercore import telemetry

from nafi.federated.telemetry import switch_off

ROOT = Path(__file__).resolve().parents[2]
NAMES = "FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK"
# A process of its own, where Flower has read its settings before nafi is imported, as in its apps.
SENDS = """
import json, os, urllib.request
requests = []
urllib.request.urlopen = lambda request, **_: requests.append(request) or 1 / 0
from flwr.supercore.telemetry import EventType, create_event
import nafi.federated.flower
create_event(EventType.PING, None)
names = "FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK"
print(json.dumps([len(requests), *(os.environ[name] for name in names)]))
"""


@pytest.mark.slow
def test_flower_reports_nothing_once_nafi_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SENDS],
        env={k: v for k, v in os.environ.items() if k not in NAMES},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0, "0", "1"]


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, NAMES[0], "1")
    monkeypatch.setenv(NAMES[0], "1")
    monkeypatch.setenv(NAMES[1], "0")
    switch_off()
    assert (telemetry.FLWR_TELEMETRY_ENABLED, *map(os.getenv, NAMES)) == ("1", "1", "0")
    monkeypatch.delenv(NAMES[0])
    switch_off()
    assert (telemetry.FLWR_TELEMETRY_ENABLED, *map(os.getenv, NAMES)) == ("0", "0", "0")


@pytest.mark.parametrize(
    "page", ["README.md", "docs/howto/flower.md", "src/nafi/cli/flower_app/README.md.tmpl"]
)
def test_whoever_starts_flower_by_hand_is_told_to_switch_reports_off_first(page: str) -> None:
    before, command, _ = (ROOT / page).read_text().partition("flwr federation simulation-config")
    assert command
    for setting in ("FLWR_TELEMETRY_ENABLED=0", "FLWR_DISABLE_UPDATE_CHECK=1"):
        assert setting in before, page


def test_processes_of_the_example_report_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples/flower-deployment"))
    from deployment import Deployment

    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    environment = Deployment(tmp_path / "one", ["north"]).environment
    assert [environment[name] for name in NAMES] == ["0", "1"]
    monkeypatch.setenv(NAMES[0], "1")
    assert Deployment(tmp_path / "two", ["north"]).environment[NAMES[0]] == "1"
