"""Round a matrix to FP8, and write it together with its transpose.

On GPUs, an FP8 matrix product requires that both operands are contiguous along the summed dimension. Forward and backward
passes sum over different dimensions of a matrix, so both orders are needed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.triton.launcher import launch

# On an H200, tiles of 128 x 64 and 128 x 128 elements are equally fast.
ROWS, COLUMNS = 128, 64

# The length of a transposed row is a multiple of 16 elements, as `torch._scaled_mm` requires.
MULTIPLE = 16


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x, scale, rounded, transposed, num_rows, WIDTH: tl.constexpr, MULTIPLE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    rows = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    padded = ((num_rows + MULTIPLE - 1) // MULTIPLE).to(tl.int64) * MULTIPLE
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    tile = tl.load(x + rows[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
    factor = tl.load(scale)
    result = (tile.to(tl.float32) * factor).to(rounded.dtype.element_ty)
    tl.store(rounded + rows[:, None] * WIDTH + columns[None, :], result, mask=inside)
    # Triton 3.6 transposes 8-bit numbers incorrectly, so the 16-bit tile is transposed.
    inside = (columns < WIDTH)[:, None] & (rows < padded)[None, :]
    result = (tl.trans(tile).to(tl.float32) * factor).to(rounded.dtype.element_ty)
    tl.store(transposed + columns[:, None] * padded + rows[None, :], result, mask=inside)


def round_both(x: Tensor, scale: Tensor, rounded: Tensor, transposed: Tensor) -> None:
    """Round scale * x to the FP8 format of the outputs.

    Args:
        x: fp16 or bf16 (M, N), contiguous.
        scale: a scalar in fp32; scale * x must not exceed the largest number of the format.
        rounded: (M, N), receives the result.
        transposed: (N, P), receives its transpose. P is M rounded up to a multiple of 16, and the padding becomes 0.

    Raises:
        TypeError: x is neither fp16 nor bf16. Triton may transpose other dtypes incorrectly.
    """
    if x.element_size() != 2:
        raise TypeError(f"x has the dtype {x.dtype}: round_both requires fp16 or bf16")
    (num_rows, width), padded = x.shape, transposed.shape[1]
    with torch.cuda.device_of(x):
        launch(
            _kernel, -(-padded // ROWS) * -(-width // COLUMNS), (x, scale, rounded, transposed), (num_rows,),
            WIDTH=width, MULTIPLE=MULTIPLE, ROWS=ROWS, COLUMNS=COLUMNS,
        )  # fmt: skip
