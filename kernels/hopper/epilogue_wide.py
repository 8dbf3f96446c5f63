"""With FP8 inputs or head dims above 128, the threads load and store o without TMA.

incoming state   result   what happens to o
no               output   the threads store o / l
yes              output   the threads load the incoming o, merge it, and store the result divided by l
no               state    the threads store o
yes              state    the threads add o to the incoming o by atomic additions; if a row needs a factor, they load the
                          incoming o, merge it, and store the result in place
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ringattn.kernels.hopper.epilogue import merge_scalars, row_index, split_columns, update_scalars, write_scalars
from ringattn.kernels.hopper.softmax import OVERFLOW_LIMIT


@gluon.jit
def _by_row(numbers, tile):
    return gl.convert_layout(numbers, gl.SliceLayout(1, tile.type.layout))[:, None]


@gluon.jit
def _merge_part(part, FIRST: gl.constexpr, alpha, beta, index, rows, source, target, CONFIG: gl.constexpr):
    """The tensor `part` (64, n) contains n columns of o, beginning with column FIRST."""
    columns = FIRST + gl.arange(0, part.shape[1], layout=gl.SliceLayout(0, part.type.layout))[None, :]
    element = _by_row(index, part) * CONFIG.value_dim + columns
    mask = _by_row(rows, part)
    if CONFIG.value_dim < CONFIG.dim:
        mask = mask & (columns < CONFIG.value_dim)
    part = part * _by_row(alpha, part)
    if CONFIG.has_state:
        part += gl.load(source + element, mask=mask, other=0.0) * _by_row(beta, part)
    gl.store(target + element, part.to(target.dtype.element_ty), mask=mask)


@gluon.jit
def _merge_o(o, alpha, beta, index, rows, source, target, CONFIG: gl.constexpr):
    if CONFIG.has_state and CONFIG.dim > 64:
        # Merge 64 columns at a time, because the whole incoming o would not fit into registers.
        left, right = split_columns(o)
        if CONFIG.dim == 128:
            _merge_part(left, 0, alpha, beta, index, rows, source, target, CONFIG)
            _merge_part(right, 64, alpha, beta, index, rows, source, target, CONFIG)
        else:
            first, second = split_columns(left)
            third, fourth = split_columns(right)
            _merge_part(first, 0, alpha, beta, index, rows, source, target, CONFIG)
            _merge_part(second, 64, alpha, beta, index, rows, source, target, CONFIG)
            _merge_part(third, 128, alpha, beta, index, rows, source, target, CONFIG)
            _merge_part(fourth, 192, alpha, beta, index, rows, source, target, CONFIG)
    else:
        _merge_part(o, 0, alpha, beta, index, rows, source, target, CONFIG)


@gluon.jit
def _add_o(o, index, rows, target, CONFIG: gl.constexpr):
    """Each number in `target` receives only one atomic addition, so the results are deterministic."""
    columns = gl.arange(0, CONFIG.dim, layout=gl.SliceLayout(0, CONFIG.output_layout))[None, :]
    mask = _by_row(rows, o)
    if CONFIG.value_dim < CONFIG.dim:
        mask = mask & (columns < CONFIG.value_dim)
    gl.atomic_add(target + (_by_row(index, o) * CONFIG.value_dim + columns), o, mask=mask, sem="relaxed")


@gluon.jit
def finish_work_tile(
    ref_max, l, o, incoming, results, row_range, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """See `epilogue.finish_work_tile`."""
    _state_m, _state_l, state_o, _state_tiles, _lse, out, _out_tiles, _num_queries = results
    index, inside = row_index(row_range, results, CONFIG)
    overflowed = inside & False if UPDATE_REF_MAX else inside & ~(l < OVERFLOW_LIMIT)
    if CONFIG.updates_state:
        written, alpha, beta, stays = update_scalars(
            ref_max, l, overflowed, incoming, results, index, inside, UPDATE_REF_MAX, CONFIG
        )
        if gl.max((written & ~stays).to(gl.int32), axis=0) == 0:
            _add_o(o, index, written, state_o, CONFIG)
        else:
            _merge_o(o, alpha, beta, index, written, state_o, state_o, CONFIG)
    else:
        alpha = gl.full_like(l, 1.0)
        beta = alpha
        if CONFIG.has_state:
            incoming_m, incoming_l = incoming
            ref_max, l, alpha, beta = merge_scalars(ref_max, l, incoming_m, incoming_l)
        write_scalars(ref_max, l, results, index, inside, CONFIG)
        if CONFIG.final:
            inverse = 1.0 / gl.where(l == 0.0, 1.0, l)
            _merge_o(o, alpha * inverse, beta * inverse, index, inside, state_o, out, CONFIG)
        else:
            _merge_o(o, alpha, beta, index, inside, state_o, state_o, CONFIG)
    return overflowed
