"""Attention tile by tile in plain PyTorch, the backend for CPUs. Memory grows with the tile size, never with Nq * Nk.

The loops are those of the Triton kernels, and the maths inside a tile is that of `ringattn.kernels.reference`. For every tile
of queries, the tiles of keys that its intervals reach are accumulated into the running state. With a block mask, the tiles are
its blocks. The arguments and results are those of `ringattn.kernels.reference`.
"""

from collections.abc import Iterator

import torch

from ringattn.kernels import reference
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import state_dtype

QUERY_TILE = 256  # queries per tile, without a block mask
KEY_TILE = 512  # keys per tile, without a block mask


def _query_tiles(num_queries: int, blocks: BlockMask | None) -> Iterator[slice]:
    size = QUERY_TILE if blocks is None else blocks.size
    for start in range(0, num_queries, size):
        yield slice(start, min(start + size, num_queries))


def _key_tiles(
    queries: slice, intervals: Intervals, dropout: Dropout | None, blocks: BlockMask | None
) -> Iterator[tuple[slice, Intervals, dict]]:
    """Yield the tiles of keys that a tile of queries attends to, with the intervals and the options inside that tile."""
    lo, hi = intervals.host
    size = KEY_TILE if blocks is None else blocks.size
    # lo and hi never decrease along the queries, so the first query has the smallest lo and the last query the largest hi.
    start, stop = int(lo[:, queries.start].min()), int(hi[:, queries.stop - 1].max())
    # Tiles must start at the beginning of a block.
    if blocks is not None:
        start -= start % size
    for first in range(start, stop, size):
        keys = slice(first, min(first + size, stop))
        tile_blocks = None if blocks is None else blocks.restrict(queries, keys)
        if tile_blocks is None or tile_blocks.keep.any():
            tile_dropout = None if dropout is None else dropout.restrict(queries, keys)
            yield keys, intervals.restrict(queries, keys), {"dropout": tile_dropout, "blocks": tile_blocks}


def forward(q, k, v, intervals, scale, state=None, final=False, *, dropout=None, blocks=None, precision="ieee"):
    """See `ringattn.kernels.reference.forward`. `state` is updated in place."""
    if state is None:
        state = reference.empty_state(q, v.shape[-1])
    for queries in _query_tiles(q.shape[1], blocks):
        # The state of the tile stays separate until its last tile of keys, because `reference.forward` returns new tensors.
        tile_state = tuple(x[:, queries] for x in state)
        for keys, tile_intervals, options in _key_tiles(queries, intervals, dropout, blocks):
            tile_state = reference.forward(q[:, queries], k[:, keys], v[:, keys], tile_intervals, scale, tile_state, **options)
        for x, y in zip(state, tile_state, strict=True):
            x[:, queries] = y
    return reference.finalize(state, q.dtype) if final else state


def backward(
    q, k, v, dout, lse, delta, intervals, scale, dq=None, dk=None, dv=None,
    *, grad_dtype=None, dropout=None, blocks=None, precision="ieee",
):  # fmt: skip
    """See `ringattn.kernels.reference.backward`."""
    given = dq, dk, dv
    # Without an accumulator, the gradient is also summed in the dtype of states, and it is rounded once at the end.
    dq, dk, dv = (
        torch.zeros(like.shape, dtype=state_dtype(q.dtype), device=q.device) if x is None else x
        for x, like in zip(given, (q, k, v), strict=True)
    )
    for queries in _query_tiles(q.shape[1], blocks):
        outputs = [x[:, queries] for x in (dout, lse, delta)]
        for keys, tile_intervals, options in _key_tiles(queries, intervals, dropout, blocks):
            # These are views, so the reference adds to the accumulators in place.
            sums = dq[:, queries], dk[:, keys], dv[:, keys]
            reference.backward(q[:, queries], k[:, keys], v[:, keys], *outputs, tile_intervals, scale, *sums, **options)
    fresh = grad_dtype or q.dtype
    return tuple(x.to(fresh) if accumulator is None else x for accumulator, x in zip(given, (dq, dk, dv), strict=True))
