"""Assign tiles to the programs of a kernel.

In this module, row i of batch entry b has the number b * N + i. A *work tile* consists of the six numbers of a tile from
`Intervals.tiles`, a head and a batch entry.
"""

from heapq import heappop, heappush, heapreplace

import numpy as np
from numpy import ndarray

# the fixed overhead of a work tile, in steps
FORWARD_TILE_OVERHEAD = 4
BACKWARD_TILE_OVERHEAD = 1

# Reorder work tiles if the last program would end more than 4% later than the average program.
MARGIN = 0.04

# A wgmma computes 64 rows, so each consumer warpgroup of a Hopper kernel computes 64 rows.
CONSUMER_ROWS = 64

# If one sort assigns fewer than MIN_BLOCK work tiles, a heap assigns the next HEAP_TILES.
MIN_BLOCK, HEAP_TILES = 24, 1024


def split_at_jumps(bound: ndarray, jump: int) -> tuple[ndarray, ndarray]:
    """Split the rows wherever `bound` (B, N) increases by at least `jump`. Return the (start, stop) of all ranges."""
    starts = np.ones(bound.shape, dtype=bool)
    starts[:, 1:] = np.diff(bound) >= jump
    rows = np.flatnonzero(starts)
    return rows, np.append(rows[1:], bound.size)


def split_into_tiles(start: ndarray, stop: ndarray, rows: int, from_end: bool) -> tuple[ndarray, ndarray]:
    """Split each range of rows [start, stop) into tiles, and return the (first, end) of all tiles.

    With `from_end`, the first tile of a range may have fewer than `rows` rows. Otherwise, the last tile may.
    """
    counts = _ceil_div(stop - start, rows)
    piece, index = _enumerate(counts)
    start, stop = start[piece], stop[piece]
    if from_end:
        end = stop - (counts[piece] - 1 - index) * rows
        return np.maximum(end - rows, start), end
    first = start + index * rows
    return first, np.minimum(first + rows, stop)


