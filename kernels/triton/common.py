"""What the Triton forward and backward share: tile sizes, the walk over the tiles of an interval, loads, arguments."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import ROUNDS, Dropout
from ringattn.kernels.reference import Gradients, State

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
PHILOX_ROUNDS = tl.constexpr(ROUNDS)
LAST_HEADS = tl.constexpr(8)  # see `schedule`
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


# By padded head dim, the fastest measured on sm_90. Up to 128 nothing spills, but for some loop constants of the key gradient
# at 128. Below 64, 4 warps have been reported to access memory that is not theirs.
_HALF = {
    "forward": {32: Tile(128, 128, 8, 3), 64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
    "key_gradient": {32: Tile(64, 128, 8, 2), 64: Tile(64, 64, 4, 3), 128: Tile(64, 128, 8, 3), 256: Tile(32, 64, 8, 2)},
    "query_gradient": {32: Tile(128, 64, 8, 3), 64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
}
_SINGLE = Tile(32, 32, 8, 1)  # IEEE fp32 products run on the plain cores, which hold whole operand rows in registers


def choose_tile(kernel: str, dtype: torch.dtype, head_dim: int) -> Tile:
    """The tile of `kernel` ("forward", "key_gradient" or "query_gradient") for a padded head dim, the larger of two."""
    if dtype == torch.float32:
        return _SINGLE
    return _HALF[kernel][max(head_dim, 32)]


def fit_tile(tile: Tile, blocks: BlockMask | None) -> Tile:
    """`tile` itself, or the largest part of it whose sides divide the blocks."""
    if blocks is None:
        return tile
    return tile._replace(queries=math.gcd(tile.queries, blocks.size), keys=math.gcd(tile.keys, blocks.size))


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


def allocate_results(
    q: Tensor, v: Tensor, state: State | None, final: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(m, l, o, out, lse) of a forward call: the state given or a fresh one, out and lse if `final`; None: not there."""
    rows, value_dim = q.shape[:3], v.shape[-1]
    m, l, o = (None, None, None) if state is None else state
    if final:
        return m, l, o, q.new_empty(*rows, value_dim), q.new_empty(*rows, dtype=torch.float32)
    if state is None:
        m, l = q.new_empty(*rows, dtype=torch.float32), q.new_empty(*rows, dtype=torch.float32)
        o = q.new_empty(*rows, value_dim, dtype=torch.float32)
    return m, l, o, None, None


def allocate_gradients(
    q: Tensor, k: Tensor, v: Tensor, given: tuple[Tensor | None, ...], grad_dtype: torch.dtype | None
) -> Gradients:
    """(dq, dk, dv) of a backward call: those `given`, or fresh ones, which are zero where there is nothing to compute."""
    fresh = torch.zeros_like if q.numel() == 0 or k.numel() == 0 else torch.empty_like
    like = dict(dtype=grad_dtype or q.dtype, memory_format=torch.contiguous_format)
    return tuple([fresh(y, **like) if x is None else x for x, y in zip(given, (q, k, v), strict=True)])


def dropout_arguments(dropout: Dropout | None) -> tuple:
    """query_positions, key_positions, first_head, seed, threshold and factor of a kernel; no positions: no dropout."""
    if dropout is None or dropout.p == 0:
        return None, None, 0, 0, 0, 1.0
    positions = dropout.query_positions.contiguous(), dropout.key_positions.contiguous()
    return *positions, dropout.first_head, dropout.seed, dropout.threshold, dropout.factor


def block_arguments(lists: Tensor | None, batch: int, heads: int) -> tuple[Tensor | None, tuple[int, int] | None]:
    """block_lists of a kernel and the strides of their batch and head: 0 where all share one list."""
    return (None, None) if lists is None else (lists, lists.expand(batch, heads, -1, -1, -1).stride()[:2])


