"""The forward kernel for Hopper GPUs (sm_90) and head dims up to 128, in Gluon: FlashAttention-2 (Dao 2023, algorithm 1),
pipelined as in FlashAttention-3 (Shah et al. 2024, section 3).

The page docs/hopper.md defines the terms. The producer is a single warp that loads Q, K and V. Each consumer warpgroup computes
64 rows, with scores, probabilities and o in registers.

      PRODUCER                          SHARED MEMORY                      CONSUMERS

      load Q -------- q_full --------> [ queries: 1 or 2 slots  ] -------> S(j) = Q K(j)^T in every step
               <----- q_empty -------                             <------- release the slot
      load K(j) ----- k_full[s] -----> [ keys: ring of stages   ] -------> S(j) = Q K(j)^T
               <----- k_empty[s] ----                             <------- release K(j)
      load V(j) ----- v_full[s] -----> [ values: ring of stages ] -------> O += P(j) V(j)
               <----- v_empty[s] ----                             <------- release V(j)

      after the last step of a work tile, if a state comes in or is returned:

      load o (*) ---- k_full, v_full > [ the next stages        ] -------> merge the incoming o, store or add o
               <----- k_empty, v_empty                            <------- release the stages in the next work tile

      (*) The producer loads o only if a state comes in and the output is returned. If there is no incoming state, the consumers
          write the new o into empty K/V buffers.

In a consumer, the softmax of one step overlaps with the second product of the previous step:

      step j        issue S(j) = Q K(j)^T | issue O += P(j-1) V(j-1) | wait for S(j) | softmax: P(j) | wait for O | release V
      tensor cores  ======= S(j) ========= ============ P(j-1) V(j-1) ================

If the kernel returns an output, shared memory has two buffers for Q. While TMA stores the output from one buffer of Q, the next
Q is loaded into the other buffer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper import softmax
from ringattn.kernels.hopper.column_parts import (
    add_product,
    join_parts,
    load_left,
    multiply_rows,
    num_parts,
    split_tile,
    wait_for_parts,
    zero_parts,
)
from ringattn.kernels.hopper.common import ROWS, allocate_barrier, allocate_barriers, num_steps, step_start, tile_view, tma_load
from ringattn.kernels.hopper.epilogue import (
    finish_work_tile,
    load_state_scalars,
    release_keys,
    release_state_stage,
    transfer_buffer,
)
from ringattn.kernels.hopper.forward_common import (
    advance_stage,
    load_consumer_tile,
    load_queries,
    pass_ping_pong,
    run_partitions,
    wait_for_ping_pong,
)


@gluon.jit
def _load_tile(arguments, rows, loop, slot, position, CONFIG: gl.constexpr):
    STATE_STAGES: gl.constexpr = CONFIG.state_stages
    tensors, _, buffers, barriers = arguments
    q, k, v, state_tiles = tensors
    queries, keys, values = buffers
    q_full, _, k_full, k_empty, v_full, v_empty = barriers
    batch, head, first = rows
    stage, phase = position
    mbarrier.expect(q_full, CONFIG.consumers * q.block_type.nbytes)
    load_queries(q, rows, slot, queries, q_full, CONFIG)
    key_head = head // CONFIG.group
    for step in range(num_steps(loop)):
        start = step_start(loop, step, CONFIG.keys)
        mbarrier.wait(k_empty.index(stage), phase)
        mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
        tma_load(k, [batch, start, key_head, 0], k_full.index(stage), tile_view(keys.index(stage), k))
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
        tma_load(v, [batch, start, key_head, 0], v_full.index(stage), tile_view(values.index(stage), v))
        stage, phase = advance_stage(stage, phase, CONFIG)
    for i in gl.static_range(STATE_STAGES):
        mbarrier.wait(k_empty.index(stage), phase)
        transfer_buffer(state_tiles, batch, first, head, 2 * i, keys.index(stage), k_full.index(stage), CONFIG)
        mbarrier.wait(v_empty.index(stage), phase)
        transfer_buffer(state_tiles, batch, first, head, 2 * i + 1, values.index(stage), v_full.index(stage), CONFIG)
        stage, phase = advance_stage(stage, phase, CONFIG)
    return stage, phase


@gluon.jit
def _step(
    query, buffers, barriers, carry, row_bounds, loop, step, log2_scale,
    CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute the probabilities of this step while the tensor cores compute P V of the previous step. Return the new `carry`.

    Args:
        query: the parts of the consumer's Q (64, dim), in shared memory or in registers.
        carry: (p, ref_max, l, o, stage, phase, previous stage, previous phase). l already includes p of the previous step, but
            the parts of o do not include P V of that step.
        row_bounds, loop: from `load_consumer_tile`.
        step: after the consumer's first step.
    """
    _, keys, values = buffers
    _, _, k_full, k_empty, v_full, v_empty = barriers
    p, ref_max, l, o, stage, phase, previous_stage, previous_phase = carry
    mbarrier.wait(k_full.index(stage), phase)
    wait_for_ping_pong(CONSUMER, CONFIG)
    # Issue S = Q K^T before P V, because products finish in order, and the softmax needs S first.
    scores = multiply_rows(query, keys.index(stage), CONFIG.columns)
    mbarrier.wait(v_full.index(previous_stage), previous_phase)
    pending_o = add_product(p, values.index(previous_stage), o, CONFIG.columns)
    pass_ping_pong(CONSUMER, CONFIG)
    scores = warpgroup_mma_wait(num_parts(CONFIG.columns), deps=(scores,))
    release_keys(k_empty, stage, CONFIG)
    weights, ref_max, l, alpha = softmax.probabilities(
        scores, ref_max, l, row_bounds, loop, step, log2_scale, UPDATE_REF_MAX, CONFIG
    )
    l = softmax.fence_softmax(l, CONFIG)
    o = wait_for_parts(pending_o, 0, num_parts(CONFIG.columns))
    mbarrier.arrive(v_empty.index(previous_stage), count=1)
    if UPDATE_REF_MAX:
        # The product P V uses the old reference max, so o is rescaled after this product.
        o = softmax.rescale_parts(o, alpha, num_parts(CONFIG.columns))
    # Convert p only after the wait, because the previous P V reads p from the same registers.
    p = gl.convert_layout(weights.to(keys.dtype), CONFIG.p_layout)
    next_stage, next_phase = advance_stage(stage, phase, CONFIG)
    return p, ref_max, l, o, next_stage, next_phase, stage, phase


