"""Command lines: every script starts, and the commands in docstrings, benchmarks/ and docs/labs/ use options that exist."""

import contextlib
import importlib
import inspect
import io
import os
import re
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from scripts import command

SCRIPTS = sorted(
    ".".join(path.relative_to(command.ROOT).with_suffix("").parts)
    for folder in ("bench", "check", "labs", "tools")
    for path in (command.ROOT / "scripts" / folder).glob("*.py")
    if "__main__" in path.read_text()
)
TEXTS = [command.ROOT / f"{module.replace('.', '/')}.py" for module in SCRIPTS]
TEXTS += sorted([*(command.ROOT / "benchmarks").glob("*.md"), *(command.ROOT / "docs/labs").glob("*.md")])


@cache
def help_text(module: str) -> str:
    """Return what `python -m module --help` prints."""
    output = io.StringIO()
    main = importlib.import_module(module).main
    arguments = [["--help"]] if inspect.signature(main).parameters else []
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as exited, patch("sys.argv", [module, "--help"]):
        main(*arguments)
    assert exited.value.code == 0
    return output.getvalue()


@pytest.mark.parametrize("module", SCRIPTS)
def test_script_starts_and_describes_itself(module):
    text = help_text(module)
    assert text.startswith("usage: ")
    assert f"-m {module}" in text


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_commands_use_modules_and_options_that_exist(path: Path):
    for module, arguments in re.findall(r"-m (scripts\.\w+\.\w+)((?: +[^\s`|]+)*)", path.read_text()):
        assert module in SCRIPTS, f"{path.name} runs {module}"
        for option in re.findall(r" (--[a-z-]+)", arguments):
            assert option in help_text(module), f"{path.name}: {module} has no {option}"


def test_integers_out_of_range_are_rejected(capsys):
    parser = command.new_parser("A script.")
    parser.add_argument("--rounds", type=command.at_least(1))
    assert parser.parse_args(["--rounds", "3"]).rounds == 3
    for text in ("0", "-1", "--1", "x", "1.5", str(2**31), "1" + 5000 * "0"):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--rounds={text}"])
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.endswith(f"{repr(text)[:60]} must be an integer of at least 1 and below 2**31")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("3 GiB are missing\nmore"), "3 GiB are missing"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "DefaultCPUAllocator: can't allocate memory"),
        (MemoryError(), ""),
    ],
    ids=lambda x: type(x).__name__,
)
def test_memory_that_runs_out_ends_a_script_with_one_line(error, reason, capsys):
    with pytest.raises(SystemExit, match="1"), command.exit_without_memory():
        raise error
    assert capsys.readouterr().err == f"error: the memory is too small, use shorter lengths: {reason}\n"


def test_other_errors_keep_their_traceback():
    with pytest.raises(RuntimeError, match="shapes do not match"), command.exit_without_memory():
        raise RuntimeError("shapes do not match")


@pytest.mark.parametrize("name", ["picture", "picture.svg", "png"])
def test_pictures_that_are_not_png_files_are_rejected(name, capsys):
    parser = command.new_parser("A script.")
    parser.add_argument("output", type=command.png_file)
    assert parser.parse_args(["a.b/picture.png"]).output == Path("a.b/picture.png")
    with pytest.raises(SystemExit):
        parser.parse_args([name])
    assert f"'{name}' must end with .png" in capsys.readouterr().err


def test_run_is_described_by_date_machine_and_command(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    run = command.describe_run("scripts.bench.ring", ["--cases", "a b"], gpus=2, ranks=2, packages=["no-such-package"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"])
    assert run["machine"].startswith(f"2 x GPU, torch {torch.__version__}, ")
    assert "no-such-package of unknown version" in run["machine"]
    assert run["command"] == "torchrun --nproc_per_node=2 -m scripts.bench.ring --cases 'a b'"
    assert command.describe_run("scripts.x", [], gpus=1)["command"] == "python -m scripts.x"


def test_child_finds_the_packages_that_the_user_provides(monkeypatch):
    """The folder of the child's packages comes first, so that other packages with the same names do not hide them."""
    monkeypatch.setenv("PYTHONPATH", f"mine{os.pathsep}yours")
    environment = command.child_environment(Path("/tree"), NAME="value")
    assert environment["PYTHONPATH"].split(os.pathsep) == ["/tree", "mine", "yours"]
    assert environment["NAME"] == "value"
    assert environment["PATH"] == os.environ["PATH"]
    monkeypatch.delenv("PYTHONPATH")
    assert command.child_environment()["PYTHONPATH"] == str(command.ROOT)


def test_no_program_replaces_the_search_path_of_the_user():
    """Child processes take their search path from `child_environment`. Two tests of the search path itself set their own."""
    assignment = '"PYTHONPATH"' + ":"  # in two parts, so that this file does not contain it
    allowed = {"scripts/command.py", "tests/train/commands/test_options.py", "tests/train/commands/test_run.py"}
    files = [path for folder in ("scripts", "tests") for path in (command.ROOT / folder).rglob("*.py")]
    assert {str(path.relative_to(command.ROOT)) for path in files if assignment in path.read_text()} == allowed
