"""The forward kernel for Hopper GPUs (sm_90) for head dims above 128. It implements `ringattn.kernels.reference.forward`.

Read `ringattn.kernels.hopper.forward` first. That module explains work tiles, partitions, barriers, the retry pass and
ping-pong. This kernel has two consumers with up to 240 registers per thread. It differs from the other kernel as follows:

      PRODUCER                          SHARED MEMORY                      CONSUMERS

      load Q ------- q_full --------> [ queries: 1 slot           ] -----> columns 0 to 127 stay in registers
               <---- q_empty -------                              <------ release the slot after the last S of a work tile
      load K(j) ---- full[s] -------> [ ring of stages            ] -----> S(j) = Q K(j)^T
      load V(j) ---- full[s] -------> [                           ] -----> O += P(j) V(j)
               <---- empty[s] ------                              <------ release the stage

Stages. A stage holds one tile of K or one tile of V. The tiles arrive in the order in which the consumers use them. Tiles of K
and V have the same number of columns, 256 or 128. With 192 columns of K and 128 columns of V, the last 64 columns of K arrive
in a second ring, the tails. A tail has no barriers of its own. It arrives with the stage of its K and is released with this
stage.

Order of a step. The accumulators of O and S, the probabilities and the columns of Q in registers leave few registers. The
config therefore chooses between two orders:

      overlap      issue S(j) | issue O += P(j-1) V(j-1) | wait for S(j) | softmax: P(j) | wait for O | release V(j-1)
      no overlap   issue O += P(j-1) V(j-1) | issue S(j) | wait for O | wait for S(j) | softmax: P(j)

With overlap, the stages hold K(0), K(1), V(0), K(2), V(1) and so on. The softmax of a consumer runs during its own second
product. Without overlap, the stages hold K(0), V(0), K(1), V(1) and so on. The softmax of one consumer runs during the products
of the other consumer. The ping-pong keeps the two consumers apart. A consumer therefore passes the ping-pong only when its O is
complete. If both consumers had products in flight at the same time, these products would also end at the same time.

Q in registers. A product that reads its left operand from registers reads only K from shared memory. With 64 keys per step, Q
in shared memory would cost as many bytes per step as K.

Results. The threads write o from registers to global memory without shared memory, so the producer can load the next Q during
the end of a work tile. `ringattn.kernels.hopper.epilogue_wide` contains this code.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper import softmax
from ringattn.kernels.hopper.common import LOG2_E, ROWS, allocate_barriers, step_start, tile_view, tma_load
from ringattn.kernels.hopper.epilogue import load_state_scalars
from ringattn.kernels.hopper.epilogue_wide import finish_work_tile
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

# The number of columns of Q that a consumer keeps in registers.
REGISTER_COLUMNS = gl.constexpr(128)


@dataclass(frozen=True)
class Config(ForwardConfig):
    """The constants for which a kernel is compiled.

    Args:
        dim: number of columns of a stage and of o, 128 or 256. Dv is padded to this number.
        key_dim: number of columns of Q and K, 192 or 256. D is padded to this number.
        overlap: whether the softmax of a step overlaps with P V of the previous step.

    `ForwardConfig` explains the other arguments.
    """

    key_dim: int
    overlap: bool

    @property
    def tail(self) -> int:
        """The number of columns of K that do not fit into a stage."""
        return self.key_dim - self.dim

    @property
    def tails(self) -> int:
        """The number of tails in shared memory.

        When the producer may load the next tile of K, the stages hold at most this number of tiles of K, including the new one.
        With overlap, K(1) follows K(0) at once.
        """
        return (self.stages + self.overlap + 1) // 2

    @property
    def q_layout(self) -> gl.DotOperandLayout:
        """The layout of the columns of Q in registers, as the left operand of a product whose result is S."""
        return gl.DotOperandLayout(operand_index=0, parent=self.scores_layout, k_width=2)


# On an H100, these settings were the fastest on average over causal and full masks. The keys are the padded (D, Dv).
TILES = {
    (192, 128): dict(keys=128, stages=4, overlap=True, fence_softmax=FENCE_SOFTMAX),
    (256, 256): dict(keys=64, stages=5, overlap=False, fence_softmax=False),
}

# The settings that all head dims have in common.
COMMON_SETTINGS = dict(consumers=2, registers=240, ping_pong=True)


@gluon.jit
def _advance_tail(tail, CONFIG: gl.constexpr):
    """Return the next tail."""
    return gl.where(tail == CONFIG.tails - 1, 0, tail + 1)


@gluon.jit
def _load_queries(tiles, buffers, q_full, batch, head, first, CONFIG: gl.constexpr):
    """Load the Q of all consumers."""
    q, q_tail, k, k_tail, v = tiles
    queries, query_tails, ring, key_tails = buffers
    CONSUMERS: gl.constexpr = CONFIG.consumers
    mbarrier.expect(q_full, CONFIG.consumers * ROWS * CONFIG.key_dim * 2)
    for c in gl.static_range(CONSUMERS):
        row = first + c * ROWS
        tma_load(q, [batch, row, head, 0], q_full, tile_view(queries.index(c), q))
        if CONFIG.tail > 0:
            tma_load(q_tail, [batch, row, head, CONFIG.dim], q_full, tile_view(query_tails.index(c), q_tail))


@gluon.jit
def _load_keys(tiles, buffers, barriers, batch, key_head, start, position, CONFIG: gl.constexpr):
    """Load a tile of K into the next stage. Return the next position, which is (stage, phase, tail)."""
    q, q_tail, k, k_tail, v = tiles
    queries, query_tails, ring, key_tails = buffers
    q_full, q_empty, full, empty = barriers
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
    return stage, phase, _advance_tail(tail, CONFIG)


@gluon.jit
def _load_values(tiles, buffers, barriers, batch, key_head, start, position, CONFIG: gl.constexpr):
    """Load a tile of V into the next stage. Return the next position."""
    q, q_tail, k, k_tail, v = tiles
    queries, query_tails, ring, key_tails = buffers
    q_full, q_empty, full, empty = barriers
    stage, phase, tail = position
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(full.index(stage), v.block_type.nbytes)
    tma_load(v, [batch, start, key_head, 0], full.index(stage), tile_view(ring.index(stage), v))
    stage, phase = advance_stage(stage, phase, CONFIG)
    return stage, phase, tail


@gluon.jit
def _load_tiles(arguments, q_phase, position, CONFIG: gl.constexpr):
    """Load Q, K and V of all work tiles of this program. Return the next phase of q_empty and the next position."""
    tiles, work_tiles, buffers, barriers = arguments
    q_full, q_empty, full, empty = barriers
    index = gl.program_id(0)
    batch, head, first, end, loop = hopper_common.load_work_tile(work_tiles, index)
    while end > 0:
        _, _, num_unmasked, num_masked = loop
        key_head = head // CONFIG.group
        mbarrier.wait(q_empty, q_phase)
        _load_queries(tiles, buffers, q_full, batch, head, first, CONFIG)
        # Even a work tile whose rows see no key has one step, so that the consumers need no special case.
        start = step_start(loop, 0, CONFIG.keys)
        position = _load_keys(tiles, buffers, barriers, batch, key_head, start, position, CONFIG)
        for step in range(1, num_masked + num_unmasked):
            previous_start = start
            start = step_start(loop, step, CONFIG.keys)
            if CONFIG.overlap:
                position = _load_keys(tiles, buffers, barriers, batch, key_head, start, position, CONFIG)
                position = _load_values(tiles, buffers, barriers, batch, key_head, previous_start, position, CONFIG)
            else:
                position = _load_values(tiles, buffers, barriers, batch, key_head, previous_start, position, CONFIG)
                position = _load_keys(tiles, buffers, barriers, batch, key_head, start, position, CONFIG)
        position = _load_values(tiles, buffers, barriers, batch, key_head, start, position, CONFIG)
        q_phase ^= 1
        index += gl.num_programs(0)
        batch, head, first, end, loop = hopper_common.load_work_tile(work_tiles, index)
    return q_phase, position


@gluon.jit
def _produce(arguments, overflow, CONFIG: gl.constexpr):
    """Run the producer partition, which is a single warp: load Q, K and V of all work tiles, twice if there is a retry pass."""
    # A wait for phase 1 of a new barrier returns at once, so the producer finds all buffers empty.
    zero, one = gl.to_tensor(0), gl.to_tensor(1)
    q_phase, position = _load_tiles(arguments, one, (zero, one, zero), CONFIG)
    if not CONFIG.update_ref_max and any_overflow(overflow, 1, CONFIG):
        _load_tiles(arguments, q_phase, position, CONFIG)


@gluon.jit
def _issue_scores(query, buffers, full, position, CONFIG: gl.constexpr):
    """Issue the two products S = Q K^T with the K of the next stage. Return (S, next position).

    `query` is (columns of Q in registers, Q in shared memory, tail of Q in shared memory).
    """
    queries, query_tails, ring, key_tails = buffers
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
    return scores, (stage, phase, _advance_tail(tail, CONFIG))


@gluon.jit
def _issue_output(p, o, buffers, full, position, CONFIG: gl.constexpr):
    """Issue the product O += P V with the V of the next stage. Return (O, next position)."""
    queries, query_tails, ring, key_tails = buffers
    stage, phase, tail = position
    mbarrier.wait(full.index(stage), phase)
    o = warpgroup_mma(p, ring.index(stage), o, is_async=True)
    stage, phase = advance_stage(stage, phase, CONFIG)
    return o, (stage, phase, tail)


@gluon.jit
def _issue_step(query, buffers, barriers, p, o, position, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Issue the products of a step and wait for S. Without overlap, also wait for O.

    Return (S, O, stage of V, next position). With overlap, the caller must wait for O and release the stage of V.
    """
    q_full, q_empty, full, empty = barriers
    wait_for_ping_pong(CONSUMER, CONFIG)
    first_stage, _, _ = position
    # Of several products in flight, the first issued is the first to finish. S consists of two products.
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
    """Multiply the probabilities of the previous step by V, and compute the probabilities of this step.

    Args:
        query: see `_issue_scores`.
        buffers: (queries, tails of queries, ring of stages, ring of tails).
        barriers: (q_full, q_empty, full, empty).
        carry: (p, ref_max, l, o, position). p holds the probabilities of the previous step. The sum l already contains p, but o
            does not contain P V of the previous step yet.
        row_bounds: (lo, hi, all_initialised, ref_max) from `load_consumer_tile`.
        loop: from `ringattn.kernels.hopper.common.load_work_tile`.
        step: the number of this step, which is at least 1.

    Returns:
        The `carry` argument for the next step.
    """
    q_full, q_empty, full, empty = barriers
    p, ref_max, l, o, position = carry
    lo, hi, all_initialised, _ = row_bounds
    _, _, _, num_masked = loop
    scores, pending_o, value_stage, position = _issue_step(query, buffers, barriers, p, o, position, CONSUMER, CONFIG)
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
    if CONFIG.overlap:
        l = softmax.fence_softmax(l, CONFIG)
        o = warpgroup_mma_wait(0, deps=(pending_o,))
        mbarrier.arrive(empty.index(value_stage), count=1)
    else:
        o = pending_o
    if UPDATE_REF_MAX:
        # P V of the previous step is relative to the previous reference max. Therefore o is rescaled only after this product
        # has been added.
        o = softmax.rescale(o, alpha)
    # Convert the probabilities only after the wait. Until then, P V reads its left operand from the registers of the previous
    # p, and the conversion overwrites these registers.
    p = gl.convert_layout(weights.to(p.dtype), CONFIG.p_layout)
    return p, ref_max, l, o, position


