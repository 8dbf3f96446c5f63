"""Hopper forward: `ringattn.kernels.reference.forward` for sm_90, in Gluon.

It computes FlashAttention-2 (Dao 2023, algorithm 1), pipelined as in FlashAttention-3 (Shah et al. 2024, section 3).

A work tile is a tile of queries of one head. A program computes the work tiles that `Intervals.work_tiles` assigned to it
before the launch, usually one program per SM. In a program, one warp is the producer. The other partitions are two or three
consumers, warpgroups that compute 64 rows of every work tile. They keep scores, probabilities and o in registers.

      PRODUCER                          SHARED MEMORY                      CONSUMERS

      load Q -------- q_full --------> [ queries: 1 or 2 slots  ] -------> S(j) = Q K(j)^T in every step
               <----- q_empty -------                             <------- release the slot
      load K(j) ----- k_full[s] -----> [ keys: ring of stages   ] -------> S(j) = Q K(j)^T
               <----- k_empty[s] ----                             <------- release K(j)
      load V(j) ----- v_full[s] -----> [ values: ring of stages ] -------> O += P(j) V(j)
               <----- v_empty[s] ----                             <------- release V(j)

      after the last step of a work tile, if a state comes in or is returned:

      load o, or ---- k_full, v_full > [ the next stages        ] -------> merge the incoming o, store or add o
      nothing  <----- k_empty, v_empty                            <------- release the stages in the next work tile

In a consumer, the softmax of one step overlaps with the second product of the previous step:

      step j        issue S(j) = Q K(j)^T | issue O += P(j-1) V(j-1) | wait for S(j) | softmax: P(j) | wait for O | release V
      tensor cores  ======= S(j) ========= ============ P(j-1) V(j-1) ================

Barriers. Each `full` barrier counts one arrival of the producer and the bytes that TMA has copied. Each `empty` barrier counts
one arrival of every consumer. Stages and phases continue from work tile to work tile, so the producer loads the next work tile
while the consumers finish the last one. If K and V of a stage are released jointly, `k_empty` is the same barrier as `v_empty`.

Slots of Q. An output leaves through the shared memory of Q. In that case there are two slots, and a consumer releases a slot
after the first product of the next work tile. A state leaves through stages instead. In that case there is one slot, and a
consumer releases it after the last S of the work tile. One bit, which flips with every work tile, is both the number of the
slot and the phase of `q_full` and `q_empty`.

State stages. The o of a state has twice the bytes of a Q in 16 bits. The producer therefore transfers the next stages of the
K/V pipeline to the consumers, where o is loaded, stored or added by TMA. `ringattn.kernels.hopper.epilogue` does that.

Retry pass. In bf16, the softmax subtracts an optimistic reference max, see `ringattn.kernels.hopper.softmax`. If a row of a
program overflows, all partitions of that program go through all of its work tiles once more and update the reference max in
every step.

Ping-pong. If it is on, named barriers make a consumer issue its products after the consumer before it has issued its own. The
tensor cores then compute the products of one consumer while the others compute their softmax. Without it, all consumers would
wait for the tensor cores at the same time.

KV loop. The steps process the masked tiles at the two ends of the intervals first, and then the unmasked tiles between them,
which skip the mask. Scores are in log2 units.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper import softmax
from ringattn.kernels.hopper.common import LOG2_E, ROWS, step_start, tile_view, tma_load
from ringattn.kernels.hopper.epilogue import finish_work_tile, load_ref_max, load_state_scalars, transfer_buffer
from ringattn.kernels.triton import common as triton_common
from ringattn.kernels.triton.launcher import launch

# The number of the named barrier of consumer 0 for ping-pong. Consumer c uses FIRST_PING_PONG_BARRIER + c. Triton itself uses
# the lower numbers.
FIRST_PING_PONG_BARRIER = gl.constexpr(8)

# The threads that arrive at such a barrier: those of the consumer that waits, and those of the one before it.
PING_PONG_THREADS = gl.constexpr(256)


@dataclass(frozen=True)
class Config(hopper_common.Config):
    """The constants for which a kernel is compiled.

    Args:
        dim, value_dim, num_heads, group: see `ringattn.kernels.hopper.common.Config`.
        has_state: whether there is an incoming state.
        final: whether (out, lse) is written instead of a state.
        consumers: number of consumers, 2 or 3.
        keys: number of keys per step.
        stages: number of stages of the K/V pipeline.
        joint_release: whether consumers release K and V of a stage with one arrival, after P V.
        registers: number of registers per thread of a consumer.
        ping_pong: whether consumers take turns to issue their products.
        fence_softmax: whether to use the fence of that name in `ringattn.kernels.hopper.softmax`.
        update_ref_max: whether the reference max is updated from the first pass on. Otherwise only the retry pass updates it.
    """

    has_state: bool
    final: bool
    consumers: int
    keys: int
    stages: int
    joint_release: bool
    registers: int
    ping_pong: bool
    fence_softmax: bool
    update_ref_max: bool

    @property
    def queries(self) -> int:
        """The number of rows of a work tile."""
        return self.consumers * ROWS.value

    @property
    def partitions(self) -> gl.tuple:
        """The numbers of the partitions, first the consumers and then the producer, as constants over which Gluon iterates."""
        return gl.tuple([gl.constexpr(number) for number in range(self.consumers + 1)])

    @property
    def scores_layout(self) -> gl.NVMMADistributedLayout:
        """The layout of a consumer's scores (64, keys) in registers."""
        return hopper_common.accumulator_layout(self.keys)

    @property
    def updates_state(self) -> bool:
        """Whether the incoming state is updated in place."""
        return self.has_state and not self.final

    @property
    def q_slots(self) -> int:
        """The number of slots of Q. It is at most two, so that one bit is both the slot and the phase of q_full and q_empty."""
        return 2 if self.final else 1

    @property
    def o_parts(self) -> int:
        """The number of parts of a consumer's o (64, dim) in fp32, each as large as the K buffer or the V buffer of a stage."""
        return 2 * ROWS.value // self.keys

    @property
    def state_stages(self) -> int:
        """The number of stages that hold the o of all consumers when a state comes in or is returned."""
        return -(-self.consumers * self.o_parts // 2) if self.has_state or not self.final else 0


# The maximal size of K and V of all heads of a head group, in bytes. They should stay in the L2 cache, through which the output
# passes, too. A state passes through the cache twice, in fp32, so K and V get only half as much of it.
L2_BYTES = 32 * 2**20
L2_BYTES_WITH_STATE = 16 * 2**20

# Triton 3.8 has another assembler, which would serialise all products of a kernel with `fence_softmax`.
FENCE_SOFTMAX = hopper_common.TRITON_VERSION < (3, 8)

# The fastest settings measured on an H200, by padded head dim.
TILES = {
    64: dict(consumers=3, keys=128, stages=3, joint_release=False, registers=160, ping_pong=True, fence_softmax=False),
    128: dict(consumers=3, keys=64, stages=3, joint_release=True, registers=160, ping_pong=False, fence_softmax=FENCE_SOFTMAX),
}

# Up to this number of rows that see a key, counted over all heads, the forward uses work tiles of 128 rows instead of 192. They
# leave fewer SMs idle.
FEW_ROWS = 2**16
TILES_FEW_ROWS = TILES | {
    128: dict(consumers=2, keys=128, stages=2, joint_release=False, registers=240, ping_pong=True, fence_softmax=FENCE_SOFTMAX),
}

# The registers per thread of the producer, which computes nothing.
PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _next_stage(stage, phase, CONFIG: gl.constexpr):
    """Return the next stage and the phase of its barriers."""
    last = stage == CONFIG.stages - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _produce(arguments, overflow, CONFIG: gl.constexpr):
    """The producer partition, a single warp: load all work tiles, and once more if there is a retry pass."""
    # A wait for the phase before the first one returns at once, so the producer starts with phase 1 and finds all stages empty.
    slot, stage, phase = _load_tiles(arguments, gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(1), CONFIG)
    if not CONFIG.update_ref_max and _any_overflow(overflow, 1, CONFIG):
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
        # A work tile whose rows see no key has one step all the same, so that consumers need no special case.
        for step in range(gl.maximum(num_masked + num_unmasked, 1)):
            start = step_start(loop, step, CONFIG.keys)
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
            tma_load(k, [batch, start, key_head, 0], k_full.index(stage), tile_view(keys.index(stage), k))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
            tma_load(v, [batch, start, key_head, 0], v_full.index(stage), tile_view(values.index(stage), v))
            stage, phase = _next_stage(stage, phase, CONFIG)
        for i in gl.static_range(STATE_STAGES):
            mbarrier.wait(k_empty.index(stage), phase)
            transfer_buffer(state_tiles, batch, first, head, 2 * i, keys.index(stage), k_full.index(stage), CONFIG)
            mbarrier.wait(v_empty.index(stage), phase)
            transfer_buffer(state_tiles, batch, first, head, 2 * i + 1, values.index(stage), v_full.index(stage), CONFIG)
            stage, phase = _next_stage(stage, phase, CONFIG)
        slot ^= 1
        index += gl.num_programs(0)
        batch, head, first, end, loop = hopper_common.load_work_tile(work_tiles, index)
    return slot, stage, phase


@gluon.jit
def _any_overflow(overflow, WARPS: gl.constexpr, CONFIG: gl.constexpr):
    """Wait until every consumer has reported, and return whether a row of any of them has overflowed.

    WARPS is the number of warps of the calling partition.
    """
    flags, reported = overflow
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    CONSUMERS: gl.constexpr = CONFIG.consumers
    mbarrier.wait(reported, 0)
    overflowed = flags.index(0).load(LAYOUT)
    for c in gl.static_range(1, CONSUMERS):
        overflowed |= flags.index(c).load(LAYOUT)
    return gl.max(overflowed, axis=0) > 0


@gluon.jit
def _report_overflow(overflow, overflowed, CONSUMER: gl.constexpr):
    """Tell all partitions whether a row of this consumer has overflowed, in any of its work tiles."""
    flags, reported = overflow
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    flags.index(CONSUMER).store(gl.zeros([32], gl.int32, LAYOUT) + gl.max(overflowed.to(gl.int32), axis=0))
    mbarrier.arrive(reported, count=1)


@gluon.jit
def _release_keys(k_empty, stage, CONFIG: gl.constexpr):
    """Release K of a stage. With a joint release, the arrival that releases V also releases K, so there is nothing to do."""
    if not CONFIG.joint_release:
        mbarrier.arrive(k_empty.index(stage), count=1)


@gluon.jit
def _wait_for_ping_pong(CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Wait until the consumer before this one has issued its products."""
    # Triton 3.6 passes an f-string to another function only as a named constant.
    SYNC: gl.constexpr = f"bar.sync {FIRST_PING_PONG_BARRIER + CONSUMER}, {PING_PONG_THREADS}; mov.b32 $0, $1;"
    if CONFIG.ping_pong:
        hopper_common.execute(SYNC)


@gluon.jit
def _pass_ping_pong(CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Let the next consumer issue its products, by arriving at its barrier without waiting."""
    NEXT: gl.constexpr = FIRST_PING_PONG_BARRIER + (CONSUMER + 1) % CONFIG.consumers
    ARRIVE: gl.constexpr = f"bar.arrive {NEXT}, {PING_PONG_THREADS}; mov.b32 $0, $1;"
    if CONFIG.ping_pong:
        hopper_common.execute(ARRIVE)


@gluon.jit
def _step(
    query, buffers, barriers, carry, row_bounds, loop, step, log2_scale,
    CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute the probabilities of this step while the tensor cores multiply those of the previous step with their values.

    Args:
        query: the consumer's Q (64, dim) in shared memory.
        buffers: (queries, keys, values).
        barriers: (q_full, q_empty, k_full, k_empty, v_full, v_empty).
        carry: (p, ref_max, l, o, stage, phase, previous stage, previous phase): the probabilities of the previous step, the
            softmax state without them in o, the stage and phase of this step and of the previous one.
        row_bounds: from `_load_consumer_tile`.
        loop: from `ringattn.kernels.hopper.common.load_work_tile`.
        step: number of this step, at least 1.

    Returns:
        The carry of the next step.
    """
    _, keys, values = buffers
    _, _, k_full, k_empty, v_full, v_empty = barriers
    p, ref_max, l, o, stage, phase, previous_stage, previous_phase = carry
    lo, hi, all_initialised, _ = row_bounds
    mbarrier.wait(k_full.index(stage), phase)
    _wait_for_ping_pong(CONSUMER, CONFIG)
    zeros = gl.full([ROWS, CONFIG.keys], 0.0, gl.float32, CONFIG.scores_layout)
    # Issue S first. The products finish in the order in which they are issued, and the softmax needs S.
    scores = warpgroup_mma(query, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(previous_stage), previous_phase)
    pending_o = warpgroup_mma(p, values.index(previous_stage), o, is_async=True)
    _pass_ping_pong(CONSUMER, CONFIG)
    # Wait until at most one product, P V, is in flight. S is then complete.
    scores = warpgroup_mma_wait(1, deps=(scores,))
    _release_keys(k_empty, stage, CONFIG)
    _, _, _, num_masked = loop
    if step < num_masked:
        scores = softmax.mask_scores(scores, lo, hi, step_start(loop, step, CONFIG.keys), CONFIG)
    if UPDATE_REF_MAX:
        ref_max, alpha = softmax.update_ref_max(scores, ref_max, log2_scale, CONFIG)
        l *= alpha
    # All rows see all keys of the first unmasked tile, step num_masked. After it, no reference max is unset.
    elif (step <= num_masked) & ~all_initialised:
        ref_max = softmax.initialise_ref_max(scores, ref_max, log2_scale, CONFIG)
    weights, l = softmax.exp_scores(scores, ref_max, l, log2_scale, CONFIG)
    l = softmax.fence_softmax(l, CONFIG)
    o = warpgroup_mma_wait(0, deps=(pending_o,))
    mbarrier.arrive(v_empty.index(previous_stage), count=1)
    if UPDATE_REF_MAX:
        # P V was added to o relative to the previous reference max, so o is rescaled after it.
        o = softmax.rescale(o, alpha, CONFIG)
    # Convert the probabilities only after the wait. Until then, P V reads its left operand from the registers of the previous
    # p, and the conversion overwrites them.
    p = gl.convert_layout(weights.to(query.dtype), CONFIG.p_layout)
    next_stage, next_phase = _next_stage(stage, phase, CONFIG)
    return p, ref_max, l, o, next_stage, next_phase, stage, phase


@gluon.jit
def _first_step(
    query, buffers, barriers, row_bounds, loop, state_stage, stage, phase, log2_scale,
    CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute the probabilities of the first step of a work tile, whose stage and phase are given, and return the carry.

    The other arguments are those of `_step`, and `state_stage` is the state stage of the previous work tile, or -1. If no row
    sees a key, the keys of this step may all lie past the end, and all scores are masked.
    """
    _, keys, _ = buffers
    _, q_empty, k_full, k_empty, _, v_empty = barriers
    lo, hi, _, ref_max = row_bounds
    mbarrier.wait(k_full.index(stage), phase)
    _wait_for_ping_pong(CONSUMER, CONFIG)
    zeros = gl.full([ROWS, CONFIG.keys], 0.0, gl.float32, CONFIG.scores_layout)
    scores = warpgroup_mma(query, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    _pass_ping_pong(CONSUMER, CONFIG)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    # Only now release the memory through which the result of the previous work tile leaves. TMA had the time of one product to
    # read it, so this wait is short.
    hopper_common.tma_store_wait(0)
    _release_state_stage(k_empty, v_empty, state_stage, CONFIG)
    _release_keys(k_empty, stage, CONFIG)
    if CONFIG.q_slots == 2:
        mbarrier.arrive(q_empty, count=1)
    _, _, num_unmasked, num_masked = loop
    if (num_masked > 0) | (num_unmasked == 0):
        scores = softmax.mask_scores(scores, lo, hi, step_start(loop, 0, CONFIG.keys), CONFIG)
    BY_THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, softmax.by_thread(zeros, CONFIG.keys).type.layout))
    zero_sum = gl.zeros([ROWS, 4], gl.float32, BY_THREAD)
    ref_max = gl.convert_layout(ref_max, gl.SliceLayout(1, BY_THREAD)).expand_dims(1) + zero_sum
    if UPDATE_REF_MAX:
        ref_max, _ = softmax.update_ref_max(scores, ref_max, log2_scale, CONFIG)
    else:
        ref_max = softmax.initialise_ref_max(scores, ref_max, log2_scale, CONFIG)
    weights, l = softmax.exp_scores(scores, ref_max, zero_sum, log2_scale, CONFIG)
    p = gl.convert_layout(weights.to(query.dtype), CONFIG.p_layout)
    o = gl.full([ROWS, CONFIG.dim], 0.0, gl.float32, CONFIG.output_layout)
    next_stage, next_phase = _next_stage(stage, phase, CONFIG)
    return p, ref_max, l, o, next_stage, next_phase, stage, phase


@gluon.jit
def _release_state_stage(k_empty, v_empty, state_stage, CONFIG: gl.constexpr):
    """Release the stage that held this consumer's o of the previous work tile; -1 if there is none."""
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
        _wait_for_ping_pong(CONSUMER, CONFIG)
        _pass_ping_pong(CONSUMER, CONFIG)
        _release_keys(k_empty, stage, CONFIG)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        stage, phase = _next_stage(stage, phase, CONFIG)
    _, stage, phase = _wait_for_state_stages(barriers, stage, phase, -1, CONFIG)
    return stage, phase


@gluon.jit
def _wait_for_state_stages(barriers, stage, phase, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Wait for the state stages of a work tile, and release all but that of this consumer.

    CONSUMER is -1 for a consumer that skips the work tile and keeps none. Return (own stage, next stage, its phase).
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
        stage, phase = _next_stage(stage, phase, CONFIG)
    return own_stage, stage, phase


@gluon.jit
def _load_consumer_tile(arguments, index, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Load what a consumer needs to know of its rows of a work tile.

    Returns:
        (batch entry, head, first row of this consumer, end, loop, row_bounds), with row_bounds = (lo, hi, all_initialised,
        ref_max). lo and hi (64,) are the intervals of the rows. ref_max (64,) is the reference max with which they start.
        all_initialised tells whether the first step sets the reference max of every row that sees a key at all.
    """
    lo, hi, work_tiles, num_masks, num_queries, results, buffers, barriers, log2_scale = arguments
    batch, head, first, end, loop = hopper_common.load_work_tile(work_tiles, index)
    first_row = first + CONSUMER * ROWS
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, CONFIG.scores_layout))
    # One mask may serve all batch entries.
    offset = gl.minimum(batch, num_masks - 1) * num_queries
    row_lo = gl.load(lo + offset + rows, mask=rows < end, other=0)
    row_hi = gl.load(hi + offset + rows, mask=rows < end, other=0)
    start = step_start(loop, 0, CONFIG.keys)
    # Bounds never decrease from row to row. If the first hi is greater than the start of the tile and the last lo is less than
    # its end, then every interval that is not empty contains a key of the tile.
    first_hi = gl.load(hi + offset + first_row, mask=first_row < end, other=0)
    last_lo = gl.load(lo + offset + gl.minimum(first_row + ROWS, end) - 1, mask=first_row < end, other=0)
    all_initialised = (first_hi > start) & (last_lo < start + CONFIG.keys)
    ref_max = load_ref_max(results, (batch, head, first_row, end), CONFIG)
    return batch, head, first_row, end, loop, (row_lo, row_hi, all_initialised, ref_max)


@gluon.jit
def _consume(arguments, overflow, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """A consumer partition: 64 rows of every work tile, and once more if a row of the program has overflowed."""
    if CONSUMER == CONFIG.consumers - 1:
        # Consumer 0 has the first turn.
        _pass_ping_pong(CONSUMER, CONFIG)
    zero = gl.to_tensor(0)
    slot, stage, phase, overflowed = _compute_work_tiles(arguments, zero, zero, zero, CONSUMER, CONFIG.update_ref_max, CONFIG)
    if not CONFIG.update_ref_max:
        _report_overflow(overflow, overflowed, CONSUMER)
        if _any_overflow(overflow, 4, CONFIG):
            # The results of the first pass must be in memory before the retry pass rewrites them. Otherwise they could
            # arrive later and replace the valid ones. `tma_store_wait` is weaker: it waits only until TMA has read the shared
            # memory that a store comes from. Gluon has no function for the form of the instruction without ".read".
            hopper_common.execute("cp.async.bulk.wait_group 0; mov.b32 $0, $1;")
            _compute_work_tiles(arguments, slot, stage, phase, CONSUMER, True, CONFIG)


@gluon.jit
def _compute_work_tiles(
    arguments, slot, stage, phase, CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Compute this consumer's rows of all work tiles. Return the next slot, stage and phase, and which rows have overflowed."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, CONFIG.scores_layout)
    lo, hi, work_tiles, num_masks, num_queries, results, buffers, barriers, log2_scale = arguments
    queries, keys, values = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    index = gl.program_id(0)
    batch, head, first_row, end, loop, row_bounds = _load_consumer_tile(arguments, index, CONSUMER, CONFIG)
    overflowed = gl.zeros([ROWS], gl.int1, BY_ROW)
    state_stage = gl.to_tensor(-1)
    while end > 0:
        _, _, num_unmasked, num_masked = loop
        mbarrier.wait(q_full, slot)
        if first_row < end:
            row_range = batch, head, first_row, end
            query = queries.index(slot % CONFIG.q_slots * CONFIG.consumers + CONSUMER)
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
            # The product with the values of the last step.
            mbarrier.wait(v_full.index(previous_stage), previous_phase)
            o = warpgroup_mma(p, values.index(previous_stage), o, is_async=True)
            # While it runs, load the scalars of the incoming state and the next work tile.
            incoming = load_state_scalars(results, row_range, CONFIG)
            index += gl.num_programs(0)
            batch, head, first_row, end, loop, row_bounds = _load_consumer_tile(arguments, index, CONSUMER, CONFIG)
            o = warpgroup_mma_wait(0, deps=(o,))
            mbarrier.arrive(v_empty.index(previous_stage), count=1)
            # Only now combine the numbers of the four threads that share a row.
            l = gl.convert_layout(gl.sum(l, axis=1), BY_ROW)
            ref_max = gl.convert_layout(gl.max(ref_max, axis=1), BY_ROW)
            state_stage, stage, phase = _wait_for_state_stages(barriers, stage, phase, CONSUMER, CONFIG)
            state_buffers = keys.index(state_stage), values.index(state_stage)
            overflowed |= finish_work_tile(
                ref_max, l, o, query, state_buffers, incoming, results, row_range, CONSUMER, UPDATE_REF_MAX, CONFIG
            )
        else:
            stage, phase = _skip_tile(barriers, num_masked + num_unmasked, state_stage, stage, phase, CONSUMER, CONFIG)
            index += gl.num_programs(0)
            batch, head, first_row, end, loop, row_bounds = _load_consumer_tile(arguments, index, CONSUMER, CONFIG)
            state_stage = gl.to_tensor(-1)
        slot ^= 1
    # Shared memory ends with the program. TMA must have read it before.
    hopper_common.tma_store_wait(0)
    _release_state_stage(k_empty, v_empty, state_stage, CONFIG)
    return slot, stage, phase, overflowed


@gluon.jit(do_not_specialize=["num_masks", "num_queries"])
def _forward_kernel(
    q, k, v, state_tiles, out_tiles, lo, hi, work_tiles, state_m, state_l, state_o, lse, out,
    num_masks, num_queries, log2_scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute all work tiles. The arguments are those that `forward` passes.

    Args:
        q, k, v: TMA descriptors of (B, Nq, Hq, D), (B, Nk, Hkv, D) and (B, Nk, Hkv, Dv).
        state_tiles, out_tiles: TMA descriptors of state_o and of out, both (B, Nq, Hq, Dv), or None.
        lo, hi: (num_masks, Nq), the interval of each query.
        work_tiles: (n, programs, 8), see `Intervals.work_tiles`.
        state_m, state_l, state_o: the state, read, written or both; None if there is none.
        lse, out: (B, Nq, Hq) and (B, Nq, Hq, Dv), written; None if a state is returned.
        num_masks: 1 if all batch entries have the same mask, else B.
        num_queries: Nq.
        log2_scale: the factor that converts q k^T to scores in log2 units.
    """
    MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.dim], q.dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    STAGES: gl.constexpr = CONFIG.stages
    queries = gl.allocate_shared_memory(q.dtype, [CONFIG.q_slots * CONFIG.consumers, ROWS, CONFIG.dim], MATRIX)
    keys = gl.allocate_shared_memory(k.dtype, [CONFIG.stages, CONFIG.keys, CONFIG.dim], MATRIX)
    values = gl.allocate_shared_memory(v.dtype, [CONFIG.stages, CONFIG.keys, CONFIG.dim], MATRIX)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [CONFIG.stages, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [CONFIG.stages, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [CONFIG.stages, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [CONFIG.stages, 1], BARRIER)
    # An arrival acts for a whole partition, so the counts are numbers of partitions.
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=CONFIG.consumers)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONFIG.consumers)
        mbarrier.init(v_empty.index(i), count=CONFIG.consumers)
    overflow_flags = gl.allocate_shared_memory(gl.int32, [CONFIG.consumers, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    overflow_reported = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(overflow_reported, count=CONFIG.consumers)
    # Make the initialised barriers visible to TMA.
    fence_async_shared()
    buffers = queries, keys, values
    overflow = overflow_flags, overflow_reported
    if CONFIG.joint_release:
        k_empty = v_empty
    barriers = q_full, q_empty, k_full, k_empty, v_full, v_empty
    loading = q, k, v, state_tiles, work_tiles, buffers, barriers
    results = state_m, state_l, state_o, state_tiles, lse, out, out_tiles, num_queries
    computing = lo, hi, work_tiles, num_masks, num_queries, results, buffers, barriers, log2_scale
    # The last two arguments are the numbers of warps and registers of all partitions but the first, which is the default
    # partition. It has four warps and gets the registers that the other partitions do not use.
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
        dtype: of q, k and v.
        has_state, final: whether a state comes in, and whether the output is wanted.
        few_rows: whether to use the tiles for few rows.
    """
    dim, (num_heads, num_key_heads) = hopper_common.padded_dim(*dims), heads
    tiles = (TILES_FEW_ROWS if few_rows else TILES)[dim]
    # fp16 cannot hold probabilities up to OVERFLOW_LIMIT, so its reference max must be updated in every step of the first pass.
    update = dtype != torch.bfloat16
    config = Config(dim, dims[1], num_heads, num_heads // num_key_heads, has_state, final, **tiles, update_ref_max=update)
    # While state stages are in use, the first keys of the next work tile need stages, too: one if Q has two slots. With one
    # slot there is room for two.
    return replace(config, stages=max(config.stages, config.state_stages + 3 - config.q_slots))


def forward(
    q, k, v, intervals, scale, state=None, final=False,
    *, dropout=None, blocks=None, precision="ieee", shares_sms=False,
):  # fmt: skip
    """Attention of one block of queries to one block of keys on one sm_90 GPU (Dao 2023, algorithm 1).

    Call `ringattn.kernels.dispatch.forward`, which checks the arguments. This function does not.

    Args:
        q: (B, Nq, Hq, D), fp16 or bf16; D is a multiple of 8 up to 128. Strides that TMA cannot address cost a copy: the last
            dimension must be contiguous, and the other strides must be multiples of 8 elements.
        k: (B, Nk, Hkv, D) in q's dtype; Hkv divides Hq, and Nk is at least 1.
        v: (B, Nk, Hkv, Dv) in q's dtype; Dv is a multiple of 8 up to 128.
        intervals: for every query, the range [lo, hi) of keys that it may attend to, for 1 or B batch entries, on q's device.
            Tiles outside all intervals are skipped, and tiles inside all intervals are computed without a mask.
        scale: multiplies the scores before the softmax, usually D ** -0.5. It must be positive.
        state: (m, l, o) of these queries over the keys of earlier calls, fp32 and contiguous: m and l (B, Nq, Hq), o
            (B, Nq, Hq, Dv). Without `final`, it is updated in place. None: no earlier keys.
        final: whether these are the last keys, so that (out, lse) is returned instead of the state.
        dropout, blocks: must be None.
        precision: ignored, because it applies to fp32 inputs only.
        shares_sms: whether other kernels, such as NCCL's, run on the SMs at the same time. Normally one program per SM computes
            a share of the work tiles that is assigned before the launch, and a program without an SM would delay the whole
            call. With `shares_sms`, every work tile has a program of its own, so that a late program delays only itself.

    Returns:
        The state (m, l, o) over the earlier keys and these, or with `final` out (B, Nq, Hq, Dv) in q's dtype and lse
        (B, Nq, Hq) in fp32. The m of a state is a reference max, which may differ from the maximum of the scores; l and o are
        relative to it. A query that has not seen a key has the state (-inf, 0, 0), the output 0 and the lse -inf.
    """
    m, l, o, out, lse = triton_common.allocate_results(q, v, state, final)
    if q.numel() == 0:
        return (out, lse) if final else (m, l, o)
    has_state = state is not None
    (batch, num_queries, num_heads, head_dim), (num_keys, num_key_heads, value_dim) = q.shape, v.shape[1:]
    few_rows = intervals.num_nonempty_rows * (batch // intervals.batch) * num_heads <= FEW_ROWS
    config = configure((head_dim, value_dim), (num_heads, num_key_heads), q.dtype, has_state, final, few_rows)
    q, k, v = [hopper_common.as_addressable(x) for x in (q, k, v)]
    addressable_o = hopper_common.as_addressable(o) if has_state else o
    tiles = (q, ROWS.value, config.dim), (k, config.keys, config.dim), (v, config.keys, config.dim)
    tiles += (addressable_o, ROWS.value, config.dim // config.o_parts), (out, ROWS.value, config.dim)
    descriptors = [None if x is None else hopper_common.tma_descriptor(x, rows, columns) for x, rows, columns in tiles]
    l2_bytes = L2_BYTES_WITH_STATE if has_state else L2_BYTES
    heads_per_group = max(1, l2_bytes // (num_keys * (head_dim + value_dim) * q.element_size())) * config.group
    num_head_groups = -(-num_heads * batch // heads_per_group)
    programs = hopper_common.num_programs(q.device, shares_sms)
    # In an in-place update, rows that see no key leave the state as it is.
    skip_empty = has_state and not final
    work_tiles = intervals.work_tiles(config.queries, config.keys, batch, num_heads, num_head_groups, programs, skip_empty)
    with torch.cuda.device_of(q):
        launch(
            _forward_kernel, work_tiles.shape[1],
            (*descriptors, intervals.lo, intervals.hi, work_tiles, m, l, addressable_o, lse, out),
            (intervals.batch, num_queries, float(scale) * LOG2_E.value), CONFIG=config,
        )  # fmt: skip
    if config.updates_state and addressable_o is not o:
        o.copy_(addressable_o)
    return (out, lse) if final else (m, l, o)
