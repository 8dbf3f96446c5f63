"""Attention tile by tile in plain PyTorch: what CPU ranks train with. Memory grows with the tile, never with Nq * Nk.

The loops of the Triton kernels around the maths of `kernels.reference`: for every query tile, the key tiles that its intervals
touch are folded into the running state. Contract and shapes: `kernels.reference`.
"""

from collections.abc import Iterator

from torch import Tensor

from kernels import reference
from kernels.reference import State

QUERY_TILE = 256
KEY_TILE = 512


def _query_tiles(num_queries: int) -> Iterator[slice]:
    for start in range(0, num_queries, QUERY_TILE):
        yield slice(start, min(start + QUERY_TILE, num_queries))


def _key_tiles(lo: Tensor, hi: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The key tiles that the query rows of `lo`, `hi` (B or 1, M) touch, each with the intervals inside that tile."""
    start, stop = int(lo[:, 0].min()), int(hi[:, -1].max())
    for first in range(start, stop, KEY_TILE):
        size = min(KEY_TILE, stop - first)
        yield slice(first, first + size), (lo - first).clamp(0, size), (hi - first).clamp(0, size)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor,
    hi: Tensor,
    scale: float,
    state: State | None = None,
    final: bool = False,
) -> State | tuple[Tensor, Tensor]:
    """See `kernels.reference.forward`."""
    if state is None:
        state = reference.empty_state(q, v.shape[-1])
    for rows in _query_tiles(q.shape[1]):
        tile = tuple(x[:, rows] for x in state)
        for keys, tile_lo, tile_hi in _key_tiles(lo[:, rows], hi[:, rows]):
            tile = reference.forward(q[:, rows], k[:, keys], v[:, keys], tile_lo, tile_hi, scale, tile)
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
    lo: Tensor,
    hi: Tensor,
    scale: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """See `kernels.reference.backward`."""
    for rows in _query_tiles(q.shape[1]):
        by_row = [x[:, rows] for x in (dout, lse, delta)]
        for keys, tile_lo, tile_hi in _key_tiles(lo[:, rows], hi[:, rows]):
            grads = dq[:, rows], dk[:, keys], dv[:, keys]
            reference.backward(q[:, rows], k[:, keys], v[:, keys], *by_row, tile_lo, tile_hi, scale, *grads)
