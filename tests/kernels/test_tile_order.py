"""The fixed order of the additions to dq: every order of events leads to the same order of additions, and to no deadlock."""

import random
from collections import defaultdict

import pytest
from torch import Tensor

from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.tile_scheduler import backward_times
from tests.kernels.masks import MASKS, intervals_of, packed_intervals, random_intervals

KEYS = 128
# The names of the columns of a table.
FIRST, END, BEGIN, UNMASKED, MASKED, HEAD, ENTRY, DIRECTION, SLOT, PREDECESSOR, FREE = 0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11

DOCUMENTS = [[700, 2, 130, 65, 1800, 31], [2728], [1, 1, 1000, 900, 826]]
# lo and hi of the queries, and the number of keys.
PROBLEMS = {mask: (*intervals_of(mask, 1300, 1730), 1730) for mask in MASKS}
PROBLEMS |= {
    "one-query": (*intervals_of("full", 1, 700), 700),
    "one-key-tile": (*intervals_of("causal", 1300, 100), 100),
    "long-causal": (*intervals_of("causal", 5000, 5000), 5000),
    "packed-documents": (*packed_intervals(DOCUMENTS), sum(DOCUMENTS[0])),
}
PROBLEMS |= {f"random-{seed}": (*random_intervals(900, 2100, seed, batch=3), 2100) for seed in range(8)}


def num_visits(work_tile: list[int], group: int) -> int:
    return (work_tile[UNMASKED] + work_tile[MASKED]) * group


def run_programs(table: Tensor, group: int, step: int, resident: int, seed: int) -> dict[tuple, list[int]]:
    """Execute the visits of all programs in a random order that the waits allow.

    Args:
        table: from `Intervals.ordered_work_tiles`.
        group: number of query heads per key head.
        step: number of queries per query tile.
        resident: the number of programs that run at the same time. The others start in their order when a program has ended.

    Returns:
        For every (batch entry, query head, query tile), the first keys of the work tiles that visit it, in their order.
    """
    lists = [[x for x in column if x[END] > 0] for column in table.transpose(0, 1).tolist()]
    waiting = list(range(len(lists)))
    running, waiting = waiting[:resident], waiting[resident:]
    position, finished = [[0, 0] for _ in lists], defaultdict(lambda: (0, 0))
    visits, source = defaultdict(list), random.Random(seed)
    while running:
        stuck = True
        for program in source.sample(running, len(running)):
            index, visit = position[program]
            work_tile = lists[program][index]
            num_steps = num_visits(work_tile, 1)
            member, index_in_head = divmod(visit, num_steps)
            needed = (member, index_in_head + 1 - work_tile[FREE])
            if index_in_head >= work_tile[FREE] and finished[work_tile[PREDECESSOR]] < needed:
                continue
            stuck = False
            tile = work_tile[BEGIN] // step + index_in_head * work_tile[DIRECTION]
            visits[work_tile[ENTRY], work_tile[HEAD] * group + member, tile].append(work_tile[FIRST])
            finished[work_tile[SLOT]] = (member, index_in_head + 1)
            visit += 1
            if visit == num_visits(work_tile, group):
                index, visit = index + 1, 0
            position[program] = [index, visit]
            if index == len(lists[program]):
                running.remove(program)
                running += waiting[:1]
                waiting = waiting[1:]
        assert not stuck, "all programs wait for each other"
    return visits


@pytest.mark.parametrize("programs", [1, 5, 40, 2**31 - 1])
@pytest.mark.parametrize(("group", "step"), [(1, 128), (3, 64)])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_contributions_to_a_query_have_a_fixed_order(problem, group, step, programs):
    """Two random executions add to each query in the same order. If programs are unlimited, three run at a time."""
    lo, hi, num_keys = PROBLEMS[problem]
    batch, heads = max(lo.shape[0], 2), 3
    by_key = Intervals.of(lo, hi, num_keys).transposed
    table = by_key.ordered_work_tiles(KEYS, step, batch, heads, 1, programs, group)
    # The work tiles that visit each query tile, and the queries [lo, hi) that see any key of a work tile.
    expected, queries = defaultdict(set), {}
    for entry, tiles in enumerate(by_key.tiles(KEYS, step, aligned=True).expand(batch, -1, -1).tolist()):
        for first, end, begin, _, num_unmasked, num_masked in tiles:
            mask = min(entry, by_key.batch - 1)
            queries[entry, first] = by_key.host[0][mask, first].item(), by_key.host[1][mask, end - 1].item()
            for i in range(num_unmasked + num_masked):
                for head in range(heads * group):
                    expected[entry, head, begin // step + i].add(first)
    resident = 3 if programs > 40 else programs
    orders = [run_programs(table, group, step, resident, seed) for seed in range(2)]
    for order in orders:
        assert order.keys() == expected.keys()
        for key, firsts in order.items():
            assert len(firsts) == len(expected[key])
            assert set(firsts) == expected[key]
    # Work tiles with no query in common may have any order.
    for key, first_order in orders[0].items():
        place = {first: i for i, first in enumerate(orders[1][key])}
        for i, x in enumerate(first_order):
            for y in first_order[i + 1 :]:
                (x_lo, x_hi), (y_lo, y_hi) = queries[key[0], x], queries[key[0], y]
                if max(x_lo, y_lo) < min(x_hi, y_hi):
                    assert place[x] < place[y]


@pytest.mark.parametrize(("length", "step", "heads"), [(4096, 64, 4), (16384, 64, 2), (16384, 128, 4), (32768, 64, 1)])
def test_long_sequences_have_few_heads_per_head_group(length, step, heads):
    """The heads of a head group take turns, so the first work tiles belong to different heads."""
    by_key = Intervals.of(*intervals_of("causal", length, length), length).transposed
    table = by_key.ordered_work_tiles(KEYS, step, 1, 8, 1, 132, 1)
    order = sorted((x for x in table.flatten(0, 1).tolist() if x[END] > 0), key=lambda x: x[SLOT])
    assert [x[HEAD] for x in order[: 2 * heads]] == 2 * list(range(heads))


def test_documents_with_grouped_heads_balance_the_programs():
    """The long work tiles of the last heads start early enough, although they must not overtake their predecessors."""
    lengths = [5000, 300, 2900, 40, 3300, 900, 3944]
    by_key = Intervals.of(*packed_intervals([lengths]), sum(lengths)).transposed
    table = by_key.ordered_work_tiles(KEYS, 64, 1, 8, 1, 132, 4)
    work = backward_times(table.flatten(0, 1), 4).view(table.shape[:2]).where(table[..., END] > 0, 0).sum(0).double()
    assert work.max() < 1.15 * work.mean()
