"""Tables of tiles, computed on the host once per mask: the rows of a tile, its loop over columns, and the program that computes
it.

As in `ringattn.kernels.interval_mask`, rows are queries and columns are keys, or the reverse for a transposed mask. The rows of
all batch entries are numbered consecutively: row i of entry b has the number b * N + i. All tensors are on the CPU.

An entry of a table is (first, end, begin, num_masked_prefix, num_unmasked, num_masked), as `Intervals.tiles` explains. A work
tile is a tile of one head: the same six numbers, the head and the batch entry.
"""

from heapq import heapreplace

import torch
from torch import Tensor

# The time that a work tile takes in addition to its steps, in units of one step.
FORWARD_TILE_OVERHEAD = 4
BACKWARD_TILE_OVERHEAD = 1

# Work tiles are reordered if the last program would end later than the mean by more than this fraction.
MARGIN = 0.04

# A warp group of the Hopper forward computes this many rows of a work tile, or skips them if there are none.
CONSUMER_ROWS = 64


def split_at_jumps(bound: Tensor, jump: int) -> tuple[Tensor, Tensor]:
    """Split the rows where a bound jumps by at least `jump` from one row to the next, and between batch entries.

    Args:
        bound: int32 (B, N).
        jump: in columns.

    Returns:
        (first rows, ends) of the pieces, int64.
    """
    starts = torch.ones(bound.shape, dtype=torch.bool, device="cpu")
    starts[:, 1:] = bound.diff() >= jump
    rows = starts.flatten().nonzero()[:, 0]
    return rows, torch.cat((rows[1:], torch.tensor([bound.numel()], device="cpu")))


def split_into_tiles(start: Tensor, stop: Tensor, rows: int, from_end: bool) -> tuple[Tensor, Tensor]:
    """Split pieces of rows [start, stop) into tiles of `rows` rows and return their (first, end).

    One tile of a piece may have fewer rows: the first one with `from_end`, else the last one.
    """
    # From here on, every tensor has one element per tile: the piece it belongs to and its index in this piece.
    counts = _ceil_div(stop - start, rows)
    piece, index = _enumerate(counts)
    start, stop = start[piece], stop[piece]
    if from_end:
        end = stop - (counts[piece] - 1 - index) * rows
        return torch.maximum(end - rows, start), end
    first = start + index * rows
    return first, torch.minimum(first + rows, stop)


