"""Check that the quick tests detect faults. A mutant is one deliberate fault in the source code of this project.

    python -m scripts.check.mutants                                 the mutants of mutants.json, with the tests listed there
    python -m scripts.check.mutants --all --only ringattn/mask.py   the mutants of one file, with the whole quick suite
    python -m scripts.check.mutants --generate 10 --seed 1 --only train/reports/metrics.py

The script applies one mutant at a time and runs tests. A mutant is killed if a test fails or exceeds its time limit. The exit
status is 1 if any mutant survives. With `--generate`, the script makes mutants from the source code of each file given by
`--only`. Generated mutants change an operator, a constant, a condition, or a call of min or max. The mutants are applied to
copies of the repository in a temporary directory.
"""

import argparse
import ast
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

from scripts.command import at_least, child_environment

ROOT = Path(__file__).resolve().parents[2]
LISTED = Path(__file__).with_suffix(".json")

# Time limits of one test and of a run of pytest, in seconds. A mutant that exceeds a limit counts as killed.
TEST_TIMEOUT, TIMEOUT = 60, 400


@dataclass(frozen=True)
class Mutant:
    """A deliberate fault. The text `new` replaces `old`, which must occur exactly once in the file. The entries of `tests` are
    arguments of pytest, and select the tests that should fail.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}: {shorten(self.old)} -> {shorten(self.new)}"


@dataclass(frozen=True)
class Result:
    """`killed_by` is the first test that failed, or an empty string if the mutant survived."""

    mutant: Mutant
    killed_by: str


def shorten(text: str) -> str:
    return "`" + " ".join(text.split()) + "`"


def listed_mutants() -> list[Mutant]:
    return [Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in json.loads(LISTED.read_text())]


SWAPPED_OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
SWAPPED_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def is_ignored(node: ast.AST, parent: ast.AST) -> bool:
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.arg() | ast.keyword(arg="strict"):
            return True  # Skip error messages, annotations and zip(strict=...).
        case ast.Assign() | ast.AnnAssign():
            return isinstance(parent, ast.Module)  # Skip module-level constants, which are mostly tuned numbers.
        case _:
            return node in getattr(parent, "decorator_list", ())  # a decorator, such as the size of a cache


class Source:
    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = text.splitlines(keepends=True)
        self._starts = [0, *itertools.accumulate(map(len, self._lines))]

    def _offset(self, line: int, column: int) -> int:
        # In a syntax tree, columns count UTF-8 bytes instead of characters.
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def operator(self, left: ast.expr, right: ast.expr, symbol: str) -> tuple[int, int]:
        begin = self.text.index(symbol, self.span(left)[1], self.span(right)[0])
        return begin, begin + len(symbol)

    def whole_lines(self, begin: int, end: int) -> tuple[int, int]:
        first, last = self.text.rfind("\n", 0, begin) + 1, self.text.index("\n", end)
        while self.text.count(self.text[first:last]) > 1:
            first = self.text.rfind("\n", 0, first - 1) + 1
        return first, last


def changes(node: ast.AST, source: Source) -> Iterator[tuple[int, int, str]]:
    """Yield all possible faults as (begin, end, replacement), with offsets in the text."""
    for child in ast.iter_child_nodes(node):
        if not is_ignored(child, node):
            yield from changes(child, source)
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) | ast.BinOp(left=left, op=operator, right=right):
            if type(operator) in SWAPPED_OPERATORS:
                symbol, other = SWAPPED_OPERATORS[type(operator)]
                yield *source.operator(left, right, symbol), other
        case ast.BoolOp(op=operator, values=[left, right, *_]):
            symbol, other = SWAPPED_OPERATORS[type(operator)]
            yield *source.operator(left, right, symbol), other
        case ast.UnaryOp(op=ast.Not()):
            begin, _ = source.span(node)
            yield begin, begin + len("not"), "not not"
        case ast.Constant(value=bool(value)):
            yield *source.span(node), str(not value)
        case ast.Constant(value=int(value)):
            yield *source.span(node), str(value + 1)
        case ast.Call(func=ast.Name(id=name) as function) if name in SWAPPED_FUNCTIONS:
            yield *source.span(function), SWAPPED_FUNCTIONS[name]


def generate(path: Path, count: int, seed: int) -> list[Mutant]:
    """Return up to `count` mutants of one file. The same seed and source always give the same mutants."""
    source = Source(path.read_text())
    mutants = []
    for begin, end, replacement in changes(ast.parse(source.text), source):
        first, last = source.whole_lines(begin, end)
        old, new = source.text[first:last], source.text[first:begin] + replacement + source.text[end:last]
        mutants.append(Mutant(str(path.relative_to(ROOT)), old, new, likely_tests(path)))
    chosen = random.Random(f"{path.name}{seed}").sample(mutants, min(count, len(mutants)))
    return sorted(chosen, key=lambda mutant: source.text.index(mutant.old))


def likely_tests(path: Path) -> tuple[str, ...]:
    """Return the test file of a module, or else the test folder of its package."""
    relative = path.relative_to(ROOT)
    test = Path("tests") / relative.with_name(f"test_{path.name}")
    return (str(test if (ROOT / test).exists() else test.parent),)


def run_tests(tree: Path, tests: tuple[str, ...]) -> str:
    """Run quick tests in a copy of the repository. Return the first failed test, or ""."""
    options = ["--exitfirst", f"--timeout={TEST_TIMEOUT}", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-m", "not slow", *options, *tests]
    # Python does not notice a second change of a file within one second. Therefore Python must not write bytecode.
    environment = child_environment(tree, PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"timeout after {TIMEOUT} s"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"pytest was ended by signal {-done.returncode}"
    failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", done.stdout, re.MULTILINE)
    if not failed:
        raise RuntimeError(f"pytest {' '.join(tests)} ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return failed[1]


@contextmanager
def applied(mutant: Mutant, tree: Path) -> Generator[None]:
    path = tree / mutant.file
    source = path.read_text()
    count = source.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant}: the old text must occur once in {mutant.file} but occurs {count} times")
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        path.write_text(source)


def check(mutants: list[Mutant], whole_suite: bool, jobs: int) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as threads:
        trees: Queue[Path] = Queue()
        for job in range(jobs):
            trees.put(copy_repository(Path(folder) / str(job)))

        def check_one(mutant: Mutant) -> Result:
            tree = trees.get()
            try:
                with applied(mutant, tree):
                    killed_by = run_tests(tree, mutant.tests)
                    if not killed_by and whole_suite:
                        killed_by = run_tests(tree, ("tests",))
                return Result(mutant, killed_by)
            finally:
                trees.put(tree)

        yield from threads.map(check_one, mutants)


def copy_repository(directory: Path) -> Path:
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name, follow_symlinks=False)
    return directory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE", help="files or folders to which mutants are applied")
    parser.add_argument("--generate", type=at_least(1), metavar="N", help="make N mutants of each file given by --only")
    parser.add_argument("--seed", type=int, default=0, help="selects which mutants are made")
    parser.add_argument("--all", action="store_true", help="run the whole quick suite if the listed tests pass")
    parser.add_argument("--jobs", type=at_least(1), default=2, help="how many mutants are tested at the same time")
    parser.add_argument("--save", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()

    for name in options.only:
        if not (ROOT / name).exists():
            parser.error(f"argument --only: {name} does not exist")
    if options.generate:
        paths = [path for name in options.only for path in sorted((ROOT / name).rglob("*.py")) or [ROOT / name]]
        mutants = [mutant for path in paths for mutant in generate(path, options.generate, options.seed)]
    else:
        mutants = [mutant for mutant in listed_mutants() if mutant.file.startswith(tuple(options.only or [""]))]
    if not mutants:
        parser.error("there is no mutant: name files with --only, and make mutants with --generate")

    results = []
    for result in check(mutants, options.all, options.jobs):
        results.append(result)
        print(f"{'killed  ' if result.killed_by else 'SURVIVED'} {result.mutant}  [{result.killed_by}]", flush=True)
    if options.save:
        options.save.write_text(json.dumps([asdict(x.mutant) | {"killed_by": x.killed_by} for x in results], indent=1) + "\n")
    survivors = sum(not result.killed_by for result in results)
    print(f"{len(results)} mutants: {len(results) - survivors} killed, {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
