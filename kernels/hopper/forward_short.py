"""This module contains the forward kernel for short intervals, such as windows of 128 keys, and head dims up to 64.

A work tile consists of 64 queries of all query heads of one key head. All keys to which these queries attend fit into shared
memory, and are loaded once for all heads. For each head, the program computes all scores, then the softmax, then the output:

      wait for Q | S(j) = Q K(j)^T for all j | softmax of all S(j) | O = sum of P(j) V(j) | store O | load the next Q

The registers hold all scores of a row at once, so the softmax subtracts the largest score, and there is no retry pass. After
the last head, K and V of the next work tile are loaded as soon as K and V have been read. The warps of a program do not
specialise. Instead, three programs share an SM, and some of them compute while others wait.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ringattn.kernels.hopper import column_parts, softmax
from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper.common import ROWS, allocate_barriers, load_work_tile, step_start, tile_view, tma_load
from ringattn.kernels.hopper.epilogue import finish_work_tile


@gluon.jit
def _load(tensor, tile, head, first, buffers, full):
    COUNT: gl.constexpr = buffers.shape[0]
    if tile[3] > 0:
        mbarrier.expect(full, COUNT * tensor.block_type.nbytes)
        for i in gl.static_range(COUNT):
            tma_load(tensor, [tile[0], first + i * ROWS, head, 0], full, tile_view(buffers.index(i), tensor))


@gluon.jit
def _load_bounds(lo, hi, tile, num_masks, num_queries, CONFIG: gl.constexpr):
    batch, _, first, end, _ = tile
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, CONFIG.scores_layout))
    offset = gl.minimum(batch, num_masks - 1) * num_queries + rows
    return gl.load(lo + offset, mask=rows < end, other=0), gl.load(hi + offset, mask=rows < end, other=0)


@gluon.jit(do_not_specialize=["num_masks", "num_queries"])
def _forward_kernel(
    q, k, v, state_tiles, out_tiles, lo, hi, work_tiles, state_m, state_l, state_o, lse, out,
    num_masks, num_queries, log2_scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute all work tiles.

    The arguments are those of `forward_narrow`, except that the head of a work tile is a key head. There is no state.
    """
    STEPS: gl.constexpr = CONFIG.stages
    COLUMNS: gl.constexpr = CONFIG.columns
    MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.dim], q.dtype)
    queries = gl.allocate_shared_memory(q.dtype, [1, ROWS, CONFIG.dim], MATRIX)
    keys = gl.allocate_shared_memory(k.dtype, [STEPS, ROWS, CONFIG.dim], MATRIX)
    values = gl.allocate_shared_memory(v.dtype, [STEPS, ROWS, CONFIG.dim], MATRIX)
    full, _empty = allocate_barriers(3, 1, 1)
    fence_async_shared()
    hopper_common.thread_barrier()
    q_full, k_full, v_full = full.index(0), full.index(1), full.index(2)
    query = column_parts.split_tile(queries.index(0), COLUMNS)
    results = state_m, state_l, state_o, state_tiles, lse, out, out_tiles, num_queries
    index, count, phase = gl.program_id(0), gl.to_tensor(0), gl.to_tensor(0)
    tile = load_work_tile(work_tiles, index)
    _load(q, tile, tile[1] * CONFIG.group, tile[2], queries, q_full)
    _load(k, tile, tile[1], tile[4][0], keys, k_full)
    _load(v, tile, tile[1], tile[4][0], values, v_full)
    while tile[3] > 0:
        batch, key_head, first, end, loop = tile
        index += gl.num_programs(0)
        next_tile = load_work_tile(work_tiles, index)
        row_lo, row_hi = _load_bounds(lo, hi, tile, num_masks, num_queries, CONFIG)
        mbarrier.wait(k_full, phase)
        for member in range(CONFIG.group):
            head = key_head * CONFIG.group + member
            mbarrier.wait(q_full, count & 1)
            pending, scores = (), ()
            for step in gl.static_range(STEPS):
                pending = pending + (column_parts.multiply_rows(query, keys.index(step), COLUMNS),)
            pending = warpgroup_mma_wait(0, deps=pending)
            hopper_common.thread_barrier()  # All warps have read K.
            if member == CONFIG.group - 1:
                _load(k, next_tile, next_tile[1], next_tile[4][0], keys, k_full)
            for step in gl.static_range(STEPS):
                start = step_start(loop, step, ROWS)
                scores = scores + (softmax.mask_scores(pending[step], row_lo, row_hi, start, CONFIG),)
            largest = scores[0]
            for step in gl.static_range(1, STEPS):
                largest = gl.maximum(largest, scores[step])
            ref_max = gl.maximum(gl.max(largest, axis=1) * log2_scale, softmax.UNSET_REF_MAX)
            l, o = gl.zeros_like(ref_max), column_parts.zero_parts(COLUMNS)
            mbarrier.wait(v_full, phase)
            for step in gl.static_range(STEPS):
                p = gl.exp2(scores[step] * log2_scale - ref_max[:, None])
                l += gl.sum(p, axis=1)
                p = gl.convert_layout(p.to(keys.dtype), CONFIG.p_layout)
                o = column_parts.add_product(p, values.index(step), o, COLUMNS)
            o = column_parts.join_parts(column_parts.wait_for_parts(o, 0, column_parts.num_parts(COLUMNS)), COLUMNS)
            row_range = batch, head, first, end
            finish_work_tile(ref_max, l, o, queries.index(0), None, None, results, row_range, 0, True, CONFIG)
            hopper_common.tma_store_wait(0)
            hopper_common.thread_barrier()  # All warps have read V, and TMA has read the output.
            if member == CONFIG.group - 1:
                _load(q, next_tile, next_tile[1] * CONFIG.group, next_tile[2], queries, q_full)
                _load(v, next_tile, next_tile[1], next_tile[4][0], values, v_full)
            else:
                _load(q, tile, head + 1, first, queries, q_full)
            count += 1
        tile, phase = next_tile, phase ^ 1
