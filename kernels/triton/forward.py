"""The Triton forward: FlashAttention-2 (Dao 2023, algorithm 1)."""

import torch
import triton
import triton.language as tl

from ringattn.kernels.reference import State
from ringattn.kernels.triton import common
from ringattn.kernels.triton.common import LN_2, LOG2_E, load_rows, load_scalars, load_tile, visible


@triton.jit
def add_tile(operands, dropout, state, start, group_head, MASKED: tl.constexpr, CONFIG: tl.constexpr):
    """Add the key tile at `start` to the state (m, l, o) of a query tile. m is in log2 units.

    For the arguments, see `common.run_loop`. After the last tile, the caller must multiply o by the dropout
    factor.
    """
    q, k, v, k_stride, v_stride, num_keys, lo, hi, head, log2_scale = operands
    m, l, o = state
    key = load_rows(k, start, k_stride, num_keys, CONFIG.keys, CONFIG.dim, MASKED)
    scores = tl.dot(q, tl.trans(key), input_precision=CONFIG.precision)
    if MASKED:
        scores = tl.where(visible(lo, hi, start, CONFIG.keys), scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, 1) * log2_scale)
    # Subtract 0 if m is -inf, because exp2(-inf + inf) is NaN.
    reference_max = tl.where(new_m == float("-inf"), 0.0, new_m) if MASKED else new_m
    p = tl.exp2(scores * log2_scale - reference_max[:, None])
    alpha = tl.exp2(m - reference_max)
    # l sums all probabilities, but o sums only the kept ones.
    dropped = p
    if dropout is not None:
        dropped = tl.where(common.draw_keep_mask(dropout, head, start, num_keys, CONFIG.keys, False, MASKED), p, 0.0)
    value = load_rows(v, start, v_stride, num_keys, CONFIG.keys, CONFIG.value_dim, MASKED)
    # Passing o to tl.dot as the accumulator saves an addition.
    o = tl.dot(dropped.to(value.dtype), value, o * alpha[:, None], input_precision=CONFIG.precision)
    return new_m, l * alpha + tl.sum(p, 1), o


@triton.jit(do_not_specialize=["num_masks", "num_tiles", "num_queries", "num_keys", "first_head", "seed", "threshold"])
def _forward_kernel(
    q, k, v, lo, hi, table, state_m, state_l, state_o, out, lse,
    q_strides, k_strides, v_strides, num_masks, num_tiles, num_queries, num_keys, scale,
    query_positions, key_positions, first_head, seed: tl.uint64, threshold: tl.uint32, factor, block_lists, block_strides,
    HAS_STATE: tl.constexpr, FINAL: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute attention of one tile of queries of one head.

    Args:
        q, k, v: with any strides except for the last dimension.
        lo, hi: (num_masks, Nq), the interval of each query.
        table: (num_masks, num_tiles, 6), see `Intervals.tiles`.
        m, l, o: the state that is read with HAS_STATE and written without FINAL, or None.
        out, lse: written with FINAL, or None.
        query_positions to factor: see `common.dropout_arguments`.
        block_lists, block_strides: the lists of kept blocks and their strides per batch entry and head, or None.
    """
    QUERIES: tl.constexpr = CONFIG.queries
    PADDED: tl.constexpr = common.pad_dim(CONFIG.value_dim)
    tile, index = common.program_tile(num_tiles)
    head, batch = index % CONFIG.num_heads, (index // CONFIG.num_heads).to(tl.int64)
    head_index = head.to(tl.int64)
    q += batch * q_strides[0] + head_index * q_strides[2]
    k += batch * k_strides[0] + head_index // CONFIG.group * k_strides[2]
    v += batch * v_strides[0] + head_index // CONFIG.group * v_strides[2]
    entry = tl.minimum(batch, num_masks - 1)
    lo += entry * num_queries
    hi += entry * num_queries

    first, end, loop = load_tile(table + (entry * num_tiles + tile) * 6)
    query = load_rows(q, first, q_strides[1], end, QUERIES, CONFIG.dim, True)
    row_lo, row_hi = load_scalars(lo, first, end, QUERIES, True), load_scalars(hi, first, end, QUERIES, True)
    blocks, dropout = None, None
    if block_lists is not None:
        blocks = common.kept_blocks(block_lists, block_strides, batch, head, first // CONFIG.block, num_keys, CONFIG.block, 1)
        loop = common.block_loop(lo, hi, first, end, blocks, CONFIG.keys, CONFIG.block, 1)
    if query_positions is not None:
        row_positions = load_scalars(query_positions, first, end, QUERIES, True)
        dropout = (row_positions, key_positions, batch, first_head, seed, threshold, factor)
    log2_scale = scale * LOG2_E
    m = tl.full([QUERIES], float("-inf"), tl.float32)
    l = tl.zeros([QUERIES], tl.float32)
    o = tl.zeros([QUERIES, PADDED], tl.float32)
    operands = query, k, v, k_strides[1], v_strides[1], num_keys, row_lo, row_hi, head, log2_scale
    m, l, o = common.run_loop(add_tile, operands, dropout, (m, l, o), loop, blocks, CONFIG.keys, 1, CONFIG)
    if dropout is not None:
        o *= factor

    rows = first + tl.arange(0, QUERIES)
    columns = tl.arange(0, PADDED)
    row_mask = rows < end
    mask = row_mask[:, None] & (columns[None, :] < CONFIG.value_dim)
    row_index = (batch * num_queries + rows) * CONFIG.num_heads + head
    index = row_index[:, None] * CONFIG.value_dim + columns[None, :]
    # The incoming o is already multiplied by the dropout factor.
    if HAS_STATE:
        other_m = tl.load(state_m + row_index, mask=row_mask, other=float("-inf")) * LOG2_E
        other_l = tl.load(state_l + row_index, mask=row_mask, other=0.0)
        other_o = tl.load(state_o + index, mask=mask, other=0.0)
        # `reference.merge` with m in log2 units.
        new_m = tl.maximum(m, other_m)
        reference_max = tl.where(new_m == float("-inf"), 0.0, new_m)
        alpha, beta = tl.exp2(m - reference_max), tl.exp2(other_m - reference_max)
        m, l, o = new_m, alpha * l + beta * other_l, alpha[:, None] * o + beta[:, None] * other_o
    if FINAL:
        o *= (1.0 / tl.where(l == 0.0, 1.0, l))[:, None]
        tl.store(out + index, o.to(out.dtype.element_ty), mask=mask)
        tl.store(lse + row_index, (m + tl.log2(l)) * LN_2, mask=row_mask)
    else:
        if HAS_STATE:
            tl.debug_barrier()  # all warps must load the state before any warp stores it
        tl.store(state_m + row_index, m * LN_2, mask=row_mask)
        tl.store(state_l + row_index, l, mask=row_mask)
        tl.store(state_o + index, o, mask=mask)


def forward(q, k, v, intervals, scale, state=None, final=False, *, dropout=None, blocks=None, precision="ieee") -> State:
    """Compute `reference.forward`.

    q, k and v are fp16, bf16 or fp32, with head dims up to 256. Tensors whose strides the kernel cannot use are copied.
    """
    m, l, o, out, lse = common.allocate_results(q, v, state, final)
    if q.numel() > 0:
        inputs = [common.as_addressable(x) for x in (q, k, v)]
        with torch.cuda.device_of(q):
            common.launch_tiles(
                _forward_kernel, "forward", inputs, intervals, (m, l, o, out, lse), scale, dropout, blocks,
                precision, HAS_STATE=state is not None, FINAL=final,
            )  # fmt: skip
    return (out, lse) if final else (m, l, o)
