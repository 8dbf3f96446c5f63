"""The backward kernels for Hopper GPUs (sm_90) and head dims above 128, in Gluon: `ringattn.kernels.reference.backward`.

At head dim 256, dk and dv of 64 keys occupy half of the registers of an SM. A kernel that computes all gradients at once, as
`ringattn.kernels.hopper.backward` does, would therefore add up dq for every 64 keys, and the traffic of these sums would limit
its speed. This module computes dk and dv in one kernel and dq in another. Both kernels compute the scores, so there are 7
products instead of 5. In return, every sum has a fixed order, so the gradients are bitwise identical in every run.

Three kernels run one after another. `_prepare_kernel` brings lse and delta into the order in which the other kernels load them.
`_key_gradient_kernel` computes dk and dv, and `_query_gradient_kernel` computes dq.

A tile in shared memory is split into parts of 64 or 128 columns, because head dim 192 is not a power of two. The word "ring"
means a ring buffer in this module, and each of its slots holds one part. The producer loads the parts of consecutive tiles into
consecutive slots of a ring, and every consumer uses and releases every part. In the code, a ring is the tuple (tiles, full,
empty), which consists of the slots and the two arrays of barriers.

THE KERNEL FOR dk AND dv. A work tile is up to 64 keys of one key head. Its loop covers the query tiles that see these keys, for
every query head of the group. Scores are transposed: rows are keys and columns are queries. The two consumers divide the
products between them, so that each of them keeps one gradient in registers.

      PRODUCER (a warp)        SHARED MEMORY          CONSUMER OF dv                  CONSUMER OF dk

      load K, V (1st step) --> [ keys, values ] ----> S = K Q^T                       dP = V dO^T
      load Q, lse -----------> [ ring of Q    ] ----> P = exp2(S - lse)
                               [ ring of P    ] <---- store P; dV += P dO
                                                ----------------------------------->  load P; dS = P (dP - delta)
      load dO, delta --------> [ ring of dO   ] ------------------------------------> dK += dS Q

THE KERNEL FOR dq. A work tile is up to 128 queries of one query head, 64 per consumer. Its loop covers the keys that these
queries see. Each consumer computes all products for its own queries:

      S = Q K^T, dP = dO V^T;  P = exp2(S - lse);  dS = P (dP - delta);  dQ += dS K

In both kernels, a step issues the product that ends the previous step together with the products that begin the current step.
The consumers take turns to issue products (ping-pong). While one consumer computes in registers, the products of the other
consumer keep the tensor cores busy.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringattn.kernels.dropout import Dropout
from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper.common import (
    LOG2_E,
    ROWS,
    accumulator_layout,
    allocate_barriers,
    load_work_tile,
    step_start,
    tile_view,
    tma_load,
)
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import Delta
from ringattn.kernels.triton import common as triton_common
from ringattn.kernels.triton.launcher import launch

# The number of keys per step of the kernel for dq.
STEP_KEYS = gl.constexpr(64)

# The number of queries of a work tile of the kernel for dq. Each of the two consumers computes 64 queries.
QUERIES = gl.constexpr(128)

# The number of rows that a program of `_prepare_kernel` prepares.
PREPARED_ROWS = gl.constexpr(32)

# The layout in shared memory of the lse or the delta of a query tile.
SCALARS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)

# The maximal number of bytes of K and V of all heads in a head group of the kernel for dq, so that they stay in the L2 cache.
KEY_BYTES_IN_L2 = 32 * 2**20

# The numbers of registers per thread. The producer computes nothing, so it needs few registers.
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)

# The numbers of the hardware barriers with which the consumers take turns. Triton uses the lower numbers.
FIRST_PING_PONG_BARRIER = gl.constexpr(8)
PING_PONG_THREADS = gl.constexpr(256)


@dataclass(frozen=True)
class Config:
    """The constants for which the kernels are compiled.

    Args:
        head_dim, value_dim: D, the head dim of q and k, and Dv, the head dim of v.
        num_heads: Hq, the number of query heads.
        group: number of query heads per key head.
        add_dq, add_dk, add_dv: whether to add the gradient to an accumulator. Otherwise the gradient is written to a new
            tensor.
        dim, padded_value_dim: the head dims of the tiles, to which D and Dv are padded.
        part, value_part: the number of columns of a part of Q and K, and of a part of V and dO.
        queries: the number of queries per step of the kernel for dk and dv.
        q_slots, dout_slots, p_slots: the numbers of slots of the rings in the kernel for dk and dv.
        k_slots, v_slots: the numbers of slots of the rings in the kernel for dq. The ring of K needs slots for two tiles,
            because a step issues products with its own tile of K and with the tile of the previous step.
        pass_after_scores: whether a consumer of the kernel for dq passes its ping-pong turn when the scores of its step are
            complete. Otherwise it passes its turn when the product that ends the previous step is complete.
    """

    head_dim: int
    value_dim: int
    num_heads: int
    group: int
    add_dq: bool
    add_dk: bool
    add_dv: bool
    dim: int
    padded_value_dim: int
    part: int
    value_part: int
    queries: int
    q_slots: int
    dout_slots: int
    p_slots: int
    k_slots: int
    v_slots: int
    pass_after_scores: bool

    @property
    def parts(self) -> int:
        """The number of parts of a tile of Q or K."""
        return self.dim // self.part

    @property
    def value_parts(self) -> int:
        """The number of parts of a tile of V or dO."""
        return self.padded_value_dim // self.value_part

    @property
    def p_tile_layout(self) -> gl.SharedLinearLayout:
        """The layout of P (64 keys, queries) in shared memory, which is the order of its elements in the registers.

        In every 16 columns, a thread has eight numbers, which are 16 contiguous bytes. The numbers of the next thread follow
        directly. Therefore the stores and the loads have no bank conflicts.
        """
        order = [[0, 1], [8, 0], [0, 8], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0]]
        return gl.SharedLinearLayout(order + [[0, 16 << i] for i in range((self.queries // 16).bit_length() - 1)], [], 16)


# The tiles and the numbers of slots by the padded head dims (D, Dv).
TILES = {
    (256, 256): dict(
        part=128, value_part=128, queries=64, q_slots=5, dout_slots=4, p_slots=2, k_slots=4, v_slots=2,
        pass_after_scores=True,
    ),
    (192, 128): dict(
        part=64, value_part=128, queries=128, q_slots=6, dout_slots=2, p_slots=1, k_slots=12, v_slots=3,
        pass_after_scores=False,
    ),
}  # fmt: skip


@triton.jit(do_not_specialize=["num_blocks", "num_queries"])
def _prepare_kernel(lse, delta, out, dout, dlse, log2_lse, row_delta, num_blocks, num_queries, CONFIG: tl.constexpr):
    """Pack lse, in log2 units, and delta of PREPARED_ROWS queries of one head.

    A query that sees no key or does not exist gets lse = inf. Its probabilities exp2(s - inf) are then 0 for every finite score
    s, so the other kernels need no mask for such a query.

    Args:
        lse: (B, Nq, Hq).
        delta: (B, Nq, Hq), or None to compute delta from out, dout and dlse.
        out, dout: (B, Nq, Hq, Dv), or None.
        dlse: (B, Nq, Hq), or None.
        log2_lse, row_delta: (B * Hq, num_blocks * PREPARED_ROWS), written.
        num_blocks: number of blocks of PREPARED_ROWS queries of a head.
        num_queries: Nq.
    """
    program = tl.program_id(0)
    block, pair = program % num_blocks, program // num_blocks
    head, batch = pair % CONFIG.num_heads, pair // CONFIG.num_heads
    PADDED: tl.constexpr = triton_common.pad_dim(CONFIG.value_dim)
    rows = tl.arange(0, PREPARED_ROWS)
    index = (batch.to(tl.int64) * num_queries + block * PREPARED_ROWS + rows) * CONFIG.num_heads + head
    inside = block * PREPARED_ROWS + rows < num_queries
    lse_rows = tl.load(lse + index, mask=inside, other=float("-inf"))
    if delta is None:
        outputs = triton_common.load_outputs(out, dout, index, inside, CONFIG.value_dim, PADDED)
        delta_rows = triton_common.row_delta(outputs, dlse, index, inside)
    else:
        delta_rows = tl.load(delta + index, mask=inside, other=0.0)
    packed = program.to(tl.int64) * PREPARED_ROWS + rows
    tl.store(log2_lse + packed, tl.where(lse_rows == float("-inf"), float("inf"), lse_rows * LOG2_E))
    tl.store(row_delta + packed, delta_rows)


@gluon.jit
def _locate(step, part, PARTS: gl.constexpr, SLOTS: gl.constexpr):
    """Return the slot of one part of the tile of a step in a ring, and the phase of the slot's barriers.

    `step` (uint32) counts the steps of all work tiles of the program. A tile has PARTS parts, and the ring has SLOTS slots.
    """
    position = step * PARTS + part
    return (position % SLOTS).to(gl.int32), (position // SLOTS & 1).to(gl.int32)


@gluon.jit
def _release(empty, step, PARTS: gl.constexpr, SLOTS: gl.constexpr):
    """Release all parts of the tile of a step."""
    for part in gl.static_range(PARTS):
        slot, _ = _locate(step, part, PARTS, SLOTS)
        mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def _load_part(tensor, coordinates, part, full, tile):
    """Start to load one part of a tile of rows. `part` is the number of the part."""
    batch, row, head = coordinates
    COLUMNS: gl.constexpr = tensor.block_type.shape[3]
    tma_load(tensor, [batch, row, head, part * COLUMNS], full, tile_view(tile, tensor))


@gluon.jit
def _load_whole(tensor, coordinates, tiles, full, PARTS: gl.constexpr):
    """Load all parts of a tile of rows, which arrive at the barrier `full`."""
    mbarrier.expect(full, PARTS * tensor.block_type.nbytes)
    for part in gl.static_range(PARTS):
        _load_part(tensor, coordinates, part, full, tiles.index(part))


@gluon.jit
def _load_into_ring(tensor, coordinates, ring, step, PARTS: gl.constexpr, SLOTS: gl.constexpr):
    """Load the tile of a step into a ring, as soon as the consumers have released its slots."""
    tiles, full, empty = ring
    for part in gl.static_range(PARTS):
        slot, phase = _locate(step, part, PARTS, SLOTS)
        mbarrier.wait(empty.index(slot), phase ^ 1)
        mbarrier.expect(full.index(slot), tensor.block_type.nbytes)
        _load_part(tensor, coordinates, part, full.index(slot), tiles.index(slot))


@gluon.jit
def _load_with_scalars(
    tensor, scalars, coordinates, packed, ring, scalar_tiles, step, PARTS: gl.constexpr, SLOTS: gl.constexpr
):  # fmt: skip
    """Load a tile of Q and its lse, or a tile of dO and its delta, into a ring.

    The scalars arrive together with the first part, and they have the slot of this part.
    """
    tiles, full, empty = ring
    for part in gl.static_range(PARTS):
        slot, phase = _locate(step, part, PARTS, SLOTS)
        mbarrier.wait(empty.index(slot), phase ^ 1)
        if part == 0:
            mbarrier.expect(full.index(slot), tensor.block_type.nbytes + scalars.block_type.nbytes)
            tma_load(scalars, [packed], full.index(slot), scalar_tiles.index(slot))
        else:
            mbarrier.expect(full.index(slot), tensor.block_type.nbytes)
        _load_part(tensor, coordinates, part, full.index(slot), tiles.index(slot))


@gluon.jit
def _wait_for_ping_pong(CONSUMER: gl.constexpr):
    """Wait until the other consumer passes the turn to issue products. Its products then keep the tensor cores busy."""
    # Triton 3.6 can pass an f-string to another function only if the string is a named constant.
    SYNC: gl.constexpr = f"bar.sync {FIRST_PING_PONG_BARRIER + CONSUMER}, {PING_PONG_THREADS}; mov.b32 $0, $1;"
    hopper_common.execute(SYNC)


@gluon.jit
def _pass_ping_pong(CONSUMER: gl.constexpr):
    """Pass the turn to issue products to the other consumer."""
    ARRIVE: gl.constexpr = f"bar.arrive {FIRST_PING_PONG_BARRIER + 1 - CONSUMER}, {PING_PONG_THREADS}; mov.b32 $0, $1;"
    hopper_common.execute(ARRIVE)


@gluon.jit
def _issue_scores(
    left, first_part, ring, step, COLUMNS: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr
):  # fmt: skip
    """Issue the product (64, COLUMNS) of a tile and the transposed tile of a step in a ring.

    `left` contains the parts of the left operand in shared memory, from `first_part` on.
    """
    tiles, full, empty = ring
    scores = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator_layout(COLUMNS))
    for part in gl.static_range(PARTS):
        slot, phase = _locate(step, part, PARTS, SLOTS)
        mbarrier.wait(full.index(slot), phase)
        right = tiles.index(slot).permute((1, 0))
        own = left.index(first_part + part + _opaque_zero())
        scores = warpgroup_mma(own, right, scores, use_acc=part > 0, is_async=True)
    return scores


@gluon.jit
def _opaque_zero():
    """Return a 0 whose value the compiler cannot know, see `ringattn.kernels.hopper.backward`."""
    return hopper_common.execute("mov.b32 $0, 0;")


@gluon.jit
def _issue_sums(left, sums, ring, step, PARTS: gl.constexpr, SLOTS: gl.constexpr):
    """Issue sums += left * tile for the tile of a step in a ring. `left` is in registers."""
    tiles, full, empty = ring
    pending = ()
    for part in gl.static_range(PARTS):
        slot, phase = _locate(step, part, PARTS, SLOTS)
        mbarrier.wait(full.index(slot), phase)
        pending = pending + (warpgroup_mma(left, tiles.index(slot), sums[part], is_async=True),)
    return pending


@gluon.jit
def _wait_for_sums(pending, IN_FLIGHT: gl.constexpr, PARTS: gl.constexpr):
    """Wait until only IN_FLIGHT products are in flight, and return the tuple of results."""
    if PARTS == 1:
        return (warpgroup_mma_wait(IN_FLIGHT, deps=pending),)
    else:
        return warpgroup_mma_wait(IN_FLIGHT, deps=pending)


@gluon.jit
def _zero_sums(COLUMNS: gl.constexpr, PARTS: gl.constexpr):
    """Return a gradient (64, PARTS * COLUMNS) of zeros as a tuple of parts."""
    sums = ()
    for _part in gl.static_range(PARTS):
        sums = sums + (gl.full([ROWS, COLUMNS], 0.0, gl.float32, accumulator_layout(COLUMNS)),)
    return sums


@gluon.jit
def _as_left(tile, COLUMNS: gl.constexpr):
    """Return a tile (64, K) as the left operand, in registers, of a product (64, COLUMNS)."""
    return gl.convert_layout(tile, gl.DotOperandLayout(operand_index=0, parent=accumulator_layout(COLUMNS), k_width=2))


@gluon.jit
def _probabilities(scores, lse, row_bounds, start, is_masked, log2_scale, COLUMNS: gl.constexpr):
    """Compute the probabilities exp2(scores - lse), and set those outside the intervals to 0.

    Args:
        scores: (64, COLUMNS), before the multiplication by `log2_scale`.
        lse: in log2 units, (1, COLUMNS) if the columns are queries, and (64, 1) if the rows are queries.
        row_bounds: (lo, hi, num_own). lo and hi are pointers to the bounds of the first row, and num_own is the number of rows
            from there to the end of the work tile.
        start: the first column.
        is_masked: whether the step needs a mask.
    """
    SCORES: gl.constexpr = accumulator_layout(COLUMNS)
    lo, hi, num_own = row_bounds
    # Load the bounds only in steps that need a mask.
    if is_masked:
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
        column = start + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SCORES))[None, :]
        # Rows past the end of the work tile get an empty interval.
        row_lo = gl.load(lo + rows, mask=rows < num_own, other=0)[:, None]
        row_hi = gl.load(hi + rows, mask=rows < num_own, other=0)[:, None]
        scores = gl.where((row_lo <= column) & (column < row_hi), scores, float("-inf"))
    return gl.exp2(scores * log2_scale - lse)


@gluon.jit
def _write_gradient(
    grads, sums, row_range, num_rows, factor,
    NUM_HEADS: gl.constexpr, DIM: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Write factor * sums to the rows of one head. With ADD, add it to an accumulator instead.

    Args:
        grads: contiguous (B, num_rows, NUM_HEADS, DIM).
        sums: tuple of PARTS tensors (64, COLUMNS).
        row_range: (batch entry, head, first row, end). At most 64 rows are written.
    """
    batch, head, own, end = row_range
    base = grads + ((batch * num_rows + own).to(gl.int64) * NUM_HEADS + head) * DIM
    LAYOUT: gl.constexpr = accumulator_layout(COLUMNS)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    for part in gl.static_range(PARTS):
        columns = part * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
        pointers = base + rows.to(gl.int64)[:, None] * (NUM_HEADS * DIM) + columns[None, :]
        mask = (rows < end - own)[:, None] & (columns < DIM)[None, :]
        tile = (sums[part] * factor).to(grads.dtype.element_ty)
        if ADD:
            tile += gl.load(pointers, mask=mask, other=0.0)
        gl.store(pointers, tile, mask=mask)


