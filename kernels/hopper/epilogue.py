"""After a work tile's last step, the Hopper forward merges the incoming state, and writes the new state or the output.

    incoming state   result   what happens to o
    no               output   o / l goes through the shared memory of Q and is stored by TMA
    yes              output   TMA loads the incoming o into state stages; the threads merge it; then as above
    no               state    o goes through state stages and is stored by TMA
    yes              state    o goes through state stages and is added to the state in place by TMA's reduce-add

A *state stage* is a K/V buffer that holds o after the last step of a work tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper.common import LN_2, LOG2_E, ROWS, tile_view, tma_load, tma_reduce_add, tma_store
from ringattn.kernels.hopper.softmax import OVERFLOW_LIMIT, UNSET_REF_MAX

SIGN_BIT = gl.constexpr(-(2**31))


@gluon.jit
def _state_view(buffer, CONFIG: gl.constexpr):
    COLUMNS: gl.constexpr = CONFIG.dim // CONFIG.o_parts
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.float32)
    return hopper_common.reinterpret(buffer, gl.float32, [ROWS, COLUMNS], LAYOUT)


@gluon.jit
def transfer_buffer(state_tiles, batch, first, head, NUMBER: gl.constexpr, buffer, full, CONFIG: gl.constexpr):
    """By arriving at the mbarrier `full`, the producer lets a consumer use a K or V buffer for o."""
    CONSUMER: gl.constexpr = NUMBER // CONFIG.o_parts
    COLUMN: gl.constexpr = NUMBER % CONFIG.o_parts * (CONFIG.dim // CONFIG.o_parts)
    if CONFIG.final and CONSUMER < CONFIG.consumers:
        mbarrier.expect(full, state_tiles.block_type.nbytes)
        view = tile_view(_state_view(buffer, CONFIG), state_tiles)
        tma_load(state_tiles, [batch, first + CONSUMER * ROWS, head, COLUMN], full, view)
    else:
        mbarrier.arrive(full, count=1)


@gluon.jit
def release_keys(k_empty, stage, CONFIG: gl.constexpr):
    if not CONFIG.joint_release:
        mbarrier.arrive(k_empty.index(stage), count=1)


@gluon.jit
def release_state_stage(barriers, state_stage, CONFIG: gl.constexpr):
    _, _, _, k_empty, _, v_empty = barriers
    if CONFIG.state_stages > 0 and state_stage >= 0:
        release_keys(k_empty, state_stage, CONFIG)
        mbarrier.arrive(v_empty.index(state_stage), count=1)


@gluon.jit
def row_index(row_range, results, CONFIG: gl.constexpr):
    """Return the indices (64,) of a consumer's rows in (B, Nq, Hq), and a mask of existing rows.

    The argument `row_range` is (batch entry, first head, first row, end of the work tile's rows).
    """
    HEADS: gl.constexpr = CONFIG.heads_per_row
    batch, head, first_row, end = row_range
    numbers = gl.arange(0, ROWS, layout=gl.SliceLayout(1, CONFIG.scores_layout))
    rows = first_row + numbers // HEADS
    return (batch.to(gl.int64) * results[7] + rows) * CONFIG.num_heads + head + numbers % HEADS, rows < end


@gluon.jit
def load_ref_max(results, row_range, CONFIG: gl.constexpr):
    index, inside = row_index(row_range, results, CONFIG)
    if CONFIG.has_state:
        return gl.maximum(gl.load(results[0] + index, mask=inside, other=float("-inf")) * LOG2_E, UNSET_REF_MAX)
    else:
        return gl.full([ROWS], UNSET_REF_MAX, gl.float32, gl.SliceLayout(1, CONFIG.scores_layout))


@gluon.jit
def load_state_scalars(results, row_range, CONFIG: gl.constexpr):
    """Return m (in log2 units) and l of the incoming state, or of an empty state."""
    index, inside = row_index(row_range, results, CONFIG)
    m = load_ref_max(results, row_range, CONFIG)
    return m, gl.load(results[1] + index, mask=inside, other=0.0) if CONFIG.has_state else gl.zeros_like(m)


@gluon.jit
def split_columns(tile):
    return gl.split(tile.reshape([ROWS, 2, tile.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def _state_views(buffers, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    keys, values = buffers
    left = values if CONFIG.o_parts == 1 and CONSUMER % 2 == 1 else keys
    return _state_view(left, CONFIG), _state_view(values, CONFIG)


@gluon.jit
def _load_incoming_o(buffers, o, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    left, right = _state_views(buffers, CONSUMER, CONFIG)
    if CONFIG.o_parts == 1:
        return left.load(CONFIG.output_layout)
    else:
        half, _ = split_columns(o)
        HALF: gl.constexpr = half.type.layout
        halves = gl.join(left.load(HALF), right.load(HALF))
        return gl.convert_layout(halves.permute((0, 2, 1)).reshape([ROWS, CONFIG.dim]), CONFIG.output_layout)


@gluon.jit
def _store_part(part, state_tiles, row_range, column, CONFIG: gl.constexpr):
    batch, head, first_row, _end = row_range
    if CONFIG.has_state:
        tma_reduce_add(state_tiles, [batch, first_row, head, column], tile_view(part, state_tiles))
    else:
        tma_store(state_tiles, [batch, first_row, head, column], tile_view(part, state_tiles))


@gluon.jit
def _store_o(buffers, o, state_tiles, row_range, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    left, right = _state_views(buffers, CONSUMER, CONFIG)
    # Without the fences below, TMA could read shared memory before the stores of o are visible.
    if CONFIG.o_parts == 1:
        left.store(o)
        fence_async_shared()
    else:
        half, other_half = split_columns(o)
        left.store(half)
        right.store(other_half)
        fence_async_shared()
        _store_part(right, state_tiles, row_range, CONFIG.dim // 2, CONFIG)
    _store_part(left, state_tiles, row_range, 0, CONFIG)


@gluon.jit
def _by_output_row(numbers, CONFIG: gl.constexpr):
    return gl.convert_layout(numbers, gl.SliceLayout(1, CONFIG.output_layout))[:, None]


@gluon.jit
def _elements(index, rows, CONFIG: gl.constexpr):
    columns = gl.arange(0, CONFIG.dim, layout=gl.SliceLayout(0, CONFIG.output_layout))[None, :]
    mask = _by_output_row(rows, CONFIG) & (columns < CONFIG.value_dim)
    return _by_output_row(index, CONFIG) * CONFIG.value_dim + columns, mask


@gluon.jit
def merge_scalars(ref_max, l, state_m, state_l):
    """Return (m, l, alpha, beta). The merged state is (m, l, o * alpha + state_o * beta)."""
    m = gl.maximum(ref_max, state_m)
    alpha = gl.exp2(ref_max - m)
    beta = gl.exp2(state_m - m)
    return m, l * alpha + state_l * beta, alpha, beta


@gluon.jit
def write_scalars(ref_max, l, results, index, inside, CONFIG: gl.constexpr):
    if CONFIG.final:
        gl.store(results[4] + index, (ref_max + gl.log2(l)) * LN_2, mask=inside)
    else:
        gl.store(results[0] + index, gl.where(ref_max == UNSET_REF_MAX, float("-inf"), ref_max * LN_2), mask=inside)
        gl.store(results[1] + index, l, mask=inside)


@gluon.jit
def _write_result(
    ref_max, l, o, query, buffers, results, row_range, index, inside, CONSUMER: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    batch, head, first_row, end = row_range
    _state_m, _state_l, state_o, state_tiles, _lse, out, out_tiles, _num_queries = results
    write_scalars(ref_max, l, results, index, inside, CONFIG)
    if CONFIG.final:
        o *= _by_output_row(1.0 / gl.where(l == 0.0, 1.0, l), CONFIG)
        o = o.to(query.dtype)
    if first_row + ROWS // CONFIG.heads_per_row <= end:
        if CONFIG.final:
            query.store(o)
            fence_async_shared()
            tma_store(out_tiles, [batch, first_row, head, 0], tile_view(query, out_tiles))
        else:
            _store_o(buffers, o, state_tiles, row_range, CONSUMER, CONFIG)
    else:
        # A store by TMA would overwrite rows of the next work tile, so the threads store o.
        element, mask = _elements(index, inside, CONFIG)
        gl.store((out if CONFIG.final else state_o) + element, o, mask=mask)


@gluon.jit
def update_scalars(
    ref_max, l, overflowed, incoming, results, index, inside, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """In overflowed rows, the first pass sets the sign bit of l, so that the retry pass updates only these rows.

    Return (written, alpha, beta, stays). In rows of the mask `written`, the merged o is o * alpha + state_o * beta. In rows of
    the mask `stays`, the merged o is o + state_o.
    """
    incoming_m, incoming_l = incoming
    written = inside
    if not CONFIG.update_ref_max:
        # Only the retry pass sets UPDATE_REF_MAX. An overflowed row may have l = -0.0, which is not below 0, so test the sign
        # bit.
        written &= incoming_l.to(gl.int32, bitcast=True) < 0 if UPDATE_REF_MAX else ~overflowed
        incoming_l = gl.abs(incoming_l)
    m, l, alpha, beta = merge_scalars(ref_max, l, incoming_m, incoming_l)
    # Converting m to log2 units and back rounds m, so an unchanged m is not stored.
    gl.store(results[0] + index, m * LN_2, mask=written & (m != incoming_m))
    if CONFIG.update_ref_max or UPDATE_REF_MAX:
        gl.store(results[1] + index, l, mask=written)
    else:
        # Triton computes -l as 0 - l, which is 0.0 instead of -0.0 for l = 0, so set the sign bit.
        marked = (incoming_l.to(gl.int32, bitcast=True) | SIGN_BIT).to(gl.float32, bitcast=True)
        gl.store(results[1] + index, gl.where(written, l, marked), mask=inside)
    # If the incoming l is 0, the incoming o is also 0, so its factor beta does not matter.
    return written, alpha, beta, written & (alpha == 1.0) & ((beta == 1.0) | (incoming_l == 0.0))


@gluon.jit
def _update_state(
    ref_max, l, o, overflowed, buffers, incoming, results, row_range, index, inside,
    CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    _batch, _head, first_row, end = row_range
    _state_m, _state_l, state_o, state_tiles, _lse, _out, _out_tiles, _num_queries = results
    written, alpha, beta, stays = update_scalars(
        ref_max, l, overflowed, incoming, results, index, inside, UPDATE_REF_MAX, CONFIG
    )
    # TMA's reduce-add can neither rescale rows nor leave out rows.
    if (first_row + ROWS <= end) & (gl.min(stays.to(gl.int32), axis=0) > 0):
        _store_o(buffers, o, state_tiles, row_range, CONSUMER, CONFIG)
    else:
        element, mask = _elements(index, written, CONFIG)
        incoming_o = gl.load(state_o + element, mask=mask, other=0.0)
        gl.store(state_o + element, o * _by_output_row(alpha, CONFIG) + incoming_o * _by_output_row(beta, CONFIG), mask=mask)


@gluon.jit
def finish_work_tile(
    ref_max, l, o, query, buffers, incoming, results, row_range,
    CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Write the results of a work tile, and return a mask (64,) of overflowed rows.

    Args:
        query: the shared memory of this consumer's Q.
        buffers: the K and the V buffer of this consumer's state stage.
        incoming: from `load_state_scalars`.
        results: (state_m, state_l, state_o, state_tiles, lse, out, out_tiles, Nq), where state_tiles and out_tiles are TMA
            descriptors.

    A row overflows if its l is NaN or at least OVERFLOW_LIMIT. The results of an overflowed row are invalid until the retry
    pass rewrites them.
    """
    index, inside = row_index(row_range, results, CONFIG)
    overflowed = inside & False if UPDATE_REF_MAX else inside & ~(l < OVERFLOW_LIMIT)
    if CONFIG.updates_state:
        _update_state(
            ref_max, l, o, overflowed, buffers, incoming, results, row_range, index, inside, CONSUMER, UPDATE_REF_MAX, CONFIG
        )
    else:
        if CONFIG.has_state:
            incoming_m, incoming_l = incoming
            ref_max, l, alpha, beta = merge_scalars(ref_max, l, incoming_m, incoming_l)
            o *= _by_output_row(alpha, CONFIG)
            o += _load_incoming_o(buffers, o, CONSUMER, CONFIG) * _by_output_row(beta, CONFIG)
        _write_result(ref_max, l, o, query, buffers, results, row_range, index, inside, CONSUMER, CONFIG)
    return overflowed
