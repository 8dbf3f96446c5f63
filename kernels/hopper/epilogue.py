"""The end of a work tile in the Hopper forward: merge the incoming state, then write the new state or the output.

    incoming state   result   what happens to o
    no               output   o / l goes through the shared memory of Q and is stored by TMA
    yes              output   TMA loads the incoming o into state stages; the threads merge it; then as above
    no               state    o goes through state stages and is stored by TMA
    yes              state    o goes through state stages and is added to the state in place by TMA's reduce-add

State stages are stages of the K/V pipeline whose shared memory the producer transfers to the consumers after the last keys of a
work tile, see `ringattn.kernels.hopper.forward`.

An in-place update usually has nothing to rescale, because the reference max of a row starts as the m of its incoming state. Two
cases need plain loads and stores by the threads instead of TMA: work tiles with fewer rows than TMA would write (the rows
after the end belong to another work tile), and rows whose reference max was raised or that overflowed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper.common import LN_2, LOG2_E, ROWS, tile_view, tma_load, tma_reduce_add, tma_store
from ringattn.kernels.hopper.softmax import OVERFLOW_LIMIT, UNSET_REF_MAX

# The sign bit of an fp32 number, which marks the l of a row that overflowed.
SIGN_BIT = gl.constexpr(-(2**31))


@gluon.jit
def _state_view(buffer, CONFIG: gl.constexpr):
    """View the K buffer or the V buffer of a stage as one part (64, dim // o_parts) of a consumer's o in fp32."""
    COLUMNS: gl.constexpr = CONFIG.dim // CONFIG.o_parts
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.float32)
    return hopper_common.reinterpret(buffer, gl.float32, [ROWS, COLUMNS], LAYOUT)


@gluon.jit
def transfer_buffer(state_tiles, batch, first, head, NUMBER: gl.constexpr, buffer, full, CONFIG: gl.constexpr):
    """In the producer: transfer the K or V buffer of a state stage to the consumer that needs it, by completing `full`.

    The buffers of the state stages are numbered K, V, K, V, and so on. Buffer NUMBER is for part NUMBER % o_parts of the o of
    consumer NUMBER // o_parts. If the output is wanted, TMA loads that part of the incoming o into it. The last buffer may
    belong to no consumer.
    """
    CONSUMER: gl.constexpr = NUMBER // CONFIG.o_parts
    COLUMN: gl.constexpr = NUMBER % CONFIG.o_parts * (CONFIG.dim // CONFIG.o_parts)
    if CONFIG.final and CONSUMER < CONFIG.consumers:
        mbarrier.expect(full, state_tiles.block_type.nbytes)
        view = tile_view(_state_view(buffer, CONFIG), state_tiles)
        tma_load(state_tiles, [batch, first + CONSUMER * ROWS, head, COLUMN], full, view)
    else:
        mbarrier.arrive(full, count=1)


@gluon.jit
def _row_index(row_range, results, CONFIG: gl.constexpr):
    """Return (index, inside): the index of a consumer's rows in a tensor (B, Nq, Hq), and which rows the work tile has.

    `row_range` is (batch entry, head, first row of the consumer, end of the work tile's rows).
    """
    batch, head, first_row, end = row_range
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, CONFIG.scores_layout))
    # The tensors may have more than 2**31 elements.
    return (batch.to(gl.int64) * results[7] + rows) * CONFIG.num_heads + head, rows < end


@gluon.jit
def load_ref_max(results, row_range, CONFIG: gl.constexpr):
    """Load the m of the incoming state in log2 units, with which the reference max starts; UNSET_REF_MAX if there is none."""
    index, inside = _row_index(row_range, results, CONFIG)
    if CONFIG.has_state:
        return gl.maximum(gl.load(results[0] + index, mask=inside, other=float("-inf")) * LOG2_E, UNSET_REF_MAX)
    else:
        return gl.full([ROWS], UNSET_REF_MAX, gl.float32, gl.SliceLayout(1, CONFIG.scores_layout))


@gluon.jit
def load_state_scalars(results, row_range, CONFIG: gl.constexpr):
    """Load (m in log2 units, l) of the incoming state; without one, those of a row that has not seen a key."""
    index, inside = _row_index(row_range, results, CONFIG)
    m = load_ref_max(results, row_range, CONFIG)
    return m, gl.load(results[1] + index, mask=inside, other=0.0) if CONFIG.has_state else gl.zeros_like(m)


