"""The backward kernels for Hopper GPUs (sm_90), written in Gluon. They implement `ringattn.kernels.reference.backward`.

This module computes FlashAttention-2 (Dao 2023, algorithm 2). The loop is pipelined as in FlashAttention-3 (Shah et al. 2024,
section 3).

The backward launches three kernels. `_prepare_kernel` packs lse and delta of each query tile, and it sets the sums of dq to
zero. If delta is not given, this kernel also computes delta. `_main_kernel` computes dk and dv and adds up dq in fp32.
`_finish_kernel` brings dq into row order, scales dq, and writes it or adds it to an accumulator. If a ring delivers one block
of keys after another, `_prepare_kernel` and `_finish_kernel` run only once for all blocks, see `IncrementalBackward`.

A work tile of the main kernel is up to 128 keys of one key head. For every query head of the group, the loop of a work tile
covers the query tiles that see these keys. `Intervals.work_tiles` assigns work tiles to programs before the launch. Usually
there is one program per SM. In a program, one warp is the producer, which loads tensors. The other two partitions are
consumers. Each consumer is a warpgroup that keeps dk and dv of 64 keys in registers. Scores are transposed: rows are keys and
columns are queries.

      PRODUCER                               SHARED MEMORY                       CONSUMERS

      load Q, lse, delta -- q_full[s] ----> [ queries, scalars: 2 stages ] ----> S = K Q^T, dK += dS Q
      load K (1st step) --- q_full[s] ----> [ keys: 2 slots              ] ----> S = K Q^T, dQ = dS^T K
      load dO ------------- dout_full[s] -> [ douts: 2 stages            ] ----> dP = V dO^T, dV += P dO
      load V (1st step) --- dout_full[s] -> [ values: 1 slot             ] ----> dP = V dO^T
                      <---- empty[s] ------                                <---- release the stage
                                            [ ds_tiles: 2 stages         ] <---- dS of this step, 64 keys per consumer
                                                                           ----> dQ = dS^T K of the previous step
                                            [ staging: 1 per consumer    ] <---- dQ
                                                  |
                                                  +-- TMA reduce-add --> sums of dq in global memory

One step of a consumer. The rows of all products except dQ are the consumer's own 64 keys. dQ is a sum over all 128 keys:

      S = K Q^T, dP = V dO^T              issue both
      P = exp2(S - lse)                   in registers, while dP runs
      dS = P (dP - delta)                 in registers
      dV += P dO                          issue; the left operand P comes from registers
      store dS in shared memory           once the other consumer has finished the previous step
      dQ = dS^T K of the previous step    issue; each consumer computes half of the columns (D > 64) or rows (D <= 64)
      dK += dS Q                          issue; the left operand dS comes from registers
      send dQ                             while dK runs
      release the stage

Each step computes the dQ of the previous step, so that no consumer waits for the other consumer's dS of the same step. The
consumers synchronise with each other once per step, by waiting for the `empty` barrier of the previous step's stage. An arrival
of the other consumer at this barrier guarantees two things. The other consumer has written its dS of the previous step, which
the current step reads. The other consumer has also finished reading the dS of two steps ago, and the dS of the current step
overwrites the memory of that dS.

Consequently, the first step of a work tile computes the last dQ of the previous work tile, for which it needs the keys of the
previous work tile. K has two slots for this reason. The first step of a program has no previous step. Its dQ is the product of
uninitialised memory and is sent to a spare chunk, which is never read. The dQ of the last step of a program is computed after
the loop.

K and V have no barriers of their own. K arrives with the first Q of its work tile, and V arrives with the first dO. The stage
and the phase are not reset between work tiles.

TMA's reduce-add sums dQ over all programs in fp32. The elements of these sums are in the order in which the registers of a
consumer hold dQ. This order avoids bank conflicts in shared memory, and the bandwidth of shared memory limits this kernel. All
products of a step finish within the step. If a product were still in flight at the end of a loop iteration, ptxas would
serialise all products.

Under `torch.use_deterministic_algorithms(True)`, dQ is summed in a fixed order. Two more partitions then send the dQ of the
consumers, see `ringattn.kernels.hopper.dq_order`.
"""

from dataclasses import dataclass, replace
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
from ringattn.kernels.hopper.common import (
    LOG2_E,
    ROWS,
    accumulator_layout,
    allocate_barriers,
    tile_view,
    tma_load,
    tma_reduce_add,
)
from ringattn.kernels.hopper.dq_order import HEADER, WRITER_REGISTERS, take_number, write_in_order
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import Delta
from ringattn.kernels.triton import common as triton_common
from ringattn.kernels.triton.common import load_tile
from ringattn.kernels.triton.launcher import launch

# The number of keys of a work tile. Each of the two consumers computes 64 keys.
KEYS = gl.constexpr(128)

# The number of stages of Q, dO and dS. The code relies on exactly two stages, because it computes the other stage as `stage ^
# 1`.
STAGES = gl.constexpr(2)

# The number of slots of K. The two slots hold the keys of two consecutive work tiles.
KEY_SLOTS = gl.constexpr(2)

# A query index that is larger than all others. It serves as the lo of keys that do not exist.
PAST_ALL_QUERIES = gl.constexpr(2**30)

# The index of the spare chunk, which lies in front of the sums of dq. The spare chunk receives the first dQ of every program
# and is never read.
SPARE_CHUNK = gl.constexpr(0)

# The numbers of registers per thread. The producer computes nothing, so it needs few registers.
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)

# The layout in shared memory of the lse and the delta of a query tile.
SCALARS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


@dataclass(frozen=True)
class Config(hopper_common.KernelConfig):
    """The constants for which the kernels are compiled.

    Args:
        dim, value_dim, num_heads, group: see `ringattn.kernels.hopper.common.KernelConfig`.
        head_dim: D, the head dim of q and k.
        add_dq, add_dk, add_dv: whether to add the gradient to an accumulator. Otherwise the gradient is written to a new
            tensor.
        deterministic: whether dQ is summed in a fixed order.
    """

    head_dim: int
    add_dq: bool
    add_dk: bool
    add_dv: bool
    deterministic: bool

    @property
    def entry_size(self) -> int:
        """The number of integers that describe a work tile in the table of work tiles."""
        return 12 if self.deterministic else 8

    @property
    def columns(self) -> int:
        """The number of columns of a tile that the products use, see `ringattn.kernels.hopper.column_parts`."""
        return used_columns(self.head_dim, self.value_dim)

    @property
    def keeps_operands(self) -> bool:
        """Whether a consumer keeps K and the first part of V of a work tile in registers.

        S = K Q^T then reads only Q from shared memory, and dP = V dO^T reads mainly dO. The bandwidth of shared memory limits
        this kernel. With 64 or 128 columns, the registers do not suffice, because there are more queries per step or larger
        gradients.
        """
        return self.columns == 96

    @property
    def queries(self) -> int:
        """The number of queries per step."""
        return 64 if self.dim == 128 else 128

    @property
    def chunk_columns(self) -> int:
        """The number of columns of a chunk of dQ.

        A chunk (64, chunk_columns) is the half of a step's dQ that one consumer computes. A dQ with 64 rows is split into two
        halves of its columns, and a dQ with 128 rows is split into two halves of its rows.
        """
        return self.dim * self.queries // KEYS.value

    @property
    def chunk_size(self) -> int:
        """The number of elements of a chunk."""
        return ROWS.value * self.chunk_columns

    @property
    def used_size(self) -> int:
        """The number of elements of the two chunks of a query tile, without the columns of the second that are zeros."""
        return self.queries * self.columns


