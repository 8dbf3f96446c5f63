"""Tests of layouts: which positions each rank holds, as expected integers and as properties of random layouts."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn import Layout
from ringattn.layout import KINDS

EXPECTED = {
    "contiguous-8-over-4": (Layout.contiguous(8, 4), [[0, 1], [2, 3], [4, 5], [6, 7]]),
    "contiguous-7-over-3": (Layout.contiguous(7, 3), [[0, 1], [2, 3], [4, 5, 6]]),
    "zigzag-8-over-4": (Layout.zigzag(8, 4), [[0, 7], [1, 6], [2, 5], [3, 4]]),
    "zigzag-12-over-2": (Layout.zigzag(12, 2), [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]),
    "zigzag-7-over-2": (Layout.zigzag(7, 2), [[0, 5, 6], [1, 2, 3, 4]]),
    "striped-8-over-3": (Layout.striped(8, 3), [[0, 3, 6], [1, 4, 7], [2, 5]]),
    "striped-2-over-3": (Layout.striped(2, 3), [[0], [1], []]),
    "assigned-7-over-3": (Layout.assigned([1, 0, 0, 1], 2, 7, 3), [[2, 3, 4, 5], [0, 1, 6], []]),
    "zigzag-12-over-2-split-in-2": (Layout.zigzag(12, 2).split(2), [[0, 1, 2], [9, 10, 11], [3, 4, 5], [6, 7, 8]]),
    "assigned-7-over-2-split-in-2": (Layout.assigned([1, 0, 0, 1], 2, 7, 2).split(2), [[2, 3], [4, 5], [0], [1, 6]]),
    "assigned-4-over-2-with-spaces": (Layout("assigned-2:0, 1", 4, 2), [[0, 1], [2, 3]]),
    "contiguous-2-split-in-3": (Layout.contiguous(2, 1).split(3), [[], [0], [1]]),
}


@pytest.mark.parametrize(("layout", "expected"), EXPECTED.values(), ids=EXPECTED)
def test_positions(layout: Layout, expected: list[list[int]]) -> None:
    """The positions and the number of rows of every rank."""
    assert [layout.positions(rank).tolist() for rank in range(layout.ranks)] == expected
    assert [layout.rows(rank) for rank in range(layout.ranks)] == [len(positions) for positions in expected]


@given(st.sampled_from(KINDS), st.integers(1, 200), st.integers(1, 20))
def test_every_position_has_one_owner_and_shards_are_sorted(kind: str, seq_len: int, ranks: int) -> None:
    """Ranks differ by at most one token, or two in a zigzag layout, where every rank has two chunks."""
    layout = Layout(kind, seq_len, ranks)
    shards = [layout.positions(rank) for rank in range(ranks)]
    assert torch.cat(shards).sort().values.tolist() == list(range(seq_len))
    assert all((shard.diff() > 0).all() for shard in shards)
    rows = [layout.rows(rank) for rank in range(ranks)]
    assert rows == [len(shard) for shard in shards]
    assert max(rows) - min(rows) <= (2 if kind == "zigzag" else 1)


@given(st.data(), st.integers(1, 60), st.integers(1, 7), st.integers(1, 9), st.integers(1, 4))
def test_assigned_and_split_layouts(data: st.DataObject, seq_len: int, ranks: int, rows: int, parts: int) -> None:
    """Chunks are assigned to any ranks, and shards are split for Ulysses. Each position has one owner."""
    chunks = -(-seq_len // rows)
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=chunks, max_size=chunks))
    layout = Layout.assigned(owners, rows, seq_len, ranks).split(parts)
    shards = [layout.positions(rank) for rank in range(layout.ranks)]
    assert layout.ranks == ranks * parts
    assert torch.cat(shards).sort().values.tolist() == list(range(seq_len))
    assert all((shard.diff() > 0).all() for shard in shards)
    assert [len(shard) for shard in shards] == [layout.rows(rank) for rank in range(layout.ranks)]
    x = torch.randn(1, seq_len)
    assert torch.equal(layout.unshard([layout.shard(x, rank) for rank in range(layout.ranks)]), x)
    assert Layout(layout.kind, seq_len, layout.ranks) == layout  # operators carry layouts by these three values


@given(st.sampled_from(KINDS), st.integers(1, 50), st.integers(1, 9), st.integers(0, 2))
def test_unshard_undoes_shard(kind: str, seq_len: int, ranks: int, dim: int) -> None:
    """Joining the shards of a tensor returns the tensor, along any dimension."""
    layout = Layout(kind, seq_len, ranks)
    x = torch.randn(2, 3, seq_len).movedim(-1, dim)
    assert torch.equal(layout.unshard([layout.shard(x, rank, dim) for rank in range(ranks)], dim=dim), x)


@pytest.mark.parametrize("layout", [layout for layout, _ in EXPECTED.values()], ids=EXPECTED)
def test_results_belong_to_the_caller(layout: Layout) -> None:
    """A caller may modify the positions, for example to compute rotary embeddings. The pieces are read-only."""
    x = torch.arange(layout.seq_len)
    expected = layout.shard(x, 0, dim=0)
    layout.positions(0).zero_()
    assert torch.equal(layout.shard(x, 0, dim=0), expected)
    assert torch.equal(layout.positions(0), expected)
    for numbers in layout.pieces(0):
        with pytest.raises(ValueError, match="read-only"):
            numbers -= 1


def test_a_layout_used_in_inference_mode_works_in_training() -> None:
    """The cached positions are not inference tensors, which autograd rejects."""
    with torch.inference_mode():
        Layout.zigzag(17, 3).positions(1)
    x = torch.randn(1, 17, requires_grad=True)
    Layout.zigzag(17, 3).shard(x, 1).sum().backward()
    assert x.grad.sum() == Layout.zigzag(17, 3).rows(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seq_len", [1, 7, 40])
def test_a_ulysses_group_holds_a_shard_of_the_ring(kind: str, seq_len: int) -> None:
    """The tokens of the ranks of a Ulysses group, in the order of the ranks, are one shard of the ring's layout."""
    whole = Layout(kind, seq_len, 3)
    layout = whole.split(4)
    assert layout.ranks == 12
    assert layout.whole == whole
    assert layout.parts == 4
    for rank in range(3):
        of_group = torch.cat([layout.positions(4 * rank + peer) for peer in range(4)])
        assert torch.equal(of_group, whole.positions(rank))


