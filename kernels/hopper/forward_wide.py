"""The forward kernel for Hopper GPUs (sm_90) and head dims above 128.

Read `forward_narrow` first. This kernel has two consumer warpgroups and the following pipeline:

      PRODUCER                          SHARED MEMORY                      CONSUMERS

      load Q ------- q_full --------> [ queries: 1 slot           ] -----> columns 0 to 127 stay in registers
               <---- q_empty -------                              <------ release the slot after the last S of a work tile
      load K(j) ---- full[s] -------> [ ring of stages            ] -----> S(j) = Q K(j)^T
      load V(j) ---- full[s] -------> [                           ] -----> O += P(j) V(j)
               <---- empty[s] ------                              <------ release the stage

A stage is a buffer in shared memory for one tile of K or V, with 256 or 128 columns. If K has 192 columns, a second ring buffer
holds the last 64 columns, the *tail*. Both parts of a K tile share the mbarriers of a stage.

The order of the two products of a step depends on the number of available registers:

      overlap      issue S(j) | issue O += P(j-1) V(j-1) | wait for S(j) | softmax: P(j) | wait for O | release V(j-1)
      no overlap   issue O += P(j-1) V(j-1) | issue S(j) | wait for O | wait for S(j) | softmax: P(j)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ringattn.kernels.hopper import softmax
from ringattn.kernels.hopper.common import ROWS, allocate_barriers, num_steps, step_start, tile_view, tma_load
from ringattn.kernels.hopper.epilogue import load_state_scalars
from ringattn.kernels.hopper.epilogue_wide import finish_work_tile
from ringattn.kernels.hopper.forward_common import (
    advance_stage,
    advance_tail,
    load_consumer_tile,
    pass_ping_pong,
    run_partitions,
    skip_steps,
    skip_tile,
    wait_for_ping_pong,
)

REGISTER_COLUMNS = gl.constexpr(128)


@gluon.jit
def _load_queries(tiles, buffers, q_full, rows, CONFIG: gl.constexpr):
    q, q_tail, _, _, _ = tiles
    queries, query_tails, _, _ = buffers
    batch, head, first = rows
    CONSUMERS: gl.constexpr = CONFIG.consumers
    mbarrier.expect(q_full, CONFIG.consumers * ROWS * CONFIG.key_dim * 2)
    for c in gl.static_range(CONSUMERS):
        row = first + c * ROWS
        tma_load(q, [batch, row, head, 0], q_full, tile_view(queries.index(c), q))
        if CONFIG.tail > 0:
            tma_load(q_tail, [batch, row, head, CONFIG.dim], q_full, tile_view(query_tails.index(c), q_tail))


@gluon.jit
def _load_keys(tiles, buffers, barriers, batch, key_head, start, position, CONFIG: gl.constexpr):
    _, _, k, k_tail, _v = tiles
    _queries, _query_tails, ring, key_tails = buffers
    _q_full, _q_empty, full, empty = barriers
    stage, phase, tail = position
    loaded = full.index(stage)
    mbarrier.wait(empty.index(stage), phase)
    if CONFIG.tail > 0:
        mbarrier.expect(loaded, k.block_type.nbytes + k_tail.block_type.nbytes)
        tma_load(k_tail, [batch, start, key_head, CONFIG.dim], loaded, tile_view(key_tails.index(tail), k_tail))
    else:
        mbarrier.expect(loaded, k.block_type.nbytes)
    tma_load(k, [batch, start, key_head, 0], loaded, tile_view(ring.index(stage), k))
    stage, phase = advance_stage(stage, phase, CONFIG)
    return stage, phase, advance_tail(tail, CONFIG)


@gluon.jit
def _load_values(tiles, buffers, barriers, batch, key_head, start, position, CONFIG: gl.constexpr):
    _, _, _k, _k_tail, v = tiles
    _queries, _query_tails, ring, _key_tails = buffers
    _q_full, _q_empty, full, empty = barriers
    stage, phase, tail = position
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(full.index(stage), v.block_type.nbytes)
    tma_load(v, [batch, start, key_head, 0], full.index(stage), tile_view(ring.index(stage), v))
    stage, phase = advance_stage(stage, phase, CONFIG)
    return stage, phase, tail


@gluon.jit
def _load_tile(arguments, rows, loop, slot, position, CONFIG: gl.constexpr):
    tiles, _, buffers, barriers = arguments
    batch, head, _ = rows
    key_head = head // CONFIG.group
    _load_queries(tiles, buffers, barriers[0], rows, CONFIG)
    start = step_start(loop, 0, CONFIG.keys)
    position = _load_keys(tiles, buffers, barriers, batch, key_head, start, position, CONFIG)
    for step in range(1, num_steps(loop)):
        previous_start = start
        start = step_start(loop, step, CONFIG.keys)
        if CONFIG.overlap:
            position = _load_keys(tiles, buffers, barriers, batch, key_head, start, position, CONFIG)
            position = _load_values(tiles, buffers, barriers, batch, key_head, previous_start, position, CONFIG)
        else:
            position = _load_values(tiles, buffers, barriers, batch, key_head, previous_start, position, CONFIG)
            position = _load_keys(tiles, buffers, barriers, batch, key_head, start, position, CONFIG)
    return _load_values(tiles, buffers, barriers, batch, key_head, start, position, CONFIG)


@gluon.jit
def _issue_scores(query, buffers, full, position, CONFIG: gl.constexpr):
    """The tuple `query` is (columns 0 to 127 in registers, Q in shared memory, tail of Q)."""
    _queries, _query_tails, ring, key_tails = buffers
    in_registers, in_shared, query_tail = query
    stage, phase, tail = position
    REST: gl.constexpr = CONFIG.dim - REGISTER_COLUMNS
    mbarrier.wait(full.index(stage), phase)
    keys = ring.index(stage)
    scores = gl.full([ROWS, CONFIG.keys], 0.0, gl.float32, CONFIG.scores_layout)
    first = keys.slice(0, REGISTER_COLUMNS, dim=1).permute((1, 0))
    scores = warpgroup_mma(in_registers, first, scores, use_acc=False, is_async=True)
    if CONFIG.tail > 0:
        scores = warpgroup_mma(query_tail, key_tails.index(tail).permute((1, 0)), scores, is_async=True)
    else:
        rest = keys.slice(REGISTER_COLUMNS, REST, dim=1).permute((1, 0))
        scores = warpgroup_mma(in_shared.slice(REGISTER_COLUMNS, REST, dim=1), rest, scores, is_async=True)
    stage, phase = advance_stage(stage, phase, CONFIG)
    return scores, (stage, phase, advance_tail(tail, CONFIG))


@gluon.jit
def _issue_output(p, o, buffers, full, position, CONFIG: gl.constexpr):
    _queries, _query_tails, ring, _key_tails = buffers
    stage, phase, tail = position
    mbarrier.wait(full.index(stage), phase)
    o = warpgroup_mma(p, ring.index(stage), o, is_async=True)
    stage, phase = advance_stage(stage, phase, CONFIG)
    return o, (stage, phase, tail)


@gluon.jit
def _issue_step(query, buffers, barriers, p, o, position, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Issue both products of a step, and wait for the scores S. Return (S, O, stage of V, next position).

    With CONFIG.overlap, the caller must wait for O = P V, and then release the buffer of V.
    """
    _q_full, _q_empty, full, empty = barriers
    wait_for_ping_pong(CONSUMER, CONFIG)
    first_stage, _, _ = position
    # S = Q K^T is issued as two products, and the tensor cores finish products in the order of issue.
    if CONFIG.overlap:
        scores, position = _issue_scores(query, buffers, full, position, CONFIG)
        second_stage, _, _ = position
        o, position = _issue_output(p, o, buffers, full, position, CONFIG)
        pass_ping_pong(CONSUMER, CONFIG)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(empty.index(first_stage), count=1)
    else:
        o, position = _issue_output(p, o, buffers, full, position, CONFIG)
        second_stage, _, _ = position
        scores, position = _issue_scores(query, buffers, full, position, CONFIG)
        o = warpgroup_mma_wait(2, deps=(o,))
        mbarrier.arrive(empty.index(first_stage), count=1)
        pass_ping_pong(CONSUMER, CONFIG)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(empty.index(second_stage), count=1)
    return scores, o, second_stage, position


