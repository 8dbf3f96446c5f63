"""The backward kernels for Hopper GPUs (sm_90) and head dims above 128.

A separate kernel computes dq, because updating dq in global memory after every 64 keys would be slow.

Head dim 192 is not a power of two, so tiles are split into *parts* of columns. A *ring* is a tuple (tiles, full, empty) of a
ring buffer for parts and its mbarriers.

THE KERNEL FOR dk AND dv. Scores are transposed, so rows are keys. One consumer warpgroup keeps dk in registers, and the other
one keeps dv.

      PRODUCER (a warp)        SHARED MEMORY          CONSUMER 0 (dv)                 CONSUMER 1 (dk)

      load K, V (1st step) --> [ keys, values ] ----> S = K Q^T                       dP = V dO^T
      load Q, lse -----------> [ ring of Q    ] ----> P = exp2(S - lse)
                               [ ring of P    ] <---- store P; dV += P dO
                                                ----------------------------------->  load P; dS = P (dP - delta)
      load dO, delta --------> [ ring of dO   ] ------------------------------------> dK += dS Q

THE KERNEL FOR dq. A work tile is up to 128 queries of one query head, 64 per consumer:

      S = Q K^T, dP = dO V^T;  P = exp2(S - lse);  dS = P (dP - delta);  dQ += dS K

While one consumer computes in registers, the other consumer uses the tensor cores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ringattn.kernels.hopper.backward_common import (
    CONSUMER_REGISTERS,
    load_key_bounds,
    opaque_zero,
    probabilities,
    store_rows,
)
from ringattn.kernels.hopper.column_parts import wait_for_parts
from ringattn.kernels.hopper.common import (
    LOG2_E,
    PRODUCER_REGISTERS,
    ROWS,
    accumulator_layout,
    allocate_barriers,
    arrive_at,
    as_left,
    load_work_tile,
    sync_at,
    tile_view,
    tma_load,
)

STEP_KEYS = gl.constexpr(64)  # in the kernel for dq

QUERIES = gl.constexpr(128)


@gluon.jit
def _locate(step, part, PARTS: gl.constexpr, SLOTS: gl.constexpr):
    """The argument `step` (uint32) counts steps over all work tiles of a program."""
    position = step * PARTS + part
    return (position % SLOTS).to(gl.int32), (position // SLOTS & 1).to(gl.int32)


@gluon.jit
def _release(empty, step, PARTS: gl.constexpr, SLOTS: gl.constexpr):
    for part in gl.static_range(PARTS):
        slot, _ = _locate(step, part, PARTS, SLOTS)
        mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def _load_part(tensor, coordinates, part, full, tile):
    batch, row, head = coordinates
    COLUMNS: gl.constexpr = tensor.block_type.shape[3]
    tma_load(tensor, [batch, row, head, part * COLUMNS], full, tile_view(tile, tensor))


@gluon.jit
def _load_whole(tensor, coordinates, tiles, full, PARTS: gl.constexpr):
    mbarrier.expect(full, PARTS * tensor.block_type.nbytes)
    for part in gl.static_range(PARTS):
        _load_part(tensor, coordinates, part, full, tiles.index(part))


@gluon.jit
def _load_into_ring(
    tensor, coordinates, ring, step, PARTS: gl.constexpr, SLOTS: gl.constexpr, scalars=None, packed=None, scalar_tiles=None
):
    tiles, full, empty = ring
    for part in gl.static_range(PARTS):
        slot, phase = _locate(step, part, PARTS, SLOTS)
        mbarrier.wait(empty.index(slot), phase ^ 1)
        if part == 0 and scalars is not None:
            mbarrier.expect(full.index(slot), tensor.block_type.nbytes + scalars.block_type.nbytes)
            tma_load(scalars, [packed], full.index(slot), scalar_tiles.index(slot))
        else:
            mbarrier.expect(full.index(slot), tensor.block_type.nbytes)
        _load_part(tensor, coordinates, part, full.index(slot), tiles.index(slot))


@gluon.jit
def _issue_scores(
    left, first_part, ring, step, COLUMNS: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr
):  # fmt: skip
    tiles, full, _empty = ring
    scores = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator_layout(COLUMNS))
    for part in gl.static_range(PARTS):
        slot, phase = _locate(step, part, PARTS, SLOTS)
        mbarrier.wait(full.index(slot), phase)
        right = tiles.index(slot).permute((1, 0))
        own = left.index(first_part + part + opaque_zero())
        scores = warpgroup_mma(own, right, scores, use_acc=part > 0, is_async=True)
    return scores


@gluon.jit
def _issue_sums(left, sums, ring, step, PARTS: gl.constexpr, SLOTS: gl.constexpr):
    tiles, full, _empty = ring
    pending = ()
    for part in gl.static_range(PARTS):
        slot, phase = _locate(step, part, PARTS, SLOTS)
        mbarrier.wait(full.index(slot), phase)
        pending = pending + (warpgroup_mma(left, tiles.index(slot), sums[part], is_async=True),)
    return pending


@gluon.jit
def _zero_sums(COLUMNS: gl.constexpr, PARTS: gl.constexpr):
    sums = ()
    for _part in gl.static_range(PARTS):
        sums = sums + (gl.full([ROWS, COLUMNS], 0.0, gl.float32, accumulator_layout(COLUMNS)),)
    return sums


@gluon.jit
def _write_gradient(
    grads, sums, row_range, num_rows, factor,
    NUM_HEADS: gl.constexpr, DIM: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Store factor * sums in `grads`, or add it to `grads` if ADD is set.

    Args:
        grads: contiguous (B, num_rows, NUM_HEADS, DIM).
        sums: tuple of PARTS tensors (64, COLUMNS).
        row_range: (batch entry, head, first row, end).
    """
    batch, head, own, end = row_range
    base = grads + ((batch * num_rows + own).to(gl.int64) * NUM_HEADS + head) * DIM
    for part in gl.static_range(PARTS):
        tile = (sums[part] * factor).to(grads.dtype.element_ty)
        store_rows(base, tile, own, end, part * COLUMNS, NUM_HEADS, DIM, ADD)


