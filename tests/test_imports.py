"""Imports point one way, go through what packages export, and bring in no more than they must."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import nafi
from nafi import reports
from nafi.errors import EXTRAS

SOURCE = Path(nafi.__file__).parent

# Each package and what it may import beside itself and `SHARED`.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "locks": set(),
    "memory": set(),
    "trust": {"memory"},
    "version": set(),
    "lazy": set(),
    "options": set(),
    "matching": set(),
    "graph": set(),
    "fusion": {"matching", "graph"},
    "workers": set(),
    "federated": {"checkpoints", "fusion", "graph", "matching", "files", "locks", "workers"},
    "experiments": {"federated", "fusion", "graph", "matching", "files", "locks", "workers"},
    "reports": {"graph", "files"},
    "manifest": set(),
    "comparison": {"graph"},
    "tensor_files": {"headers", "trust"},
    "huggingface": {"comparison", "files", "graph", "tensor_files", "trust"},
    "model_card": {"fusion"},
    "checkpoints": {
        "comparison",
        "factories",
        "files",
        "fusion",
        "graph",
        "huggingface",
        "manifest",
        "model_card",
        "tensor_files",
        "trust",
    },
    "statistics_files": {"fusion", "files", "trust"},
    "factories": set(),
    "files": set(),
    "headers": {"files"},
    "recipes": {"files", "headers"},
    "probes": {"checkpoints", "factories", "fusion", "graph", "tensor_files", "trust"},
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
        "huggingface",
        "model_card",
        "headers",
        "probes",
        "recipes",
        "statistics_files",
        "trust",
    },
    "__main__": {"cli"},
    "__init__": {
        "matching",
        "graph",
        "fusion",
        "federated",
        "checkpoints",
        "statistics_files",
    },
}
SHARED = {"errors", "version", "lazy", "options"}
# Third-party packages that only some may use.
RESERVED = {
    "torch": {
        "graph",
        "fusion",
        "federated",
        "experiments",
        "checkpoints",
        "comparison",
        "factories",
        "huggingface",
        "headers",
        "manifest",
        "probes",
        "statistics_files",
        "tensor_files",
        "workers",
    },
    "transformers": {"huggingface"},
    "flwr": {"federated"},
}


def modules() -> Iterator[tuple[str, Path]]:
    """Every file, and the package that it belongs to."""
    for path in SOURCE.rglob("*.py"):
        yield path.relative_to(SOURCE).parts[0].removesuffix(".py"), path


def imported(path: Path) -> list[str]:
    """Every name that a file imports, with its module."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def violations(package: str, names: list[str]) -> set[str]:
    """What a package imports that it may not."""
    wrong = set()
    for name in names:
        parts = name.split(".")
        if parts[0] == "nafi":
            allowed = ALLOWED[package] | {package} | SHARED
            wrong |= {name} if len(parts) > 1 and parts[1] not in allowed else set()
        elif package not in RESERVED.get(parts[0], {package}):
            wrong.add(name)
    return wrong


def deep(package: str, names: list[str]) -> list[str]:
    """What a package imports from inside another one, instead of what that one exports."""
    return [name for name in names if not _is_exported(package, name.split("."))]


def _is_exported(package: str, parts: list[str]) -> bool:
    """parts: nafi, another package, a name of its `__all__`."""
    if parts[0] != "nafi" or len(parts) < 3 or parts[1] == package:
        return True
    init = SOURCE / parts[1] / "__init__.py"
    return not init.exists() or (len(parts) == 3 and parts[2] in exports(init))