@gluon.jit
def _step(
    query, buffers, barriers, carry, row_bounds, loop, step, log2_scale,
    CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Multiply the probabilities of the previous step by V, and compute the probabilities of this step. Return the new `carry`.

    Args:
        query: see `_issue_scores`.
        carry: (p, ref_max, l, o, position). l already includes p of the previous step, but o does not include P V of that step.
        row_bounds, loop: from `load_consumer_tile`.
        step: after the consumer's first step.
    """
    _, _, _, empty = barriers
    p, ref_max, l, o, position = carry
    scores, pending_o, value_stage, position = _issue_step(query, buffers, barriers, p, o, position, CONSUMER, CONFIG)
    weights, ref_max, l, alpha = softmax.probabilities(
        scores, ref_max, l, row_bounds, loop, step, log2_scale, UPDATE_REF_MAX, CONFIG
    )
    if CONFIG.overlap:
        l = softmax.fence_softmax(l, CONFIG)
        o = warpgroup_mma_wait(0, deps=(pending_o,))
        mbarrier.arrive(empty.index(value_stage), count=1)
    else:
        o = pending_o
    if UPDATE_REF_MAX:
        o = softmax.rescale(o, alpha)
    p = gl.convert_layout(weights.to(p.dtype), CONFIG.p_layout)
    return p, ref_max, l, o, position


@gluon.jit
def _first_step(
    query, buffers, barriers, row_bounds, loop, step, position, log2_scale,
    CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    _, _, full, empty = barriers
    in_registers, _, _ = query
    stage = position[0]
    wait_for_ping_pong(CONSUMER, CONFIG)
    scores, position = _issue_scores(query, buffers, full, position, CONFIG)
    pass_ping_pong(CONSUMER, CONFIG)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(empty.index(stage), count=1)
    weights, ref_max, l = softmax.first_probabilities(scores, row_bounds, loop, step, log2_scale, UPDATE_REF_MAX, CONFIG)
    p = gl.convert_layout(weights.to(in_registers.dtype), CONFIG.p_layout)
    o = gl.full([ROWS, CONFIG.dim], 0.0, gl.float32, CONFIG.output_layout)
    return p, ref_max, l, o, position


@gluon.jit
def _compute_tile(
    arguments, tile, slot, position, state_stage,
    CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    _, _, _, _, _, results, buffers, barriers, log2_scale, _ = arguments
    index, batch, head, first_row, end, loop, row_bounds, steps = tile
    queries, query_tails, _, _ = buffers
    _, q_empty, full, empty = barriers
    row_range = batch, head, first_row, end
    first_step, end_step = steps
    in_shared = queries.index(CONSUMER)
    in_registers = in_shared.slice(0, REGISTER_COLUMNS, dim=1).load(CONFIG.q_layout)
    query = in_registers, in_shared, query_tails.index(CONSUMER)
    if CONFIG.skips_steps:
        position = skip_steps(barriers, first_step, position, CONSUMER, CONFIG)
    carry = _first_step(
        query, buffers, barriers, row_bounds, loop, first_step, position, log2_scale, CONSUMER, UPDATE_REF_MAX, CONFIG
    )
    for step in range(first_step + 1, end_step):
        carry = _step(query, buffers, barriers, carry, row_bounds, loop, step, log2_scale, CONSUMER, UPDATE_REF_MAX, CONFIG)
    p, ref_max, l, o, position = carry
    mbarrier.arrive(q_empty, count=1)
    value_stage = position[0]
    o, position = _issue_output(p, o, buffers, full, position, CONFIG)
    incoming = load_state_scalars(results, row_range, CONFIG)
    next_tile = load_consumer_tile(arguments, index + gl.num_programs(0), CONSUMER, CONFIG)
    o = warpgroup_mma_wait(0, deps=(o,))
    mbarrier.arrive(empty.index(value_stage), count=1)
    if CONFIG.skips_steps:
        position = skip_steps(barriers, num_steps(loop) - end_step, position, CONSUMER, CONFIG)
    l = gl.convert_layout(gl.sum(l, axis=1), gl.SliceLayout(1, CONFIG.scores_layout))
    ref_max = softmax.combine_threads(ref_max, CONFIG)
    overflowed = finish_work_tile(ref_max, l, o, incoming, results, row_range, UPDATE_REF_MAX, CONFIG)
    return next_tile, position, state_stage, overflowed


@gluon.jit(do_not_specialize=["num_masks", "num_queries"])
def _forward_kernel(
    q, q_tail, k, k_tail, v, lo, hi, work_tiles, state_m, state_l, state_o, lse, out,
    num_masks, num_queries, log2_scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute all work tiles. The arguments are those of `forward_narrow._forward_kernel`.

    The TMA descriptors q_tail and k_tail are for the columns of q and k beyond CONFIG.dim.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.dim], q.dtype)
    queries = gl.allocate_shared_memory(q.dtype, [CONFIG.consumers, ROWS, CONFIG.dim], TILE)
    ring = gl.allocate_shared_memory(q.dtype, [CONFIG.stages, CONFIG.keys, CONFIG.dim], TILE)
    if CONFIG.tail > 0:
        TAIL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.tail], q.dtype)
        query_tails = gl.allocate_shared_memory(q.dtype, [CONFIG.consumers, ROWS, CONFIG.tail], TAIL)
        key_tails = gl.allocate_shared_memory(q.dtype, [CONFIG.tails, CONFIG.keys, CONFIG.tail], TAIL)
    else:
        query_tails = queries
        key_tails = ring
    q_full, q_empty = allocate_barriers(1, 1, CONFIG.consumers)
    full, empty = allocate_barriers(CONFIG.stages, 1, CONFIG.consumers)
    buffers = queries, query_tails, ring, key_tails
    barriers = q_full.index(0), q_empty.index(0), full, empty
    loading = (q, q_tail, k, k_tail, v), work_tiles, buffers, barriers
    results = state_m, state_l, state_o, None, lse, out, None, num_queries
    computing = lo, hi, work_tiles, num_masks, num_queries, results, buffers, barriers, log2_scale, None
    run_partitions(_load_tile, _compute_tile, skip_tile, loading, computing, CONFIG)
