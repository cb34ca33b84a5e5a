"""Flower reports nothing to anybody, unless the user wants it to.

Hides: the settings with which Flower sends its makers reports of use, and asks them for updates.
Promises: both are off in this process and in those that it starts, whether Flower was imported
before or not; what the user has set stays.
"""

from __future__ import annotations

import os
import sys

_OFF = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def switch_off() -> None:
    for name, value in _OFF.items():
        os.environ.setdefault(name, value)
    loaded = sys.modules.get("flwr.supercore.telemetry")
    if loaded is not None:  # it has read its setting already
        vars(loaded)["FLWR_TELEMETRY_ENABLED"] = os.environ["FLWR_TELEMETRY_ENABLED"]
