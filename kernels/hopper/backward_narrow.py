"""The backward kernel for Hopper GPUs (sm_90) and head dims up to 128, in Gluon: FlashAttention-2 (Dao 2023, algorithm 2),
pipelined as in FlashAttention-3 (Shah et al. 2024, section 3).

Each consumer warpgroup keeps dk and dv of 64 keys in registers. Scores are transposed, so rows are keys and columns are
queries.

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

One step of a consumer:

      S = K Q^T, dP = V dO^T              issue both
      P = exp2(S - lse)                   in registers, while dP runs
      dS = P (dP - delta)                 in registers
      dV += P dO                          issue
      store dS in shared memory           once the other consumer has finished the previous step
      dQ = dS^T K of the previous step    issue; each consumer computes half of the columns (D > 64) or rows (D <= 64)
      dK += dS Q                          issue
      send dQ                             while dK runs
      release the stage

In each step, a consumer waits at the mbarrier `empty` until both consumers have finished the previous step. Once both consumers
have finished a step, its dS is complete, and the buffer of the preceding dS is free.

If a matrix product is in flight at the end of a loop iteration, ptxas serialises all products.
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

KEYS = gl.constexpr(128)

# Q, dO and dS have two buffers each, so `stage ^ 1` is the other buffer.
STAGES = gl.constexpr(2)

KEY_SLOTS = gl.constexpr(2)

# The first dQ of a program is uninitialised, so it is added to an unused chunk of the sums.
SPARE_CHUNK = gl.constexpr(0)


@gluon.constexpr_function
def dq_columns(config, consumer: int) -> int:
    return 32 if (config.columns, consumer) == (96, 1) else config.chunk_columns


@gluon.constexpr_function
def staging_layout(columns: int) -> gl.SharedLinearLayout:
    """dQ (64, columns) has the same order in shared memory as in registers, which avoids bank conflicts.

    Entry i of `order` is the (row, column) of the element at offset 2**i. The 128-byte swizzle of TMA replaces bits 2 to 4 of
    an offset by their XOR with bits 5 to 7. This layout cancels the swizzle.
    """
    order = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0]]
    order += [[0, 8 << i] for i in range((columns // 8).bit_length() - 1)]
    swizzled = [[a ^ b for a, b in zip(order[5 + i], order[2 + i], strict=True)] for i in range(3)]
    return gl.SharedLinearLayout(order[:5] + swizzled + order[8:], [], 1024)


@gluon.jit
def _load_work_tile(work_tiles, index, CONFIG: gl.constexpr):
    """The returned direction is 1, or -1 if the loop starts at the last query tile."""
    if CONFIG.deterministic:
        entry = work_tiles + index * gl.num_programs(0) * CONFIG.entry_size
        direction = gl.load(entry + 8)
    else:
        entry = work_tiles + (index * gl.num_programs(0) + gl.program_id(0)) * CONFIG.entry_size
        direction = 1
    first, end, loop = load_tile(entry)
    begin, _, num_unmasked, num_masked = loop
    head, batch = gl.load(entry + 6), gl.load(entry + 7)
    num_steps = gl.maximum(num_unmasked + num_masked, 1)
    return batch, head, first, end, begin // CONFIG.queries, num_steps, direction


@gluon.jit
def _wait_for_previous_step(empty, stage, phase):
    mbarrier.wait(empty.index(stage ^ 1), phase ^ 1 ^ stage)


@gluon.jit
def _expect_bytes(full, BYTES: gl.constexpr, MORE_BYTES: gl.constexpr, more):
    mbarrier.expect(full, BYTES, pred=~more)
    mbarrier.expect(full, BYTES + MORE_BYTES, pred=more)


@gluon.jit
def _load_halves(tensor, coordinates, tiles, slot, full):
    batch, first, head = coordinates
    for half in gl.static_range(2):
        tma_load(tensor, [batch, first + half * ROWS, head, 0], full, tile_view(tiles.index(slot + half), tensor))


@gluon.jit
def _produce(arguments, CONFIG: gl.constexpr):
    QUERIES: gl.constexpr = CONFIG.queries
    q, k, v, dout, scalars, work_tiles, num_tiles, buffers, barriers = arguments
    queries, douts, row_scalars, keys, values, _ds_tiles, _staging = buffers
    q_full, dout_full, empty = barriers
    index = gl.to_tensor(0)
    batch, key_head, first, end, begin, num_steps, direction = _load_work_tile(work_tiles, index, CONFIG)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
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
                    # The buffer for this K contains an older K, which the first step of the previous work tile reads for dQ. If
                    # the previous work tile has only one step, wait for this step.
                    if previous_steps == 1:
                        _wait_for_previous_step(empty, stage, phase)
                    _load_halves(k, coordinates, keys, (index & 1) * 2, full)
                _expect_bytes(dout_full.index(stage), dout.block_type.nbytes, 2 * v.block_type.nbytes, is_first)
                tma_load(dout, [batch, row, head, 0], dout_full.index(stage), tile_view(douts.index(stage), dout))
                if is_first:
                    # The last step of the previous work tile may still read the only buffer for V.
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
    """Only queries in [first_seen, end_seen) attend to this consumer's keys."""
    batch, _, first, end, _, _, _ = work_tile
    query_lo, query_hi = bounds
    num_masks, _, num_keys = sizes
    own = first + CONSUMER * ROWS
    offset = gl.minimum(batch, num_masks - 1) * num_keys
    first_seen = gl.load(query_lo + offset + own, mask=own < end, other=0)
    end_seen = gl.load(query_hi + offset + gl.minimum(own + ROWS, end) - 1, mask=own < end, other=0)
    return load_key_bounds(batch, own, end, bounds, sizes, CONFIG.queries), first_seen, end_seen


