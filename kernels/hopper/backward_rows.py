"""Triton kernels prepare the inputs of the Hopper backward, and convert dq from the register layout of wgmma to rows.

Queries without keys, and rows beyond the last query, get lse = inf. With lse = inf, all probabilities are 0, so the main
kernels need not mask these queries.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from ringattn.kernels.hopper.backward_narrow import KEYS, SPARE_CHUNK
from ringattn.kernels.hopper.common import LOG2_E, ROWS
from ringattn.kernels.triton import common as triton_common

PREPARED_ROWS = gl.constexpr(32)


@triton.jit(do_not_specialize=["num_tiles", "num_queries"])
def _prepare_kernel(lse, delta, out, dout, dlse, scalars, dq_sums, num_tiles, num_queries, CONFIG: tl.constexpr):
    """For one query tile of one head, store lse (in log2 units) and delta, and set dq to zero.

    Args:
        delta: (B, Nq, Hq), or None to compute delta from out, dout and dlse.
        scalars: (B * Hq * num_tiles, 2, queries), written.
        dq_sums: the spare chunk, followed by the sums of dq (B * Hq * num_tiles, queries * dim).
    """
    program = tl.program_id(0)
    tile, pair = program % num_tiles, program // num_tiles
    head, batch = pair % CONFIG.num_heads, pair // CONFIG.num_heads
    QUERIES: tl.constexpr = CONFIG.queries
    SIZE: tl.constexpr = CONFIG.queries * CONFIG.dim
    rows = tl.arange(0, QUERIES)
    index = (batch.to(tl.int64) * num_queries + tile * QUERIES + rows) * CONFIG.num_heads + head
    inside = tile * QUERIES + rows < num_queries
    offset = program.to(tl.int64)
    row_lse = tl.load(lse + index, mask=inside, other=float("-inf"))
    if delta is None:
        outputs = triton_common.load_outputs(out, dout, index, inside, CONFIG.value_dim, CONFIG.dim)
    element = tl.arange(0, SIZE)
    zeros = tl.zeros([SIZE], tl.float32)
    tl.store(dq_sums + CONFIG.chunk_size + offset * SIZE + element, zeros, mask=element < CONFIG.used_size)
    if delta is None:
        row_delta = triton_common.row_delta(outputs, dlse, index, inside)
    else:
        row_delta = tl.load(delta + index, mask=inside, other=0.0)
    tl.store(scalars + offset * (2 * QUERIES) + rows, tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E))
    tl.store(scalars + offset * (2 * QUERIES) + QUERIES + rows, row_delta)


@triton.jit(do_not_specialize=["num_blocks", "num_queries"])
def _prepare_wide_kernel(lse, delta, out, dout, dlse, log2_lse, row_delta, num_blocks, num_queries, CONFIG: tl.constexpr):
    """Store lse (in log2 units) and delta of PREPARED_ROWS queries of one head.

    The results log2_lse and row_delta are (B * Hq, num_blocks * PREPARED_ROWS).
    """
    program = tl.program_id(0)
    block, pair = program % num_blocks, program // num_blocks
    head, batch = pair % CONFIG.num_heads, pair // CONFIG.num_heads
    PADDED: tl.constexpr = triton_common.pad_dim(CONFIG.value_dim)
    rows = tl.arange(0, PREPARED_ROWS)
    index = (batch.to(tl.int64) * num_queries + block * PREPARED_ROWS + rows) * CONFIG.num_heads + head
    inside = block * PREPARED_ROWS + rows < num_queries
    lse_rows = tl.load(lse + index, mask=inside, other=float("-inf"))
    if delta is None:
        outputs = triton_common.load_outputs(out, dout, index, inside, CONFIG.value_dim, PADDED)
        delta_rows = triton_common.row_delta(outputs, dlse, index, inside)
    else:
        delta_rows = tl.load(delta + index, mask=inside, other=0.0)
    packed = program.to(tl.int64) * PREPARED_ROWS + rows
    tl.store(log2_lse + packed, tl.where(lse_rows == float("-inf"), float("inf"), lse_rows * LOG2_E))
    tl.store(row_delta + packed, delta_rows)


@triton.jit(do_not_specialize=["num_tiles", "num_queries"])
def _finish_kernel(dq_sums, dq, num_tiles, num_queries, scale, CONFIG: tl.constexpr):
    """Convert one chunk of dq from the register layout of wgmma to rows, and multiply it by `scale`."""
    COLUMNS: tl.constexpr = CONFIG.chunk_columns
    QUERIES: tl.constexpr = CONFIG.queries
    NUM_HEADS: tl.constexpr = CONFIG.num_heads
    chunk = tl.program_id(0).to(tl.int64)
    half, tile, pair = chunk % 2, chunk // 2 % num_tiles, chunk // 2 // num_tiles
    element = tl.arange(0, ROWS * COLUMNS)
    used = half * (ROWS * COLUMNS) + element < CONFIG.used_size
    flat = tl.load(dq_sums + (SPARE_CHUNK + 1 + chunk) * (ROWS * COLUMNS) + element, mask=used, other=0.0)
    rows = tile * QUERIES + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    if QUERIES == KEYS:
        rows += half * ROWS
    else:
        columns += (half * COLUMNS).to(tl.int32)
    index = ((pair // NUM_HEADS * num_queries + rows) * NUM_HEADS + pair % NUM_HEADS)[:, None] * CONFIG.head_dim
    index += columns[None, :]
    mask = (rows < num_queries)[:, None] & (columns < CONFIG.head_dim)[None, :]
    # A chunk has the dimensions (group of 8 columns, warp, lane // 4, lane % 4, 2 rows at a distance of 8, 2 columns).
    in_registers = tl.reshape(flat, (COLUMNS // 8, 4, 8, 4, 2, 2))
    grad = tl.reshape(tl.permute(in_registers, (1, 4, 2, 0, 3, 5)), (ROWS, COLUMNS)) * scale
    if CONFIG.add_dq:
        grad += tl.load(dq + index, mask=mask, other=0.0)
    tl.store(dq + index, grad.to(dq.dtype.element_ty), mask=mask)
