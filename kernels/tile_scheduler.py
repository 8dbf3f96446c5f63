"""Tables of tiles, made once a mask on the host: which rows a tile has, where it walks, and which program works on it.

The rows of all batch entries are counted through here: row i of entry b is b * N + i.
"""

from heapq import heapreplace

import torch
from torch import Tensor

FORWARD_ITEM = 4  # steps that an item costs besides its own
BACKWARD_ITEM = 1
MARGIN = 0.04  # of the time that all take: by how much the last may end late
CONSUMER_ROWS = 64  # of an item, that are computed, or left out, together


def cut_rows(bound: Tensor, jump: int) -> tuple[Tensor, Tensor]:
    """(first rows, ends) of the pieces of rows (B, N) inside which `bound` does not jump by `jump` from row to row; int64."""
    starts = torch.ones(bound.shape, dtype=torch.bool, device="cpu")
    starts[:, 1:] = bound.diff() >= jump
    rows = starts.flatten().nonzero()[:, 0]
    return rows, torch.cat((rows[1:], torch.tensor([bound.numel()], device="cpu")))


def lay(start: Tensor, stop: Tensor, rows: int, from_end: bool) -> tuple[Tensor, Tensor]:
    """(first, end) of the tiles of `rows` rows of pieces; the one with fewer is the first of its piece, or else the last."""
    counts = _ceil_div(stop - start, rows)
    piece, index = _unroll(counts)
    start, stop = start[piece], stop[piece]
    if from_end:
        end = stop - (counts[piece] - 1 - index) * rows
        return torch.maximum(end - rows, start), end
    first = start + index * rows
    return first, torch.minimum(first + rows, stop)