def exports(init: Path) -> list[str]:
    """`__all__` of a package."""
    for node in ast.parse(init.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def deep_imports() -> dict[str, int]:
    """The number of deep imports of each package; `python -m tests.test_imports` prints them."""
    counts = dict.fromkeys(ALLOWED, 0)
    for package, path in modules():
        counts[package] += len(deep(package, imported(path)))
    return counts


def test_imports_point_one_way() -> None:
    checked = 0
    for package, path in modules():
        assert package in ALLOWED, f"say in this test what {package} may import"
        assert not violations(package, imported(path)), path
        checked += 1
    assert checked > 10


def test_the_check_sees_a_violation() -> None:
    assert violations("matching", ["nafi.graph.trace", "numpy"]) == {"nafi.graph.trace"}
    assert violations("matching", ["torch.nn"]) == {"torch.nn"}
    assert not violations("fusion", ["nafi.matching.match", "nafi.errors.NafiError"])


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_packages_import_what_others_export(package: str) -> None:
    for owner, path in modules():
        if owner == package:
            assert not deep(package, imported(path)), path


def test_the_check_sees_a_deep_import() -> None:
    wrong = ["nafi.matching.columns.Index", "nafi.graph.spec", "nafi.matching.no_export"]
    right = ["nafi.fusion.base.X", "nafi.matching.match", "nafi.errors.few", "numpy.linalg.norm"]
    assert deep("fusion", [*wrong, *right]) == wrong


PACKAGES = {"checkpoints", "federated", "fusion", "graph", "matching"}  # attributes of nafi


def seen_by_type_checkers(init: Path) -> set[str]:
    """What an `__init__` imports at its top level and under TYPE_CHECKING."""
    body = ast.parse(init.read_text()).body
    nested = [statement for node in body if isinstance(node, ast.If) for statement in node.body]
    imports = [node for node in [*body, *nested] if isinstance(node, ast.ImportFrom)]
    return {
        alias.name
        for node in imports
        if (node.module or "").startswith("nafi") and node.module != "nafi.lazy"
        for alias in node.names
    }


@pytest.mark.parametrize(("package", "others"), [(nafi, PACKAGES), (reports, set())])
def test_lazy_names_are_those_that_type_checkers_see(package: ModuleType, others: set[str]) -> None:
    init = Path(str(package.__file__))
    assert seen_by_type_checkers(init) == set(package.__all__) | others
    for name in [*package.__all__, *others]:
        assert name in dir(package)
        assert getattr(package, name) is getattr(package, name)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'no'"):
        _ = package.no


def loaded(code: str, *arguments: str) -> set[str]:
    """The top-level packages, and modules of nafi, that a process has imported in the end."""
    code = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\n"
        "import json; print(json.dumps(list(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stderr.splitlines()[-1])
    return {name if name.startswith("nafi") else name.partition(".")[0] for name in names}


HEAVY = {"torch", "numpy", "scipy", "safetensors", *EXTRAS}


def test_importing_nafi_imports_almost_nothing() -> None:
    names = loaded("import nafi")
    assert not names & HEAVY
    own = {name for name in names if name.startswith("nafi")}
    assert own == {"nafi", "nafi.errors", "nafi.lazy", "nafi.version"}


@pytest.mark.slow
def test_using_nafi_imports_nothing_of_the_laboratory() -> None:
    names = loaded("import nafi; [getattr(nafi, name) for name in nafi.__all__]")
    assert "torch" in names
    # torch itself may import jinja2
    assert not names & (set(EXTRAS) - {"jinja2"})
    assert not names & {"nafi.federated", "nafi.experiments", "nafi.reports", "nafi.cli"}


COMMANDS = [
    [],
    ["fuse"],
    ["inspect"],
    ["methods"],
    ["statistics"],
    ["head"],
    ["demo"],
    ["run"],
    ["report"],
    ["flower"],
    ["flower", "new"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    names = loaded("from nafi.cli import main; main()", *command, "--help")
    assert "typer" in names
    assert not names & HEAVY


def test_completion_imports_nothing_heavy() -> None:
    names = loaded("from nafi.cli import main; main()", "--show-completion", "bash")
    assert not names & HEAVY


def test_extras_are_those_of_the_package() -> None:
    """Everything that is optional has an extra, under the name that it is imported by."""
    project = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text())["project"]
    import_names = {"pillow": "PIL", "scikit-learn": "sklearn", "POT": "ot"}
    declared = {}
    for extra in ("flower", "hf", "lab", "ot"):
        for requirement in project["optional-dependencies"][extra]:
            name = re.match(r"[\w-]+", requirement)
            assert name is not None
            declared[import_names.get(name[0], name[0])] = extra
    assert declared == EXTRAS
    required = {re.split(r"[<>=\[]", requirement)[0] for requirement in project["dependencies"]}
    assert required == {
        "click",
        "numpy",
        "rich",
        "safetensors",
        "scipy",
        "torch",
        "typer",
        "typing-extensions",
    }


if __name__ == "__main__":
    print(deep_imports(), sum(deep_imports().values()))  # noqa: T201
