"""Hopper forward: the contract of `ringattn.kernels.reference.forward` for sm_90, in Gluon.

One program a processor works off the items that `Intervals.items` deals out to it, each a tile of query rows of one head. One
warp, the producer, moves tiles by TMA; the other partitions, the consumers, are warpgroups with 64 of an item's rows each and
hold their scores, probabilities and output in registers. A consumer that an item leaves without rows only stands by.

    producer     an item's Q into the slot that the last item does not use, once all consumers have left that; then for every
                 step K and V into the next stage, once all consumers have left what it held; then, if a state comes in or
                 leaves, it hands the stages that follow to the consumers, for their o
    consumers    S(j) = Q K(j)^T is issued, then O += P(j-1) V(j-1); the softmax of S(j) runs while the latter computes

    barriers     full, empty of each stage of K and of V, whose phases run on from item to item; q_full, q_empty of the slots.
                 Where K and V of a stage are left together, K's empty is V's
    slots        the output leaves by way of Q's memory: consumers leave a slot once the next item's first product is done. A
                 state leaves by way of stages, left at that point, too; then Q has one slot, left after an item's last S
    rounds       a second one, through all items again, of a program that had a row whose origin could not stay: what that is,
                 `hopper_softmax` says
    turns        if on, a consumer issues its products after its neighbour has: the tensor cores then work off one consumer's
                 products while the others are at their softmax, instead of all waiting for all

The walk takes the tiles at the ends of the rows' intervals first and masks those; the steady loop over the tiles that all rows
see then passes the mask by. Scores are in log2 units. (Dao 2023, algorithm 1; Shah et al. 2024, FlashAttention-3, section 3.)
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ringattn.kernels import validation
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper.common import (
    LOG2_E,
    ROWS,
    named_barrier_arrive,
    named_barrier_wait,
    step_start,
    tile_view,
    tma_load,
    wait_for_writes,
)
from ringattn.kernels.hopper.epilogue import finish, hand_over, load_origins, load_scalars
from ringattn.kernels.hopper.softmax import by_thread, follow, hold, mask, rescale, settle, weigh
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import State
from ringattn.kernels.triton import common as triton_common
from ringattn.kernels.triton.common import load_tile
from ringattn.kernels.triton.launcher import launch

FIRST_TURN = gl.constexpr(8)  # hardware barriers below are Triton's own
TURN_THREADS = gl.constexpr(256)  # of the consumer that takes a turn, and of the one that passes it


@dataclass(frozen=True)
class Config:
    """What a kernel is compiled for."""

    dim: int  # of the tiles, 64 or 128; head dims are padded to it
    value_dim: int
    num_heads: int
    group: int  # query heads a key head
    has_state: bool
    final: bool
    consumers: int
    keys: int  # of a step
    stages: int  # of K and V
    together: bool  # consumers leave K and V of a stage together
    registers: int  # of a consumer's threads
    turns: bool
    hold: bool  # see `hopper_softmax.hold`
    follow: bool  # origins follow the maxima from the start, not only where one that stays has failed

    @property
    def queries(self) -> int:
        """Rows of an item."""
        return self.consumers * ROWS.value

    @property
    def scores(self) -> gl.NVMMADistributedLayout:
        """Layout of a consumer's scores (64, keys)."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.keys, 16])

    @property
    def output(self) -> gl.NVMMADistributedLayout:
        """Layout of a consumer's output (64, dim)."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.dim, 16])

    @property
    def in_place(self) -> bool:
        """Whether a state is read, merged and written."""
        return self.has_state and not self.final

    @property
    def slots(self) -> int:
        """Of Q, at most two, so that one bit tells an item's slot and the phases of q_full and q_empty."""
        return 2 if self.final else 1

    @property
    def parts(self) -> int:
        """Into how many parts the columns of a consumer's o are cut, so that one fits the memory of a stage's K, or V."""
        return 2 * ROWS.value // self.keys

    @property
    def state_stages(self) -> int:
        """Stages by which the o of all consumers comes in, or leaves."""
        return -(-self.consumers * self.parts // 2) if self.has_state or not self.final else 0

    @property
    def left(self) -> gl.DotOperandLayout:
        """Layout of p (64, keys) as the left operand of p v."""
        return gl.DotOperandLayout(operand_index=0, parent=self.output, k_width=2)


# of keys and values in the cache, which the output passes through too: a state in fp32, on its way in and out
L2_BYTES = 32 * 2**20
L2_BYTES_BESIDE_STATE = 16 * 2**20
# from triton 3.8 on, whose assembler is another, `hold` would make it run all products one by one
HOLD = hopper_common.TRITON_VERSION < (3, 8)
TILES = {  # by padded head dim
    64: dict(consumers=3, keys=128, stages=3, together=False, registers=160, turns=True, hold=False),
    128: dict(consumers=3, keys=64, stages=3, together=True, registers=160, turns=False, hold=HOLD),
}
# with few rows that see something in all heads, items of fewer rows leave fewer processors idle
FEW_ROWS = 2**16
TILES_OF_FEW = TILES | {128: dict(consumers=2, keys=128, stages=2, together=False, registers=240, turns=True, hold=HOLD)}
PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _load_item(items, number):
    """(batch, head, first, end, begin, num_masked_prefix, num_unmasked, num_masked) of an item of `Intervals.items`; end is 0 after the last.

    Every partition asks for itself: what it is handed arrives through shared memory. The producer is the first to ask.
    """
    row = items + number * 8
    first, end, begin, num_masked_prefix, num_unmasked, num_masked = load_tile(row)
    head, batch = gl.load(row + 6), gl.load(row + 7)
    return batch, head, first, end, begin, num_masked_prefix, num_unmasked, num_masked


@gluon.jit
def _next(stage, phase, CONFIG: gl.constexpr):
    """The stage after this one, and the phase of its barriers."""
    last = stage == CONFIG.stages - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _produce(arguments, retry, CONFIG: gl.constexpr):
    """The loading partition, a single warp."""
    slot = gl.to_tensor(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    slot, stage, phase = _load_tiles(arguments, slot, stage, phase, CONFIG)
    if not CONFIG.follow:
        if _any_failed(retry, 1, CONFIG):
            _load_tiles(arguments, slot, stage, phase, CONFIG)


@gluon.jit
def _load_tiles(arguments, slot, stage, phase, CONFIG: gl.constexpr):
    """Load what all items of this program need. Returns slot, stage and phase to go on with."""
    CONSUMERS: gl.constexpr = CONFIG.consumers
    KEYS: gl.constexpr = CONFIG.keys
    STATE_STAGES: gl.constexpr = CONFIG.state_stages
    q, k, v, state_tiles, items, buffers, barriers = arguments
    queries, keys, values = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    item = gl.program_id(0)
    batch, head, first, end, begin, num_masked_prefix, num_unmasked, num_masked = _load_item(items, item)
    while end > 0:
        mbarrier.wait(q_empty, slot ^ 1)
        mbarrier.expect(q_full, CONSUMERS * q.block_type.nbytes)
        for c in gl.static_range(CONSUMERS):
            query = queries.index(slot % CONFIG.slots * CONSUMERS + c)
            tma_load(q, [batch, first + c * ROWS, head, 0], q_full, tile_view(query, q))
        key_head = head // CONFIG.group
        for step in range(gl.maximum(num_masked + num_unmasked, 1)):
            start = step_start(begin, num_masked_prefix, num_unmasked, num_masked, step, KEYS)
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
            tma_load(k, [batch, start, key_head, 0], k_full.index(stage), tile_view(keys.index(stage), k))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
            tma_load(v, [batch, start, key_head, 0], v_full.index(stage), tile_view(values.index(stage), v))
            stage, phase = _next(stage, phase, CONFIG)
        for i in gl.static_range(STATE_STAGES):
            mbarrier.wait(k_empty.index(stage), phase)
            hand_over(state_tiles, batch, first, head, 2 * i, keys.index(stage), k_full.index(stage), CONFIG)
            mbarrier.wait(v_empty.index(stage), phase)
            hand_over(state_tiles, batch, first, head, 2 * i + 1, values.index(stage), v_full.index(stage), CONFIG)
            stage, phase = _next(stage, phase, CONFIG)
        slot ^= 1
        item += gl.num_programs(0)
        batch, head, first, end, begin, num_masked_prefix, num_unmasked, num_masked = _load_item(items, item)
    return slot, stage, phase


@gluon.jit
def _any_failed(retry, WARPS: gl.constexpr, CONFIG: gl.constexpr):
    """Whether a consumer reported a row whose origin cannot stay, once all have reported."""
    reports, reported = retry
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    CONSUMERS: gl.constexpr = CONFIG.consumers
    mbarrier.wait(reported, 0)
    failed = reports.index(0).load(LAYOUT)
    for c in gl.static_range(1, CONSUMERS):
        failed |= reports.index(c).load(LAYOUT)
    return gl.max(failed, axis=0) > 0


@gluon.jit
def _report(retry, failed, CONSUMER: gl.constexpr):
    """Tell all partitions whether a row of this consumer has failed."""
    reports, reported = retry
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    reports.index(CONSUMER).store(gl.zeros([32], gl.int32, LAYOUT) + gl.max(failed.to(gl.int32), axis=0))
    mbarrier.arrive(reported, count=1)


@gluon.jit
def _leave_keys(k_empty, stage, CONFIG: gl.constexpr):
    if not CONFIG.together:
        mbarrier.arrive(k_empty.index(stage), count=1)


@gluon.jit
def _take_turn(CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    if CONFIG.turns:
        named_barrier_wait(FIRST_TURN + CONSUMER, TURN_THREADS)


@gluon.jit
def _pass_turn(CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    if CONFIG.turns:
        named_barrier_arrive(FIRST_TURN + (CONSUMER + 1) % CONFIG.consumers, TURN_THREADS)


@gluon.jit
def _step(
    query, buffers, barriers, carry, bounds, plan, step, log2_scale,
    CONSUMER: gl.constexpr, FOLLOW: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Scores of the next tile while the last tile's p meets its values."""
    KEYS: gl.constexpr = CONFIG.keys
    SCORES: gl.constexpr = CONFIG.scores
    keys, values = buffers
    k_full, k_empty, v_full, v_empty = barriers
    p, origin, l, o, stage, phase, last_stage, last_phase = carry
    lo, hi, settled, _ = bounds
    mbarrier.wait(k_full.index(stage), phase)
    _take_turn(CONSUMER, CONFIG)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(query, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(last_stage), last_phase)
    growing = warpgroup_mma(p, values.index(last_stage), o, is_async=True)
    _pass_turn(CONSUMER, CONFIG)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    _leave_keys(k_empty, stage, CONFIG)
    begin, num_masked_prefix, num_unmasked, num_masked = plan
    if step < num_masked:
        scores = mask(scores, lo, hi, step_start(begin, num_masked_prefix, num_unmasked, num_masked, step, KEYS), CONFIG)
    if not FOLLOW:
        # the first of the tiles that all rows see settles the last
        if (step <= num_masked) & ~settled:
            origin = settle(scores, origin, log2_scale, CONFIG)
    if FOLLOW:
        origin, alpha = follow(scores, origin, log2_scale, CONFIG)
        l *= alpha
    weights, l = weigh(scores, origin, l, log2_scale, CONFIG)
    l = hold(l, CONFIG)
    o = warpgroup_mma_wait(0, deps=(growing,))
    mbarrier.arrive(v_empty.index(last_stage), count=1)
    if FOLLOW:
        o = rescale(o, alpha, CONFIG)
    # only now: before the wait the registers of the last p are still being read
    p = gl.convert_layout(weights.to(query.dtype), CONFIG.left)
    next_stage, next_phase = _next(stage, phase, CONFIG)
    return p, origin, l, o, next_stage, next_phase, stage, phase


@gluon.jit
def _first_step(
    query, keys, barriers, bounds, plan, held, stage, phase, log2_scale,
    CONSUMER: gl.constexpr, FOLLOW: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """(p, origin, l, o) after the first tile of an item, which may lie past all keys, where nothing is seen at all."""
    KEYS: gl.constexpr = CONFIG.keys
    DIM: gl.constexpr = CONFIG.dim
    SCORES: gl.constexpr = CONFIG.scores
    OUTPUT: gl.constexpr = CONFIG.output
    k_full, k_empty, v_empty, q_empty = barriers
    lo, hi, _, origin = bounds
    mbarrier.wait(k_full.index(stage), phase)
    _take_turn(CONSUMER, CONFIG)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(query, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    _pass_turn(CONSUMER, CONFIG)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    # the last item's output, or state, has been read from shared memory by now
    tma.store_wait(0)
    _leave_held(k_empty, v_empty, held, CONFIG)
    _leave_keys(k_empty, stage, CONFIG)
    if CONFIG.slots == 2:
        mbarrier.arrive(q_empty, count=1)
    begin, num_masked_prefix, num_unmasked, num_masked = plan
    if (num_masked > 0) | (num_unmasked == 0):
        scores = mask(scores, lo, hi, step_start(begin, num_masked_prefix, num_unmasked, num_masked, 0, KEYS), CONFIG)
    BY_THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, by_thread(zeros, KEYS).type.layout))
    nothing = gl.zeros([ROWS, 4], gl.float32, BY_THREAD)
    origin = gl.convert_layout(origin, gl.SliceLayout(1, BY_THREAD)).expand_dims(1) + nothing
    if FOLLOW:
        origin, _ = follow(scores, origin, log2_scale, CONFIG)
    else:
        origin = settle(scores, origin, log2_scale, CONFIG)
    weights, l = weigh(scores, origin, nothing, log2_scale, CONFIG)
    p = gl.convert_layout(weights.to(query.dtype), CONFIG.left)
    o = gl.zeros([ROWS, DIM], gl.float32, OUTPUT)
    return p, origin, l, o


@gluon.jit
def _leave_held(k_empty, v_empty, held, CONFIG: gl.constexpr):
    """Leave the stage that the last item's state came, or went, by; it is -1 if there is none."""
    if CONFIG.state_stages > 0:
        if held >= 0:
            _leave_keys(k_empty, held, CONFIG)
            mbarrier.arrive(v_empty.index(held), count=1)


@gluon.jit
def _stand_by(flow, q_empty, num_steps, held, stage, phase, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """The stage and phase after an item of which a consumer has no row: it lets the others have its turns and all stages."""
    k_full, k_empty, v_full, v_empty = flow
    # the last item's output, or state, must have been read
    tma.store_wait(0)
    _leave_held(k_empty, v_empty, held, CONFIG)
    mbarrier.arrive(q_empty, count=1)
    for _step_index in range(gl.maximum(num_steps, 1)):
        mbarrier.wait(k_full.index(stage), phase)
        _take_turn(CONSUMER, CONFIG)
        _pass_turn(CONSUMER, CONFIG)
        _leave_keys(k_empty, stage, CONFIG)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        stage, phase = _next(stage, phase, CONFIG)
    _, stage, phase = _await_state(flow, stage, phase, -1, CONFIG)
    return stage, phase


@gluon.jit
def _await_state(flow, stage, phase, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Wait for the o of all consumers, and leave the stages without this one's: (its first stage, the next, its phase)."""
    k_full, k_empty, v_full, v_empty = flow
    STATE_STAGES: gl.constexpr = CONFIG.state_stages
    own_stage = stage
    for i in gl.static_range(STATE_STAGES):
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.wait(v_full.index(stage), phase)
        if i == CONSUMER * CONFIG.parts // 2:
            own_stage = stage
        else:
            _leave_keys(k_empty, stage, CONFIG)
            mbarrier.arrive(v_empty.index(stage), count=1)
        stage, phase = _next(stage, phase, CONFIG)
    return own_stage, stage, phase


@gluon.jit
def _consumer_item(items, number, lo, hi, results, num_masks, num_queries, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Where a consumer's rows of an item are: (batch, head, own, end), the plan of its walk, the bounds of its rows.

    And whether all of them that see a key see one of the first tile, and the origins that they start with.
    """
    batch, head, first, end, begin, num_masked_prefix, num_unmasked, num_masked = _load_item(items, number)
    own = first + CONSUMER * ROWS
    rows = own + gl.arange(0, ROWS, layout=gl.SliceLayout(1, CONFIG.scores))
    offset = gl.minimum(batch, num_masks - 1) * num_queries  # one mask may serve all
    row_lo = gl.load(lo + offset + rows, mask=rows < end, other=0)
    row_hi = gl.load(hi + offset + rows, mask=rows < end, other=0)
    start = step_start(begin, num_masked_prefix, num_unmasked, num_masked, 0, CONFIG.keys)
    # then the first row sees up to it or further, and the last from it on or from before
    first_hi = gl.load(hi + offset + own, mask=own < end, other=0)
    last_lo = gl.load(lo + offset + gl.minimum(own + ROWS, end) - 1, mask=own < end, other=0)
    settled = (first_hi > start) & (last_lo < start + CONFIG.keys)
    origin = load_origins(results, (batch, head, own, end), num_queries, CONFIG)
    return batch, head, own, end, begin, num_masked_prefix, num_unmasked, num_masked, (row_lo, row_hi, settled, origin)


@gluon.jit
def _consume(arguments, retry, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """One computing partition: 64 rows of every item through all steps, and once more where the origin of a row failed."""
    if CONFIG.turns and CONSUMER == CONFIG.consumers - 1:
        named_barrier_arrive(FIRST_TURN, TURN_THREADS)
    slot = gl.to_tensor(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot, stage, phase, failed = _work_off(arguments, slot, stage, phase, CONSUMER, CONFIG.follow, CONFIG)
    if not CONFIG.follow:
        _report(retry, failed, CONSUMER)
        if _any_failed(retry, 4, CONFIG):
            # or what was written first could arrive last
            wait_for_writes()
            _work_off(arguments, slot, stage, phase, CONSUMER, True, CONFIG)


@gluon.jit
def _work_off(arguments, slot, stage, phase, CONSUMER: gl.constexpr, FOLLOW: gl.constexpr, CONFIG: gl.constexpr):
    """Compute this consumer's rows of all items. Returns slot, stage and phase to go on with, and which rows have failed."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, CONFIG.scores)
    lo, hi, items, num_masks, num_queries, results, buffers, barriers, log2_scale = arguments
    queries, keys, values = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    tiles = keys, values
    flow = k_full, k_empty, v_full, v_empty
    item = gl.program_id(0)
    batch, head, own, end, begin, num_masked_prefix, num_unmasked, num_masked, bounds = _consumer_item(
        items, item, lo, hi, results, num_masks, num_queries, CONSUMER, CONFIG
    )
    failed = gl.zeros([ROWS], gl.int1, BY_ROW)
    held = gl.to_tensor(-1)
    while end > 0:
        mbarrier.wait(q_full, slot)
        if own < end:
            place = batch, head, own, end
            query = queries.index(slot % CONFIG.slots * CONFIG.consumers + CONSUMER)
            plan = begin, num_masked_prefix, num_unmasked, num_masked
            first = k_full, k_empty, v_empty, q_empty
            p, origin, l, o = _first_step(
                query, keys, first, bounds, plan, held, stage, phase, log2_scale, CONSUMER, FOLLOW, CONFIG
            )
            last_stage = stage
            last_phase = phase
            stage, phase = _next(stage, phase, CONFIG)
            for step in range(1, num_masked + num_unmasked):
                carry = p, origin, l, o, stage, phase, last_stage, last_phase
                p, origin, l, o, stage, phase, last_stage, last_phase = _step(
                    query, tiles, flow, carry, bounds, plan, step, log2_scale, CONSUMER, FOLLOW, CONFIG
                )
            if CONFIG.slots == 1:
                mbarrier.arrive(q_empty, count=1)
            mbarrier.wait(v_full.index(last_stage), last_phase)
            o = warpgroup_mma(p, values.index(last_stage), o, is_async=True)
            # the state that came in and the next item are looked up meanwhile
            incoming = load_scalars(results, place, num_queries, CONFIG)
            item += gl.num_programs(0)
            batch, head, own, end, begin, num_masked_prefix, num_unmasked, num_masked, bounds = _consumer_item(
                items, item, lo, hi, results, num_masks, num_queries, CONSUMER, CONFIG
            )
            o = warpgroup_mma_wait(0, deps=(o,))
            mbarrier.arrive(v_empty.index(last_stage), count=1)
            l = gl.convert_layout(gl.sum(l, axis=1), BY_ROW)
            origin = gl.convert_layout(gl.max(origin, axis=1), BY_ROW)
            held, stage, phase = _await_state(flow, stage, phase, CONSUMER, CONFIG)
            own_tiles = keys.index(held), values.index(held)
            failed |= finish(origin, l, o, query, own_tiles, incoming, results, place, num_queries, CONSUMER, FOLLOW, CONFIG)
        else:
            stage, phase = _stand_by(flow, q_empty, num_masked + num_unmasked, held, stage, phase, CONSUMER, CONFIG)
            item += gl.num_programs(0)
            batch, head, own, end, begin, num_masked_prefix, num_unmasked, num_masked, bounds = _consumer_item(
                items, item, lo, hi, results, num_masks, num_queries, CONSUMER, CONFIG
            )
            held = gl.to_tensor(-1)
        slot ^= 1
    # memory that an output leaves from must stay until it has been read
    tma.store_wait(0)
    _leave_held(k_empty, v_empty, held, CONFIG)
    return slot, stage, phase, failed


@gluon.jit(do_not_specialize=["num_masks", "num_queries"])
def _forward_kernel(
    q, k, v, state_tiles, out_tiles, lo, hi, items, state_m, state_l, state_o, lse, out,
    num_masks, num_queries, log2_scale, CONFIG: gl.constexpr,
):  # fmt: skip
    MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.dim], q.dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    STAGES: gl.constexpr = CONFIG.stages
    queries = gl.allocate_shared_memory(q.dtype, [CONFIG.slots * CONFIG.consumers, ROWS, CONFIG.dim], MATRIX)
    keys = gl.allocate_shared_memory(k.dtype, [CONFIG.stages, CONFIG.keys, CONFIG.dim], MATRIX)
    values = gl.allocate_shared_memory(v.dtype, [CONFIG.stages, CONFIG.keys, CONFIG.dim], MATRIX)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [CONFIG.stages, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [CONFIG.stages, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [CONFIG.stages, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [CONFIG.stages, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=CONFIG.consumers)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONFIG.consumers)
        mbarrier.init(v_empty.index(i), count=CONFIG.consumers)
    reports = gl.allocate_shared_memory(gl.int32, [CONFIG.consumers, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    reported = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(reported, count=CONFIG.consumers)
    fence_async_shared()
    buffers = queries, keys, values
    retry = reports, reported
    if CONFIG.together:
        k_empty = v_empty
    barriers = q_full, q_empty, k_full, k_empty, v_full, v_empty
    loading = q, k, v, state_tiles, items, buffers, barriers
    results = state_m, state_l, state_o, state_tiles, lse, out, out_tiles
    computing = lo, hi, items, num_masks, num_queries, results, buffers, barriers, log2_scale
    # the first of them takes the registers that the others leave
    if CONFIG.consumers == 2:
        gl.warp_specialize(
            [
                (_consume, (computing, retry, 0, CONFIG)),
                (_consume, (computing, retry, 1, CONFIG)),
                (_produce, (loading, retry, CONFIG)),
            ],
            [4, 1],
            [CONFIG.registers, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (computing, retry, 0, CONFIG)),
                (_consume, (computing, retry, 1, CONFIG)),
                (_consume, (computing, retry, 2, CONFIG)),
                (_produce, (loading, retry, CONFIG)),
            ],
            [4, 4, 1],
            [CONFIG.registers, CONFIG.registers, PRODUCER_REGISTERS],
        )


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
    shares_sms: bool = False,
) -> State | tuple[Tensor, Tensor]:
    """As `ringattn.kernels.triton.forward.forward`, for fp16 and bf16 and head dims that are multiples of 8 up to 128.

    Work is dealt out evenly to one program a processor, before they start. Where that is `shares_sms`, as other kernels may hold
    processors meanwhile, every item has a program of its own: one that starts late then delays nothing but itself.

    Raises:
        ValueError: what `ringattn.kernels.triton.forward.forward` refuses, and what `ringattn.kernels.hopper.common.refusal` says; dropout, blocks.
    """
    validation.check_inputs(q, k, v, intervals, scale)
    validation.check_options(q, k, dropout, blocks, precision)
    hopper_common.check(q, v, dropout, blocks)
    if state is not None:
        validation.check_state(state, q, v)
    m, l, o, out, lse = triton_common.allocate_results(q, v, state, final)
    if q.numel() > 0:
        _launch(q, k, v, intervals, scale, (m, l, o, out, lse), state is not None, shares_sms)
    return (out, lse) if final else (m, l, o)


@lru_cache(maxsize=256)
def configure(
    dims: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype, has_state: bool, final: bool, few: bool
) -> Config:
    """The kernel for head dims (D, Dv) and (query, key) heads; `few`: with tiles for few rows."""
    dim, (num_heads, num_key_heads) = hopper_common.padded_dim(*dims), heads
    tiles = (TILES_OF_FEW if few else TILES)[dim]
    # probabilities up to LIMIT overflow fp16
    follow = dtype != torch.bfloat16
    config = Config(dim, dims[1], num_heads, num_heads // num_key_heads, has_state, final, **tiles, follow=follow)
    # while a state comes, or leaves, the next item's first keys need a stage, or two, where a slot makes room
    return replace(config, stages=max(config.stages, config.state_stages + 3 - config.slots))


def _launch(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float, results: tuple, has_state: bool, shares_sms: bool
) -> None:  # fmt: skip
    """Run the kernel on checked inputs; `results` are (m, l, o, out, lse), None where not wanted."""
    (batch, num_queries, num_heads, head_dim), (num_keys, num_key_heads, value_dim) = q.shape, v.shape[1:]
    m, l, o, out, lse = results
    few = intervals.num_seeing * (batch // intervals.batch) * num_heads <= FEW_ROWS
    config = configure((head_dim, value_dim), (num_heads, num_key_heads), q.dtype, has_state, out is not None, few)
    given, o = o, hopper_common.as_strided_rows(o) if has_state else o
    q, k, v = [hopper_common.as_strided_rows(x) for x in (q, k, v)]
    blocks = (q, ROWS.value, config.dim), (k, config.keys, config.dim), (v, config.keys, config.dim)
    blocks += (o, ROWS.value, config.dim // config.parts), (out, ROWS.value, config.dim)
    descriptors = [None if x is None else hopper_common.describe(x, rows, columns) for x, rows, columns in blocks]
    cache = L2_BYTES_BESIDE_STATE if has_state else L2_BYTES
    heads_in_cache = max(1, cache // (num_keys * (head_dim + value_dim) * q.element_size())) * config.group
    sections = -(-num_heads * batch // heads_in_cache)
    programs = hopper_common.num_programs(q.device, shares_sms)
    # rows that see nothing leave a state as it is
    seeing = has_state and out is None
    items = intervals.items(config.queries, config.keys, batch, num_heads, sections, programs, seeing)
    with torch.cuda.device_of(q):
        launch(
            _forward_kernel, items.shape[1], (*descriptors, intervals.lo, intervals.hi, items, m, l, o, lse, out),
            (intervals.batch, num_queries, float(scale) * LOG2_E.value), CONFIG=config,
        )  # fmt: skip
    if config.in_place and o is not given:
        given.copy_(o)