# The kernel for dk and dv.


@gluon.jit
def _query_loop(loop):
    """Return the first query and the number of steps of the loop of a work tile, for one query head."""
    begin, _, num_unmasked, num_masked = loop
    # The number of steps is never 0. The `maximum` lets the compiler use this fact and remove a test in front of the loops.
    return begin, gl.maximum(num_unmasked + num_masked, 1)


@gluon.jit
def _key_bounds(work_tile, bounds, sizes, CONFIG: gl.constexpr):
    """Return the intervals of the keys of a work tile.

    Returns:
        (row_bounds, first_unmasked, last_unmasked). row_bounds is the argument of `_probabilities`. A step needs no mask if its
        first query is in the range from first_unmasked to last_unmasked, because all keys then see all queries of the step. The
        range is empty if the work tile has fewer than 64 keys.
    """
    batch, key_head, first, end, loop = work_tile
    query_lo, query_hi = bounds
    num_masks, num_tiles, num_keys = sizes
    # One mask may serve all batch entries.
    offset = gl.minimum(batch, num_masks - 1) * num_keys + first
    # Bounds never decrease from key to key. Therefore the last key has the largest lo, and the first key has the smallest hi.
    whole = first + ROWS <= end
    first_unmasked = gl.load(query_lo + offset + ROWS - 1, mask=whole, other=0)
    last_unmasked = gl.load(query_hi + offset, mask=whole, other=0) - CONFIG.queries
    return (query_lo + offset, query_hi + offset, end - first), first_unmasked, last_unmasked


