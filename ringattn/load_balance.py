"""Find the layout that gives every rank the same work under a mask.

Work is the number of tiles of 128 queries x 128 keys that contain an unmasked pair. In the KV ring, a rank computes the tiles
of its queries. In the state ring, a rank computes the tiles of its keys. With packed documents, fixed layouts either give the
ranks unequal work or create many nearly empty tiles. An assigned layout distributes chunks in rounds, starting with the most
expensive chunks. Each round gives one chunk to every rank.
"""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ringattn.kernels.validation import as_integer
from ringattn.layout import Layout
from ringattn.mask import Mask, check_mask, intervals_at
from ringattn.runs import RowsBefore, positions_of_rows, reduce_by_rank

TILE = 128
MAX_CHUNKS = 64  # per rank; enough to balance the work within milliseconds
MIN_CHUNKS = 8  # per rank: with fewer, the memory of the ranks could differ too much
# A layout is balanced if its busiest rank has at most 1.04 times an equal share of the work.
SLACK = 1.04


def work(mask: Mask, layout: Layout) -> Tensor:
    """For each pair of shards, count the tiles with work over all batch entries: int64 (query ranks, key ranks)."""
    rows = [_tile_ends(layout.rows(rank)) for rank in range(layout.ranks)]
    ends = [[positions_of_rows(layout, rank, x) for x in ends] for rank, ends in enumerate(rows)]
    first, last = map(np.concatenate, zip(*ends, strict=True))
    num_tiles = np.array([len(first) for first, _ in ends])
    # In a tile, the first query has the smallest lo, and the last query has the largest hi.
    lo, _ = intervals_at(mask, layout.seq_len, first)
    _, hi = intervals_at(mask, layout.seq_len, last)
    before_lo, before_hi = (RowsBefore(layout, x.astype(np.int32)) for x in (lo, hi))
    by_key_rank = []
    for rank in range(layout.ranks):
        begin, end = before_lo.rows(rank), before_hi.rows(rank)
        counts = ((begin < end) * (-(-end // TILE) - begin // TILE)).sum(0)
        by_key_rank.append(reduce_by_rank(np.add, counts, num_tiles))
    return torch.from_numpy(np.stack(by_key_rank, 1))


def balanced_layout(mask: Mask | Mapping[Mask, int], seq_len: int, ranks: int) -> Layout:
    """Return a layout that balances the work under `mask`. All ranks compute the same layout, in a few milliseconds.

    If the layers of a model have different masks, `mask` maps each mask to its number of layers. The work of every mask is
    balanced, because ranks wait for each other in every layer.

    The function tries four layouts in this order: contiguous, zigzag, assigned and striped. The result is the first layout
    whose busiest rank has at most 1.04 times an equal share of the work. Earlier layouts need fewer messages. If no layout is
    within this limit, the result is the most balanced one. Assigned shards differ in length by less than two chunks. A chunk
    has S / (64 P) rows, rounded up to a multiple of 128.

    Raises:
        ValueError: the documents of `mask` do not sum to `seq_len`, or an argument is invalid.
    """
    layers = tuple(mask.items()) if isinstance(mask, Mapping) else ((mask, 1),)
    for each, count in layers:
        check_mask(each)
        as_integer("the number of layers with a mask", count, 1)
    if not layers:
        raise ValueError("mask={}: it must contain at least one mask")
    return _balanced_layout(layers, as_integer("seq_len", seq_len, 1), as_integer("ranks", ranks, 1))


def always_has_equal_shards(seq_len: int, ranks: int) -> bool:
    """Return whether `balanced_layout` gives all ranks the same number of positions under any mask."""
    if ranks == 1:
        return True
    may_assign = seq_len >= MIN_CHUNKS * TILE * ranks
    return seq_len % (2 * ranks) == 0 and not (may_assign and seq_len % (TILE * _tiles_per_chunk(seq_len, ranks) * ranks))


def _tiles_per_chunk(seq_len: int, ranks: int) -> int:
    return max(1, -(-seq_len // (TILE * MAX_CHUNKS * ranks)))


@lru_cache(maxsize=8)
def _balanced_layout(layers: tuple[tuple[Mask, int], ...], seq_len: int, ranks: int) -> Layout:
    for mask, _ in layers:
        mask.check(seq_len)
    candidates = [Layout(kind, seq_len, ranks) for kind in ("contiguous", "zigzag", "striped")]
    if ranks == 1:
        return candidates[0]
    if seq_len >= MIN_CHUNKS * TILE * ranks:
        candidates.insert(2, _assign_chunks(layers, seq_len, ranks))
    tiles = [[count * work(mask, layout) for mask, count in layers] for layout in candidates]
    share = min(sum(int(x.sum()) for x in each) for each in tiles) / ranks
    busiest = [sum(int(max(x.sum(1).max(), x.sum(0).max())) for x in each) for each in tiles]
    good_enough = max(min(busiest), SLACK * share)
    return next(layout for layout, tiles in zip(candidates, busiest, strict=True) if tiles <= good_enough)


def _tile_ends(rows: int) -> tuple[np.ndarray, np.ndarray]:
    first = np.arange(0, rows, TILE)
    return first, (first + TILE).clip(max=rows) - 1


def _assign_chunks(layers: tuple[tuple[Mask, int], ...], seq_len: int, ranks: int) -> Layout:
    tiles_per_chunk = _tiles_per_chunk(seq_len, ranks)
    costs = np.concatenate([count * _chunk_costs(mask, seq_len, tiles_per_chunk) for mask, count in layers], 1)
    # A stable sort gives all ranks the same order.
    order = (-costs.sum(1)).argsort(kind="stable")
    load, owners = np.zeros((costs.shape[1], ranks)), np.empty(len(costs), dtype=np.int64)
    for start in range(0, len(order), ranks):
        chunks = order[start : start + ranks]
        excess = costs[chunks] - costs[chunks].mean(0)
        scores = excess @ load
        taken = np.empty(len(chunks), dtype=np.int64)
        for i in (-(excess**2).sum(1)).argsort(kind="stable"):
            taken[i] = rank = scores[i].argmin()
            scores[:, rank] = float("inf")  # A rank receives at most one chunk per round.
        owners[chunks] = taken
        load[:, taken] += excess.T
    return Layout.assigned(owners.tolist(), TILE * tiles_per_chunk, seq_len, ranks)


def _chunk_costs(mask: Mask, seq_len: int, tiles_per_chunk: int) -> np.ndarray:
    """For each chunk, count the tiles with its queries and the tiles with its keys: fp64 (chunks, 2)."""
    first, last = _tile_ends(seq_len)
    lo, _ = intervals_at(mask, seq_len, first)
    _, hi = intervals_at(mask, seq_len, last)
    begin, end = lo // TILE, -(-hi // TILE)
    starts, stops = (np.bincount(x.ravel(), minlength=len(first) + 1) for x in (begin, end))
    tiles = np.stack(((end - begin).sum(0), (starts - stops).cumsum()[:-1]), 1).astype(np.float64)
    return np.add.reduceat(tiles, np.arange(0, len(tiles), tiles_per_chunk))
