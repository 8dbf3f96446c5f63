"""Tests of the script that applies deliberate faults."""

import subprocess
from pathlib import Path

import pytest

from scripts.check import mutants

MODULE = '''
"""A module with one fault of each kind."""

from functools import lru_cache

SPEED = 330


@lru_cache(maxsize=4)
def clip(x: int, low: int = 0) -> int:
    if not (x < low and low >= 0):
        x = min(x + 7, low * 2)
    if x == 9:
        raise ValueError(f"{x + 1} is too large, by {x - 8}")
    return x
'''


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one module and one test, in which the script works during the test."""
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_module.py").write_text(
        "from module import clip\n\n\ndef test_it():\n    assert clip(-1) == -1\n"
    )
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    return tmp_path


def test_each_kind_of_fault_is_generated(repository: Path) -> None:
    """Operators, numbers, conditions and functions are changed, but not errors, decorators and constants of the module."""
    found = {(m.old.strip(), m.new.strip()) for m in mutants.generate(repository / "module.py", 100, seed=0)}
    condition, value = "if not (x < low and low >= 0):", "x = min(x + 7, low * 2)"
    assert found == {
        ("def clip(x: int, low: int = 0) -> int:", "def clip(x: int, low: int = 1) -> int:"),
        *((condition, condition.replace(*change)) for change in [("not", "not not"), ("<", "<="), ("and", "or"), (">=", ">")]),
        (condition, condition.replace("0", "1")),
        *((value, value.replace(*change)) for change in [("min", "max"), ("+", "-"), ("7", "8"), ("*", "//"), ("2", "3")]),
        ("if x == 9:", "if x != 9:"),
        ("if x == 9:", "if x == 10:"),
    }
    assert mutants.generate(repository / "module.py", 3, seed=0) == mutants.generate(repository / "module.py", 3, seed=0)


@pytest.mark.slow
def test_mutants_are_killed_or_survive(repository: Path) -> None:
    """The first failing test is reported, and the module is restored before the next mutant."""
    faults = [("return x", "return x + 1"), ("x == 9", "x == 10"), ("return x", "return (")]
    listed = [mutants.Mutant("module.py", old, new, ("tests/test_module.py",)) for old, new in faults]
    results = list(mutants.check(listed, whole_suite=False, jobs=1))
    assert [result.killed_by for result in results] == ["tests/test_module.py::test_it", "", "tests/test_module.py"]
    assert (repository / "module.py").read_text() == MODULE


def test_listed_mutants_fit_the_source() -> None:
    """The old text of each listed mutant occurs once in its file, and its tests exist."""
    for mutant in mutants.listed_mutants():
        assert (mutants.ROOT / mutant.file).read_text().count(mutant.old) == 1, mutant
        assert mutant.old != mutant.new
        assert mutant.tests
        for test in mutant.tests:
            assert (mutants.ROOT / test.partition("::")[0]).exists(), test


def test_a_copy_of_the_repository_contains_its_links(tmp_path):
    """Without the links, the tests of a mutant would import the modules of the original, and every mutant would survive."""
    copy = mutants.copy_repository(tmp_path / "copy")
    for name in ("kernels", "train", "configs"):
        assert (copy / "ringattn" / name).resolve() == copy / name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "ringattn/maks.py"], "argument --only: ringattn/maks.py does not exist"),
        (["--only", "docs"], "there is no mutant"),
        (["--generate", "2"], "there is no mutant"),
        (["--generate", "-1", "--only", "train/run.py"], "argument --generate: '-1' must be an integer of at least 1"),
        (["--jobs", "0"], "argument --jobs: '0' must be an integer of at least 1"),
    ],
)
def test_arguments_without_mutants_are_rejected(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["mutants", *arguments])
    with pytest.raises(SystemExit) as exited:
        mutants.main()
    assert exited.value.code == 2
    assert message in capsys.readouterr().err
