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

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper.backward_common import (
    CONSUMER_REGISTERS,
    load_key_bounds,
    opaque_zero,
    probabilities,
    store_rows,
)
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
from ringattn.kernels.hopper.common import (
    LOG2_E,
    PRODUCER_REGISTERS,
    ROWS,
    accumulator_layout,
    allocate_barriers,
    tile_view,
    tma_load,
    tma_reduce_add,
)
from ringattn.kernels.hopper.dq_order import WRITER_REGISTERS, take_number, write_in_order
from ringattn.kernels.triton.common import load_tile

# The number of keys of a work tile. Each of the two consumers computes 64 keys.
KEYS = gl.constexpr(128)

# The number of stages of Q, dO and dS. The code relies on exactly two stages, because it computes the other stage as `stage ^
# 1`.
STAGES = gl.constexpr(2)

# The number of slots of K. The two slots hold the keys of two consecutive work tiles.
KEY_SLOTS = gl.constexpr(2)

# The index of the spare chunk, which lies in front of the sums of dq. The spare chunk receives the first dQ of every program
# and is never read.
SPARE_CHUNK = gl.constexpr(0)


@gluon.constexpr_function
def dq_columns(config, consumer: int) -> int:
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
def _load_own_bounds(work_tile, bounds, sizes, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Return `load_key_bounds` of this consumer's keys."""
    batch, _, first, end, _, _, _ = work_tile
    return load_key_bounds(batch, first + CONSUMER * ROWS, end, bounds, sizes, CONFIG.queries)


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
    own = CONSUMER + opaque_zero()
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
        key_bounds: from `load_key_bounds`.
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
        key = split_tile(keys.index(slot + CONSUMER + opaque_zero()), CONFIG.columns)
    scores = multiply_rows(key, query, CONFIG.columns)
    mbarrier.wait(dout_full.index(stage), phase)
    value = split_tile(values.index(CONSUMER + opaque_zero()), CONFIG.columns)
    if CONFIG.keeps_operands:
        value = first_value, value[1]
    dp = multiply_rows(value, dout, CONFIG.columns)
    # Wait only until S is complete. The tensor cores compute dP during the exponentials.
    scores = warpgroup_mma_wait(num_parts(CONFIG.columns), deps=(scores,))
    lse = row_scalars.index(stage).slice(0, QUERIES).load(BY_QUERY)
    row_bounds, first_unmasked, last_unmasked = key_bounds
    is_masked = (start < first_unmasked) | (start > last_unmasked)
    p = probabilities(scores, lse, row_bounds, start, is_masked, log2_scale, QUERIES, True)
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
        for step in range(num_steps + opaque_zero()):
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
    for _member in range(CONFIG.group + opaque_zero()):
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
    key_bounds = _load_own_bounds(work_tile, bounds, sizes, CONSUMER, CONFIG)
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
        key_bounds = _load_own_bounds(work_tile, bounds, sizes, CONSUMER, CONFIG)
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
    store_rows(base, tile, own, end, 0, NUM_KEY_HEADS, COLUMNS, ADD)


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
