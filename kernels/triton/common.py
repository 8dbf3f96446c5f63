"""The Triton forward and backward share the functions of this module.

A program computes one tile of rows of one head, and loops over tiles of columns. Rows are queries and columns are keys, except
in the kernel for dK and dV. The tuple `loop` describes this loop:

    begin                first column of tile 0 (with a block mask: the index of an entry in a list of kept blocks)
    num_masked_prefix    the first tiles, in which some rows do not attend to all columns, so that scores must be masked
    num_unmasked         the tiles after them, in which all rows attend to all columns
    num_masked           all tiles with masked scores: the prefix and those after the unmasked tiles

One loop processes all unmasked tiles, and a second loop (MASKED) all masked tiles. The index i counts the tiles of one loop.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import ROUNDS, Dropout
from ringattn.kernels.reference import Accumulators, Gradients, State
from ringattn.kernels.triton.launcher import OPTIONS, launch_by_triton

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
PHILOX_ROUNDS = tl.constexpr(ROUNDS)

INTERLEAVED_HEADS = tl.constexpr(8)

# Offsets inside a tile of up to 256 rows are int32, so token strides must be below 2**22 elements.
MAX_ROW_STRIDE = 2**22


class Tile(NamedTuple):
    queries: int
    keys: int
    num_warps: int
    num_stages: int


# These tile sizes were the fastest for fp16 and bf16 on sm_90. According to reports, kernels with 4 warps and head dims below
# 64 access memory out of bounds.
_TILES_16_BIT = {
    "forward": {32: Tile(128, 128, 8, 3), 64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
    "key_gradient": {32: Tile(64, 128, 8, 2), 64: Tile(64, 64, 4, 3), 128: Tile(64, 128, 8, 3), 256: Tile(32, 64, 8, 2)},
    "query_gradient": {32: Tile(128, 64, 8, 3), 64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
}
# Exact fp32 products keep whole operand rows in each thread's registers, so their tiles are small.
_TILE_FP32 = Tile(32, 32, 8, 1)


def choose_tile(kernel: str, dtype: torch.dtype, head_dim: int) -> Tile:
    if dtype == torch.float32:
        return _TILE_FP32
    return _TILES_16_BIT[kernel][max(head_dim, 32)]


def fit_tile(tile: Tile, blocks: BlockMask | None) -> Tile:
    if blocks is None:
        return tile
    return tile._replace(queries=math.gcd(tile.queries, blocks.size), keys=math.gcd(tile.keys, blocks.size))


@triton.constexpr_function
def pad_dim(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


@dataclass(frozen=True)
class Config:
    """The constants of the Triton kernels. Without a block mask, `block` is 0."""

    num_heads: int
    group: int
    dim: int
    value_dim: int
    queries: int
    keys: int
    block: int
    precision: str


def configure(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask | None, precision: str
) -> tuple[Config, dict[str, int]]:
    num_heads, head_dim, value_dim = q.shape[2], q.shape[3], v.shape[3]
    tile = fit_tile(choose_tile(kernel, q.dtype, max(pad_dim(head_dim), pad_dim(value_dim))), blocks)
    block = 0 if blocks is None else blocks.size
    config = Config(num_heads, num_heads // k.shape[2], head_dim, value_dim, tile.queries, tile.keys, block, precision)
    return config, OPTIONS | dict(num_warps=tile.num_warps, num_stages=tile.num_stages)


def as_addressable(x: Tensor) -> Tensor:
    """Return x (B, N, H, D). If the kernels cannot use x's strides, return a copy that stores heads before tokens."""
    return x if x.stride(-1) == 1 and x.stride(1) < MAX_ROW_STRIDE else x.transpose(1, 2).contiguous().transpose(1, 2)


def allocate_results(
    q: Tensor, v: Tensor, state: State | None, final: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor | None, ...]:
    rows, value_dim = q.shape[:3], v.shape[-1]
    m, l, o = (None, None, None) if state is None else state
    if final:
        return m, l, o, q.new_empty(*rows, value_dim, dtype=dtype), q.new_empty(*rows, dtype=torch.float32)
    if state is None:
        m, l = q.new_empty(*rows, dtype=torch.float32), q.new_empty(*rows, dtype=torch.float32)
        o = q.new_empty(*rows, value_dim, dtype=torch.float32)
    return m, l, o, None, None


def allocate_gradients(q: Tensor, k: Tensor, v: Tensor, given: Accumulators, grad_dtype: torch.dtype | None) -> Gradients:
    fresh = torch.zeros_like if q.numel() == 0 or k.numel() == 0 else torch.empty_like
    like = dict(dtype=grad_dtype or q.dtype, memory_format=torch.contiguous_format)
    return tuple([fresh(y, **like) if x is None else x for x, y in zip(given, (q, k, v), strict=True)])