@gluon.jit
def _produce_queries(arguments, CONFIG: gl.constexpr):
    """Run the producer of the kernel for dk and dv, which is a single warp."""
    descriptors, work_tiles, num_tiles, buffers, barriers, rings = arguments
    q, k, v, dout, log2_lse, row_delta = descriptors
    keys, values, lse_tiles, delta_tiles, p_tiles = buffers
    k_full, k_empty, v_full, v_empty, p_full, p_empty = barriers
    q_ring, dout_ring = rings
    index = gl.program_id(0)
    tile_phase = gl.to_tensor(0)
    count = gl.to_tensor(0).to(gl.uint32)
    batch, key_head, first, end, loop = load_work_tile(work_tiles, index)
    while end > 0:
        begin, num_steps = _query_loop(loop)
        own = batch, first, key_head
        for member in range(CONFIG.group):
            head = key_head * CONFIG.group + member
            # The "+ 0" creates a new value. If a variable is only a second name of another variable, Gluon does not carry it
            # through a loop.
            row = begin + 0
            packed = (batch * CONFIG.num_heads + head) * num_tiles * CONFIG.queries + begin
            for step in range(num_steps):
                is_first = (member == 0) & (step == 0)
                if is_first:
                    # The consumer of dv has finished all products with the keys of the previous work tile.
                    mbarrier.wait(k_empty, tile_phase ^ 1)
                    _load_whole(k, own, keys, k_full, CONFIG.parts)
                rows = batch, row, head
                _load_with_scalars(q, log2_lse, rows, packed, q_ring, lse_tiles, count, CONFIG.parts, CONFIG.q_slots)
                if is_first:
                    mbarrier.wait(v_empty, tile_phase ^ 1)
                    _load_whole(v, own, values, v_full, CONFIG.value_parts)
                _load_with_scalars(
                    dout, row_delta, rows, packed, dout_ring, delta_tiles, count, CONFIG.value_parts, CONFIG.dout_slots
                )
                count += 1
                row += CONFIG.queries
                packed += CONFIG.queries
        tile_phase ^= 1
        index += gl.num_programs(0)
        batch, key_head, first, end, loop = load_work_tile(work_tiles, index)


