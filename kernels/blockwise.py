"""Attention tile by tile in plain PyTorch: what CPU ranks train with. Memory grows with the tile, never with Nq * Nk.

The loops of the Triton kernels around the maths of `ringattn.kernels.reference`: for every query tile, the key tiles that its intervals
touch are folded into the running state. With a block mask the tiles are its blocks. Contract and shapes: `ringattn.kernels.reference`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ringattn.kernels import reference, validation
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import Gradients, State, state_dtype

QUERY_TILE = 256
KEY_TILE = 512


def _query_tiles(num_queries: int, blocks: BlockMask | None) -> Iterator[slice]:
    size = QUERY_TILE if blocks is None else blocks.size
    for start in range(0, num_queries, size):
        yield slice(start, min(start + size, num_queries))


def _key_tiles(
    rows: slice, intervals: Intervals, dropout: Dropout | None, blocks: BlockMask | None
) -> Iterator[tuple[slice, Intervals, dict]]:
    """The key tiles that the query rows touch, each with the intervals and the options inside that tile."""
    lo, hi = intervals.host
    size = KEY_TILE if blocks is None else blocks.size
    start, stop = int(lo[:, rows.start].min()), int(hi[:, rows.stop - 1].max())
    if blocks is not None:
        start -= start % size
    for first in range(start, stop, size):
        keys = slice(first, min(first + size, stop))
        pair_blocks = None if blocks is None else blocks.cut(rows, keys)
        if pair_blocks is None or pair_blocks.keep.any():
            options = dict(dropout=None if dropout is None else dropout.cut(rows, keys), blocks=pair_blocks)
            yield keys, intervals.cut(rows, keys), options


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Intervals,
    scale: float,
    state: State | None = None,
    final: bool = False,
    *,
    dropout: Dropout | None = None,
    blocks: BlockMask | None = None,
    precision: str = "ieee",
) -> State | tuple[Tensor, Tensor]:
    """See `ringattn.kernels.reference.forward`."""
    validation.check_inputs(q, k, v, intervals, scale)
    validation.check_options(q, k, dropout, blocks, precision)
    if state is None:
        state = reference.empty_state(q, v.shape[-1])
    for rows in _query_tiles(q.shape[1], blocks):
        tile = tuple(x[:, rows] for x in state)
        for keys, part, options in _key_tiles(rows, intervals, dropout, blocks):
            tile = reference.forward(q[:, rows], k[:, keys], v[:, keys], part, scale, tile, **options)
        for whole, part in zip(state, tile, strict=True):
            whole[:, rows] = part
    return reference.finalize(state, q.dtype) if final else state


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    intervals: Intervals,
    scale: float,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    *,
    grad_dtype: torch.dtype | None = None,
    dropout: Dropout | None = None,
    blocks: BlockMask | None = None,
    precision: str = "ieee",
) -> Gradients:
    """See `ringattn.kernels.reference.backward`."""
    validation.check_inputs(q, k, v, intervals, scale)
    validation.check_options(q, k, dropout, blocks, precision)
    given, like = (dq, dk, dv), (q, k, v)
    dtype = state_dtype(q.dtype)
    dq, dk, dv = (
        torch.zeros(y.shape, dtype=dtype, device=y.device) if x is None else x for x, y in zip(given, like, strict=True)
    )
    for rows in _query_tiles(q.shape[1], blocks):
        by_row = [x[:, rows] for x in (dout, lse, delta)]
        for keys, part, options in _key_tiles(rows, intervals, dropout, blocks):
            grads = dq[:, rows], dk[:, keys], dv[:, keys]
            reference.backward(q[:, rows], k[:, keys], v[:, keys], *by_row, part, scale, *grads, **options)
    fresh = grad_dtype or q.dtype
    return tuple(x.to(fresh) if into is None else x for into, x in zip(given, (dq, dk, dv), strict=True))
