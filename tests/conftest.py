"""Hypothesis draws new examples on a developer's machine and the same ones in CI."""

import os

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def real_data() -> None:
    """Real data sets, from NAFI_DATA; the gate must have them."""
    if "NAFI_DATA" not in os.environ:
        if "CI" in os.environ:
            pytest.fail("NAFI_DATA is not set, so nothing was tested on real data")
        pytest.skip("set NAFI_DATA to a folder with mnist/ to test on real data")
