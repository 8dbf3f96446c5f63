"""Portable Triton backward: the contract of `ringattn.kernels.reference.backward`, deterministic and without atomics.

One kernel holds a tile of keys and walks over the query tiles that see it, by the transposed intervals, for every query
head of the group in turn; the other holds a tile of queries and walks over its key tiles as the forward does. Both
recompute p = exp(s - lse), in log2 units, and add into given fp32 accumulators or write fresh gradients. What they read of
lse and delta in their inner loops, a first short kernel lays out.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels import validation
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import Gradients
from ringattn.kernels.triton import common as triton_common
from ringattn.kernels.triton.common import (
    LOG2_E,
    block_column,
    draw,
    kept_blocks,
    load_rows,
    load_scalars,
    load_tile,
    schedule,
    tile_start,
    visible,
    walk_blocks,
    walk_tile,
)
from ringattn.kernels.triton.launcher import launch


@triton.jit
def _load_stats(stats, first, num_rows, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """(lse in log2 units, delta) of rows [first, first + ROWS) of a head from a (num_rows, 2) matrix; MASKED as in `load_rows`.

    Each number is read twice. Where a tile has fewer numbers than the program has threads, Triton lets every thread fetch all
    that it needs, here 32 numbers a step: too many instructions for the inner loop, and at head dim 128 too many registers.
    """
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, 4)[None, :] % 2
    pointers = stats + first.to(tl.int64) * 2 + (rows * 2 + columns)
    if MASKED:
        tile = tl.load(pointers, mask=rows < num_rows - first, other=0.0)
    else:
        tile = tl.load(pointers)
    lse, delta = tl.split(tl.reshape(tile, [ROWS, 2, 2]))
    lse, _ = tl.split(lse)
    delta, _ = tl.split(delta)
    return lse, delta


@triton.jit
def _key_step(
    q, dout, stats, q_stride, dout_stride, start, num_queries, key, value, lo, hi, dropout, head, dk, dv, log2_scale,
    STEP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(dk / scale, dv / factor) of the key tile after the query tile at `start`; scores are transposed, (keys, queries).

    `dropout` is None or as in `ringattn.kernels.triton.common.draw`.
    """
    query = load_rows(q, start, q_stride, num_queries, STEP, DIM, PADDED, MASKED)
    log2_lse, delta = _load_stats(stats, start, num_queries, STEP, MASKED)
    p = tl.exp2(tl.dot(key, tl.trans(query), input_precision=PRECISION) * log2_scale - log2_lse[None, :])
    if MASKED:
        p = tl.where(visible(lo, hi, start, STEP), p, 0.0)
    grad = load_rows(dout, start, dout_stride, num_queries, STEP, VALUE_DIM, VALUE_PADDED, MASKED)
    dropped = p
    if dropout is not None:
        keep = draw(dropout, head, start, num_queries, STEP, True, MASKED)
        dropped = tl.where(keep, p, 0.0)
    dv = tl.dot(dropped.to(grad.dtype), grad, dv, input_precision=PRECISION)
    dp = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
    if dropout is not None:
        dp = tl.where(keep, dp * dropout[6], 0.0)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(query.dtype), query, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _group_tile(
    begin, num_masked_prefix, num_unmasked, step, per_head, column, STEP: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """First query row of a step, and its head of the group: head by head, or in the order of the list of blocks."""
    index, head = step, 0
    if GROUP > 1 and BLOCK == 0:
        # the pipeline computes the first address even of an empty loop, so the divisor may not be 0
        per_head = tl.maximum(per_head, 1)
        index, head = step % per_head, step // per_head
    elif GROUP > 1:
        head = column % GROUP
    tile = walk_tile(num_masked_prefix, num_unmasked, index, EDGE)
    return tile_start(begin, tile, column, STEP, BLOCK, GROUP), head


@triton.jit(do_not_specialize=["num_masks", "num_tiles", "num_queries", "num_keys", "first_head", "seed", "threshold"])
def _key_gradient_kernel(
    q, k, v, dout, stats, query_lo, query_hi, table, dk, dv,
    q_strides, k_strides, v_strides, dout_strides, num_masks, num_tiles, num_queries, num_keys, scale,
    query_positions, key_positions, first_head, seed: tl.uint64, threshold: tl.uint32, factor, block_lists, block_strides,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    ADD_DK: tl.constexpr, ADD_DV: tl.constexpr,
):  # fmt: skip
    NUM_KEY_HEADS: tl.constexpr = NUM_HEADS // GROUP
    turn, index = schedule(num_tiles)
    key_head, batch = index % NUM_KEY_HEADS, (index // NUM_KEY_HEADS).to(tl.int64)
    k += batch * k_strides[0] + key_head.to(tl.int64) * k_strides[2]
    v += batch * v_strides[0] + key_head.to(tl.int64) * v_strides[2]
    q += batch * q_strides[0]
    dout += batch * dout_strides[0]
    stats += batch * num_queries * NUM_HEADS * 2
    entry = tl.minimum(batch, num_masks - 1)
    query_lo += entry * num_keys
    query_hi += entry * num_keys

    first, end, begin, num_masked_prefix, num_unmasked, num_masked = load_tile(table + (entry * num_tiles + turn) * 6)
    key = load_rows(k, first, k_strides[1], end, KEYS, DIM, PADDED, True)
    value = load_rows(v, first, v_strides[1], end, KEYS, VALUE_DIM, VALUE_PADDED, True)
    lo, hi = load_scalars(query_lo, first, end, KEYS, True), load_scalars(query_hi, first, end, KEYS, True)
    blocks, dropout = None, None
    if block_lists is not None:
        blocks = kept_blocks(block_lists, block_strides, batch, key_head, first // BLOCK, num_queries, BLOCK, GROUP)
        begin, num_masked_prefix, num_unmasked, num_masked = walk_blocks(
            query_lo, query_hi, first, end, blocks, QUERIES, BLOCK, GROUP
        )
    if query_positions is not None:
        row_positions = load_scalars(key_positions, first, end, KEYS, True)
        dropout = (row_positions, query_positions, batch, first_head, seed, threshold, factor)
    log2_scale = scale * LOG2_E
    key_grad = tl.zeros([KEYS, PADDED], tl.float32)
    value_grad = tl.zeros([KEYS, VALUE_PADDED], tl.float32)
    # each loop runs over all heads of the group: nested loops would drain the load pipeline and spill registers
    HEADS: tl.constexpr = GROUP if blocks is None else 1
    for MASKED in tl.static_range(2):
        num_steps = num_masked if MASKED else num_unmasked
        column = block_column(blocks, begin, walk_tile(num_masked_prefix, num_unmasked, 0, MASKED), QUERIES, BLOCK)
        for step in range(0, HEADS * num_steps):
            next_column = block_column(
                blocks, begin, walk_tile(num_masked_prefix, num_unmasked, step + 1, MASKED), QUERIES, BLOCK
            )
            start, head = _group_tile(
                begin, num_masked_prefix, num_unmasked, step, num_steps, column, QUERIES, BLOCK, GROUP, MASKED
            )
            head = (key_head * GROUP + head).to(tl.int64)
            key_grad, value_grad = _key_step(
                q + head * q_strides[2], dout + head * dout_strides[2], stats + head * num_queries * 2,
                q_strides[1], dout_strides[1], start, num_queries, key, value, lo, hi, dropout, head,
                key_grad, value_grad, log2_scale,
                QUERIES, DIM, VALUE_DIM, PADDED, VALUE_PADDED, PRECISION, MASKED,
            )  # fmt: skip
            column = next_column
    if dropout is not None:
        value_grad *= factor

    base = batch * num_keys * NUM_KEY_HEADS + key_head
    _put_rows(dk + base * DIM, key_grad * scale, first, end, NUM_KEY_HEADS, KEYS, DIM, PADDED, ADD_DK)
    _put_rows(dv + base * VALUE_DIM, value_grad, first, end, NUM_KEY_HEADS, KEYS, VALUE_DIM, VALUE_PADDED, ADD_DV)


@triton.jit
def _put_rows(
    base, tile, first, end, NUM_HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Write `tile` to rows [first, end), ROWS at most, of one head of a contiguous (rows, NUM_HEADS, DIM) matrix, or ADD it."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
    pointers = base + first.to(tl.int64) * (NUM_HEADS * DIM) + (rows * (NUM_HEADS * DIM) + columns)
    mask = (rows < end - first) & (columns < DIM)
    if ADD:
        tile += tl.load(pointers, mask=mask, other=0.0)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _query_step(
    query, grad, k, v, k_stride, v_stride, start, num_keys, lo, hi, log2_lse, delta, dropout, head, dq, log2_scale,
    STEP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq / scale of the query tile after the key tile at `start`; `dropout` as in `_key_step`."""
    key = load_rows(k, start, k_stride, num_keys, STEP, DIM, PADDED, MASKED)
    value = load_rows(v, start, v_stride, num_keys, STEP, VALUE_DIM, VALUE_PADDED, MASKED)
    p = tl.exp2(tl.dot(query, tl.trans(key), input_precision=PRECISION) * log2_scale - log2_lse[:, None])
    if MASKED:
        p = tl.where(visible(lo, hi, start, STEP), p, 0.0)
    dp = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
    if dropout is not None:
        dp = tl.where(draw(dropout, head, start, num_keys, STEP, False, MASKED), dp * dropout[6], 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(key.dtype), key, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_masks", "num_tiles", "num_queries", "num_keys", "first_head", "seed", "threshold"])
def _query_gradient_kernel(
    q, k, v, dout, stats, lo, hi, table, dq,
    q_strides, k_strides, v_strides, dout_strides, num_masks, num_tiles, num_queries, num_keys, scale,
    query_positions, key_positions, first_head, seed: tl.uint64, threshold: tl.uint32, factor, block_lists, block_strides,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    ADD_DQ: tl.constexpr,
):  # fmt: skip
    turn, index = schedule(num_tiles)
    head, batch = (index % NUM_HEADS).to(tl.int64), (index // NUM_HEADS).to(tl.int64)
    q += batch * q_strides[0] + head * q_strides[2]
    k += batch * k_strides[0] + head // GROUP * k_strides[2]
    v += batch * v_strides[0] + head // GROUP * v_strides[2]
    dout += batch * dout_strides[0] + head * dout_strides[2]
    entry = tl.minimum(batch, num_masks - 1)
    lo += entry * num_queries
    hi += entry * num_queries
    stats += (batch * NUM_HEADS + head) * num_queries * 2

    first, end, begin, num_masked_prefix, num_unmasked, num_masked = load_tile(table + (entry * num_tiles + turn) * 6)
    query = load_rows(q, first, q_strides[1], end, QUERIES, DIM, PADDED, True)
    grad = load_rows(dout, first, dout_strides[1], end, QUERIES, VALUE_DIM, VALUE_PADDED, True)
    log2_lse, delta = _load_stats(stats, first, end, QUERIES, True)
    row_lo, row_hi = load_scalars(lo, first, end, QUERIES, True), load_scalars(hi, first, end, QUERIES, True)
    blocks, dropout = None, None
    if block_lists is not None:
        blocks = kept_blocks(block_lists, block_strides, batch, head, first // BLOCK, num_keys, BLOCK, 1)
        begin, num_masked_prefix, num_unmasked, num_masked = walk_blocks(lo, hi, first, end, blocks, KEYS, BLOCK, 1)
    if query_positions is not None:
        row_positions = load_scalars(query_positions, first, end, QUERIES, True)
        dropout = (row_positions, key_positions, batch, first_head, seed, threshold, factor)
    log2_scale = scale * LOG2_E
    query_grad = tl.zeros([QUERIES, PADDED], tl.float32)
    for MASKED in tl.static_range(2):
        column = block_column(blocks, begin, walk_tile(num_masked_prefix, num_unmasked, 0, MASKED), KEYS, BLOCK)
        for i in range(0, num_masked if MASKED else num_unmasked):
            next_column = block_column(blocks, begin, walk_tile(num_masked_prefix, num_unmasked, i + 1, MASKED), KEYS, BLOCK)
            start = tile_start(begin, walk_tile(num_masked_prefix, num_unmasked, i, MASKED), column, KEYS, BLOCK, 1)
            query_grad = _query_step(
                query, grad, k, v, k_strides[1], v_strides[1], start, num_keys,
                row_lo, row_hi, log2_lse, delta, dropout, head, query_grad, log2_scale,
                KEYS, DIM, VALUE_DIM, PADDED, VALUE_PADDED, PRECISION, MASKED,
            )  # fmt: skip
            column = next_column
    base = batch * num_queries * NUM_HEADS + head
    _put_rows(dq + base * DIM, query_grad * scale, first, end, NUM_HEADS, QUERIES, DIM, PADDED, ADD_DQ)


@triton.jit(do_not_specialize=["num_rows"])
def _row_delta_kernel(
    out, dout, dlse, delta, num_rows, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    outputs = triton_common.load_outputs(out, dout, rows, inside, DIM, PADDED)
    tl.store(delta + rows, triton_common.row_delta(outputs, dlse, rows, inside), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _prepare_kernel(lse, delta, stats, num_rows, NUM_HEADS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    num_tiles = tl.cdiv(num_rows, ROWS)
    before = (tl.program_id(0) // num_tiles).to(tl.int64) * num_rows * NUM_HEADS  # of a batch entry
    rows, heads = tl.program_id(0) % num_tiles * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    index = before + rows.to(tl.int64)[:, None] * NUM_HEADS + heads[None, :]
    mask = (rows < num_rows)[:, None] & (heads < NUM_HEADS)[None, :]
    log2_lse = tl.load(lse + index, mask=mask, other=0.0) * LOG2_E
    deltas = tl.load(delta + index, mask=mask, other=0.0)
    pairs = tl.join(tl.trans(log2_lse), tl.trans(deltas))
    index = before + heads.to(tl.int64)[:, None] * num_rows + rows[None, :]
    mask = (heads < NUM_HEADS)[:, None] & (rows < num_rows)[None, :]
    tl.store(stats + index[:, :, None] * 2 + tl.arange(0, 2)[None, None, :], pairs, mask=mask[:, :, None])


def _prepare(lse: Tensor, delta: Tensor) -> Tensor:
    """Stats (B, Hq, Nq, 2), what the gradient kernels read of lse and delta: lse in log2 units and delta, side by side.

    Read in the inner loop, at the strides of (B, Nq, Hq) each would cost a sector of 32 bytes.
    """
    batch, num_rows, num_heads = lse.shape
    stats = lse.new_empty(batch, num_heads, num_rows, 2)
    padded = triton.next_power_of_2(num_heads)
    rows = max(1, 2048 // padded)
    _prepare_kernel[(triton.cdiv(num_rows, rows) * batch,)](
        lse.contiguous(), delta.contiguous(), stats, num_rows, NUM_HEADS=num_heads, PADDED=padded, ROWS=rows
    )
    return stats


def row_delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """`ringattn.kernels.reference.row_delta` in one pass: out, dout (B, N, Hq, Dv) of one dtype, dlse fp32 (B, N, Hq) or None."""
    rows, value_dim = out.shape[:3], out.shape[-1]
    delta = out.new_empty(rows, dtype=torch.float32)
    tile = 64
    if delta.numel() > 0:
        with torch.cuda.device_of(out):
            launch(
                _row_delta_kernel, -(-delta.numel() // tile),
                (out.contiguous(), dout.contiguous(), None if dlse is None else dlse.contiguous(), delta), (delta.numel(),),
                DIM=value_dim, PADDED=max(16, 1 << (value_dim - 1).bit_length()), ROWS=tile,
            )  # fmt: skip
    return delta


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
    """This block's gradients (dq, dk, dv).

    Args:
        q, k, v, intervals, scale, dropout, blocks, precision: as for `ringattn.kernels.triton.forward.forward`.
        dout: gradient of the output (B, Nq, Hq, Dv) in q's dtype.
        lse, delta: fp32 (B, Nq, Hq); lse over all keys of the row, those of other blocks included, and delta from
            `ringattn.kernels.reference.row_delta`.
        dq, dk, dv: contiguous fp32 accumulators with the shapes of q, k, v; added into and returned. None: a fresh tensor is
            returned.
        grad_dtype: of fresh gradients: q's dtype (None) or fp32.

    Raises:
        ValueError: shapes, dtypes, devices, head dims, scale or precision outside the above.
    """
    validation.check_inputs(q, k, v, intervals, scale)
    validation.check_supported(q, v)
    validation.check_options(q, k, dropout, blocks, precision)
    given = dq, dk, dv
    validation.check_gradients(q, k, v, dout, lse, delta, given, grad_dtype)
    dq, dk, dv = triton_common.allocate_gradients(q, k, v, given, grad_dtype)
    if q.numel() == 0 or k.numel() == 0:
        return dq, dk, dv
    add_dq, add_dk, add_dv = (x is not None for x in given)
    (batch, num_queries, num_heads), (num_keys, num_key_heads) = q.shape[:3], k.shape[1:3]
    q, k, v, dout = (triton_common.as_rows(x) for x in (q, k, v, dout))
    strides = [x.stride()[:3] for x in (q, k, v, dout)]
    sizes = num_queries, num_keys, float(scale)
    drop = triton_common.dropout_arguments(dropout)
    constants = triton_common.shape_constants(q, k, v) | dict(BLOCK=0 if blocks is None else blocks.size, PRECISION=precision)
    head_dim = max(constants["PADDED"], constants["VALUE_PADDED"])
    with torch.cuda.device_of(q):
        operands = q, k, v, dout, _prepare(lse, delta)
        tile, by_key = (
            triton_common.fit_tile(triton_common.choose_tile("key_gradient", q.dtype, head_dim), blocks),
            intervals.transposed,
        )
        table = by_key.tiles(tile.keys, tile.queries, cut=blocks is None)
        num_tiles = table.shape[1]
        lists = None if blocks is None else blocks.key_lists(num_heads // num_key_heads)
        _key_gradient_kernel[(num_tiles * batch * num_key_heads,)](
            *operands, by_key.lo, by_key.hi, table, dk, dv, *strides, by_key.batch, num_tiles, *sizes, *drop,
            *triton_common.block_arguments(lists, batch, num_key_heads), ADD_DK=add_dk, ADD_DV=add_dv,
            **constants, **tile.options(),
        )  # fmt: skip
        tile = triton_common.fit_tile(triton_common.choose_tile("query_gradient", q.dtype, head_dim), blocks)
        table = intervals.tiles(tile.queries, tile.keys, cut=blocks is None)
        num_tiles = table.shape[1]
        lists = None if blocks is None else blocks.query_lists
        _query_gradient_kernel[(num_tiles * batch * num_heads,)](
            *operands, intervals.lo, intervals.hi, table, dq, *strides, intervals.batch, num_tiles, *sizes, *drop,
            *triton_common.block_arguments(lists, batch, num_heads), ADD_DQ=add_dq, **constants, **tile.options(),
        )  # fmt: skip
    return dq, dk, dv
