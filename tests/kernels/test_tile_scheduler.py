"""The assignment of work tiles to programs: balanced, in the order of head groups, with a full last wave."""

from functools import partial
from heapq import heapreplace

import numpy as np
import pytest
import torch

from ringattn.kernels import tile_scheduler
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.tile_scheduler import backward_times, forward_times
from tests.kernels.masks import full, packed_intervals


def packed(lengths: list[int]) -> Intervals:
    """The mask of causal documents with these lengths."""
    return Intervals.of(*packed_intervals([lengths]), sum(lengths))


def test_rows_are_split_where_a_bound_jumps_and_between_batch_entries():
    bound = np.array([[0, 0, 4, 5], [3, 3, 3, 7]])
    first, end = tile_scheduler.split_at_jumps(bound, 4)
    assert first.tolist() == [0, 2, 4, 7]
    assert end.tolist() == [2, 4, 7, 8]


@pytest.mark.parametrize(
    ("from_end", "expected"),
    [(True, [(0, 1), (1, 3), (3, 5), (5, 6)]), (False, [(0, 2), (2, 4), (4, 5), (5, 6)])],
    ids=["short-tile-first", "short-tile-last"],
)
def test_one_tile_of_a_piece_may_be_short(from_end, expected):
    tiles = tile_scheduler.split_into_tiles(np.array([0, 5]), np.array([5, 6]), 2, from_end)
    assert list(zip(*(x.tolist() for x in tiles), strict=True)) == expected


def test_heads_of_one_group_come_before_those_of_the_next():
    tiles = np.zeros((2, 2, 6), dtype=np.int32)
    tiles[0, :, 1] = tiles[1, 0, 1] = 1  # the second tile of the second batch entry is padding
    work_tiles = tile_scheduler.order_by_head_group(tiles, heads=2, num_groups=2)
    assert work_tiles[:, 6:].tolist() == [[0, 0], [1, 0], [0, 0], [1, 0], [0, 1], [1, 1]]


def test_head_groups_have_nearly_equal_sizes():
    tiles = np.ones((1, 2, 6), dtype=np.int32)
    tiles[..., 0] = 0
    heads = tile_scheduler.order_by_head_group(tiles, heads=5, num_groups=2)[:, 6].tolist()
    assert heads == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]


def test_work_tiles_go_to_the_program_with_the_least_work():
    work_tiles = np.arange(5, dtype=np.int32)[:, None].repeat(8, 1) + 1
    assigned = tile_scheduler.assign_work_tiles(work_tiles, np.array([5, 1, 1, 1, 2]), 2)
    assert assigned[..., 0].tolist() == [[1, 2], [0, 3], [0, 4], [0, 5], [0, 0]]


@pytest.mark.parametrize("programs", [1, 7, 132])
@pytest.mark.parametrize("kind", ["equal", "falling", "heavy tail", "alternating"])
def test_blocks_of_work_tiles_go_to_the_same_programs_as_single_ones(kind: str, programs: int) -> None:
    """A heap assigns one work tile after the other."""
    tail = (10 * np.random.default_rng(0).pareto(1, 3000)).astype(np.int64) + 1
    equal, alternating = np.full(3000, 3), np.tile([500, 1], 1500)
    times = {"equal": equal, "falling": -np.sort(-tail), "heavy tail": tail, "alternating": alternating}[kind]
    heap, expected = list(range(programs)), []
    for time in times.tolist():
        expected.append(heapreplace(heap, heap[0] + time * programs) % programs)
    got, end = tile_scheduler._assign_greedily(times, programs)
    assert got.tolist() == expected
    assert end == max(heap) // programs


def test_long_work_tiles_at_the_end_start_earlier():
    """In the given order, the work tile that takes 8 would start at 4 and end at 12, but the mean is 8."""
    work_tiles = np.arange(9, dtype=np.int32)[:, None].repeat(8, 1) + 1
    times = np.array([1] * 8 + [8])
    _, end = tile_scheduler._assign_greedily(times, 2)
    assert end == 12
    assigned = tile_scheduler.assign_work_tiles(work_tiles, times, 2)
    totals = [sum(8 if tile == 9 else 1 for tile in column if tile) for column in assigned[..., 0].T.tolist()]
    assert sorted(totals) == [8, 8]


