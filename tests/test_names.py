"""Test that names in the source code are standard terms of the field, not private words of this project."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Words that must not be part of a name, and the standard terms to use instead.
PRIVATE_WORDS = {
    "circulating block, partial result, local step, owner": "traveller travellers visit visits home earn earns earned",
    "all-to-all": "swap swaps",
    "receive buffer, slot, slice": "inbox mailbox landing image place",
    "wait flag, ready flag, send": "gate gates opens push pushed",
    "transport, endpoint, interconnect": "line fabric",
    "SM": "processor processors",
    "shares_sms": "crowded beside",
    "work tile, assign": "item items deal deals dealt",
    "KV loop, ping-pong turn, head group": "walk walks turn turns section sections",
    "reference max, initialise, update": "origin origins settle settled follow follows",
    "fence, exp": "hold holds held weigh weighs",
    "retry pass, overflowed, skip tile, transfer, release": "failed stand leave leaves",
    "head chunk": "passes",
    "recompute, repeat": "again anew",
    "cost model, estimate": "forecast forecasts",
    "save, cache": "remembered remember",
    "validate, raise": "refuse refused refuses refusal",
    "sync_errors, broadcast_object": "agreed agree together",
    "head_dim, hidden_dim": "features feature",
    "slice, split": "cut cuts",
}
REPLACEMENTS = {word: term for term, words in PRIVATE_WORDS.items() for word in words.split()}

# Names in which such a word is standard English or part of an interface of another project.
ALLOWED = {
    "read_item",  # a method of torch.distributed.checkpoint's planners
    "in_place",
    "held_out",  # held-out text is the standard term for evaluation data
    "held_out_batches",
    "load_held_out",
    "gate",  # the gate of a SwiGLU layer
    "in_turns",  # the ranks of a simulated ring take turns
}
LINES_OF_TEXT = {"line", "run_command_line"}  # allowed in train, which reads lines of text


def words_of(name: str) -> list[str]:
    """The lower-case words of a name in snake_case or CamelCase."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def names(path: Path) -> Iterator[str]:
    """The names that a module defines: of itself, functions, classes, arguments, variables and attributes."""
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
    found, allowed = [], ALLOWED | (LINES_OF_TEXT if package == "train" else set())
    for path in sorted((ROOT / package).rglob("*.py")):
        for name in sorted(set(names(path)) - allowed):
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
