"""Add one learned sink per query head to attention. A sink is a softmax logit without a value.

Sinks (OpenAI 2025, gpt-oss) only rescale the output, and increase the log-sum-exp of the scores:

    out' = out * exp(lse - lse')    lse' = log(exp(lse) + exp(sink))
"""

from typing import Any

import torch
from torch import Tensor

from ringattn.kernels import dispatch, reference
from ringattn.kernels.reference import state_dtype


def check_sink_logits(sink_logits: Tensor | None, q: Tensor) -> None:
    """Raise ValueError unless `sink_logits` is None or has one floating-point number per head of q (B, N, Hq, D)."""
    if sink_logits is None or q.ndim != 4:
        return
    if not isinstance(sink_logits, Tensor):
        raise ValueError(
            f"sink_logits is a {type(sink_logits).__name__}: it must be a tensor ({q.shape[2]},), one logit per head"
        )
    if sink_logits.shape == q.shape[1:2] != q.shape[2:3]:
        raise ValueError(
            f"q is {tuple(q.shape)}, and there are {len(sink_logits)} sinks: pass (batch, tokens, heads, head dim), which is "
            "x.transpose(1, 2)"
        )
    if sink_logits.shape != q.shape[2:3] or not sink_logits.is_floating_point():
        raise ValueError(
            f"sink_logits has the shape {tuple(sink_logits.shape)} and {sink_logits.dtype}: it must be a floating-point tensor "
            f"({q.shape[2]},), one logit per query head"
        )
    if sink_logits.device != q.device:
        raise ValueError(f"sink_logits is on {sink_logits.device} but q is on {q.device}: move it to the device of q")


def with_sinks(out: Tensor, lse: Tensor, sink_logits: Tensor | None, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Add `sink_logits` (Hq,) to the attention results `out` (B, N, Hq, Dv) and `lse` (B, N, Hq).

    All three tensors may require gradients. Return `out`, or (out, lse) with `return_lse`.
    """
    if sink_logits is not None:
        # Compilers fuse the PyTorch operations of `add_sinks`, so only eager calls use the kernel.
        is_eager = not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()
        add = _AddSinks.apply if is_eager and out.is_cuda else reference.add_sinks
        out, lse = add(out, lse, sink_logits.to(lse.dtype))
    return (out, lse) if return_lse else out


class _AddSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:  # pyrefly: ignore[bad-override]  # torch declares none
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, sinks)
        return dispatch.add_sinks(out, lse, sinks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, ...]:  # pyrefly: ignore[bad-override]  # torch declares none
        out, lse, sinks = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        return dispatch.add_sinks_backward(out, lse, sinks, dout, dlse)


def sink_state(sink_logits: Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the partial softmax state (m, l, o) of the sinks alone, where `shape` (B, N, Hq, Dv) and `dtype` describe the
    output.
    """
    m = sink_logits.detach().to(state_dtype(dtype)).expand(shape[:3]).contiguous()
    return m, torch.ones_like(m), m.new_zeros(shape)
