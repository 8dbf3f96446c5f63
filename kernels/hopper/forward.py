"""The forward kernel for Hopper GPUs (sm_90), written in Gluon. It implements `ringattn.kernels.reference.forward`.

This kernel computes FlashAttention-2 (Dao 2023, algorithm 1). Its loop is pipelined as in FlashAttention-3 (Shah et al. 2024,
section 3).

A work tile is a tile of queries of one head. `Intervals.work_tiles` assigns work tiles to programs before the launch. Usually
there is one program per SM. The warps of a program are divided into partitions. One partition is the producer, a single warp
that loads Q, K and V. The other partitions are the consumers, of which there are two or three. Each consumer is a warpgroup
that computes 64 rows of every work tile and keeps scores, probabilities and o in registers.

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

      (*) The producer loads o only if a state comes in and the output is returned. Otherwise the producer only hands the
          empty stages over to the consumers, which write the new o into these stages.

In a consumer, the softmax of one step overlaps with the second product of the previous step:

      step j        issue S(j) = Q K(j)^T | issue O += P(j-1) V(j-1) | wait for S(j) | softmax: P(j) | wait for O | release V
      tensor cores  ======= S(j) ========= ============ P(j-1) V(j-1) ================

Barriers. Each `full` barrier counts one arrival of the producer and the bytes that TMA has copied. Each `empty` barrier counts
one arrival of every consumer. The stage and the phase are not reset between work tiles, so the producer can load the next work
tile while the consumers finish the previous one. If K and V of a stage are released jointly, `k_empty` is the same barrier as
`v_empty`.

Slots of Q. The output of a work tile is copied to global memory through the shared memory of its Q. This slot is therefore
still in use when the next work tile begins. A call that returns an output has a second slot, into which the producer loads the
next Q. A consumer releases the slot of a work tile after the first product of the next work tile. A state is copied through
stages of K and V instead. A call that returns a state therefore has one slot of Q, and a consumer releases the slot after the
last S of the work tile. The variable `slot` is one bit, which flips with every work tile. The index of the slot in shared
memory is `slot % q_slots`. Consumers wait for phase `slot` of `q_full`, and the producer waits for phase `slot ^ 1` of
`q_empty`.

State stages. The o of a state is in fp32 and needs twice the bytes of a Q in 16 bits, so o does not fit into the shared memory
of Q. The producer therefore transfers the next stages of the K/V pipeline to the consumers. If the output is returned, TMA
loads the incoming o into these stages. If a state is returned and no state comes in, TMA stores o from these stages. If a state
is returned and a state comes in, TMA adds the o of this call's keys to the incoming o in global memory. The module
`ringattn.kernels.hopper.epilogue` contains this code, and a table of all cases with the exceptions.

Retry pass. In bf16, the softmax subtracts an optimistic reference max, which `ringattn.kernels.hopper.softmax` explains. If a
row of a program overflows, all partitions of that program repeat all of its work tiles. In this retry pass, they update the
reference max in every step.

Ping-pong. If ping-pong is on, named barriers make each consumer wait until the previous consumer has issued its products. The
tensor cores then compute the products of one consumer while the other consumers compute their softmax. Without ping-pong, all
consumers would wait for the tensor cores at the same time.

KV loop. The first steps process the masked tiles at the two ends of the intervals. The remaining steps process the unmasked
tiles between them and do not apply a mask. Scores are in log2 units.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ringattn.kernels.hopper import NARROW_DIM, forward_wide, softmax
from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper.column_parts import (
    add_product,
    join_parts,
    load_left,
    multiply_rows,
    num_parts,
    split_tile,
    used_columns,
    wait_for_parts,
    zero_parts,
)
from ringattn.kernels.hopper.common import LOG2_E, ROWS, allocate_barriers, step_start, tile_view, tma_load
from ringattn.kernels.hopper.epilogue import finish_work_tile, load_state_scalars, transfer_buffer
from ringattn.kernels.hopper.forward_common import (
    FENCE_SOFTMAX,
    PRODUCER_REGISTERS,
    ForwardConfig,
    advance_stage,
    allocate_overflow,
    any_overflow,
    assign_work_tiles,
    load_consumer_tile,
    pass_ping_pong,
    report_overflow,
    wait_for_ping_pong,
)
from ringattn.kernels.triton import common as triton_common
from ringattn.kernels.triton.launcher import launch


@dataclass(frozen=True)
class Config(ForwardConfig):
    """The constants for which a kernel is compiled.

    Args:
        columns: the number of columns of a tile that the products use, see `ringattn.kernels.hopper.column_parts`.
        joint_release: whether consumers release K and V of a stage with one arrival, after P V.

    `ForwardConfig` explains the other arguments.
    """

    columns: int
    joint_release: bool

    @property
    def q_in_registers(self) -> bool:
        """Whether a consumer loads its Q into registers before the first step of a work tile.

        S = Q K^T then reads only K from shared memory, whose bandwidth limits this product with 64 keys per step. With 128
        columns, the registers do not suffice.
        """
        return self.columns == 96

    @property
    def q_slots(self) -> int:
        """The number of slots of Q: two if an output is returned, and one if a state is returned.

        More than two slots are not possible, because one bit selects both the slot and the phase of q_full and q_empty.
        """
        return 2 if self.final else 1

    @property
    def o_parts(self) -> int:
        """The number of parts into which a consumer's o (64, dim) in fp32 is split.

        Each part is as large as the K buffer or the V buffer of a stage.
        """
        return 2 * ROWS.value // self.keys

    @property
    def state_stages(self) -> int:
        """The number of stages that are needed for the o of all consumers.

        If no state comes in and none is returned, the number is 0.
        """
        return -(-self.consumers * self.o_parts // 2) if self.has_state or not self.final else 0


# These settings were the fastest on an H200, or on an H100 with 96 columns. The key of each entry is `Config.columns`.
TILES = {
    64: dict(consumers=3, keys=128, stages=3, joint_release=False, registers=160, ping_pong=True, fence_softmax=False),
    96: dict(consumers=3, keys=64, stages=4, joint_release=True, registers=160, ping_pong=True, fence_softmax=FENCE_SOFTMAX),
    128: dict(consumers=3, keys=64, stages=3, joint_release=True, registers=160, ping_pong=False, fence_softmax=FENCE_SOFTMAX),
}

# A call with at most this number of rows uses TILES_FEW_ROWS. A row is one query of one head and one batch entry. Rows that see
# no key are not counted. At head dim 128, the work tiles for few rows have 128 rows instead of 192, so that fewer SMs are idle.
# At head dim 64, both tables have the same settings.
FEW_ROWS = 2**16
TILES_FEW_ROWS = TILES | {
    96: dict(consumers=2, keys=128, stages=2, joint_release=False, registers=240, ping_pong=True, fence_softmax=FENCE_SOFTMAX),
    128: dict(consumers=2, keys=128, stages=2, joint_release=False, registers=240, ping_pong=True, fence_softmax=FENCE_SOFTMAX),
}


@gluon.jit
def _produce(arguments, overflow, CONFIG: gl.constexpr):
    """Run the producer partition, which is a single warp: load Q, K and V of all work tiles.

    If there is a retry pass, the producer loads all work tiles a second time.
    """
    # The first phase of a barrier has the number 0. If a partition waits for phase 1 of a new barrier, the wait returns at
    # once. The producer therefore starts with phase 1 and finds all stages empty.
    slot, stage, phase = _load_tiles(arguments, gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(1), CONFIG)
    if not CONFIG.update_ref_max and any_overflow(overflow, 1, CONFIG):
        _load_tiles(arguments, slot, stage, phase, CONFIG)


@gluon.jit
def _load_tiles(arguments, slot, stage, phase, CONFIG: gl.constexpr):
    """Load Q, K and V of all work tiles of this program. Return the next slot, stage and phase."""
    CONSUMERS: gl.constexpr = CONFIG.consumers
    STATE_STAGES: gl.constexpr = CONFIG.state_stages
    q, k, v, state_tiles, work_tiles, buffers, barriers = arguments
    queries, keys, values = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    index = gl.program_id(0)
    batch, head, first, end, loop = hopper_common.load_work_tile(work_tiles, index)
    while end > 0:
        _, _, num_unmasked, num_masked = loop
        mbarrier.wait(q_empty, slot ^ 1)
        mbarrier.expect(q_full, CONSUMERS * q.block_type.nbytes)
        for c in gl.static_range(CONSUMERS):
            query = queries.index(slot % CONFIG.q_slots * CONSUMERS + c)
            tma_load(q, [batch, first + c * ROWS, head, 0], q_full, tile_view(query, q))
        key_head = head // CONFIG.group
        # Even a work tile whose rows see no key has one step, so that the consumers need no special case.
        for step in range(gl.maximum(num_masked + num_unmasked, 1)):
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
        slot ^= 1
        index += gl.num_programs(0)
        batch, head, first, end, loop = hopper_common.load_work_tile(work_tiles, index)
    return slot, stage, phase


@gluon.jit
def _release_keys(k_empty, stage, CONFIG: gl.constexpr):
    """Release K of a stage.

    With a joint release, this function does nothing, because the arrival that releases V also releases K.
    """
    if not CONFIG.joint_release:
        mbarrier.arrive(k_empty.index(stage), count=1)


@gluon.jit
def _step(
    query, buffers, barriers, carry, row_bounds, loop, step, log2_scale,
    CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute the probabilities of this step while the tensor cores compute P V of the previous step.

    Args:
        query: the parts of the consumer's Q (64, dim), in shared memory or in registers.
        buffers: (queries, keys, values).
        barriers: (q_full, q_empty, k_full, k_empty, v_full, v_empty).
        carry: (p, ref_max, l, o, stage, phase, previous stage, previous phase). p holds the probabilities of the previous step.
            The sum l already contains p, but o does not contain P V of the previous step yet. o is a tuple of its parts.
            `stage` and `phase` are those of this step.
        row_bounds: (lo, hi, all_initialised, ref_max) from `load_consumer_tile`.
        loop: from `ringattn.kernels.hopper.common.load_work_tile`.
        step: the number of this step, which is at least 1.

    Returns:
        The `carry` argument for the next step.
    """
    _, keys, values = buffers
    _, _, k_full, k_empty, v_full, v_empty = barriers
    p, ref_max, l, o, stage, phase, previous_stage, previous_phase = carry
    lo, hi, all_initialised, _ = row_bounds
    mbarrier.wait(k_full.index(stage), phase)
    wait_for_ping_pong(CONSUMER, CONFIG)
    # Issue S before P V. The products finish in the order in which they are issued, and the softmax only needs S.
    scores = multiply_rows(query, keys.index(stage), CONFIG.columns)
    mbarrier.wait(v_full.index(previous_stage), previous_phase)
    pending_o = add_product(p, values.index(previous_stage), o, CONFIG.columns)
    pass_ping_pong(CONSUMER, CONFIG)
    # Wait until only P V may still be in flight. S is complete after this wait.
    scores = warpgroup_mma_wait(num_parts(CONFIG.columns), deps=(scores,))
    _release_keys(k_empty, stage, CONFIG)
    _, _, _, num_masked = loop
    if step < num_masked:
        scores = softmax.mask_scores(scores, lo, hi, step_start(loop, step, CONFIG.keys), CONFIG)
    if UPDATE_REF_MAX:
        ref_max, alpha = softmax.update_ref_max(scores, ref_max, log2_scale, CONFIG)
        l *= alpha
    # A row may see its first key in any masked step, so its reference max may still be unset. In step num_masked, the first
    # unmasked step, every row sees all keys of the tile. After this step, every reference max is set.
    elif (step <= num_masked) & ~all_initialised:
        ref_max = softmax.initialise_ref_max(scores, ref_max, log2_scale, CONFIG)
    weights, l = softmax.exp_scores(scores, ref_max, l, log2_scale, CONFIG)
    l = softmax.fence_softmax(l, CONFIG)
    o = wait_for_parts(pending_o, CONFIG.columns)
    mbarrier.arrive(v_empty.index(previous_stage), count=1)
    if UPDATE_REF_MAX:
        # P V of the previous step is relative to the previous reference max. Therefore o is rescaled only after this product
        # has been added.
        o = _rescale_parts(o, alpha, CONFIG)
    # Convert the probabilities only after the wait. Until then, P V reads its left operand from the registers of the previous
    # p, and the conversion overwrites these registers.
    p = gl.convert_layout(weights.to(keys.dtype), CONFIG.p_layout)
    next_stage, next_phase = advance_stage(stage, phase, CONFIG)
    return p, ref_max, l, o, next_stage, next_phase, stage, phase


