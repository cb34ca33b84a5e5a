"""Imports point one way."""

from __future__ import annotations

import ast
from pathlib import Path

import nafi

SOURCE = Path(nafi.__file__).parent

# Each package and what it may import beside itself, errors, options and the version.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "options": set(),
    "matching": set(),
    "graph": set(),
    "fusion": {"matching", "graph"},
    "federated": {"checkpoints", "fusion", "graph", "matching", "files"},
    "experiments": {"federated", "fusion", "graph", "matching", "files"},
    "reports": {"graph", "files"},
    "checkpoints": {"fusion", "graph", "factories", "files"},
    "factories": set(),
    "files": set(),
    "cli": {
        "matching",
        "graph",
        "fusion",
        "federated",
        "experiments",
        "reports",
        "checkpoints",
        "factories",
        "files",
    },
    "__init__": {"matching", "graph", "fusion", "checkpoints"},
}
# Third-party packages that only some may use.
RESERVED = {
    "torch": {"graph", "fusion", "federated", "experiments", "checkpoints", "factories"},
    "flwr": {"federated"},
}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def violations(package: str, names: set[str]) -> set[str]:
    wrong = set()
    for name in names:
        parts = name.split(".")
        if parts[0] == "nafi":
            allowed = ALLOWED[package] | {package, "errors", "options", "version"}
            wrong |= {name} if len(parts) > 1 and parts[1] not in allowed else set()
        elif package not in RESERVED.get(parts[0], {package}):
            wrong.add(name)
    return wrong


def test_imports_point_one_way() -> None:
    checked = 0
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        assert package in ALLOWED, f"say in this test what {package} may import"
        assert not violations(package, imported(path)), path
        checked += 1
    assert checked > 10


def test_the_check_sees_a_violation() -> None:
    assert violations("matching", {"nafi.graph.trace", "numpy"}) == {"nafi.graph.trace"}
    assert violations("matching", {"torch.nn"}) == {"torch.nn"}
    assert not violations("fusion", {"nafi.matching.match", "nafi.errors.NafiError"})
