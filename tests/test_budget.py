"""The size of the product and of the documentation stays within the budget of CONTRIBUTING.md."""

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = ("kernels", "ringattn", "train")
PAGES = [page for pattern in ("*.md", ".github/**/*.md", "docs/**/*.md", "benchmarks/*.md") for page in ROOT.glob(pattern)]


class Size(NamedTuple):
    """The size of one or several Python files."""

    lines: int
    code: int  # lines that are neither blank nor a part of a docstring nor only a comment
    words: int  # words of docstrings and comments


def budget(name: str) -> int:
    """The limit of this name in the table of CONTRIBUTING.md."""
    (limit,) = re.findall(rf"^\| {re.escape(name)} \| ([\d,]+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    return int(limit.replace(",", ""))


def count_words(text: str) -> int:
    """Count the words that contain a letter or a digit."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


def docstrings(tree: ast.AST) -> list[ast.Constant]:
    """The docstrings of a module, its classes and its functions."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    firsts = (node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and node.body)
    values = (first.value for first in firsts if isinstance(first, ast.Expr))
    return [value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def size_of(source: str) -> Size:
    """The size of a Python file."""
    lines = source.splitlines()
    texts, without_code = [], {i for i, line in enumerate(lines, 1) if not line.strip() or line.lstrip().startswith("#")}
    for docstring in docstrings(ast.parse(source)):
        texts.append(docstring.value)
        without_code |= set(range(docstring.lineno, docstring.end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [token.string for token in tokens if token.type == tokenize.COMMENT]
    return Size(len(lines), len(lines) - len(without_code), sum(map(count_words, texts)))


def size_of_folder(folder: str) -> Size:
    """The size of all files of a folder, without linked ones."""
    files = [path for path in (ROOT / folder).rglob("*.py") if not any(parent.is_symlink() for parent in path.parents)]
    return Size(*map(sum, zip(*(size_of(path.read_text()) for path in files), strict=True)))


def test_lines_of_code() -> None:
    assert sum(size_of_folder(folder).code for folder in PRODUCT) <= budget(
        "lines of code in `kernels/`, `ringattn/` and `train/`"
    )


@pytest.mark.parametrize("folder", PRODUCT)
def test_words_of_docstrings_and_comments(folder: str) -> None:
    size = size_of_folder(folder)
    limit = budget("words of docstrings and comments per 1,000 lines, in each of these folders")
    assert 1000 * size.words / size.lines <= limit


def test_words_of_markdown() -> None:
    assert sum(count_words(page.read_text()) for page in PAGES) <= budget("words of Markdown")


def test_lines_of_the_log() -> None:
    assert len((ROOT / "docs/dev/LOG.md").read_text().splitlines()) <= budget("lines of `docs/dev/LOG.md`")


def test_size() -> None:
    """Comments after code, strings that are no docstrings, and blank lines are recognised."""
    source = (
        '"""One two."""\n\n# three - 4\nx = 5  # six\n\n\ndef f():\n    """Seven.\n\n    Eight.\n    """\n    return "nine"\n'
    )
    assert size_of(source) == Size(lines=12, code=3, words=7)
