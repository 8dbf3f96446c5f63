"""Hopper forward: the contract of `kernels.reference.forward` for sm_90, in Gluon.

One program a processor works off the items that `Intervals.items` deals out to it, each a tile of query rows of one head. One
warp, the producer, moves tiles by TMA; the other partitions, the consumers, are warpgroups with 64 of an item's rows each and
hold their scores, probabilities and output in registers. A consumer that an item leaves without rows only stands by.

    producer     an item's Q into the slot that the last item does not use, once all consumers have left that; then for every
                 step K and V into the next stage, once all consumers have left what it held
    consumers    S(j) = Q K(j)^T is issued, then O += P(j-1) V(j-1); the softmax of S(j) runs while the latter computes

    barriers     full, empty of each stage of K and of V, whose phases run on from item to item; q_full, q_empty of the slots.
                 Where K and V of a stage are left together, K's empty is V's
    slots        the output leaves by way of Q's memory: consumers leave a slot once the next item's first product is issued
    turns        if on, a consumer issues its products after its neighbour has: the tensor cores then work off one consumer's
                 products while the others are at their softmax, instead of all waiting for all

The walk takes the tiles at the ends of the rows' intervals first and masks those; the steady loop over the tiles that all rows
see then passes the mask by. Scores are in log2 units. (Dao 2023, algorithm 1; Shah et al. 2024, FlashAttention-3, section 3.)
"""

from dataclasses import dataclass
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

from kernels import checks, hopper, tiles
from kernels.blocks import BlockMask
from kernels.dropout import Dropout
from kernels.hopper import (
    LN_2,
    LOG2_E,
    named_barrier_arrive,
    named_barrier_wait,
    step_start,
    tile_view,
    tma_load,
    tma_store,
    visible,
)
from kernels.intervals import Intervals
from kernels.launch import launch
from kernels.reference import State
from kernels.tables import CONSUMER_ROWS
from kernels.tiles import load_tile

ROWS = gl.constexpr(CONSUMER_ROWS)  # the rows of one wgmma
FIRST_TURN = gl.constexpr(8)  # hardware barriers below are Triton's own
TURN_THREADS = gl.constexpr(256)  # of the consumer that takes a turn, and of the one that passes it
SLOTS = gl.constexpr(2)  # of Q: with two, one bit tells an item's slot and the phases of q_full and q_empty
SLACK = gl.constexpr(8.0)  # probabilities reach up to 2**SLACK before they are taken relative to another origin


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
    hold: bool  # see `_hold`

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
    def left(self) -> gl.DotOperandLayout:
        """Layout of p (64, keys) as the left operand of p v."""
        return gl.DotOperandLayout(operand_index=0, parent=self.output, k_width=2)


L2_BYTES = 32 * 2**20  # of keys and values: less than the cache, which the output passes through too
# from triton 3.8 on, whose assembler is another, `_hold` would make it run all products one by one
HOLD = hopper.TRITON_VERSION < (3, 8)
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
    """(batch, head, first, end, begin, num_head, num_full, num_edge) of an item of `Intervals.items`; end is 0 after the last.

    Every partition asks for itself: what it is handed arrives through shared memory. The producer is the first to ask.
    """
    row = items + number * 8
    first, end, begin, num_head, num_full, num_edge = load_tile(row)
    head, batch = gl.load(row + 6), gl.load(row + 7)
    return batch, head, first, end, begin, num_head, num_full, num_edge


@gluon.jit
def _next(stage, phase, CONFIG: gl.constexpr):
    """The stage after this one, and the phase of its barriers."""
    last = stage == CONFIG.stages - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _produce(arguments, CONFIG: gl.constexpr):
    """The loading partition, a single warp."""
    CONSUMERS: gl.constexpr = CONFIG.consumers
    KEYS: gl.constexpr = CONFIG.keys
    q, k, v, items, buffers, barriers = arguments
    queries, keys, values = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    item = gl.program_id(0)
    batch, head, first, end, begin, num_head, num_full, num_edge = _load_item(items, item)
    slot = 0
    stage = 0
    phase = 1
    while end > 0:
        mbarrier.wait(q_empty, slot ^ 1)
        mbarrier.expect(q_full, CONSUMERS * q.block_type.nbytes)
        for c in gl.static_range(CONSUMERS):
            query = queries.index(slot * CONSUMERS + c)
            tma_load(q, [batch, first + c * ROWS, head, 0], q_full, tile_view(query, q))
        key_head = head // CONFIG.group
        for step in range(gl.maximum(num_edge + num_full, 1)):
            start = step_start(begin, num_head, num_full, num_edge, step, KEYS)
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
            tma_load(k, [batch, start, key_head, 0], k_full.index(stage), tile_view(keys.index(stage), k))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
            tma_load(v, [batch, start, key_head, 0], v_full.index(stage), tile_view(values.index(stage), v))
            stage, phase = _next(stage, phase, CONFIG)
        slot ^= 1
        item += gl.num_programs(0)
        batch, head, first, end, begin, num_head, num_full, num_edge = _load_item(items, item)


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
def _mask(scores, lo, hi, start, CONFIG: gl.constexpr):
    """Scores of a tile where the rows see its keys, -inf elsewhere."""
    KEYS: gl.constexpr = CONFIG.keys
    SCORES: gl.constexpr = CONFIG.scores
    return gl.where(visible(lo, hi, start, KEYS, SCORES), scores, float("-inf"))