# For each mistake: a function that makes it, and a part of the message.
INVALID = {
    "unknown-kind": (lambda: Layout("spiral", 8, 2), "'spiral'.*contiguous, zigzag, striped"),
    "no-owners-in-name": (lambda: Layout("assigned-2", 8, 2), "'assigned-2'.*assigned-<rows>:<rank>,<rank>"),
    "letters-as-owners": (lambda: Layout("assigned-2:0,x,0,0", 8, 2), "assigned-<rows>:<rank>,<rank>"),
    "no-rows-in-name": (lambda: Layout("assigned-:0,0,0,0", 8, 2), "assigned-<rows>:<rank>,<rank>"),
    "owner-outside-the-ring": (lambda: Layout.assigned([0, 2], 4, 8, 2), "'assigned-4'.* 2 owners .*0 to 2.* 0 to 1"),
    "too-many-owners": (lambda: Layout.assigned([0, 1, 1], 4, 8, 2), "'assigned-4'.* 3 owners"),
    "no-owners": (lambda: Layout.assigned([], 4, 8, 2), "owner"),
    "split-in-zero": (lambda: Layout("zigzag/0", 8, 2), "zigzag/0"),
    "split-in-one": (lambda: Layout("zigzag/1", 8, 2), "zigzag/1"),
    "split-in-letters": (lambda: Layout("zigzag/x", 8, 2), "zigzag/x"),
    "split-that-does-not-divide": (lambda: Layout("zigzag/3", 8, 2), "zigzag/3"),
    "split-without-number": (lambda: Layout("contiguous/", 8, 2), "parts.* at least 2"),
    "assigned-split-in-one": (lambda: Layout("assigned-4:0,1/1", 8, 2), "parts.* at least 2"),
    "split-method-in-zero": (lambda: Layout.zigzag(8, 2).split(0), "parts=0: .*at least 1"),
    "split-twice": (lambda: Layout.zigzag(8, 2).split(2).split(2), "split"),
    "empty-sequence": (lambda: Layout.zigzag(0, 2), "seq_len ?= ?0"),
    "positions-of-a-list": (lambda: Layout.zigzag(8, 2).positions([0]), r"rank=\[0\]: "),
    "positions-of-another-rank": (lambda: Layout.zigzag(8, 2).positions(2), "rank=2: .*from 0 to 1"),
    "rows-of-another-rank": (lambda: Layout.zigzag(8, 2).rows(2), "rank=2: .*from 0 to 1"),
    # 8.0 equals 8, so a cache could return the results of one for the other.
    "float-length": (lambda: Layout.zigzag(8.0, 2), "8.0.*integer"),
    "text-ranks": (lambda: Layout.zigzag(8, "2"), "integer"),
    "short-tensor": (lambda: Layout.zigzag(8, 2).shard(torch.zeros(1, 7), 0), "dimension 1 .* 7 .* 8"),
    "shards-of-another-layout": (lambda: Layout.zigzag(8, 2).unshard([torch.zeros(1, 2), torch.zeros(1, 6)]), "2, 6.*4, 4"),
    "shard-with-gradient": (lambda: Layout.zigzag(8, 2).unshard(torch.zeros(1, 4, requires_grad=True)), "gradient"),
}


@pytest.mark.parametrize(("call", "message"), INVALID.values(), ids=INVALID)
def test_invalid_layouts_raise_an_error(call: Callable[[], object], message: str) -> None:
    """The message names the value that was given."""
    with pytest.raises(ValueError, match=message):
        call()


def test_owners_may_be_a_tensor() -> None:
    """A list of owners and a tensor of owners give the same layout."""
    assert Layout.assigned(torch.tensor([0, 1]), 4, 8, 2) == Layout.assigned([0, 1], 4, 8, 2)
