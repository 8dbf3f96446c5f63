"""Portable Triton forward: the contract of `ringattn.kernels.reference.forward`, by tiles (Dao 2023, algorithm 1).

A program owns one tile of query rows of one head and walks over the key tiles that the rows' intervals reach: tiles that
no row sees are never loaded, and only those at the two ends of the walk are masked. Scores are in log2 units.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels import validation
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import State
from ringattn.kernels.triton import common as triton_common
from ringattn.kernels.triton.common import (
    LN_2,
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


@triton.jit
def _step(
    q, k, v, k_stride, v_stride, start, num_keys, lo, hi, dropout, head, m, l, o, log2_scale,
    STEP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The state (m, l, o) of the query tile after the key tile at `start`; m is in log2 units.

    `dropout` is None or as in `ringattn.kernels.triton.common.draw`; o is left to be scaled by its factor.
    """
    key = load_rows(k, start, k_stride, num_keys, STEP, DIM, PADDED, MASKED)
    scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(visible(lo, hi, start, STEP), scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, 1) * log2_scale)
    # a row that has seen no key yet keeps m = -inf: subtract 0 there, exp2(-inf - 0) = 0
    origin = tl.where(new_m == float("-inf"), 0.0, new_m) if MASKED else new_m
    p = tl.exp2(scores * log2_scale - origin[:, None])
    alpha = tl.exp2(m - origin)
    dropped = p
    if dropout is not None:
        dropped = tl.where(draw(dropout, head, start, num_keys, STEP, False, MASKED), p, 0.0)
    value = load_rows(v, start, v_stride, num_keys, STEP, VALUE_DIM, VALUE_PADDED, MASKED)
    o = tl.dot(dropped.to(value.dtype), value, o * alpha[:, None], input_precision=PRECISION)
    return new_m, l * alpha + tl.sum(p, 1), o


@triton.jit
def _merge(m, l, o, other_m, other_l, other_o):
    """`ringattn.kernels.reference.merge` with m in log2 units."""
    new_m = tl.maximum(m, other_m)
    origin = tl.where(new_m == float("-inf"), 0.0, new_m)
    alpha, beta = tl.exp2(m - origin), tl.exp2(other_m - origin)
    return new_m, alpha * l + beta * other_l, alpha[:, None] * o + beta[:, None] * other_o


