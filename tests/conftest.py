"""What every test can count on, whatever ran before it.

Hypothesis draws the same examples in every run; `make fuzz` draws new ones and prints its seed.
"""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None, database=None, print_blob=True)
settings.load_profile("repeatable")


def surroundings() -> dict[str, Any]:
    """What tests share with each other in one process and must leave as it was."""
    return {
        "folder": Path.cwd(),
        "settings": {k: v for k, v in os.environ.items() if k.startswith(("NAFI_", "OMP_"))},
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
    }


@pytest.fixture(autouse=True)
def same_for_every_order() -> Iterator[None]:
    """Random numbers do not depend on the tests before, and nothing is left for those after."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before, path = surroundings(), list(sys.path)
    yield
    sys.path[:] = path  # nafi.load puts the current folder there
    assert surroundings() == before


@pytest.fixture(scope="session")
def real_data() -> None:
    """Real data sets, from NAFI_DATA; the gate must have them."""
    if "NAFI_DATA" not in os.environ:
        if "CI" in os.environ:
            pytest.fail("NAFI_DATA is not set, so nothing was tested on real data")
        pytest.skip("set NAFI_DATA to a folder with mnist/ to test on real data")
