"""This module contains the loops over work tiles that all Hopper forward kernels share.

A `position` is (stage, phase) or (stage, phase, tail). The number `stage` is the index of the next K/V buffer, and `phase` is
the phase bit of its mbarriers. The number `tail` is the index of a buffer for the last columns of K.

The bit `slot` flips with every work tile, and is also the phase of the mbarrier `q_full`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper.common import (
    PRODUCER_REGISTERS,
    ROWS,
    allocate_barrier,
    arrive_at,
    load_work_tile,
    num_steps,
    step_start,
    sync_at,
    tile_view,
    tma_load,
)
from ringattn.kernels.hopper.epilogue import load_ref_max, release_state_stage


@gluon.jit
def advance_stage(stage, phase, CONFIG: gl.constexpr):
    last = stage == CONFIG.stages - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def advance_tail(tail, CONFIG: gl.constexpr):
    return gl.where(tail == CONFIG.tails - 1, 0, tail + 1)


@gluon.jit
def _allocate_overflow(CONFIG: gl.constexpr):
    flags = gl.allocate_shared_memory(gl.int32, [CONFIG.consumers, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return flags, allocate_barrier(1, CONFIG.consumers).index(0)


@gluon.jit
def _any_overflow(overflow, WARPS: gl.constexpr, CONFIG: gl.constexpr):
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
    flags, reported = overflow
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    flags.index(CONSUMER).store(gl.zeros([32], gl.int32, LAYOUT) + gl.max(overflowed.to(gl.int32), axis=0))
    mbarrier.arrive(reported, count=1)


@gluon.jit
def wait_for_ping_pong(CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    if CONFIG.ping_pong:
        sync_at(CONSUMER)


@gluon.jit
def pass_ping_pong(CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    if CONFIG.ping_pong:
        arrive_at((CONSUMER + 1) % CONFIG.consumers)


@gluon.jit
def load_consumer_tile(arguments, index, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Return (index, batch entry, head, first row, end of the rows, loop, row_bounds, steps). The tuple `row_bounds` is (lo,
    hi, all_initialised, ref_max) of this consumer's 64 rows. `all_initialised` is set if the first step contains a key of every
    row that attends to keys. The range of steps `steps` = (first, end) is never empty.
    """
    lo, hi, work_tiles, num_masks, num_queries, results, _, _, _, _ = arguments
    batch, head, first, end, loop = load_work_tile(work_tiles, index)
    first_row = first
    if CONFIG.heads_per_tile == 1:
        first_row += CONSUMER * ROWS
    else:
        head = head * CONFIG.heads_per_tile + CONSUMER
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, CONFIG.scores_layout))
    offset = gl.minimum(batch, num_masks - 1) * num_queries
    row_lo = gl.load(lo + offset + rows, mask=rows < end, other=0)
    row_hi = gl.load(hi + offset + rows, mask=rows < end, other=0)
    last_row = gl.minimum(first_row + ROWS, end) - 1
    first_step, end_step = gl.to_tensor(0), num_steps(loop)
    if CONFIG.skips_steps:
        begin, _, _, _ = loop
        first_lo = gl.load(lo + offset + first_row, mask=first_row < end, other=0)
        last_hi = gl.load(hi + offset + last_row, mask=first_row < end, other=0)
        first_step = gl.minimum(gl.maximum(first_lo - begin, 0) // CONFIG.keys, end_step - 1)
        end_step = gl.maximum(gl.minimum((last_hi - begin + CONFIG.keys - 1) // CONFIG.keys, end_step), first_step + 1)
    start = step_start(loop, first_step, CONFIG.keys)
    # The bounds lo and hi never decrease, so testing the first and the last row suffices.
    first_hi = gl.load(hi + offset + first_row, mask=first_row < end, other=0)
    last_lo = gl.load(lo + offset + last_row, mask=first_row < end, other=0)
    all_initialised = (first_hi > start) & (last_lo < start + CONFIG.keys)
    ref_max = load_ref_max(results, (batch, head, first_row, end), CONFIG)
    row_bounds = row_lo, row_hi, all_initialised, ref_max
    return index, batch, head, first_row, end, loop, row_bounds, (first_step, end_step)


@gluon.jit
def load_queries(q, rows, slot, queries, q_full, CONFIG: gl.constexpr):
    CONSUMERS: gl.constexpr = CONFIG.consumers
    batch, head, first = rows
    for c in gl.static_range(CONSUMERS):
        query = queries.index(slot % CONFIG.q_slots * CONSUMERS + c)
        if CONFIG.heads_per_tile == 1:
            tma_load(q, [batch, first + c * ROWS, head, 0], q_full, tile_view(query, q))
        else:
            tma_load(q, [batch, first, head + c, 0], q_full, tile_view(query, q))


@gluon.jit
def _load_work_tiles(LOAD: gl.constexpr, arguments, slot, position, CONFIG: gl.constexpr):
    _, work_tiles, _, barriers = arguments
    index = gl.program_id(0)
    batch, head, first, end, loop = load_work_tile(work_tiles, index)
    while end > 0:
        mbarrier.wait(barriers[1], slot ^ 1)
        rows = batch, head * CONFIG.heads_per_tile, first
        position = LOAD(arguments, rows, loop, slot, position, CONFIG)
        slot ^= 1
        index += gl.num_programs(0)
        batch, head, first, end, loop = load_work_tile(work_tiles, index)
    return slot, position


@gluon.jit
def _first_position(PHASE: gl.constexpr, CONFIG: gl.constexpr):
    if CONFIG.tails > 0:
        return gl.to_tensor(0), gl.to_tensor(PHASE), gl.to_tensor(0)
    else:
        return gl.to_tensor(0), gl.to_tensor(PHASE)


@gluon.jit
def _produce(LOAD: gl.constexpr, arguments, overflow, CONFIG: gl.constexpr):
    # Waiting for phase 1 of a new mbarrier returns at once, so the producer finds all K/V buffers empty.
    slot, position = _load_work_tiles(LOAD, arguments, gl.to_tensor(0), _first_position(1, CONFIG), CONFIG)
    if not CONFIG.update_ref_max and _any_overflow(overflow, 1, CONFIG):
        _load_work_tiles(LOAD, arguments, slot, position, CONFIG)


@gluon.jit
def _compute_work_tiles(
    COMPUTE: gl.constexpr, SKIP: gl.constexpr, arguments, slot, position,
    CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    barriers = arguments[7]
    tile = load_consumer_tile(arguments, gl.program_id(0), CONSUMER, CONFIG)
    overflowed = gl.zeros([ROWS], gl.int1, gl.SliceLayout(1, CONFIG.scores_layout))
    # If `state_stage` is not -1, the K/V buffer with this index still holds o of the previous work tile.
    state_stage = gl.to_tensor(-1)
    while tile[4] > 0:
        mbarrier.wait(barriers[0], slot)
        if tile[3] < tile[4]:
            next_tile, position, state_stage, rows = COMPUTE(
                arguments, tile, slot, position, state_stage, CONSUMER, UPDATE_REF_MAX, CONFIG
            )
            if CONFIG.loads_early:
                tile = next_tile
            overflowed |= rows
        else:
            position = SKIP(barriers, num_steps(tile[5]), position, state_stage, CONSUMER, CONFIG)
            if CONFIG.loads_early:
                tile = load_consumer_tile(arguments, tile[0] + gl.num_programs(0), CONSUMER, CONFIG)
            state_stage = gl.to_tensor(-1)
        if not CONFIG.loads_early:
            tile = load_consumer_tile(arguments, tile[0] + gl.num_programs(0), CONSUMER, CONFIG)
        slot ^= 1
    if CONFIG.stores_by_tma:
        # TMA must have read all results from shared memory before the program ends or a retry pass starts.
        hopper_common.tma_store_wait(0)
        release_state_stage(barriers, state_stage, CONFIG)
    return slot, position, overflowed


@gluon.jit
def _consume(COMPUTE: gl.constexpr, SKIP: gl.constexpr, arguments, overflow, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    if CONSUMER == CONFIG.consumers - 1:
        pass_ping_pong(CONSUMER, CONFIG)
    slot, position, overflowed = _compute_work_tiles(
        COMPUTE, SKIP, arguments, gl.to_tensor(0), _first_position(0, CONFIG), CONSUMER, CONFIG.update_ref_max, CONFIG
    )
    if not CONFIG.update_ref_max:
        _report_overflow(overflow, overflowed, CONSUMER)
        if _any_overflow(overflow, 4, CONFIG):
            if CONFIG.stores_by_tma:
                # The stores of invalid results must be complete before the retry pass stores the same rows. The function
                # `tma_store_wait` only waits until TMA has read shared memory.
                hopper_common.execute("cp.async.bulk.wait_group 0; mov.b32 $0, $1;")
            _compute_work_tiles(COMPUTE, SKIP, arguments, slot, position, CONSUMER, True, CONFIG)


@gluon.jit
def skip_tile(barriers, count, position, state_stage, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    mbarrier.arrive(barriers[1], count=1)
    return skip_steps(barriers, count + CONFIG.extra_steps, position, CONSUMER, CONFIG)


@gluon.jit
def skip_steps(barriers, count, position, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    _, _, full, empty = barriers
    STAGES: gl.constexpr = CONFIG.stages_per_step
    for _step_index in range(count):
        wait_for_ping_pong(CONSUMER, CONFIG)
        pass_ping_pong(CONSUMER, CONFIG)
        for _stage_index in gl.static_range(STAGES):
            mbarrier.wait(full.index(position[0]), position[1])
            mbarrier.arrive(empty.index(position[0]), count=1)
            position = advance_stage(position[0], position[1], CONFIG) + position[2:]
        if CONFIG.tails > 0:
            position = position[:2] + (advance_tail(position[2], CONFIG),)
    return position


@gluon.jit
def run_partitions(LOAD: gl.constexpr, COMPUTE: gl.constexpr, SKIP: gl.constexpr, loading, computing, CONFIG: gl.constexpr):
    """Run the producer and the consumers of a forward kernel.

    Args:
        LOAD: LOAD(loading, (batch entry, head, first row), loop, slot, position, CONFIG) -> next position.
        COMPUTE: COMPUTE(computing, tile, slot, position, state_stage, CONSUMER, UPDATE_REF_MAX, CONFIG) -> (next tile, next
            position, state_stage, mask of overflowed rows). A tile is from `load_consumer_tile`.
        SKIP: SKIP(barriers, count, position, state_stage, CONSUMER, CONFIG) -> next position, if a consumer has no rows.
        loading: (tensors, work_tiles, buffers, barriers). The first two barriers are q_full and q_empty.
        computing: (lo, hi, work_tiles, num_masks, num_queries, results, buffers, barriers, log2_scale, operands).
    """
    overflow = () if CONFIG.update_ref_max else _allocate_overflow(CONFIG)
    fence_async_shared()
    # Gluon gives the first partition four warps and the remaining registers, so the two lists below omit it.
    gl.warp_specialize(
        [
            (_consume, (COMPUTE, SKIP, computing, overflow, i, CONFIG))
            if i < CONFIG.consumers
            else (_produce, (LOAD, loading, overflow, CONFIG))
            for i in CONFIG.partitions
        ],
        [4] * (CONFIG.consumers - 1) + [1],
        [CONFIG.registers] * (CONFIG.consumers - 1) + [PRODUCER_REGISTERS],
    )
