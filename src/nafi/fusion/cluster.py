"""Work that is done here, on the processors of this machine, or on a Ray cluster.

Hides: Ray. Promises: results in the order of the tasks, the same as without Ray; a task whose
worker dies is run again; at most twice as many results wait as there are processors. What tasks
share is sent once, and a worker keeps it for the tasks that follow.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

from nafi.errors import InputError, NafiError

LOCAL = "local"
# How often a task is run again whose worker was killed.
_RETRIES = 3

Shared = TypeVar("Shared")
Task = TypeVar("Task")
Result = TypeVar("Result")


class Run(Protocol):
    """`function(shared, task)` for each task, in this order; tasks are made when they are due."""

    def __call__(
        self,
        function: Callable[[Shared, Task], Result],
        shared: Shared,
        tasks: Iterable[Task],
        /,
    ) -> Iterator[Result]: ...


def in_turn(
    function: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task], /
) -> Iterator[Result]:
    """In this process, one task after the other."""
    return (function(shared, task) for task in tasks)


def run_on(address: str | None) -> Run:
    """On Ray, or in this process where there is no address."""
    return in_turn if address is None else partial(map_on_ray, address)


def map_on_ray(
    address: str,
    function: Callable[[Shared, Task], Result],
    shared: Shared,
    tasks: Iterable[Task],
    /,
) -> Iterator[Result]:
    """On Ray.

    address: of a cluster, as "auto", "ray://head:10001" or "10.0.0.1:6379"; or "local"
    """
    with connected(address):
        ray: Any = import_module("ray")
        remote = ray.remote(max_retries=_RETRIES, num_cpus=1)(_on_worker)
        common = ray.put((function, shared))
        ahead = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        waiting: deque[Any] = deque()
        for task in tasks:
            waiting.append(remote.remote([common], task))
            if len(waiting) >= ahead:
                yield ray.get(waiting.popleft())
        while waiting:
            yield ray.get(waiting.popleft())


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Ray as long as this lasts; nothing is started where it runs already, or without address."""
    if address is None:
        yield
        return
    if find_spec("ray") is None:
        raise NafiError("this needs ray, which is not installed: pip install 'nafi[flower]'")
    ray: Any = import_module("ray")
    if ray.is_initialized():
        yield
        return
    _connect(ray, address)
    try:
        yield
    finally:
        ray.shutdown()


# On a worker: which shared object was used last, and what it is.
_kept: dict[str, Any] = {}


def _on_worker(common: Sequence[Any], task: Any) -> Any:
    """One task; in a list, Ray leaves it to us when the shared object is read."""
    (shared,) = common
    if shared.hex() not in _kept:
        _kept.clear()  # not two at a time
        _kept[shared.hex()] = import_module("ray").get(shared)
    function, known = _kept[shared.hex()]
    return function(known, task)


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