@gluon.jit
def _compute_p(scores, buffers, barriers, q_ring, key_bounds, start, step, log2_scale, CONFIG: gl.constexpr):
    """Wait for the scores of a step, compute P, and pass P to the other consumer.

    Args:
        scores: (64 keys, queries), a product in flight.
        key_bounds: from `_key_bounds`.
        start: the first query of the step.
        step: the number of the step, counted over all work tiles of the program.

    Returns:
        P as the left operand of the product for dV.
    """
    SCORES: gl.constexpr = accumulator_layout(CONFIG.queries)
    keys, values, lse_tiles, delta_tiles, p_tiles = buffers
    k_full, k_empty, v_full, v_empty, p_full, p_empty = barriers
    q_tiles, q_full, q_empty = q_ring
    q_slot, _ = _locate(step, 0, CONFIG.parts, CONFIG.q_slots)
    p_slot, p_phase = _locate(step, 0, 1, CONFIG.p_slots)
    lse = lse_tiles.index(q_slot).load(gl.SliceLayout(0, SCORES))
    scores = warpgroup_mma_wait(0, deps=(scores,))
    _release(q_empty, step, CONFIG.parts, CONFIG.q_slots)
    row_bounds, first_unmasked, last_unmasked = key_bounds
    is_masked = (start < first_unmasked) | (start > last_unmasked)
    p = _probabilities(scores, lse[None, :], row_bounds, start, is_masked, log2_scale, CONFIG.queries).to(q_tiles.dtype)
    mbarrier.wait(p_empty.index(p_slot), p_phase ^ 1)
    p_tiles.index(p_slot).store(p)
    mbarrier.arrive(p_full.index(p_slot), count=1)
    return _as_left(p, CONFIG.value_part)


@gluon.jit
def _compute_ds(dp, buffers, barriers, dout_ring, step, CONFIG: gl.constexpr):
    """Wait for the dP of a step and for the P of the other consumer, and compute dS.

    Args:
        dp: (64 keys, queries), a product in flight.
        step: the number of the step, counted over all work tiles of the program.

    Returns:
        dS as the left operand of the product for dK.
    """
    SCORES: gl.constexpr = accumulator_layout(CONFIG.queries)
    keys, values, lse_tiles, delta_tiles, p_tiles = buffers
    k_full, k_empty, v_full, v_empty, p_full, p_empty = barriers
    dout_tiles, dout_full, dout_empty = dout_ring
    dout_slot, _ = _locate(step, 0, CONFIG.value_parts, CONFIG.dout_slots)
    p_slot, p_phase = _locate(step, 0, 1, CONFIG.p_slots)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    delta = delta_tiles.index(dout_slot).load(gl.SliceLayout(0, SCORES))
    dp = dp - delta[None, :]
    _release(dout_empty, step, CONFIG.value_parts, CONFIG.dout_slots)
    mbarrier.wait(p_full.index(p_slot), p_phase)
    p = p_tiles.index(p_slot).load(SCORES)
    mbarrier.arrive(p_empty.index(p_slot), count=1)
    ds = (p.to(gl.float32) * dp).to(dout_tiles.dtype)
    return _as_left(ds, CONFIG.part)


@gluon.jit
def _consume_for_dv(arguments, CONFIG: gl.constexpr):
    """Run the consumer that computes P and dv of every work tile."""
    bounds, work_tiles, sizes, dv, scale, buffers, barriers, rings = arguments
    num_masks, num_tiles, num_keys = sizes
    keys, values, lse_tiles, delta_tiles, p_tiles = buffers
    k_full, k_empty, v_full, v_empty, p_full, p_empty = barriers
    q_ring, dout_ring = rings
    dout_tiles, dout_full, dout_empty = dout_ring
    VALUE_PARTS: gl.constexpr = CONFIG.value_parts
    NUM_KEY_HEADS: gl.constexpr = CONFIG.num_heads // CONFIG.group
    log2_scale = scale * LOG2_E
    index = gl.program_id(0)
    tile_phase = gl.to_tensor(0)
    count = gl.to_tensor(0).to(gl.uint32)
    work_tile = load_work_tile(work_tiles, index)
    while work_tile[3] > 0:
        batch, key_head, first, end, loop = work_tile
        begin, num_steps = _query_loop(loop)
        key_bounds = _key_bounds(work_tile, bounds, sizes, CONFIG)
        mbarrier.wait(k_full, tile_phase)
        sums = _zero_sums(CONFIG.value_part, VALUE_PARTS)
        start = begin + 0
        _wait_for_ping_pong(0)
        scores = _issue_scores(keys, 0, q_ring, count, CONFIG.queries, CONFIG.parts, CONFIG.q_slots)
        _pass_ping_pong(0)
        p = _compute_p(scores, buffers, barriers, q_ring, key_bounds, start, count, log2_scale, CONFIG)
        left_in_head = num_steps - 1
        for _step in range(1, num_steps * CONFIG.group):
            # After the last query tile of a query head, the first query tile of the next query head of the group follows.
            start = gl.where(left_in_head == 0, begin, start + CONFIG.queries)
            left_in_head = gl.where(left_in_head == 0, num_steps, left_in_head) - 1
            _wait_for_ping_pong(0)
            pending = _issue_sums(p, sums, dout_ring, count, VALUE_PARTS, CONFIG.dout_slots)
            count += 1
            scores = _issue_scores(keys, 0, q_ring, count, CONFIG.queries, CONFIG.parts, CONFIG.q_slots)
            sums = _wait_for_sums(pending, CONFIG.parts, VALUE_PARTS)
            _pass_ping_pong(0)
            _release(dout_empty, count - 1, VALUE_PARTS, CONFIG.dout_slots)
            p = _compute_p(scores, buffers, barriers, q_ring, key_bounds, start, count, log2_scale, CONFIG)
        mbarrier.arrive(k_empty, count=1)
        pending = _issue_sums(p, sums, dout_ring, count, VALUE_PARTS, CONFIG.dout_slots)
        tile_phase ^= 1
        index += gl.num_programs(0)
        work_tile = load_work_tile(work_tiles, index)
        sums = _wait_for_sums(pending, 0, VALUE_PARTS)
        _release(dout_empty, count, VALUE_PARTS, CONFIG.dout_slots)
        count += 1
        _write_gradient(
            dv, sums, (batch, key_head, first, end), num_keys, 1.0,
            NUM_KEY_HEADS, CONFIG.value_dim, CONFIG.value_part, VALUE_PARTS, CONFIG.add_dv,
        )  # fmt: skip