@gluon.jit
def _split_columns(tile):
    """Split an accumulator into its left and its right half. Every thread keeps its own numbers."""
    return gl.split(tile.reshape([ROWS, 2, tile.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def _state_views(buffers, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Return views of the one part, or of the left and the right part, of a consumer's o.

    `buffers` are the K and the V buffer of the consumer's state stage. If one buffer holds a whole o, consumers with even
    numbers use K, and those with odd numbers use V. The right part is then of no use.
    """
    keys, values = buffers
    left = values if CONFIG.o_parts == 1 and CONSUMER % 2 == 1 else keys
    return _state_view(left, CONFIG), _state_view(values, CONFIG)


@gluon.jit
def _load_incoming_o(buffers, o, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Load the incoming o from shared memory, in the layout of `o`."""
    left, right = _state_views(buffers, CONSUMER, CONFIG)
    if CONFIG.o_parts == 1:
        return left.load(CONFIG.output_layout)
    else:
        half, _ = _split_columns(o)
        HALF: gl.constexpr = half.type.layout
        halves = gl.join(left.load(HALF), right.load(HALF))
        return gl.convert_layout(halves.permute((0, 2, 1)).reshape([ROWS, CONFIG.dim]), CONFIG.output_layout)


@gluon.jit
def _store_part(part, state_tiles, row_range, column, CONFIG: gl.constexpr):
    """Start to add one part of o to the state in global memory, or to store it if there is no incoming state."""
    batch, head, first_row, end = row_range
    if CONFIG.has_state:
        tma_reduce_add(state_tiles, [batch, first_row, head, column], tile_view(part, state_tiles))
    else:
        tma_store(state_tiles, [batch, first_row, head, column], tile_view(part, state_tiles))


@gluon.jit
def _store_o(buffers, o, state_tiles, row_range, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Start to store o, or to add it to the incoming o, through the shared memory of the state stage."""
    left, right = _state_views(buffers, CONSUMER, CONFIG)
    # The fence makes the stores of the threads visible to TMA, which accesses shared memory through another proxy.
    if CONFIG.o_parts == 1:
        left.store(o)
        fence_async_shared()
    else:
        half, other_half = _split_columns(o)
        left.store(half)
        right.store(other_half)
        fence_async_shared()
        _store_part(right, state_tiles, row_range, CONFIG.dim // 2, CONFIG)
    _store_part(left, state_tiles, row_range, 0, CONFIG)


@gluon.jit
def _by_output_row(numbers, CONFIG: gl.constexpr):
    """Convert one number per row so that it can be broadcast over o."""
    return gl.convert_layout(numbers, gl.SliceLayout(1, CONFIG.output_layout))[:, None]


@gluon.jit
def _elements(index, rows, CONFIG: gl.constexpr):
    """Return the indices of a consumer's elements in a tensor (B, Nq, Hq, Dv), and a mask of those that exist in `rows`."""
    columns = gl.arange(0, CONFIG.dim, layout=gl.SliceLayout(0, CONFIG.output_layout))[None, :]
    mask = _by_output_row(rows, CONFIG) & (columns < CONFIG.value_dim)
    return _by_output_row(index, CONFIG) * CONFIG.value_dim + columns, mask


@gluon.jit
def _merge_scalars(ref_max, l, state_m, state_l):
    """Return (m, l, alpha, beta) of the merged state, whose o is o * alpha + state_o * beta."""
    m = gl.maximum(ref_max, state_m)
    alpha = gl.exp2(ref_max - m)
    beta = gl.exp2(state_m - m)
    return m, l * alpha + state_l * beta, alpha, beta


@gluon.jit
def _write_result(
    ref_max, l, o, query, buffers, results, row_range, index, inside, CONSUMER: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Write out = o / l and lse, or a new state if the output is not wanted. There is no incoming state to update.

    The buffer of Q, `query`, is free by now and holds the output until TMA has stored it.
    """
    batch, head, first_row, end = row_range
    state_m, state_l, state_o, state_tiles, lse, out, out_tiles, num_queries = results
    if CONFIG.final:
        # A row that has not seen a key has l = 0 and o = 0. Its lse is -inf, and its output is 0.
        gl.store(lse + index, (ref_max + gl.log2(l)) * LN_2, mask=inside)
        # One division per row and a product per element take fewer instructions than a division per element.
        o *= _by_output_row(1.0 / gl.where(l == 0.0, 1.0, l), CONFIG)
        o = o.to(query.dtype)
    else:
        gl.store(state_m + index, gl.where(ref_max == UNSET_REF_MAX, float("-inf"), ref_max * LN_2), mask=inside)
        gl.store(state_l + index, l, mask=inside)
    if first_row + ROWS <= end:
        if CONFIG.final:
            query.store(o)
            fence_async_shared()
            tma_store(out_tiles, [batch, first_row, head, 0], tile_view(query, out_tiles))
        else:
            _store_o(buffers, o, state_tiles, row_range, CONSUMER, CONFIG)
    else:
        # TMA would also write rows after the end, which belong to another work tile.
        element, mask = _elements(index, inside, CONFIG)
        gl.store((out if CONFIG.final else state_o) + element, o, mask=mask)


@gluon.jit
def _update_state(
    ref_max, l, o, overflowed, buffers, incoming, results, row_range, index, inside,
    CONSUMER: gl.constexpr, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Merge the result into the incoming state in place.

    If some rows of a program overflow, the retry pass computes all of its rows again, but must add only the overflowed rows to
    the state: the others were added in the first pass. Therefore the first pass leaves the state of an overflowed row as it
    was, except that it sets the sign bit of l. The retry pass updates the rows with that bit, and no others.
    """
    batch, head, first_row, end = row_range
    state_m, state_l, state_o, state_tiles, lse, out, out_tiles, num_queries = results
    incoming_m, incoming_l = incoming
    written = inside
    if not CONFIG.update_ref_max:
        # Here UPDATE_REF_MAX tells the retry pass from the first pass. Test the bit itself, because the l of a row that has
        # not seen a key is 0, and -0.0 < 0 is false.
        written &= incoming_l.to(gl.int32, bitcast=True) < 0 if UPDATE_REF_MAX else ~overflowed
        incoming_l = gl.abs(incoming_l)
    m, l, alpha, beta = _merge_scalars(ref_max, l, incoming_m, incoming_l)
    # Do not rewrite an m that stays. The conversion to log2 units and back would change its last bits on every hop of a ring.
    gl.store(state_m + index, m * LN_2, mask=written & (m != incoming_m))
    if CONFIG.update_ref_max or UPDATE_REF_MAX:
        gl.store(state_l + index, l, mask=written)
    else:
        # Set the bit by an integer operation. Triton compiles -incoming_l to 0 - incoming_l, which is +0.0 for 0.
        marked = (incoming_l.to(gl.int32, bitcast=True) | SIGN_BIT).to(gl.float32, bitcast=True)
        gl.store(state_l + index, gl.where(written, l, marked), mask=inside)
    # The o of a row that has not seen a key is 0, so its beta does not matter.
    stays = written & (alpha == 1.0) & ((beta == 1.0) | (incoming_l == 0.0))
    # TMA adds all 64 rows without a factor. It is used only if all of them exist, are written and need none.
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
    """Merge the incoming state and write the new state or the output. Return which rows (64,) have overflowed.

    Args:
        ref_max, l: (64,), the reference max and the sum of the probabilities of each row.
        o: (64, dim), the sum of the probabilities times the values.
        query: the shared memory of this consumer's Q.
        buffers: the K and the V buffer of this consumer's state stage.
        incoming: (m in log2 units, l) of the incoming state, from `load_state_scalars`.
        results: the pointers and descriptors (state_m, state_l, state_o, state_tiles, lse, out, out_tiles), and Nq.
        row_range: (batch entry, head, first row of the consumer, end of the work tile's rows).
        CONSUMER: number of this consumer.
        UPDATE_REF_MAX: whether the reference max was updated in every step. Then no row overflows.

    A row has overflowed if its l is not below OVERFLOW_LIMIT, which is also the case if l is NaN. What this function writes for
    such a row is invalid until the retry pass has rewritten it.
    """
    index, inside = _row_index(row_range, results, CONFIG)
    overflowed = inside & False if UPDATE_REF_MAX else inside & ~(l < OVERFLOW_LIMIT)
    if CONFIG.updates_state:
        _update_state(
            ref_max, l, o, overflowed, buffers, incoming, results, row_range, index, inside, CONSUMER, UPDATE_REF_MAX, CONFIG
        )
    else:
        if CONFIG.has_state:
            incoming_m, incoming_l = incoming
            ref_max, l, alpha, beta = _merge_scalars(ref_max, l, incoming_m, incoming_l)
            o *= _by_output_row(alpha, CONFIG)
            o += _load_incoming_o(buffers, o, CONSUMER, CONFIG) * _by_output_row(beta, CONFIG)
        _write_result(ref_max, l, o, query, buffers, results, row_range, index, inside, CONSUMER, CONFIG)
    return overflowed