@gluon.jit
def _first_step(
    query, buffers, barriers, row_bounds, loop, position, log2_scale,
    CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute the probabilities of the first step of a work tile, and return the carry for `_step`.

    The arguments are those of `_step`. A work tile in which no row sees a key also has one step, and the keys of this step may
    lie beyond the last key of the tensor. The step then masks all scores, so the values of these keys do not matter.
    """
    q_full, q_empty, full, empty = barriers
    in_registers, _, _ = query
    lo, hi, _, ref_max = row_bounds
    stage, _, _ = position
    wait_for_ping_pong(CONSUMER, CONFIG)
    scores, position = _issue_scores(query, buffers, full, position, CONFIG)
    pass_ping_pong(CONSUMER, CONFIG)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(empty.index(stage), count=1)
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
    p = gl.convert_layout(weights.to(in_registers.dtype), CONFIG.p_layout)
    o = gl.full([ROWS, CONFIG.dim], 0.0, gl.float32, CONFIG.output_layout)
    return p, ref_max, l, o, position


@gluon.jit
def _skip_tile(barriers, num_steps, position, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Skip a work tile in which this consumer has no rows. Return the next position.

    The `empty` barriers and the ping-pong require arrivals of all consumers. This consumer therefore arrives at every barrier
    without computing anything.
    """
    q_full, q_empty, full, empty = barriers
    stage, phase, tail = position
    mbarrier.arrive(q_empty, count=1)
    for _step_index in range(gl.maximum(num_steps, 1)):
        wait_for_ping_pong(CONSUMER, CONFIG)
        pass_ping_pong(CONSUMER, CONFIG)
        for _tile in gl.static_range(2):
            mbarrier.wait(full.index(stage), phase)
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = advance_stage(stage, phase, CONFIG)
        tail = _advance_tail(tail, CONFIG)
    return stage, phase, tail


@gluon.jit
def _consume(arguments, overflow, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Run a consumer partition, which computes 64 rows of every work tile.

    If any row of the program overflows, the consumer computes its rows of all work tiles a second time, in the retry pass.
    """
    if CONSUMER == CONFIG.consumers - 1:
        # The last consumer starts the ping-pong by letting consumer 0 issue its products.
        pass_ping_pong(CONSUMER, CONFIG)
    zero = gl.to_tensor(0)
    q_phase, position, overflowed = _compute_work_tiles(
        arguments, zero, (zero, zero, zero), CONSUMER, CONFIG.update_ref_max, CONFIG
    )
    if not CONFIG.update_ref_max:
        # The threads themselves store all results, so the retry pass stores its results after those of the first pass.
        report_overflow(overflow, overflowed, CONSUMER)
        if any_overflow(overflow, 4, CONFIG):
            _compute_work_tiles(arguments, q_phase, position, CONSUMER, True, CONFIG)


@gluon.jit
def _compute_work_tiles(
    arguments, q_phase, position, CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Compute this consumer's rows of all work tiles. Return (phase of q_full, position, mask of overflowed rows)."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, CONFIG.scores_layout)
    lo, hi, work_tiles, num_masks, num_queries, results, buffers, barriers, log2_scale = arguments
    queries, query_tails, ring, key_tails = buffers
    q_full, q_empty, full, empty = barriers
    index = gl.program_id(0)
    batch, head, first_row, end, loop, row_bounds = load_consumer_tile(arguments, index, CONSUMER, CONFIG)
    overflowed = gl.zeros([ROWS], gl.int1, BY_ROW)
    while end > 0:
        _, _, num_unmasked, num_masked = loop
        mbarrier.wait(q_full, q_phase)
        if first_row < end:
            row_range = batch, head, first_row, end
            in_shared = queries.index(CONSUMER)
            in_registers = in_shared.slice(0, REGISTER_COLUMNS, dim=1).load(CONFIG.q_layout)
            query = in_registers, in_shared, query_tails.index(CONSUMER)
            carry = _first_step(
                query, buffers, barriers, row_bounds, loop, position, log2_scale, CONSUMER, UPDATE_REF_MAX, CONFIG
            )
            for step in range(1, num_masked + num_unmasked):
                carry = _step(
                    query, buffers, barriers, carry, row_bounds, loop, step, log2_scale, CONSUMER, UPDATE_REF_MAX, CONFIG
                )
            p, ref_max, l, o, position = carry
            mbarrier.arrive(q_empty, count=1)
            # Issue P V of the last step.
            value_stage, _, _ = position
            o, position = _issue_output(p, o, buffers, full, position, CONFIG)
            # While this product runs, load the scalars of the incoming state and the next work tile.
            incoming = load_state_scalars(results, row_range, CONFIG)
            index += gl.num_programs(0)
            batch, head, first_row, end, loop, row_bounds = load_consumer_tile(arguments, index, CONSUMER, CONFIG)
            o = warpgroup_mma_wait(0, deps=(o,))
            mbarrier.arrive(empty.index(value_stage), count=1)
            # Four threads share a row. Their sums and their maxima are combined only here, once per work tile.
            l = gl.convert_layout(gl.sum(l, axis=1), BY_ROW)
            ref_max = gl.convert_layout(gl.max(ref_max, axis=1), BY_ROW)
            overflowed |= finish_work_tile(ref_max, l, o, incoming, results, row_range, UPDATE_REF_MAX, CONFIG)
        else:
            position = _skip_tile(barriers, num_masked + num_unmasked, position, CONSUMER, CONFIG)
            index += gl.num_programs(0)
            batch, head, first_row, end, loop, row_bounds = load_consumer_tile(arguments, index, CONSUMER, CONFIG)
        q_phase ^= 1
    return q_phase, position, overflowed


@gluon.jit(do_not_specialize=["num_masks", "num_queries"])
def _forward_kernel(
    q, q_tail, k, k_tail, v, lo, hi, work_tiles, state_m, state_l, state_o, lse, out,
    num_masks, num_queries, log2_scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute all work tiles. The function `forward` launches this kernel.

    Args:
        q, k, v: TMA descriptors of (B, Nq, Hq, D), (B, Nk, Hkv, D) and (B, Nk, Hkv, Dv).
        q_tail, k_tail: TMA descriptors of q and k for the columns that do not fit into a stage. None if there are no such
            columns.
        lo, hi: (num_masks, Nq), the interval of each query.
        work_tiles: (n, programs, 8), see `Intervals.work_tiles`.
        state_m, state_l, state_o: the state, which is read, written or both. They are None if no state comes in and none is
            returned.
        lse, out: (B, Nq, Hq) and (B, Nq, Hq, Dv), which are written. They are None if a state is returned.
        num_masks: 1 if all batch entries have the same mask, else B.
        num_queries: Nq.
        log2_scale: the factor that converts q k^T to scores in log2 units.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.dim], q.dtype)
    queries = gl.allocate_shared_memory(q.dtype, [CONFIG.consumers, ROWS, CONFIG.dim], TILE)
    ring = gl.allocate_shared_memory(q.dtype, [CONFIG.stages, CONFIG.keys, CONFIG.dim], TILE)
    if CONFIG.tail > 0:
        TAIL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.tail], q.dtype)
        query_tails = gl.allocate_shared_memory(q.dtype, [CONFIG.consumers, ROWS, CONFIG.tail], TAIL)
        key_tails = gl.allocate_shared_memory(q.dtype, [CONFIG.tails, CONFIG.keys, CONFIG.tail], TAIL)
    else:
        # These names must be defined, but they are not used.
        query_tails = queries
        key_tails = ring
    q_full, q_empty = allocate_barriers(1, 1, CONFIG.consumers)
    full, empty = allocate_barriers(CONFIG.stages, 1, CONFIG.consumers)
    overflow = allocate_overflow(CONFIG)
    # Make the initialised barriers visible to TMA.
    fence_async_shared()
    buffers = queries, query_tails, ring, key_tails
    barriers = q_full.index(0), q_empty.index(0), full, empty
    loading = (q, q_tail, k, k_tail, v), work_tiles, buffers, barriers
    # `results` also contains the tensors of the state. The entries of the TMA descriptors of o and out are None.
    results = state_m, state_l, state_o, None, lse, out, None, num_queries
    computing = lo, hi, work_tiles, num_masks, num_queries, results, buffers, barriers, log2_scale
    # The first partition is Gluon's default partition, see `ringattn.kernels.hopper.forward`.
    gl.warp_specialize(
        [
            (_consume, (computing, overflow, i, CONFIG)) if i < CONFIG.consumers else (_produce, (loading, overflow, CONFIG))
            for i in CONFIG.partitions
        ],
        [4] * (CONFIG.consumers - 1) + [1],
        [CONFIG.registers] * (CONFIG.consumers - 1) + [PRODUCER_REGISTERS],
    )


@lru_cache(maxsize=256)
def configure(dims: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype, has_state: bool, final: bool) -> Config:
    """Return the constants of the kernel for a call. The arguments are those of `ringattn.kernels.hopper.forward.configure`."""
    num_heads, num_key_heads = heads
    key_dim, dim = hopper_common.padded_wide_dims(*dims)
    call = dict(dim=dim, value_dim=dims[1], num_heads=num_heads, group=num_heads // num_key_heads, has_state=has_state)
    # fp16 cannot represent probabilities up to OVERFLOW_LIMIT. In fp16, the first pass must therefore update the reference max
    # in every step.
    update = dtype != torch.bfloat16
    return Config(**call, final=final, key_dim=key_dim, update_ref_max=update, **TILES[key_dim, dim], **COMMON_SETTINGS)


def forward(q, k, v, intervals, scale, state=None, final=False, shares_sms=False):
    """Compute attention of one block of queries to one block of keys on one sm_90 GPU, for head dims above 128.

    The arguments and the results are those of `ringattn.kernels.hopper.forward.forward`. D and Dv are multiples of 8 up to 256.
    """
    m, l, o, out, lse = triton_common.allocate_results(q, v, state, final)
    if q.numel() == 0:
        return (out, lse) if final else (m, l, o)
    (_, num_queries, num_heads, head_dim), (num_key_heads, value_dim) = q.shape, v.shape[2:]
    config = configure((head_dim, value_dim), (num_heads, num_key_heads), q.dtype, state is not None, final)
    q, k, v = [hopper_common.as_addressable(x) for x in (q, k, v)]
    tiles = (q, ROWS.value, config.dim), (q, ROWS.value, config.tail), (k, config.keys, config.dim)
    tiles += (k, config.keys, config.tail), (v, config.keys, config.dim)
    descriptors = [hopper_common.tma_descriptor(x, rows, columns) if columns else None for x, rows, columns in tiles]
    work_tiles = assign_work_tiles(config, intervals, q, v, shares_sms)
    with torch.cuda.device_of(q):
        launch(
            _forward_kernel, work_tiles.shape[1],
            (*descriptors, intervals.lo, intervals.hi, work_tiles, m, l, o, lse, out),
            (intervals.batch, num_queries, float(scale) * LOG2_E.value), CONFIG=config,
        )  # fmt: skip
    return (out, lse) if final else (m, l, o)
