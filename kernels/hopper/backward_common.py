"""Both Hopper backward kernels use the functions of this module."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper.common import ROWS, accumulator_layout

# A missing row gets a lower bound above all token indices, so all of its scores are masked.
PAST_ALL_QUERIES = gl.constexpr(2**30)

CONSUMER_REGISTERS = gl.constexpr(240)

SCALARS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


@gluon.jit
def opaque_zero():
    """Adding `opaque_zero()` to a buffer index keeps the compiler from holding the address in a register during a loop."""
    return hopper_common.execute("mov.b32 $0, 0;")


@gluon.jit
def probabilities(scores, lse, row_bounds, start, is_masked, log2_scale, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Return exp2(scores - lse), and 0 outside the intervals.

    Args:
        scores: (64, COLUMNS), before the multiplication by `log2_scale`.
        lse: one number per query, in log2 units.
        row_bounds: (lo, hi, num_own), which are pointers to the bounds of the first row, and the number of rows that exist.
        start: the first column.
        TRANSPOSED: whether the rows are keys.
    """
    SCORES: gl.constexpr = accumulator_layout(COLUMNS)
    lo, hi, num_own = row_bounds
    if is_masked:
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
        column = start + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SCORES))[None, :]
        row_lo = gl.load(lo + rows, mask=rows < num_own, other=PAST_ALL_QUERIES)[:, None]
        row_hi = gl.load(hi + rows, mask=rows < num_own, other=0)[:, None]
        scores = gl.where((row_lo <= column) & (column < row_hi), scores, float("-inf"))
    return gl.exp2(scores * log2_scale - (lse[None, :] if TRANSPOSED else lse[:, None]))


@gluon.jit
def load_key_bounds(batch, own, end, bounds, sizes, QUERIES: gl.constexpr):
    """Return (row_bounds, first_unmasked, last_unmasked) of up to 64 keys from key `own` on.

    A step needs no mask if its first query is in the range from first_unmasked to last_unmasked.
    """
    query_lo, query_hi = bounds
    num_masks, _num_tiles, num_keys = sizes
    offset = gl.minimum(batch, num_masks - 1) * num_keys + own
    # The bounds never decrease, so the last key has the largest lo, and the first key has the smallest hi.
    whole = own + ROWS <= end
    first_unmasked = gl.load(query_lo + offset + ROWS - 1, mask=whole, other=0)
    last_unmasked = gl.load(query_hi + offset, mask=whole, other=0) - QUERIES
    return (query_lo + offset, query_hi + offset, end - own), first_unmasked, last_unmasked


@gluon.jit
def store_rows(base, tile, own, end, FIRST: gl.constexpr, NUM_HEADS: gl.constexpr, DIM: gl.constexpr, ADD: gl.constexpr):
    """Store a tile (64, n) in a gradient, starting at column FIRST. With ADD, add the tile instead.

    The gradient (rows, NUM_HEADS, DIM) is contiguous, and `base` points to row `own` of one head.
    """
    LAYOUT: gl.constexpr = tile.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = FIRST + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    pointers = base + rows.to(gl.int64)[:, None] * (NUM_HEADS * DIM) + columns[None, :]
    mask = (rows < end - own)[:, None] & (columns < DIM)[None, :]
    if ADD:
        tile += gl.load(pointers, mask=mask, other=0.0)
    gl.store(pointers, tile, mask=mask)
