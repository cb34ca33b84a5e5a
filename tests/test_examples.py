"""The examples run and show what they claim."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def printed(name: str, *arguments: str) -> list[str]:
    """The lines that an example prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def shares(name: str) -> tuple[list[float], list[float]]:
    """The percentages that an example prints: of clients, and of the rest in their order."""
    lines = [line for line in printed(name) if line.endswith("%")]
    found = [
        (line.startswith("client"), float(re.findall(r"([\d.]+)%", line)[-1])) for line in lines
    ]
    return [v for c, v in found if c], [v for c, v in found if not c]


def test_three_checkpoints() -> None:
    clients, (fused,) = shares("three_checkpoints.py")
    assert len(clients) == 3
    assert fused > max(clients) + 10


def test_custom_network() -> None:
    clients, (default, wider, averaged) = shares("custom_network.py")
    assert wider > max(clients)
    assert min(default, wider) > averaged + 30


def test_federation() -> None:
    _, found = shares("federation.py")
    fedavg, layerwise, averaged = found[0:3], found[3:6], found[6:9]
    assert layerwise[0] > fedavg[0] + 10  # after one round
    assert averaged[1] > fedavg[1]
    assert min(fedavg[-1], layerwise[-1], averaged[-1]) > 85


def test_monai_unet() -> None:
    lines = printed("monai_unet.py", "--quick")
    assert lines[0].startswith("4 groups of 24 neurons")
    found = {line.partition(":")[0]: float(line.split()[-1]) for line in lines if "dice" in line}
    alone = max(value for name, value in found.items() if name.startswith("client"))
    assert found["nafi, then averaged, round 4"] > alone + 20
    assert found["nafi, then averaged, round 4"] > found["nafi, then averaged, round 1"] + 20


def test_the_first_program_of_the_documentation_runs(tmp_path: Path) -> None:
    text = (EXAMPLES.parent / "docs" / "federated.md").read_text(encoding="utf-8")
    program = text.split("```python\n")[1].split("```")[0]
    program += "\nprint([record['neurons'] for record in run.records])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    widths = json.loads(done.stdout.splitlines()[-1])
    assert len(widths) == 2
    assert all(30 <= width <= 60 for width in widths)
