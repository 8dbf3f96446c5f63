"""Tests of the structure of the source code: which modules import which, and that every module has a test file."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ringattn
import ringattn.train
import ringattn.transformers

ROOT = Path(__file__).parent.parent
PACKAGES = ("kernels", "ringattn", "train", "scripts")

# The layers of the package ringattn, from the lowest to the highest. A module may import from its own layer and lower ones.
LAYERS = {
    "the concepts": ("choices", "mask", "layout", "runs", "state", "load_balance", "sinks"),
    "what will happen, as plain data": ("planning",),
    "how bytes move; how a call becomes an operator": ("comm", "spec", "custom_op", "checkpointing", "operands"),
    "runs a schedule over a transport": ("ring",),
    "the public calls": ("attention", "ulysses", "flash", "torch_attention", "decode", "paged_cache", "explanation"),
    "models and trainers of Hugging Face": ("transformers",),
}

# The rooms of the package train, from the lowest to the highest. A room is a folder or a module that lies directly in train/. A
# room imports only from lower ones. In particular, training does not import the commands, which parse command lines.
ROOMS = (
    *("files", "settings", "model", "parallel", "optim", "data", "preemption", "checkpoint", "setup", "reports", "step"),
    *("inference", "trainer", "commands", "run", "evaluate", "generate", "export", "prepare"),
)
MAX_IMPORTS_BETWEEN_ROOMS = 74

# Modules without a test file of their own: the test files that cover them instead.
UNTESTED = {
    "ringattn/__init__.py": "tests/test_imports.py",
    "ringattn/transformers/__init__.py": "tests/test_imports.py",
    "kernels/hopper/epilogue_wide.py": "tests/kernels/hopper/test_epilogue.py",
    "kernels/hopper/backward_common.py": "tests/kernels/hopper/test_backward.py",
    "kernels/hopper/backward_narrow.py": "tests/kernels/hopper/test_backward.py",
    "kernels/hopper/backward_rows.py": "tests/kernels/hopper/test_backward.py",
    "kernels/hopper/forward_common.py": "tests/kernels/hopper/test_forward.py",
    "kernels/hopper/forward_narrow.py": "tests/kernels/hopper/test_forward.py",
    "train/checkpoint/init.py": "tests/train/checkpoint/test_huggingface.py",
    "train/commands/arguments.py": "tests/train/commands/test_options.py",
    "train/commands/evaluate_needle.py": "tests/train/commands/test_evaluate.py",
    "train/commands/evaluate_recall.py": "tests/train/commands/test_options.py",
    "train/commands/generate.py": "tests/train/commands/test_options.py",
    "train/commands/launch_settings.py": "tests/train/settings/test_resolution.py",
    "train/commands/messages.py": "tests/train/commands/test_errors.py",
    "train/data/documents.py": "tests/train/data/test_packing.py",
    "train/data/record_encoder.py": "tests/train/data/test_chat.py",
    "train/data/sources.py": "tests/train/data/test_packing.py",
    "scripts/bench/peers.py": "tests/scripts/bench/test_kernels.py",
}
SHORT = 60  # Modules of at most this many lines need no test file of their own.


def modules(package: str) -> list[Path]:
    """The source files of a package."""
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    return files


def name_of(path: Path) -> str:
    """The name under which a source file is imported; kernels and train are parts of ringattn."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    prefix = ("ringattn",) if parts[0] in ("kernels", "train") else ()
    return ".".join(prefix + (parts[:-1] if parts[-1] == "__init__" else parts))


MODULES = {name_of(path): path for package in PACKAGES for path in modules(package)}


