"""Tests of planning from documents: all results equal those of a dense mask, for all masks and all layouts."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn import Layout, Mask
from ringattn.kernels import interval_mask
from ringattn.layout import KINDS
from ringattn.load_balance import TILE, work
from ringattn.planning.rank_plan import FIRST_SHARE, _local_intervals, overlaps, split_points
from ringattn.runs import RowsBefore, all_runs, positions_of_rows


def random_mask(generator: random.Random, seq_len: int) -> Mask:
    """Return a mask of any kind for one or several batch entries."""

    def lengths() -> list[int]:
        cuts = sorted(generator.sample(range(1, seq_len), generator.randint(0, min(seq_len - 1, 5))))
        return np.diff([0, *cuts, seq_len]).tolist()

    documents = generator.choice([None, lengths(), [lengths() for _ in range(3)]])
    create = generator.choice([Mask.causal, Mask.full])
    return create(generator.choice([None, 1, generator.randint(1, 2 * seq_len)]), documents)


def random_layout(generator: random.Random, seq_len: int, ranks: int) -> Layout:
    """Return a layout of any kind over at least `ranks` ranks."""
    if (kind := generator.choice([*KINDS, "assigned"])) == "assigned":
        rows = generator.randint(1, seq_len)
        layout = Layout.assigned([generator.randrange(ranks) for _ in range(-(-seq_len // rows))], rows, seq_len, ranks)
    else:
        layout = Layout(kind, seq_len, ranks)
    return layout.split(generator.choice([1, 1, 2, 3]))


def random_problem(seed: int, seq_len: int, ranks: int) -> tuple[Mask, Layout]:
    generator = random.Random(seed)
    return random_mask(generator, seq_len), random_layout(generator, seq_len, ranks)


def dense(mask: Mask, layout: Layout) -> list[list[torch.Tensor]]:
    """Return the mask of every pair of ranks: bool (B, query rows, key rows)."""
    whole = interval_mask.dense(*mask.intervals(layout.seq_len), layout.seq_len)
    positions = [layout.positions(rank) for rank in range(layout.ranks)]
    return [[whole[:, queries][:, :, keys] for keys in positions] for queries in positions]


def hull(is_visible: torch.Tensor) -> range:
    """Return the range from the first to the last true element."""
    found = is_visible.nonzero().flatten().tolist()
    return range(found[0], found[-1] + 1) if found else range(0)


def first_part(pairs: torch.Tensor) -> int:
    """Return the number of rows that together have FIRST_SHARE of the pairs. `pairs` has one element per row."""
    return int((pairs.cumsum(0) < FIRST_SHARE * int(pairs.sum())).sum()) + 1 if len(pairs) else 0


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 8))
@settings(max_examples=150)
def test_plans_from_documents_equal_the_dense_mask(seed: int, seq_len: int, ranks: int) -> None:
    """Compare overlaps, split points and local intervals for masks and layouts of all kinds."""
    check_plans(*random_problem(seed, seq_len, ranks))


@pytest.mark.parametrize("kind", [*KINDS, "assigned"])
def test_plans_of_every_layout_of_a_few_ranks(kind: str) -> None:
    """Random problems rarely have few ranks, and only few of them have any given layout."""
    for ranks, degree in itertools.product((1, 2, 3), (1, 2)):
        whole = Layout.assigned([i % ranks for i in range(7)], 2, 13, ranks) if kind == "assigned" else Layout(kind, 13, ranks)
        for mask in (Mask.causal(), Mask.causal(window=3), Mask.full(window=4), Mask.causal(documents=[[6, 7], [13]])):
            check_plans(mask, whole.split(degree))


def check_plans(mask: Mask, layout: Layout) -> None:
    """Compare the plans of all ranks with the dense mask."""
    allowed, found = dense(mask, layout), overlaps(mask, layout)
    for query_rank, row in enumerate(allowed):
        for key_rank, visible in enumerate(row):
            queries, keys = (range(*x[:, query_rank, key_rank].tolist()) for x in (found.queries, found.keys))
            assert (queries, keys) == (hull(visible.any(2).any(0)), hull(visible.any(1).any(0)))
            assert found.pairs[query_rank, key_rank] == int(visible.sum()) / len(visible)
            lo, hi = _local_intervals(mask, layout, query_rank, key_rank)
            assert torch.equal(interval_mask.dense(lo, hi, layout.rows(key_rank)), visible)
    assert mask.pairs(layout.seq_len) == sum(sum(x.sum((1, 2)) for x in row) for row in allowed).tolist()
    own = [allowed[rank][rank].sum(0) for rank in range(layout.ranks)]
    assert split_points(mask, layout, "queries") == tuple(first_part(pairs.sum(1)) for pairs in own)
    assert split_points(mask, layout, "keys") == tuple(first_part(pairs.sum(0)) for pairs in own)


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 8))
def test_runs_cover_all_rows(seed: int, seq_len: int, ranks: int) -> None:
    """The runs of a rank cover its rows, in both directions of the mask, and have the bounds of their first and last rows."""
    mask, layout = random_problem(seed, seq_len, ranks)
    lo, hi = mask.intervals(seq_len)
    for transposed, bounds in ((False, (lo, hi)), (True, interval_mask.transpose(lo, hi, seq_len))):
        runs = all_runs(mask, layout, transposed)
        for rank in range(layout.ranks):
            own = runs.select(np.flatnonzero(runs.rank == rank))
            covered = [row for first, count in zip(own.row, own.count, strict=True) for row in range(first, first + count)]
            assert covered == list(range(layout.rows(rank)))
            for i, rows in enumerate((own.row, own.row + own.count - 1)):
                positions = positions_of_rows(layout, rank, rows)
                assert np.array_equal(positions, layout.positions(rank).numpy()[rows])
                assert np.array_equal(own.lo[i], bounds[0].numpy()[:, positions])
                assert np.array_equal(own.hi[i], bounds[1].numpy()[:, positions])


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 8))
def test_rows_before_positions(seed: int, seq_len: int, ranks: int) -> None:
    """The counts equal a binary search in the positions of every rank."""
    (_, layout), positions = random_problem(seed, seq_len, ranks), np.arange(seq_len + 1)
    before = RowsBefore(layout, positions)
    for rank in range(layout.ranks):
        assert np.array_equal(before.rows(rank), np.searchsorted(layout.positions(rank).numpy(), positions))


@given(st.integers(0, 2**32), st.integers(1, 900), st.integers(1, 4))
@settings(max_examples=30)
def test_work_equals_a_count_of_tiles(seed: int, seq_len: int, ranks: int) -> None:
    """A tile of queries visits all keys from the lo of its first query to the hi of its last query."""
    mask, layout = random_problem(seed, seq_len, ranks)
    lo, hi = mask.intervals(seq_len)
    expected = torch.zeros(layout.ranks, layout.ranks, dtype=torch.int64)
    for query_rank, key_rank in itertools.product(range(layout.ranks), repeat=2):
        keys = layout.positions(key_rank)
        for tile in filter(len, layout.positions(query_rank).split(TILE)):
            for first, last in zip(lo[:, tile[0]], hi[:, tile[-1]], strict=True):
                rows = ((keys >= first) & (keys < last)).nonzero().flatten()
                expected[query_rank, key_rank] += int(rows[-1] // TILE - rows[0] // TILE) + 1 if len(rows) else 0
    assert torch.equal(work(mask, layout), expected)