@gluon.jit
def _by_thread(tile, COLUMNS: gl.constexpr):
    """An accumulator (64, COLUMNS) as (64, COLUMNS // 8, 4, 2), whose third dimension is the four threads that share a row.

    Sums and maxima over the others are numbers (64, 4) of each thread alone: no exchange between threads.
    """
    return tile.reshape([ROWS, COLUMNS // 8, 4, 2])


@gluon.jit
def _along_row(numbers, tile):
    """Numbers (64, 4) of rows and threads, to be broadcast over a tile from `_by_thread`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, tile.type.layout))
    return gl.convert_layout(numbers, LAYOUT).expand_dims(1).expand_dims(3)


@gluon.constexpr_function
def _rescale_assembly(count):
    # of four consecutive registers of an accumulator two belong to one row and two to another, all the way
    alphas = [f"${2 * count + i % 4 // 2 * 2}" for i in range(count)]
    products = "".join(f"mul.f32 ${i}, ${i}, {alpha};" for i, alpha in enumerate(alphas))
    return (
        "{ .reg .pred changed;"
        f"setp.neu.f32 changed, {alphas[0]}, 0f3F800000; setp.neu.or.f32 changed, {alphas[2]}, 0f3F800000, changed;"
        f"vote.sync.any.pred changed, changed, -1; @!changed bra DONE; {products} DONE: }}"
    )


@gluon.constexpr_function
def _rescale_constraints(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def _rescale(o, alpha, CONFIG: gl.constexpr):
    """o * alpha by row, which a warp skips if all its alphas are 1: they mostly are."""
    COUNT: gl.constexpr = CONFIG.dim // 2  # registers of a thread
    ASSEMBLY: gl.constexpr = _rescale_assembly(COUNT)
    CONSTRAINTS: gl.constexpr = _rescale_constraints(COUNT)
    tile = _by_thread(o, CONFIG.dim)
    factors = _along_row(alpha, tile) + gl.zeros_like(tile)
    tile = gl.inline_asm_elementwise(ASSEMBLY, CONSTRAINTS, [tile, factors], dtype=gl.float32, is_pure=True, pack=COUNT)
    return gl.convert_layout(tile.reshape([ROWS, CONFIG.dim]), CONFIG.output)


@gluon.constexpr_function
def _move_assembly():
    # two rows a thread: $0, $1 the new origins; $2, $3 the tops, $4, $5 the origins, $6, $7 the limits
    exchange, choose = "", ""
    for row in ("0", "1"):
        for lane in ("1", "2"):
            exchange += f"shfl.sync.bfly.b32 other, top{row}, {lane}, 31, -1; max.f32 top{row}, top{row}, other;"
    for new, top, old, limit in (("$0", "top0", "$4", "$6"), ("$1", "top1", "$5", "$7")):
        choose += f"setp.gt.f32 ahead, {top}, {limit}; selp.f32 {new}, {top}, {old}, ahead;"
    return (
        "{ .reg .pred ahead; .reg .f32 top0, top1, other;"
        "setp.gt.f32 ahead, $2, $6; setp.gt.or.f32 ahead, $3, $7, ahead; mov.f32 $0, $4; mov.f32 $1, $5;"
        "vote.sync.any.pred ahead, ahead, -1; @!ahead bra DONE;"
        f"mov.f32 top0, $2; mov.f32 top1, $3; {exchange} {choose} DONE: }}"
    )


@gluon.jit
def _move(origin, top):
    """The origin, or the largest top of a row's threads where that is ahead of it by more than SLACK.

    A warp that has no such row passes by the exchange between threads.
    """
    ASSEMBLY: gl.constexpr = _move_assembly()
    operands = [top, origin, origin + SLACK]
    return gl.inline_asm_elementwise(ASSEMBLY, "=&f,=&f,f,f,f,f,f,f", operands, dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def _softmax(scores, m, origin, l, log2_scale, CONFIG: gl.constexpr):
    """(p, m, origin, l, alpha) after the scores of a tile; p = exp2(score - origin) in log2 units.

    All but p are (64, 4), of a row and a thread: m and l are the maximum of its scores and the sum of its p. The origin is the
    same for the threads of a row and follows its maximum only when that is ahead by more than SLACK: until then alpha is 1.
    """
    tile = _by_thread(scores, CONFIG.keys)
    top = gl.max(gl.max(tile, axis=3), axis=1)
    m = gl.maximum(m, top)
    moved = _move(origin, top * log2_scale)
    # a row that has seen no key yet keeps origin = -inf: subtract 0 there, exp2(-inf - 0) = 0
    zero = gl.where(moved == float("-inf"), 0.0, moved)
    p = gl.exp2(tile * log2_scale - _along_row(zero, tile))
    alpha = gl.exp2(origin - zero)
    l = l * alpha + gl.sum(gl.sum(p, axis=3), axis=1)
    return gl.convert_layout(p.reshape([ROWS, CONFIG.keys]), CONFIG.scores), m, moved, l, alpha


@gluon.jit
def _hold(l, CONFIG: gl.constexpr):
    """`l`, but nothing that follows is started before it is there.

    The assembler moves waits for tensor cores up past the arithmetic that they should overlap with; past a thread's possible
    end it may not. No sum of probabilities is this NaN.
    """
    if CONFIG.hold:
        l = gl.inline_asm_elementwise(
            "{ .reg .pred never; setp.eq.u32 never, $1, 0x7fc0dead; @never exit; mov.b32 $0, $1; }",
            "=f,f", [l], dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    return l


@gluon.jit
def _step(
    query, buffers, barriers, carry, lo, hi, plan, step, log2_scale,
    CONSUMER: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Scores of the next tile while the last tile's p meets its values."""
    KEYS: gl.constexpr = CONFIG.keys
    SCORES: gl.constexpr = CONFIG.scores
    keys, values = buffers
    k_full, k_empty, v_full, v_empty = barriers
    p, m, origin, l, o, stage, phase, last_stage, last_phase = carry
    mbarrier.wait(k_full.index(stage), phase)
    _take_turn(CONSUMER, CONFIG)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(query, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(last_stage), last_phase)
    growing = warpgroup_mma(p, values.index(last_stage), o, is_async=True)
    _pass_turn(CONSUMER, CONFIG)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    _leave_keys(k_empty, stage, CONFIG)
    begin, num_head, num_full, num_edge = plan
    if step < num_edge:
        scores = _mask(scores, lo, hi, step_start(begin, num_head, num_full, num_edge, step, KEYS), CONFIG)
    weights, m, origin, l, alpha = _softmax(scores, m, origin, l, log2_scale, CONFIG)
    l = _hold(l, CONFIG)
    o = warpgroup_mma_wait(0, deps=(growing,))
    mbarrier.arrive(v_empty.index(last_stage), count=1)
    o = _rescale(o, alpha, CONFIG)
    # only now: before the wait the registers of the last p are still being read
    p = gl.convert_layout(weights.to(query.dtype), CONFIG.left)
    next_stage, next_phase = _next(stage, phase, CONFIG)
    return p, m, origin, l, o, next_stage, next_phase, stage, phase


@gluon.jit
def _first_step(
    query, keys, barriers, bounds, plan, stage, phase, log2_scale,
    CONSUMER: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """(p, m, origin, l, o) after the first tile of an item, which may lie past all keys, where nothing is seen at all."""
    KEYS: gl.constexpr = CONFIG.keys
    DIM: gl.constexpr = CONFIG.dim
    SCORES: gl.constexpr = CONFIG.scores
    OUTPUT: gl.constexpr = CONFIG.output
    k_full, k_empty, q_empty = barriers
    lo, hi = bounds
    mbarrier.wait(k_full.index(stage), phase)
    _take_turn(CONSUMER, CONFIG)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(query, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    _pass_turn(CONSUMER, CONFIG)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    # the last item's output has been read from the other slot by now
    tma.store_wait(0)
    _leave_keys(k_empty, stage, CONFIG)
    mbarrier.arrive(q_empty, count=1)
    begin, num_head, num_full, num_edge = plan
    if (num_edge > 0) | (num_full == 0):
        scores = _mask(scores, lo, hi, step_start(begin, num_head, num_full, num_edge, 0, KEYS), CONFIG)
    BY_THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, _by_thread(zeros, KEYS).type.layout))
    m = gl.full([ROWS, 4], float("-inf"), gl.float32, BY_THREAD)
    l = gl.zeros([ROWS, 4], gl.float32, BY_THREAD)
    weights, m, origin, l, alpha = _softmax(scores, m, m, l, log2_scale, CONFIG)
    p = gl.convert_layout(weights.to(query.dtype), CONFIG.left)
    o = gl.zeros([ROWS, DIM], gl.float32, OUTPUT)
    return p, m, origin, l, o


@gluon.jit
def _stand_by(flow, q_empty, num_steps, stage, phase, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """The stage and phase after an item of which a consumer has no row: it lets the others have its turns and all stages."""
    k_full, k_empty, v_full, v_empty = flow
    # the last item's output must have been read
    tma.store_wait(0)
    mbarrier.arrive(q_empty, count=1)
    for _step_index in range(gl.maximum(num_steps, 1)):
        mbarrier.wait(k_full.index(stage), phase)
        _take_turn(CONSUMER, CONFIG)
        _pass_turn(CONSUMER, CONFIG)
        _leave_keys(k_empty, stage, CONFIG)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        stage, phase = _next(stage, phase, CONFIG)
    return stage, phase


@gluon.jit
def _consumer_item(items, number, lo, hi, num_masks, num_queries, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Where a consumer's rows of an item are: (batch, head, own, end), the plan of its walk, the bounds of its rows."""
    batch, head, first, end, begin, num_head, num_full, num_edge = _load_item(items, number)
    own = first + CONSUMER * ROWS
    rows = own + gl.arange(0, ROWS, layout=gl.SliceLayout(1, CONFIG.scores))
    index = gl.minimum(batch, num_masks - 1) * num_queries + rows  # one mask may serve all
    row_lo = gl.load(lo + index, mask=rows < end, other=0)
    row_hi = gl.load(hi + index, mask=rows < end, other=0)
    return batch, head, own, end, begin, num_head, num_full, num_edge, row_lo, row_hi


@gluon.jit
def _consume(arguments, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """One computing partition: 64 rows of every item through all steps."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, CONFIG.scores)
    lo, hi, items, num_masks, num_queries, results, buffers, barriers, log2_scale = arguments
    queries, keys, values = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    tiles = keys, values
    flow = k_full, k_empty, v_full, v_empty
    if CONFIG.turns and CONSUMER == CONFIG.consumers - 1:
        named_barrier_arrive(FIRST_TURN, TURN_THREADS)
    item = gl.program_id(0)
    batch, head, own, end, begin, num_head, num_full, num_edge, row_lo, row_hi = _consumer_item(
        items, item, lo, hi, num_masks, num_queries, CONSUMER, CONFIG
    )
    slot = gl.to_tensor(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    while end > 0:
        mbarrier.wait(q_full, slot)
        if own < end:
            place = batch, head, own, end
            if CONFIG.has_state:
                _prefetch(results, place, num_queries, CONFIG)
            query = queries.index(slot * CONFIG.consumers + CONSUMER)
            plan = begin, num_head, num_full, num_edge
            p, m, origin, l, o = _first_step(
                query, keys, (k_full, k_empty, q_empty), (row_lo, row_hi), plan, stage, phase, log2_scale, CONSUMER, CONFIG
            )
            last_stage = stage
            last_phase = phase
            stage, phase = _next(stage, phase, CONFIG)
            for step in range(1, num_edge + num_full):
                carry = p, m, origin, l, o, stage, phase, last_stage, last_phase
                p, m, origin, l, o, stage, phase, last_stage, last_phase = _step(
                    query, tiles, flow, carry, row_lo, row_hi, plan, step, log2_scale, CONSUMER, CONFIG
                )
            mbarrier.wait(v_full.index(last_stage), last_phase)
            o = warpgroup_mma(p, values.index(last_stage), o, is_async=True)
            # the next item is looked up meanwhile
            item += gl.num_programs(0)
            batch, head, own, end, begin, num_head, num_full, num_edge, row_lo, row_hi = _consumer_item(
                items, item, lo, hi, num_masks, num_queries, CONSUMER, CONFIG
            )
            o = warpgroup_mma_wait(0, deps=(o,))
            mbarrier.arrive(v_empty.index(last_stage), count=1)
            m = gl.convert_layout(gl.max(m, axis=1), BY_ROW) * log2_scale
            l = gl.convert_layout(gl.sum(l, axis=1), BY_ROW)
            origin = gl.convert_layout(gl.max(origin, axis=1), BY_ROW)
            _finish(m, origin, l, o, query, results, place, num_queries, CONFIG)
        else:
            stage, phase = _stand_by(flow, q_empty, num_edge + num_full, stage, phase, CONSUMER, CONFIG)
            item += gl.num_programs(0)
            batch, head, own, end, begin, num_head, num_full, num_edge, row_lo, row_hi = _consumer_item(
                items, item, lo, hi, num_masks, num_queries, CONSUMER, CONFIG
            )
        slot ^= 1
    # the memory that the last output leaves from must stay until it has been read
    tma.store_wait(0)


@gluon.jit
def _prefetch(results, place, num_queries, CONFIG: gl.constexpr):
    """Have the o that came in brought to the L2 cache: it is read at the end, when nothing is left to hide that behind."""
    LINE: gl.constexpr = 32  # fp32 columns of a cache line
    LINES: gl.constexpr = CONFIG.dim // 32
    batch, head, own, end = place
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LINES, LINES], [4, 1], [1, 0])
    rows = gl.minimum(own + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), num_queries - 1)
    columns = gl.minimum(gl.arange(0, LINES, layout=gl.SliceLayout(0, LAYOUT)) * LINE, CONFIG.value_dim - 1)
    row_index = (batch.to(gl.int64) * num_queries + rows) * CONFIG.num_heads + head
    lines = results[2] + row_index[:, None] * CONFIG.value_dim + columns[None, :]
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _finish(m, origin, l, o, query, results, place, num_queries, CONFIG: gl.constexpr):
    """Merge the state that came in, and write the new state, or the output: by way of the query's shared memory if TMA can."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, CONFIG.scores)
    state_m, state_l, state_o, lse, out, out_tiles = results
    batch, head, own, end = place
    rows = own + gl.arange(0, ROWS, layout=BY_ROW)
    row_index = (batch.to(gl.int64) * num_queries + rows) * CONFIG.num_heads + head
    inside = rows < end
    columns = gl.arange(0, CONFIG.dim, layout=gl.SliceLayout(0, CONFIG.output))[None, :]
    index = gl.convert_layout(row_index, gl.SliceLayout(1, CONFIG.output))[:, None] * CONFIG.value_dim + columns
    mask = gl.convert_layout(inside, gl.SliceLayout(1, CONFIG.output))[:, None] & (columns < CONFIG.value_dim)
    if CONFIG.has_state:
        other_m = gl.load(state_m + row_index, mask=inside, other=float("-inf")) * LOG2_E
        m = gl.maximum(m, other_m)
    if CONFIG.has_state or not CONFIG.final:
        zero = gl.where(m == float("-inf"), 0.0, m)
        alpha = gl.exp2(origin - zero)
        l *= alpha
        o *= gl.convert_layout(alpha, gl.SliceLayout(1, CONFIG.output))[:, None]
        origin = m
    if CONFIG.has_state:
        beta = gl.exp2(other_m - zero)
        l += beta * gl.load(state_l + row_index, mask=inside, other=0.0)
        other_o = gl.load(state_o + index, mask=mask, other=0.0)
        o += other_o * gl.convert_layout(beta, gl.SliceLayout(1, CONFIG.output))[:, None]
    if CONFIG.final:
        factor = 1.0 / gl.where(l == 0.0, 1.0, l)
        o *= gl.convert_layout(factor, gl.SliceLayout(1, CONFIG.output))[:, None]
        gl.store(lse + row_index, (origin + gl.log2(l)) * LN_2, mask=inside)
        o = o.to(query.dtype)
        if own + ROWS <= end:
            query.store(o)
            fence_async_shared()
            tma_store(out_tiles, [batch, own, head, 0], tile_view(query, out_tiles))
        else:  # the rows that follow are another tile's
            gl.store(out + index, o, mask=mask)
    else:
        gl.store(state_m + row_index, m * LN_2, mask=inside)
        gl.store(state_l + row_index, l, mask=inside)
        gl.store(state_o + index, o, mask=mask)


@gluon.jit(do_not_specialize=["num_masks", "num_queries"])
def _forward_kernel(
    q, k, v, out_tiles, lo, hi, items, state_m, state_l, state_o, lse, out,
    num_masks, num_queries, log2_scale, CONFIG: gl.constexpr,
):  # fmt: skip
    MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.dim], q.dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    STAGES: gl.constexpr = CONFIG.stages
    queries = gl.allocate_shared_memory(q.dtype, [SLOTS * CONFIG.consumers, ROWS, CONFIG.dim], MATRIX)
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
    fence_async_shared()
    buffers = queries, keys, values
    if CONFIG.together:
        k_empty = v_empty
    barriers = q_full, q_empty, k_full, k_empty, v_full, v_empty
    loading = q, k, v, items, buffers, barriers
    results = state_m, state_l, state_o, lse, out, out_tiles
    computing = lo, hi, items, num_masks, num_queries, results, buffers, barriers, log2_scale
    # the first of them takes the registers that the others leave
    if CONFIG.consumers == 2:
        gl.warp_specialize(
            [
                (_consume, (computing, 0, CONFIG)),
                (_consume, (computing, 1, CONFIG)),
                (_produce, (loading, CONFIG)),
            ],
            [4, 1],
            [CONFIG.registers, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (computing, 0, CONFIG)),
                (_consume, (computing, 1, CONFIG)),
                (_consume, (computing, 2, CONFIG)),
                (_produce, (loading, CONFIG)),
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
    crowded: bool = False,
) -> State | tuple[Tensor, Tensor]:
    """As `kernels.forward.forward`, for fp16 and bf16 and head dims that are multiples of 8 up to 128.

    Work is dealt out evenly to one program a processor, before they start. Where that is `crowded`, as other kernels may hold
    processors meanwhile, every item has a program of its own: one that starts late then delays nothing but itself.

    Raises:
        ValueError: what `kernels.forward.forward` refuses, and what `kernels.hopper.refusal` says; dropout, blocks.
    """
    checks.check_inputs(q, k, v, intervals, scale)
    checks.check_options(q, k, dropout, blocks, precision)
    hopper.check(q, v, dropout, blocks)
    if state is not None:
        checks.check_state(state, q, v)
    m, l, o, out, lse = tiles.allocate_results(q, v, state, final)
    if q.numel() > 0:
        _launch(q, k, v, intervals, scale, (m, l, o, out, lse), state is not None, crowded)
    return (out, lse) if final else (m, l, o)


@lru_cache(maxsize=256)
def _configure(
    head_dim: int, value_dim: int, num_heads: int, num_key_heads: int, has_state: bool, final: bool, few: bool
) -> Config:
    dim, tiles = hopper.padded_dim(head_dim, value_dim), TILES_OF_FEW if few else TILES
    return Config(dim, value_dim, num_heads, num_heads // num_key_heads, has_state, final, **tiles[dim])


def _launch(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float, results: tuple, has_state: bool, crowded: bool
) -> None:  # fmt: skip
    """Run the kernel on checked inputs; `results` are (m, l, o, out, lse), None where not wanted."""
    (batch, num_queries, num_heads, head_dim), (num_keys, num_key_heads, value_dim) = q.shape, v.shape[1:]
    m, l, o, out, lse = results
    few = intervals.num_seeing * (batch // intervals.batch) * num_heads <= FEW_ROWS
    config = _configure(head_dim, value_dim, num_heads, num_key_heads, has_state, out is not None, few)
    q, k, v = [hopper.as_strided_rows(x) for x in (q, k, v)]
    blocks = ((q, ROWS.value), (k, config.keys), (v, config.keys), (out, ROWS.value))
    descriptors = [None if x is None else hopper.describe(x, rows, config.dim) for x, rows in blocks]
    heads_in_cache = max(1, L2_BYTES // (num_keys * (head_dim + value_dim) * q.element_size())) * config.group
    sections = -(-num_heads * batch // heads_in_cache)
    programs = hopper.num_programs(q.device, crowded)
    # rows that see nothing leave a state as it is
    seeing = has_state and out is None
    items = intervals.items(config.queries, config.keys, batch, num_heads, sections, programs, seeing)
    with torch.cuda.device_of(q):
        launch(
            _forward_kernel, items.shape[1], (*descriptors, intervals.lo, intervals.hi, items, m, l, o, lse, out),
            (intervals.batch, num_queries, float(scale) * LOG2_E.value), CONFIG=config,
        )  # fmt: skip
