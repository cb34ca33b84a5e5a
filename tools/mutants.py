"""How many small mistakes the tests would notice: mutation testing.

    python tools/mutants.py                    # or make mutants: survivors, and a table
    python tools/mutants.py --sample 20 merge  # of some modules

A mutant is a module with one small mistake (`mutations`). It is killed if a fast test that runs the
changed lines fails. One that survives is a gap in the tests, or makes no difference to anybody.

Hides: processes. Packages are imported once, in the process from which every mutant is forked.
Promises: the same seed draws the same mutants; neither files nor other mutants are touched. A
mutant that takes ten times the processor time that its tests take, and ten seconds, is timed out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.util
import io
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from mutations import Mutant, mutants_of

ROOT = Path(__file__).resolve().parent.parent
# What is mutated, and where its tests are.
TARGETS: dict[str, tuple[list[str], list[str]]] = {
    "matching": (
        sorted(str(f.relative_to(ROOT)) for f in ROOT.glob("src/nafi/matching/[!_]*.py")),
        ["tests/matching"],
    ),
    "acceptance": (
        ["src/nafi/federated/acceptance.py"],
        ["tests/federated/test_acceptance.py", "tests/federated/test_statistics.py"],
    ),
    "merge": (
        ["src/nafi/fusion/merge.py"],
        [f"tests/fusion/test_{name}.py" for name in ("merge", "matching_methods", "screen")],
    ),
    "screen": (["src/nafi/fusion/screen.py"], ["tests/fusion/test_screen.py"]),
    "refit": (
        [f"src/nafi/fusion/{name}.py" for name in ("refit", "statistics", "layer_sums", "pooling")],
        [
            "tests/fusion/test_refit.py",
            "tests/fusion/test_merge.py",
            "tests/federated/test_statistics.py",
        ],
    ),
}
FAST = ["-q", "-x", "-m", "not slow and not browser", "-p", "no:randomly", "--no-header"]


@dataclass
class Covered:
    """Which tests ran which lines, and the processor time that each took."""

    files: Sequence[str]
    lines: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        begun = time.process_time()
        with traced(self.files, lambda file, line: self._hit(file, line, item.nodeid)):
            yield
        self.seconds[item.nodeid] = time.process_time() - begun

    def _hit(self, file: str, line: int, test: str) -> None:
        self.lines.setdefault((file, line), set()).add(test)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Those that run the changed statement, quick ones first.

        What runs when a module is imported is no test's: then those that run anything of the file.
        """
        lines = range(mutant.first, mutant.last + 1)
        tests = set().union(*(self.lines.get((mutant.path, line), ()) for line in lines))
        if not tests and _is_run_by_import(mutant):
            tests = {t for (file, _), own in self.lines.items() if file == mutant.path for t in own}
        return sorted(tests, key=lambda test: (self.seconds[test], test))


def _is_run_by_import(mutant: Mutant) -> bool:
    """Whether its line is outside of all functions."""
    pending: list[CodeType] = [compile(mutant.source, mutant.path, "exec")]
    bodies = []
    while pending:
        code = pending.pop()
        inner = [part for part in code.co_consts if isinstance(part, CodeType)]
        pending += inner
        if code.co_flags & 2:  # it has its own variables: a function, not a class
            bodies.append({line for _, _, line in code.co_lines() if line != code.co_firstlineno})
    return not any(mutant.first in lines for lines in bodies)


@contextlib.contextmanager
def traced(files: Sequence[str], hit: Callable[[str, int], None]) -> Iterator[None]:
    """Tell of every line of some files that runs."""
    names = {str(ROOT / file): file for file in files}

    def calls(frame: FrameType, event: str, _: Any) -> Any:
        return lines if frame.f_code.co_filename in names else None

    def lines(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            hit(names[frame.f_code.co_filename], frame.f_lineno)
        return lines

    before = sys.gettrace()
    sys.settrace(calls)
    threading.settrace(calls)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(None)  # type: ignore[arg-type]


class InItsPlace(importlib.abc.MetaPathFinder):
    """Finds a mutant where its module is looked for."""

    def __init__(self, mutant: Mutant, folder: Path) -> None:
        parts = Path(mutant.path).with_suffix("").parts[1:]
        self.name, self.file = ".".join(parts), folder / Path(mutant.path).name
        self.file.write_text(mutant.changed)

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        return (
            importlib.util.spec_from_file_location(name, self.file) if name == self.name else None
        )


def quietly(arguments: Sequence[str], plugins: Sequence[object] = ()) -> int:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return int(pytest.main([*FAST, *arguments], plugins=list(plugins)))


def forget_ours() -> None:
    """Let nafi and its tests be imported anew; what they import stays."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("nafi", "tests", "conftest"):
            del sys.modules[name]


def verdict(mutant: Mutant, covered: Covered) -> str:
    """killed, survived, timeout, or not run: what becomes of a mutant."""
    tests = covered.tests_of(mutant)
    if not tests:
        return "not run"
    limit = 10 + 10 * sum(covered.seconds[test] for test in tests)
    child = os.fork()
    if child == 0:
        os._exit(_judged(mutant, tests, int(limit)))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "timeout" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM) else "killed"
    return "survived" if os.WEXITSTATUS(status) == 0 else "killed"


def _judged(mutant: Mutant, tests: Sequence[str], limit: int) -> int:
    """In a process of its own: 0 if all tests pass."""
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + limit, used + limit + 10))
    resource.setrlimit(resource.RLIMIT_DATA, (4 * 2**30, 4 * 2**30))
    signal.alarm(20 * limit)  # it may sleep
    with tempfile.TemporaryDirectory() as folder:
        sys.meta_path.insert(0, InItsPlace(mutant, Path(folder)))
        try:
            return min(1, quietly(tests))
        except BaseException:
            return 1


def examined(name: str, sample: int, seed: int, show: Callable[[str], None]) -> Counter[str]:
    """The fates of a sample of a target's mutants; survivors are shown."""
    files, tests = TARGETS[name]
    covered = Covered(files)
    if quietly(tests, [covered]) != 0:
        sys.exit(f"{name}: its tests fail as they are: {' '.join(tests)}")
    forget_ours()
    pool = [mutant for file in files for mutant in mutants_of(file, (ROOT / file).read_text())]
    chosen = sorted(
        random.Random(f"{seed} {name}").sample(pool, min(sample, len(pool))),
        key=lambda mutant: (mutant.path, mutant.first),
    )
    show(f"{name}: {len(chosen)} of {len(pool)} mutants, {len(covered.seconds)} tests")
    fates: Counter[str] = Counter()
    for mutant in chosen:
        fate = verdict(mutant, covered)
        fates[fate] += 1
        if fate != "killed":
            show(f"{fate}: {mutant.path}\n{mutant.diff()}")
    return fates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each target")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT / "src"))
    rows = []
    for name in arguments.targets:
        begun = time.monotonic()
        fates = examined(
            name, arguments.sample, arguments.seed, lambda text: print(text, flush=True)
        )
        caught = fates["killed"] + fates["timeout"]
        rows.append(
            f"{name:12} {caught:4} of {fates.total():4} noticed ({caught / fates.total():4.0%}), "
            f"{fates['timeout']} by their time; {fates['survived']} survived, "
            f"{fates['not run']} are run by no test; {time.monotonic() - begun:.0f} s"
        )
        print(rows[-1], flush=True)
    print("\n".join(["", *rows]))


if __name__ == "__main__":
    main()