def dropout_arguments(dropout: Dropout | None) -> tuple:
    if dropout is None or dropout.p == 0:
        return None, None, 0, 0, 0, 1.0
    positions = dropout.query_positions.contiguous(), dropout.key_positions.contiguous()
    return *positions, dropout.first_head, dropout.seed, dropout.threshold, dropout.factor


def launch_tiles(kernel, name, inputs, intervals, results, scale, dropout, blocks, precision, **constants):
    """Launch a kernel with one program for each tile of each head.

    Args:
        inputs: q, k and v, and in the backward also dout, all from `as_addressable`, followed by the result of `_interleave`.
        intervals: the intervals of the queries, which are transposed here for "key_gradient".
        results: the tensors that the kernel reads or writes as results, each contiguous or None.
        constants: the constexpr arguments other than CONFIG.
    """
    q, k, v, *_ = inputs
    (batch, num_queries, num_heads), (num_keys, num_key_heads) = q.shape[:3], k.shape[1:3]
    config, options = configure(name, q, k, v, blocks, precision)
    if name == "key_gradient":
        heads, mask, rows, columns = num_key_heads, intervals.transposed, config.keys, config.queries
        lists = None if blocks is None else blocks.key_lists(config.group)
    else:
        heads, mask, rows, columns = num_heads, intervals, config.queries, config.keys
        lists = None if blocks is None else blocks.query_lists
    table = mask.tiles(rows, columns, split_documents=blocks is None)
    num_tiles = table.shape[1]
    list_strides = None if lists is None else lists.expand(batch, heads, -1, -1, -1).stride()[:2]
    launch_by_triton(
        kernel, (num_tiles * batch * heads,), q.is_cuda, *inputs, mask.lo, mask.hi, table, *results,
        *(x.stride()[:3] for x in inputs[:4]), mask.batch, num_tiles, num_queries, num_keys, float(scale),
        *dropout_arguments(dropout), lists, list_strides, **constants, CONFIG=config, **options,
    )  # fmt: skip


