"""What the Hopper forward merges and writes at an item's end: a state that came in, the new state, the output.

The origins of rows start with the m of the state that came in, so that o needs no more than to be added to its own: by TMA, in
the L2 cache, by way of the memory of K and V of a stage, which the producer hands over behind the last keys of an item. If an
output is wanted instead, TMA brings the o that came in to that memory; the output leaves by way of the query's. Rows that TMA
would write, but must not, make it plain loads and stores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper.common import LN_2, LOG2_E, ROWS, tile_view, tma_load, tma_reduce_add, tma_store
from ringattn.kernels.hopper.softmax import LIMIT, UNSET

SIGN_BIT = gl.constexpr(-(2**31))


@gluon.jit
def _state_view(buffer, CONFIG: gl.constexpr):
    """The memory of a stage's K, or V, as a part (64, dim / parts) of a consumer's o."""
    COLUMNS: gl.constexpr = CONFIG.dim // CONFIG.parts
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.float32)
    return hopper_common.reinterpret(buffer, gl.float32, [ROWS, COLUMNS], LAYOUT)


@gluon.jit
def hand_over(state_tiles, batch, first, head, NUMBER: gl.constexpr, buffer, full, CONFIG: gl.constexpr):
    """Give a consumer the memory of part NUMBER of the o of all: with the o that came in, if it is to be read."""
    CONSUMER: gl.constexpr = NUMBER // CONFIG.parts
    COLUMN: gl.constexpr = NUMBER % CONFIG.parts * (CONFIG.dim // CONFIG.parts)
    if CONFIG.final and CONSUMER < CONFIG.consumers:
        mbarrier.expect(full, state_tiles.block_type.nbytes)
        view = tile_view(_state_view(buffer, CONFIG), state_tiles)
        tma_load(state_tiles, [batch, first + CONSUMER * ROWS, head, COLUMN], full, view)
    else:
        mbarrier.arrive(full, count=1)


@gluon.jit
def _row_index(place, num_queries, CONFIG: gl.constexpr):
    """(where a consumer's rows are in (B, N, H), which of them there are)."""
    batch, head, own, end = place
    rows = own + gl.arange(0, ROWS, layout=gl.SliceLayout(1, CONFIG.scores))
    return (batch.to(gl.int64) * num_queries + rows) * CONFIG.num_heads + head, rows < end


@gluon.jit
def load_origins(results, place, num_queries, CONFIG: gl.constexpr):
    """m in log2 units of the state that came in, with which a row's origin starts: UNSET if there is none."""
    index, inside = _row_index(place, num_queries, CONFIG)
    m = gl.full([ROWS], UNSET, gl.float32, gl.SliceLayout(1, CONFIG.scores))
    if CONFIG.has_state:
        m = gl.maximum(gl.load(results[0] + index, mask=inside, other=float("-inf")) * LOG2_E, UNSET)
    return m


@gluon.jit
def load_scalars(results, place, num_queries, CONFIG: gl.constexpr):
    """(m in log2 units, l) of the state that came in; those of a row that has seen nothing if none did."""
    index, inside = _row_index(place, num_queries, CONFIG)
    m = load_origins(results, place, num_queries, CONFIG)
    l = gl.zeros_like(m)
    if CONFIG.has_state:
        l = gl.load(results[1] + index, mask=inside, other=0.0)
    return m, l


@gluon.jit
def _split_columns(tile):
    """The left and the right half of an accumulator; no thread gives away what it holds."""
    return gl.split(tile.reshape([ROWS, 2, tile.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def _state_views(buffers, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Where the one part of a consumer's o lies, or its left and right part; `buffers`: K and V of its stage."""
    keys, values = buffers
    if CONFIG.parts == 1:
        left = _state_view(keys if CONSUMER % 2 == 0 else values, CONFIG)
        right = left
    else:
        left = _state_view(keys, CONFIG)
        right = _state_view(values, CONFIG)
    return left, right


@gluon.jit
def _load_output(buffers, o, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """The o that came in, in the layout of `o`."""
    left, right = _state_views(buffers, CONSUMER, CONFIG)
    if CONFIG.parts == 1:
        loaded = left.load(CONFIG.output)
    else:
        half, _ = _split_columns(o)
        HALF: gl.constexpr = half.type.layout
        halves = gl.join(left.load(HALF), right.load(HALF))
        loaded = gl.convert_layout(halves.permute((0, 2, 1)).reshape([ROWS, CONFIG.dim]), CONFIG.output)
    return loaded


@gluon.jit
def _send_part(part, state_tiles, place, column, CONFIG: gl.constexpr):
    batch, head, own, end = place
    if CONFIG.has_state:
        tma_reduce_add(state_tiles, [batch, own, head, column], tile_view(part, state_tiles))
    else:
        tma_store(state_tiles, [batch, own, head, column], tile_view(part, state_tiles))


@gluon.jit
def _send_output(buffers, o, state_tiles, place, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Write o, or add it to the o that came in, by way of the memory that was handed over."""
    left, right = _state_views(buffers, CONSUMER, CONFIG)
    if CONFIG.parts == 1:
        left.store(o)
        fence_async_shared()
    else:
        half, other_half = _split_columns(o)
        left.store(half)
        right.store(other_half)
        fence_async_shared()
        _send_part(right, state_tiles, place, CONFIG.dim // 2, CONFIG)
    _send_part(left, state_tiles, place, 0, CONFIG)


@gluon.jit
def _by_output_row(numbers, CONFIG: gl.constexpr):
    """Numbers of rows, to be broadcast over the output."""
    return gl.convert_layout(numbers, gl.SliceLayout(1, CONFIG.output))[:, None]


@gluon.jit
def _elements(index, rows, CONFIG: gl.constexpr):
    """(where a consumer's output is in (B, N, H, Dv), which of it is there and in `rows`)."""
    columns = gl.arange(0, CONFIG.dim, layout=gl.SliceLayout(0, CONFIG.output))[None, :]
    mask = _by_output_row(rows, CONFIG) & (columns < CONFIG.value_dim)
    return _by_output_row(index, CONFIG) * CONFIG.value_dim + columns, mask


@gluon.jit
def _merge_scalars(origin, l, other_m, other_l):
    """(m, l, alpha, beta) of the merged state: o * alpha + other_o * beta."""
    m = gl.maximum(origin, other_m)
    alpha = gl.exp2(origin - m)
    beta = gl.exp2(other_m - m)
    return m, l * alpha + other_l * beta, alpha, beta


@gluon.jit
def _write_output(origin, l, o, query, results, place, index, inside, CONFIG: gl.constexpr):
    batch, head, own, end = place
    state_m, state_l, state_o, state_tiles, lse, out, out_tiles = results
    gl.store(lse + index, (origin + gl.log2(l)) * LN_2, mask=inside)
    o *= _by_output_row(1.0 / gl.where(l == 0.0, 1.0, l), CONFIG)
    o = o.to(query.dtype)
    if own + ROWS <= end:
        query.store(o)
        fence_async_shared()
        tma_store(out_tiles, [batch, own, head, 0], tile_view(query, out_tiles))
    else:  # the rows that follow are another tile's
        element, mask = _elements(index, inside, CONFIG)
        gl.store(out + element, o, mask=mask)


@gluon.jit
def _write_state(
    origin, l, o, buffers, results, place, index, inside, CONSUMER: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    batch, head, own, end = place
    state_m, state_l, state_o, state_tiles, lse, out, out_tiles = results
    gl.store(state_m + index, gl.where(origin == UNSET, float("-inf"), origin * LN_2), mask=inside)
    gl.store(state_l + index, l, mask=inside)
    if own + ROWS <= end:
        _send_output(buffers, o, state_tiles, place, CONSUMER, CONFIG)
    else:
        element, mask = _elements(index, inside, CONFIG)
        gl.store(state_o + element, o, mask=mask)


@gluon.jit
def _update_state(
    origin, l, o, failed, buffers, incoming, results, place, index, inside,
    CONSUMER: gl.constexpr, FOLLOW: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Merge into the state that came in, where it is.

    A state must live until it has been added to, and rows that did not fail must not be added to once more: of a failed row
    nothing is written but its old l with the sign bit set, by which the second round knows the rows that are left to it.
    """
    batch, head, own, end = place
    state_m, state_l, state_o, state_tiles, lse, out, out_tiles = results
    other_m, other_l = incoming
    written = inside
    if not CONFIG.follow:
        written &= other_l.to(gl.int32, bitcast=True) < 0 if FOLLOW else ~failed
        other_l = gl.abs(other_l)
    m, l, alpha, beta = _merge_scalars(origin, l, other_m, other_l)
    # what has not changed is left alone: in log2 units and back it would not be the same
    gl.store(state_m + index, m * LN_2, mask=written & (m != other_m))
    if CONFIG.follow or FOLLOW:
        gl.store(state_l + index, l, mask=written)
    else:
        # not -other_l: Triton takes it for 0 - other_l, which leaves 0 without a sign
        marked = (other_l.to(gl.int32, bitcast=True) | SIGN_BIT).to(gl.float32, bitcast=True)
        gl.store(state_l + index, gl.where(written, l, marked), mask=inside)
    # an o that has seen nothing is 0, whatever beta is
    stays = written & (alpha == 1.0) & ((beta == 1.0) | (other_l == 0.0))
    if (own + ROWS <= end) & (gl.min(stays.to(gl.int32), axis=0) > 0):
        _send_output(buffers, o, state_tiles, place, CONSUMER, CONFIG)
    else:
        element, mask = _elements(index, written, CONFIG)
        other_o = gl.load(state_o + element, mask=mask, other=0.0)
        gl.store(state_o + element, o * _by_output_row(alpha, CONFIG) + other_o * _by_output_row(beta, CONFIG), mask=mask)


@gluon.jit
def finish(
    origin, l, o, query, buffers, incoming, results, place, num_queries,
    CONSUMER: gl.constexpr, FOLLOW: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Merge the state that came in, and write the new state, or the output. Returns which rows have failed.

    A row has failed if l is not below LIMIT: its origin should not have stayed. What is written of it is for nothing, until the
    second round.
    """
    index, inside = _row_index(place, num_queries, CONFIG)
    failed = inside & False if FOLLOW else inside & ~(l < LIMIT)
    if CONFIG.in_place:
        _update_state(origin, l, o, failed, buffers, incoming, results, place, index, inside, CONSUMER, FOLLOW, CONFIG)
    else:
        if CONFIG.has_state:
            other_m, other_l = incoming
            origin, l, alpha, beta = _merge_scalars(origin, l, other_m, other_l)
            o *= _by_output_row(alpha, CONFIG)
            o += _load_output(buffers, o, CONSUMER, CONFIG) * _by_output_row(beta, CONFIG)
        if CONFIG.final:
            _write_output(origin, l, o, query, results, place, index, inside, CONFIG)
        else:
            _write_state(origin, l, o, buffers, results, place, index, inside, CONSUMER, CONFIG)
    return failed