def tile_loops(lo: ndarray, hi: ndarray, first: ndarray, end: ndarray, step: int, alignment: int) -> tuple[ndarray, ...]:
    """For the tiles with rows [first, end), return begin, num_masked_prefix, num_unmasked and num_masked."""
    lo, hi, last = lo.ravel(), hi.ravel(), end - 1
    first_lo, first_hi, last_lo, last_hi = lo[first], hi[first], lo[last], hi[last]
    begin = first_lo // alignment * alignment
    # The bounds never decrease. Every row therefore attends to all keys in [last_lo, first_hi), and no row attends to a key
    # outside [first_lo, last_hi).
    num_steps = _ceil_div((last_hi - begin).clip(0), step) * (first_lo < last_hi)
    num_masked_prefix = np.minimum(_ceil_div(last_lo - begin, step), num_steps)
    num_unmasked = ((first_hi - begin).clip(0) // step - num_masked_prefix).clip(0)
    return begin, num_masked_prefix, num_unmasked, num_steps - num_unmasked


def tile_table(first: ndarray, end: ndarray, loops: tuple[ndarray, ...], batch: int, num_rows: int) -> ndarray:
    """Return the tiles of each batch entry, int32 (batch, T, 6), the longest loops first. Missing tiles are zeros."""
    entry = first // max(num_rows, 1)
    _, _, num_unmasked, num_masked = loops
    order = np.lexsort((-(num_unmasked + num_masked), entry))
    tiles = np.stack((first - entry * num_rows, end - entry * num_rows, *loops), 1, dtype=np.int32, casting="same_kind")[order]
    entry, index = _enumerate(np.bincount(entry, minlength=batch))
    table = np.zeros((batch, int(index.max()) + 1 if len(index) else 0, 6), dtype=np.int32)
    table[entry, index] = tiles
    return table


def order_by_head_group(tiles: ndarray, heads: int, num_groups: int) -> ndarray:
    """Return the work tiles (N, 8) of all heads, in the order in which they should start."""
    batch, num_tiles = tiles.shape[:2]
    all_heads = np.arange(batch * heads)
    work_tiles = np.empty((batch * heads, num_tiles, 8), dtype=np.int32)
    work_tiles[..., :6] = tiles[all_heads // heads]
    work_tiles[..., 6], work_tiles[..., 7] = (all_heads % heads)[:, None], (all_heads // heads)[:, None]
    group = all_heads * num_groups // len(all_heads)
    by_group = np.split(work_tiles, np.flatnonzero(np.diff(group)) + 1)
    work_tiles = np.concatenate([x.swapaxes(0, 1).reshape(-1, 8) for x in by_group])
    return work_tiles[work_tiles[:, 0] < work_tiles[:, 1]]


def split_last_wave(work_tiles: ndarray, programs: int, rows: int) -> ndarray:
    """If the last wave would occupy at most half of the programs, split its work tiles in two."""
    remainder = len(work_tiles) % programs
    if rows <= CONSUMER_ROWS or len(work_tiles) < programs or 2 * remainder > programs:
        return work_tiles
    whole, last = np.split(work_tiles, [len(work_tiles) - remainder])
    larger, smaller = last.copy(), last.copy()
    larger[:, 1] = np.minimum(larger[:, 1], larger[:, 0] + rows - CONSUMER_ROWS)
    smaller[:, 0] = larger[:, 1]
    return np.concatenate((whole, larger, smaller[smaller[:, 0] < smaller[:, 1]]))


def forward_times(work_tiles: ndarray) -> ndarray:
    """A forward step with half of the rows takes more than half as long as a full step."""
    num_consumers = _ceil_div(work_tiles[:, 1] - work_tiles[:, 0], CONSUMER_ROWS)
    return (work_tiles[:, 4] + work_tiles[:, 5] + FORWARD_TILE_OVERHEAD) * (1 + num_consumers)


def backward_times(work_tiles: ndarray, group: int) -> ndarray:
    """In the backward, a tile with few rows takes as long as a full tile."""
    return (work_tiles[:, 4] + work_tiles[:, 5]) * group + BACKWARD_TILE_OVERHEAD


def most_tiles(num_rows: int, num_columns: int, rows: int, jump: int) -> int:
    return num_rows // rows + 1 + num_columns // jump


def assign_work_tiles(
    work_tiles: ndarray, times: ndarray, programs: int, predecessors: ndarray | None = None, limit: int | None = None
) -> ndarray:
    """Assign each work tile (N, c), in the given order, to the program that has the least work so far.

    If some programs would end late, long work tiles start earlier than in the given order. Each number in `predecessors` is the
    index of a work tile that must start earlier, or -1.

    Return int32 (n, programs, c). Column p contains the work tiles of program p, followed by at least one entry of zeros.
    """
    if not len(work_tiles):
        return np.zeros((1, 1, work_tiles.shape[1]), dtype=work_tiles.dtype)
    programs = min(programs, len(work_tiles))
    program, end = _assign_greedily(times, programs)
    if end > (1 + MARGIN) * times.sum() / programs:
        order = _start_long_tiles_earlier(times, programs, predecessors)
        other_program, other_end = _assign_greedily(times[order], programs)
        if other_end < end:
            work_tiles, times, program = work_tiles[order], times[order], other_program
    if limit is not None and np.bincount(program).max() > limit:
        program = _assign_greedily(times, programs, limit)[0]
    # A stable sort keeps the order of each program's work tiles.
    order = program.astype(np.int16).argsort(kind="stable")  # a radix sort, which requires 16 bits
    program, index = _enumerate(np.bincount(program))
    assigned = np.zeros((int(index.max()) + 2, programs, work_tiles.shape[1]), dtype=work_tiles.dtype)
    assigned[index, program] = work_tiles[order]
    return assigned


def _assign_greedily(times: ndarray, programs: int, limit: int | None = None) -> tuple[ndarray, int]:
    # A load is (work so far) * programs + (index of the program). All loads therefore differ.
    steps = times.astype(np.int64) * programs
    if limit is not None:
        return _assign_with_limit(steps.tolist(), programs, limit)
    loads, least = np.arange(programs), np.empty_like(steps)
    done = 0
    while done < len(steps):
        block = steps[done : done + programs]
        results = loads[: len(block)] + block
        is_late = np.minimum.accumulate(results)[:-1] < loads[1 : len(block)]
        count = int(is_late.argmax()) + 1 if is_late.any() else len(block)
        least[done : done + count] = loads[:count]
        loads[:count] = results[:count]
        loads.sort()
        done += count
        if count < MIN_BLOCK and done < len(steps):
            heap, block = loads.tolist(), steps[done : done + HEAP_TILES].tolist()
            least[done : done + len(block)] = [heapreplace(heap, heap[0] + time) for time in block]
            loads = np.sort(heap)
            done += len(block)
    return least % programs, int(loads[-1]) // programs


def _assign_with_limit(steps: list[int], programs: int, limit: int) -> tuple[ndarray, int]:
    heap = list(range(programs))
    least: list[int] = []
    counts, end = [0] * programs, 0
    for time in steps:
        least.append(heappop(heap))
        end = max(end, least[-1] + time)
        counts[least[-1] % programs] += 1
        if counts[least[-1] % programs] < limit:
            heappush(heap, least[-1] + time)
    return np.array(least) % programs, end // programs


def _start_long_tiles_earlier(times: ndarray, programs: int, predecessors: ndarray | None) -> ndarray:
    """Order work tiles by start time. Each work tile starts early enough to end within (1 - MARGIN) times the mean time of a
    program. No work tile starts before its predecessor.
    """
    times = times.astype(np.int64)
    in_order = np.divide(times.cumsum() - times, programs, dtype=np.float32)
    latest = np.float32((1 - MARGIN) * times.sum() / programs) - times.astype(np.float32)
    start = np.minimum(in_order, latest)
    if predecessors is not None:
        # Predecessors come earlier in the list, so a loop from the end reads only start times that are final.
        starts, earlier = start.tolist(), predecessors.tolist()
        for i in reversed(range(len(starts))):
            if earlier[i] >= 0:
                starts[earlier[i]] = min(starts[earlier[i]], starts[i])
        start = np.array(starts)
    return start.argsort(kind="stable")


def _enumerate(counts: ndarray) -> tuple[ndarray, ndarray]:
    """For counts [2, 1], return [0, 0, 1] and [0, 1, 0]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]


def _ceil_div(x: ndarray, y: int) -> ndarray:
    return (x + y - 1) // y