# The kernel for dk and dv.


@gluon.jit
def _query_loop(loop):
    begin, _, num_unmasked, num_masked = loop
    # `maximum` tells the compiler that there is at least one step, which saves a test.
    return begin, gl.maximum(num_unmasked + num_masked, 1)


@gluon.jit
def _produce_queries(arguments, CONFIG: gl.constexpr):
    descriptors, work_tiles, num_tiles, buffers, barriers, rings = arguments
    q, k, v, dout, log2_lse, row_delta = descriptors
    keys, values, lse_tiles, delta_tiles, _p_tiles = buffers
    k_full, k_empty, v_full, v_empty, _p_full, _p_empty = barriers
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
            row = begin + 0
            packed = (batch * CONFIG.num_heads + head) * num_tiles * CONFIG.queries + begin
            for step in range(num_steps):
                is_first = (member == 0) & (step == 0)
                if is_first:
                    mbarrier.wait(k_empty, tile_phase ^ 1)
                    _load_whole(k, own, keys, k_full, CONFIG.parts)
                rows = batch, row, head
                _load_into_ring(q, rows, q_ring, count, CONFIG.parts, CONFIG.q_slots, log2_lse, packed, lse_tiles)
                if is_first:
                    mbarrier.wait(v_empty, tile_phase ^ 1)
                    _load_whole(v, own, values, v_full, CONFIG.value_parts)
                _load_into_ring(
                    dout, rows, dout_ring, count, CONFIG.value_parts, CONFIG.dout_slots, row_delta, packed, delta_tiles
                )
                count += 1
                row += CONFIG.queries
                packed += CONFIG.queries
        tile_phase ^= 1
        index += gl.num_programs(0)
        batch, key_head, first, end, loop = load_work_tile(work_tiles, index)


