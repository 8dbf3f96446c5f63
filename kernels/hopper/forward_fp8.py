"""This forward kernel for Hopper GPUs (sm_90) reads FP8 inputs with head dims 64, 128 and 256.

Read `forward_narrow` first, and `ringattn.kernels.fp8` for the format of the inputs. Each step processes one block of 128 keys,
with one scale for K and one scale for V.

      PRODUCER                               SHARED MEMORY            CONSUMERS

      load Q -------------- q_full --------> [ queries: 1 slot ] -----> S(j) = Q K(j)^T in every step
                      <---- q_empty -------                    <------ release the slot after the last S of a work tile
      load K(j), V(j-1) --- full[s] -------> [ ring of stages  ] -----> S(j) = Q K(j)^T
                                             [                 ] -----> O += P(j-1) V(j-1)
                      <---- empty[s] ------                    <------ release the stage

A stage holds K (128, D) of a step and V (D, 128) of the previous step. Separate buffers for K and V would double the number of
mbarrier arrivals, which are slow. A step issues its two products in one of two orders:

      overlap      issue S(j) | O += P(j-2) V(j-2) | issue P(j-1) V(j-1) | wait for S(j) | softmax: P(j) | wait for P V
      no overlap   issue P(j-1) V(j-1) | issue S(j) | O += P(j-1) V(j-1) | wait for S(j) | softmax: P(j)

At D = 256, O needs 128 registers per thread. The kernel therefore splits P V into products of `part_columns` columns, of which
at most two are in flight.

The row sums l are the product of the rounded P and a tile of ones.

The scale of a V block is a power of two, so its exponent is added to the scores. The row sums of P are therefore divided by the
scale of V.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ringattn.kernels import fp8
from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper import softmax, softmax_fp8
from ringattn.kernels.hopper.common import ROWS, allocate_barriers, is_masked, num_steps, step_start, tile_view, tma_load
from ringattn.kernels.hopper.epilogue import load_state_scalars
from ringattn.kernels.hopper.epilogue_wide import finish_work_tile
from ringattn.kernels.hopper.forward_common import (
    advance_stage,
    load_queries,
    pass_ping_pong,
    run_partitions,
    skip_tile,
    wait_for_ping_pong,
)

BLOCK = gl.constexpr(fp8.BLOCK)
E4M3 = gl.constexpr(gl.float8e4nv)

# The tile of ones has 8 columns, because 8 is the minimum for wgmma.
SUM_COLUMNS = gl.constexpr(8)


@gluon.jit
def _load_stage(
    tiles, k_start, v_block, heads, ring, barriers, position, HAS_K: gl.constexpr, HAS_V: gl.constexpr, CONFIG: gl.constexpr
):
    _q, k, v = tiles
    _q_full, _q_empty, full, empty = barriers
    batch, key_head = heads
    stage, phase = position
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(full.index(stage), (HAS_K + HAS_V) * k.block_type.nbytes)
    if HAS_K:
        tma_load(k, [batch, k_start, key_head, 0], full.index(stage), tile_view(ring.index(2 * stage), k))
    if HAS_V:
        tma_load(v, [batch, key_head, v_block, 0, 0], full.index(stage), tile_view(ring.index(2 * stage + 1), v))
    return advance_stage(stage, phase, CONFIG)


@gluon.jit
def _load_tile(arguments, rows, loop, slot, position, CONFIG: gl.constexpr):
    tiles, _, buffers, barriers = arguments
    q, _, _ = tiles
    queries, ring, _ = buffers
    batch, head, _ = rows
    mbarrier.expect(barriers[0], CONFIG.consumers * q.block_type.nbytes)
    load_queries(q, rows, slot, queries, barriers[0], CONFIG)
    start = step_start(loop, 0, CONFIG.keys)
    heads = batch, head // CONFIG.group
    position = _load_stage(tiles, start, 0, heads, ring, barriers, position, 1, 0, CONFIG)
    for step in range(1, num_steps(loop)):
        block = start // BLOCK
        start = step_start(loop, step, CONFIG.keys)
        position = _load_stage(tiles, start, block, heads, ring, barriers, position, 1, 1, CONFIG)
    return _load_stage(tiles, 0, start // BLOCK, heads, ring, barriers, position, 0, 1, CONFIG)


@gluon.jit
def _wait_for_stage(full, position):
    stage, phase = position
    mbarrier.wait(full.index(stage), phase)
    return stage


@gluon.jit
def _issue_scores(query, ring, stage, CONFIG: gl.constexpr):
    scores = gl.full([ROWS, CONFIG.keys], 0.0, gl.float32, CONFIG.scores_layout)
    return warpgroup_mma(query, ring.index(2 * stage).permute((1, 0)), scores, use_acc=False, is_async=True)


@gluon.jit
def _multiply(p, tile, product):
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product.type.layout, k_width=4)
    return warpgroup_mma(gl.convert_layout(p, LEFT), tile.permute((1, 0)), product, use_acc=False, is_async=True)


@gluon.jit
def _zeros(COLUMNS: gl.constexpr):
    return gl.full([ROWS, COLUMNS], 0.0, gl.float32, hopper_common.accumulator_layout(COLUMNS, 8))


@gluon.jit
def _values(ring, stage, CONFIG: gl.constexpr):
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CONFIG.dim, CONFIG.keys], E4M3)
    return hopper_common.reinterpret(ring.index(2 * stage + 1), E4M3, [CONFIG.dim, CONFIG.keys], VALUES)


@gluon.jit
def _issue_output(p, o, buffers, stage, CONFIG: gl.constexpr):
    """Compute P V in slices of columns, and add all slices except the last one to O."""
    _queries, ring, ones = buffers
    PARTS: gl.constexpr = CONFIG.num_parts
    COLUMNS: gl.constexpr = CONFIG.part_columns
    values = _values(ring, stage, CONFIG)
    sums = _multiply(p, ones, _zeros(SUM_COLUMNS))
    pending = _multiply(p, values.slice(0, COLUMNS, dim=0), _zeros(COLUMNS))
    parts = ()
    for i in gl.static_range(1, PARTS):
        following = _multiply(p, values.slice(i * COLUMNS, COLUMNS, dim=0), _zeros(COLUMNS))
        if i == 1:
            complete, sums = warpgroup_mma_wait(1, deps=(pending, sums))
        else:
            complete = warpgroup_mma_wait(1, deps=(pending,))
        parts = parts + (o[i - 1] + complete,)
        pending = following
    return parts, pending, sums


@gluon.jit
def _finish_output(parts, pending, sums, o, IN_FLIGHT: gl.constexpr, CONFIG: gl.constexpr):
    """Add `pending` to the last slice of O, while IN_FLIGHT later products may still run."""
    LAST: gl.constexpr = CONFIG.num_parts - 1
    if LAST == 0:
        pending, sums = warpgroup_mma_wait(IN_FLIGHT, deps=(pending, sums))
    else:
        pending = warpgroup_mma_wait(IN_FLIGHT, deps=(pending,))
    return parts + (o[LAST] + pending,), sums


@gluon.jit
def _zero_parts(CONFIG: gl.constexpr):
    PARTS: gl.constexpr = CONFIG.num_parts
    parts = ()
    for _part in gl.static_range(PARTS):
        parts = parts + (gl.full([ROWS, CONFIG.part_columns], 0.0, gl.float32, CONFIG.part_layout),)
    return parts


@gluon.jit
def _join_parts(parts, FIRST: gl.constexpr, NUMBER: gl.constexpr):
    if NUMBER == 1:
        return parts[FIRST]
    else:
        HALF: gl.constexpr = NUMBER // 2
        halves = gl.join(_join_parts(parts, FIRST, HALF), _join_parts(parts, FIRST + HALF, HALF))
        return halves.permute((0, 2, 1)).reshape([ROWS, 2 * halves.shape[1]])


@gluon.jit
def _load_block_scales(operands, batch, key_head, start, CONFIG: gl.constexpr):
    _q_scales, k_scales, v_scales, _num_query_blocks, num_key_blocks = operands
    # A work tile without keys still has one step, which may begin after the last block of keys.
    block = gl.minimum(start // BLOCK, num_key_blocks - 1)
    index = (batch * num_key_blocks + block) * (CONFIG.num_heads // CONFIG.group) + key_head
    return gl.load(k_scales + index), gl.load(v_scales + index).to(gl.int32, bitcast=True)


@gluon.jit
def _row_factors(operands, row_range, log2_scale, CONFIG: gl.constexpr):
    """A score in log2 units is q k^T times the returned factor times the scale of K."""
    q_scales, _k_scales, _v_scales, num_query_blocks, _num_key_blocks = operands
    batch, head, first_row, end = row_range
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, CONFIG.scores_layout))
    index = (batch * num_query_blocks + rows // BLOCK) * CONFIG.num_heads + head
    return gl.load(q_scales + index, mask=rows < end, other=0.0) * log2_scale


@gluon.jit
def _softmax(scores, ref_max, row_bounds, loop, step, factors, block_scales, CONFIG: gl.constexpr):
    lo, hi, _, _ = row_bounds
    _, num_masked_prefix, _, _ = loop
    k_scale, v_scale_bits = block_scales
    v_exponent = ((v_scale_bits >> 23) - 127).to(gl.float32)
    if is_masked(loop, step):
        scores = softmax.mask_scores(scores, lo, hi, step_start(loop, step, CONFIG.keys))
    factors *= k_scale
    alpha = gl.full_like(ref_max, 1.0)
    # After the first unmasked step, every row has attended to a key, so its ref_max is set.
    if (step <= num_masked_prefix) | is_masked(loop, step):
        ref_max, alpha = softmax_fp8.raise_ref_max(scores, ref_max, factors, v_exponent, CONFIG)
    levels = softmax_fp8.compute_levels(scores, ref_max, factors, v_exponent, CONFIG)
    levels, ref_max, further_alpha = softmax_fp8.limit_levels(levels, ref_max)
    return softmax_fp8.to_bytes(levels), ref_max, alpha * further_alpha


@gluon.jit
def _scale_sums(sums, block_scales, l):
    _, v_scale_bits = block_scales
    # In fp32, 2^e has the exponent bits e + 127, and 2^-e has the exponent bits 127 - e.
    inverse_v_scale = ((254 << 23) - v_scale_bits).to(gl.float32, bitcast=True)
    sums = gl.max(gl.max(softmax.by_thread(sums, SUM_COLUMNS), axis=3), axis=1)
    return gl.convert_layout(sums, l.type.layout) * inverse_v_scale


@gluon.jit
def _overlapped_steps(
    scores, query, buffers, barriers, row_bounds, loop, operands, heads, ref_max, factors, block_scales, position,
    CONSUMER: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    _queries, ring, ones = buffers
    _q_full, q_empty, full, empty = barriers
    batch, key_head = heads
    rounded, ref_max, alpha = _softmax(scores, ref_max, row_bounds, loop, 0, factors, block_scales, CONFIG)
    words = softmax_fp8.pack(rounded)
    l = gl.zeros_like(alpha)
    o = _zeros(CONFIG.dim)
    product, row_sums = _zeros(CONFIG.dim), gl.zeros_like(alpha)
    for step in range(1, num_steps(loop)):
        previous_scales = block_scales
        block_scales = _load_block_scales(operands, batch, key_head, step_start(loop, step, CONFIG.keys), CONFIG)
        p = softmax_fp8.as_left_operand(words, CONFIG)
        stage = _wait_for_stage(full, position)
        wait_for_ping_pong(CONSUMER, CONFIG)
        scores = _issue_scores(query, ring, stage, CONFIG)
        # Add the previous P V to O while the tensor cores compute S.
        l = (l + row_sums) * alpha
        o = softmax.rescale(o + product, alpha)
        sums = _multiply(p, ones, _zeros(SUM_COLUMNS))
        product = _multiply(p, _values(ring, stage, CONFIG), product)
        pass_ping_pong(CONSUMER, CONFIG)
        scores = warpgroup_mma_wait(2, deps=(scores,))
        rounded, ref_max, alpha = _softmax(scores, ref_max, row_bounds, loop, step, factors, block_scales, CONFIG)
        product, sums = warpgroup_mma_wait(0, deps=(product, sums))
        mbarrier.arrive(empty.index(stage), count=1)
        _, phase = position
        position = advance_stage(stage, phase, CONFIG)
        row_sums = _scale_sums(sums, previous_scales, l)
        words = softmax_fp8.pack(rounded)
    mbarrier.arrive(q_empty, count=1)
    l = (l + row_sums) * alpha
    o = softmax.rescale(o + product, alpha)
    parts, sums, position = _last_output(words, (o,), buffers, barriers, position, CONSUMER, CONFIG)
    return ref_max, l + _scale_sums(sums, block_scales, l), parts, position


@gluon.jit
def _last_output(words, o, buffers, barriers, position, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    _q_full, _q_empty, full, empty = barriers
    _, phase = position
    stage = _wait_for_stage(full, position)
    wait_for_ping_pong(CONSUMER, CONFIG)
    p = softmax_fp8.as_left_operand(words, CONFIG)
    parts, pending, sums = _issue_output(p, o, buffers, stage, CONFIG)
    pass_ping_pong(CONSUMER, CONFIG)
    parts, sums = _finish_output(parts, pending, sums, o, 0, CONFIG)
    mbarrier.arrive(empty.index(stage), count=1)
    return parts, sums, advance_stage(stage, phase, CONFIG)


@gluon.jit
def _sequential_steps(
    scores, query, buffers, barriers, row_bounds, loop, operands, heads, ref_max, factors, block_scales, position,
    CONSUMER: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Return (ref_max, l, slices of o, next position)."""
    _queries, ring, _ones = buffers
    _q_full, q_empty, full, empty = barriers
    batch, key_head = heads
    last = num_steps(loop) - 1
    l = gl.zeros_like(ref_max)
    o = _zero_parts(CONFIG)
    for step in range(last):
        rounded, ref_max, alpha = _softmax(scores, ref_max, row_bounds, loop, step, factors, block_scales, CONFIG)
        p = softmax_fp8.as_left_operand(softmax_fp8.pack(rounded), CONFIG)
        o = softmax.rescale_parts(o, alpha, CONFIG.num_parts)
        previous_scales = block_scales
        block_scales = _load_block_scales(operands, batch, key_head, step_start(loop, step + 1, CONFIG.keys), CONFIG)
        _, phase = position
        stage = _wait_for_stage(full, position)
        wait_for_ping_pong(CONSUMER, CONFIG)
        parts, pending, sums = _issue_output(p, o, buffers, stage, CONFIG)
        scores = _issue_scores(query, ring, stage, CONFIG)
        o, sums = _finish_output(parts, pending, sums, o, 1, CONFIG)
        pass_ping_pong(CONSUMER, CONFIG)
        l = l * alpha + _scale_sums(sums, previous_scales, l)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(empty.index(stage), count=1)
        position = advance_stage(stage, phase, CONFIG)
    mbarrier.arrive(q_empty, count=1)
    rounded, ref_max, alpha = _softmax(scores, ref_max, row_bounds, loop, last, factors, block_scales, CONFIG)
    o = softmax.rescale_parts(o, alpha, CONFIG.num_parts)
    o, sums, position = _last_output(softmax_fp8.pack(rounded), o, buffers, barriers, position, CONSUMER, CONFIG)
    return ref_max, l * alpha + _scale_sums(sums, block_scales, l), o, position


