"""Refusals shared by all kernel modules: each says what was given, what is allowed and what to do."""

import math

import torch
from torch import Tensor

from kernels.blocks import BlockMask
from kernels.dropout import Dropout

MAX_HEAD_DIM = 256
PRECISIONS = ("ieee", "tf32")


def _require_shape(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, but q, k and v imply {shape}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, but q is on {device}: move all arguments to one device")


def _require_fp32(name: str, x: Tensor) -> None:
    if x.dtype != torch.float32:
        raise ValueError(f"{name} is {x.dtype}, but must be torch.float32: partial results are never rounded")


def _require_updatable(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{name} is updated in place and must be contiguous: pass {name}.contiguous() and keep it")


def check_inputs(q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, scale: float) -> None:
    """Raise ValueError unless the shapes, devices and dtypes of `kernels.reference` hold; any float dtype passes."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but must be (batch, rows, heads, head dim)")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} and q is {q.dtype}: cast them to one dtype")
    (batch, num_queries, num_heads, head_dim), (_, num_keys, num_key_heads, _) = q.shape, k.shape
    device = q.device
    _require_shape("k", k, (batch, num_keys, num_key_heads, head_dim), device)
    _require_shape("v", v, (batch, num_keys, num_key_heads, v.shape[3]), device)
    if num_key_heads == 0 or num_heads % num_key_heads:
        raise ValueError(f"{num_heads} query heads cannot be shared out over {num_key_heads} key heads: Hq % Hkv must be 0")
    bounds = 1 if lo.shape[:1] == (1,) else batch, num_queries
    for name, x in (("lo", lo), ("hi", hi)):
        if x.dtype != torch.int32:
            raise ValueError(f"{name} is {x.dtype}, but interval bounds must be torch.int32")
        _require_shape(name, x, bounds, device)
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale is {scale}, but must be positive and finite: for a negative scale negate q")


def check_supported(q: Tensor, v: Tensor) -> None:
    """Raise ValueError unless the dtype and the head dims are ones that the Triton kernels take."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"{q.dtype} inputs: the Triton kernels take fp16, bf16 and fp32; use kernels.reference for fp64")
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        raise ValueError("bf16 on the CPU: Triton's interpreter computes it wrongly; use fp32, or kernels.reference")
    for name, head_dim in (("query", q.shape[-1]), ("value", v.shape[-1])):
        if not 1 <= head_dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} head dim {head_dim}: the Triton kernels take 1 to {MAX_HEAD_DIM}; "
                "use more heads of a smaller dim, or kernels.reference"
            )


def check_state(state: tuple[Tensor, Tensor, Tensor], q: Tensor, v: Tensor) -> None:
    """Raise ValueError unless `state` is a contiguous fp32 (m, l, o) of the query rows `q`."""
    rows = tuple(q.shape[:3])
    for name, x, shape in zip("mlo", state, (rows, rows, (*rows, v.shape[-1])), strict=True):
        _require_shape(name, x, shape, q.device)
        _require_fp32(name, x)
        _require_updatable(name, x)


def check_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor,
    given: tuple[Tensor | None, ...], grad_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """Raise ValueError unless the arguments that `backward` has beyond `forward` fit q, k and v."""
    rows = tuple(q.shape[:3])
    _require_shape("dout", dout, (*rows, v.shape[-1]), q.device)
    if dout.dtype != q.dtype:
        raise ValueError(f"dout is {dout.dtype} and q is {q.dtype}: cast dout to q's dtype")
    for name, x in (("lse", lse), ("delta", delta)):
        _require_shape(name, x, rows, q.device)
        _require_fp32(name, x)
    if grad_dtype not in (None, q.dtype, torch.float32):
        raise ValueError(f"grad_dtype is {grad_dtype}, but fresh gradients have q's {q.dtype} (None) or torch.float32")
    for name, x, like in zip(("dq", "dk", "dv"), given, (q, k, v), strict=True):
        if x is None:
            continue
        _require_shape(name, x, tuple(like.shape), q.device)
        _require_fp32(name, x)
        _require_updatable(name, x)


def check_options(q: Tensor, k: Tensor, dropout: Dropout | None, blocks: BlockMask | None, precision: str) -> None:
    """Raise ValueError unless the optional arguments fit q and k."""
    (batch, num_queries, num_heads), num_keys = q.shape[:3], k.shape[1]
    if dropout is not None:
        _require_shape("query_positions", dropout.query_positions, (num_queries,), q.device)
        _require_shape("key_positions", dropout.key_positions, (num_keys,), q.device)
    if blocks is not None:
        shape = blocks.keep.shape
        batch, num_heads = 1 if shape[0] == 1 else batch, 1 if shape[1] == 1 else num_heads
        num_blocks = (-(-rows // blocks.size) for rows in (num_queries, num_keys))
        _require_shape("the block mask", blocks.keep, (batch, num_heads, *num_blocks), q.device)
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: choose one of {', '.join(PRECISIONS)}")
