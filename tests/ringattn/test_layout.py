"""Which positions a rank holds, by literal integers and by property."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn import Layout
from ringattn.layout import KINDS

LITERAL = {
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
    "assigned-4-over-2-in-other-words": (Layout("assigned-2:0, 1", 4, 2), [[0, 1], [2, 3]]),
    "contiguous-2-split-in-3": (Layout.contiguous(2, 1).split(3), [[], [0], [1]]),
}


@pytest.mark.parametrize("layout, expected", LITERAL.values(), ids=LITERAL)
def test_positions(layout: Layout, expected: list[list[int]]) -> None:
    assert [layout.positions(rank).tolist() for rank in range(layout.ranks)] == expected
    assert [layout.rows(rank) for rank in range(layout.ranks)] == [len(positions) for positions in expected]


@given(st.sampled_from(KINDS), st.integers(1, 200), st.integers(1, 20))
def test_every_position_has_one_owner_and_shards_are_sorted(kind: str, seq_len: int, ranks: int) -> None:
    layout = Layout(kind, seq_len, ranks)
    shards = [layout.positions(rank) for rank in range(ranks)]
    assert torch.cat(shards).sort().values.tolist() == list(range(seq_len))
    assert all((shard.diff() > 0).all() for shard in shards)
    rows = [layout.rows(rank) for rank in range(ranks)]
    assert rows == [len(shard) for shard in shards]
    assert max(rows) - min(rows) <= (2 if kind == "zigzag" else 1)


@given(st.data(), st.integers(1, 60), st.integers(1, 7), st.integers(1, 9), st.integers(1, 4))
def test_dealt_and_split_layouts_too(data: st.DataObject, seq_len: int, ranks: int, rows: int, parts: int) -> None:
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
    assert Layout(layout.kind, seq_len, layout.ranks) == layout  # as an operator makes it


@given(st.sampled_from(KINDS), st.integers(1, 50), st.integers(1, 9), st.integers(0, 2))
def test_unshard_undoes_shard(kind: str, seq_len: int, ranks: int, dim: int) -> None:
    layout = Layout(kind, seq_len, ranks)
    x = torch.randn(2, 3, seq_len).movedim(-1, dim)
    assert torch.equal(layout.unshard([layout.shard(x, rank, dim) for rank in range(ranks)], dim=dim), x)


def test_a_layout_that_an_evaluation_used_serves_training() -> None:
    with torch.inference_mode():
        Layout.zigzag(17, 3).positions(1)
    x = torch.randn(1, 17, requires_grad=True)
    Layout.zigzag(17, 3).shard(x, 1).sum().backward()
    assert x.grad.sum() == Layout.zigzag(17, 3).rows(1)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown layout 'spiral'"):
        Layout("spiral", 8, 2)
    for kind in ("assigned-2", "assigned-2:0,x,0,0", "assigned-:0,0,0,0"):
        with pytest.raises(ValueError, match="write it as assigned-<rows>:<rank>,<rank>"):
            Layout(kind, 8, 2)
    with pytest.raises(
        ValueError, match="'assigned-4' names 2 owners from 0 to 2: give one for each chunk of 8 positions, from 0 to 1"
    ):
        Layout.assigned([0, 2], 4, 8, 2)
    with pytest.raises(ValueError, match="'assigned-4' names 3 owners"):
        Layout.assigned([0, 1, 1], 4, 8, 2)
    with pytest.raises(ValueError, match="no owners: give the rank of every chunk"):
        Layout.assigned([], 4, 8, 2)
    assert Layout.assigned(torch.tensor([0, 1]), 4, 8, 2) == Layout.assigned([0, 1], 4, 8, 2)
    for kind in ("zigzag/0", "zigzag/1", "zigzag/x", "zigzag/3", "contiguous/", "assigned-4:0,1/1"):
        with pytest.raises(ValueError, match="give 2 or more parts, which divide them"):
            Layout(kind, 8, 2)
    with pytest.raises(ValueError, match="in 0 parts"):
        Layout.zigzag(8, 2).split(0)
    with pytest.raises(ValueError, match="split one that is whole"):
        Layout.zigzag(8, 2).split(2).split(2)
    with pytest.raises(ValueError, match="seq_len = 0"):
        Layout.zigzag(0, 2)
    for ask in (Layout.positions, Layout.rows):
        with pytest.raises(ValueError, match="rank 2 of a layout over 2 ranks"):
            ask(Layout.zigzag(8, 2), 2)
    for wrong in ((8.0, 2), (8, "2")):  # 8.0 == 8 with the same hash: what is kept of one would serve the other
        with pytest.raises(ValueError, match="give an integer"):
            Layout.zigzag(*wrong)
    with pytest.raises(ValueError, match="dimension 1 has 7 rows"):
        Layout.zigzag(8, 2).shard(torch.zeros(1, 7), 0)
    with pytest.raises(ValueError, match="hold .2, 6. rows along dimension 1 but the layout's hold .4, 4."):
        Layout.zigzag(8, 2).unshard([torch.zeros(1, 2), torch.zeros(1, 6)])
    with pytest.raises(ValueError, match="unshard passes no gradient"):
        Layout.zigzag(8, 2).unshard(torch.zeros(1, 4, requires_grad=True))
