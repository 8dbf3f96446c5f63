"""Which layout gives every rank the same work: the mask is known, so the work can be counted before anything is computed.

Work is counted as the kernels do it, in tiles of 128 queries x 128 keys of which any pair is seen. A rank does the work of
its queries where keys travel, and that of its keys where queries travel: both must be equal on all ranks.

Packed documents of many lengths balance in no fixed layout, unless it split_points so finely that tiles of short documents are
mostly empty (striped). So chunks of the sequence are dealt as cards are: from the heaviest to the lightest, one to every rank
in each round, and those of a round such that the ranks draw level.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ringattn.layout import KINDS, Layout
from ringattn.mask import Mask, check_mask, shared_intervals

TILE = 128
CHUNKS = 64  # of a rank at most: as fine as balance needs, and few enough to deal in milliseconds
COARSEST = 8  # chunks of a rank at least: fewer could leave ranks with very unequal memory
SLACK = 1.04  # times an equal share of the work: what a layout with fewer messages is worth


def work(mask: Mask, layout: Layout) -> Tensor:
    """Tiles that each pair of shards computes, for all batch rows of the mask together: int64 (query ranks, key ranks)."""
    ranks, (lo, hi) = range(layout.ranks), shared_intervals(mask, layout.seq_len, layout.seq_len)
    ends = [_tile_ends(layout.positions(rank)) for rank in ranks]
    query_rank = torch.cat([torch.full((len(first),), rank, device="cpu") for rank, (first, _) in enumerate(ends)])
    first, last = (torch.cat(x) for x in zip(*ends, strict=True))
    lo, hi = lo[:, first].contiguous(), hi[:, last].contiguous()
    tiles = torch.zeros(layout.ranks, layout.ranks, dtype=torch.int64, device="cpu")
    for key_rank in ranks:
        keys = layout.positions(key_rank)
        begin, end = torch.searchsorted(keys, lo), torch.searchsorted(keys, hi)
        seen = torch.where(begin < end, -(-end // TILE) - begin // TILE, 0).sum(0)
        tiles[:, key_rank].index_add_(0, query_rank, seen)
    return tiles


def balanced_layout(mask: Mask, seq_len: int, ranks: int) -> Layout:
    """The layout whose busiest rank has least to do under `mask`: contiguous, zigzag, striped, or chunks dealt for this mask.

    The first of them, in this order, that comes within 4% of an equal share: the fewer pieces, the fewer ranks that must talk.
    Follows from the arguments alone, so all ranks agree. Shards differ in length by less than two chunks of 128 rows, or of
    S / (64 P) rounded up to tiles where that is more. Takes some milliseconds for 65,536 positions on 8 ranks.

    Args:
        mask: of the step. Where batch rows have their own documents, their work counts together.
        seq_len: S, positions of the sequence.
        ranks: P.

    Raises:
        ValueError: no mask, one of another length, or fewer than one position or rank.
    """
    check_mask(mask)
    return _balanced_layout(mask, seq_len, ranks)


@lru_cache(maxsize=8)
def _balanced_layout(mask: Mask, seq_len: int, ranks: int) -> Layout:
    candidates = [Layout(kind, seq_len, ranks) for kind in KINDS]
    mask.check(seq_len)
    if seq_len >= COARSEST * TILE * ranks:
        candidates.append(_deal(mask, seq_len, ranks))
    tiles = [work(mask, layout) for layout in candidates]
    share = min(int(x.sum()) for x in tiles) / ranks
    most = [int(max(x.sum(1).max(), x.sum(0).max())) for x in tiles]
    good_enough = max(min(most), SLACK * share)
    return next(layout for layout, tiles in zip(candidates, most, strict=True) if tiles <= good_enough)


def _tile_ends(positions: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last position of every tile of a shard."""
    first = torch.arange(0, len(positions), TILE, device="cpu")
    return positions[first], positions[(first + TILE).clamp(max=len(positions)) - 1]


def _deal(mask: Mask, seq_len: int, ranks: int) -> Layout:
    tiles_a_chunk = max(1, -(-seq_len // (TILE * CHUNKS * ranks)))
    costs = _chunk_costs(mask, seq_len, tiles_a_chunk)
    order = costs.sum(1).argsort(descending=True, stable=True)
    load = torch.zeros(2, ranks, dtype=torch.float64, device="cpu")
    owners = torch.empty(len(costs), dtype=torch.int64, device="cpu")
    load, owners, costs, order = (x.numpy() for x in (load, owners, costs, order))  # numpy starts small operations faster
    for start in range(0, len(order), ranks):
        chunks = order[start : start + ranks]
        excess = costs[chunks] - costs[chunks].mean(0)  # what all of a round have in common changes nothing
        taken = 0.0 * load[0]
        for i in (-(excess**2).sum(1)).argsort(kind="stable"):
            rank = (excess[i] @ load + taken).argmin()  # of least load where this chunk is heavy
            owners[chunks[i]] = rank
            load[:, rank] += excess[i]
            taken[rank] = float("inf")
    return Layout.assigned(owners.tolist(), TILE * tiles_a_chunk, seq_len, ranks)


def _chunk_costs(mask: Mask, seq_len: int, tiles_a_chunk: int) -> Tensor:
    """Tiles seen by the queries and those seen of the keys of every chunk, were the sequence one shard: fp64 (chunks, 2)."""
    lo, hi = shared_intervals(mask, seq_len, seq_len)
    first, last = _tile_ends(torch.arange(seq_len, device="cpu"))
    begin, end = lo[:, first] // TILE, -(-hi[:, last] // TILE)
    # a tile of keys is seen by those tiles of queries that begin at or before it and have not ended
    change = torch.zeros(len(first) + 1, dtype=torch.int64, device="cpu")
    for x, sign in ((begin, 1), (end, -1)):
        change += sign * torch.bincount(x.flatten(), minlength=len(change))
    tiles = torch.stack(((end - begin).sum(0), change.cumsum(0)[:-1]), 1).double()
    padding = -len(tiles) % tiles_a_chunk
    return torch.nn.functional.pad(tiles, (0, 0, 0, padding)).unflatten(0, (-1, tiles_a_chunk)).sum(1)
