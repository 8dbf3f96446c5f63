"""Test that names in the source code are standard terms of the field, not private words of this project."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Words that must not be part of a name, and the standard terms to use instead.
PRIVATE_WORDS = {
    "circulating block, partial result, local step, owner": "traveller visit home earn",
    "receive buffer, slot": "inbox mailbox landing",
    "transport, interconnect": "fabric",
    "assign, work tile": "deal dealt",
    "loop": "walk",
    "initialise, update": "settle settled",
    "recompute, repeat": "anew",
    "cost model, estimate": "forecast",
    "save, cache": "remember remembered",
    "validate, raise": "refuse refusal",
}
REPLACEMENTS = {form: term for term, words in PRIVATE_WORDS.items() for word in words.split() for form in (word, f"{word}s")}


def words_of(name: str) -> list[str]:
    """The lower-case words of a name in snake_case or CamelCase."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def names(path: Path) -> Iterator[str]:
    """The names of a module and of its functions, classes, arguments, variables and attributes."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


@pytest.mark.parametrize("package", ["kernels", "ringattn", "train"])
def test_names_are_standard_terms(package: str) -> None:
    """A private word in a name makes a newcomer look for its definition."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for name in sorted(set(names(path))):
            found += [
                f"{path.relative_to(ROOT)}: {name}: use a standard term such as {REPLACEMENTS[word]}"
                for word in words_of(name)
                if word in REPLACEMENTS
            ]
    assert not found, "\n".join(found)


def test_words_are_recognised_in_every_style() -> None:
    """Names may be in snake_case, CamelCase or capitals."""
    assert words_of("_local_step2") == ["local", "step"]
    assert words_of("KVCache") == ["kv", "cache"]
    assert words_of("MAX_HEAD_CHUNKS") == ["max", "head", "chunks"]
