"""The import rule: kernels <- ringattn <- train <- scripts, one way; and the name `kernels` belongs to this project."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ("kernels", "ringattn", "train", "scripts")


def imported_packages(path: Path) -> set[str]:
    """The top-level names that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", ORDER)
def test_imports_run_one_way(package: str) -> None:
    outer = set(ORDER[ORDER.index(package) + 1 :]) | {"tests"}
    files = list((ROOT / package).rglob("*.py"))
    assert files
    assert {str(path.relative_to(ROOT)): imported_packages(path) & outer for path in files} == {
        str(path.relative_to(ROOT)): set() for path in files
    }


def test_kernels_import_torch_and_triton_only() -> None:
    allowed = set(sys.stdlib_module_names) | {"torch", "triton", "kernels"}
    for path in (ROOT / "kernels").rglob("*.py"):
        assert imported_packages(path) <= allowed, path
        assert "torch.distributed" not in path.read_text(), path


def run_with_foreign_kernels(directory: Path, code: str, *path: Path) -> subprocess.CompletedProcess:
    """Run `code` where another package of the name `kernels` comes before those in `path`."""
    foreign = directory / "site" / "kernels"
    foreign.mkdir(parents=True)
    (foreign / "__init__.py").write_text("def get_kernel(): pass\n")
    setup = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n"
    environment = {"PYTHONPATH": f"{foreign.parent}:{ROOT}", "PATH": ""}
    return subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, env=environment, cwd=directory)


def test_a_foreign_package_named_kernels_is_refused(tmp_path: Path) -> None:
    ended = run_with_foreign_kernels(tmp_path, "import ringattn")
    assert ended.returncode != 0
    assert "the name 'kernels' belongs to another package here" in ended.stderr
    assert "uninstall the package 'kernels'" in ended.stderr


def test_with_the_root_first_both_live_together(tmp_path: Path) -> None:
    """What train/run.py does."""
    ended = run_with_foreign_kernels(tmp_path, "import ringattn, kernels; print(kernels.OWNER)", ROOT)
    assert (ended.returncode, ended.stdout) == (0, "ringattn\n"), ended.stderr
