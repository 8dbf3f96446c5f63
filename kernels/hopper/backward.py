"""Hopper backward: the contract of `ringattn.kernels.reference.backward` for sm_90, in Gluon.

Three launches: `_prepare_kernel` packs the rows' scalars, computing delta unless it is given, and clears the sums of dq;
`_main_kernel` computes dk and dv and adds up dq; `_finish_kernel` puts dq in order. Over several blocks of keys, as a ring
brings them, the first and the last launch surround all of them (`BlockwiseBackward`).

One program a processor of the main kernel works off the items that `Intervals.items` deals out to it: up to 128 keys of one key
head, walked over by the query tiles that see them, for every query head of the group in turn. One warp, the producer, moves
tiles by TMA; the other partitions, two consumers, are warpgroups that hold the dk and dv of 64 keys each in registers. A step
is one query tile, scores are transposed, (keys, queries):

    producer     for every step Q with its rows' scalars, and dO, into the next stage once both consumers left it; with the
                 first of an item its K, into the slot that the item before the last had, and its V
    consumers    S = K Q^T, dP = V dO^T                     of their own keys
                 P = exp2(S - lse), dS = P (dP - delta)     in registers; dS also goes to shared memory
                 dV += P dO, dK += dS Q                     of their own keys, the left operands from registers
                 dQ = dS^T K                                over all 128 keys: a half of its columns, or of its rows, each

    barriers     q_full, dout_full and empty of each stage, whose phases run on from item to item

dQ is that of the step before: no consumer waits for the other's dS of this step. That the other is done with the step before,
which `empty` of that step's stage says, is all that consumers ask each other: its dS is written then, and that of one step
earlier, whose memory this step's takes, is read.

So the first step of an item multiplies what the last item's left, with the keys of that: hence two slots of K. K and V arrive
with the first Q and dO of their item, and no barrier is theirs alone: all count the steps of all items as if they were one. The
very first step multiplies whatever the memory holds, and sends it to a spare chunk; one product is left for the end.

dQ is summed over programs in fp32 by TMA's reduce-add, in the order in which registers hold it, which shared memory, whose
bandwidth bounds this kernel, takes without bank conflicts. All products of a step end within it: one in flight across the
loop's end would make ptxas serialise them all.
(Dao 2023, algorithm 2; Shah et al. 2024, FlashAttention-3, section 3.)
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringattn.kernels import validation
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper.common import LOG2_E, ROWS, tile_view, tma_load, tma_reduce_add
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import Delta, Gradients
from ringattn.kernels.triton import common as triton_common
from ringattn.kernels.triton.common import load_tile
from ringattn.kernels.triton.launcher import launch

KEYS = gl.constexpr(128)  # of an item
STAGES = gl.constexpr(2)
SLOTS = gl.constexpr(2)  # of K, in which the keys of two items in a row lie
NO_ROW = gl.constexpr(2**30)  # a query row past all others
SPARE = gl.constexpr(0)  # a chunk before those of dQ, which nobody reads
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)
SCALARS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def query_tile(dim: int) -> int:
    """Query rows of a step, by padded head dim."""
    return 64 if dim == 128 else 128


@dataclass(frozen=True)
class Config:
    """What the kernels are compiled for."""

    dim: int  # of the tiles, 64 or 128; head dims are padded to it
    head_dim: int
    value_dim: int
    num_heads: int
    group: int  # query heads a key head
    add_dq: bool  # into an accumulator, or write
    add_dk: bool
    add_dv: bool

    @property
    def num_key_heads(self) -> int:
        return self.num_heads // self.group

    @property
    def queries(self) -> int:
        """Query rows of a step."""
        return query_tile(self.dim)

    @property
    def columns(self) -> int:
        """Of a consumer's chunk (64, columns) of a step's dQ, which is split by columns or, if it has 128 rows, by rows."""
        return self.dim * self.queries // KEYS.value

    @property
    def scores(self) -> gl.NVMMADistributedLayout:
        """Layout of a consumer's transposed scores (64, queries)."""
        return _accumulator(self.queries)

    @property
    def grads(self) -> gl.NVMMADistributedLayout:
        """Layout of a consumer's dk and dv (64, dim)."""
        return _accumulator(self.dim)

    @property
    def left(self) -> gl.DotOperandLayout:
        """Layout of p and ds (64, queries) as left operands of the products for dv and dk."""
        return gl.DotOperandLayout(operand_index=0, parent=self.grads, k_width=2)

    @property
    def chunk_size(self) -> int:
        """Numbers of a chunk."""
        return ROWS.value * self.columns

    @property
    def chunk(self) -> gl.NVMMADistributedLayout:
        """Layout of a chunk of dQ as the products leave it."""
        return _accumulator(self.columns)

    @property
    def staged_chunk(self) -> gl.SharedLinearLayout:
        """Layout of a chunk of dQ in shared memory: in the order in which a warpgroup's registers hold it.

        A thread's four values of every 8 columns are 16 bytes, and the next thread's follow: stores meet no bank conflict.
        Low bits of the thread are exclusive-ored as in the 128-byte swizzle, which TMA undoes on the way to global memory.
        """
        order = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0]]
        order += [[0, 8 << i] for i in range((self.columns // 8).bit_length() - 1)]
        swizzled = [[a ^ b for a, b in zip(order[5 + i], order[2 + i], strict=True)] for i in range(3)]
        return gl.SharedLinearLayout(order[:5] + swizzled + order[8:], [], 1024)


def _accumulator(columns: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@triton.jit(do_not_specialize=["num_tiles", "num_queries"])
def _prepare_kernel(lse, delta, out, dout, dlse, scalars, dq_sums, num_tiles, num_queries, CONFIG: tl.constexpr):
    """For one query tile of one head: lse in log2 units, delta, and zeros for the sums of dq, which follow a spare chunk.

    Rows that see nothing, or do not exist, get lse = inf: exp2(s - inf) is 0 for whatever finite s.
    """
    program = tl.program_id(0)
    tile, pair = program % num_tiles, program // num_tiles
    head, batch = pair % CONFIG.num_heads, pair // CONFIG.num_heads
    QUERIES: tl.constexpr = CONFIG.queries
    SIZE: tl.constexpr = CONFIG.queries * CONFIG.dim
    rows = tl.arange(0, QUERIES)
    index = (batch.to(tl.int64) * num_queries + tile * QUERIES + rows) * CONFIG.num_heads + head
    inside = tile * QUERIES + rows < num_queries
    this = program.to(tl.int64)
    row_lse = tl.load(lse + index, mask=inside, other=float("-inf"))
    if delta is None:
        outputs = triton_common.load_outputs(out, dout, index, inside, CONFIG.value_dim, CONFIG.dim)
    # while what was asked for is on its way
    tl.store(dq_sums + CONFIG.chunk_size + this * SIZE + tl.arange(0, SIZE), tl.zeros([SIZE], tl.float32))
    if delta is None:
        row_delta = triton_common.row_delta(outputs, dlse, index, inside)
    else:
        row_delta = tl.load(delta + index, mask=inside, other=0.0)
    tl.store(scalars + this * (2 * QUERIES) + rows, tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E))
    tl.store(scalars + this * (2 * QUERIES) + QUERIES + rows, row_delta)


@gluon.jit
def _load_item(items, turn, CONFIG: gl.constexpr):
    """(batch, key head, first key, end of the keys, first query tile, number of steps) of item number `turn` of this program.

    The end of the keys is 0 after the last. Every partition asks for itself, the producer first: what a partition is handed
    arrives through shared memory.
    """
    row = items + (turn * gl.num_programs(0) + gl.program_id(0)) * 8
    first, end, begin, num_masked_prefix, num_unmasked, num_masked = load_tile(row)
    head, batch = gl.load(row + 6), gl.load(row + 7)
    num_steps = gl.maximum(num_unmasked + num_masked, 1)  # it is never 0: the loops need no test
    return batch, head, first, end, begin // CONFIG.queries, num_steps


@gluon.jit
def _wait_for_last_step(empty, stage, phase):
    """Wait until both consumers are done with the step before the one that (stage, phase) stand for."""
    mbarrier.wait(empty.index(stage ^ 1), phase ^ 1 ^ stage)


@gluon.jit
def _expect(full, BYTES: gl.constexpr, MORE: gl.constexpr, more):
    """Announce BYTES, and MORE if so."""
    mbarrier.expect(full, BYTES, pred=~more)
    mbarrier.expect(full, BYTES + MORE, pred=more)


@gluon.jit
def _load_halves(tensor, coordinates, tiles, slot, full):
    """Load the keys, or values, of both consumers."""
    batch, first, head = coordinates
    for half in gl.static_range(2):
        tma_load(tensor, [batch, first + half * ROWS, head, 0], full, tile_view(tiles.index(slot + half), tensor))


@gluon.jit
def _produce(arguments, CONFIG: gl.constexpr):
    """The loading partition, a single warp."""
    QUERIES: gl.constexpr = CONFIG.queries
    GROUP: gl.constexpr = CONFIG.group
    q, k, v, dout, scalars, items, num_tiles, buffers, barriers = arguments
    queries, douts, rows, keys, values, ds_tiles, chunks = buffers
    q_full, dout_full, empty = barriers
    turn = gl.to_tensor(0)
    batch, key_head, first, end, begin, num_steps = _load_item(items, turn, CONFIG)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    last_steps = gl.to_tensor(0)  # of the last item
    while end > 0:
        place = batch, first, key_head
        for member in range(GROUP):
            head = key_head * GROUP + member
            row = begin * QUERIES
            packed = ((batch * CONFIG.num_heads + head) * num_tiles + begin) * (2 * QUERIES)
            for step in range(num_steps):
                opens = (member == 0) & (step == 0)
                mbarrier.wait(empty.index(stage), phase ^ 1)
                _expect(q_full.index(stage), q.block_type.nbytes + scalars.block_type.nbytes, 2 * k.block_type.nbytes, opens)
                tma_load(q, [batch, row, head, 0], q_full.index(stage), tile_view(queries.index(stage), q))
                tma_load(scalars, [packed], q_full.index(stage), rows.index(stage))
                if opens:
                    # the slot was last read in the first step of the last item
                    if last_steps == 1:
                        _wait_for_last_step(empty, stage, phase)
                    _load_halves(k, place, keys, (turn & 1) * 2, q_full.index(stage))
                _expect(dout_full.index(stage), dout.block_type.nbytes, 2 * v.block_type.nbytes, opens)
                tma_load(dout, [batch, row, head, 0], dout_full.index(stage), tile_view(douts.index(stage), dout))
                if opens:
                    _wait_for_last_step(empty, stage, phase)
                    _load_halves(v, place, values, 0, dout_full.index(stage))
                stage ^= 1
                if stage == 0:
                    phase ^= 1
                row += QUERIES
                packed += 2 * QUERIES
        last_steps = num_steps * GROUP
        turn += 1
        batch, key_head, first, end, begin, num_steps = _load_item(items, turn, CONFIG)


@gluon.jit
def _probabilities(scores, lse, view, start, log2_scale, CONFIG: gl.constexpr):
    """exp2(scores - lse), transposed, 0 where hidden. Intervals are looked at only if some key does not see the whole tile."""
    QUERIES: gl.constexpr = CONFIG.queries
    SCORES: gl.constexpr = CONFIG.scores
    query_lo, query_hi, num_own, first_full, last_full = view
    if (start < first_full) | (start > last_full):
        keys = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
        row = start + gl.arange(0, QUERIES, layout=gl.SliceLayout(0, SCORES))[None, :]
        lo = gl.load(query_lo + keys, mask=keys < num_own, other=NO_ROW)[:, None]
        hi = gl.load(query_hi + keys, mask=keys < num_own, other=0)[:, None]
        scores = gl.where((lo <= row) & (row < hi), scores, float("-inf"))
    return gl.exp2(scores * log2_scale - lse[None, :])


@gluon.jit
def _view(item, bounds, sizes, HALF: gl.constexpr, CONFIG: gl.constexpr):
    """What `_probabilities` is to know of a consumer's keys of an item.

    Where their bounds are, how many there are, first and last row from which on all of them see a whole query tile: from none
    if keys are missing.
    """
    batch, key_head, first, end, begin, num_steps = item
    query_lo, query_hi = bounds
    num_masks, num_tiles, num_keys = sizes
    own = first + HALF * ROWS
    offset = gl.minimum(batch, num_masks - 1) * num_keys + own  # one mask may serve all
    whole = own + ROWS <= end
    first_full = gl.load(query_lo + offset + ROWS - 1, mask=whole, other=0)
    last_full = gl.load(query_hi + offset, mask=whole, other=0) - CONFIG.queries
    return query_lo + offset, query_hi + offset, end - own, first_full, last_full


@gluon.jit
def _opaque_zero():
    """0, unknown to the compiler: what is indexed by it is not hoisted out of a loop, as a constant index would be."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _multiply_keys(ds_tiles, keys, stage, slot, of, grad_q, ADD: gl.constexpr, HALF: gl.constexpr, CONFIG: gl.constexpr):
    """Issue grad_q (+)= dS^T K over the keys of consumer `of`, for the chunk of dQ that falls to consumer HALF."""
    COLUMNS: gl.constexpr = CONFIG.columns
    ds, key = ds_tiles.index(2 * stage + of), keys.index(slot + of)
    if CONFIG.queries == KEYS:
        ds = ds.slice(HALF * ROWS, ROWS, dim=1)
    else:
        key = key.slice(HALF * COLUMNS, COLUMNS, dim=1)
    return warpgroup_mma(ds.permute((1, 0)), key, grad_q, use_acc=ADD, is_async=True)


@gluon.jit
def _multiply_all_keys(ds_tiles, keys, stage, slot, HALF: gl.constexpr, CONFIG: gl.constexpr):
    """Issue dQ = dS^T K of the step that filled `stage`, with the keys in `slot`, for the chunk that falls to consumer HALF."""
    COLUMNS: gl.constexpr = CONFIG.columns
    CHUNK: gl.constexpr = CONFIG.chunk
    own = HALF + _opaque_zero()  # or where to find the keys would be kept in registers from step to step
    grad_q = gl.zeros([ROWS, COLUMNS], gl.float32, CHUNK)
    grad_q = _multiply_keys(ds_tiles, keys, stage, slot, own, grad_q, False, HALF, CONFIG)
    return _multiply_keys(ds_tiles, keys, stage, slot, 1 - own, grad_q, True, HALF, CONFIG)


@gluon.jit
def _send(grad_q, staged, dq_sums, chunk, CONFIG: gl.constexpr):
    """Add a chunk of dQ to its sums, by way of shared memory, which must be free."""
    staged.store(grad_q)
    fence_async_shared()
    tma_reduce_add(dq_sums, [chunk * (2 * CONFIG.columns), 0], tile_view(staged, dq_sums))


@gluon.jit
def _step(
    grad_k, grad_v, dq_sums, view, start, slot, last_chunk, last_slot, buffers, barriers, stage, phase, log2_scale,
    HALF: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """grad_k and grad_v after one query tile. The dQ sent off is that of the step before, to which both consumers gave dS."""
    QUERIES: gl.constexpr = CONFIG.queries
    SCORES: gl.constexpr = CONFIG.scores
    LEFT: gl.constexpr = CONFIG.left
    BY_QUERY: gl.constexpr = gl.SliceLayout(0, SCORES)
    queries, douts, rows, keys, values, ds_tiles, chunks = buffers
    q_full, dout_full, empty = barriers
    query, dout = queries.index(stage), douts.index(stage)
    zeros = gl.zeros([ROWS, QUERIES], gl.float32, SCORES)
    mbarrier.wait(q_full.index(stage), phase)
    scores = warpgroup_mma(keys.index(slot + HALF + _opaque_zero()), query.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(dout_full.index(stage), phase)
    dp = warpgroup_mma(values.index(HALF + _opaque_zero()), dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    lse = rows.index(stage).slice(0, QUERIES).load(BY_QUERY)
    p = _probabilities(scores, lse, view, start, log2_scale, CONFIG)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    delta = rows.index(stage).slice(QUERIES, QUERIES).load(BY_QUERY)
    ds = (p * (dp - delta[None, :])).to(query.dtype)
    grad_v = warpgroup_mma(gl.convert_layout(p.to(query.dtype), LEFT), dout, grad_v, is_async=True)
    _wait_for_last_step(empty, stage, phase)
    ds_tiles.index(2 * stage + HALF).store(ds)
    fence_async_shared()
    # the last chunk is long read: asked here, one barrier of the warpgroup's threads serves this and dS
    tma.store_wait(0)
    grad_q = _multiply_all_keys(ds_tiles, keys, stage ^ 1, last_slot, HALF, CONFIG)
    grad_k = warpgroup_mma(gl.convert_layout(ds, LEFT), query, grad_k, is_async=True)
    # dQ leaves while dK is computed
    grad_v, grad_q = warpgroup_mma_wait(1, deps=(grad_v, grad_q))
    _send(grad_q, chunks.index(HALF), dq_sums, last_chunk, CONFIG)
    grad_k = warpgroup_mma_wait(0, deps=(grad_k,))
    mbarrier.arrive(empty.index(stage), count=1)
    return grad_k, grad_v


@gluon.jit
def _walk(
    item, view, num_tiles, dq_sums, slot, last_chunk, last_slot, buffers, barriers, stage, phase, log2_scale,
    HALF: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """(grad_k, grad_v, chunk of the last dQ, which is still to come, slot of its keys, next stage, its phase) after an item.

    `slot`: of the item's own keys.
    """
    DIM: gl.constexpr = CONFIG.dim
    GRADS: gl.constexpr = CONFIG.grads
    GROUP: gl.constexpr = CONFIG.group
    QUERIES: gl.constexpr = CONFIG.queries
    batch, key_head, first, end, begin, num_steps = item
    grad_k = gl.zeros([ROWS, DIM], gl.float32, GRADS)
    grad_v = gl.zeros([ROWS, DIM], gl.float32, GRADS)
    first_chunk = ((batch * CONFIG.num_heads + key_head * GROUP) * num_tiles + begin) * 2 + HALF + SPARE + 1
    # a count that the compiler knows would cost some instructions a step
    for _member in range(GROUP + _opaque_zero()):
        start = begin * QUERIES
        chunk = first_chunk + 0  # a plain second name would not be carried round the loop
        for _step_index in range(num_steps):
            grad_k, grad_v = _step(
                grad_k, grad_v, dq_sums, view, start, slot, last_chunk, last_slot, buffers, barriers, stage, phase, log2_scale,
                HALF, CONFIG,
            )  # fmt: skip
            last_chunk = chunk + 0
            last_slot = slot + 0
            stage ^= 1
            if stage == 0:
                phase ^= 1
            start += QUERIES
            chunk += 2
        first_chunk += 2 * num_tiles
    return grad_k, grad_v, last_chunk, last_slot, stage, phase


@gluon.jit
def _consume(arguments, HALF: gl.constexpr, CONFIG: gl.constexpr):
    """One computing partition: 64 keys of every item through all steps."""
    bounds, items, sizes, dq_sums, dk, dv, scale, buffers, barriers = arguments
    num_masks, num_tiles, num_keys = sizes
    queries, douts, rows, keys, values, ds_tiles, chunks = buffers
    q_full, dout_full, empty = barriers
    log2_scale = scale * LOG2_E
    turn = gl.to_tensor(0)
    item = _load_item(items, turn, CONFIG)
    view = _view(item, bounds, sizes, HALF, CONFIG)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    last_chunk = gl.to_tensor(SPARE)
    last_slot = gl.to_tensor(0)
    while item[3] > 0:
        grad_k, grad_v, last_chunk, last_slot, stage, phase = _walk(
            item, view, num_tiles, dq_sums, (turn & 1) * 2, last_chunk, last_slot, buffers, barriers, stage, phase, log2_scale,
            HALF, CONFIG,
        )  # fmt: skip
        # asked for anew, these four take no registers from the steps
        batch, key_head, first, end, _, _ = _load_item(items, turn, CONFIG)
        place = batch, key_head, first + HALF * ROWS, end
        turn += 1
        item = _load_item(items, turn, CONFIG)
        view = _view(item, bounds, sizes, HALF, CONFIG)
        tma.store_wait(0)
        _put_rows(dv, grad_v, chunks.index(HALF), place, num_keys, CONFIG.value_dim, CONFIG.add_dv, CONFIG)
        _put_rows(dk, grad_k * scale, chunks.index(HALF), place, num_keys, CONFIG.head_dim, CONFIG.add_dk, CONFIG)
    _wait_for_last_step(empty, stage, phase)
    grad_q = _multiply_all_keys(ds_tiles, keys, stage ^ 1, last_slot, HALF, CONFIG)
    grad_q = warpgroup_mma_wait(0, deps=(grad_q,))
    tma.store_wait(0)
    _send(grad_q, chunks.index(HALF), dq_sums, last_chunk, CONFIG)
    tma.store_wait(0)  # the last chunk of dQ is read from shared memory, which ends with the program


@gluon.jit
def _put_rows(grads, tile, staged, place, num_keys, COLUMNS: gl.constexpr, ADD: gl.constexpr, CONFIG: gl.constexpr):
    """Write the rows of `tile` that the item has to its head of the contiguous (B, num_keys, heads, COLUMNS), or ADD them.

    What is not fp32 goes by way of `staged`, shared memory that must be free.
    """
    batch, key_head, own, end = place
    base = grads + ((batch * num_keys + own).to(gl.int64) * CONFIG.num_key_heads + key_head) * COLUMNS
    dtype: gl.constexpr = base.dtype.element_ty
    DIM: gl.constexpr = CONFIG.dim
    WHOLE_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    # four lanes of an accumulator hold 8 columns: in fp32 a whole sector of memory, in 16 bits half of one
    GRADS: gl.constexpr = CONFIG.grads
    STORED: gl.constexpr = GRADS if dtype == gl.float32 else WHOLE_ROWS
    tile = tile.to(dtype)
    if dtype != gl.float32:
        MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], dtype)
        # all of the chunk's memory, of which the rows take a half if DIM is 64
        in_order = hopper_common.reinterpret(staged, dtype, [2 * ROWS * CONFIG.columns // DIM, DIM], MATRIX).slice(0, ROWS)
        in_order.store(tile)
        tile = in_order.load(STORED)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))
    columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, STORED))
    pointers = base + rows.to(gl.int64)[:, None] * (CONFIG.num_key_heads * COLUMNS) + columns[None, :]
    mask = (rows < end - own)[:, None] & (columns < COLUMNS)[None, :]
    if ADD:
        tile += gl.load(pointers, mask=mask, other=0.0)
    gl.store(pointers, tile, mask=mask)


@gluon.jit(do_not_specialize=["num_masks", "num_tiles", "num_keys"])
def _main_kernel(
    q, k, v, dout, scalars, dq_sums, dk, dv, query_lo, query_hi, items,
    num_masks, num_tiles, num_keys, scale, CONFIG: gl.constexpr,
):  # fmt: skip
    DIM: gl.constexpr = CONFIG.dim
    QUERIES: gl.constexpr = CONFIG.queries
    COLUMNS: gl.constexpr = CONFIG.columns
    MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], q.dtype)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, QUERIES], q.dtype)
    STAGED: gl.constexpr = CONFIG.staged_chunk
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(q.dtype, [STAGES, QUERIES, DIM], MATRIX)
    douts = gl.allocate_shared_memory(q.dtype, [STAGES, QUERIES, DIM], MATRIX)
    rows = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * QUERIES], scalars.layout)
    keys = gl.allocate_shared_memory(q.dtype, [2 * SLOTS, ROWS, DIM], MATRIX)
    values = gl.allocate_shared_memory(q.dtype, [2, ROWS, DIM], MATRIX)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [2 * STAGES, ROWS, QUERIES], DS)
    chunks = gl.allocate_shared_memory(gl.float32, [2, ROWS, COLUMNS], STAGED)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dout_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    # constants stay out of these: a tuple in a variable turns them into tensors
    sizes = num_masks, num_tiles, num_keys
    buffers = queries, douts, rows, keys, values, ds_tiles, chunks
    barriers = q_full, dout_full, empty
    loading = q, k, v, dout, scalars, items, num_tiles, buffers, barriers
    computing = (query_lo, query_hi), items, sizes, dq_sums, dk, dv, scale, buffers, barriers
    gl.warp_specialize(
        [(_consume, (computing, 0, CONFIG)), (_consume, (computing, 1, CONFIG)), (_produce, (loading, CONFIG))],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@triton.jit
def _in_rows(flat, COLUMNS: tl.constexpr):
    """A chunk of dq out of the order of registers, which is (8 columns, warp, lane // 4, lane % 4, 8 rows, 2 columns)."""
    tile = tl.reshape(flat, (COLUMNS // 8, 4, 8, 4, 2, 2))
    return tl.reshape(tl.permute(tile, (1, 4, 2, 0, 3, 5)), (ROWS, COLUMNS))


@triton.jit(do_not_specialize=["num_tiles", "num_queries"])
def _finish_kernel(dq_sums, dq, num_tiles, num_queries, scale, CONFIG: tl.constexpr):
    """One chunk of dq: in order, scaled, and written or added."""
    COLUMNS: tl.constexpr = CONFIG.columns
    QUERIES: tl.constexpr = CONFIG.queries
    NUM_HEADS: tl.constexpr = CONFIG.num_heads
    chunk = tl.program_id(0).to(tl.int64)
    flat = tl.load(dq_sums + (SPARE + 1 + chunk) * (ROWS * COLUMNS) + tl.arange(0, ROWS * COLUMNS))
    half, tile, pair = chunk % 2, chunk // 2 % num_tiles, chunk // 2 // num_tiles
    rows = tile * QUERIES + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    if QUERIES == KEYS:
        rows += half * ROWS
    else:
        columns += (half * COLUMNS).to(tl.int32)
    index = ((pair // NUM_HEADS * num_queries + rows) * NUM_HEADS + pair % NUM_HEADS)[:, None] * CONFIG.head_dim
    index += columns[None, :]
    mask = (rows < num_queries)[:, None] & (columns < CONFIG.head_dim)[None, :]
    grad = _in_rows(flat, COLUMNS) * scale
    if CONFIG.add_dq:
        grad += tl.load(dq + index, mask=mask, other=0.0)
    tl.store(dq + index, grad.to(dq.dtype.element_ty), mask=mask)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Delta,
    intervals: Intervals,
    scale: float,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    *,
    grad_dtype: torch.dtype | None = None,
    dropout: Dropout | None = None,
    blocks: BlockMask | None = None,
    precision: str = "ieee",
    shares_sms: bool = False,
) -> Gradients:
    """As `ringattn.kernels.triton.backward.backward`, for fp16 and bf16 and head dims that are multiples of 8 up to 128.

    dk and dv are the same bits in every run; dq is summed in no fixed order and may differ in the last bits of fp32. `delta`
    may also be (out, dlse), of which `row_delta` would make it: that saves a launch. `shares_sms` as in `ringattn.kernels.hopper.forward`.

    Raises:
        ValueError: what `ringattn.kernels.triton.backward.backward` refuses, and what `ringattn.kernels.hopper.common.refusal` says; dropout, blocks.
    """
    validation.check_inputs(q, k, v, intervals, scale)
    hopper_common.check(q, v, dropout, blocks)
    validation.check_options(q, k, None, None, precision)
    given = dq, dk, dv
    validation.check_gradients(q, k, v, dout, lse, delta, given, grad_dtype)
    grads = triton_common.allocate_gradients(q, k, v, given, grad_dtype)
    if q.numel() > 0 and k.numel() > 0:
        config = _configure(q.shape[3], v.shape[3], q.shape[2], k.shape[2], tuple(x is not None for x in given))
        with torch.cuda.device_of(q):
            sums = _prepare(q, dout, lse, delta, config)
            _add_block(q, k, v, dout, sums, intervals, float(scale), grads[1:], config, shares_sms)
            _finish(sums[1], grads[0], float(scale), config)
    return grads


class BlockwiseBackward:
    """As `ringattn.kernels.dispatch.BlockwiseBackward`: rows are prepared once, before the first block, and dq finished once."""

    def __init__(
        self,
        q: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Delta,
        scale: float,
        precision: str = "ieee",
        shares_sms: bool = False,
    ) -> None:
        self.rows, self.scale, self.precision, self.shares_sms = (q, dout, lse, delta), float(scale), precision, shares_sms
        self._sums: tuple[Tensor, Tensor] | None = None
        self._config: Config | None = None

    def add(
        self,
        k: Tensor,
        v: Tensor,
        intervals: Intervals,
        dk: Tensor | None = None,
        dv: Tensor | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor]:
        q, dout, lse, delta = self.rows
        validation.check_inputs(q, k, v, intervals, self.scale)
        hopper_common.check(q, v, dropout, None)
        validation.check_options(q, k, None, None, self.precision)
        validation.check_gradients(q, k, v, dout, lse, delta, (None, dk, dv), torch.float32)
        add = False, dk is not None, dv is not None
        config = _configure(q.shape[3], v.shape[3], q.shape[2], k.shape[2], add)
        _, dk, dv = triton_common.allocate_gradients(q, k, v, (q, dk, dv), torch.float32)
        with torch.cuda.device_of(q):
            if self._sums is None:
                self._sums, self._config = _prepare(q, dout, lse, delta, config), config
            _add_block(q, k, v, dout, self._sums, intervals, self.scale, (dk, dv), config, self.shares_sms)
        return dk, dv

    def finish(self) -> Tensor:
        q = self.rows[0]
        if self._sums is None:
            return torch.zeros_like(q)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        with torch.cuda.device_of(q):
            _finish(self._sums[1], dq, self.scale, self._config)
        return dq


@lru_cache(maxsize=256)
def _describe_scratch(num_pairs: int, config: Config) -> tuple[TensorDescriptor, TensorDescriptor]:
    """How TMA reads the scalars of a query tile, and adds a chunk of dq; of no tensors yet."""
    nowhere, block = torch.empty(1, device="cpu"), (2 * config.columns, 32)
    num_rows = (config.chunk_size + num_pairs * config.queries * config.dim) // 32
    return (
        TensorDescriptor(nowhere, [num_pairs * 2 * config.queries], [1], [2 * config.queries], SCALARS_LAYOUT),
        TensorDescriptor(nowhere, [num_rows, 32], [32, 1], list(block), hopper_common.shared_layout(block, torch.float32)),
    )


@lru_cache(maxsize=256)
def _configure(head_dim: int, value_dim: int, num_heads: int, num_key_heads: int, add: tuple[bool, bool, bool]) -> Config:
    dim = hopper_common.padded_dim(head_dim, value_dim)
    return Config(dim, head_dim, value_dim, num_heads, num_heads // num_key_heads, *add)


def _section(num_queries: int) -> int:
    """How many heads take turns at each block of keys, at most.

    Short sequences balance better with many, and their sums of dq stay in the L2 cache; long ones are even, and do not.
    """
    return 32768 // num_queries if num_queries <= 8192 else 1


def _prepare(q: Tensor, dout: Tensor, lse: Tensor, delta: Delta, config: Config) -> tuple[Tensor, Tensor]:
    """(scalars of the rows, a spare chunk and the sums of dq), as the main kernel takes them; the sums are zero."""
    batch, num_queries, num_heads, _ = q.shape
    num_tiles = -(-num_queries // config.queries)
    num_pairs = batch * num_heads * num_tiles  # of a head and a query tile
    scalars = lse.new_empty(num_pairs * 2 * config.queries)
    dq_sums = lse.new_empty(config.chunk_size + num_pairs * config.queries * config.dim)
    rows = (lse, None, delta[0], dout, delta[1]) if isinstance(delta, tuple) else (lse, delta, None, None, None)
    rows = [x if x is None else x.contiguous() for x in rows]
    launch(
        _prepare_kernel, num_pairs, (*rows, scalars, dq_sums),
        (num_tiles, num_queries), CONFIG=config,
    )  # fmt: skip
    return scalars, dq_sums


def _add_block(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, sums: tuple[Tensor, Tensor], intervals: Intervals, scale: float,
    grads: tuple[Tensor, Tensor], config: Config, shares_sms: bool,
) -> None:  # fmt: skip
    """Write or add dk and dv of a block of keys, `grads`, and add to the sums of dq."""
    (batch, num_queries, _, _), (_, num_keys, num_key_heads, _) = q.shape, k.shape
    dim, queries = config.dim, config.queries
    num_tiles = -(-num_queries // queries)
    q, k, v, dout = [hopper_common.as_strided_rows(x) for x in (q, k, v, dout)]
    descriptors = (
        hopper_common.describe(q, queries, dim), hopper_common.describe(k, ROWS.value, dim), hopper_common.describe(v, ROWS.value, dim),
        hopper_common.describe(dout, queries, dim),
        *map(hopper_common.with_base, _describe_scratch(batch * config.num_heads * num_tiles, config), sums),
    )  # fmt: skip
    by_key = intervals.transposed
    sections = -(-batch * num_key_heads // _section(num_queries))
    programs = hopper_common.num_programs(q.device, shares_sms)
    items = by_key.items(KEYS.value, queries, batch, num_key_heads, sections, programs, seeing=True, group=config.group)
    if not by_key.all_see:  # no item is theirs
        for grad, add in zip(grads, (config.add_dk, config.add_dv), strict=True):
            if not add:
                grad.zero_()
    launch(
        _main_kernel, items.shape[1], (*descriptors, *grads, by_key.lo, by_key.hi, items),
        (by_key.batch, num_tiles, num_keys, scale), CONFIG=config,
    )  # fmt: skip


def _finish(dq_sums: Tensor, dq: Tensor, scale: float, config: Config) -> None:
    """Put the sums in order: write or add them to dq."""
    batch, num_queries, num_heads, _ = dq.shape
    num_tiles = -(-num_queries // config.queries)
    launch(_finish_kernel, 2 * batch * num_heads * num_tiles, (dq_sums, dq), (num_tiles, num_queries, scale), CONFIG=config)
