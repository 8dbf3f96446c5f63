"""Helpers of the Triton forward and backward: tile sizes, the loop over the tiles of an interval, loads and arguments.

A program owns one tile of rows of one head and loops over the tiles of columns that the rows attend to. In the forward and for
dQ, the rows are queries and the columns are keys. For dK and dV, the rows are keys and the columns are queries. Four numbers
describe the loop, and the kernels pass these numbers as the tuple `loop`:

    begin                first column of tile 0 (with a block mask: the index of an entry in a list of kept blocks)
    num_masked_prefix    the first tiles, in which some rows do not attend to all columns, so that scores must be masked
    num_unmasked         the tiles after them, in which all rows attend to all columns
    num_masked           all tiles with masked scores: the prefix and those after the unmasked tiles

Each kernel runs two loops. The first loop covers the unmasked tiles, so that its code contains no mask. The second loop covers
the masked tiles. If a helper takes MASKED, its argument i is the number of a tile within one of these two loops.
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

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
PHILOX_ROUNDS = tl.constexpr(ROUNDS)

# The number of heads at the end of the grid whose tiles are interleaved. `program_tile` explains the interleaving.
INTERLEAVED_HEADS = tl.constexpr(8)

# The stride of a token must be smaller than this number, because offsets inside a tile of up to 256 rows are computed in int32.
MAX_ROW_STRIDE = 2**22


class Tile(NamedTuple):
    """The numbers of queries and keys that one step of a loop processes, and Triton's launch options for this size."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# These tiles were the fastest for fp16 and bf16 on sm_90. The keys of the inner dictionaries are padded head dims. Up to head