@triton.jit
def program_tile(num_tiles):
    """Return (tile, head). The heads of all batch entries are numbered consecutively.

    Programs that run at the same time compute the same head, so its operands stay in the L2 cache. The tiles of the last
    INTERLEAVED_HEADS heads are interleaved, so that all SMs end at nearly the same time.
    """
    program, num_heads = tl.program_id(0), tl.num_programs(0) // num_tiles
    num_sequential = tl.maximum(num_heads - INTERLEAVED_HEADS, 0)
    head = tl.minimum(program // num_tiles, num_sequential)
    index, width = program - head * num_tiles, tl.where(head < num_sequential, 1, num_heads - num_sequential)
    return index // width, head + index % width


@triton.jit
def load_rows(base, first, stride, num_rows, ROWS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Load ROWS rows of a (num_rows, DIM) matrix, padded with zeros to pad_dim(DIM) columns. Without MASKED, all rows must
    exist.
    """
    PADDED: tl.constexpr = pad_dim(DIM)
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
    # 32-bit offsets take fewer registers.
    pointers = base + first.to(tl.int64) * stride + (rows * stride + columns)
    if MASKED or DIM != PADDED:
        return tl.load(pointers, mask=(rows < num_rows - first) & (columns < DIM), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_tile(entry):
    first, end = tl.load(entry), tl.load(entry + 1)
    begin, num_masked_prefix = tl.load(entry + 2), tl.load(entry + 3)
    num_unmasked, num_masked = tl.load(entry + 4), tl.load(entry + 5)
    return first, end, (begin, num_masked_prefix, num_unmasked, num_masked)


@triton.jit
def kept_blocks(block_lists, block_strides, batch, head, block, num_columns, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    num_entries = tl.cdiv(num_columns, BLOCK) * GROUP + 1
    row = batch * block_strides[0] + head.to(tl.int64) * block_strides[1] + block.to(tl.int64) * (2 * num_entries)
    return block_lists + row


@triton.jit
def block_loop(lo, hi, first, end, blocks, STEP: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    TILES: tl.constexpr = BLOCK // STEP
    last = end - 1
    # No row attends to columns outside the blocks [start, stop). Every row attends to all columns of the blocks [full, tail).
    start = tl.load(lo + first) // BLOCK
    stop = tl.maximum(tl.cdiv(tl.load(hi + last), BLOCK), start)
    full = tl.minimum(tl.cdiv(tl.load(lo + last), BLOCK), stop)
    tail = tl.minimum(tl.maximum(tl.load(hi + first) // BLOCK, full), stop)
    begin = tl.load(blocks + start * (2 * GROUP))
    num_masked_prefix = tl.load(blocks + full * (2 * GROUP)) - begin
    num_unmasked = tl.load(blocks + tail * (2 * GROUP)) - begin - num_masked_prefix
    num_all = tl.load(blocks + stop * (2 * GROUP)) - begin
    return begin, num_masked_prefix * TILES, num_unmasked * TILES, (num_all - num_unmasked) * TILES


@triton.jit
def loop_length(loop, MASKED: tl.constexpr):
    _, _, num_unmasked, num_masked = loop
    return num_masked if MASKED else num_unmasked


@triton.jit
def loop_tile(loop, i, MASKED: tl.constexpr):
    _, num_masked_prefix, num_unmasked, _ = loop
    return i + tl.where(i < num_masked_prefix, 0, num_unmasked) if MASKED else num_masked_prefix + i


@triton.jit
def load_block_column(blocks, loop, i, STEP: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Loading the block column one step early saves a stage of Triton's software pipeline."""
    if blocks is None:
        return 0
    else:
        return tl.load(blocks + (loop[0] + loop_tile(loop, i, MASKED) // (BLOCK // STEP)) * 2 + 1)


@triton.jit
def loop_position(loop, i, column, STEP: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr):
    """Without a block mask, the loop processes all tiles of one head before the tiles of the next head."""
    head = 0
    if GROUP > 1 and BLOCK == 0:
        # Triton computes the first addresses even of an empty loop, so the divisor must not be 0.
        per_head = tl.maximum(loop_length(loop, MASKED), 1)
        i, head = i % per_head, i // per_head
    elif GROUP > 1:
        head = column % GROUP
    tile = loop_tile(loop, i, MASKED)
    return loop[0] + tile * STEP if BLOCK == 0 else column // GROUP * BLOCK + tile % (BLOCK // STEP) * STEP, head


@triton.jit
def run_loop(
    add_tile: tl.constexpr, operands, dropout, sums, loop, blocks, STEP: tl.constexpr, GROUP: tl.constexpr, CONFIG: tl.constexpr
):  # fmt: skip
    """Call `add_tile` for all unmasked tiles, and then for all masked tiles. Return the new `sums`.

    Args:
        add_tile: add_tile(operands, dropout, sums, start, head, MASKED, CONFIG) adds the tile at column `start` of a head of
            the group.
        dropout: None, or the tuple that `draw_keep_mask` takes.
        loop, blocks: the loop from `load_tile`, and None. With a block mask, `loop` and `blocks` are the results of
            `block_loop` and `kept_blocks`.
    """
    BLOCK: tl.constexpr = CONFIG.block
    # Nested loops over heads would drain the load pipeline after every head and spill registers.
    HEADS: tl.constexpr = GROUP if blocks is None else 1
    for MASKED in tl.static_range(2):
        column = load_block_column(blocks, loop, 0, STEP, BLOCK, MASKED)
        for i in range(0, HEADS * loop_length(loop, MASKED)):
            next_column = load_block_column(blocks, loop, i + 1, STEP, BLOCK, MASKED)
            start, head = loop_position(loop, i, column, STEP, BLOCK, GROUP, MASKED)
            sums = add_tile(operands, dropout, sums, start, head, MASKED, CONFIG)
            column = next_column
    return sums


@triton.jit
def visible(lo, hi, start, COLUMNS: tl.constexpr):
    columns = start + tl.arange(0, COLUMNS)[None, :]
    return (lo[:, None] <= columns) & (columns < hi[:, None])


@triton.jit
def load_scalars(base, first, num_rows, ROWS: tl.constexpr, MASKED: tl.constexpr):
    rows = first + tl.arange(0, ROWS)
    return tl.load(base + rows, mask=rows < num_rows, other=0) if MASKED else tl.load(base + rows)


@triton.jit
def load_outputs(out, dout, rows, inside, DIM: tl.constexpr, PADDED: tl.constexpr):
    columns = tl.arange(0, PADDED)
    index = rows[:, None] * DIM + columns[None, :]
    mask = inside[:, None] & (columns < DIM)[None, :]
    return tl.load(out + index, mask=mask, other=0.0), tl.load(dout + index, mask=mask, other=0.0)


@triton.jit
def row_delta(outputs, dlse, rows, inside):
    x, y = outputs
    delta = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    if dlse is not None:
        delta -= tl.load(dlse + rows, mask=inside, other=0.0)
    return delta


@triton.jit
def draw_keep_mask(dropout, head, start, num_columns, STEP: tl.constexpr, TRANSPOSED: tl.constexpr, MASKED: tl.constexpr):
    """Return `dropout.keep_mask` for STEP columns from `start` on.

    `dropout` is (positions of the rows, pointer to the positions of the columns, batch entry, first head, seed, threshold,
    factor). If TRANSPOSED, the rows are keys.
    """
    row_positions, column_positions, batch, first_head, seed, threshold, _ = dropout
    queries, keys = row_positions[:, None], load_scalars(column_positions, start, num_columns, STEP, MASKED)[None, :]
    if TRANSPOSED:
        queries, keys = keys, queries
    # Do not broadcast `queries` and `keys`, because Philox's first round is faster on the smaller tensors.
    _, word, _, _ = tl.philox(seed, queries, keys, head.to(tl.int32) + first_head, batch.to(tl.int32), PHILOX_ROUNDS)
    return word >= threshold.to(tl.uint32)
