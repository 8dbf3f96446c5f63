"""Imports run in one direction: kernels <- ringattn <- train <- scripts."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ("kernels", "ringattn", "train", "scripts")


def imported_modules(path: Path) -> set[str]:
    """The full names of the modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def package_of(name: str) -> str:
    """The folder of this repository that a module name belongs to, or the top-level package of another project."""
    first, _, rest = name.partition(".")
    second = rest.partition(".")[0]
    return second if first == "ringattn" and second in ORDER else first


@pytest.mark.parametrize("package", ORDER)
def test_imports_run_one_way(package: str) -> None:
    outer = set(ORDER[ORDER.index(package) + 1 :]) | {"tests"}
    files = list((ROOT / package).rglob("*.py"))
    assert files
    found = {str(path.relative_to(ROOT)): set(map(package_of, imported_modules(path))) & outer for path in files}
    assert {name: packages for name, packages in found.items() if packages} == {}


def test_kernels_import_torch_and_triton_only() -> None:
    allowed = set(sys.stdlib_module_names) | {"torch", "triton", "kernels"}
    for path in (ROOT / "kernels").rglob("*.py"):
        assert set(map(package_of, imported_modules(path))) <= allowed, path
        assert "torch.distributed" not in path.read_text(), path
