"""Interval masks: their transpose, their restriction to a block, and the tables of tiles against plain Python."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.kernels.interval_mask import DOCUMENT_JUMP, Intervals, dense, transpose
from tests.kernels.masks import MASKS, full, intervals_of, packed_intervals, random_intervals

WINDOW = torch.tensor([[0, 0, 1]]), torch.tensor([[1, 2, 3]])


def to_dense(intervals: Intervals) -> torch.Tensor:
    return dense(intervals.lo, intervals.hi, intervals.num_keys)


def packed(lengths: list[int]) -> Intervals:
    """The mask of causal documents with these lengths."""
    return Intervals.of(*packed_intervals([lengths]), sum(lengths))


def test_full_mask_contains_every_pair():
    assert to_dense(full(3, 5)).all()


def test_dense_form_of_a_window():
    mask = Intervals.of(*WINDOW, 4)
    assert mask.lo.dtype == mask.hi.dtype == torch.int32
    assert (mask.batch, mask.num_rows, mask.num_keys) == (1, 3, 4)
    assert to_dense(mask).int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]]


def test_transpose_of_a_window():
    mask = Intervals.of(*WINDOW, 4)
    assert mask.transposed is mask.transposed
    assert mask.transposed.lo.tolist() == [[0, 1, 2, 3]]
    assert mask.transposed.hi.tolist() == [[2, 3, 3, 3]]  # no query attends to key 3, whose interval is [3, 3)
    assert (mask.transposed.num_rows, mask.transposed.num_keys) == (4, 3)


@pytest.mark.parametrize("shape", [(50, 50), (33, 70), (70, 33), (1, 9), (9, 1)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_these_tests_have_valid_bounds(mask, shape):
    Intervals.of(*intervals_of(mask, *shape), shape[1])


@settings(max_examples=50)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 3), st.integers(0, 2**32))
def test_transpose_matches_the_dense_mask(num_queries, num_keys, batch, seed):
    lo, hi = random_intervals(num_queries, num_keys, seed, batch)
    query_lo, query_hi = transpose(lo, hi, num_keys)
    assert query_lo.dtype == query_hi.dtype == torch.int32
    assert (query_lo.diff() >= 0).all()
    assert (query_hi.diff() >= 0).all()
    assert torch.equal(dense(query_lo, query_hi, num_queries).mT, dense(lo, hi, num_keys))


@settings(max_examples=50)
@given(st.integers(1, 30), st.integers(1, 30), st.data())
def test_restriction_matches_the_dense_mask(num_queries, num_keys, data):
    whole = Intervals.of(*random_intervals(num_queries, num_keys, data.draw(st.integers(0, 2**32)), 2), num_keys)
    bounds = (sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in (num_queries, num_keys))
    queries, keys = (slice(*pair) for pair in bounds)
    part = whole.restrict(queries, keys)
    assert part.hi.numel() == 0 or part.hi.max() <= part.num_keys == keys.stop - keys.start
    assert torch.equal(to_dense(part), to_dense(whole)[:, queries, keys])
    assert torch.equal(to_dense(part.transposed).mT, to_dense(part))


BAD_BOUNDS = {
    "shapes": ((WINDOW[0], WINDOW[1][:, 1:]), "hi (1, 2)"),
    "dimensions": ((WINDOW[0][0], WINDOW[1][0]), "(3,)"),
    "dtype": ((WINDOW[0].float(), WINDOW[1]), "lo is torch.float32"),
    "device": ((WINDOW[0], WINDOW[1].to("meta")), "hi is torch.int64 on meta"),
    "order": ((WINDOW[0], WINDOW[1].flip(1)), "hi must never decrease"),
    "negative": ((WINDOW[0] - 1, WINDOW[1]), "within [0, 4]"),
    "too large": ((WINDOW[0], WINDOW[1] + 2), "within [0, 4]"),
}


@pytest.mark.parametrize("case", BAD_BOUNDS)
def test_bounds_must_be_ordered_integers_on_the_cpu(case):
    bounds, message = BAD_BOUNDS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        Intervals.of(*bounds, 4)


def plain_loop(lo: list[int], hi: list[int], first: int, end: int, step: int, aligned: bool) -> list:
    """Compute begin, num_masked_prefix, num_unmasked and num_masked of a tile, one step at a time."""
    rows, begin = range(first, end), lo[first]
    while aligned and begin % step:
        begin -= 1
    num_steps = math.ceil((hi[end - 1] - begin) / step) if lo[first] < hi[end - 1] else 0
    starts = [begin + i * step for i in range(num_steps)]
    unmasked = [all(lo[row] <= start and start + step <= hi[row] for row in rows) for start in starts]
    return [begin, unmasked.index(True) if any(unmasked) else None, sum(unmasked), num_steps - sum(unmasked)]


def check_table(intervals: Intervals, rows: int, step: int, split_documents: bool = True, aligned: bool = False) -> None:
    table = intervals.tiles(rows, step, split_documents, aligned)
    assert table is intervals.tiles(rows, step, split_documents, aligned)
    assert table.dtype == torch.int32
    assert table.shape[0] == intervals.batch
    assert table.shape[2] == 6
    for tiles, lo, hi in zip(table.tolist(), intervals.lo.tolist(), intervals.hi.tolist(), strict=True):
        lengths = [tile[4] + tile[5] for tile in tiles]
        assert lengths == sorted(lengths, reverse=True)
        covered = [row for first, end, *_ in tiles for row in range(first, end)]
        assert sorted(covered) == list(range(intervals.num_rows))
        for first, end, *loop in tiles:
            if first == end:
                assert [first, end, *loop] == [0] * 6
                continue
            assert 0 < end - first <= rows
            assert split_documents or (first % rows == 0 and end == min(first + rows, intervals.num_rows))
            expected = plain_loop(lo, hi, first, end, step, aligned)
            # Without unmasked steps, the number of masked steps before them is arbitrary.
            assert loop == expected or (expected[1] is None and loop[::2] == expected[::2] and loop[3] == expected[3])
        order = [(-length, first) for length, (first, end, *_) in zip(lengths, tiles, strict=True) if first < end]
        assert order == sorted(order)


SIZES = [(1, 1), (3, 2), (8, 8), (16, 5)]  # rows of a tile, columns of a step


@settings(max_examples=50)
@given(
    *(st.integers(0, 60), st.integers(0, 60), st.integers(1, 3)),
    *(st.sampled_from(SIZES), st.booleans(), st.booleans(), st.integers(0, 2**32)),
)
def test_tiles_of_random_masks(num_queries, num_keys, batch, size, split_documents, aligned, seed):
    intervals = Intervals.of(*random_intervals(num_queries, num_keys, seed, batch), num_keys)
    check_table(intervals, *size, split_documents, aligned)
    check_table(intervals.transposed, *size, split_documents, aligned)


@pytest.mark.parametrize("shape", [(100, 130), (130, 100)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_tiles_of_named_masks(mask, shape):
    intervals = Intervals.of(*intervals_of(mask, *shape), shape[1])
    for size in ((8, 4), (32, 16)):
        check_table(intervals, *size)
        check_table(intervals.transposed, *size)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=6), st.sampled_from(SIZES))
def test_no_tile_crosses_the_end_of_a_long_document(lengths, size):
    """If no document spans several tiles, all tiles but one are full."""
    rows, step = size
    intervals = packed(lengths)
    for side in (intervals, intervals.transposed):
        check_table(side, rows, step)
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    tiles = [tile[:2] for tile in intervals.tiles(rows, step)[0].tolist()]
    for length, end in zip(lengths[:-1], ends, strict=False):
        assert length < DOCUMENT_JUMP * rows or not any(first < end < stop for first, stop in tiles)
    tiles_of_keys = [tile[:2] for tile in intervals.transposed.tiles(rows, step)[0].tolist()]
    for length, end in zip(lengths[1:], ends, strict=False):
        assert length < DOCUMENT_JUMP * rows or not any(first < end < stop for first, stop in tiles_of_keys)
    if max(lengths) < DOCUMENT_JUMP * rows:
        total = sum(lengths)
        assert {end for _, end in tiles} == set(range(total, 0, -rows))
        assert {first for first, _ in tiles_of_keys} == set(range(0, total, rows))


def test_tiles_of_two_documents():
    """The documents have 9 and 10 tokens. The one-token tile is the first of queries, or the last of keys."""
    intervals = packed([9, 10])
    assert intervals.tiles(2, 3)[0, :, :2].sort(0).values.tolist() == [
        *([0, 1], [1, 3], [3, 5], [5, 7], [7, 9]),
        *([9, 11], [11, 13], [13, 15], [15, 17], [17, 19]),
    ]
    assert intervals.transposed.tiles(2, 3)[0, :, :2].sort(0).values.tolist() == [
        *([0, 2], [2, 4], [4, 6], [6, 8], [8, 9]),
        *([9, 11], [11, 13], [13, 15], [15, 17], [17, 19]),
    ]


def test_batch_entries_with_fewer_tiles_are_padded():
    one, two = packed([20]), packed([9, 11])
    both = Intervals.of(*(torch.cat(pair) for pair in zip(one.host, two.host, strict=True)), 20)
    table = both.tiles(2, 4)
    assert table.shape == (2, 11, 6)
    assert torch.equal(table[0, :10], one.tiles(2, 4)[0])
    assert (table[0, 10] == 0).all()
    assert torch.equal(table[1], two.tiles(2, 4)[0])


@pytest.mark.parametrize("size", [(128, 64), (64, 128)], ids=str)
def test_splitting_documents_shortens_the_loops(size):
    intervals = packed([3000, 700, 5000, 90, 1100, 2500, 4000, 1900])
    for side in (intervals, intervals.transposed):
        split, unsplit = (int(side.tiles(*size, split_documents)[..., 4:].sum()) for split_documents in (True, False))
        assert split < unsplit


def test_aligned_and_unaligned_tables_are_cached_separately():
    intervals = packed([9, 10])
    assert not torch.equal(intervals.tiles(4, 4), intervals.tiles(4, 4, aligned=True))


def test_nonempty_rows_are_counted_over_all_batch_entries():
    hi = torch.tensor([[0, 0, 4], [0, 2, 3]])
    intervals = Intervals.of(torch.zeros_like(hi), hi, 5)
    assert intervals.num_nonempty_rows == 3 < intervals.lo.numel()
    restricted = intervals.restrict(slice(2, 3), slice(0, 5))
    assert restricted.num_nonempty_rows == restricted.lo.numel()


@pytest.mark.parametrize("length", [50, 300])
def test_longest_tile_of_a_window(length):
    hi = torch.arange(1, length + 1)[None]
    lo = (hi - 128).clamp(min=0)
    assert Intervals.of(lo, hi, length).longest_tile == min(length, 128 + 63)
    assert Intervals.of(lo, hi, length).longest_small_tiles == (min(length, 128 + 7), min(length, 128 + 15))
    # Wider intervals are in another batch entry: in the last row, the last 64 rows or all rows.
    for row in (length - 1, length - 64, 0):
        wide = torch.cat((hi, hi.where(torch.arange(length) < row, length)))
        expected = max(int(wide[b, min(i + 63, length - 1)] - lo[0, i]) for b in (0, 1) for i in range(length))
        assert Intervals.of(lo.expand(2, -1), wide, length).longest_tile == expected
    # The kernel must be correct for every mask that may replace this one.
    assert Intervals.of(lo, hi, length, is_replaced=True).longest_tile == length


@settings(max_examples=20)
@pytest.mark.parametrize("group", [None, 1, 4])
@given(st.integers(1, 60), st.integers(0, 40), st.integers(1, 3), st.booleans(), st.integers(1, 9), st.integers(0, 2**32))
def test_every_tile_of_every_head_is_one_work_tile(group, num_queries, num_keys, batch, shared, programs, seed):
    heads = 3
    lo, hi = random_intervals(num_queries, num_keys, seed, 1 if shared else batch)
    intervals = Intervals.of(lo, hi, num_keys)
    arguments = 8, 4, batch, heads, min(2, batch * heads), programs, False, group
    work_tiles = intervals.work_tiles(*arguments)
    assert work_tiles is intervals.work_tiles(*arguments)
    exists = work_tiles[..., 0] < work_tiles[..., 1]
    tiles = intervals.tiles(8, 4, aligned=group is not None).expand(batch, -1, -1).tolist()
    expected = [[*tile, head, entry] for entry in range(batch) for head in range(heads) for tile in tiles[entry] if tile[1] > 0]
    assert sorted(work_tiles[exists].tolist()) == sorted(expected)
    assert work_tiles.shape[1] == min(programs, len(expected))
    assert exists[0].all()
    # A program has no work tile after the zeros that end its list.
    assert not exists[-1].any()
    assert (work_tiles[~exists] == 0).all()
    assert (exists.int().diff(dim=0) <= 0).all()


def test_tiles_with_only_empty_intervals_may_be_skipped():
    lo = torch.zeros(1, 40, dtype=torch.int32)
    hi = torch.where(torch.arange(40) < 20, 0, 10)[None].int()
    intervals = Intervals.of(lo, hi, 10)
    everything, nonempty = (intervals.work_tiles(8, 4, 1, 2, 1, 3, skip_empty=choice) for choice in (False, True))
    steps = everything[..., 4] + everything[..., 5]
    exists = nonempty[..., 1] > 0
    assert sorted(everything[steps > 0].tolist()) == sorted(nonempty[exists].tolist())
    # The tile of the rows 16 to 24 is kept, because half of its intervals are not empty.
    assert int(nonempty[..., 0][exists].min()) == 16
    nothing = Intervals.of(lo, lo, 10).work_tiles(8, 4, 1, 2, 1, 3, skip_empty=True)
    assert nothing.shape[1:] == (1, 8)
    assert not nothing.any()


def test_tables_are_prepared_like_those_of_another_mask():
    used, new = packed([9, 10]), packed([4, 15])
    used.tiles(4, 4)
    used.transposed.work_tiles(8, 4, 1, 2, 1, 3, True, 2)
    new.prepare(used.requests())
    assert new._tables.keys() == used._tables.keys()
    assert new.transposed._tables.keys() == used.transposed._tables.keys()
    assert torch.equal(new.tiles(4, 4), packed([4, 15]).tiles(4, 4))