def imports(path: Path) -> set[str]:
    """The names of the modules that a file imports, also inside functions and under TYPE_CHECKING."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} uses a relative import"
            imported = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in imported}
    return names


def package_of(name: str) -> str:
    """The folder of this repository that a module belongs to, or the top-level package of another project."""
    parts = name.split(".")
    return parts[1] if parts[0] == "ringattn" and len(parts) > 1 and parts[1] in PACKAGES else parts[0]


def layer_of(name: str) -> int:
    """The layer of a module of the package ringattn."""
    return next(i for i, folders in enumerate(LAYERS.values()) if name.split(".")[1] in folders)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_lower_packages(package: str) -> None:
    """The order is kernels <- ringattn <- train <- scripts, and no package imports tests."""
    higher = {*PACKAGES[PACKAGES.index(package) + 1 :], "tests"}
    for path in modules(package):
        assert not higher & set(map(package_of, imports(path))), path


@pytest.mark.parametrize("package", ["kernels", "ringattn"])
def test_base_installation_needs_only_numpy_torch_and_triton(package: str) -> None:
    """All other packages belong to the extras `train` and `transformers`. The kernels also need no process groups."""
    allowed = set(sys.stdlib_module_names) | {"numpy", "torch", "triton", "kernels", "ringattn"}
    for path in modules(package):
        extra = {"transformers", "accelerate"} if path.parent.name == "transformers" else set()
        assert set(map(package_of, imports(path))) <= allowed | extra, path
        assert package != "kernels" or "torch.distributed" not in path.read_text(), path


@pytest.mark.parametrize(
    ("module", "packages"), [("ringattn.kernels", set()), ("ringattn.kernels.dispatch", {"torch", "numpy"})]
)
def test_kernels_are_imported_alone(module: str, packages: set[str]) -> None:
    """Importing the kernels loads no module of the ring. torch itself loads torch.distributed."""
    script = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {name.partition(".")[0] for name in loaded} & {"torch", "numpy", "triton"} == packages
    own = {name for name in loaded if name.startswith("ringattn.")}
    assert module in own
    assert {name for name in own if not name.startswith("ringattn.kernels")} == set()


def test_datasets_is_imported_inside_functions() -> None:
    """A run on a prepared corpus does not need `datasets`, whose import takes more than a second."""
    for path in modules("train"):
        assert not re.search(r"^(import|from) datasets\b", path.read_text(), re.MULTILINE), path


def test_preparation_needs_no_torch() -> None:
    """With many processes, the imports of torch, hydra and datasets take longer than the work."""
    script = "import sys, ringattn.train.commands.prepare; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "datasets", "hydra", "transformers"} & set(loaded)


def test_public_names_are_imported_lazily() -> None:
    """Every public name exists and is listed. No submodule has the same name, because it would replace the attribute."""
    assert set(ringattn._MODULES) == set(ringattn.__all__) <= set(dir(ringattn))
    for name in ringattn.__all__:
        assert getattr(ringattn, name).__module__ == f"ringattn.{ringattn._MODULES[name]}"
        assert f"ringattn.{name}" not in MODULES
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        ringattn.missing  # noqa: B018


def test_importing_the_package_for_transformers_does_not_import_transformers() -> None:
    script = "import sys, ringattn.transformers; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert not {"transformers", "accelerate", "torch"} & set(loaded)
    assert set(ringattn.transformers._MODULES) == set(ringattn.transformers.__all__) <= set(dir(ringattn.transformers))
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        ringattn.transformers.missing  # noqa: B018


def test_copy_without_symbolic_links_raises_one_clear_error(tmp_path: Path) -> None:
    """Some programs write a link of an archive as a file that contains the target of the link."""
    (tmp_path / "ringattn").mkdir()
    shutil.copy(ringattn.__file__, tmp_path / "ringattn")
    (tmp_path / "ringattn" / "kernels").write_text("../kernels")
    done = subprocess.run([sys.executable, "-c", "import ringattn.kernels"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("ImportError: ringattn/kernels is not a folder")


def test_training_without_its_extra_raises_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the missing packages. train/__init__.py lists the packages of the extra in pyproject.toml."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    names = {re.split("[>=-]", requirement)[0] for requirement in extra}  # hydra-core is imported as hydra
    assert names == set(ringattn.train.PACKAGES)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"^training needs wandb: .*pip install 'ringattn\[train\]'.*$"):
        importlib.reload(ringattn.train)


def test_layers_import_only_lower_layers() -> None:
    """Inside ringattn no module imports from a higher layer. In particular, planning never imports comm."""
    for path in modules("ringattn"):
        if path.name != "__init__.py":
            name = name_of(path)
            imported = {other for other in imports(path) if package_of(other) == "ringattn"}
            assert "ringattn" not in imported, f"{path} must import from the module that defines a name"
            higher = {other for other in imported if layer_of(other) > layer_of(name)}
            assert not higher, f"{name} imports {higher} of a higher layer"


def test_the_design_page_lists_the_layers() -> None:
    """The table of docs/design.md is made from `LAYERS`."""
    rows = (f"| {i} | {text} | {' '.join(map('`{}`'.format, names))} |" for i, (text, names) in enumerate(LAYERS.items(), 1))
    assert "\n".join(rows) in (ROOT / "docs" / "design.md").read_text()


def room_of(name: str) -> str | None:
    """The room of a module of the package train, or None for any other module."""
    parts = name.split(".")
    return parts[2] if parts[:2] == ["ringattn", "train"] and len(parts) > 2 else None


def test_rooms_of_train_import_only_lower_rooms() -> None:
    """The graph of the rooms has no cycle, and it is small enough to be drawn."""
    between = set()
    for name, path in MODULES.items():
        if room := room_of(name):
            imported = {room_of(other) for other in imports(path)} - {None, room}
            higher = imported - set(ROOMS[: ROOMS.index(room)])
            assert not higher, f"{name} imports {higher}, which are higher rooms"
            between |= {(room, other) for other in imported}
    assert len(between) <= MAX_IMPORTS_BETWEEN_ROOMS


def test_no_modules_import_each_other() -> None:
    """There is no cycle of imports, not even under TYPE_CHECKING."""
    graph = {name: imports(path) & set(MODULES) for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_every_module_has_a_test_file() -> None:
    """A module at a/b.py is tested by tests/a/test_b.py."""
    missing = set()
    for path in MODULES.values():
        relative = path.relative_to(ROOT)
        test = ROOT / "tests" / relative.with_name(f"test_{path.name}")
        if len(path.read_text().splitlines()) > SHORT and not test.exists():
            missing.add(str(relative))
    assert missing <= set(UNTESTED)
    assert all((ROOT / test).exists() for test in UNTESTED.values())