@triton.jit(do_not_specialize=["num_masks", "num_tiles", "num_queries", "num_keys", "first_head", "seed", "threshold"])
def _forward_kernel(
    q, k, v, lo, hi, table, state_m, state_l, state_o, out, lse,
    q_strides, k_strides, v_strides, num_masks, num_tiles, num_queries, num_keys, scale,
    query_positions, key_positions, first_head, seed: tl.uint64, threshold: tl.uint32, factor, block_lists, block_strides,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, HAS_STATE: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    turn, index = schedule(num_tiles)
    head, batch = index % NUM_HEADS, (index // NUM_HEADS).to(tl.int64)
    head_index = head.to(tl.int64)
    q += batch * q_strides[0] + head_index * q_strides[2]
    k += batch * k_strides[0] + head_index // GROUP * k_strides[2]
    v += batch * v_strides[0] + head_index // GROUP * v_strides[2]
    entry = tl.minimum(batch, num_masks - 1)
    lo += entry * num_queries
    hi += entry * num_queries

    first, end, begin, num_masked_prefix, num_unmasked, num_masked = load_tile(table + (entry * num_tiles + turn) * 6)
    query = load_rows(q, first, q_strides[1], end, QUERIES, DIM, PADDED, True)
    row_lo, row_hi = load_scalars(lo, first, end, QUERIES, True), load_scalars(hi, first, end, QUERIES, True)
    blocks, dropout = None, None
    if block_lists is not None:
        blocks = kept_blocks(block_lists, block_strides, batch, head, first // BLOCK, num_keys, BLOCK, 1)
        begin, num_masked_prefix, num_unmasked, num_masked = walk_blocks(lo, hi, first, end, blocks, KEYS, BLOCK, 1)
    if query_positions is not None:
        row_positions = load_scalars(query_positions, first, end, QUERIES, True)
        dropout = (row_positions, key_positions, batch, first_head, seed, threshold, factor)
    log2_scale = scale * LOG2_E
    m = tl.full([QUERIES], float("-inf"), tl.float32)
    l = tl.zeros([QUERIES], tl.float32)
    o = tl.zeros([QUERIES, VALUE_PADDED], tl.float32)
    for MASKED in tl.static_range(2):  # the tiles that all rows see, then those to mask
        column = block_column(blocks, begin, walk_tile(num_masked_prefix, num_unmasked, 0, MASKED), KEYS, BLOCK)
        for i in range(0, num_masked if MASKED else num_unmasked):
            next_column = block_column(blocks, begin, walk_tile(num_masked_prefix, num_unmasked, i + 1, MASKED), KEYS, BLOCK)
            start = tile_start(begin, walk_tile(num_masked_prefix, num_unmasked, i, MASKED), column, KEYS, BLOCK, 1)
            m, l, o = _step(
                query, k, v, k_strides[1], v_strides[1], start, num_keys, row_lo, row_hi, dropout, head, m, l, o, log2_scale,
                KEYS, DIM, VALUE_DIM, PADDED, VALUE_PADDED, PRECISION, MASKED,
            )  # fmt: skip
            column = next_column
    if dropout is not None:
        o *= factor

    rows = first + tl.arange(0, QUERIES)
    columns = tl.arange(0, VALUE_PADDED)
    row_mask = rows < end
    mask = row_mask[:, None] & (columns[None, :] < VALUE_DIM)
    row_index = (batch * num_queries + rows) * NUM_HEADS + head
    index = row_index[:, None] * VALUE_DIM + columns[None, :]
    if HAS_STATE:
        other_m = tl.load(state_m + row_index, mask=row_mask, other=float("-inf")) * LOG2_E
        other_l = tl.load(state_l + row_index, mask=row_mask, other=0.0)
        other_o = tl.load(state_o + index, mask=mask, other=0.0)
        m, l, o = _merge(m, l, o, other_m, other_l, other_o)
    if FINAL:
        o *= (1.0 / tl.where(l == 0.0, 1.0, l))[:, None]
        tl.store(out + index, o.to(out.dtype.element_ty), mask=mask)
        tl.store(lse + row_index, (m + tl.log2(l)) * LN_2, mask=row_mask)
    else:
        tl.store(state_m + row_index, m * LN_2, mask=row_mask)
        tl.store(state_l + row_index, l, mask=row_mask)
        tl.store(state_o + index, o, mask=mask)


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
    """Attend from `q` to `k`, `v` under the intervals, starting from `state` (None: empty).

    Args:
        q: queries (B, Nq, Hq, D), fp16, bf16 or fp32, D at most 256; a contiguous last dimension saves a copy.
        k, v: keys (B, Nk, Hkv, D) and values (B, Nk, Hkv, Dv) of q's dtype; Hkv divides Hq.
        intervals: of Nq queries and Nk keys, for q's device; one for all batch entries, or one for each.
        scale: positive factor on the scores, usually D ** -0.5.
        state: contiguous fp32 (m, l, o) of the keys seen before; without `final` it is updated in place.
        final: whether these are the last keys.
        dropout: probabilities to drop; o sums the kept ones, scaled, while m, l and lse do not change. None: all are kept.
        blocks: pairs of blocks that are seen at all. None: all are.
        precision: of products of fp32 inputs, "ieee", or "tf32" for the tensor cores.

    Returns:
        The new state, fp32 m, l (B, Nq, Hq) and o (B, Nq, Hq, Dv), or with `final` the pair out (B, Nq, Hq, Dv) in q's
        dtype and lse (B, Nq, Hq) in fp32.

    Raises:
        ValueError: shapes, dtypes, devices, head dims, scale or precision outside the above.
    """
    validation.check_inputs(q, k, v, intervals, scale)
    validation.check_supported(q, v)
    validation.check_options(q, k, dropout, blocks, precision)
    if state is not None:
        validation.check_state(state, q, v)
    m, l, o, out, lse = triton_common.allocate_results(q, v, state, final)
    if q.numel() > 0:
        options = dict(HAS_STATE=state is not None, FINAL=final, PRECISION=precision)
        _launch(q, k, v, intervals, scale, (m, l, o, out, lse), dropout, blocks, options)
    return (out, lse) if final else (m, l, o)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float, results: tuple,
    dropout: Dropout | None, blocks: BlockMask | None, options: dict,
) -> None:  # fmt: skip
    """Run the kernel on checked inputs; `results` are (m, l, o, out, lse), None where not wanted."""
    (batch, num_queries, num_heads), num_keys = q.shape[:3], k.shape[1]
    q, k, v = (triton_common.as_rows(x) for x in (q, k, v))
    shape = triton_common.shape_constants(q, k, v)
    tile = triton_common.choose_tile("forward", q.dtype, max(shape["PADDED"], shape["VALUE_PADDED"]))
    tile = triton_common.fit_tile(tile, blocks)
    table = intervals.tiles(tile.queries, tile.keys, cut=blocks is None)
    num_tiles = table.shape[1]
    with torch.cuda.device_of(q):
        lists = None if blocks is None else blocks.query_lists
        _forward_kernel[(num_tiles * batch * num_heads,)](
            *(q, k, v, intervals.lo, intervals.hi, table), *results, *(x.stride()[:3] for x in (q, k, v)),
            *(intervals.batch, num_tiles, num_queries, num_keys, float(scale)),
            *triton_common.dropout_arguments(dropout), *triton_common.block_arguments(lists, batch, num_heads),
            BLOCK=0 if blocks is None else blocks.size, **options, **shape, **tile.options(),
        )  # fmt: skip
