"""Every number in docs/maths.md and docs/tour.md is computed from the code, and names in the tour exist in the code."""

import ast
import math
import re
from pathlib import Path

import pytest
import torch

from ringattn.kernels import blockwise
from ringattn.kernels.triton.common import choose_tile
from ringattn.planning.workload import Work, backward_work, forward_work
from scripts.labs.trace import Problem, table, trace_ring, trace_tiles

DOCS = Path(__file__).parents[1] / "docs"
MIB = 2**20


def works(rows: int, heads: int, key_heads: int, dim: int) -> tuple[Work, Work]:
    """The work of the forward and of the backward in bf16."""
    q, k = (torch.empty(1, rows, h, dim, dtype=torch.bfloat16, device="meta") for h in (heads, key_heads))
    return forward_work(q, k, k), backward_work(q, k, k)


def byte_formulas() -> list[str]:
    """The rows of the table of bytes per hop, with factors that follow from two head dims."""
    lines = []
    # The order of the dims does not matter, because the bytes are linear in the head dim.
    for name, small, large in zip(("forward", "backward"), works(1, 1, 1, 64), works(1, 1, 1, 128), strict=True):
        kv = sum(small.row_bytes.kv) / 64
        assert sum(large.row_bytes.kv) == 128 * kv
        per_dim = (sum(large.row_bytes.state) - sum(small.row_bytes.state)) / 64
        constant = sum(small.row_bytes.state) - 64 * per_dim
        state = f"T Hq ({per_dim:.0f} d + {constant:.0f})"
        lines.append(f"| {name:8} | {f'{kv:.0f} T Hkv d':13} | {state:17} |")
    return [*lines, fp8_formulas()]


def fp8_formulas() -> str:
    """The bytes per hop of an FP8 forward."""
    found = {}
    inputs = (torch.empty(1, 1, 1, dim, dtype=torch.bfloat16, device="meta") for dim in (64, 128))
    small, large = (forward_work(q, q, q, "fp8").row_bytes for q in inputs)
    for name in ("kv", "state"):
        at_64, at_128 = (sum(getattr(row_bytes, name)) for row_bytes in (small, large))
        found[name] = f"{(at_128 - at_64) / 64:.0f} d + {2 * at_64 - at_128:.0f}"
    kv, state = f"KV ring sends T Hkv ({found['kv']}) bytes", f"state ring sends T Hq ({found['state']}) bytes"
    return f"a forward hop of the {kv}. A forward hop of the {state}."


def worked_row() -> list[str]:
    """The lines of the worked row, from the states that the kernels compute."""
    problem = Problem.of_scores([1, 3, 2, 5])
    one, two, merged = trace_ring(problem, 2, 2).events
    found = trace_ring(problem, 2, 2)
    (alpha, beta), (out,), o = merged.alpha, found.out, merged.o[0]
    assert sum(math.exp(s - 5) for s in (1, 3, 2, 5)) == pytest.approx(merged.l, rel=1e-14)
    return [
        "The scores are [1, 3, 2, 5] and the values are [1, 2, 3, 4].",
        f"m = {one.m:.0f}, l = exp(-2) + exp(0) = {one.l:.3f}, o = exp(-2) * 1 + 1 * 2 = {one.o[0]:.3f}",
        f"m = {two.m:.0f}, l = exp(-3) + exp(0) = {two.l:.3f}, o = exp(-3) * 3 + 1 * 4 = {two.o[0]:.3f}",
        f"m = {merged.m:.0f}, alpha_one = exp(3 - 5) = {alpha:.3f}, alpha_two = {beta:.0f}",
        f"l = {alpha:.3f} * {one.l:.3f} + {two.l:.3f} = {merged.l:.3f}",
        f"o = {alpha:.3f} * {one.o[0]:.3f} + {two.o[0]:.3f} = {o:.3f}",
        f"out = {o:.3f} / {merged.l:.3f} = {out:.3f}, lse = 5 + log {merged.l:.3f} = {found.lse:.3f}",
    ]


def maths() -> list[str]:
    """The statements of docs/maths.md that contain numbers."""
    return [*worked_row(), *byte_formulas()]


def traced() -> list[str]:
    """The tables of the tour and the numbers that the text around them names."""
    problem = Problem.five_tokens()
    one, ring_of_two = trace_tiles(problem, 2), trace_ring(problem, 2, 2)
    first, second = one.events[:2]
    returned = ring_of_two.events[-1]
    lines = [line for found in (one, ring_of_two) for line in table(problem, found).splitlines() if line.startswith("|")]
    assert first.alpha == (0,)
    assert round(min(returned.alpha), 4) == round(second.alpha[0], 4)
    owner, other = ring_of_two.events[0].rank, next(event.rank for event in ring_of_two.events if event.hop == 1)
    return [
        *lines[2:],
        f"the first alpha is exp(-inf - {first.m}) = {first.alpha[0]:.0f}",
        f"raises the maximum from {first.m} to {second.m:.0f}",
        f"alpha = exp({first.m} - {second.m:.0f}) = {second.alpha[0]:.4f}",
        f"the query belongs to rank {owner}. In hop 0, rank {owner} computes a state over its own keys. "
        f"In hop 1, rank {other} has received the query, and computes another state over the keys of rank {other}. "
        f"In hop {returned.hop}, the second state returns to rank {owner}",
    ]