def test_work_tiles_are_moved_forward_with_their_predecessors():
    """Work tile 9 takes 8, and waits for work tile 8, which waits for work tile 3. All three come first, in their order."""
    work_tiles = np.arange(9, dtype=np.int32)[:, None].repeat(8, 1) + 1
    times, predecessors = np.array([1] * 8 + [8]), np.full(9, -1)
    predecessors[8], predecessors[7] = 7, 2
    order = tile_scheduler._start_long_tiles_earlier(times, 2, predecessors).tolist()
    assert order == [2, 7, 8, 0, 1, 3, 4, 5, 6]
    assigned = tile_scheduler.assign_work_tiles(work_tiles, times, 2, predecessors)
    assert assigned[:3, :, 0].tolist() == [[3, 8], [9, 1], [0, 2]]


def test_a_limited_program_receives_no_more_work_tiles():
    """Without a limit, program 1 would compute all five work tiles that take 1. The order of each program stays the same."""
    work_tiles = np.arange(6, dtype=np.int32)[:, None].repeat(8, 1) + 1
    times = np.array([9, 1, 1, 1, 1, 1])
    assert tile_scheduler.assign_work_tiles(work_tiles, times, 2)[..., 0].T.tolist() == [[1, 0, 0, 0, 0, 0], [2, 3, 4, 5, 6, 0]]
    limited = tile_scheduler.assign_work_tiles(work_tiles, times, 2, limit=4)
    assert limited[..., 0].T.tolist() == [[1, 6, 0, 0, 0], [2, 3, 4, 5, 0]]
    assert tile_scheduler.assign_work_tiles(work_tiles, times, 2, limit=3).shape == (4, 2, 8)


def test_no_work_tiles_give_one_program_without_work():
    assigned = tile_scheduler.assign_work_tiles(np.zeros((0, 8), dtype=np.int32), np.zeros(0), 4)
    assert assigned.shape == (1, 1, 8)
    assert not assigned.any()


@pytest.mark.parametrize("lengths", [[8192], [50, 2000, 700, 4000, 90, 1100, 252]], ids=str)
def test_programs_have_nearly_equal_work(lengths):
    forward = packed(lengths).work_tiles(192, 64, 1, 16, 2, 132)
    backward = [packed(lengths).transposed.work_tiles(128, 64, 1, 16, groups, 132, True, 1) for groups in (4, 16)]
    for work_tiles, estimate in ((forward, forward_times), *[(x, partial(backward_times, group=1)) for x in backward]):
        exists = work_tiles[..., 0] < work_tiles[..., 1]
        times = (estimate(work_tiles.flatten(0, 1)).view(exists.shape) * exists).sum(0).float()
        assert times.max() < 1.05 * times.mean()


def test_work_tiles_of_a_short_last_wave_are_split():
    """There are 25 tiles of 192 rows for 10 programs. In the third wave, five programs take over 64 rows of the last tiles."""
    everything = full(25 * 192, 640)
    work_tiles = everything.work_tiles(192, 64, 1, 1, 1, 10)
    rows = work_tiles[..., 1] - work_tiles[..., 0]
    assert rows.sum(0).sort().values.tolist() == [2 * 192 + 64] * 5 + [2 * 192 + 128] * 5
    covered = torch.cat([torch.arange(*tile[:2]) for tile in work_tiles.flatten(0, 1).tolist()])
    assert torch.equal(covered.sort().values, torch.arange(25 * 192))


def test_work_tiles_of_the_backward_and_of_a_full_last_wave_stay_whole():
    everything = full(25 * 192, 640)
    backward = everything.work_tiles(192, 64, 1, 1, 1, 10, group=1)
    assert backward[..., 0].count_nonzero() == 24  # the first of the 25 tiles starts at row 0
    whole = everything.work_tiles(192, 64, 1, 1, 1, 25)
    assert whole.shape[:2] == (2, 25)
    assert (whole[0, :, 1] - whole[0, :, 0] == 192).all()


def test_times_count_steps_rows_and_heads():
    work_tiles = torch.tensor([[0, 192, 0, 0, 3, 1, 0, 0], [0, 64, 0, 0, 3, 1, 0, 0]])
    overhead = tile_scheduler.FORWARD_TILE_OVERHEAD
    assert forward_times(work_tiles).tolist() == [(4 + overhead) * 4, (4 + overhead) * 2]
    assert backward_times(work_tiles, 3).tolist() == [4 * 3 + tile_scheduler.BACKWARD_TILE_OVERHEAD] * 2