@gluon.jit
def _issue_dq_half(ds_tiles, keys, stage, slot, half, grad_q, ADD: gl.constexpr, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    COLUMNS: gl.constexpr = dq_columns(CONFIG, CONSUMER)
    ds, key = ds_tiles.index(2 * stage + half), keys.index(slot + half)
    if CONFIG.queries == KEYS:
        ds = ds.slice(CONSUMER * ROWS, ROWS, dim=1)
    else:
        key = key.slice(CONSUMER * CONFIG.chunk_columns, COLUMNS, dim=1)
    return warpgroup_mma(ds.permute((1, 0)), key, grad_q, use_acc=ADD, is_async=True)


@gluon.jit
def _issue_dq(ds_tiles, keys, stage, slot, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    COLUMNS: gl.constexpr = dq_columns(CONFIG, CONSUMER)
    own = CONSUMER + opaque_zero()
    grad_q = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator_layout(COLUMNS))
    grad_q = _issue_dq_half(ds_tiles, keys, stage, slot, own, grad_q, False, CONSUMER, CONFIG)
    return _issue_dq_half(ds_tiles, keys, stage, slot, 1 - own, grad_q, True, CONSUMER, CONFIG)


@gluon.jit
def _wait_for_staging(staging, stage, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    if CONFIG.deterministic:
        # One dQ is sent per step.
        mbarrier.wait(staging[3].index(CONSUMER), stage ^ 1)
    else:
        hopper_common.tma_store_wait(0)


@gluon.jit
def _send_dq(grad_q, staging, dq_sums, chunk, stage, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    own_staging = staging[CONSUMER].index(0)
    own_staging.store(grad_q)
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
    """Add the gradients of one query tile to grad_k and grad_v, and dQ of the previous step to dq. Return (grad_k, grad_v).

    Args:
        operands: from `_load_operands`.
        grad_k, grad_v: the parts of dk / scale and dv (64, columns).
        dq_sums: TMA descriptors of the sums of dq, one per consumer.
        key_bounds: from `load_key_bounds`.
        start: the first query of the step.
        previous_chunk: the chunk to which dQ of the previous step is added.
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
    scores = warpgroup_mma_wait(num_parts(CONFIG.columns), deps=(scores,))
    lse = row_scalars.index(stage).slice(0, QUERIES).load(BY_QUERY)
    row_bounds, first_unmasked, last_unmasked = key_bounds
    is_masked = (start < first_unmasked) | (start > last_unmasked)
    p = probabilities(scores, lse, row_bounds, start, is_masked, log2_scale, QUERIES, True)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    # Load delta as late as possible, because loading it earlier would spill registers at D = 64.
    delta = row_scalars.index(stage).slice(QUERIES, QUERIES).load(BY_QUERY)
    ds = (p * (dp - delta[None, :])).to(query.dtype)
    grad_v = add_product(p.to(query.dtype), dout, grad_v, CONFIG.columns)
    _wait_for_previous_step(empty, stage, phase)
    ds_tiles.index(2 * stage + CONSUMER).store(ds)
    # Without this fence, wgmma could read shared memory before the stores of dS are visible.
    fence_async_shared()
    if not CONFIG.deterministic:
        # After this wait, the compiler adds a thread barrier, which must follow the stores of dS.
        _wait_for_staging(staging, stage, CONSUMER, CONFIG)
    grad_q = _issue_dq(ds_tiles, keys, stage ^ 1, previous_slot, CONSUMER, CONFIG)
    grad_k = add_product(ds, query, grad_k, CONFIG.columns)
    pending = warpgroup_mma_wait(num_parts(CONFIG.columns), deps=grad_v + (grad_q,))
    grad_v, grad_q = pending[:-1], pending[-1]
    if CONFIG.deterministic:
        # Wait for the writer warp as late as possible.
        _wait_for_staging(staging, stage, CONSUMER, CONFIG)
    _send_dq(grad_q, staging, dq_sums, previous_chunk, stage, CONSUMER, CONFIG)
    grad_k = wait_for_parts(grad_k, 0, num_parts(CONFIG.columns))
    mbarrier.arrive(empty.index(stage), count=1)
    return grad_k, grad_v


@gluon.jit
def _skip_step(
    dq_sums, previous_chunk, previous_slot, buffers, barriers, stage, phase, CONSUMER: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """If no query of a step attends to this consumer's keys, only add dQ of the previous step to dq."""
    queries, _douts, _row_scalars, keys, _values, ds_tiles, staging = buffers
    q_full, dout_full, empty = barriers
    mbarrier.wait(q_full.index(stage), phase)
    mbarrier.wait(dout_full.index(stage), phase)
    _wait_for_previous_step(empty, stage, phase)
    QUERIES: gl.constexpr = CONFIG.queries
    SCORES: gl.constexpr = accumulator_layout(CONFIG.queries)
    ds_tiles.index(2 * stage + CONSUMER).store(gl.full([ROWS, QUERIES], 0.0, queries.dtype, SCORES))
    fence_async_shared()
    _wait_for_staging(staging, stage, CONSUMER, CONFIG)
    grad_q = _issue_dq(ds_tiles, keys, stage ^ 1, previous_slot, CONSUMER, CONFIG)
    grad_q = warpgroup_mma_wait(0, deps=(grad_q,))
    _send_dq(grad_q, staging, dq_sums, previous_chunk, stage, CONSUMER, CONFIG)
    mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def _step_or_skip(
    operands, grad_k, grad_v, dq_sums, bounds, start, slot, previous_chunk, previous_slot, buffers, barriers, stage, phase,
    log2_scale, CONSUMER: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    key_bounds, first_seen, end_seen = bounds
    if not CONFIG.skips_steps or ((start < end_seen) & (start + CONFIG.queries > first_seen)):
        grad_k, grad_v = _step(
            operands, grad_k, grad_v, dq_sums, key_bounds, start, slot, previous_chunk, previous_slot, buffers, barriers, stage,
            phase, log2_scale, CONSUMER, CONFIG,
        )  # fmt: skip
    else:
        _skip_step(dq_sums, previous_chunk, previous_slot, buffers, barriers, stage, phase, CONSUMER, CONFIG)
    return grad_k, grad_v


@gluon.jit
def _load_operands(slot, buffers, barriers, stage, phase, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    if CONFIG.keeps_operands:
        _queries, _douts, _row_scalars, keys, values, _ds_tiles, _staging = buffers
        q_full, dout_full, _empty = barriers
        mbarrier.wait(q_full.index(stage), phase)
        key = load_left(keys.index(slot + CONSUMER), CONFIG.queries, CONFIG.columns)
        mbarrier.wait(dout_full.index(stage), phase)
        value = split_tile(values.index(CONSUMER), CONFIG.columns)
        return key, load_left(value[0], CONFIG.queries, value[0].shape[1])[0]
    else:
        return ()


@gluon.jit
def _compute_work_tile(
    work_tile, bounds, num_tiles, dq_sums, slot, previous_chunk, previous_slot, buffers, barriers, stage, phase, log2_scale,
    CONSUMER: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute all steps of a work tile, except for dQ of the last step.

    Return (grad_k, grad_v, previous chunk, previous slot, next stage, its phase).
    """
    batch, key_head, _first, _end, begin, num_steps, direction = work_tile
    grad_k = zero_parts(CONFIG.columns)
    grad_v = zero_parts(CONFIG.columns)
    operands = _load_operands(slot, buffers, barriers, stage, phase, CONSUMER, CONFIG)
    if CONFIG.deterministic and CONFIG.group == 1:
        # A single loop over all steps saves registers.
        for step in range(num_steps + opaque_zero()):
            start = (begin + step * direction) * CONFIG.queries
            grad_k, grad_v = _step_or_skip(
                operands, grad_k, grad_v, dq_sums, bounds, start, slot, previous_chunk, previous_slot, buffers, barriers,
                stage, phase, log2_scale, CONSUMER, CONFIG,
            )  # fmt: skip
            previous_slot = slot + 0
            stage ^= 1
            if stage == 0:
                phase ^= 1
        return grad_k, grad_v, previous_chunk, previous_slot, stage, phase
    first_chunk = ((batch * CONFIG.num_heads + key_head * CONFIG.group) * num_tiles + begin) * 2 + CONSUMER + SPARE_CHUNK + 1
    # `opaque_zero` hides the number of iterations. Otherwise, the compiler would generate more instructions per step.
    for _member in range(CONFIG.group + opaque_zero()):
        start = begin * CONFIG.queries
        # Gluon rejects two names for one value in a loop, so add 0 to create a second value.
        chunk = first_chunk + 0
        for _step_index in range(num_steps):
            grad_k, grad_v = _step_or_skip(
                operands, grad_k, grad_v, dq_sums, bounds, start, slot, previous_chunk, previous_slot, buffers, barriers,
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
    bounds, work_tiles, sizes, dq_sums, dk, dv, scale, buffers, barriers = arguments
    _num_masks, num_tiles, num_keys = sizes
    _queries, _douts, _row_scalars, keys, _values, ds_tiles, staging = buffers
    _q_full, _dout_full, empty = barriers
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
        # Load the work tile again, because keeping it would occupy registers during all steps.
        batch, key_head, first, end, _, _, _ = _load_work_tile(work_tiles, index, CONFIG)
        row_range = batch, key_head, first + CONSUMER * ROWS, end
        index += 1
        work_tile = _load_work_tile(work_tiles, index, CONFIG)
        key_bounds = _load_own_bounds(work_tile, bounds, sizes, CONSUMER, CONFIG)
        _wait_for_staging(staging, stage, CONSUMER, CONFIG)
        own_staging = staging[CONSUMER]
        grad_v, grad_k = join_parts(grad_v, CONFIG.columns), join_parts(grad_k, CONFIG.columns) * scale
        _write_gradient(dv, grad_v, own_staging, row_range, num_keys, CONFIG.value_dim, CONFIG.add_dv, CONFIG)
        _write_gradient(dk, grad_k, own_staging, row_range, num_keys, CONFIG.head_dim, CONFIG.add_dk, CONFIG)
    _wait_for_previous_step(empty, stage, phase)
    grad_q = _issue_dq(ds_tiles, keys, stage ^ 1, previous_slot, CONSUMER, CONFIG)
    grad_q = warpgroup_mma_wait(0, deps=(grad_q,))
    _wait_for_staging(staging, stage, CONSUMER, CONFIG)
    _send_dq(grad_q, staging, dq_sums, previous_chunk, stage, CONSUMER, CONFIG)
    if not CONFIG.deterministic:
        # TMA must have read the last dQ from shared memory before the program ends.
        hopper_common.tma_store_wait(0)


@gluon.jit
def _write_gradient(grads, tile, staging, row_range, num_keys, COLUMNS: gl.constexpr, ADD: gl.constexpr, CONFIG: gl.constexpr):
    """The tensor `grads` is (B, num_keys, Hkv, COLUMNS). The buffer `staging` must be free, because the function rearranges
    16-bit gradients in it.
    """
    batch, key_head, own, end = row_range
    NUM_KEY_HEADS: gl.constexpr = CONFIG.num_heads // CONFIG.group
    base = grads + ((batch * num_keys + own).to(gl.int64) * NUM_KEY_HEADS + key_head) * COLUMNS
    dtype: gl.constexpr = base.dtype.element_ty
    DIM: gl.constexpr = CONFIG.dim
    WHOLE_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    # Storing 16-bit numbers from the register layout of wgmma would fill only half of each 32-byte sector.
    STORED: gl.constexpr = CONFIG.output_layout if dtype == gl.float32 else WHOLE_ROWS
    tile = tile.to(dtype)
    if dtype != gl.float32:
        MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], dtype)
        in_order = hopper_common.reinterpret(staging, dtype, [2 * ROWS * CONFIG.chunk_columns // DIM, DIM], MATRIX)
        in_order = in_order.slice(0, ROWS)
        in_order.store(tile)
        tile = in_order.load(STORED)
    store_rows(base, tile, own, end, 0, NUM_KEY_HEADS, COLUMNS, ADD)


@gluon.jit
def _allocate_staging(CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    COLUMNS: gl.constexpr = dq_columns(CONFIG, CONSUMER)
    return gl.allocate_shared_memory(
        gl.float32, [CONFIG.chunk_columns // COLUMNS, ROWS, COLUMNS], staging_layout(COLUMNS)
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_masks", "num_tiles", "num_keys"])
def _main_kernel(
    q, k, v, dout, scalars, first_dq_sums, second_dq_sums, dk, dv, query_lo, query_hi, work_tiles, progress,
    num_masks, num_tiles, num_keys, scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of all work tiles, and sum dq.

    Args:
        q, k, v, dout, scalars: TMA descriptors. The scalars come from `_prepare_kernel`.
        first_dq_sums, second_dq_sums: TMA descriptors of the sums of dq, one for each consumer's chunks.
        dk, dv: the results, overwritten or added to.
        query_lo, query_hi: (num_masks, Nk), the interval of queries that attend to each key.
        progress: int32 zeros, `HEADER` numbers and two numbers per work tile; None unless deterministic.
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
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dout_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    if CONFIG.deterministic:
        staged, released = allocate_barriers(4, 1, 1)
        staging = staging + (staged, released)
        work_tiles += take_number(progress) * CONFIG.entry_size
    fence_async_shared()
    # Gluon turns constants in tuples into tensors, so pass constants as separate arguments.
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