@triton.jit
def schedule(num_tiles):
    """The tile and the head (of all in the batch) of this program: head by head, but tile by tile for the last heads together.

    Programs start in the order of their numbers, and those that run at one time share the operands of a head in L2. Under a
    mask some take far longer than others: the longest of the last heads start together, so that short ones fill up the end.
    """
    program, num_heads = tl.program_id(0), tl.num_programs(0) // num_tiles
    num_single = tl.maximum(num_heads - LAST_HEADS, 0)
    head = tl.minimum(program // num_tiles, num_single)
    turn, width = program - head * num_tiles, tl.where(head < num_single, 1, num_heads - num_single)
    return turn // width, head + turn % width


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
def load_tile(row):
    """(first, end, begin, num_masked_prefix, num_unmasked, num_masked) at a row of a table of `ringattn.kernels.interval_mask.Intervals`."""
    first, end = tl.load(row), tl.load(row + 1)
    begin, num_masked_prefix = tl.load(row + 2), tl.load(row + 3)
    num_unmasked, num_masked = tl.load(row + 4), tl.load(row + 5)
    return first, end, begin, num_masked_prefix, num_unmasked, num_masked


@triton.jit
def kept_blocks(block_lists, block_strides, batch, head, block, num_columns, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """The list of a block of rows, of entries (kept columns before, column) as in `ringattn.kernels.blocks`, GROUP columns a block."""
    num_entries = tl.cdiv(num_columns, BLOCK) * GROUP + 1
    row = batch * block_strides[0] + head.to(tl.int64) * block_strides[1] + block.to(tl.int64) * (2 * num_entries)
    return block_lists + row


@triton.jit
def walk_blocks(lo, hi, first, end, blocks, STEP: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """The walk of rows [first, end) along a list of kept blocks.

    As the walk of `load_tile`, but begin is an entry of the list, and an entry holds BLOCK // STEP tiles.
    """
    TILES: tl.constexpr = BLOCK // STEP
    last = end - 1
    start = tl.load(lo + first) // BLOCK
    stop = tl.maximum(tl.cdiv(tl.load(hi + last), BLOCK), start)
    full = tl.minimum(tl.cdiv(tl.load(lo + last), BLOCK), stop)
    tail = tl.minimum(tl.maximum(tl.load(hi + first) // BLOCK, full), stop)
    begin = tl.load(blocks + start * (2 * GROUP))
    num_masked_prefix = tl.load(blocks + full * (2 * GROUP)) - begin
    num_unmasked = tl.load(blocks + tail * (2 * GROUP)) - begin - num_masked_prefix
    total = tl.load(blocks + stop * (2 * GROUP)) - begin
    return begin, num_masked_prefix * TILES, num_unmasked * TILES, (total - num_unmasked) * TILES


@triton.jit
def walk_tile(num_masked_prefix, num_unmasked, i, MASKED: tl.constexpr):
    """The i-th tile of the walk that all rows see, or of those to mask: the former lie between head and tail."""
    return i + tl.where(i < num_masked_prefix, 0, num_unmasked) if MASKED else num_masked_prefix + i


@triton.jit
def block_column(blocks, begin, tile, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """The entry of the list of blocks for a tile of the walk, 0 without a list.

    Loops read it one step ahead: the pipeline would otherwise give up a stage of its loads to this one.
    """
    column = 0
    if blocks is not None:
        column = tl.load(blocks + (begin + tile // (BLOCK // STEP)) * 2 + 1)
    return column


@triton.jit
def tile_start(begin, tile, column, STEP: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """First column of a tile of the walk; with a list of blocks (BLOCK > 0) `column` is from `block_column`."""
    if BLOCK == 0:
        start = begin + tile * STEP
    else:
        start = column // GROUP * BLOCK + tile % (BLOCK // STEP) * STEP
    return start


@triton.jit
def visible(lo, hi, start, COLUMNS: tl.constexpr):
    """The mask (rows, COLUMNS) of rows with bounds lo, hi over the columns [start, start + COLUMNS)."""
    columns = start + tl.arange(0, COLUMNS)[None, :]
    return (lo[:, None] <= columns) & (columns < hi[:, None])


@triton.jit
def load_scalars(base, first, num_rows, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """One number a row of rows [first, first + ROWS), 0 past the end; without MASKED all rows must exist."""
    rows = first + tl.arange(0, ROWS)
    if MASKED:
        loaded = tl.load(base + rows, mask=rows < num_rows, other=0)
    else:
        loaded = tl.load(base + rows)
    return loaded


@triton.jit
def load_outputs(out, dout, rows, inside, DIM: tl.constexpr, PADDED: tl.constexpr):
    """What `row_delta` takes of contiguous out, dout (all, DIM): their `rows`, where `inside`."""
    columns = tl.arange(0, PADDED)
    index = rows[:, None] * DIM + columns[None, :]
    mask = inside[:, None] & (columns < DIM)[None, :]
    return tl.load(out + index, mask=mask, other=0.0), tl.load(dout + index, mask=mask, other=0.0)


@triton.jit
def row_delta(outputs, dlse, rows, inside):
    """`ringattn.kernels.reference.row_delta` of `rows`, where `inside`, of their outputs and contiguous dlse (all,) or None."""
    x, y = outputs
    delta = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    if dlse is not None:
        delta -= tl.load(dlse + rows, mask=inside, other=0.0)
    return delta


@triton.jit
def draw(dropout, head, start, num_columns, STEP: tl.constexpr, TRANSPOSED: tl.constexpr, MASKED: tl.constexpr):
    """`ringattn.kernels.dropout.keep_mask` of a tile of rows and the columns [start, start + STEP); TRANSPOSED: rows are keys.

    `dropout` is (positions of the rows, pointer to positions of the columns, batch, first head, seed, threshold, factor).
    """
    row_positions, column_positions, batch, first_head, seed, threshold, _ = dropout
    queries, keys = row_positions[:, None], load_scalars(column_positions, start, num_columns, STEP, MASKED)[None, :]
    if TRANSPOSED:
        queries, keys = keys, queries
    # passed unbroadcast, rows and columns first meet in the second round, and what other words need alone is never computed
    _, word, _, _ = tl.philox(seed, queries, keys, head.to(tl.int32) + first_head, batch.to(tl.int32), PHILOX_ROUNDS)
    return word >= threshold.to(tl.uint32)
