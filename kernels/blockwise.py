"""Compute attention tile by tile in plain PyTorch. This is the backend for CPUs. The memory for scores depends on the tile
size, but not on the sequence lengths.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels import reference
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import Gradients, State, state_dtype

QUERY_TILE = 256  # queries per tile, without a block mask
KEY_TILE = 512  # keys per tile, without a block mask


def _query_tiles(num_queries: int, blocks: BlockMask | None) -> Iterator[slice]:
    size = QUERY_TILE if blocks is None else blocks.size
    for start in range(0, num_queries, size):
        yield slice(start, min(start + size, num_queries))


def _key_tiles(
    queries: slice, intervals: Intervals, dropout: Dropout | None, blocks: BlockMask | None
) -> Iterator[tuple[slice, Intervals, dict[str, Any]]]:
    lo, hi = intervals.host
    size = KEY_TILE if blocks is None else blocks.size
    start, stop = int(lo[:, queries.start].min()), int(hi[:, queries.stop - 1].max())
    # With a block mask, every tile must start where a block starts.
    if blocks is not None:
        start -= start % size
    for first in range(start, stop, size):
        keys = slice(first, min(first + size, stop))
        tile_blocks = None if blocks is None else blocks.restrict(queries, keys)
        if tile_blocks is None or tile_blocks.keep.any():
            tile_dropout = None if dropout is None else dropout.restrict(queries, keys)
            yield keys, intervals.restrict(queries, keys), {"dropout": tile_dropout, "blocks": tile_blocks}


def forward(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float, state: State | None = None, final: bool = False,
    *, dropout: Dropout | None = None, blocks: BlockMask | None = None, precision: str = "ieee",
) -> State:  # fmt: skip
    """Compute `ringattn.kernels.reference.forward` tile by tile. If `state` is given, the function updates it in place."""
    if state is None:
        state = reference.empty_state(q, v.shape[-1])
    for queries in _query_tiles(q.shape[1], blocks):
        # `reference.forward` returns new tensors, so write the state only after the last tile of keys.
        tile_state = tuple(x[:, queries] for x in state)
        for keys, tile_intervals, options in _key_tiles(queries, intervals, dropout, blocks):
            tile_state = reference.forward(q[:, queries], k[:, keys], v[:, keys], tile_intervals, scale, tile_state, **options)
        for x, y in zip(state, tile_state, strict=True):
            x[:, queries] = y
    return reference.finalize(state, q.dtype) if final else state


def backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, intervals: Intervals, scale: float,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    *, grad_dtype: torch.dtype | None = None, dropout: Dropout | None = None, blocks: BlockMask | None = None,
    precision: str = "ieee",
) -> Gradients:  # fmt: skip
    """Compute `ringattn.kernels.reference.backward` tile by tile."""
    given = dq, dk, dv
    dq, dk, dv = (
        torch.zeros(like.shape, dtype=state_dtype(q.dtype), device=q.device) if x is None else x
        for x, like in zip(given, (q, k, v), strict=True)
    )
    for queries in _query_tiles(q.shape[1], blocks):
        dout_tile, lse_tile, delta_tile = (x[:, queries] for x in (dout, lse, delta))
        for keys, tile_intervals, options in _key_tiles(queries, intervals, dropout, blocks):
            operands = q[:, queries], k[:, keys], v[:, keys], dout_tile, lse_tile, delta_tile
            sums = {"dq": dq[:, queries], "dk": dk[:, keys], "dv": dv[:, keys]}
            reference.backward(*operands, tile_intervals, scale, **sums, **options)
    fresh = grad_dtype or q.dtype
    return tuple(x.to(fresh) if accumulator is None else x for accumulator, x in zip(given, (dq, dk, dv), strict=True))