@gluon.jit
def _first_step(
    query, buffers, barriers, row_bounds, loop, step, state_stage, stage, phase, log2_scale,
    CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    _, keys, _ = buffers
    _, q_empty, k_full, k_empty, _, _ = barriers
    mbarrier.wait(k_full.index(stage), phase)
    wait_for_ping_pong(CONSUMER, CONFIG)
    scores = multiply_rows(query, keys.index(stage), CONFIG.columns)
    pass_ping_pong(CONSUMER, CONFIG)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    # Before a buffer receives the next Q, TMA must have read the previous output from it.
    hopper_common.tma_store_wait(0)
    release_state_stage(barriers, state_stage, CONFIG)
    release_keys(k_empty, stage, CONFIG)
    if CONFIG.q_slots == 2:
        mbarrier.arrive(q_empty, count=1)
    weights, ref_max, l = softmax.first_probabilities(scores, row_bounds, loop, step, log2_scale, UPDATE_REF_MAX, CONFIG)
    p = gl.convert_layout(weights.to(keys.dtype), CONFIG.p_layout)
    o = zero_parts(CONFIG.columns)
    next_stage, next_phase = advance_stage(stage, phase, CONFIG)
    return p, ref_max, l, o, next_stage, next_phase, stage, phase


@gluon.jit
def _skip_tile(barriers, count, position, state_stage, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    hopper_common.tma_store_wait(0)
    release_state_stage(barriers, state_stage, CONFIG)
    mbarrier.arrive(barriers[1], count=1)
    stage, phase = _skip_steps(barriers, count, position, CONSUMER, CONFIG)
    _, stage, phase = _wait_for_state_stages(barriers, stage, phase, -1, CONFIG)
    return stage, phase


@gluon.jit
def _skip_steps(barriers, count, position, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    _, _, k_full, k_empty, v_full, v_empty = barriers
    stage, phase = position
    for _step_index in range(count):
        mbarrier.wait(k_full.index(stage), phase)
        wait_for_ping_pong(CONSUMER, CONFIG)
        pass_ping_pong(CONSUMER, CONFIG)
        release_keys(k_empty, stage, CONFIG)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        stage, phase = advance_stage(stage, phase, CONFIG)
    return stage, phase


@gluon.jit
def _wait_for_state_stages(barriers, stage, phase, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """CONSUMER is -1 if the consumer skips the work tile."""
    _, _, k_full, k_empty, v_full, v_empty = barriers
    STATE_STAGES: gl.constexpr = CONFIG.state_stages
    own_stage = stage
    for i in gl.static_range(STATE_STAGES):
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.wait(v_full.index(stage), phase)
        if i == CONSUMER * CONFIG.o_parts // 2:
            own_stage = stage
        else:
            release_keys(k_empty, stage, CONFIG)
            mbarrier.arrive(v_empty.index(stage), count=1)
        stage, phase = advance_stage(stage, phase, CONFIG)
    return own_stage, stage, phase


@gluon.jit
def _compute_tile(
    arguments, tile, slot, position, state_stage,
    CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    _, _, _, _, _, results, buffers, barriers, log2_scale, _ = arguments
    index, batch, head, first_row, end, loop, row_bounds, steps = tile
    queries, keys, values = buffers
    q_empty, v_full, v_empty = barriers[1], barriers[4], barriers[5]
    row_range = batch, head, first_row, end
    first_step, end_step = steps
    query_tile = queries.index(slot % CONFIG.q_slots * CONFIG.consumers + CONSUMER)
    if CONFIG.q_in_registers:
        query = load_left(query_tile, CONFIG.keys, CONFIG.columns)
    else:
        query = split_tile(query_tile, CONFIG.columns)
    if CONFIG.state_stages > 0 and first_step > 0:
        # Release the buffer that still holds o, because the producer needs it for the skipped K and V.
        hopper_common.tma_store_wait(0)
        release_state_stage(barriers, state_stage, CONFIG)
        state_stage = gl.to_tensor(-1)
    stage, phase = _skip_steps(barriers, first_step, position, CONSUMER, CONFIG)
    carry = _first_step(
        query, buffers, barriers, row_bounds, loop, first_step, state_stage, stage, phase, log2_scale,
        CONSUMER, UPDATE_REF_MAX, CONFIG,
    )  # fmt: skip
    for step in range(first_step + 1, end_step):
        carry = _step(query, buffers, barriers, carry, row_bounds, loop, step, log2_scale, CONSUMER, UPDATE_REF_MAX, CONFIG)
    p, ref_max, l, o, stage, phase, previous_stage, previous_phase = carry
    if CONFIG.q_slots == 1:
        mbarrier.arrive(q_empty, count=1)
    mbarrier.wait(v_full.index(previous_stage), previous_phase)
    o = add_product(p, values.index(previous_stage), o, CONFIG.columns)
    # Loading the incoming state and the next work tile overlaps with the last product P V.
    incoming = load_state_scalars(results, row_range, CONFIG)
    next_tile = load_consumer_tile(arguments, index + gl.num_programs(0), CONSUMER, CONFIG)
    o = join_parts(wait_for_parts(o, 0, num_parts(CONFIG.columns)), CONFIG.columns)
    mbarrier.arrive(v_empty.index(previous_stage), count=1)
    stage, phase = _skip_steps(barriers, num_steps(loop) - end_step, (stage, phase), CONSUMER, CONFIG)
    l = gl.convert_layout(gl.sum(l, axis=1), gl.SliceLayout(1, CONFIG.scores_layout))
    ref_max = softmax.combine_threads(ref_max, CONFIG)
    state_stage, stage, phase = _wait_for_state_stages(barriers, stage, phase, CONSUMER, CONFIG)
    state_buffers = keys.index(state_stage), values.index(state_stage)
    overflowed = finish_work_tile(
        ref_max, l, o, query_tile, state_buffers, incoming, results, row_range, CONSUMER, UPDATE_REF_MAX, CONFIG
    )
    return next_tile, (stage, phase), state_stage, overflowed


@gluon.jit(do_not_specialize=["num_masks", "num_queries"])
def _forward_kernel(
    q, k, v, state_tiles, out_tiles, lo, hi, work_tiles, state_m, state_l, state_o, lse, out,
    num_masks, num_queries, log2_scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute all work tiles.

    Args:
        q, k, v, state_tiles, out_tiles: TMA descriptors of q, k, v, state_o and out, or None.
        lo, hi: (num_masks, Nq), the interval of each query.
        work_tiles: (n, programs, 8), see `Intervals.work_tiles`.
        state_m, state_l, state_o: the incoming state, the returned state, or None.
        lse, out: the results, or None if a state is returned.
        num_masks: 1 or B.
        log2_scale: converts q k^T to scores in log2 units.
    """
    MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.dim], q.dtype)
    queries = gl.allocate_shared_memory(q.dtype, [CONFIG.q_slots * CONFIG.consumers, ROWS, CONFIG.dim], MATRIX)
    keys = gl.allocate_shared_memory(k.dtype, [CONFIG.stages, CONFIG.keys, CONFIG.dim], MATRIX)
    values = gl.allocate_shared_memory(v.dtype, [CONFIG.stages, CONFIG.keys, CONFIG.dim], MATRIX)
    q_full, q_empty = allocate_barriers(1, 1, CONFIG.consumers)
    v_full, v_empty = allocate_barriers(CONFIG.stages, 1, CONFIG.consumers)
    k_full = allocate_barrier(CONFIG.stages, 1)
    k_empty = v_empty if CONFIG.joint_release else allocate_barrier(CONFIG.stages, CONFIG.consumers)
    buffers = queries, keys, values
    barriers = q_full.index(0), q_empty.index(0), k_full, k_empty, v_full, v_empty
    loading = (q, k, v, state_tiles), work_tiles, buffers, barriers
    results = state_m, state_l, state_o, state_tiles, lse, out, out_tiles, num_queries
    computing = lo, hi, work_tiles, num_masks, num_queries, results, buffers, barriers, log2_scale, None
    run_partitions(_load_tile, _compute_tile, _skip_tile, loading, computing, CONFIG)