@gluon.jit
def _rescale_parts(o, alpha, CONFIG: gl.constexpr):
    """Multiply each row of o, a tuple of parts, by its factor in alpha (64, 4)."""
    PARTS: gl.constexpr = num_parts(CONFIG.columns)
    rescaled = ()
    for part in gl.static_range(PARTS):
        rescaled = rescaled + (softmax.rescale(o[part], alpha),)
    return rescaled


@gluon.jit
def _first_step(
    query, buffers, barriers, row_bounds, loop, state_stage, stage, phase, log2_scale,
    CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute the probabilities of the first step of a work tile, and return the carry for `_step`.

    `stage` and `phase` are those of the first step. `state_stage` is the state stage that this consumer used in the previous
    work tile, or -1. The other arguments are those of `_step`. A work tile in which no row sees a key also has one step, and
    the keys of this step may lie beyond the last key of the tensor. The step then masks all scores, so the values of these keys
    do not matter.
    """
    _, keys, _ = buffers
    _, q_empty, k_full, k_empty, _, v_empty = barriers
    lo, hi, _, ref_max = row_bounds
    mbarrier.wait(k_full.index(stage), phase)
    wait_for_ping_pong(CONSUMER, CONFIG)
    scores = multiply_rows(query, keys.index(stage), CONFIG.columns)
    pass_ping_pong(CONSUMER, CONFIG)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    # The shared memory that holds the result of the previous work tile is released only now. TMA has had the time of one
    # product to read this memory, so the wait is short.
    hopper_common.tma_store_wait(0)
    _release_state_stage(k_empty, v_empty, state_stage, CONFIG)
    _release_keys(k_empty, stage, CONFIG)
    if CONFIG.q_slots == 2:
        mbarrier.arrive(q_empty, count=1)
    _, _, num_unmasked, num_masked = loop
    if (num_masked > 0) | (num_unmasked == 0):
        scores = softmax.mask_scores(scores, lo, hi, step_start(loop, 0, CONFIG.keys), CONFIG)
    BY_THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, softmax.by_thread(scores, CONFIG.keys).type.layout))
    zero_sum = gl.zeros([ROWS, 4], gl.float32, BY_THREAD)
    ref_max = gl.convert_layout(ref_max, gl.SliceLayout(1, BY_THREAD)).expand_dims(1) + zero_sum
    if UPDATE_REF_MAX:
        ref_max, _ = softmax.update_ref_max(scores, ref_max, log2_scale, CONFIG)
    else:
        ref_max = softmax.initialise_ref_max(scores, ref_max, log2_scale, CONFIG)
    weights, l = softmax.exp_scores(scores, ref_max, zero_sum, log2_scale, CONFIG)
    p = gl.convert_layout(weights.to(keys.dtype), CONFIG.p_layout)
    o = zero_parts(CONFIG.columns)
    next_stage, next_phase = advance_stage(stage, phase, CONFIG)
    return p, ref_max, l, o, next_stage, next_phase, stage, phase


@gluon.jit
def _release_state_stage(k_empty, v_empty, state_stage, CONFIG: gl.constexpr):
    """Release the stage that held this consumer's o of the previous work tile.

    If `state_stage` is -1, there is no such stage, and nothing is released.
    """
    if CONFIG.state_stages > 0 and state_stage >= 0:
        _release_keys(k_empty, state_stage, CONFIG)
        mbarrier.arrive(v_empty.index(state_stage), count=1)


@gluon.jit
def _skip_tile(barriers, num_steps, state_stage, stage, phase, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Skip a work tile in which this consumer has no rows. Return the next stage and phase.

    The `empty` barriers and the ping-pong require arrivals of all consumers. This consumer therefore arrives at every barrier
    without computing anything.
    """
    _, q_empty, k_full, k_empty, v_full, v_empty = barriers
    hopper_common.tma_store_wait(0)
    _release_state_stage(k_empty, v_empty, state_stage, CONFIG)
    mbarrier.arrive(q_empty, count=1)
    for _step_index in range(gl.maximum(num_steps, 1)):
        mbarrier.wait(k_full.index(stage), phase)
        wait_for_ping_pong(CONSUMER, CONFIG)
        pass_ping_pong(CONSUMER, CONFIG)
        _release_keys(k_empty, stage, CONFIG)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        stage, phase = advance_stage(stage, phase, CONFIG)
    _, stage, phase = _wait_for_state_stages(barriers, stage, phase, -1, CONFIG)
    return stage, phase


@gluon.jit
def _wait_for_state_stages(barriers, stage, phase, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Wait for the state stages of a work tile, and release all of them except the stage of this consumer.

    CONSUMER is -1 if the consumer skips the work tile. Such a consumer releases all state stages. Return (own stage, next
    stage, phase of the next stage).
    """
    _, _, k_full, k_empty, v_full, v_empty = barriers
    STATE_STAGES: gl.constexpr = CONFIG.state_stages
    own_stage = stage
    for i in gl.static_range(STATE_STAGES):
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.wait(v_full.index(stage), phase)
        if i == CONSUMER * CONFIG.o_parts // 2:
            own_stage = stage
        else:
            _release_keys(k_empty, stage, CONFIG)
            mbarrier.arrive(v_empty.index(stage), count=1)
        stage, phase = advance_stage(stage, phase, CONFIG)
    return own_stage, stage, phase


@gluon.jit
def _consume(arguments, overflow, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Run a consumer partition, which computes 64 rows of every work tile.

    If any row of the program overflows, the consumer computes its rows of all work tiles a second time, in the retry pass.
    """
    if CONSUMER == CONFIG.consumers - 1:
        # The last consumer starts the ping-pong by letting consumer 0 issue its products.
        pass_ping_pong(CONSUMER, CONFIG)
    zero = gl.to_tensor(0)
    slot, stage, phase, overflowed = _compute_work_tiles(arguments, zero, zero, zero, CONSUMER, CONFIG.update_ref_max, CONFIG)
    if not CONFIG.update_ref_max:
        report_overflow(overflow, overflowed, CONSUMER)
        if any_overflow(overflow, 4, CONFIG):
            # The results of the first pass must be in memory before the retry pass rewrites them. Otherwise, these invalid
            # results could arrive later and replace the valid ones. The function `tma_store_wait` is not enough, because it
            # waits only until TMA has read the results from shared memory. The instruction below is the same wait without
            # ".read". It also waits until TMA has written the results to global memory. Gluon has no function for this form of
            # the instruction.
            hopper_common.execute("cp.async.bulk.wait_group 0; mov.b32 $0, $1;")
            _compute_work_tiles(arguments, slot, stage, phase, CONSUMER, True, CONFIG)


@gluon.jit
def _compute_work_tiles(
    arguments, slot, stage, phase, CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Compute this consumer's rows of all work tiles. Return (slot, stage, phase, mask of overflowed rows)."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, CONFIG.scores_layout)
    lo, hi, work_tiles, num_masks, num_queries, results, buffers, barriers, log2_scale = arguments
    queries, keys, values = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    index = gl.program_id(0)
    batch, head, first_row, end, loop, row_bounds = load_consumer_tile(arguments, index, CONSUMER, CONFIG)
    overflowed = gl.zeros([ROWS], gl.int1, BY_ROW)
    state_stage = gl.to_tensor(-1)
    while end > 0:
        _, _, num_unmasked, num_masked = loop
        mbarrier.wait(q_full, slot)
        if first_row < end:
            row_range = batch, head, first_row, end
            query_tile = queries.index(slot % CONFIG.q_slots * CONFIG.consumers + CONSUMER)
            if CONFIG.q_in_registers:
                query = load_left(query_tile, CONFIG.keys, CONFIG.columns)
            else:
                query = split_tile(query_tile, CONFIG.columns)
            carry = _first_step(
                query, buffers, barriers, row_bounds, loop, state_stage, stage, phase, log2_scale,
                CONSUMER, UPDATE_REF_MAX, CONFIG,
            )  # fmt: skip
            for step in range(1, num_masked + num_unmasked):
                carry = _step(
                    query, buffers, barriers, carry, row_bounds, loop, step, log2_scale, CONSUMER, UPDATE_REF_MAX, CONFIG
                )
            p, ref_max, l, o, stage, phase, previous_stage, previous_phase = carry
            if CONFIG.q_slots == 1:
                mbarrier.arrive(q_empty, count=1)
            # Issue P V of the last step.
            mbarrier.wait(v_full.index(previous_stage), previous_phase)
            o = add_product(p, values.index(previous_stage), o, CONFIG.columns)
            # While this product runs, load the scalars of the incoming state and the next work tile.
            incoming = load_state_scalars(results, row_range, CONFIG)
            index += gl.num_programs(0)
            batch, head, first_row, end, loop, row_bounds = load_consumer_tile(arguments, index, CONSUMER, CONFIG)
            o = join_parts(wait_for_parts(o, CONFIG.columns), CONFIG.columns)
            mbarrier.arrive(v_empty.index(previous_stage), count=1)
            # Four threads share a row. Their sums and their maxima are combined only here, once per work tile.
            l = gl.convert_layout(gl.sum(l, axis=1), BY_ROW)
            ref_max = gl.convert_layout(gl.max(ref_max, axis=1), BY_ROW)
            state_stage, stage, phase = _wait_for_state_stages(barriers, stage, phase, CONSUMER, CONFIG)
            state_buffers = keys.index(state_stage), values.index(state_stage)
            overflowed |= finish_work_tile(
                ref_max, l, o, query_tile, state_buffers, incoming, results, row_range, CONSUMER, UPDATE_REF_MAX, CONFIG
            )
        else:
            stage, phase = _skip_tile(barriers, num_masked + num_unmasked, state_stage, stage, phase, CONSUMER, CONFIG)
            index += gl.num_programs(0)
            batch, head, first_row, end, loop, row_bounds = load_consumer_tile(arguments, index, CONSUMER, CONFIG)
            state_stage = gl.to_tensor(-1)
        slot ^= 1
    # After this function, the program either ends or starts a retry pass. The end of the program frees its shared memory, and a
    # retry pass overwrites it. In both cases, TMA must first have read all results from shared memory.
    hopper_common.tma_store_wait(0)
    _release_state_stage(k_empty, v_empty, state_stage, CONFIG)
    return slot, stage, phase, overflowed


@gluon.jit(do_not_specialize=["num_masks", "num_queries"])
def _forward_kernel(
    q, k, v, state_tiles, out_tiles, lo, hi, work_tiles, state_m, state_l, state_o, lse, out,
    num_masks, num_queries, log2_scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute all work tiles. The function `forward` launches this kernel.

    Args:
        q, k, v: TMA descriptors of (B, Nq, Hq, D), (B, Nk, Hkv, D) and (B, Nk, Hkv, Dv).
        state_tiles, out_tiles: TMA descriptors of state_o and of out, both (B, Nq, Hq, Dv), or None.
        lo, hi: (num_masks, Nq), the interval of each query.
        work_tiles: (n, programs, 8), see `Intervals.work_tiles`.
        state_m, state_l, state_o: the state, which is read, written or both. They are None if no state comes in and none is
            returned.
        lse, out: (B, Nq, Hq) and (B, Nq, Hq, Dv), which are written. They are None if a state is returned.
        num_masks: 1 if all batch entries have the same mask, else B.
        num_queries: Nq.
        log2_scale: the factor that converts q k^T to scores in log2 units.
    """
    MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.dim], q.dtype)
    queries = gl.allocate_shared_memory(q.dtype, [CONFIG.q_slots * CONFIG.consumers, ROWS, CONFIG.dim], MATRIX)
    keys = gl.allocate_shared_memory(k.dtype, [CONFIG.stages, CONFIG.keys, CONFIG.dim], MATRIX)
    values = gl.allocate_shared_memory(v.dtype, [CONFIG.stages, CONFIG.keys, CONFIG.dim], MATRIX)
    q_full, q_empty = allocate_barriers(1, 1, CONFIG.consumers)
    k_full, k_empty = allocate_barriers(CONFIG.stages, 1, CONFIG.consumers)
    v_full, v_empty = allocate_barriers(CONFIG.stages, 1, CONFIG.consumers)
    overflow = allocate_overflow(CONFIG)
    # Make the initialised barriers visible to TMA.
    fence_async_shared()
    buffers = queries, keys, values
    if CONFIG.joint_release:
        k_empty = v_empty
    barriers = q_full.index(0), q_empty.index(0), k_full, k_empty, v_full, v_empty
    loading = q, k, v, state_tiles, work_tiles, buffers, barriers
    # `results` also contains the tensors of the state. Consumers read the incoming state from these tensors. If a state is
    # returned, they write the new state to the same tensors.
    results = state_m, state_l, state_o, state_tiles, lse, out, out_tiles, num_queries
    computing = lo, hi, work_tiles, num_masks, num_queries, results, buffers, barriers, log2_scale
    # The last two arguments are the numbers of warps and of registers per thread, for all partitions except the first one. The
    # first partition is Gluon's default partition. It has four warps and gets the registers that the other partitions do not
    # use.
    gl.warp_specialize(
        [
            (_consume, (computing, overflow, i, CONFIG)) if i < CONFIG.consumers else (_produce, (loading, overflow, CONFIG))
            for i in CONFIG.partitions
        ],
        [4] * (CONFIG.consumers - 1) + [1],
        [CONFIG.registers] * (CONFIG.consumers - 1) + [PRODUCER_REGISTERS],
    )


@lru_cache(maxsize=256)
def configure(
    dims: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype, has_state: bool, final: bool, few_rows: bool
) -> Config:
    """Return the constants of the kernel for a call.

    Args:
        dims: head dims (D, Dv).
        heads: numbers of query heads and key heads (Hq, Hkv).
        dtype: the dtype of q, k and v.
        has_state, final: whether a state comes in, and whether the output is returned instead of a state.
        few_rows: whether to use TILES_FEW_ROWS.
    """
    dim, (num_heads, num_key_heads) = hopper_common.padded_dim(*dims), heads
    columns = used_columns(*dims)
    tiles = (TILES_FEW_ROWS if few_rows else TILES)[columns]
    # fp16 cannot represent probabilities up to OVERFLOW_LIMIT. In fp16, the first pass must therefore update the reference max
    # in every step.
    update = dtype != torch.bfloat16
    config = Config(
        dim, dims[1], num_heads, num_heads // num_key_heads, has_state, final, columns=columns, update_ref_max=update, **tiles
    )
    # While the consumers use the state stages, the producer already loads the first keys of the next work tile into other
    # stages. If Q has two slots, there is at least one stage besides the state stages. If Q has one slot, shared memory has
    # room for one more stage, so there are at least two.
    return replace(config, stages=max(config.stages, config.state_stages + 3 - config.q_slots))


def forward(
    q, k, v, intervals, scale, state=None, final=False,
    *, dropout=None, blocks=None, precision="ieee", shares_sms=False,
):  # fmt: skip
    """Compute attention of one block of queries to one block of keys on one sm_90 GPU (Dao 2023, algorithm 1).

    This function does not check its arguments. Call `ringattn.kernels.dispatch.forward`, which checks them.

    Args:
        q: (B, Nq, Hq, D), fp16 or bf16; D is a multiple of 8 up to 256. TMA requires that the last dimension is contiguous and
            that the other strides are multiples of 8 elements. A tensor with other strides is copied.
        k: (B, Nk, Hkv, D) in q's dtype; Hkv divides Hq, and Nk is at least 1.
        v: (B, Nk, Hkv, Dv) in q's dtype; Dv is a multiple of 8 up to 256. If D or Dv is above 128,
            `ringattn.kernels.hopper.forward_wide` computes the call.
        intervals: for every query, the range [lo, hi) of keys that it may attend to, for 1 or B batch entries, on q's device.
            For each work tile, the kernel skips the tiles of keys before the first interval and after the last interval. The
            kernel applies no mask to tiles of keys that all rows of the work tile attend to.
        scale: multiplies the scores before the softmax, usually D ** -0.5. It must be positive.
        state: (m, l, o) of these queries over the keys of earlier calls, fp32 and contiguous: m and l (B, Nq, Hq), o
            (B, Nq, Hq, Dv). Without `final`, these tensors are updated in place. With None, there are no earlier keys.
        final: whether these are the last keys, so that (out, lse) is returned instead of the state.
        dropout, blocks: must be None.
        precision: ignored, because it applies to fp32 inputs only.
        shares_sms: whether other kernels, such as NCCL's, run on the SMs at the same time. Normally there is one program per
            SM, and its work tiles are assigned to it before the launch. If such a program does not get an SM, it delays the
            whole call. With `shares_sms`, every work tile has a program of its own, so a late program delays only its own work
            tile.

    Returns:
        The state (m, l, o) over the earlier keys and the keys of this call. With `final`, (out, lse) instead: out (B, Nq, Hq,
        Dv) in q's dtype and lse (B, Nq, Hq) in fp32. The m of a state is a reference max, which may differ from the maximum of
        the scores. l and o are relative to this reference max. A query that has not seen a key has the state (-inf, 0, 0), the
        output 0 and the lse -inf.
    """
    if max(q.shape[-1], v.shape[-1]) > NARROW_DIM:
        return forward_wide.forward(q, k, v, intervals, scale, state, final, shares_sms)
    m, l, o, out, lse = triton_common.allocate_results(q, v, state, final)
    if q.numel() == 0:
        return (out, lse) if final else (m, l, o)
    has_state = state is not None
    (batch, num_queries, num_heads, head_dim), (num_key_heads, value_dim) = q.shape, v.shape[2:]
    few_rows = intervals.num_nonempty_rows * (batch // intervals.batch) * num_heads <= FEW_ROWS
    config = configure((head_dim, value_dim), (num_heads, num_key_heads), q.dtype, has_state, final, few_rows)
    q, k, v = [hopper_common.as_addressable(x) for x in (q, k, v)]
    addressable_o = hopper_common.as_addressable(o) if has_state else o
    tiles = (q, ROWS.value, config.dim), (k, config.keys, config.dim), (v, config.keys, config.dim)
    tiles += (addressable_o, ROWS.value, config.dim // config.o_parts), (out, ROWS.value, config.dim)
    descriptors = [None if x is None else hopper_common.tma_descriptor(x, rows, columns) for x, rows, columns in tiles]
    work_tiles = assign_work_tiles(config, intervals, q, v, shares_sms)
    with torch.cuda.device_of(q):
        launch(
            _forward_kernel, work_tiles.shape[1],
            (*descriptors, intervals.lo, intervals.hi, work_tiles, m, l, addressable_o, lse, out),
            (intervals.batch, num_queries, float(scale) * LOG2_E.value), CONFIG=config,
        )  # fmt: skip
    if config.updates_state and addressable_o is not o:
        o.copy_(addressable_o)
    return (out, lse) if final else (m, l, o)