@gluon.jit
def _compute_tile(
    arguments, tile, slot, position, state_stage,
    CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    _, _, _, _, _, results, buffers, barriers, log2_scale, operands = arguments
    _, batch, head, first_row, end, loop, row_bounds, _ = tile
    queries, ring, _ones = buffers
    _, _, full, empty = barriers
    query = queries.index(CONSUMER)
    row_range = batch, head, first_row, end
    heads = batch, head // CONFIG.group
    block_scales = _load_block_scales(operands, batch, head // CONFIG.group, step_start(loop, 0, CONFIG.keys), CONFIG)
    _, phase = position
    stage = _wait_for_stage(full, position)
    wait_for_ping_pong(CONSUMER, CONFIG)
    scores = _issue_scores(query, ring, stage, CONFIG)
    pass_ping_pong(CONSUMER, CONFIG)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(empty.index(stage), count=1)
    position = advance_stage(stage, phase, CONFIG)
    BY_THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, softmax.by_thread(scores, CONFIG.keys).type.layout))
    zeros = gl.zeros([ROWS, 4], gl.float32, BY_THREAD)
    ref_max = gl.convert_layout(row_bounds[3], gl.SliceLayout(1, BY_THREAD)).expand_dims(1) + zeros
    factors = _row_factors(operands, row_range, log2_scale, CONFIG)
    factors = gl.convert_layout(factors, gl.SliceLayout(1, BY_THREAD)).expand_dims(1) + zeros
    if CONFIG.overlap:
        ref_max, l, o, position = _overlapped_steps(
            scores, query, buffers, barriers, row_bounds, loop, operands, heads, ref_max, factors, block_scales, position,
            CONSUMER, CONFIG,
        )  # fmt: skip
    else:
        ref_max, l, o, position = _sequential_steps(
            scores, query, buffers, barriers, row_bounds, loop, operands, heads, ref_max, factors, block_scales, position,
            CONSUMER, CONFIG,
        )  # fmt: skip
    l = softmax.combine_threads(l, CONFIG)
    ref_max = softmax_fp8.plain_ref_max(softmax.combine_threads(ref_max, CONFIG))
    o = gl.convert_layout(_join_parts(o, 0, CONFIG.num_parts), CONFIG.output_layout)
    incoming = load_state_scalars(results, row_range, CONFIG)
    overflowed = finish_work_tile(ref_max, l, o, incoming, results, row_range, True, CONFIG)
    return tile, position, state_stage, overflowed