# dim 128, no kernel spills registers, except that the kernel of the key gradient reloads some loop constants at head dim 128.
# Accesses out of bounds have been reported for 4 warps and head dims below 64.
_TILES_16_BIT = {
    "forward": {32: Tile(128, 128, 8, 3), 64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
    "key_gradient": {32: Tile(64, 128, 8, 2), 64: Tile(64, 64, 4, 3), 128: Tile(64, 128, 8, 3), 256: Tile(32, 64, 8, 2)},
    "query_gradient": {32: Tile(128, 64, 8, 3), 64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
}
# Exact fp32 products run on the CUDA cores instead of the tensor cores. In this case, a thread keeps whole rows of the operands
# in registers, so the tiles must be small.
_TILE_FP32 = Tile(32, 32, 8, 1)


def choose_tile(kernel: str, dtype: torch.dtype, head_dim: int) -> Tile:
    """Return the tile size of a kernel and the launch options for it.

    Args:
        kernel: "forward", "key_gradient" or "query_gradient".
        dtype: the dtype of q, k and v.
        head_dim: the larger of the two padded head dims, a power of two.
    """
    if dtype == torch.float32:
        return _TILE_FP32
    return _TILES_16_BIT[kernel][max(head_dim, 32)]


def fit_tile(tile: Tile, blocks: BlockMask | None) -> Tile:
    """Return `tile` itself, or a smaller tile that fits into the blocks of a block mask.

    With a block mask, each side is the greatest common divisor of the tile's side and the block size.
    """
    if blocks is None:
        return tile
    return tile._replace(queries=math.gcd(tile.queries, blocks.size), keys=math.gcd(tile.keys, blocks.size))


@triton.constexpr_function
def pad_dim(dim: int) -> int:
    """Return a head dim padded to a power of two of at least 16, as `tl.arange` and `tl.dot` require."""
    return max(16, triton.next_power_of_2(dim))


@dataclass(frozen=True)
class Config:
    """The constants for which the kernels of the forward and of the backward are compiled.

    Args:
        num_heads: Hq, the number of query heads.
        group: number of query heads per key head, Hq / Hkv.
        dim: D, the head dim of q and k, without padding.
        value_dim: Dv, the head dim of v, without padding.
        queries, keys: the numbers of queries and of keys of a tile.
        block: the block size of the block mask, or 0 if there is no block mask.
        precision: the precision of products of fp32 inputs, "ieee" or "tf32".
    """

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
    """Return the constants of a kernel and the keyword arguments of its launch, which are num_warps and num_stages.

    Args:
        kernel: "forward", "key_gradient" or "query_gradient".
        q, k, v: (B, Nq, Hq, D), (B, Nk, Hkv, D) and (B, Nk, Hkv, Dv).
        blocks, precision: as for `ringattn.kernels.triton.forward.forward`.
    """
    num_heads, head_dim, value_dim = q.shape[2], q.shape[3], v.shape[3]
    tile = fit_tile(choose_tile(kernel, q.dtype, max(pad_dim(head_dim), pad_dim(value_dim))), blocks)
    block = 0 if blocks is None else blocks.size
    config = Config(num_heads, num_heads // k.shape[2], head_dim, value_dim, tile.queries, tile.keys, block, precision)
    return config, dict(num_warps=tile.num_warps, num_stages=tile.num_stages)


def as_addressable(x: Tensor) -> Tensor:
    """Return x (B, N, H, D) itself if the kernels can use its strides, or else a copy in which heads come before tokens."""
    # In a contiguous copy, the stride of a token could still be too large, because there may be many heads.
    return x if x.stride(-1) == 1 and x.stride(1) < MAX_ROW_STRIDE else x.transpose(1, 2).contiguous().transpose(1, 2)


def allocate_results(
    q: Tensor, v: Tensor, state: State | None, final: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor | None, ...]:
    """Return (m, l, o, out, lse) for a forward call, with None for tensors that the call neither reads nor writes.

    If there is a `state`, m, l and o are its tensors. If the call starts from the empty state and returns a state, m, l and o
    are new tensors. If `final` is true, out and lse are new tensors. `dtype` is the dtype of out, by default that of q.
    """
    rows, value_dim = q.shape[:3], v.shape[-1]
    m, l, o = (None, None, None) if state is None else state
    if final:
        return m, l, o, q.new_empty(*rows, value_dim, dtype=dtype), q.new_empty(*rows, dtype=torch.float32)
    if state is None:
        m, l = q.new_empty(*rows, dtype=torch.float32), q.new_empty(*rows, dtype=torch.float32)
        o = q.new_empty(*rows, value_dim, dtype=torch.float32)
    return m, l, o, None, None


def allocate_gradients(q: Tensor, k: Tensor, v: Tensor, given: Accumulators, grad_dtype: torch.dtype | None) -> Gradients:
    """Return (dq, dk, dv) for a backward call: the accumulators in `given`, with a new tensor in place of each None.

    If there are no queries or no keys, no kernel runs. New tensors are filled with zeros in this case.
    """
    fresh = torch.zeros_like if q.numel() == 0 or k.numel() == 0 else torch.empty_like
    like = dict(dtype=grad_dtype or q.dtype, memory_format=torch.contiguous_format)
    return tuple([fresh(y, **like) if x is None else x for x, y in zip(given, (q, k, v), strict=True)])


def dropout_arguments(dropout: Dropout | None) -> tuple:
    """Return query_positions, key_positions, first_head, seed, threshold and factor for the launch of a kernel."""
    # If the positions are None, the kernels are compiled without dropout.
    if dropout is None or dropout.p == 0:
        return None, None, 0, 0, 0, 1.0
    positions = dropout.query_positions.contiguous(), dropout.key_positions.contiguous()
    return *positions, dropout.first_head, dropout.seed, dropout.threshold, dropout.factor


def launch_tiles(kernel, name, inputs, intervals, results, scale, dropout, blocks, precision, **constants):
    """Launch a forward kernel or a backward kernel. Each program computes one tile of one head.

    Args:
        kernel: the kernel. Its parameters are the inputs, the intervals, the table of tiles and the results, followed by the
            other arguments in the order of the call below.
        name: "forward", "key_gradient" or "query_gradient". The rows of "key_gradient" are keys. The rows of the other two
            kernels are queries.
        inputs: q (B, Nq, Hq, D), k (B, Nk, Hkv, D) and v (B, Nk, Hkv, Dv). In the backward, dout (B, Nq, Hq, Dv) and stats
            follow. All inputs except stats must come from `as_addressable`. The kernel knows the strides of stats.
        intervals: the intervals of the queries. For "key_gradient", this function transposes them.
        results: the tensors that the kernel reads or writes as results, each contiguous or None.
        scale, dropout, blocks, precision: as for `ringattn.kernels.triton.forward.forward`.
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
    # With a block mask, tiles must end where blocks end. Therefore they cannot end where documents end.
    table = mask.tiles(rows, columns, split_documents=blocks is None)
    num_tiles = table.shape[1]
    # If all batch entries or all heads use the same list, the stride of that dimension is 0.
    list_strides = None if lists is None else lists.expand(batch, heads, -1, -1, -1).stride()[:2]
    kernel[(num_tiles * batch * heads,)](
        *inputs, mask.lo, mask.hi, table, *results, *(x.stride()[:3] for x in inputs[:4]),
        mask.batch, num_tiles, num_queries, num_keys, float(scale),
        *dropout_arguments(dropout), lists, list_strides, **constants, CONFIG=config, **options,
    )  # fmt: skip


@triton.jit
def program_tile(num_tiles):
    """Return the tile and the head (counted over the whole batch) that this program computes.

    Programs start in the order of their ids. The programs process one head after another, so that programs that run at the same
    time find the operands of one head in the L2 cache. Under a mask, some tiles take far longer than others. The tiles of a
    head are therefore sorted with the longest tiles first. The last heads are interleaved: the longest tiles of these heads
    start first, and their short tiles fill the SMs at the end.
    """
    # `width` is the number of heads whose tiles alternate. For interleaved heads it is their number, and for all other heads it
    # is 1.
    program, num_heads = tl.program_id(0), tl.num_programs(0) // num_tiles
    num_sequential = tl.maximum(num_heads - INTERLEAVED_HEADS, 0)
    head = tl.minimum(program // num_tiles, num_sequential)
    index, width = program - head * num_tiles, tl.where(head < num_sequential, 1, num_heads - num_sequential)
    return index // width, head + index % width


@triton.jit
def load_rows(base, first, stride, num_rows, ROWS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Load the rows [first, first + ROWS) of a (num_rows, DIM) matrix. Return a tile (ROWS, pad_dim(DIM)), padded with zeros.

    Without MASKED, all of these rows must exist.
    """
    PADDED: tl.constexpr = pad_dim(DIM)
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
    # Only the offset of the first row needs 64 bits. Offsets within the tile are computed in 32 bits, which needs fewer
    # registers.
    pointers = base + first.to(tl.int64) * stride + (rows * stride + columns)
    if MASKED or DIM != PADDED:
        return tl.load(pointers, mask=(rows < num_rows - first) & (columns < DIM), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_tile(entry):
    """Load one entry of the table `Intervals.tiles`. Return (first, end, loop).

    The rows of the tile are [first, end). The docstring of this module explains `loop`.
    """
    first, end = tl.load(entry), tl.load(entry + 1)
    begin, num_masked_prefix = tl.load(entry + 2), tl.load(entry + 3)
    num_unmasked, num_masked = tl.load(entry + 4), tl.load(entry + 5)
    return first, end, (begin, num_masked_prefix, num_unmasked, num_masked)


@triton.jit
def kept_blocks(block_lists, block_strides, batch, head, block, num_columns, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Return the pointer to the list of kept blocks that belongs to a block of rows.

    An entry of the list is a pair (number of kept columns before this column, kept column), see `ringattn.kernels.blocks`. A
    column of the list is a pair of a block and one of GROUP heads.
    """
    num_entries = tl.cdiv(num_columns, BLOCK) * GROUP + 1
    row = batch * block_strides[0] + head.to(tl.int64) * block_strides[1] + block.to(tl.int64) * (2 * num_entries)
    return block_lists + row


@triton.jit
def block_loop(lo, hi, first, end, blocks, STEP: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Return the tuple `loop` for the rows [first, end), for a loop over a list of kept blocks.

    The loop has the same form as the loop of `load_tile`, except that `begin` is the index of an entry in the list. Each entry
    of the list stands for BLOCK // STEP tiles.
    """
    TILES: tl.constexpr = BLOCK // STEP
    last = end - 1
    # The blocks [start, stop) contain every column that any row attends to. In the blocks [full, tail), all rows attend to all
    # columns.
    start = tl.load(lo + first) // BLOCK
    stop = tl.maximum(tl.cdiv(tl.load(hi + last), BLOCK), start)
    full = tl.minimum(tl.cdiv(tl.load(lo + last), BLOCK), stop)
    tail = tl.minimum(tl.maximum(tl.load(hi + first) // BLOCK, full), stop)
    # The count of an entry is the number of kept columns before this entry. The difference of two counts is therefore the
    # number of kept columns between the two entries.
    begin = tl.load(blocks + start * (2 * GROUP))
    num_masked_prefix = tl.load(blocks + full * (2 * GROUP)) - begin
    num_unmasked = tl.load(blocks + tail * (2 * GROUP)) - begin - num_masked_prefix
    num_all = tl.load(blocks + stop * (2 * GROUP)) - begin
    return begin, num_masked_prefix * TILES, num_unmasked * TILES, (num_all - num_unmasked) * TILES


@triton.jit
def loop_length(loop, MASKED: tl.constexpr):
    """Return the number of masked tiles of the loop. Without MASKED, return the number of unmasked tiles."""
    _, _, num_unmasked, num_masked = loop
    return num_masked if MASKED else num_unmasked


@triton.jit
def loop_tile(loop, i, MASKED: tl.constexpr):
    """Return the index, among all tiles of the loop, of the i-th masked tile. Without MASKED, take the i-th unmasked tile."""
    _, num_masked_prefix, num_unmasked, _ = loop
    return i + tl.where(i < num_masked_prefix, 0, num_unmasked) if MASKED else num_masked_prefix + i


@triton.jit
def load_block_column(blocks, loop, i, STEP: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Load the kept column of the i-th tile from the list of kept blocks. Return 0 if there is no block mask.

    Loops load the column of the next tile one step ahead. If a loop loaded the column in the step that uses the column,
    Triton's software pipeline would spend one of its stages on this load.
    """
    if blocks is None:
        return 0
    else:
        return tl.load(blocks + (loop[0] + loop_tile(loop, i, MASKED) // (BLOCK // STEP)) * 2 + 1)


@triton.jit
def loop_position(loop, i, column, STEP: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr):
    """Return the first column of step i, and the index of its head within a group of GROUP heads.

    Without a block mask, the loop covers the tiles of the first head, then the tiles of the next head, and so on. With a block
    mask (BLOCK > 0), the loop follows the list of blocks, whose columns are pairs of a block and a head. In this case, `column`
    comes from `load_block_column`.
    """
    head = 0
    if GROUP > 1 and BLOCK == 0:
        # Triton's software pipeline computes the first address of a loop even if the loop has no steps, so the divisor must not
        # be 0.
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
    """Add all tiles of a program's loop to `sums` and return the sums. The unmasked tiles come before the masked tiles.

    Args:
        add_tile: the device function that adds the tile at column `start` of head `head` of the group to the sums. Its call is
            add_tile(operands, dropout, sums, start, head, MASKED, CONFIG).
        operands: a tuple of all other values that `add_tile` needs.
        dropout: None, or the tuple that `draw_keep_mask` takes.
        sums: the tuple of sums before the first tile.
        loop, blocks: without a block mask, the loop from `load_tile`, and None. With a block mask, the loop from `block_loop`
            and the pointer from `kept_blocks`.
        STEP: the number of columns of a tile. GROUP: the number of heads that the loop covers.
    """
    BLOCK: tl.constexpr = CONFIG.block
    # One loop covers all heads of the group. Nested loops would drain the pipeline of loads after every head and spill
    # registers. With a block mask, the list of blocks already contains all heads.
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
    """Return a mask (rows, COLUMNS), which tells whether each row, with the bounds lo and hi, attends to each column.

    The columns are [start, start + COLUMNS).
    """
    columns = start + tl.arange(0, COLUMNS)[None, :]
    return (lo[:, None] <= columns) & (columns < hi[:, None])


@triton.jit
def load_scalars(base, first, num_rows, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """Load one number per row for rows [first, first + ROWS). Rows from num_rows on get 0.

    Without MASKED, all of these rows must exist.
    """
    rows = first + tl.arange(0, ROWS)
    return tl.load(base + rows, mask=rows < num_rows, other=0) if MASKED else tl.load(base + rows)


@triton.jit
def load_outputs(out, dout, rows, inside, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Load `rows` of the contiguous matrices out and dout, both (number of rows, DIM). Rows that are not `inside` get 0."""
    columns = tl.arange(0, PADDED)
    index = rows[:, None] * DIM + columns[None, :]
    mask = inside[:, None] & (columns < DIM)[None, :]
    return tl.load(out + index, mask=mask, other=0.0), tl.load(dout + index, mask=mask, other=0.0)


@triton.jit
def row_delta(outputs, dlse, rows, inside):
    """Compute `ringattn.kernels.reference.row_delta` for the given rows. `inside` is a mask of the rows that exist.

    `outputs` comes from `load_outputs`. `dlse` is contiguous with one number per row, or None.
    """
    x, y = outputs
    delta = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    if dlse is not None:
        delta -= tl.load(dlse + rows, mask=inside, other=0.0)
    return delta


@triton.jit
def draw_keep_mask(dropout, head, start, num_columns, STEP: tl.constexpr, TRANSPOSED: tl.constexpr, MASKED: tl.constexpr):
    """Compute the part of `ringattn.kernels.dropout.keep_mask` for a tile of rows and the columns [start, start + STEP).

    Args:
        dropout: the tuple (positions of the rows, pointer to the positions of the columns, batch entry, first head, seed,
            threshold, factor).
        head: the index of the query head in this call. The function adds `first head` to it.
        start, num_columns: the first column of the tile, and the total number of columns.
        TRANSPOSED: whether the rows are keys and the columns are queries.
        MASKED: whether the tile may extend beyond the last column.

    Returns:
        (rows, STEP): a mask that is true for the probabilities that are kept.
    """
    row_positions, column_positions, batch, first_head, seed, threshold, _ = dropout
    queries, keys = row_positions[:, None], load_scalars(column_positions, start, num_columns, STEP, MASKED)[None, :]
    if TRANSPOSED:
        queries, keys = keys, queries
    # Do not broadcast the positions before this call. Without broadcasting, each product of the first round depends only on the
    # row or only on the column, so it is computed once per row or once per column. Only from the second round on, the full tile
    # is needed. The compiler also removes all computations that are needed only for the other three words.
    _, word, _, _ = tl.philox(seed, queries, keys, head.to(tl.int32) + first_head, batch.to(tl.int32), PHILOX_ROUNDS)
    return word >= threshold.to(tl.uint32)
