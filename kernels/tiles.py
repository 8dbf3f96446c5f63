"""What the Triton forward and backward share: tile sizes, the walk over the tiles of an interval, loads, arguments."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MAX_ROW_STRIDE = 2**22  # offsets inside a tile (up to 256 rows) are computed in int32


class Tile(NamedTuple):
    """Query rows and key rows that one step works on, and Triton's launch options for it."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """The keyword arguments of a kernel launch that this tile stands for."""
        return dict(QUERIES=self.queries, KEYS=self.keys, num_warps=self.num_warps, num_stages=self.num_stages)


# By padded head dim, for the registers and shared memory of sm_90. Up to 128 nothing spills, but for some loop constants
# of the key gradient at 128.
_HALF = {
    "forward": {64: Tile(128, 128, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
    "key_gradient": {64: Tile(64, 128, 8, 2), 128: Tile(64, 128, 8, 3), 256: Tile(32, 64, 8, 2)},
    "query_gradient": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
}
_SINGLE = Tile(32, 32, 8, 1)  # IEEE fp32 products run on the plain cores, which hold whole operand rows in registers


def choose_tile(kernel: str, dtype: torch.dtype, head_dim: int) -> Tile:
    """The tile of `kernel` ("forward", "key_gradient" or "query_gradient") for a padded head dim, the larger of two."""
    if dtype == torch.float32:
        return _SINGLE
    return _HALF[kernel][max(head_dim, 64)]


def shape_constants(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """The constexpr arguments that follow from the shapes; head dims are padded to a power of two of at least 16."""
    num_heads, head_dim = q.shape[2:]
    value_dim = v.shape[-1]
    return dict(
        NUM_HEADS=num_heads,
        GROUP=num_heads // k.shape[2],
        DIM=head_dim,
        VALUE_DIM=value_dim,
        PADDED=max(16, triton.next_power_of_2(head_dim)),
        VALUE_PADDED=max(16, triton.next_power_of_2(value_dim)),
    )


def as_rows(x: Tensor) -> Tensor:
    """`x` (B, N, H, D) itself if the kernels can read its strides, else a contiguous copy."""
    return x if x.stride(-1) == 1 and x.stride(1) < MAX_ROW_STRIDE else x.contiguous()


def as_intervals(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor, int]:
    """Contiguous lo and hi, and the stride from one batch entry to the next: 0 where one row serves the whole batch."""
    return lo.contiguous(), hi.contiguous(), lo.shape[1] if lo.shape[0] > 1 else 0


@triton.jit
def load_rows(base, first, stride, num_rows, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Rows [first, first + ROWS) of a (num_rows, DIM) matrix, padded with zeros; without MASKED all rows must exist."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
    pointers = base + first.to(tl.int64) * stride + (rows * stride + columns)
    if MASKED or DIM != PADDED:
        tile = tl.load(pointers, mask=(rows < num_rows - first) & (columns < DIM), other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_intervals(lo, hi, first, num_rows, ROWS: tl.constexpr):
    """The bounds of rows [first, first + ROWS); rows past the end repeat the last one, so the bounds stay monotonic."""
    rows = tl.minimum(first + tl.arange(0, ROWS), num_rows - 1)
    return tl.load(lo + rows), tl.load(hi + rows)


@triton.jit
def walk(lo, hi, first, num_rows, ROWS: tl.constexpr, STEP: tl.constexpr):
    """The tiles of STEP columns that rows [first, first + ROWS) reach: tile i holds columns from begin + i * STEP.

    Bounds never decrease, so the rows' union is [lo of the first, hi of the last) and all rows see [lo of the last,
    hi of the first). The walk has num_head tiles to mask, then num_full tiles that all rows see, then tiles to mask.

    Returns:
        begin, num_head, num_full, num_edge: num_edge counts the tiles to mask, head and tail.
    """
    last = tl.minimum(first + ROWS, num_rows) - 1
    begin = tl.load(lo + first)
    total = tl.cdiv(tl.maximum(tl.load(hi + last) - begin, 0), STEP)
    num_head = tl.minimum(tl.cdiv(tl.load(lo + last) - begin, STEP), total)
    num_full = tl.maximum(tl.maximum(tl.load(hi + first) - begin, 0) // STEP - num_head, 0)
    return begin, num_head, num_full, total - num_full


@triton.jit
def edge_start(begin, num_head, num_full, edge, STEP: tl.constexpr):
    """First column of the edge-th tile to mask: the full tiles lie between head and tail."""
    return begin + (edge + tl.where(edge < num_head, 0, num_full)) * STEP


@triton.jit
def visible(lo, hi, start, COLUMNS: tl.constexpr):
    """The mask (rows, COLUMNS) of rows with bounds lo, hi over the columns [start, start + COLUMNS)."""
    columns = start + tl.arange(0, COLUMNS)[None, :]
    return (lo[:, None] <= columns) & (columns < hi[:, None])