@gluon.jit
def _consume_for_dk(arguments, CONFIG: gl.constexpr):
    """Run the consumer that computes dS and dk of every work tile."""
    bounds, work_tiles, sizes, dk, scale, buffers, barriers, rings = arguments
    num_masks, num_tiles, num_keys = sizes
    keys, values, lse_tiles, delta_tiles, p_tiles = buffers
    k_full, k_empty, v_full, v_empty, p_full, p_empty = barriers
    q_ring, dout_ring = rings
    q_tiles, q_full, q_empty = q_ring
    PARTS: gl.constexpr = CONFIG.parts
    NUM_KEY_HEADS: gl.constexpr = CONFIG.num_heads // CONFIG.group
    # The consumer of dv issues its products first.
    _pass_ping_pong(1)
    index = gl.program_id(0)
    tile_phase = gl.to_tensor(0)
    count = gl.to_tensor(0).to(gl.uint32)
    work_tile = load_work_tile(work_tiles, index)
    while work_tile[3] > 0:
        batch, key_head, first, end, loop = work_tile
        begin, num_steps = _query_loop(loop)
        mbarrier.wait(v_full, tile_phase)
        sums = _zero_sums(CONFIG.part, PARTS)
        _wait_for_ping_pong(1)
        dp = _issue_scores(values, 0, dout_ring, count, CONFIG.queries, CONFIG.value_parts, CONFIG.dout_slots)
        _pass_ping_pong(1)
        ds = _compute_ds(dp, buffers, barriers, dout_ring, count, CONFIG)
        for _step in range(1, num_steps * CONFIG.group):
            _wait_for_ping_pong(1)
            pending = _issue_sums(ds, sums, q_ring, count, PARTS, CONFIG.q_slots)
            count += 1
            dp = _issue_scores(values, 0, dout_ring, count, CONFIG.queries, CONFIG.value_parts, CONFIG.dout_slots)
            sums = _wait_for_sums(pending, CONFIG.value_parts, PARTS)
            _pass_ping_pong(1)
            _release(q_empty, count - 1, PARTS, CONFIG.q_slots)
            ds = _compute_ds(dp, buffers, barriers, dout_ring, count, CONFIG)
        mbarrier.arrive(v_empty, count=1)
        pending = _issue_sums(ds, sums, q_ring, count, PARTS, CONFIG.q_slots)
        tile_phase ^= 1
        index += gl.num_programs(0)
        work_tile = load_work_tile(work_tiles, index)
        sums = _wait_for_sums(pending, 0, PARTS)
        _release(q_empty, count, PARTS, CONFIG.q_slots)
        count += 1
        _write_gradient(
            dk, sums, (batch, key_head, first, end), num_keys, scale,
            NUM_KEY_HEADS, CONFIG.head_dim, CONFIG.part, PARTS, CONFIG.add_dk,
        )  # fmt: skip