@gluon.jit
def _compute_p(scores, buffers, barriers, q_ring, key_bounds, start, step, log2_scale, CONFIG: gl.constexpr):
    SCORES: gl.constexpr = accumulator_layout(CONFIG.queries)
    _keys, _values, lse_tiles, _delta_tiles, p_tiles = buffers
    _k_full, _k_empty, _v_full, _v_empty, p_full, p_empty = barriers
    q_tiles, _q_full, q_empty = q_ring
    q_slot, _ = _locate(step, 0, CONFIG.parts, CONFIG.q_slots)
    p_slot, p_phase = _locate(step, 0, 1, CONFIG.p_slots)
    lse = lse_tiles.index(q_slot).load(gl.SliceLayout(0, SCORES))
    scores = warpgroup_mma_wait(0, deps=(scores,))
    _release(q_empty, step, CONFIG.parts, CONFIG.q_slots)
    row_bounds, first_unmasked, last_unmasked = key_bounds
    is_masked = (start < first_unmasked) | (start > last_unmasked)
    p = probabilities(scores, lse, row_bounds, start, is_masked, log2_scale, CONFIG.queries, True).to(q_tiles.dtype)
    mbarrier.wait(p_empty.index(p_slot), p_phase ^ 1)
    p_tiles.index(p_slot).store(p)
    mbarrier.arrive(p_full.index(p_slot), count=1)
    return as_left(p, CONFIG.value_part)


@gluon.jit
def _compute_ds(dp, buffers, barriers, dout_ring, step, CONFIG: gl.constexpr):
    SCORES: gl.constexpr = accumulator_layout(CONFIG.queries)
    _keys, _values, _lse_tiles, delta_tiles, p_tiles = buffers
    _k_full, _k_empty, _v_full, _v_empty, p_full, p_empty = barriers
    dout_tiles, _dout_full, dout_empty = dout_ring
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
    return as_left(ds, CONFIG.part)


@gluon.jit
def _compute_left(
    scores, buffers, barriers, rings, key_bounds, start, step, log2_scale, CONSUMER: gl.constexpr, CONFIG: gl.constexpr
):
    if CONSUMER == 0:
        return _compute_p(scores, buffers, barriers, rings[0], key_bounds, start, step, log2_scale, CONFIG)
    else:
        return _compute_ds(scores, buffers, barriers, rings[1], step, CONFIG)


