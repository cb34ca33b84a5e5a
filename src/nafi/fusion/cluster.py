"""Work on a Ray cluster, or on the processors of this machine.

Hides: Ray. Promises: results in the order of the tasks, the same as without Ray; a task whose
worker dies is run again; at most twice as many results wait as there are processors.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from nafi.errors import InputError, NafiError

LOCAL = "local"
# How often a task is run again whose worker was killed.
_RETRIES = 3

Shared = TypeVar("Shared")
Task = TypeVar("Task")
Result = TypeVar("Result")


def map_on_ray(
    address: str,
    function: Callable[[Shared, Task], Result],
    shared: Shared,
    tasks: Sequence[Task],
) -> Iterator[Result]:
    """`function(shared, task)` for each task.

    address: of a cluster, as "auto", "ray://head:10001" or "10.0.0.1:6379"; or "local"
    """
    if find_spec("ray") is None:
        raise NafiError("this needs ray, which is not installed: pip install 'nafi[flower]'")
    ray: Any = import_module("ray")
    started = not ray.is_initialized()
    if started:
        _connect(ray, address)
    try:
        remote = ray.remote(max_retries=_RETRIES, num_cpus=1)(function)
        common = ray.put(shared)
        ahead = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        waiting: deque[Any] = deque()
        for task in tasks:
            waiting.append(remote.remote(common, task))
            if len(waiting) >= ahead:
                yield ray.get(waiting.popleft())
        while waiting:
            yield ray.get(waiting.popleft())
    finally:
        if started:
            ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """Connect to a cluster, or start one on this machine; workers import what this process can."""
    paths = os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address == LOCAL:
        options |= {
            "address": "local",
            "include_dashboard": False,
            "runtime_env": {"env_vars": {"PYTHONPATH": paths}},
        }
    else:
        options["address"] = address
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(f"ray: found {address!r}, which cannot be reached: {error}") from None