def tile_loops(lo: Tensor, hi: Tensor, first: Tensor, end: Tensor, step: int, alignment: int) -> tuple[Tensor, ...]:
    """Return begin, num_masked_prefix, num_unmasked and num_masked of the tiles [first, end), see `Intervals.tiles`.

    `alignment` divides begin.
    """
    lo, hi = lo.flatten(), hi.flatten()
    begin = lo[first] // alignment * alignment
    # The bounds never decrease. The rows of a tile together attend to [lo of the first, hi of the last), and all of them attend
    # to [lo of the last, hi of the first).
    num_steps = _ceil_div((hi[end - 1] - begin).clamp(min=0), step) * (lo[first] < hi[end - 1])
    num_masked_prefix = torch.minimum(_ceil_div(lo[end - 1] - begin, step), num_steps)
    num_unmasked = ((hi[first] - begin).clamp(min=0) // step - num_masked_prefix).clamp(min=0)
    return begin, num_masked_prefix, num_unmasked, num_steps - num_unmasked


def tile_table(first: Tensor, end: Tensor, loops: tuple[Tensor, ...], batch: int, num_rows: int) -> Tensor:
    """Sort the tiles of each batch entry, the longest loop first, into one table.

    Args:
        first, end: of the tiles, as consecutive numbers over the batch.
        loops: from `tile_loops`.
        batch, num_rows: number of batch entries, and of rows of each.

    Returns:
        int32 (batch, T, 6), where first and end count from the first row of the entry. Entries with fewer than T tiles are
        padded with zeros.
    """
    entry = first // max(num_rows, 1)
    _, _, num_unmasked, num_masked = loops
    # Two stable sorts order the tiles by batch entry, and within an entry by the length of the loop.
    order = (num_unmasked + num_masked).argsort(descending=True, stable=True)
    order = order[entry[order].argsort(stable=True)]
    tiles = torch.stack([x.int() for x in (first - entry * num_rows, end - entry * num_rows, *loops)], 1)[order]
    entry, index = _enumerate(torch.bincount(entry, minlength=batch))
    table = torch.zeros(batch, int(index.max()) + 1 if len(index) else 0, 6, dtype=torch.int32, device="cpu")
    table[entry, index] = tiles
    return table


def order_by_head_group(tiles: Tensor, heads: int, num_groups: int) -> Tensor:
    """Return the work tiles of all heads in the order in which they should start.

    The heads of the whole batch are split into groups of nearly equal size, and the work tiles of one group start before those
    of the next, so that the operands of a group stay in L2. Within a group, the longest loops start first.

    Args:
        tiles: int32 (B, T, 6) from `tile_table`.
        heads: number of heads of a batch entry.
        num_groups: number of head groups.

    Returns:
        int32 (N, 8): the tile, the head and the batch entry, without the padding of the table.
    """
    batch, num_tiles = tiles.shape[:2]
    all_heads = torch.arange(batch * heads, device="cpu")
    entry = all_heads // heads
    head_and_entry = torch.stack((all_heads % heads, entry), 1).int()
    work_tiles = torch.cat((tiles[entry], head_and_entry[:, None].expand(-1, num_tiles, -1)), 2).flatten(0, 1)
    # Sort by group first and by the index in the table second. Heads of the same group keep their order.
    rank = (all_heads * num_groups // len(all_heads))[:, None] * num_tiles + torch.arange(num_tiles, device="cpu")
    work_tiles = work_tiles[rank.flatten().argsort(stable=True)]
    # The padding of the table has first = end = 0.
    return work_tiles[work_tiles[:, 0] < work_tiles[:, 1]]


def split_last_wave(work_tiles: Tensor, programs: int, rows: int) -> Tensor:
    """Split each work tile of the last wave in two, if that wave would leave at least half of the programs without work.

    Args:
        work_tiles: int32 (N, 8), each of at most `rows` rows.
        programs: number of programs, and so of work tiles in a wave.
        rows: a multiple of CONSUMER_ROWS. The second part of a split tile has at most CONSUMER_ROWS rows.
    """
    remainder = len(work_tiles) % programs
    if rows <= CONSUMER_ROWS or len(work_tiles) < programs or 2 * remainder > programs:
        return work_tiles
    whole, last = work_tiles.split((len(work_tiles) - remainder, remainder))
    # The longer parts start first, and the short ones fill the idle programs.
    larger, smaller = last.clone(), last.clone()
    larger[:, 1] = torch.minimum(larger[:, 1], larger[:, 0] + rows - CONSUMER_ROWS)
    smaller[:, 0] = larger[:, 1]
    return torch.cat((whole, larger, smaller[smaller[:, 0] < smaller[:, 1]]))


def forward_times(work_tiles: Tensor) -> Tensor:
    """Estimate how long work tiles (N, 8) take in the forward. Steps with half of the rows take more than half of the time."""
    num_consumers = _ceil_div(work_tiles[:, 1] - work_tiles[:, 0], CONSUMER_ROWS)
    return (work_tiles[:, 4] + work_tiles[:, 5] + FORWARD_TILE_OVERHEAD) * (1 + num_consumers)


def backward_times(work_tiles: Tensor, group: int) -> Tensor:
    """Estimate how long work tiles (N, 8) take in the backward, where each of `group` query heads goes through all steps.

    A step takes the same time with few rows as with all.
    """
    return (work_tiles[:, 4] + work_tiles[:, 5]) * group + BACKWARD_TILE_OVERHEAD


def assign_work_tiles(work_tiles: Tensor, times: Tensor, programs: int) -> Tensor:
    """Assign work tiles in their order, each to the program that has the least work so far.

    Every head group starts with its longest loops. If the programs simply took turns, some would get a seventh more than their
    share. Under packed documents, the longest work tiles of the last head groups would still start too late. In that case they
    start earlier than their order says.

    Args:
        work_tiles: int32 (N, 8).
        times: integers (N,) in any unit.
        programs: maximal number of programs. Fewer are used if there are fewer work tiles, but always at least one.

    Returns:
        int32 (n, programs, 8). Column p contains the work tiles of program p in their order, followed by at least one row of
        zeros.
    """
    if not len(work_tiles):
        return work_tiles.new_zeros(1, 1, work_tiles.shape[1])
    programs = min(programs, len(work_tiles))
    program, end = _assign_greedily(times, programs)
    if end > (1 + MARGIN) * times.sum().item() / programs:
        order = _start_long_tiles_earlier(times, programs)
        other_program, other_end = _assign_greedily(times[order], programs)
        if other_end < end:
            work_tiles, program = work_tiles[order], other_program
    # A stable sort by program keeps the order in which each program takes its work tiles.
    order = program.argsort(stable=True)
    program, index = _enumerate(torch.bincount(program))
    assigned = torch.zeros(int(index.max()) + 2, programs, work_tiles.shape[1], dtype=work_tiles.dtype, device="cpu")
    assigned[index, program] = work_tiles[order]
    return assigned


def _assign_greedily(times: Tensor, programs: int) -> tuple[Tensor, int]:
    """Assign each work tile to the program with the least work so far. Return the programs, and when the last one ends."""
    # Each program is the number (its work so far) * programs + (its index), because a heap of plain integers is the fastest.
    heap = list(range(programs))
    least = []
    for time in (times.long() * programs).tolist():
        least.append(heap[0])
        heapreplace(heap, heap[0] + time)
    return torch.tensor(least, device="cpu") % programs, max(heap) // programs


def _start_long_tiles_earlier(times: Tensor, programs: int) -> Tensor:
    """Order work tiles by their start times, moved forward where a work tile would end too late.

    The start time of a work tile is the one it has in the given order, or the latest one with which it ends by (1 - MARGIN)
    times the mean, whichever is earlier.
    """
    in_order = (times.cumsum(0) - times) / programs
    latest = (1 - MARGIN) * times.sum() / programs - times
    return torch.minimum(in_order, latest).argsort(stable=True)


def _enumerate(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Number the elements of lists with `counts` elements: return, for every element, its list and its index in the list."""
    owner = torch.repeat_interleave(counts)
    return owner, torch.arange(len(owner), device="cpu") - (counts.cumsum(0) - counts)[owner]


def _ceil_div(x: Tensor, y: int) -> Tensor:
    return (x + y - 1) // y