@gluon.jit
def _issue_key_scores(buffers, rings, step, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    if CONSUMER == 0:
        return _issue_scores(buffers[0], 0, rings[0], step, CONFIG.queries, CONFIG.parts, CONFIG.q_slots)
    else:
        return _issue_scores(buffers[1], 0, rings[1], step, CONFIG.queries, CONFIG.value_parts, CONFIG.dout_slots)


@gluon.jit
def _consume_keys(arguments, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    bounds, work_tiles, sizes, grads, scale, buffers, barriers, rings = arguments
    _num_masks, _num_tiles, num_keys = sizes
    FOR_DV: gl.constexpr = CONSUMER == 0
    ring = rings[1 - CONSUMER]
    PARTS: gl.constexpr = CONFIG.value_parts if FOR_DV else CONFIG.parts
    COLUMNS: gl.constexpr = CONFIG.value_part if FOR_DV else CONFIG.part
    SLOTS: gl.constexpr = CONFIG.dout_slots if FOR_DV else CONFIG.q_slots
    SCORE_PARTS: gl.constexpr = CONFIG.parts if FOR_DV else CONFIG.value_parts
    DIM: gl.constexpr = CONFIG.value_dim if FOR_DV else CONFIG.head_dim
    ADD: gl.constexpr = CONFIG.add_dv if FOR_DV else CONFIG.add_dk
    loaded, unused = barriers[2 * CONSUMER], barriers[2 * CONSUMER + 1]
    factor = 1.0 if FOR_DV else scale
    log2_scale = scale * LOG2_E
    if CONSUMER == 1:
        arrive_at(0)
    index = gl.program_id(0)
    tile_phase = gl.to_tensor(0)
    count = gl.to_tensor(0).to(gl.uint32)
    work_tile = load_work_tile(work_tiles, index)
    while work_tile[3] > 0:
        batch, key_head, first, end, loop = work_tile
        begin, num_steps = _query_loop(loop)
        key_bounds = load_key_bounds(batch, first, end, bounds, sizes, CONFIG.queries)
        mbarrier.wait(loaded, tile_phase)
        sums = _zero_sums(COLUMNS, PARTS)
        start = begin + 0
        sync_at(CONSUMER)
        scores = _issue_key_scores(buffers, rings, count, CONSUMER, CONFIG)
        arrive_at(1 - CONSUMER)
        left = _compute_left(scores, buffers, barriers, rings, key_bounds, start, count, log2_scale, CONSUMER, CONFIG)
        left_in_head = num_steps - 1
        for _step in range(1, num_steps * CONFIG.group):
            start = gl.where(left_in_head == 0, begin, start + CONFIG.queries)
            left_in_head = gl.where(left_in_head == 0, num_steps, left_in_head) - 1
            sync_at(CONSUMER)
            pending = _issue_sums(left, sums, ring, count, PARTS, SLOTS)
            count += 1
            scores = _issue_key_scores(buffers, rings, count, CONSUMER, CONFIG)
            sums = wait_for_parts(pending, SCORE_PARTS, PARTS)
            arrive_at(1 - CONSUMER)
            _release(ring[2], count - 1, PARTS, SLOTS)
            left = _compute_left(scores, buffers, barriers, rings, key_bounds, start, count, log2_scale, CONSUMER, CONFIG)
        mbarrier.arrive(unused, count=1)
        pending = _issue_sums(left, sums, ring, count, PARTS, SLOTS)
        tile_phase ^= 1
        index += gl.num_programs(0)
        work_tile = load_work_tile(work_tiles, index)
        sums = wait_for_parts(pending, 0, PARTS)
        _release(ring[2], count, PARTS, SLOTS)
        count += 1
        _write_gradient(
            grads, sums, (batch, key_head, first, end), num_keys, factor,
            CONFIG.num_heads // CONFIG.group, DIM, COLUMNS, PARTS, ADD,
        )  # fmt: skip


@gluon.jit
def _allocate_ring(
    dtype: gl.constexpr, ROWS_OF_TILE: gl.constexpr, COLUMNS: gl.constexpr, SLOTS: gl.constexpr, CONSUMERS: gl.constexpr
):
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
        log2_lse, row_delta: TMA descriptors of the results of `_prepare_wide_kernel`.

    For the other arguments, see `backward_narrow._main_kernel`.
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
        [(_consume_keys, (for_dv, 0, CONFIG)), (_consume_keys, (for_dk, 1, CONFIG)), (_produce_queries, (loading, CONFIG))],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


# The kernel for dq.


@gluon.jit
def _produce_keys(arguments, CONFIG: gl.constexpr):
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
        begin, num_steps = _query_loop(loop)
        mbarrier.wait(q_empty, q_phase ^ 1)
        mbarrier.expect(q_full, 2 * (PARTS * q.block_type.nbytes + VALUE_PARTS * dout.block_type.nbytes))
        for consumer in gl.static_range(2):
            rows = batch, first + consumer * ROWS, head
            for part in gl.static_range(PARTS):
                _load_part(q, rows, part, q_full, queries.index(consumer * PARTS + part))
            for part in gl.static_range(VALUE_PARTS):
                _load_part(dout, rows, part, q_full, douts.index(consumer * VALUE_PARTS + part))
        for step in range(num_steps):
            own = batch, begin + step * STEP_KEYS, head // CONFIG.group
            _load_into_ring(k, own, k_ring, count, PARTS, CONFIG.k_slots)
            _load_into_ring(v, own, v_ring, count, VALUE_PARTS, CONFIG.v_slots)
            count += 1
        q_phase ^= 1
        index += gl.num_programs(0)
        batch, head, first, end, loop = load_work_tile(work_tiles, index)


@gluon.jit
def _own_steps(row_bounds, begin, num_steps):
    """Return (first, end, first_unmasked, last_unmasked) of a consumer. The range of steps [first, end) is never empty. A step
    needs no mask if its first key is in the range from first_unmasked to last_unmasked.
    """
    lo, hi, num_own = row_bounds
    last = gl.minimum(num_own, ROWS) - 1
    first = gl.minimum(gl.maximum(gl.load(lo) - begin, 0) // STEP_KEYS, num_steps - 1)
    end = gl.minimum((gl.load(hi + last) - begin + STEP_KEYS - 1) // STEP_KEYS, num_steps)
    return first, gl.maximum(end, first + 1), gl.load(lo + last), gl.load(hi) - STEP_KEYS


@gluon.jit
def _compute_query_ds(
    scores, dp, scalars, row_bounds, start, is_masked, v_empty, step, log2_scale,
    dtype: gl.constexpr, CONSUMER: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    lse, delta = scalars
    scores = warpgroup_mma_wait(CONFIG.value_parts, deps=(scores,))
    if CONFIG.pass_after_scores:
        arrive_at(1 - CONSUMER)
    p = probabilities(scores, lse, row_bounds, start, is_masked, log2_scale, STEP_KEYS, False)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    _release(v_empty, step, CONFIG.value_parts, CONFIG.v_slots)
    ds = (p * (dp - delta[:, None])).to(dtype)
    return as_left(ds, CONFIG.part)


@gluon.jit
def _skip_steps(num_steps, rings, count, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    k_ring, v_ring = rings
    _k_tiles, k_full, k_empty = k_ring
    _v_tiles, v_full, v_empty = v_ring
    for _step in range(num_steps):
        sync_at(CONSUMER)
        arrive_at(1 - CONSUMER)
        _wait_for_tile(k_full, count, CONFIG.parts, CONFIG.k_slots)
        _release(k_empty, count, CONFIG.parts, CONFIG.k_slots)
        _wait_for_tile(v_full, count, CONFIG.value_parts, CONFIG.v_slots)
        _release(v_empty, count, CONFIG.value_parts, CONFIG.v_slots)
        count += 1
    return count


@gluon.jit
def _wait_for_tile(full, step, PARTS: gl.constexpr, SLOTS: gl.constexpr):
    for part in gl.static_range(PARTS):
        slot, phase = _locate(step, part, PARTS, SLOTS)
        mbarrier.wait(full.index(slot), phase)


@gluon.jit
def _consume_for_dq(arguments, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    bounds, log2_lse, row_delta, work_tiles, sizes, dq, scale, buffers, barriers, rings = arguments
    lo, hi = bounds
    num_masks, padded_queries, num_queries = sizes
    queries, douts = buffers
    q_full, q_empty = barriers
    k_ring, v_ring = rings
    k_tiles, _k_full, k_empty = k_ring
    _v_tiles, _v_full, v_empty = v_ring
    PARTS: gl.constexpr = CONFIG.parts
    VALUE_PARTS: gl.constexpr = CONFIG.value_parts
    SCORES: gl.constexpr = accumulator_layout(STEP_KEYS)
    dtype: gl.constexpr = k_tiles.dtype
    log2_scale = scale * LOG2_E
    if CONSUMER == 1:
        arrive_at(1 - CONSUMER)
    index = gl.program_id(0)
    q_phase = gl.to_tensor(0)
    count = gl.to_tensor(0).to(gl.uint32)
    batch, head, first, end, loop = load_work_tile(work_tiles, index)
    while end > 0:
        begin, num_steps = _query_loop(loop)
        own = first + CONSUMER * ROWS
        mbarrier.wait(q_full, q_phase)
        if own < end:
            rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
            packed = (batch * CONFIG.num_heads + head).to(gl.int64) * padded_queries + own
            lse = gl.load(log2_lse + packed + rows, mask=rows < end - own, other=float("inf"))
            delta = gl.load(row_delta + packed + rows, mask=rows < end - own, other=0.0)
            scalars = lse, delta
            offset = gl.minimum(batch, num_masks - 1) * num_queries + own
            row_bounds = lo + offset, hi + offset, end - own
            first_step, end_step, first_unmasked, last_unmasked = _own_steps(row_bounds, begin, num_steps)
            count = _skip_steps(first_step, rings, count, CONSUMER, CONFIG)
            begin += first_step * STEP_KEYS
            num_skipped = num_steps - end_step
            sums = _zero_sums(CONFIG.part, PARTS)
            sync_at(CONSUMER)
            scores = _issue_scores(queries, CONSUMER * PARTS, k_ring, count, STEP_KEYS, PARTS, CONFIG.k_slots)
            dp = _issue_scores(douts, CONSUMER * VALUE_PARTS, v_ring, count, STEP_KEYS, VALUE_PARTS, CONFIG.v_slots)
            if not CONFIG.pass_after_scores:
                arrive_at(1 - CONSUMER)
            ds = _compute_query_ds(
                scores, dp, scalars, row_bounds, begin, (begin < first_unmasked) | (begin > last_unmasked), v_empty, count,
                log2_scale, dtype, CONSUMER, CONFIG,
            )  # fmt: skip
            # A separate variable for the step would spill registers.
            for start in range(begin + STEP_KEYS, begin + (end_step - first_step) * STEP_KEYS, STEP_KEYS):
                sync_at(CONSUMER)
                pending = _issue_sums(ds, sums, k_ring, count, PARTS, CONFIG.k_slots)
                count += 1
                scores = _issue_scores(queries, CONSUMER * PARTS, k_ring, count, STEP_KEYS, PARTS, CONFIG.k_slots)
                dp = _issue_scores(douts, CONSUMER * VALUE_PARTS, v_ring, count, STEP_KEYS, VALUE_PARTS, CONFIG.v_slots)
                sums = wait_for_parts(pending, PARTS + VALUE_PARTS, PARTS)
                if not CONFIG.pass_after_scores:
                    arrive_at(1 - CONSUMER)
                _release(k_empty, count - 1, PARTS, CONFIG.k_slots)
                ds = _compute_query_ds(
                    scores, dp, scalars, row_bounds, start, (start < first_unmasked) | (start > last_unmasked),
                    v_empty, count, log2_scale, dtype, CONSUMER, CONFIG,
                )  # fmt: skip
            mbarrier.arrive(q_empty, count=1)
            pending = _issue_sums(ds, sums, k_ring, count, PARTS, CONFIG.k_slots)
            sums = wait_for_parts(pending, 0, PARTS)
            _release(k_empty, count, PARTS, CONFIG.k_slots)
            count = _skip_steps(num_skipped, rings, count + 1, CONSUMER, CONFIG)
            _write_gradient(
                dq, sums, (batch, head, own, end), num_queries, scale,
                CONFIG.num_heads, CONFIG.head_dim, CONFIG.part, PARTS, CONFIG.add_dq,
            )  # fmt: skip
        else:
            mbarrier.arrive(q_empty, count=1)
            count = _skip_steps(num_steps, rings, count, CONSUMER, CONFIG)
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
        log2_lse, row_delta: (B * Hq, padded_queries), the results of `_prepare_wide_kernel`.
        dq: the result, overwritten or added to.
        lo, hi: (num_masks, Nq), the interval of keys to which each query attends.

    For the other arguments, see `backward_narrow._main_kernel`.
    """
    Q_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.part], q.dtype)
    DOUT_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.value_part], q.dtype)
    queries = gl.allocate_shared_memory(q.dtype, [2 * CONFIG.parts, ROWS, CONFIG.part], Q_TILE)
    douts = gl.allocate_shared_memory(q.dtype, [2 * CONFIG.value_parts, ROWS, CONFIG.value_part], DOUT_TILE)
    k_ring = _allocate_ring(q.dtype, STEP_KEYS, CONFIG.part, CONFIG.k_slots, 2)
    v_ring = _allocate_ring(q.dtype, STEP_KEYS, CONFIG.value_part, CONFIG.v_slots, 2)
    q_full, q_empty = allocate_barriers(1, 1, 2)
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
