"""Intervals: their transpose, cuts, and the tables of tiles against plain Python."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.kernels.interval_mask import CUT, Intervals, dense, full, transpose
from ringattn.kernels.tile_scheduler import backward_times, forward_times
from tests.kernels.masks import MASKS, intervals_of, random_intervals

WINDOW = torch.tensor([[0, 0, 1]]), torch.tensor([[1, 2, 3]])


def written_out(intervals: Intervals) -> torch.Tensor:
    return dense(intervals.lo, intervals.hi, intervals.num_keys)


def packed(lengths: list[int]) -> Intervals:
    """Causal documents of these lengths."""
    ends = torch.tensor(lengths).cumsum(0)
    lo = torch.repeat_interleave(ends - torch.tensor(lengths), torch.tensor(lengths))[None]
    return Intervals.of(lo, 1 + torch.arange(sum(lengths))[None], sum(lengths))


def test_full_sees_every_key():
    assert written_out(full(3, 5)).all()


def test_dense_of_a_window():
    mask = Intervals.of(*WINDOW, 4)
    assert mask.lo.dtype == mask.hi.dtype == torch.int32
    assert (mask.batch, mask.num_rows, mask.num_keys) == (1, 3, 4)
    assert written_out(mask).int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]]


def test_transpose_of_a_window():
    mask = Intervals.of(*WINDOW, 4)
    assert mask.transposed is mask.transposed
    assert mask.transposed.lo.tolist() == [[0, 1, 2, 3]]
    assert mask.transposed.hi.tolist() == [[2, 3, 3, 3]]  # key 3 is seen by no query: [3, 3)
    assert (mask.transposed.num_rows, mask.transposed.num_keys) == (4, 3)


@pytest.mark.parametrize("shape", [(50, 50), (33, 70), (70, 33), (1, 9), (9, 1)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_named_masks_are_valid(mask, shape):
    lo, hi = intervals_of(mask, *shape)
    for bound in (lo, hi):
        assert bound.dtype == torch.int32
        assert bound.min() >= 0 and bound.max() <= shape[1]
        assert (bound.diff() >= 0).all()


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 3), st.integers(0, 2**32))
def test_transpose_matches_dense(num_queries, num_keys, batch, seed):
    lo, hi = random_intervals(num_queries, num_keys, seed, batch)
    query_lo, query_hi = transpose(lo, hi, num_keys)
    assert query_lo.dtype == query_hi.dtype == torch.int32
    assert (query_lo.diff() >= 0).all() and (query_hi.diff() >= 0).all()
    transposed = dense(query_lo, query_hi, num_queries)
    assert torch.equal(transposed.mT, dense(lo, hi, num_keys))


@given(st.integers(1, 30), st.integers(1, 30), st.data())
def test_cut_matches_dense(num_queries, num_keys, data):
    whole = Intervals.of(*random_intervals(num_queries, num_keys, data.draw(st.integers(0, 2**32)), 2), num_keys)
    ends = (sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in (num_queries, num_keys))
    rows, keys = (slice(*pair) for pair in ends)
    assert torch.equal(written_out(whole.cut(rows, keys)), written_out(whole)[:, rows, keys])


BAD = {
    "shapes": ((WINDOW[0], WINDOW[1][:, 1:]), "hi (1, 2)"),
    "dimensions": ((WINDOW[0][0], WINDOW[1][0]), "must be (1 or batch, query rows)"),
    "dtype": ((WINDOW[0].float(), WINDOW[1]), "lo is torch.float32"),
    "device": ((WINDOW[0], WINDOW[1].to("meta")), "hi is torch.int64 on meta"),
    "order": ((WINDOW[0], WINDOW[1].flip(1)), "hi must never decrease"),
    "negative": ((WINDOW[0] - 1, WINDOW[1]), "lo must never decrease along a row, and stay within [0, 4]"),
    "too large": ((WINDOW[0], WINDOW[1] + 2), "hi must never decrease along a row, and stay within [0, 4]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_bounds_are_refused(case):
    bounds, message = BAD[case]
    with pytest.raises(ValueError) as refused:
        Intervals.of(*bounds, 4)
    assert message in str(refused.value)


def plain_walk(lo: list[int], hi: list[int], first: int, end: int, step: int, aligned: bool) -> list[int]:
    """begin, num_masked_prefix, num_unmasked and num_masked, a step at a time."""
    rows, begin = range(first, end), lo[first]
    while aligned and begin % step:
        begin -= 1
    num_steps = math.ceil((hi[end - 1] - begin) / step) if lo[first] < hi[end - 1] else 0
    # whether all rows see all keys of a step
    starts = [begin + i * step for i in range(num_steps)]
    unmasked = [all(lo[row] <= start and start + step <= hi[row] for row in rows) for start in starts]
    return [begin, unmasked.index(True) if any(unmasked) else None, sum(unmasked), num_steps - sum(unmasked)]


def check_table(intervals: Intervals, rows: int, step: int, cut: bool, aligned: bool = False) -> None:
    table = intervals.tiles(rows, step, cut, aligned)
    assert table is intervals.tiles(rows, step, cut, aligned)
    assert table.dtype == torch.int32 and table.shape[0] == intervals.batch and table.shape[2] == 6
    for tiles, lo, hi in zip(table.tolist(), intervals.lo.tolist(), intervals.hi.tolist(), strict=True):
        lengths = [tile[4] + tile[5] for tile in tiles]
        assert lengths == sorted(lengths, reverse=True)
        covered = [row for first, end, *_ in tiles for row in range(first, end)]
        assert sorted(covered) == list(range(intervals.num_rows))
        for first, end, *walk in tiles:
            if first == end:
                assert [first, end, *walk] == [0] * 6
                continue
            assert 0 < end - first <= rows
            assert cut or (first % rows == 0 and end == min(first + rows, intervals.num_rows))
            expected = plain_walk(lo, hi, first, end, step, aligned)
            # where no step is unmasked, it does not matter at which one they would begin
            assert walk == expected or (expected[1] is None and walk[::2] == expected[::2] and walk[3] == expected[3])
        order = [(-length, first) for length, (first, end, *_) in zip(lengths, tiles, strict=True) if first < end]
        assert order == sorted(order)


sizes = st.sampled_from([(1, 1), (3, 2), (8, 8), (16, 5)])


options = st.tuples(st.booleans(), st.booleans())


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 3), sizes, options, st.integers(0, 2**32))
def test_tiles_of_random_masks(num_queries, num_keys, batch, size, options, seed):
    intervals = Intervals.of(*random_intervals(num_queries, num_keys, seed, batch), num_keys)
    check_table(intervals, *size, *options)
    check_table(intervals.transposed, *size, *options)


@pytest.mark.parametrize("shape", [(100, 130), (130, 100)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_tiles_of_named_masks(mask, shape):
    intervals = Intervals.of(*intervals_of(mask, *shape), shape[1])
    for size in ((8, 4), (32, 16)):
        check_table(intervals, *size, True)
        check_table(intervals.transposed, *size, True)


@given(st.lists(st.integers(1, 150), min_size=1, max_size=6), sizes)
def test_tiles_of_packed_documents(lengths, size):
    """No tile reaches over the end of a document of several tiles; without such documents all tiles but one are whole."""
    rows, step = size
    intervals = packed(lengths)
    for seen in (intervals, intervals.transposed):
        check_table(seen, rows, step, True)
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    tiles = [tile[:2] for tile in intervals.tiles(rows, step)[0].tolist()]
    for length, end in zip(lengths[:-1], ends, strict=False):
        assert length < CUT * rows or not any(first < end < stop for first, stop in tiles)
    tiles_of_keys = [tile[:2] for tile in intervals.transposed.tiles(rows, step)[0].tolist()]
    for length, end in zip(lengths[1:], ends, strict=False):
        assert length < CUT * rows or not any(first < end < stop for first, stop in tiles_of_keys)
    if max(lengths) < CUT * rows:
        total = sum(lengths)
        assert {end for _, end in tiles} == set(range(total, 0, -rows))
        assert {first for first, _ in tiles_of_keys} == set(range(0, total, rows))


def test_tiles_of_two_documents():
    """Of 9 and of 10 rows: the tile of one row begins the first document, or of keys ends it."""
    intervals = packed([9, 10])
    assert intervals.tiles(2, 3)[0, :, :2].sort(0).values.tolist() == [
        *([0, 1], [1, 3], [3, 5], [5, 7], [7, 9]),
        *([9, 11], [11, 13], [13, 15], [15, 17], [17, 19]),
    ]
    assert intervals.transposed.tiles(2, 3)[0, :, :2].sort(0).values.tolist() == [
        *([0, 2], [2, 4], [4, 6], [6, 8], [8, 9]),
        *([9, 11], [11, 13], [13, 15], [15, 17], [17, 19]),
    ]


def test_entries_with_fewer_tiles_are_filled_up():
    one, two = packed([20]), packed([9, 11])
    both = Intervals.of(*(torch.cat(pair) for pair in zip(one.host, two.host, strict=True)), 20)
    table = both.tiles(2, 4)
    assert table.shape == (2, 11, 6)
    assert torch.equal(table[0, :10], one.tiles(2, 4)[0]) and (table[0, 10] == 0).all()
    assert torch.equal(table[1], two.tiles(2, 4)[0])


@pytest.mark.parametrize("group", [None, 1, 4])
@given(st.integers(1, 60), st.integers(0, 40), st.integers(1, 3), st.booleans(), st.integers(1, 9), st.integers(0, 2**32))
def test_items_deal_out_every_tile_of_every_head_once(group, num_queries, num_keys, batch, shared, programs, seed):
    heads = 3
    lo, hi = random_intervals(num_queries, num_keys, seed, 1 if shared else batch)
    intervals = Intervals.of(lo, hi, num_keys)
    options = 8, 4, batch, heads, min(2, batch * heads), programs, False, group
    items = intervals.items(*options)
    assert items is intervals.items(*options)
    there = items[..., 0] < items[..., 1]
    tiles = intervals.tiles(8, 4, aligned=group is not None).expand(batch, -1, -1).tolist()
    wanted = [[*tile, head, entry] for entry in range(batch) for head in range(heads) for tile in tiles[entry] if tile[1] > 0]
    assert sorted(items[there].tolist()) == sorted(wanted)
    assert items.shape[1] == min(programs, len(wanted)) and there[0].all()
    assert not there[-1].any() and (items[~there] == 0).all() and (there.int().diff(dim=0) <= 0).all()


def test_items_of_rows_that_see_nothing_may_be_left_out():
    lo = torch.zeros(1, 40, dtype=torch.int32)
    hi = torch.where(torch.arange(40) < 20, 0, 10)[None].int()
    intervals = Intervals.of(lo, hi, 10)
    everything, seeing = (intervals.items(8, 4, 1, 2, 1, 3, seeing=choice) for choice in (False, True))
    steps = everything[..., 4] + everything[..., 5]
    assert sorted(everything[steps > 0].tolist()) == sorted(seeing[seeing[..., 1] > 0].tolist())
    assert int(seeing[..., 0][seeing[..., 1] > 0].min()) == 16  # of rows 16 to 24 half see something
    nothing = Intervals.of(lo, lo, 10).items(8, 4, 1, 2, 1, 3, seeing=True)
    assert nothing.shape[1:] == (1, 8) and not nothing.any()
    assert not intervals.all_see and intervals.cut(slice(20, 40), slice(0, 10)).all_see
    assert intervals.num_seeing == 20


@pytest.mark.parametrize("lengths", [[8192], [50, 2000, 700, 4000, 90, 1100, 252]], ids=str)
def test_items_are_dealt_out_evenly(lengths):
    forward = packed(lengths).items(192, 64, 1, 16, 2, 132)
    backward = [packed(lengths).transposed.items(128, 64, 1, 16, sections, 132, True, 1) for sections in (4, 16)]
    for items, take in ((forward, forward_times), *[(x, partial(backward_times, group=1)) for x in backward]):
        there = items[..., 0] < items[..., 1]
        times = (take(items.flatten(0, 1)).view(there.shape) * there).sum(0).float()
        assert times.max() < 1.05 * times.mean()


def test_items_of_a_short_last_round_are_split():
    """25 tiles of 192 rows for 10 programs: three rounds leave five without, and 64 rows of the last five tiles go to those."""
    everything = full(25 * 192, 640)
    items = everything.items(192, 64, 1, 1, 1, 10)
    rows = items[..., 1] - items[..., 0]
    assert rows.sum(0).sort().values.tolist() == [2 * 192 + 64] * 5 + [2 * 192 + 128] * 5
    covered = torch.cat([torch.arange(*item[:2]) for item in items.flatten(0, 1).tolist()])
    assert torch.equal(covered.sort().values, torch.arange(25 * 192))
    backward = everything.items(192, 64, 1, 1, 1, 10, group=1)
    assert backward[..., 0].count_nonzero() == 24  # all but the first: none is split
    whole = everything.items(192, 64, 1, 1, 1, 25)
    assert whole.shape[:2] == (2, 25) and (whole[0, :, 1] - whole[0, :, 0] == 192).all()


@pytest.mark.parametrize("size", [(128, 64), (64, 128)], ids=str)
def test_cut_tiles_walk_less_under_packed_documents(size):
    intervals = packed([3000, 700, 5000, 90, 1100, 2500, 4000, 1900])
    for seen in (intervals, intervals.transposed):
        walked, aligned = (int(seen.tiles(*size, cut)[..., 4:].sum()) for cut in (True, False))
        assert walked < aligned


def test_tables_of_both_alignments():
    intervals = packed([9, 10])
    assert not torch.equal(intervals.tiles(4, 4), intervals.tiles(4, 4, aligned=True))


def test_a_cut_has_bounds_inside_its_keys():
    part = Intervals.of(*intervals_of("causal", 20, 20), 20).cut(slice(5, 15), slice(3, 9))
    assert part.hi.max() <= part.num_keys
    assert torch.equal(written_out(part.transposed).mT, written_out(part))
