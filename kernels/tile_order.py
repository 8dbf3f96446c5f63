"""A fixed order of work tiles makes every sum of dq in the deterministic Hopper backward reproducible.

The order in which two key tiles add to dq matters only if a query attends to both tiles. Because lo and hi never decrease, only
the order of neighbouring tiles must be fixed. Of two neighbouring tiles, the *predecessor* adds to dq first. A *chain* is a
sequence of neighbouring key tiles of one head that share queries. A chain has one of two directions:

- In a *forwards* chain, the tile of the last keys starts first, and loops begin with the first query tile.
- In a *backwards* chain, the tile of the first keys starts first, and loops begin with the last query tile.

Under a causal mask without documents, head groups alternate between both directions, so that all programs end together.
"""

import torch
from torch import Tensor

# With more heads at a time, programs with neighbouring keys wait less for each other. With fewer heads at a time, operands and
# dq stay in the L2 cache.
PREFERRED_HEADS = 4
ALTERNATING_TILES = 512

NUM_COLUMNS = 12


def order_work_tiles(
    tiles: Tensor, bounds: tuple[Tensor, ...], batch: int, heads: int, heads_per_group: int, programs: int, group: int,
    step: int,
) -> Tensor:  # fmt: skip
    """Return the work tiles of all heads in the order in which the programs compute them.

    Args:
        tiles: int32 (B or 1, T, 6) from `Intervals.tiles` of a transposed mask. Every loop begins at a multiple of `step`.
        bounds: lo and hi of every key, int32 (B or 1, Nk), on the CPU.
        heads: the number of key heads per batch entry.
        heads_per_group: the minimal number of key heads per head group.
        group: number of query heads per key head.

    Returns:
        int32 (N, 12): first key, end of the keys, first query of the first step, 0, num_unmasked, num_masked, head, batch
            entry, direction (1 or -1), number in the order, number of the predecessor, and the number of steps that need not
            wait for the predecessor.
    """
    tiles, exists = _sort_by_keys(tiles)
    if not exists.any():
        return tiles.new_zeros(0, NUM_COLUMNS, dtype=torch.int32)
    linked = _find_links(tiles, exists, bounds)
    begin = tiles[..., 2] // step
    stop = begin + tiles[..., 4] + tiles[..., 5]
    shared = begin.where(exists, 0).amax(1) < stop[:, 0]
    preferred = min(PREFERRED_HEADS, ALTERNATING_TILES // int(stop.max())) if shared.all() else PREFERRED_HEADS
    heads_per_group = max(heads_per_group, preferred // group)
    num_heads, num_masks = batch * heads, len(tiles)
    num_groups = -(-num_heads // heads_per_group)
    if num_groups < num_heads:
        # With an even number of head groups, both directions are equally frequent.
        num_groups += num_groups % 2
    all_heads = torch.arange(num_heads, device="cpu")
    mask = (all_heads // heads).clamp(max=num_masks - 1)
    head_group = all_heads * num_groups // num_heads
    alternates = shared[mask] & (exists[mask].sum() > programs)
    backwards = alternates & ((head_group % 2 == 1) | (num_groups == 1))
    both = [_order_chains(tiles, begin, stop, exists, linked, direction) for direction in (1, -1)]
    rank, columns = (torch.stack(x)[backwards.long(), mask] for x in zip(*both, strict=True))
    num_tiles = tiles.shape[1]
    order = (head_group[:, None] * num_tiles + rank).flatten().argsort(stable=True)
    order = order[exists[mask].flatten()[order]]
    index = torch.zeros(num_heads * num_tiles, dtype=torch.int64, device="cpu")
    index[order] = torch.arange(len(order), device="cpu")
    index = index.view(num_heads, num_tiles)
    first, predecessor, num_free = columns.unbind(-1)
    every = torch.ones_like(first)
    per_head = all_heads % heads, all_heads // heads, 1 - 2 * backwards.long()
    own = tiles[mask]
    table = [own[..., 0], own[..., 1], first * step, 0 * every, own[..., 4], own[..., 5]]
    table += [x[:, None] * every for x in per_head]
    table += [index, index.gather(1, predecessor), num_free]
    return torch.stack(table, -1).flatten(0, 1)[order].int()


def predecessors(work_tiles: Tensor) -> Tensor:
    """Return the index of each work tile's predecessor in `work_tiles`, or -1 if a work tile has none."""
    num_steps, num_free = work_tiles[:, 4] + work_tiles[:, 5], work_tiles[:, 11]
    return work_tiles[:, 10].where(num_free < num_steps, -1)


def _sort_by_keys(tiles: Tensor) -> tuple[Tensor, Tensor]:
    exists = tiles[..., 4] + tiles[..., 5] > 0
    order = tiles[..., 0].where(exists, torch.iinfo(torch.int32).max).argsort(dim=1, stable=True)
    tiles, exists = tiles.gather(1, order[..., None].expand_as(tiles)), exists.gather(1, order)
    return tiles.long() * exists[..., None], exists


def _find_links(tiles: Tensor, exists: Tensor, bounds: tuple[Tensor, ...]) -> Tensor:
    lo = bounds[0].long().gather(1, tiles[..., 0])
    hi = bounds[1].long().gather(1, (tiles[..., 1] - 1).clamp(min=0))
    linked = torch.zeros_like(exists)
    linked[:, 1:] = (lo[:, 1:] < hi[:, :-1]) & exists[:, 1:]
    return linked


def _order_chains(
    tiles: Tensor, begin: Tensor, stop: Tensor, exists: Tensor, linked: Tensor, direction: int
) -> tuple[Tensor, Tensor]:
    """Order the tiles of each head, forwards if `direction` is 1 and otherwise backwards. Return (rank, columns).

    The tensor `rank` (B, T) contains the position of each tile in the order.
    """
    index = torch.arange(tiles.shape[1], device="cpu").expand_as(begin)
    num_steps = stop - begin
    chain = (~linked).cumsum(1) - 1
    ends = [_reduce(index, chain, operation) for operation in ("amin", "amax")]
    longest = _reduce(num_steps, chain, "amax")
    position = ends[1] - index if direction == 1 else index - ends[0]
    # Chains with longer loops start first, and the tiles of different chains are interleaved.
    rank = index
    for key in (position, chain, position - longest, ~exists):
        rank = rank.gather(1, key.gather(1, rank).int().argsort(dim=1, stable=True))
    rank = torch.empty_like(rank).scatter_(1, rank, index)
    predecessor = (index + direction).clamp(0, tiles.shape[1] - 1)
    if direction == 1:
        waits = torch.cat((linked[:, 1:], torch.zeros_like(linked[:, :1])), 1)
        first, ahead = begin, begin.gather(1, predecessor) - begin
    else:
        waits = linked
        first, ahead = stop - 1, stop - stop.gather(1, predecessor)
    num_free = torch.minimum(ahead, num_steps).where(waits, num_steps)
    return rank, torch.stack((first, predecessor, num_free), -1)


def _reduce(values: Tensor, chain: Tensor, operation: str) -> Tensor:
    reduced = torch.zeros_like(values).scatter_reduce(1, chain, values, operation, include_self=False)
    return reduced.gather(1, chain)
