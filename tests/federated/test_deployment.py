"""A SuperLink and three SuperNodes over TLS with node keys, on loopback.

`make test-federation` also kills a client and the server in a round.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-deployment" / "run.py"


@pytest.mark.slow
def test_a_deployment_comes_to_the_model_of_a_run_in_one_process(tmp_path: Path) -> None:
    """The example itself compares the models, to 1e-6, and fails if they differ."""
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE), "--rounds", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        told, _ = process.communicate(timeout=500)
    except subprocess.TimeoutExpired:
        process.terminate()  # it cleans up
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 0, told[-6000:]
    assert re.search(r"accuracy [\d.]+%.*the model is the one expected", told)
    assert not list(started_under(tmp_path))


def started_under(folder: Path) -> Iterator[str]:
    """The processes, on Linux, that have this folder for temporary files, or whose parents had."""
    for surroundings in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended since, or is somebody else's
            if f"TMPDIR={folder}\0".encode() in surroundings.read_bytes():
                yield surroundings.with_name("cmdline").read_text(errors="replace")