def tile_sizes() -> list[str]:
    """The tiles of two backends."""
    tile = choose_tile("forward", torch.bfloat16, 128)
    return [
        f"{tile.queries} and {tile.keys} in the Triton forward at head dim 128",
        f"`KEY_TILE`, {blockwise.QUERY_TILE} and {blockwise.KEY_TILE}, in",
    ]


def bytes_per_hop() -> list[str]:
    """The comparison of both rings."""
    lines = [
        "16,384 rows per rank, 16 query heads and head dim 128",
        "| | state ring | KV ring, 16 key heads | KV ring, 4 key heads |",
    ]
    for many, few in zip(works(16384, 16, 16, 128), works(16384, 16, 4, 128), strict=True):
        rates = sum(many.row_bytes.state), sum(many.row_bytes.kv), sum(few.row_bytes.kv)
        lines.append(f"| {many.direction} | " + " | ".join(f"{16384 * rate / MIB:.0f} MiB" for rate in rates) + " |")
    return lines


def rings() -> list[str]:
    """The largest ring of the tests."""
    tests = (DOCS.parent / "tests" / "ringattn" / "test_ring.py").read_text()
    largest = max(int(ranks) for ranks in re.findall(r"def test_(\d+)_ranks", tests))
    return [f"simulated rings of up to {largest} ranks"]


def tour() -> list[str]:
    """The statements of docs/tour.md that contain numbers."""
    return [*traced(), *tile_sizes(), *bytes_per_hop(), *rings()]


# Text in which digits are not results: names, citations, formulas without measured constants, headings and examples of code.
NOT_RESULTS = (
    r"```.*?```",  # examples of code, which tests/test_docs.py and the tests of the commands run
    r"`[^`]*`",
    r"\]\([^)]*\)",  # targets of links
    r"^#.*$",
    r"^\d\. ",
    r"FlashAttention-\d|H100|[Rr]ank 0 |Philox-\w+|FSDP2|FP8|exp2|log2|S\(j\)|\(j-1\)|Theta\([^)]*\)",
    r"\(Dao et al\., 2022, [a-z]+ [\w.]+\)|\(Milakov and Gimelshein, 2018\)",
    r"\b(?:16 bits|fp32|float64|bf16)\b",
    # The empty state, and the steps of a schedule.
    r"\(-inf, 0, 0\)|subtracts 0 instead|^    step [0P t].*$|state of step t - 1",
)


@pytest.mark.parametrize(("page", "statements"), [("maths.md", maths), ("tour.md", tour)], ids=("maths", "tour"))
def test_every_number_is_computed_from_the_code(page: str, statements) -> None:
    """Each computed statement is on the page, and the page has no other numbers."""
    text = (DOCS / page).read_text()
    for statement in statements():
        # A statement may contain line breaks. It is removed, so that only numbers that no statement covers are left.
        text, count = re.subn(r"\s+".join(map(re.escape, statement.split())), "", text)
        assert count, statement
    for pattern in NOT_RESULTS:
        text = re.sub(pattern, "", text, flags=re.DOTALL if pattern.startswith("```") else re.MULTILINE)
    numbers = [line for line in text.splitlines() if re.search(r"\d", line)]
    assert not numbers, "\n".join(numbers)


def function_source(path: str, name: str) -> str:
    """The source of a function, method or class of a file."""
    source = (DOCS.parent / path).read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return ast.get_source_segment(source, node)
    pytest.fail(f"{path} has no function {name}")


def test_the_quoted_code_is_in_the_named_functions() -> None:
    """The code in the table of three words exists."""
    rows = re.findall(r"^\| [^|]+ \| `([\w/]+\.py)` \| `(\w+)` \| `(.+)` \|$", (DOCS / "tour.md").read_text(), re.MULTILINE)
    assert len(rows) >= 14
    for path, name, code in rows:
        assert code in function_source(path, name), (path, name, code)


FOLDERS = ("kernels", "ringattn", "train", "scripts", "tests")


@pytest.mark.parametrize("page", ["tour", "design", "hopper", "maths", "io"])
def test_names_on_the_pages_exist(page: str) -> None:
    """A name of a function or a constant that a page quotes is defined somewhere in the code, and every file exists."""
    text = re.sub(r"```.*?```", "", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL)
    files = {path.relative_to(DOCS.parent): path for folder in FOLDERS for path in (DOCS.parent / folder).rglob("*.py")}
    code = "\n".join(path.read_text() for path in files.values())
    for name in set(re.findall(r"`(_?[a-zA-Z]\w*)`", text)):
        assert re.search(rf"\b{name}\b", code), name
    for name in set(re.findall(r"`([\w/]*\w+\.py)`", text)):
        assert any(f"/{path}".endswith(f"/{name}") for path in files), name


def test_the_example_of_the_tour_runs(capsys: pytest.CaptureFixture) -> None:
    """The example prints the difference between the ring and one rank."""
    exec(re.search(r"```python\n(.*?)```", (DOCS / "tour.md").read_text(), re.DOTALL)[1], {})
    printed = re.fullmatch(r"tensor\((.*)\)", capsys.readouterr().out.strip())
    assert float(printed[1]) < 1e-5