@gluon.jit(do_not_specialize=["num_masks", "num_queries", "num_query_blocks", "num_key_blocks"])
def _forward_kernel(
    q, k, v, q_scales, k_scales, v_scales, lo, hi, work_tiles, state_m, state_l, state_o, lse, out,
    num_masks, num_queries, num_query_blocks, num_key_blocks, log2_scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute all work tiles. For the other arguments, see `forward_narrow._forward_kernel`.

    Args:
        q, k, v: TMA descriptors of the e4m3 tensors (B, Nq, Hq, D), (B, Nk, Hkv, D) and (B, Hkv, C, D, 128).
        q_scales, k_scales, v_scales: see `ringattn.kernels.fp8`.
        work_tiles: every loop begins at a multiple of 128.
        num_query_blocks, num_key_blocks: ceil(Nq / 128) and C = ceil(Nk / 128).
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.dim], E4M3)
    ONES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SUM_COLUMNS, CONFIG.keys], E4M3)
    queries = gl.allocate_shared_memory(E4M3, [CONFIG.consumers, ROWS, CONFIG.dim], TILE)
    ring = gl.allocate_shared_memory(E4M3, [2 * CONFIG.stages, CONFIG.keys, CONFIG.dim], TILE)
    ones = gl.allocate_shared_memory(E4M3, [SUM_COLUMNS, CONFIG.keys], ONES)
    # The byte 0x38 is 1.0 in e4m3.
    WORDS: gl.constexpr = SUM_COLUMNS * CONFIG.keys // 4
    words = hopper_common.reinterpret(ones, gl.int32, [WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    words.store(gl.full([WORDS], 0x38383838, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    q_full, q_empty = allocate_barriers(1, 1, CONFIG.consumers)
    full, empty = allocate_barriers(CONFIG.stages, 1, CONFIG.consumers)
    fence_async_shared()
    buffers = queries, ring, ones
    barriers = q_full.index(0), q_empty.index(0), full, empty
    loading = (q, k, v), work_tiles, buffers, barriers
    results = state_m, state_l, state_o, None, lse, out, None, num_queries
    operands = q_scales, k_scales, v_scales, num_query_blocks, num_key_blocks
    computing = lo, hi, work_tiles, num_masks, num_queries, results, buffers, barriers, log2_scale, operands
    run_partitions(_load_tile, _compute_tile, skip_tile, loading, computing, CONFIG)