@gluon.constexpr_function
def dq_columns(config: Config, consumer: int) -> int:
    """Return the number of columns of a chunk of dQ that a consumer computes.

    With 96 columns, the last 32 columns of the second consumer's chunk are zeros. This consumer neither computes nor adds them.
    """
    return 32 if (config.columns, consumer) == (96, 1) else config.chunk_columns


@gluon.constexpr_function
def staging_layout(columns: int) -> gl.SharedLinearLayout:
    """Return the layout of dQ (64, columns) in shared memory, which is the order of its elements in a warpgroup's registers.

    In every 8 columns, a thread has four numbers, which are 16 contiguous bytes. The numbers of the next thread follow
    directly. Therefore the stores have no bank conflicts. Basis vector i of the layout is the (row, column) of the element at
    offset 2**i. TMA's 128-byte swizzle replaces bits 2 to 4 of an offset, in units of fp32 numbers, by their exclusive or with
    bits 5 to 7. This layout applies the same swizzle, so that TMA writes the elements to global memory in register order.
    """
    order = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0]]
    order += [[0, 8 << i] for i in range((columns // 8).bit_length() - 1)]
    swizzled = [[a ^ b for a, b in zip(order[5 + i], order[2 + i], strict=True)] for i in range(3)]
    return gl.SharedLinearLayout(order[:5] + swizzled + order[8:], [], 1024)


@triton.jit(do_not_specialize=["num_tiles", "num_queries"])
def _prepare_kernel(lse, delta, out, dout, dlse, scalars, dq_sums, num_tiles, num_queries, CONFIG: tl.constexpr):
    """Pack lse (in log2 units) and delta of one query tile of one head, and set the tile's sums of dq to zero.

    A query that sees no key or does not exist gets lse = inf. Its probabilities exp2(s - inf) are then 0 for every finite score
    s, so the main kernel needs no mask for such a query.

    Args:
        lse: (B, Nq, Hq).
        delta: (B, Nq, Hq), or None to compute delta from out, dout and dlse.
        out, dout: (B, Nq, Hq, Dv), or None.
        dlse: (B, Nq, Hq), or None.
        scalars: (B * Hq * num_tiles, 2, queries), written.
        dq_sums: the spare chunk, followed by the sums (B * Hq * num_tiles, queries * dim). The first `CONFIG.used_size` sums of
            each query tile are set to zero. The spare chunk is not written.
        num_tiles: number of query tiles of a head.
        num_queries: Nq.
    """
    program = tl.program_id(0)
    tile, pair = program % num_tiles, program // num_tiles
    head, batch = pair % CONFIG.num_heads, pair // CONFIG.num_heads
    QUERIES: tl.constexpr = CONFIG.queries
    SIZE: tl.constexpr = CONFIG.queries * CONFIG.dim
    rows = tl.arange(0, QUERIES)
    index = (batch.to(tl.int64) * num_queries + tile * QUERIES + rows) * CONFIG.num_heads + head
    inside = tile * QUERIES + rows < num_queries
    offset = program.to(tl.int64)
    row_lse = tl.load(lse + index, mask=inside, other=float("-inf"))
    if delta is None:
        outputs = triton_common.load_outputs(out, dout, index, inside, CONFIG.value_dim, CONFIG.dim)
    # Store the zeros while the loads are in flight.
    element = tl.arange(0, SIZE)
    zeros = tl.zeros([SIZE], tl.float32)
    tl.store(dq_sums + CONFIG.chunk_size + offset * SIZE + element, zeros, mask=element < CONFIG.used_size)
    if delta is None:
        row_delta = triton_common.row_delta(outputs, dlse, index, inside)
    else:
        row_delta = tl.load(delta + index, mask=inside, other=0.0)
    tl.store(scalars + offset * (2 * QUERIES) + rows, tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E))
    tl.store(scalars + offset * (2 * QUERIES) + QUERIES + rows, row_delta)


@gluon.jit
def _load_work_tile(work_tiles, index, CONFIG: gl.constexpr):
    """Load the work tile with number `index` of this program.

    Return (batch entry, key head, first key, end of the keys, first query tile, num_steps, direction).

    The direction is 1 if each step goes on to the next query tile, and -1 if each step goes back to the previous query tile.
    Only the deterministic backward goes back. An end of 0 means that the program has no more work tiles, as in
    `ringattn.kernels.hopper.common.load_work_tile`.
    """
    if CONFIG.deterministic:
        # `_main_kernel` has already added the number of the program to the pointer.
        entry = work_tiles + index * gl.num_programs(0) * CONFIG.entry_size
        direction = gl.load(entry + 8)
    else:
        entry = work_tiles + (index * gl.num_programs(0) + gl.program_id(0)) * CONFIG.entry_size
        direction = 1
    first, end, loop = load_tile(entry)
    begin, _, num_unmasked, num_masked = loop
    head, batch = gl.load(entry + 6), gl.load(entry + 7)
    # The number of steps is never 0. The `maximum` lets the compiler use this fact and remove a test in front of the loops.
    num_steps = gl.maximum(num_unmasked + num_masked, 1)
    return batch, head, first, end, begin // CONFIG.queries, num_steps, direction


@gluon.jit
def _wait_for_previous_step(empty, stage, phase):
    """Wait until both consumers have finished the previous step, where `stage` and `phase` are those of the current step.

    The previous step uses the other stage. If the current stage is 1, the previous step has the same phase. If the current
    stage is 0, the previous step has the opposite phase.
    """
    mbarrier.wait(empty.index(stage ^ 1), phase ^ 1 ^ stage)


@gluon.jit
def _expect_bytes(full, BYTES: gl.constexpr, MORE_BYTES: gl.constexpr, more):
    """Make the barrier `full` expect BYTES, or BYTES + MORE_BYTES if `more` is true."""
    mbarrier.expect(full, BYTES, pred=~more)
    mbarrier.expect(full, BYTES + MORE_BYTES, pred=more)


@gluon.jit
def _load_halves(tensor, coordinates, tiles, slot, full):
    """Load the keys or the values of both consumers."""
    batch, first, head = coordinates
    for half in gl.static_range(2):
        tma_load(tensor, [batch, first + half * ROWS, head, 0], full, tile_view(tiles.index(slot + half), tensor))


@gluon.jit
def _produce(arguments, CONFIG: gl.constexpr):
    """Run the producer partition, which is a single warp: load the operands of all work tiles of this program."""
    QUERIES: gl.constexpr = CONFIG.queries
    q, k, v, dout, scalars, work_tiles, num_tiles, buffers, barriers = arguments
    queries, douts, row_scalars, keys, values, ds_tiles, staging = buffers
    q_full, dout_full, empty = barriers
    index = gl.to_tensor(0)
    batch, key_head, first, end, begin, num_steps, direction = _load_work_tile(work_tiles, index, CONFIG)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    # `previous_steps` is the number of steps of the previous work tile, summed over all heads of the group.
    previous_steps = gl.to_tensor(0)
    while end > 0:
        coordinates = batch, first, key_head
        for member in range(CONFIG.group):
            head = key_head * CONFIG.group + member
            row = begin * QUERIES
            packed = ((batch * CONFIG.num_heads + head) * num_tiles + begin) * (2 * QUERIES)
            for step in range(num_steps):
                is_first = (member == 0) & (step == 0)
                mbarrier.wait(empty.index(stage), phase ^ 1)
                full = q_full.index(stage)
                _expect_bytes(full, q.block_type.nbytes + scalars.block_type.nbytes, 2 * k.block_type.nbytes, is_first)
                tma_load(q, [batch, row, head, 0], full, tile_view(queries.index(stage), q))
                tma_load(scalars, [packed], full, row_scalars.index(stage))
                if is_first:
                    # The slot still holds the keys of the work tile before the previous one. Because dQ is computed one step
                    # late, these keys were last read in the first step of the previous work tile. If the previous work tile had
                    # more than one step, its first step has finished by now. If it had only one step, wait for this step.
                    if previous_steps == 1:
                        _wait_for_previous_step(empty, stage, phase)
                    _load_halves(k, coordinates, keys, (index & 1) * 2, full)
                _expect_bytes(dout_full.index(stage), dout.block_type.nbytes, 2 * v.block_type.nbytes, is_first)
                tma_load(dout, [batch, row, head, 0], dout_full.index(stage), tile_view(douts.index(stage), dout))
                if is_first:
                    # Until its last step, the previous work tile reads its values from the same buffer, so wait for that step.
                    _wait_for_previous_step(empty, stage, phase)
                    _load_halves(v, coordinates, values, 0, dout_full.index(stage))
                stage ^= 1
                if stage == 0:
                    phase ^= 1
                row += QUERIES * direction
                packed += 2 * QUERIES * direction
        previous_steps = num_steps * CONFIG.group
        index += 1
        batch, key_head, first, end, begin, num_steps, direction = _load_work_tile(work_tiles, index, CONFIG)


@gluon.jit
def _probabilities(scores, lse, key_bounds, start, log2_scale, CONFIG: gl.constexpr):
    """Compute the probabilities exp2(scores - lse), and set those outside the intervals to 0.

    Args:
        scores: (64 keys, queries), before the multiplication by `log2_scale`.
        lse: (queries,), in log2 units.
        key_bounds: from `_key_bounds`.
        start: the first query of the step.
    """
    SCORES: gl.constexpr = accumulator_layout(CONFIG.queries)
    query_lo, query_hi, num_own, first_unmasked, last_unmasked = key_bounds
    # Load the bounds of the keys only in steps that need a mask.
    if (start < first_unmasked) | (start > last_unmasked):
        keys = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
        row = start + gl.arange(0, CONFIG.queries, layout=gl.SliceLayout(0, SCORES))[None, :]
        lo = gl.load(query_lo + keys, mask=keys < num_own, other=PAST_ALL_QUERIES)[:, None]
        hi = gl.load(query_hi + keys, mask=keys < num_own, other=0)[:, None]
        scores = gl.where((lo <= row) & (row < hi), scores, float("-inf"))
    return gl.exp2(scores * log2_scale - lse[None, :])


@gluon.jit
def _key_bounds(work_tile, bounds, sizes, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Return the intervals of this consumer's keys in the form that `_probabilities` requires.

    Returns:
        (query_lo, query_hi, num_own, first_unmasked, last_unmasked). query_lo and query_hi are pointers to the bounds of the
        consumer's first key, and num_own is the number of keys from there to the end of the work tile. A step needs no mask if
        its first query is in the range from first_unmasked to last_unmasked, because all of these keys then see all queries of
        the step. The range is empty if the consumer has fewer than 64 keys.
    """
    batch, key_head, first, end, begin, num_steps, direction = work_tile
    query_lo, query_hi = bounds
    num_masks, num_tiles, num_keys = sizes
    own = first + CONSUMER * ROWS
    # One mask may serve all batch entries.
    offset = gl.minimum(batch, num_masks - 1) * num_keys + own
    # Bounds never decrease from key to key. Therefore the last key has the largest lo, and the first key has the smallest hi.
    whole = own + ROWS <= end
    first_unmasked = gl.load(query_lo + offset + ROWS - 1, mask=whole, other=0)
    last_unmasked = gl.load(query_hi + offset, mask=whole, other=0) - CONFIG.queries
    return query_lo + offset, query_hi + offset, end - own, first_unmasked, last_unmasked


@gluon.jit
def _opaque_zero():
    """Return a 0 whose value the compiler cannot know.

    The compiler would compute an address with a constant index before the loops. The address would then occupy registers during
    the loops, and the kernel would spill registers. The kernel therefore adds this 0 to the index. The compiler then
    computes the address only when the address is needed.
    """
    return hopper_common.execute("mov.b32 $0, 0;")


@gluon.jit
def _issue_dq_half(ds_tiles, keys, stage, slot, half, grad_q, ADD: gl.constexpr, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Issue grad_q = dS^T K, or grad_q += dS^T K with ADD, over the 64 keys of consumer `half`.

    grad_q is the chunk of dQ that consumer CONSUMER computes.
    """
    COLUMNS: gl.constexpr = dq_columns(CONFIG, CONSUMER)
    ds, key = ds_tiles.index(2 * stage + half), keys.index(slot + half)
    if CONFIG.queries == KEYS:
        ds = ds.slice(CONSUMER * ROWS, ROWS, dim=1)
    else:
        key = key.slice(CONSUMER * CONFIG.chunk_columns, COLUMNS, dim=1)
    return warpgroup_mma(ds.permute((1, 0)), key, grad_q, use_acc=ADD, is_async=True)


@gluon.jit
def _issue_dq(ds_tiles, keys, stage, slot, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Issue the product dS^T K over all 128 keys, for the chunk of dQ that consumer CONSUMER computes.

    `stage` is the stage of the step that wrote dS, and `slot` is the slot of that step's keys.
    """
    COLUMNS: gl.constexpr = dq_columns(CONFIG, CONSUMER)
    own = CONSUMER + _opaque_zero()
    grad_q = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator_layout(COLUMNS))
    grad_q = _issue_dq_half(ds_tiles, keys, stage, slot, own, grad_q, False, CONSUMER, CONFIG)
    return _issue_dq_half(ds_tiles, keys, stage, slot, 1 - own, grad_q, True, CONSUMER, CONFIG)


@gluon.jit
def _wait_for_staging(staging, stage, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Wait until TMA has read the last dQ of this consumer from its staging buffer. `stage` is that of the current step."""
    if CONFIG.deterministic:
        # In every step, a consumer sends one dQ. The phase therefore changes with the stage.
        mbarrier.wait(staging[3].index(CONSUMER), stage ^ 1)
    else:
        hopper_common.tma_store_wait(0)


@gluon.jit
def _send_dq(grad_q, staging, dq_sums, chunk, stage, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Start to add a chunk of dQ to the sums of dq. Call `_wait_for_staging` before.

    In the deterministic backward, one of the two writers adds the chunk, and it finds the chunk's number itself. `stage` is the
    stage of the current step, which decides on the writer.
    """
    own_staging = staging[CONSUMER].index(0)
    own_staging.store(grad_q)
    # Make the stores of the threads visible to TMA, which accesses shared memory through another proxy.
    fence_async_shared()
    if CONFIG.deterministic:
        mbarrier.arrive(staging[2].index(2 * CONSUMER + stage), count=1)
    else:
        tma_reduce_add(dq_sums[CONSUMER], [chunk * (2 * CONFIG.chunk_columns), 0], tile_view(own_staging, dq_sums[CONSUMER]))


@gluon.jit
def _step(
    operands, grad_k, grad_v, dq_sums, key_bounds, start, slot, previous_chunk, previous_slot, buffers, barriers, stage, phase,
    log2_scale, CONSUMER: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute one step: add the contributions of one query tile to grad_k and grad_v, and send the dQ of the previous step.

    Args:
        operands: from `_load_operands`.
        grad_k, grad_v: (64, columns), the parts of the sums of dk / scale and of dv for this consumer's keys, in registers.
        dq_sums: TMA descriptors of the sums of dq, one per consumer.
        key_bounds: from `_key_bounds`.
        start: the first query of the step.
        slot: the slot of the keys of this work tile.
        previous_chunk: the chunk to which the dQ of the previous step is added.
        previous_slot: the slot of the keys that the previous step used.
        stage, phase: the stage of this step, and the phase of the stage's barriers.

    Returns:
        grad_k and grad_v.
    """
    QUERIES: gl.constexpr = CONFIG.queries
    SCORES: gl.constexpr = accumulator_layout(CONFIG.queries)
    BY_QUERY: gl.constexpr = gl.SliceLayout(0, SCORES)
    queries, douts, row_scalars, keys, values, ds_tiles, staging = buffers
    q_full, dout_full, empty = barriers
    query, dout = queries.index(stage), douts.index(stage)
    mbarrier.wait(q_full.index(stage), phase)
    if CONFIG.keeps_operands:
        key, first_value = operands
    else:
        key = split_tile(keys.index(slot + CONSUMER + _opaque_zero()), CONFIG.columns)
    scores = multiply_rows(key, query, CONFIG.columns)
    mbarrier.wait(dout_full.index(stage), phase)
    value = split_tile(values.index(CONSUMER + _opaque_zero()), CONFIG.columns)
    if CONFIG.keeps_operands:
        value = first_value, value[1]
    dp = multiply_rows(value, dout, CONFIG.columns)
    # Wait only until S is complete. The tensor cores compute dP during the exponentials.
    scores = warpgroup_mma_wait(num_parts(CONFIG.columns), deps=(scores,))
    lse = row_scalars.index(stage).slice(0, QUERIES).load(BY_QUERY)
    p = _probabilities(scores, lse, key_bounds, start, log2_scale, CONFIG)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    # Load delta only after the wait. If delta were loaded earlier, the kernel for D = 64 would not have enough registers.
    delta = row_scalars.index(stage).slice(QUERIES, QUERIES).load(BY_QUERY)
    ds = (p * (dp - delta[None, :])).to(query.dtype)
    grad_v = add_product(p.to(query.dtype), dout, grad_v, CONFIG.columns)
    # After this wait, the other consumer has written its dS of the previous step. The other consumer also no longer reads the
    # memory that this step's dS overwrites.
    _wait_for_previous_step(empty, stage, phase)
    ds_tiles.index(2 * stage + CONSUMER).store(ds)
    # wgmma and TMA read shared memory through the same proxy, so the stores of dS also need a fence.
    fence_async_shared()
    if not CONFIG.deterministic:
        # TMA has already read the staging buffer, so this wait is short. The compiler adds a barrier of the warpgroup's threads
        # to this wait. At this place, the same barrier also serves for the stores of dS.
        _wait_for_staging(staging, stage, CONSUMER, CONFIG)
    grad_q = _issue_dq(ds_tiles, keys, stage ^ 1, previous_slot, CONSUMER, CONFIG)
    grad_k = add_product(ds, query, grad_k, CONFIG.columns)
    # Wait until only the product for dK is in flight. Send dQ while the tensor cores compute this product.
    pending = warpgroup_mma_wait(num_parts(CONFIG.columns), deps=grad_v + (grad_q,))
    grad_v, grad_q = pending[:-1], pending[-1]
    if CONFIG.deterministic:
        # The writer may still wait for another work tile, so wait for the writer as late as possible.
        _wait_for_staging(staging, stage, CONSUMER, CONFIG)
    _send_dq(grad_q, staging, dq_sums, previous_chunk, stage, CONSUMER, CONFIG)
    grad_k = wait_for_parts(grad_k, CONFIG.columns)
    mbarrier.arrive(empty.index(stage), count=1)
    return grad_k, grad_v


@gluon.jit
def _load_operands(slot, buffers, barriers, stage, phase, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Load K and the first part of V of this consumer into registers, if it holds them there.

    The arguments are those of `_step` for the first step of a work tile. Return (parts of K, first part of V), or ().
    """
    if CONFIG.keeps_operands:
        queries, douts, row_scalars, keys, values, ds_tiles, staging = buffers
        q_full, dout_full, empty = barriers
        mbarrier.wait(q_full.index(stage), phase)
        key = load_left(keys.index(slot + CONSUMER), CONFIG.queries, CONFIG.columns)
        mbarrier.wait(dout_full.index(stage), phase)
        value = split_tile(values.index(CONSUMER), CONFIG.columns)
        return key, load_left(value[0], CONFIG.queries, value[0].shape[1])[0]
    else:
        return ()


@gluon.jit
def _compute_work_tile(
    work_tile, key_bounds, num_tiles, dq_sums, slot, previous_chunk, previous_slot, buffers, barriers, stage, phase, log2_scale,
    CONSUMER: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute all steps of a work tile.

    `slot` is the slot of the work tile's keys. The other arguments are those of `_step`.

    Returns:
        (grad_k, grad_v, previous chunk, previous slot, next stage, its phase). The previous chunk and the previous slot are
        those of the last step, whose dQ has not been computed yet.
    """
    batch, key_head, first, end, begin, num_steps, direction = work_tile
    grad_k = zero_parts(CONFIG.columns)
    grad_v = zero_parts(CONFIG.columns)
    operands = _load_operands(slot, buffers, barriers, stage, phase, CONSUMER, CONFIG)
    if CONFIG.deterministic and CONFIG.group == 1:
        # The writer knows the chunks, so that a single loop suffices. It needs fewer registers than the loops below.
        for step in range(num_steps + _opaque_zero()):
            start = (begin + step * direction) * CONFIG.queries
            grad_k, grad_v = _step(
                operands, grad_k, grad_v, dq_sums, key_bounds, start, slot, previous_chunk, previous_slot, buffers, barriers,
                stage, phase, log2_scale, CONSUMER, CONFIG,
            )  # fmt: skip
            previous_slot = slot + 0
            stage ^= 1
            if stage == 0:
                phase ^= 1
        return grad_k, grad_v, previous_chunk, previous_slot, stage, phase
    first_chunk = ((batch * CONFIG.num_heads + key_head * CONFIG.group) * num_tiles + begin) * 2 + CONSUMER + SPARE_CHUNK + 1
    # The opaque zero hides the number of iterations from the compiler. If the compiler knew this number, every step would take
    # a few more instructions.
    for _member in range(CONFIG.group + _opaque_zero()):
        start = begin * CONFIG.queries
        # The "+ 0" creates a new value. If a variable is only a second name of another variable, Gluon does not carry it
        # through a loop.
        chunk = first_chunk + 0
        for _step_index in range(num_steps):
            grad_k, grad_v = _step(
                operands, grad_k, grad_v, dq_sums, key_bounds, start, slot, previous_chunk, previous_slot, buffers, barriers,
                stage, phase, log2_scale, CONSUMER, CONFIG,
            )  # fmt: skip
            previous_chunk = chunk + 0
            previous_slot = slot + 0
            stage ^= 1
            if stage == 0:
                phase ^= 1
            start += CONFIG.queries * direction
            chunk += 2 * direction
        first_chunk += 2 * num_tiles
    return grad_k, grad_v, previous_chunk, previous_slot, stage, phase


@gluon.jit
def _consume(arguments, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Run a consumer partition, which computes dk and dv of 64 keys of every work tile."""
    bounds, work_tiles, sizes, dq_sums, dk, dv, scale, buffers, barriers = arguments
    num_masks, num_tiles, num_keys = sizes
    queries, douts, row_scalars, keys, values, ds_tiles, staging = buffers
    q_full, dout_full, empty = barriers
    log2_scale = scale * LOG2_E
    index = gl.to_tensor(0)
    work_tile = _load_work_tile(work_tiles, index, CONFIG)
    key_bounds = _key_bounds(work_tile, bounds, sizes, CONSUMER, CONFIG)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    previous_chunk = gl.to_tensor(SPARE_CHUNK)
    previous_slot = gl.to_tensor(0)
    while work_tile[3] > 0:
        grad_k, grad_v, previous_chunk, previous_slot, stage, phase = _compute_work_tile(
            work_tile, key_bounds, num_tiles, dq_sums, (index & 1) * 2, previous_chunk, previous_slot, buffers, barriers,
            stage, phase, log2_scale, CONSUMER, CONFIG,
        )  # fmt: skip
        # Load these four numbers a second time, so that they do not occupy registers during the steps.
        batch, key_head, first, end, _, _, _ = _load_work_tile(work_tiles, index, CONFIG)
        row_range = batch, key_head, first + CONSUMER * ROWS, end
        index += 1
        # Start to load the next work tile before the gradients of this work tile are written.
        work_tile = _load_work_tile(work_tiles, index, CONFIG)
        key_bounds = _key_bounds(work_tile, bounds, sizes, CONSUMER, CONFIG)
        _wait_for_staging(staging, stage, CONSUMER, CONFIG)
        own_staging = staging[CONSUMER]
        grad_v, grad_k = join_parts(grad_v, CONFIG.columns), join_parts(grad_k, CONFIG.columns) * scale
        _write_gradient(dv, grad_v, own_staging, row_range, num_keys, CONFIG.value_dim, CONFIG.add_dv, CONFIG)
        _write_gradient(dk, grad_k, own_staging, row_range, num_keys, CONFIG.head_dim, CONFIG.add_dk, CONFIG)
    # Compute and send the dQ of the last step.
    _wait_for_previous_step(empty, stage, phase)
    grad_q = _issue_dq(ds_tiles, keys, stage ^ 1, previous_slot, CONSUMER, CONFIG)
    grad_q = warpgroup_mma_wait(0, deps=(grad_q,))
    _wait_for_staging(staging, stage, CONSUMER, CONFIG)
    _send_dq(grad_q, staging, dq_sums, previous_chunk, stage, CONSUMER, CONFIG)
    if not CONFIG.deterministic:
        # The program's shared memory is freed when the program ends. Therefore wait until TMA has read the last dQ from shared
        # memory. In the deterministic backward, the writer waits.
        hopper_common.tma_store_wait(0)


@gluon.jit
def _write_gradient(grads, tile, staging, row_range, num_keys, COLUMNS: gl.constexpr, ADD: gl.constexpr, CONFIG: gl.constexpr):
    """Write a consumer's dk or dv. With ADD, add it to an accumulator instead.

    Args:
        grads: contiguous (B, num_keys, Hkv, COLUMNS).
        tile: (64, dim), in registers.
        staging: unused shared memory of the size of a chunk. A gradient in 16 bits is rearranged in this memory.
        row_range: (batch entry, key head, first key of the consumer, end of the work tile's keys).
    """
    batch, key_head, own, end = row_range
    NUM_KEY_HEADS: gl.constexpr = CONFIG.num_heads // CONFIG.group
    base = grads + ((batch * num_keys + own).to(gl.int64) * NUM_KEY_HEADS + key_head) * COLUMNS
    dtype: gl.constexpr = base.dtype.element_ty
    DIM: gl.constexpr = CONFIG.dim
    WHOLE_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    # Four threads of an accumulator hold 8 neighbouring columns. In fp32, these columns fill a whole 32-byte sector of memory,
    # so the threads store them directly. In 16 bits, these columns fill only half of a sector. The tile is therefore rearranged
    # first, so that the threads store whole rows.
    STORED: gl.constexpr = CONFIG.output_layout if dtype == gl.float32 else WHOLE_ROWS
    tile = tile.to(dtype)
    if dtype != gl.float32:
        MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], dtype)
        # The view covers the whole memory of the chunk. If DIM is 64, the rows need only half of this memory.
        in_order = hopper_common.reinterpret(staging, dtype, [2 * ROWS * CONFIG.chunk_columns // DIM, DIM], MATRIX)
        in_order = in_order.slice(0, ROWS)
        in_order.store(tile)
        tile = in_order.load(STORED)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))
    columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, STORED))
    pointers = base + rows.to(gl.int64)[:, None] * (NUM_KEY_HEADS * COLUMNS) + columns[None, :]
    mask = (rows < end - own)[:, None] & (columns < COLUMNS)[None, :]
    if ADD:
        tile += gl.load(pointers, mask=mask, other=0.0)
    gl.store(pointers, tile, mask=mask)


@gluon.jit
def _allocate_staging(CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Allocate the staging buffer of a consumer, of the size of a chunk. Its first entry (64, n) holds the consumer's dQ."""
    COLUMNS: gl.constexpr = dq_columns(CONFIG, CONSUMER)
    return gl.allocate_shared_memory(
        gl.float32, [CONFIG.chunk_columns // COLUMNS, ROWS, COLUMNS], staging_layout(COLUMNS)
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_masks", "num_tiles", "num_keys"])
def _main_kernel(
    q, k, v, dout, scalars, first_dq_sums, second_dq_sums, dk, dv, query_lo, query_hi, work_tiles, progress,
    num_masks, num_tiles, num_keys, scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of all work tiles, and sum dq. `IncrementalBackward.add` launches this kernel.

    Args:
        q, k, v, dout: TMA descriptors of (B, Nq, Hq, D), (B, Nk, Hkv, D), (B, Nk, Hkv, Dv) and (B, Nq, Hq, Dv).
        scalars: TMA descriptor of the scalars that `_prepare_kernel` writes.
        first_dq_sums, second_dq_sums: TMA descriptors of the sums of dq, for the chunks of each of the two consumers.
        dk, dv: (B, Nk, Hkv, D) and (B, Nk, Hkv, Dv). The kernel writes the gradients to these tensors, or adds them.
        query_lo, query_hi: (num_masks, Nk), the interval of queries that see each key.
        work_tiles: (n, programs, 8), see `Intervals.work_tiles`. In the deterministic backward (n, programs, 12), see
            `Intervals.ordered_work_tiles`.
        progress: zeros, int32, `HEADER` followed by two numbers per work tile, or None if the backward is not deterministic.
        num_masks: 1 if all batch entries have the same mask, else B.
        num_tiles: number of query tiles of a head.
        num_keys: Nk.
        scale: the softmax scale.
    """
    DIM: gl.constexpr = CONFIG.dim
    QUERIES: gl.constexpr = CONFIG.queries
    MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], q.dtype)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, QUERIES], q.dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(q.dtype, [STAGES, QUERIES, DIM], MATRIX)
    douts = gl.allocate_shared_memory(q.dtype, [STAGES, QUERIES, DIM], MATRIX)
    row_scalars = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * QUERIES], scalars.layout)
    keys = gl.allocate_shared_memory(q.dtype, [2 * KEY_SLOTS, ROWS, DIM], MATRIX)
    values = gl.allocate_shared_memory(q.dtype, [2, ROWS, DIM], MATRIX)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [2 * STAGES, ROWS, QUERIES], DS)
    staging = _allocate_staging(0, CONFIG), _allocate_staging(1, CONFIG)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    # A partition makes a single arrival for all of its threads. The producer arrives at the `full` barriers, and both consumers
    # arrive at `empty`.
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dout_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    if CONFIG.deterministic:
        # `staged` has one slot per consumer and stage: the staging buffer of this consumer has been filled. `released` uses one
        # slot per consumer: a writer has sent the staging buffer.
        staged, released = allocate_barriers(4, 1, 1)
        staging = staging + (staged, released)
        work_tiles += take_number(progress) * CONFIG.entry_size
    # Make the initialised barriers visible to TMA.
    fence_async_shared()
    # Pass each constant as a separate argument. If a constant is in a tuple that is a variable, Gluon turns it into a tensor.
    sizes = num_masks, num_tiles, num_keys
    buffers = queries, douts, row_scalars, keys, values, ds_tiles, staging
    barriers = q_full, dout_full, empty
    loading = q, k, v, dout, scalars, work_tiles, num_tiles, buffers, barriers
    dq_sums = first_dq_sums, second_dq_sums
    computing = (query_lo, query_hi), work_tiles, sizes, dq_sums, dk, dv, scale, buffers, barriers
    if CONFIG.deterministic:
        writing = dq_sums, work_tiles, progress, num_tiles, staging
        gl.warp_specialize(
            [
                (_consume, (computing, 0, CONFIG)), (_consume, (computing, 1, CONFIG)), (_produce, (loading, CONFIG)),
                (write_in_order, (writing, 0, CONFIG)), (write_in_order, (writing, 1, CONFIG)),
            ],
            [4, 1, 1, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, WRITER_REGISTERS, WRITER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consume, (computing, 0, CONFIG)), (_consume, (computing, 1, CONFIG)), (_produce, (loading, CONFIG))],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


@triton.jit(do_not_specialize=["num_tiles", "num_queries"])
def _finish_kernel(dq_sums, dq, num_tiles, num_queries, scale, CONFIG: tl.constexpr):
    """Bring one chunk of dq into row order, multiply it by `scale`, and write it or add it to an accumulator.

    Args:
        dq_sums: the spare chunk, followed by the sums of dq, in fp32.
        dq: contiguous (B, Nq, Hq, D).
        num_tiles: number of query tiles of a head.
        num_queries: Nq.
        scale: the softmax scale.
    """
    COLUMNS: tl.constexpr = CONFIG.chunk_columns
    QUERIES: tl.constexpr = CONFIG.queries
    NUM_HEADS: tl.constexpr = CONFIG.num_heads
    chunk = tl.program_id(0).to(tl.int64)
    half, tile, pair = chunk % 2, chunk // 2 % num_tiles, chunk // 2 // num_tiles
    element = tl.arange(0, ROWS * COLUMNS)
    used = half * (ROWS * COLUMNS) + element < CONFIG.used_size
    flat = tl.load(dq_sums + (SPARE_CHUNK + 1 + chunk) * (ROWS * COLUMNS) + element, mask=used, other=0.0)
    rows = tile * QUERIES + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    if QUERIES == KEYS:
        rows += half * ROWS
    else:
        columns += (half * COLUMNS).to(tl.int32)
    index = ((pair // NUM_HEADS * num_queries + rows) * NUM_HEADS + pair % NUM_HEADS)[:, None] * CONFIG.head_dim
    index += columns[None, :]
    mask = (rows < num_queries)[:, None] & (columns < CONFIG.head_dim)[None, :]
    # The dimensions of the register order are (group of 8 columns, warp, lane // 4, lane % 4, 2 rows at a distance of 8, 2
    # columns).
    in_registers = tl.reshape(flat, (COLUMNS // 8, 4, 8, 4, 2, 2))
    grad = tl.reshape(tl.permute(in_registers, (1, 4, 2, 0, 3, 5)), (ROWS, COLUMNS)) * scale
    if CONFIG.add_dq:
        grad += tl.load(dq + index, mask=mask, other=0.0)
    tl.store(dq + index, grad.to(dq.dtype.element_ty), mask=mask)


def backward(
    q, k, v, dout, lse, delta, intervals, scale, dq=None, dk=None, dv=None,
    *, grad_dtype=None, dropout=None, blocks=None, precision="ieee", shares_sms=False,
):  # fmt: skip
    """Compute the gradients of one block of queries and one block of keys on one sm_90 GPU (Dao 2023, algorithm 2).

    dk and dv are bitwise identical in every run. dq is summed in no fixed order, so the last bits of its fp32 sums may differ
    from run to run. Under `torch.use_deterministic_algorithms(True)`, dq is summed in a fixed order, which takes longer.

    This function does not check its arguments. Call `ringattn.kernels.dispatch.backward`, which checks them.

    Args:
        q: (B, Nq, Hq, D), fp16 or bf16; D is a multiple of 8 up to 128. TMA requires that the last dimension is contiguous and
            that the other strides are multiples of 8 elements. If q, k, v or dout has other strides, it is copied.
        k: (B, Nk, Hkv, D) in q's dtype; Hkv divides Hq, and Nk is at least 1.
        v: (B, Nk, Hkv, Dv) in q's dtype; Dv is a multiple of 8 up to 128.
        dout: gradient of the output, (B, Nq, Hq, Dv) in q's dtype.
        lse: (B, Nq, Hq), fp32, over all keys of every query, including the keys of other blocks.
        delta: (B, Nq, Hq), fp32, from `row_delta`. The tuple (out, dlse) is also accepted. In that case the backward computes
            delta itself, which saves a launch.
        intervals: for every query, the range [lo, hi) of keys that it may attend to, for 1 or B batch entries, on q's device.
        scale: multiplies the scores before the softmax, usually D ** -0.5. It must be positive.
        dq, dk, dv: accumulators with the shapes of q, k and v, fp32 and contiguous, to which the gradients are added. For None,
            a new tensor is returned.
        grad_dtype: the dtype of new gradients: q's dtype (None) or fp32.
        dropout, blocks: must be None.
        precision: ignored, because it applies to fp32 inputs only.
        shares_sms: whether other kernels, such as NCCL's, run on the SMs at the same time.
            `ringattn.kernels.hopper.forward.forward` explains this argument.

    Returns:
        (dq, dk, dv). Each of them is either the accumulator or a new contiguous tensor.
    """
    if q.numel() == 0 or k.numel() == 0:
        return triton_common.allocate_gradients(q, k, v, (dq, dk, dv), grad_dtype)
    kernels = IncrementalBackward(q, dout, lse, delta, scale, shares_sms)
    dk, dv = kernels.add(k, v, intervals, dk, dv, grad_dtype=grad_dtype)
    return kernels.finish(dq, grad_dtype), dk, dv


class IncrementalBackward:
    """The backward of the same queries over several blocks of keys, which a ring delivers one after another.

    The queries are prepared once, before the first block. dq is finished once, after the last block. dq is summed in a fixed
    order if PyTorch's deterministic algorithms are enabled when the object is created.

    Args:
        q, dout, lse, delta, scale, shares_sms: as for `backward`. lse is over the keys of all blocks.
    """

    def __init__(self, q: Tensor, dout: Tensor, lse: Tensor, delta: Delta, scale: float, shares_sms: bool = False) -> None:
        self._queries, self._scale, self._shares_sms = (q, dout, lse, delta), float(scale), shares_sms
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._sums: tuple[Tensor, Tensor] | None = None
        self._config: Config | None = None

    def add(
        self, k: Tensor, v: Tensor, intervals: Intervals, dk: Tensor | None = None, dv: Tensor | None = None,
        dropout: Dropout | None = None, grad_dtype: torch.dtype | None = torch.float32,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Add the contribution of one block of keys to dq, and return (dk, dv) of this block.

        Args:
            k, v: (B, Nk, Hkv, D) and (B, Nk, Hkv, Dv).
            intervals: for every query, the range of keys of this block that it may attend to.
            dk, dv: fp32 accumulators with the shapes of k and v, or None.
            dropout: must be None.
            grad_dtype: the dtype of a new dk or dv: fp32 or q's dtype (None).

        Returns:
            (dk, dv): the accumulators, or new tensors.

        Raises:
            ValueError: `dropout` is not None.
        """
        if dropout is not None:
            raise ValueError("the Hopper backward has no dropout: use dispatch.IncrementalBackward(..., plain=False)")
        q, dout, lse, delta = self._queries
        (batch, num_queries, num_heads, head_dim), (num_keys, num_key_heads, value_dim) = q.shape, v.shape[1:]
        add = False, dk is not None, dv is not None
        config = _configure(head_dim, value_dim, num_heads, num_key_heads, add, self._deterministic)
        _, *grads = triton_common.allocate_gradients(q, k, v, (q, dk, dv), grad_dtype)
        num_tiles = -(-num_queries // config.queries)
        by_key = intervals.transposed
        programs = hopper_common.num_programs(q.device, self._shares_sms)
        work_tiles, progress = _work_tiles(by_key, batch, num_key_heads, num_queries, programs, config)
        with torch.cuda.device_of(q):
            if self._sums is None:
                self._sums, self._config = _prepare(q, dout, lse, delta, config), config
            if by_key.num_nonempty_rows < by_key.lo.numel():
                # A tile of keys that no query sees has no work tile, so no program writes the gradients of these keys. Set new
                # gradients to zero.
                for grad, accumulator in zip(grads, (dk, dv), strict=True):
                    if accumulator is None:
                        grad.zero_()
            tiles = (q, config.queries), (k, ROWS.value), (v, ROWS.value), (dout, config.queries)
            scratch = _scratch_descriptors(batch * num_heads * num_tiles, config)
            descriptors = (
                *(hopper_common.tma_descriptor(hopper_common.as_addressable(x), rows, config.dim) for x, rows in tiles),
                *map(hopper_common.with_base, scratch, (*self._sums, self._sums[1])),
            )
            # If there is one program per SM, programs wait for each other in the deterministic backward. A cooperative launch
            # guarantees that all programs run at the same time.
            launch(
                _main_kernel, work_tiles.shape[1], (*descriptors, *grads, by_key.lo, by_key.hi, work_tiles, progress),
                (by_key.batch, num_tiles, num_keys, self._scale), config.deterministic and not self._shares_sms, CONFIG=config,
            )  # fmt: skip
        return tuple(grads)

    def finish(self, dq: Tensor | None = None, grad_dtype: torch.dtype | None = None) -> Tensor:
        """Return dq (B, Nq, Hq, D), summed over all blocks that have been added.

        Args:
            dq: fp32 accumulator to which the gradient is added. For None, a new tensor is returned.
            grad_dtype: the dtype of a new dq: fp32 or q's dtype (None).
        """
        q = self._queries[0]
        if self._sums is None:
            return torch.zeros_like(q, dtype=grad_dtype) if dq is None else dq
        batch, num_queries, num_heads, _ = q.shape
        config = replace(self._config, add_dq=dq is not None)
        if dq is None:
            dq = torch.empty_like(q, dtype=grad_dtype, memory_format=torch.contiguous_format)
        num_tiles = -(-num_queries // config.queries)
        arguments = (self._sums[1], dq), (num_tiles, num_queries, self._scale)
        with torch.cuda.device_of(q):
            launch(_finish_kernel, 2 * batch * num_heads * num_tiles, *arguments, CONFIG=config)
        return dq


@lru_cache(maxsize=256)
def _scratch_descriptors(num_head_tiles: int, config: Config) -> list[TensorDescriptor]:
    """Return the TMA descriptors for loading the scalars of a query tile and for adding the dQ of each of the two consumers.

    These descriptors do not refer to a tensor yet. `ringattn.kernels.hopper.common.with_base` adds the tensor.
    """
    no_tensor = torch.empty(1, dtype=torch.float32, device="cpu")
    num_rows = (config.chunk_size + num_head_tiles * config.queries * config.dim) // 32
    scalars = TensorDescriptor(no_tensor, [num_head_tiles * 2 * config.queries], [1], [2 * config.queries], SCALARS_LAYOUT)
    blocks = [(2 * dq_columns(config, consumer), 32) for consumer in range(2)]
    layouts = [hopper_common.shared_layout(block, torch.float32) for block in blocks]
    sums = [TensorDescriptor(no_tensor, [num_rows, 32], [32, 1], list(x), y) for x, y in zip(blocks, layouts, strict=True)]
    return [scalars, *sums]


@lru_cache(maxsize=256)
def _configure(
    head_dim: int, value_dim: int, num_heads: int, num_key_heads: int, add: tuple[bool, bool, bool], deterministic: bool = False
) -> Config:
    """Return the constants of the kernels for D, Dv, Hq and Hkv. `add` tells which of dq, dk and dv are accumulators."""
    dim = hopper_common.padded_dim(head_dim, value_dim)
    return Config(dim, value_dim, num_heads, num_heads // num_key_heads, head_dim, *add, deterministic)


def _work_tiles(
    by_key: Intervals, batch: int, num_key_heads: int, num_queries: int, programs: int, config: Config
) -> tuple[Tensor, Tensor | None]:
    """Return the table of work tiles for at most `programs` programs, and the progress of all work tiles.

    The progress is None if the backward is not deterministic.
    """
    heads_per_group = _heads_per_group(num_queries)
    if config.deterministic:
        table = by_key.ordered_work_tiles(
            KEYS.value, config.queries, batch, num_key_heads, heads_per_group, programs, config.group
        )
        return table, table.new_zeros(HEADER.value + 2 * table.shape[0] * table.shape[1])
    num_head_groups = -(-batch * num_key_heads // heads_per_group)
    table = by_key.work_tiles(
        KEYS.value, config.queries, batch, num_key_heads, num_head_groups, programs, skip_empty=True, group=config.group
    )
    return table, None


def _heads_per_group(num_queries: int) -> int:
    """Return the maximal number of key heads in a head group.

    The heads of a group are processed together, block of keys by block of keys. For short sequences, a group of many heads
    balances the load better, and its sums of dq stay in the L2 cache. For long sequences, a single head already balances the
    load, and the sums of dq do not fit into the L2 cache.
    """
    return 32768 // num_queries if num_queries <= 8192 else 1


def _prepare(q: Tensor, dout: Tensor, lse: Tensor, delta: Delta, config: Config) -> tuple[Tensor, Tensor]:
    """Launch `_prepare_kernel`. Return (scalars, dq_sums). The main kernel reads `scalars` and adds to `dq_sums`."""
    batch, num_queries, num_heads, _ = q.shape
    num_tiles = -(-num_queries // config.queries)
    num_head_tiles = batch * num_heads * num_tiles
    scalars = lse.new_empty(num_head_tiles * 2 * config.queries)
    dq_sums = lse.new_empty(config.chunk_size + num_head_tiles * config.queries * config.dim)
    rows = lse.contiguous(), *hopper_common.delta_operands(delta, dout)
    launch(_prepare_kernel, num_head_tiles, (*rows, scalars, dq_sums), (num_tiles, num_queries), CONFIG=config)
    return scalars, dq_sums