def walks(lo: Tensor, hi: Tensor, first: Tensor, end: Tensor, step: int, alignment: int) -> tuple[Tensor, ...]:
    """begin, num_masked_prefix, num_unmasked, num_masked of tiles, see `Intervals.tiles`."""
    lo, hi = lo.flatten(), hi.flatten()
    begin = lo[first] // alignment * alignment
    total = _ceil_div((hi[end - 1] - begin).clamp(min=0), step) * (lo[first] < hi[end - 1])
    num_masked_prefix = torch.minimum(_ceil_div(lo[end - 1] - begin, step), total)
    num_unmasked = ((hi[first] - begin).clamp(min=0) // step - num_masked_prefix).clamp(min=0)
    return begin, num_masked_prefix, num_unmasked, total - num_unmasked


def by_length(first: Tensor, end: Tensor, walks: tuple[Tensor, ...], batch: int, num_rows: int) -> Tensor:
    """The table (batch, T, 6) of these tiles: those of each entry, the longest walk first."""
    entry = first // max(num_rows, 1)
    _, _, num_unmasked, num_masked = walks
    order = (num_unmasked + num_masked).argsort(descending=True, stable=True)
    order = order[entry[order].argsort(stable=True)]
    tiles = torch.stack([x.int() for x in (first - entry * num_rows, end - entry * num_rows, *walks)], 1)[order]
    entry, place = _unroll(torch.bincount(entry, minlength=batch))
    table = torch.zeros(batch, int(place.max()) + 1 if len(place) else 0, 6, dtype=torch.int32, device="cpu")
    table[entry, place] = tiles
    return table


def in_sections(tiles: Tensor, heads: int, sections: int) -> Tensor:
    """The tiles (B, T, 6) of every head as items (N, 8), with head and batch entry behind, in the order in which to begin them.

    The heads of the whole batch are worked off in sections, of as equal size as can be; in a section the longest walks first.
    """
    batch, num_tiles = tiles.shape[:2]
    all_heads = torch.arange(batch * heads, device="cpu")
    entry = all_heads // heads
    place = torch.stack((all_heads % heads, entry), 1).int()
    items = torch.cat((tiles[entry], place[:, None].expand(-1, num_tiles, -1)), 2).flatten(0, 1)
    turn = (all_heads * sections // len(all_heads))[:, None] * num_tiles + torch.arange(num_tiles, device="cpu")
    items = items[turn.flatten().argsort(stable=True)]
    return items[items[:, 0] < items[:, 1]]  # without tiles that fill up entries


def split_last(items: Tensor, programs: int, rows: int) -> Tensor:
    """Items of up to `rows` rows, but two for each of a last round if that leaves half of the programs without one."""
    left = len(items) % programs
    if rows <= CONSUMER_ROWS or len(items) < programs or 2 * left > programs:
        return items
    whole, last = items.split((len(items) - left, left))
    most, rest = last.clone(), last.clone()
    most[:, 1] = torch.minimum(most[:, 1], most[:, 0] + rows - CONSUMER_ROWS)
    rest[:, 0] = most[:, 1]
    return torch.cat((whole, most, rest[rest[:, 0] < rest[:, 1]]))


def forward_times(items: Tensor) -> Tensor:
    """How long items take, roughly: steps with half of the rows take more than half of the time."""
    computed = _ceil_div(items[:, 1] - items[:, 0], CONSUMER_ROWS)
    return (items[:, 4] + items[:, 5] + FORWARD_ITEM) * (1 + computed)


def backward_times(items: Tensor, group: int) -> Tensor:
    """How long items over whose steps `group` query heads walk in turn take, roughly: as long with few rows as with all."""
    return (items[:, 4] + items[:, 5]) * group + BACKWARD_ITEM


def deal(items: Tensor, times: Tensor, programs: int) -> Tensor:
    """Items (N, 8) that take `times` (N,), dealt out in their order, each to the program that has least to do so far.

    Times are integers, of any unit. Sections begin anew with the longest walks: if programs just took turns, some would get a
    seventh more than their share. Where the longest of the last sections would still begin too late, as under packed documents,
    they begin before their turn.

    Returns:
        int32 (n, programs, 8), item by item of each program: first, end, begin, num_masked_prefix, num_unmasked, num_masked as in
        `Intervals.tiles`; head, batch entry. What follows a program's last item, one at least, is all 0. Fewer programs if
        there are fewer items, but one at least.
    """
    if not len(items):
        return items.new_zeros(1, 1, items.shape[1])
    programs = min(programs, len(items))
    owner, end = _share_out(times, programs)
    if end > (1 + MARGIN) * times.sum().item() / programs:
        order = _early(times, programs)
        early_owner, early_end = _share_out(times[order], programs)
        if early_end < end:
            items, owner = items[order], early_owner
    order = owner.argsort(stable=True)
    owner, place = _unroll(torch.bincount(owner))
    dealt = torch.zeros(int(place.max()) + 2, programs, items.shape[1], dtype=items.dtype, device="cpu")
    dealt[place, owner] = items[order]
    return dealt


def _share_out(times: Tensor, programs: int) -> tuple[Tensor, int]:
    """(owner of each item, if that is the program that has least to do so far, when the last program ends)."""
    shares = list(range(programs))  # share * programs + program: a heap of numbers is the fastest
    least = []
    for time in (times.long() * programs).tolist():
        least.append(shares[0])
        heapreplace(shares, shares[0] + time)
    return torch.tensor(least, device="cpu") % programs, max(shares) // programs


def _early(times: Tensor, programs: int) -> Tensor:
    """An order in which every item begins in its turn, or so early that it ends MARGIN before all do."""
    turn = (times.cumsum(0) - times) / programs
    latest = (1 - MARGIN) * times.sum() / programs - times
    return torch.minimum(turn, latest).argsort(stable=True)


def _unroll(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Of counts[i] elements of every owner i in a row, (their owner, their number among the owner's)."""
    owner = torch.repeat_interleave(counts)
    return owner, torch.arange(len(owner), device="cpu") - (counts.cumsum(0) - counts)[owner]


def _ceil_div(x: Tensor, y: int) -> Tensor:
    return (x + y - 1) // y
