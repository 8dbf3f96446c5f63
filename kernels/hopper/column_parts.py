"""Compute the matrix products of the Hopper kernels for tiles of 64, 96 or 128 columns.

A product of 96 columns is issued as two products, for *parts* of 64 and 32 columns.

The argument COLUMNS is the number of multiplied columns: 64, 96 or 128.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ringattn.kernels.hopper.common import ROWS, accumulator_layout, as_left, padded_dim


def used_columns(head_dim: int, value_dim: int) -> int:
    return 96 if 64 < max(head_dim, value_dim) <= 96 else padded_dim(head_dim, value_dim)


@gluon.constexpr_function
def num_parts(columns: int) -> int:
    return 2 if columns == 96 else 1


@gluon.jit
def split_tile(tile, COLUMNS: gl.constexpr):
    if num_parts(COLUMNS) == 1:
        return (tile,)
    else:
        return tile.slice(0, 64, dim=1), tile.slice(64, 32, dim=1)


@gluon.jit
def load_left(tile, N: gl.constexpr, COLUMNS: gl.constexpr):
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator_layout(N), k_width=2)
    PARTS: gl.constexpr = num_parts(COLUMNS)
    tiles = split_tile(tile, COLUMNS)
    parts = ()
    for part in gl.static_range(PARTS):
        parts = parts + (tiles[part].load(LEFT),)
    return parts


@gluon.jit
def multiply_rows(left, right, COLUMNS: gl.constexpr):
    """Issue the product left * right^T (64, n). `left` (64, columns) is in registers or in shared memory."""
    N: gl.constexpr = right.shape[0]
    PARTS: gl.constexpr = num_parts(COLUMNS)
    product = gl.full([ROWS, N], 0.0, gl.float32, accumulator_layout(N))
    tiles = split_tile(right, COLUMNS)
    for part in gl.static_range(PARTS):
        product = warpgroup_mma(left[part], tiles[part].permute((1, 0)), product, use_acc=part > 0, is_async=True)
    return product


@gluon.jit
def add_product(left, right, sums, COLUMNS: gl.constexpr):
    """Issue sums += left * right, and return the sums. `left` (64, n) is in registers, and `right` (n, columns) in shared
    memory.
    """
    PARTS: gl.constexpr = num_parts(COLUMNS)
    tiles = split_tile(right, COLUMNS)
    pending = ()
    for part in gl.static_range(PARTS):
        tile = tiles[part]
        pending = pending + (warpgroup_mma(as_left(left, tile.shape[1]), tile, sums[part], is_async=True),)
    return pending


@gluon.jit
def zero_parts(COLUMNS: gl.constexpr):
    if num_parts(COLUMNS) == 1:
        return (gl.full([ROWS, COLUMNS], 0.0, gl.float32, accumulator_layout(COLUMNS)),)
    else:
        return (
            gl.full([ROWS, 64], 0.0, gl.float32, accumulator_layout(64)),
            gl.full([ROWS, 32], 0.0, gl.float32, accumulator_layout(32)),
        )


@gluon.jit
def wait_for_parts(parts, IN_FLIGHT: gl.constexpr, PARTS: gl.constexpr):
    if PARTS == 1:
        return (warpgroup_mma_wait(IN_FLIGHT, deps=parts),)
    else:
        return warpgroup_mma_wait(IN_FLIGHT, deps=parts)


@gluon.jit
def join_parts(parts, COLUMNS: gl.constexpr):
    """Return (64, 64) or (64, 128). With 96 columns, the last 32 columns are zeros."""
    if num_parts(COLUMNS) == 1:
        return parts[0]
    else:
        first, rest = parts
        return _join_columns(first, _join_columns(rest, gl.zeros_like(rest)))


@gluon.jit
def _join_columns(left, right):
    COLUMNS: gl.constexpr = 2 * left.shape[1]
    tile = gl.join(left, right).permute((0, 2, 1)).reshape([ROWS, COLUMNS])
    return gl.convert_layout(tile, accumulator_layout(COLUMNS))
