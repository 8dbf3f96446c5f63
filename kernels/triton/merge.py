"""Gradients that came from several ranks, added up and rounded in one pass over memory."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.triton.launcher import launch

BLOCK = 2048  # elements of a program
PARTS = 3  # of a launch


@triton.jit
def _add_part(x, part, rows, i, inside, WIDTH: tl.constexpr):
    """x plus the elements i of a part that has the rows [first, end)."""
    if part is not None:
        first, end = rows
        index = i - first.to(tl.int64) * WIDTH
        x += tl.load(part + index, mask=inside & (index >= 0) & (i < end.to(tl.int64) * WIDTH), other=0.0)
    return x


@triton.jit(do_not_specialize=["num_rows", "a_first", "a_end", "b_first", "b_end", "c_first", "c_end"])
def _total_kernel(
    base, a, b, c, out, num_rows, a_first, a_end, b_first, b_end, c_first, c_end, WIDTH: tl.constexpr, SIZE: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = i < num_rows.to(tl.int64) * WIDTH
    x = tl.load(base + i, mask=inside, other=0.0)
    x = _add_part(x, a, (a_first, a_end), i, inside, WIDTH)
    x = _add_part(x, b, (b_first, b_end), i, inside, WIDTH)
    x = _add_part(x, c, (c_first, c_end), i, inside, WIDTH)
    tl.store(out + i, x.to(out.dtype.element_ty), mask=inside)


def total(base: Tensor, parts: Sequence[tuple[int, Tensor]], dtype: torch.dtype) -> Tensor:
    """As `ringattn.kernels.reference.total`, for fp32 sums of one batch entry."""
    out = base if base.dtype == dtype else torch.empty_like(base, dtype=dtype)
    while len(parts) > PARTS:
        base, parts = total(base, parts[:PARTS], base.dtype), parts[PARTS:]
    if base.numel() > 0 and (parts or out is not base):
        missing = PARTS - len(parts)
        ends = [end for first, x in parts for end in (first, first + x.shape[1])] + missing * [0, 0]
        with torch.cuda.device_of(base):
            launch(
                _total_kernel, -(-base.numel() // BLOCK), (base, *(x for _, x in parts), *missing * [None], out),
                (base.shape[1], *ends), WIDTH=base[0, 0].numel(), SIZE=BLOCK,
            )  # fmt: skip
    return out