@gluon.jit
def _allocate_ring(
    dtype: gl.constexpr, ROWS_OF_TILE: gl.constexpr, COLUMNS: gl.constexpr, SLOTS: gl.constexpr, CONSUMERS: gl.constexpr
):
    """Return a ring of SLOTS parts (ROWS_OF_TILE, COLUMNS). CONSUMERS is the number of consumers that release each part."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS_OF_TILE, COLUMNS], dtype)
    tiles = gl.allocate_shared_memory(dtype, [SLOTS, ROWS_OF_TILE, COLUMNS], LAYOUT)
    full, empty = allocate_barriers(SLOTS, 1, CONSUMERS)
    return tiles, full, empty


@gluon.jit(do_not_specialize=["num_masks", "num_tiles", "num_keys"])
def _key_gradient_kernel(
    q, k, v, dout, log2_lse, row_delta, dk, dv, query_lo, query_hi, work_tiles,
    num_masks, num_tiles, num_keys, scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of all work tiles.

    Args:
        q, k, v, dout: TMA descriptors of (B, Nq, Hq, D), (B, Nk, Hkv, D), (B, Nk, Hkv, Dv) and (B, Nq, Hq, Dv).
        log2_lse, row_delta: TMA descriptors of the tensors that `_prepare_kernel` writes.
        dk, dv: (B, Nk, Hkv, D) and (B, Nk, Hkv, Dv). The kernel writes the gradients to these tensors, or adds them.
        query_lo, query_hi: (num_masks, Nk), the interval of queries that see each key.
        work_tiles: (n, programs, 8), see `Intervals.work_tiles`.
        num_masks: 1 if all batch entries have the same mask, else B.
        num_tiles: number of query tiles of a head.
        num_keys: Nk.
        scale: the softmax scale.
    """
    K_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.part], q.dtype)
    V_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.value_part], q.dtype)
    keys = gl.allocate_shared_memory(q.dtype, [CONFIG.parts, ROWS, CONFIG.part], K_TILE)
    values = gl.allocate_shared_memory(q.dtype, [CONFIG.value_parts, ROWS, CONFIG.value_part], V_TILE)
    p_tiles = gl.allocate_shared_memory(q.dtype, [CONFIG.p_slots, ROWS, CONFIG.queries], CONFIG.p_tile_layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [CONFIG.q_slots, CONFIG.queries], log2_lse.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [CONFIG.dout_slots, CONFIG.queries], row_delta.layout)
    q_ring = _allocate_ring(q.dtype, CONFIG.queries, CONFIG.part, CONFIG.q_slots, 2)
    dout_ring = _allocate_ring(q.dtype, CONFIG.queries, CONFIG.value_part, CONFIG.dout_slots, 2)
    p_full, p_empty = allocate_barriers(CONFIG.p_slots, 1, 1)
    k_full, k_empty = allocate_barriers(1, 1, 1)
    v_full, v_empty = allocate_barriers(1, 1, 1)
    # Make the initialised barriers visible to TMA.
    fence_async_shared()
    sizes = num_masks, num_tiles, num_keys
    bounds = query_lo, query_hi
    buffers = keys, values, lse_tiles, delta_tiles, p_tiles
    barriers = k_full.index(0), k_empty.index(0), v_full.index(0), v_empty.index(0), p_full, p_empty
    rings = q_ring, dout_ring
    loading = (q, k, v, dout, log2_lse, row_delta), work_tiles, num_tiles, buffers, barriers, rings
    for_dv = bounds, work_tiles, sizes, dv, scale, buffers, barriers, rings
    for_dk = bounds, work_tiles, sizes, dk, scale, buffers, barriers, rings
    gl.warp_specialize(
        [(_consume_for_dv, (for_dv, CONFIG)), (_consume_for_dk, (for_dk, CONFIG)), (_produce_queries, (loading, CONFIG))],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


# The kernel for dq.


@gluon.jit
def _produce_keys(arguments, CONFIG: gl.constexpr):
    """Run the producer of the kernel for dq, which is a single warp."""
    descriptors, work_tiles, buffers, barriers, rings = arguments
    q, k, v, dout = descriptors
    queries, douts = buffers
    q_full, q_empty = barriers
    k_ring, v_ring = rings
    PARTS: gl.constexpr = CONFIG.parts
    VALUE_PARTS: gl.constexpr = CONFIG.value_parts
    index = gl.program_id(0)
    q_phase = gl.to_tensor(0)
    count = gl.to_tensor(0).to(gl.uint32)
    batch, head, first, end, loop = load_work_tile(work_tiles, index)
    while end > 0:
        _, _, num_unmasked, num_masked = loop
        mbarrier.wait(q_empty, q_phase ^ 1)
        mbarrier.expect(q_full, 2 * (PARTS * q.block_type.nbytes + VALUE_PARTS * dout.block_type.nbytes))
        for consumer in gl.static_range(2):
            rows = batch, first + consumer * ROWS, head
            for part in gl.static_range(PARTS):
                _load_part(q, rows, part, q_full, queries.index(consumer * PARTS + part))
            for part in gl.static_range(VALUE_PARTS):
                _load_part(dout, rows, part, q_full, douts.index(consumer * VALUE_PARTS + part))
        for step in range(num_masked + num_unmasked):
            own = batch, step_start(loop, step, STEP_KEYS), head // CONFIG.group
            _load_into_ring(k, own, k_ring, count, PARTS, CONFIG.k_slots)
            _load_into_ring(v, own, v_ring, count, VALUE_PARTS, CONFIG.v_slots)
            count += 1
        q_phase ^= 1
        index += gl.num_programs(0)
        batch, head, first, end, loop = load_work_tile(work_tiles, index)


@gluon.jit
def _compute_query_ds(
    scores, dp, scalars, row_bounds, start, is_masked, v_empty, step, log2_scale,
    dtype: gl.constexpr, CONSUMER: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Wait for S and dP of a step. Return dS as the left operand of the product for dQ."""
    lse, delta = scalars
    scores = warpgroup_mma_wait(CONFIG.value_parts, deps=(scores,))
    if CONFIG.pass_after_scores:
        _pass_ping_pong(CONSUMER)
    p = _probabilities(scores, lse[:, None], row_bounds, start, is_masked, log2_scale, STEP_KEYS)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    _release(v_empty, step, CONFIG.value_parts, CONFIG.v_slots)
    ds = (p * (dp - delta[:, None])).to(dtype)
    return _as_left(ds, CONFIG.part)


@gluon.jit
def _skip_steps(num_steps, rings, count, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Release all parts of a work tile in which this consumer has no rows. Return the number of its next step.

    The `empty` barriers and the ping-pong require both consumers.
    """
    k_ring, v_ring = rings
    k_tiles, k_full, k_empty = k_ring
    v_tiles, v_full, v_empty = v_ring
    for _step in range(num_steps):
        _wait_for_ping_pong(CONSUMER)
        _pass_ping_pong(CONSUMER)
        _wait_for_tile(k_full, count, CONFIG.parts, CONFIG.k_slots)
        _release(k_empty, count, CONFIG.parts, CONFIG.k_slots)
        _wait_for_tile(v_full, count, CONFIG.value_parts, CONFIG.v_slots)
        _release(v_empty, count, CONFIG.value_parts, CONFIG.v_slots)
        count += 1
    return count


@gluon.jit
def _wait_for_tile(full, step, PARTS: gl.constexpr, SLOTS: gl.constexpr):
    """Wait until all parts of the tile of a step have arrived."""
    for part in gl.static_range(PARTS):
        slot, phase = _locate(step, part, PARTS, SLOTS)
        mbarrier.wait(full.index(slot), phase)


@gluon.jit
def _consume_for_dq(arguments, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Run a consumer of the kernel for dq, which computes 64 queries of every work tile."""
    bounds, log2_lse, row_delta, work_tiles, sizes, dq, scale, buffers, barriers, rings = arguments
    lo, hi = bounds
    num_masks, padded_queries, num_queries = sizes
    queries, douts = buffers
    q_full, q_empty = barriers
    k_ring, v_ring = rings
    k_tiles, k_full, k_empty = k_ring
    v_tiles, v_full, v_empty = v_ring
    PARTS: gl.constexpr = CONFIG.parts
    VALUE_PARTS: gl.constexpr = CONFIG.value_parts
    SCORES: gl.constexpr = accumulator_layout(STEP_KEYS)
    dtype: gl.constexpr = k_tiles.dtype
    log2_scale = scale * LOG2_E
    if CONSUMER == 1:
        # Consumer 0 issues its products first.
        _pass_ping_pong(CONSUMER)
    index = gl.program_id(0)
    q_phase = gl.to_tensor(0)
    count = gl.to_tensor(0).to(gl.uint32)
    batch, head, first, end, loop = load_work_tile(work_tiles, index)
    while end > 0:
        _, _, num_unmasked, num_masked = loop
        own = first + CONSUMER * ROWS
        mbarrier.wait(q_full, q_phase)
        if own < end:
            rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
            packed = (batch * CONFIG.num_heads + head).to(gl.int64) * padded_queries + own
            lse = gl.load(log2_lse + packed + rows, mask=rows < end - own, other=float("inf"))
            delta = gl.load(row_delta + packed + rows, mask=rows < end - own, other=0.0)
            scalars = lse, delta
            # One mask may serve all batch entries.
            offset = gl.minimum(batch, num_masks - 1) * num_queries + own
            row_bounds = lo + offset, hi + offset, end - own
            sums = _zero_sums(CONFIG.part, PARTS)
            _wait_for_ping_pong(CONSUMER)
            scores = _issue_scores(queries, CONSUMER * PARTS, k_ring, count, STEP_KEYS, PARTS, CONFIG.k_slots)
            dp = _issue_scores(douts, CONSUMER * VALUE_PARTS, v_ring, count, STEP_KEYS, VALUE_PARTS, CONFIG.v_slots)
            if not CONFIG.pass_after_scores:
                _pass_ping_pong(CONSUMER)
            ds = _compute_query_ds(
                scores, dp, scalars, row_bounds, step_start(loop, 0, STEP_KEYS), num_masked > 0, v_empty, count,
                log2_scale, dtype, CONSUMER, CONFIG,
            )  # fmt: skip
            for step in range(1, num_masked + num_unmasked):
                _wait_for_ping_pong(CONSUMER)
                pending = _issue_sums(ds, sums, k_ring, count, PARTS, CONFIG.k_slots)
                count += 1
                scores = _issue_scores(queries, CONSUMER * PARTS, k_ring, count, STEP_KEYS, PARTS, CONFIG.k_slots)
                dp = _issue_scores(douts, CONSUMER * VALUE_PARTS, v_ring, count, STEP_KEYS, VALUE_PARTS, CONFIG.v_slots)
                sums = _wait_for_sums(pending, PARTS + VALUE_PARTS, PARTS)
                if not CONFIG.pass_after_scores:
                    _pass_ping_pong(CONSUMER)
                _release(k_empty, count - 1, PARTS, CONFIG.k_slots)
                ds = _compute_query_ds(
                    scores, dp, scalars, row_bounds, step_start(loop, step, STEP_KEYS), step < num_masked,
                    v_empty, count, log2_scale, dtype, CONSUMER, CONFIG,
                )  # fmt: skip
            mbarrier.arrive(q_empty, count=1)
            pending = _issue_sums(ds, sums, k_ring, count, PARTS, CONFIG.k_slots)
            sums = _wait_for_sums(pending, 0, PARTS)
            _release(k_empty, count, PARTS, CONFIG.k_slots)
            count += 1
            _write_gradient(
                dq, sums, (batch, head, own, end), num_queries, scale,
                CONFIG.num_heads, CONFIG.head_dim, CONFIG.part, PARTS, CONFIG.add_dq,
            )  # fmt: skip
        else:
            mbarrier.arrive(q_empty, count=1)
            count = _skip_steps(num_masked + num_unmasked, rings, count, CONSUMER, CONFIG)
        q_phase ^= 1
        index += gl.num_programs(0)
        batch, head, first, end, loop = load_work_tile(work_tiles, index)


@gluon.jit(do_not_specialize=["num_masks", "padded_queries", "num_queries"])
def _query_gradient_kernel(
    q, k, v, dout, log2_lse, row_delta, dq, lo, hi, work_tiles,
    num_masks, padded_queries, num_queries, scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute dq of all work tiles.

    Args:
        q, k, v, dout: TMA descriptors of (B, Nq, Hq, D), (B, Nk, Hkv, D), (B, Nk, Hkv, Dv) and (B, Nq, Hq, Dv).
        log2_lse, row_delta: (B * Hq, padded_queries), which `_prepare_kernel` writes.
        dq: (B, Nq, Hq, D). The kernel writes the gradient to this tensor, or adds it.
        lo, hi: (num_masks, Nq), the interval of keys that each query sees.
        work_tiles: (n, programs, 8), see `Intervals.work_tiles`.
        num_masks: 1 if all batch entries have the same mask, else B.
        padded_queries: Nq, rounded up to a multiple of the query tiles.
        num_queries: Nq.
        scale: the softmax scale.
    """
    Q_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.part], q.dtype)
    DOUT_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.value_part], q.dtype)
    queries = gl.allocate_shared_memory(q.dtype, [2 * CONFIG.parts, ROWS, CONFIG.part], Q_TILE)
    douts = gl.allocate_shared_memory(q.dtype, [2 * CONFIG.value_parts, ROWS, CONFIG.value_part], DOUT_TILE)
    k_ring = _allocate_ring(q.dtype, STEP_KEYS, CONFIG.part, CONFIG.k_slots, 2)
    v_ring = _allocate_ring(q.dtype, STEP_KEYS, CONFIG.value_part, CONFIG.v_slots, 2)
    q_full, q_empty = allocate_barriers(1, 1, 2)
    # Make the initialised barriers visible to TMA.
    fence_async_shared()
    sizes = num_masks, padded_queries, num_queries
    bounds = lo, hi
    buffers = queries, douts
    barriers = q_full.index(0), q_empty.index(0)
    rings = k_ring, v_ring
    loading = (q, k, v, dout), work_tiles, buffers, barriers, rings
    computing = bounds, log2_lse, row_delta, work_tiles, sizes, dq, scale, buffers, barriers, rings
    gl.warp_specialize(
        [
            (_consume_for_dq, (computing, 0, CONFIG)),
            (_consume_for_dq, (computing, 1, CONFIG)),
            (_produce_keys, (loading, CONFIG)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def backward(
    q, k, v, dout, lse, delta, intervals, scale, dq=None, dk=None, dv=None,
    *, grad_dtype=None, dropout=None, blocks=None, precision="ieee", shares_sms=False,
):  # fmt: skip
    """Compute the gradients of one block of queries and one block of keys on one sm_90 GPU, for head dims up to 256.

    All gradients are bitwise identical in every run. The arguments and the results are those of
    `ringattn.kernels.hopper.backward.backward`, except that D and Dv are multiples of 8 up to 256.
    """
    if q.numel() == 0 or k.numel() == 0:
        return triton_common.allocate_gradients(q, k, v, (dq, dk, dv), grad_dtype)
    kernels = IncrementalBackward(q, dout, lse, delta, scale, shares_sms)
    return kernels.add_all(k, v, intervals, (dq, dk, dv), grad_dtype)


class IncrementalBackward:
    """The backward of the same queries over several blocks of keys, which a ring delivers one after another.

    lse and delta are prepared once, before the first block. dq is summed in fp32 over all blocks.

    Args:
        q, dout, lse, delta, scale, shares_sms: as for `backward`. lse is over the keys of all blocks.
    """

    def __init__(self, q: Tensor, dout: Tensor, lse: Tensor, delta: Delta, scale: float, shares_sms: bool = False) -> None:
        self._queries, self._scale, self._shares_sms = (q, dout, lse, delta), float(scale), shares_sms
        self._scalars: tuple[Tensor, Tensor] | None = None
        self._dq: Tensor | None = None

    def add(
        self, k: Tensor, v: Tensor, intervals: Intervals, dk: Tensor | None = None, dv: Tensor | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Add the contribution of one block of keys to dq, and return (dk, dv) of this block.

        Args:
            k, v: (B, Nk, Hkv, D) and (B, Nk, Hkv, Dv).
            intervals: for every query, the range of keys of this block that it may attend to.
            dk, dv: fp32 accumulators with the shapes of k and v, or None.
            dropout: must be None.

        Returns:
            (dk, dv): the accumulators, or new fp32 tensors.

        Raises:
            ValueError: `dropout` is not None.
        """
        if dropout is not None:
            raise ValueError("the Hopper backward has no dropout: use dispatch.IncrementalBackward(..., plain=False)")
        self._dq, dk, dv = self.add_all(k, v, intervals, (self._dq, dk, dv), torch.float32)
        return dk, dv

    def finish(self, dq: Tensor | None = None, grad_dtype: torch.dtype | None = None) -> Tensor:
        """Return dq (B, Nq, Hq, D), summed over all blocks that have been added.

        Args:
            dq: fp32 accumulator to which the gradient is added. For None, a new tensor is returned.
            grad_dtype: the dtype of a new dq: fp32 or q's dtype (None).
        """
        q = self._queries[0]
        if self._dq is None:
            return torch.zeros_like(q, dtype=grad_dtype) if dq is None else dq
        return self._dq.to(grad_dtype or q.dtype) if dq is None else dq.add_(self._dq)

    def add_all(
        self, k: Tensor, v: Tensor, intervals: Intervals, given: triton_common.Accumulators, grad_dtype: torch.dtype | None
    ) -> triton_common.Gradients:
        """Compute the gradients of one block of keys. `given` contains the accumulators or None, as for `backward`.

        Returns:
            (dq, dk, dv): the accumulators, or new tensors in `grad_dtype`.
        """
        q, dout, lse, delta = self._queries
        config = _configure(q.shape[3], v.shape[3], q.shape[2], k.shape[2], tuple(x is not None for x in given))
        grads = triton_common.allocate_gradients(q, k, v, given, grad_dtype)
        tensors = tuple(map(hopper_common.as_addressable, (q, k, v, dout)))
        with torch.cuda.device_of(q):
            if self._scalars is None:
                self._scalars = _prepare(q, dout, lse, delta, config)
            by_key = intervals.transposed
            for grad, accumulator, rows in zip(grads, given, (intervals, by_key, by_key), strict=True):
                # Rows with an empty interval belong to no work tile, so no program writes their gradients. Set new gradients
                # to zero.
                if accumulator is None and rows.num_nonempty_rows < rows.lo.numel():
                    grad.zero_()
            self._launch_key_gradient(tensors, grads[1:], by_key, config)
            self._launch_query_gradient(tensors, grads[0], intervals, config)
        return grads

    def _launch_key_gradient(self, tensors, grads, by_key: Intervals, config: Config) -> None:
        """Launch the kernel for dk and dv."""
        q, k, v, dout = tensors
        batch, num_queries, num_heads, _ = q.shape
        num_keys, num_key_heads = k.shape[1:3]
        num_head_groups = -(-batch * num_key_heads // _key_heads_per_group(num_queries))
        programs = hopper_common.num_programs(q.device, self._shares_sms)
        work_tiles = by_key.work_tiles(
            ROWS.value, config.queries, batch, num_key_heads, num_head_groups, programs, skip_empty=True, group=config.group
        )
        scalars = [_scalar_descriptor(x.numel(), config.queries) for x in self._scalars]
        descriptors = (
            *_descriptors(tensors, (config.queries, ROWS.value, ROWS.value, config.queries), config),
            *map(hopper_common.with_base, scalars, self._scalars),
        )
        launch(
            _key_gradient_kernel, work_tiles.shape[1], (*descriptors, *grads, by_key.lo, by_key.hi, work_tiles),
            (by_key.batch, _num_query_tiles(num_queries, config), num_keys, self._scale), CONFIG=config,
        )  # fmt: skip

    def _launch_query_gradient(self, tensors, dq: Tensor, intervals: Intervals, config: Config) -> None:
        """Launch the kernel for dq."""
        q, k, v, dout = tensors
        batch, num_queries, num_heads, _ = q.shape
        num_head_groups = -(-batch * num_heads // _query_heads_per_group(k, v, config))
        programs = hopper_common.num_programs(q.device, self._shares_sms)
        work_tiles = intervals.work_tiles(
            QUERIES.value, STEP_KEYS.value, batch, num_heads, num_head_groups, programs, skip_empty=True
        )
        operands = *_descriptors(tensors, (ROWS.value,) * 4, config), *self._scalars, dq, intervals.lo, intervals.hi, work_tiles
        padded_queries = _num_query_tiles(num_queries, config) * config.queries
        launch(
            _query_gradient_kernel, work_tiles.shape[1], operands,
            (intervals.batch, padded_queries, num_queries, self._scale), CONFIG=config,
        )  # fmt: skip


def _descriptors(tensors: tuple[Tensor, ...], rows: tuple[int, ...], config: Config) -> list[TensorDescriptor]:
    """Return the TMA descriptors of q, k, v and dout with which a kernel loads parts of tiles with these numbers of rows."""
    columns = config.part, config.part, config.value_part, config.value_part
    return [hopper_common.tma_descriptor(x, *block) for x, *block in zip(tensors, rows, columns, strict=True)]


@lru_cache(maxsize=256)
def _scalar_descriptor(size: int, queries: int) -> TensorDescriptor:
    """Return the TMA descriptor for loading lse or delta of a query tile.

    The descriptor does not refer to a tensor yet. `ringattn.kernels.hopper.common.with_base` adds the tensor.
    """
    no_tensor = torch.empty(1, dtype=torch.float32, device="cpu")
    return TensorDescriptor(no_tensor, [size], [1], [queries], SCALARS_LAYOUT)


@lru_cache(maxsize=256)
def _configure(head_dim: int, value_dim: int, num_heads: int, num_key_heads: int, add: tuple[bool, bool, bool]) -> Config:
    """Return the constants of the kernels for D, Dv, Hq and Hkv. `add` tells which of dq, dk and dv are accumulators."""
    dims = hopper_common.padded_wide_dims(head_dim, value_dim)
    return Config(head_dim, value_dim, num_heads, num_heads // num_key_heads, *add, *dims, **TILES[dims])


def _num_query_tiles(num_queries: int, config: Config) -> int:
    """Return the number of query tiles of the kernel for dk and dv."""
    return -(-num_queries // config.queries)


def _key_heads_per_group(num_queries: int) -> int:
    """Return the maximal number of key heads in a head group of the kernel for dk and dv.

    The heads of a group are processed together. For short sequences, a group of many heads balances the load better.
    """
    return max(1, 32768 // num_queries)


def _query_heads_per_group(k: Tensor, v: Tensor, config: Config) -> int:
    """Return the maximal number of query heads in a head group of the kernel for dq.

    The heads of a group are processed together. Their keys and values should stay in the L2 cache.
    """
    bytes_per_key_head = 2 * k.shape[1] * (k.shape[3] + v.shape[3])
    return config.group * max(1, KEY_BYTES_IN_L2 // bytes_per_key_head)


def _prepare(q: Tensor, dout: Tensor, lse: Tensor, delta: Delta, config: Config) -> tuple[Tensor, Tensor]:
    """Launch `_prepare_kernel`. Return (log2_lse, row_delta), both (B * Hq, Nq rounded up to a multiple of query tiles)."""
    batch, num_queries, num_heads, _ = q.shape
    padded_queries = _num_query_tiles(num_queries, config) * config.queries
    log2_lse, row_delta = (lse.new_empty(batch * num_heads, padded_queries) for _ in range(2))
    rows = lse.contiguous(), *hopper_common.delta_operands(delta, dout)
    num_blocks = padded_queries // PREPARED_ROWS.value
    launch(
        _prepare_kernel, batch * num_heads * num_blocks, (*rows, log2_lse, row_delta), (num_blocks, num_queries), CONFIG=config
    )  # fmt: skip
    return log2_lse, row_delta
