"""Add learned attention sinks to the results of attention."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.triton.launcher import launch

ELEMENTS = 4096  # elements of `out` per program


@triton.jit
def _keys_share(lse, sink):
    """Return 1 minus the softmax probability of the sink."""
    return 1 / (1 + tl.exp(sink - lse))


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    out, lse, sinks, new_out, new_lse, num_rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """In this kernel, a row is one head of one token."""
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    inside = row < num_rows
    element = row[:, None] * DIM + column[None, :]
    mask = inside[:, None] & (column < DIM)[None, :]
    row_lse, sink = tl.load(lse + row, mask=inside, other=0.0), tl.load(sinks + row % HEADS)
    x = tl.load(out + element, mask=mask, other=0.0).to(tl.float32) * _keys_share(row_lse, sink)[:, None]
    tl.store(new_out + element, x.to(new_out.dtype.element_ty), mask=mask)
    highest = tl.maximum(row_lse, sink)
    tl.store(new_lse + row, highest + tl.log(tl.exp(row_lse - highest) + tl.exp(sink - highest)), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_kernel(
    out, lse, sinks, dout, dlse, new_dout, new_dlse, dsinks, num_rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    inside = row < num_rows
    element = row[:, None] * DIM + column[None, :]
    mask = inside[:, None] & (column < DIM)[None, :]
    share = _keys_share(tl.load(lse + row, mask=inside, other=0.0), tl.load(sinks + row % HEADS))
    x = tl.load(out + element, mask=mask, other=0.0).to(tl.float32)
    dx = tl.load(dout + element, mask=mask, other=0.0).to(tl.float32)
    tl.store(new_dout + element, (dx * share[:, None]).to(new_dout.dtype.element_ty), mask=mask)
    # d share / d lse = share * (1 - share), and d share / d sink = -share * (1 - share).
    grad = tl.sum(x * dx, 1) * share * (1 - share)
    from_lse = tl.load(dlse + row, mask=inside, other=0.0) if dlse is not None else tl.zeros_like(share)
    tl.store(new_dlse + row, grad + from_lse * share, mask=inside)
    tl.store(dsinks + row, from_lse * (1 - share) - grad, mask=inside)


def _launch(kernel, out: Tensor, *others: Tensor | None) -> None:
    (heads, dim), padded = out.shape[-2:], triton.next_power_of_2(out.shape[-1])
    num_rows, per_program = out[..., 0].numel(), max(ELEMENTS // padded, 1)
    if out.numel() > 0:
        constants = dict(HEADS=heads, DIM=dim, PADDED_DIM=padded, ROWS=per_program)
        operands = [x if x is None else x.contiguous() for x in (out, *others)]  # the results are contiguous already
        with torch.cuda.device_of(out):
            launch(kernel, -(-num_rows // per_program), operands, (num_rows,), **constants)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `reference.add_sinks`."""
    results = out.new_empty(out.shape), lse.new_empty(lse.shape)
    _launch(_forward_kernel, out, lse, sinks, *results)
    return results


def add_sinks_backward(
    out: Tensor, lse: Tensor, sinks: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `reference.add_sinks_backward`."""
    results = out.new_empty(out.shape), lse.new_empty(lse.shape), lse.new_empty(lse.shape)
    _launch(_backward_kernel, out, lse, sinks, dout, dlse, *results)
    *grads, dsinks = results
    return *grads, dsinks.sum((0, 1))
