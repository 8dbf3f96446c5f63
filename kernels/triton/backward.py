"""The Triton backward is FlashAttention-2 (Dao 2023, algorithm 2) in two kernels. The kernels use no atomic additions, so the
gradients are deterministic.

Both kernels recompute the probabilities p = exp(s - lse), so there are 7 matrix products instead of 5.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.triton import common
from ringattn.kernels.triton.common import LOG2_E, load_rows, load_scalars, load_tile, visible
from ringattn.kernels.triton.launcher import OPTIONS, launch


@triton.jit
def _load_stats(stats, first, num_rows, ROWS: tl.constexpr, MASKED: tl.constexpr):
    # The tile contains lse and delta twice, because Triton would load a tile of two columns with 32 loads per thread.
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, 4)[None, :] % 2
    pointers = stats + first.to(tl.int64) * 2 + (rows * 2 + columns)
    tile = tl.load(pointers, mask=rows < num_rows - first, other=0.0) if MASKED else tl.load(pointers)
    lse, delta = tl.split(tl.reshape(tile, [ROWS, 2, 2]))
    lse, _ = tl.split(lse)
    delta, _ = tl.split(delta)
    return lse, delta


@triton.jit
def _add_queries(operands, dropout, sums, start, head, MASKED: tl.constexpr, CONFIG: tl.constexpr):
    """The argument `sums` is (dk / scale, dv / factor)."""
    q, dout, stats, q_strides, dout_strides, num_queries, key_head, key, value, lo, hi, log2_scale = operands
    dk, dv = sums
    head = (key_head * CONFIG.group + head).to(tl.int64)
    q += head * q_strides[2]
    dout += head * dout_strides[2]
    stats += head * num_queries * 2
    query = load_rows(q, start, q_strides[1], num_queries, CONFIG.queries, CONFIG.dim, MASKED)
    log2_lse, delta = _load_stats(stats, start, num_queries, CONFIG.queries, MASKED)
    p = tl.exp2(tl.dot(key, tl.trans(query), input_precision=CONFIG.precision) * log2_scale - log2_lse[None, :])
    # Mask p instead of the scores, because lse is -inf for queries without keys.
    if MASKED:
        p = tl.where(visible(lo, hi, start, CONFIG.queries), p, 0.0)
    grad = load_rows(dout, start, dout_strides[1], num_queries, CONFIG.queries, CONFIG.value_dim, MASKED)
    # dv needs p after dropout, and ds needs p before dropout.
    dropped = p
    if dropout is not None:
        keep = common.draw_keep_mask(dropout, head, start, num_queries, CONFIG.queries, True, MASKED)
        dropped = tl.where(keep, p, 0.0)
    dv = tl.dot(dropped.to(grad.dtype), grad, dv, input_precision=CONFIG.precision)
    dp = tl.dot(value, tl.trans(grad), input_precision=CONFIG.precision)
    if dropout is not None:
        dp = tl.where(keep, dp * dropout[6], 0.0)
    # `scale` is applied once, after the loop.
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(query.dtype), query, dk, input_precision=CONFIG.precision)
    return dk, dv


@triton.jit(do_not_specialize=["num_masks", "num_tiles", "num_queries", "num_keys", "first_head", "seed", "threshold"])
def _key_gradient_kernel(
    q, k, v, dout, stats, query_lo, query_hi, table, dk, dv,
    q_strides, k_strides, v_strides, dout_strides, num_masks, num_tiles, num_queries, num_keys, scale,
    query_positions, key_positions, first_head, seed: tl.uint64, threshold: tl.uint32, factor, block_lists, block_strides,
    ADD_DK: tl.constexpr, ADD_DV: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one tile of keys of one key head.

    Args:
        stats: see `_interleave`.
        query_lo, query_hi: (num_masks, Nk), the interval of queries that attend to each key.
        dk, dv: contiguous.

    For the other arguments, see `forward._forward_kernel`.
    """
    NUM_KEY_HEADS: tl.constexpr = CONFIG.num_heads // CONFIG.group
    KEYS: tl.constexpr = CONFIG.keys
    PADDED: tl.constexpr = common.pad_dim(CONFIG.dim)
    VALUE_PADDED: tl.constexpr = common.pad_dim(CONFIG.value_dim)
    tile, index = common.program_tile(num_tiles)
    key_head, batch = index % NUM_KEY_HEADS, (index // NUM_KEY_HEADS).to(tl.int64)
    k += batch * k_strides[0] + key_head.to(tl.int64) * k_strides[2]
    v += batch * v_strides[0] + key_head.to(tl.int64) * v_strides[2]
    q += batch * q_strides[0]
    dout += batch * dout_strides[0]
    stats += batch * num_queries * CONFIG.num_heads * 2
    entry = tl.minimum(batch, num_masks - 1)
    query_lo += entry * num_keys
    query_hi += entry * num_keys

    first, end, loop = load_tile(table + (entry * num_tiles + tile) * 6)
    key = load_rows(k, first, k_strides[1], end, KEYS, CONFIG.dim, True)
    value = load_rows(v, first, v_strides[1], end, KEYS, CONFIG.value_dim, True)
    lo, hi = load_scalars(query_lo, first, end, KEYS, True), load_scalars(query_hi, first, end, KEYS, True)
    blocks, dropout = None, None
    if block_lists is not None:
        blocks = common.kept_blocks(
            block_lists, block_strides, batch, key_head, first // CONFIG.block, num_queries, CONFIG.block, CONFIG.group
        )
        loop = common.block_loop(query_lo, query_hi, first, end, blocks, CONFIG.queries, CONFIG.block, CONFIG.group)
    if query_positions is not None:
        row_positions = load_scalars(key_positions, first, end, KEYS, True)
        dropout = (row_positions, query_positions, batch, first_head, seed, threshold, factor)
    log2_scale = scale * LOG2_E
    key_grad, value_grad = tl.zeros([KEYS, PADDED], tl.float32), tl.zeros([KEYS, VALUE_PADDED], tl.float32)
    operands = q, dout, stats, q_strides, dout_strides, num_queries, key_head, key, value, lo, hi, log2_scale
    key_grad, value_grad = common.run_loop(
        _add_queries, operands, dropout, (key_grad, value_grad), loop, blocks, CONFIG.queries, CONFIG.group, CONFIG
    )
    if dropout is not None:
        value_grad *= factor

    base = batch * num_keys * NUM_KEY_HEADS + key_head
    _store_rows(dk + base * CONFIG.dim, key_grad * scale, first, end, NUM_KEY_HEADS, KEYS, CONFIG.dim, ADD_DK)
    _store_rows(dv + base * CONFIG.value_dim, value_grad, first, end, NUM_KEY_HEADS, KEYS, CONFIG.value_dim, ADD_DV)


@triton.jit
def _store_rows(base, tile, first, end, NUM_HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, ADD: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, common.pad_dim(DIM))[None, :]
    pointers = base + (first + rows).to(tl.int64) * (NUM_HEADS * DIM) + columns
    mask = (rows < end - first) & (columns < DIM)
    # No other program writes these elements.
    if ADD:
        tile += tl.load(pointers, mask=mask, other=0.0)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _add_keys(operands, dropout, dq, start, group_head, MASKED: tl.constexpr, CONFIG: tl.constexpr):
    query, grad, k, v, k_stride, v_stride, num_keys, lo, hi, log2_lse, delta, head, log2_scale = operands
    key = load_rows(k, start, k_stride, num_keys, CONFIG.keys, CONFIG.dim, MASKED)
    value = load_rows(v, start, v_stride, num_keys, CONFIG.keys, CONFIG.value_dim, MASKED)
    p = tl.exp2(tl.dot(query, tl.trans(key), input_precision=CONFIG.precision) * log2_scale - log2_lse[:, None])
    if MASKED:
        p = tl.where(visible(lo, hi, start, CONFIG.keys), p, 0.0)
    dp = tl.dot(grad, tl.trans(value), input_precision=CONFIG.precision)
    if dropout is not None:
        keep = common.draw_keep_mask(dropout, head, start, num_keys, CONFIG.keys, False, MASKED)
        dp = tl.where(keep, dp * dropout[6], 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(key.dtype), key, dq, input_precision=CONFIG.precision)


@triton.jit(do_not_specialize=["num_masks", "num_tiles", "num_queries", "num_keys", "first_head", "seed", "threshold"])
def _query_gradient_kernel(
    q, k, v, dout, stats, lo, hi, table, dq,
    q_strides, k_strides, v_strides, dout_strides, num_masks, num_tiles, num_queries, num_keys, scale,
    query_positions, key_positions, first_head, seed: tl.uint64, threshold: tl.uint32, factor, block_lists, block_strides,
    ADD_DQ: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """The tensor dq is contiguous."""
    QUERIES: tl.constexpr = CONFIG.queries
    PADDED: tl.constexpr = common.pad_dim(CONFIG.dim)
    tile, index = common.program_tile(num_tiles)
    head, batch = (index % CONFIG.num_heads).to(tl.int64), (index // CONFIG.num_heads).to(tl.int64)
    q += batch * q_strides[0] + head * q_strides[2]
    k += batch * k_strides[0] + head // CONFIG.group * k_strides[2]
    v += batch * v_strides[0] + head // CONFIG.group * v_strides[2]
    dout += batch * dout_strides[0] + head * dout_strides[2]
    entry = tl.minimum(batch, num_masks - 1)
    lo += entry * num_queries
    hi += entry * num_queries
    stats += (batch * CONFIG.num_heads + head) * num_queries * 2

    first, end, loop = load_tile(table + (entry * num_tiles + tile) * 6)
    query = load_rows(q, first, q_strides[1], end, QUERIES, CONFIG.dim, True)
    grad = load_rows(dout, first, dout_strides[1], end, QUERIES, CONFIG.value_dim, True)
    log2_lse, delta = _load_stats(stats, first, end, QUERIES, True)
    row_lo, row_hi = load_scalars(lo, first, end, QUERIES, True), load_scalars(hi, first, end, QUERIES, True)
    blocks, dropout = None, None
    if block_lists is not None:
        blocks = common.kept_blocks(block_lists, block_strides, batch, head, first // CONFIG.block, num_keys, CONFIG.block, 1)
        loop = common.block_loop(lo, hi, first, end, blocks, CONFIG.keys, CONFIG.block, 1)
    if query_positions is not None:
        row_positions = load_scalars(query_positions, first, end, QUERIES, True)
        dropout = (row_positions, key_positions, batch, first_head, seed, threshold, factor)
    log2_scale = scale * LOG2_E
    query_grad = tl.zeros([QUERIES, PADDED], tl.float32)
    operands = query, grad, k, v, k_strides[1], v_strides[1], num_keys, row_lo, row_hi, log2_lse, delta, head, log2_scale
    query_grad = common.run_loop(_add_keys, operands, dropout, query_grad, loop, blocks, CONFIG.keys, 1, CONFIG)
    base = batch * num_queries * CONFIG.num_heads + head
    _store_rows(dq + base * CONFIG.dim, query_grad * scale, first, end, CONFIG.num_heads, QUERIES, CONFIG.dim, ADD_DQ)


@triton.jit(do_not_specialize=["num_rows"])
def _row_delta_kernel(out, dout, dlse, delta, num_rows, DIM: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    outputs = common.load_outputs(out, dout, rows, inside, DIM, common.pad_dim(DIM))
    tl.store(delta + rows, common.row_delta(outputs, dlse, rows, inside), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _interleave_kernel(lse, delta, stats, num_rows, NUM_HEADS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    num_tiles = tl.cdiv(num_rows, ROWS)
    before = (tl.program_id(0) // num_tiles).to(tl.int64) * num_rows * NUM_HEADS
    rows, heads = tl.program_id(0) % num_tiles * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    index = before + rows.to(tl.int64)[:, None] * NUM_HEADS + heads[None, :]
    mask = (rows < num_rows)[:, None] & (heads < NUM_HEADS)[None, :]
    log2_lse = tl.load(lse + index, mask=mask, other=0.0) * LOG2_E
    deltas = tl.load(delta + index, mask=mask, other=0.0)
    pairs = tl.join(tl.trans(log2_lse), tl.trans(deltas))
    index = before + heads.to(tl.int64)[:, None] * num_rows + rows[None, :]
    mask = (heads < NUM_HEADS)[:, None] & (rows < num_rows)[None, :]
    tl.store(stats + index[:, :, None] * 2 + tl.arange(0, 2)[None, None, :], pairs, mask=mask[:, :, None])


def _interleave(lse: Tensor, delta: Tensor) -> Tensor:
    """Combine lse (in log2 units) and delta, both (B, Nq, Hq), into one fp32 tensor (B, Hq, Nq, 2)."""
    batch, num_rows, num_heads = lse.shape
    stats = lse.new_empty(batch, num_heads, num_rows, 2)
    padded = triton.next_power_of_2(num_heads)
    rows = max(1, 2048 // padded)
    _interleave_kernel[(triton.cdiv(num_rows, rows) * batch,)](
        lse.contiguous(), delta.contiguous(), stats, num_rows, NUM_HEADS=num_heads, PADDED=padded, ROWS=rows, **OPTIONS
    )
    return stats


def row_delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """Compute `reference.row_delta`."""
    rows, value_dim = out.shape[:3], out.shape[-1]
    delta = out.new_empty(rows, dtype=torch.float32)
    tile = 64
    if delta.numel() > 0:
        with torch.cuda.device_of(out):
            launch(
                _row_delta_kernel, -(-delta.numel() // tile),
                (out.contiguous(), dout.contiguous(), None if dlse is None else dlse.contiguous(), delta), (delta.numel(),),
                DIM=value_dim, ROWS=tile,
            )  # fmt: skip
    return delta


def backward(
    q, k, v, dout, lse, delta, intervals, scale, dq=None, dk=None, dv=None,
    *, grad_dtype=None, dropout=None, blocks=None, precision="ieee",
):  # fmt: skip
    """Compute `reference.backward`. The restrictions of `forward.forward` apply."""
    given = dq, dk, dv
    dq, dk, dv = common.allocate_gradients(q, k, v, given, grad_dtype)
    if q.numel() == 0 or k.numel() == 0:
        return dq, dk, dv
    add_dq, add_dk, add_dv = (x is not None for x in given)
    inputs = [common.as_addressable(x) for x in (q, k, v, dout)]
    with torch.cuda.device_of(q):
        inputs.append(_interleave(lse, delta))
        common.launch_tiles(
            _key_gradient_kernel, "key_gradient", inputs, intervals, (dk, dv), scale, dropout, blocks,
            precision, ADD_DK=add_dk, ADD_DV=add_dv,
        )  # fmt: skip
        common.launch_tiles(
            _query_gradient_kernel, "query_gradient", inputs, intervals, (dq,), scale, dropout, blocks,
            precision, ADD_DQ=add_dq,
        )  # fmt: skip
    return dq, dk, dv
