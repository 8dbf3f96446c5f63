"""Add the partial gradients that several ranks computed, and round the sum, in one pass over memory."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.triton.launcher import launch

BLOCK = 2048  # elements per program
MAX_PARTS = 3  # parts that one launch adds; a parameter of the kernel exists for each


@triton.jit
def _add_part(x, part, tokens, i, inside, WIDTH: tl.constexpr):
    """Add one part to x, the elements i of the sum. `tokens` is the range [first, end) of tokens that the part covers."""
    # `part` is None for the parts that a launch does not have. Triton then leaves out this code.
    if part is not None:
        first, end = tokens
        index = i - first.to(tl.int64) * WIDTH
        x += tl.load(part + index, mask=inside & (index >= 0) & (i < end.to(tl.int64) * WIDTH), other=0.0)
    return x


@triton.jit(do_not_specialize=["num_tokens", "a_first", "a_end", "b_first", "b_end", "c_first", "c_end"])
def _sum_kernel(
    base, a, b, c, out, num_tokens, a_first, a_end, b_first, b_end, c_first, c_end, WIDTH: tl.constexpr, SIZE: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = i < num_tokens.to(tl.int64) * WIDTH
    x = tl.load(base + i, mask=inside, other=0.0)
    x = _add_part(x, a, (a_first, a_end), i, inside, WIDTH)
    x = _add_part(x, b, (b_first, b_end), i, inside, WIDTH)
    x = _add_part(x, c, (c_first, c_end), i, inside, WIDTH)
    tl.store(out + i, x.to(out.dtype.element_ty), mask=inside)


def sum_partials(base: Tensor, parts: Sequence[tuple[int, Tensor]], dtype: torch.dtype) -> Tensor:
    """Add partial gradients of one batch entry, see `ringattn.kernels.reference.sum_partials`.

    Args:
        base: fp32 (1, N, H, D), contiguous. If `dtype` is fp32, the sum overwrites it.
        parts: pairs (first, x), where x fp32 (1, n, H, D), contiguous, is added to the n tokens of `base` from `first` on.
        dtype: the dtype of the result, fp16, bf16 or fp32.

    Returns:
        The sum (1, N, H, D) in `dtype`.
    """
    # Sums in fp32 overwrite the base. Every element is read and written by the same thread, so the sum needs no second buffer.
    out = base if base.dtype == dtype else torch.empty_like(base, dtype=dtype)
    # If there are more parts than one launch can add, the first ones are added to the fp32 base. Only the last launch rounds
    # the sum.
    while len(parts) > MAX_PARTS:
        base, parts = sum_partials(base, parts[:MAX_PARTS], base.dtype), parts[MAX_PARTS:]
    if base.numel() > 0 and (parts or out is not base):
        missing = MAX_PARTS - len(parts)
        ranges = [bound for first, x in parts for bound in (first, first + x.shape[1])] + missing * [0, 0]
        with torch.cuda.device_of(base):
            launch(
                _sum_kernel, -(-base.numel() // BLOCK), (base, *(x for _, x in parts), *missing * [None], out),
                (base.shape[1], *ranges), WIDTH=base[0, 0].numel(), SIZE=BLOCK,
            )  # fmt: skip
    return out
