"""Refusals shared by all kernel modules: each says what was given, what is allowed and what to do."""

import math

import torch
from torch import Tensor

from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.interval_mask import Intervals

MAX_HEAD_DIM = 256
PRECISIONS = ("ieee", "tf32")

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check q (B, Nq, Hq, D), k (B, Nk, Hkv, D) and v (B, Nk, Hkv, Dv), as the public calls receive them.

    Raises:
        ValueError: a tensor is a DTensor, the shapes contradict each other, Hkv does not divide Hq, the dtypes or devices
            differ, or the dtype is not fp16, bf16, fp32 or fp64.
    """
    if any(hasattr(x, "to_local") for x in (q, k, v)):
        raise ValueError("q, k, v are DTensors: give each rank's own rows as plain tensors, x.to_local()")
    check_shapes(q, k, v)
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ValueError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype} on {q.device}, {k.device}, {v.device}: give one dtype and device"
        )
    if q.dtype not in FLOAT_DTYPES:
        raise ValueError(f"q, k, v are {q.dtype}: give fp16, bf16, fp32 or fp64")


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check the shapes of q (B, Nq, Hq, D), k (B, Nk, Hkv, D) and v (B, Nk, Hkv, Dv).

    Raises:
        ValueError: a tensor does not have four dimensions, the shapes contradict each other, or Hkv does not divide Hq.
    """
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k, v have {q.ndim}, {k.ndim}, {v.ndim} dimensions: give four, (batch, tokens, heads, head dim)")
    num_heads, num_key_heads = q.shape[2], k.shape[2]
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: give q (B, N, Hq, D), k (B, N, Hkv, D), "
            "v (B, N, Hkv, Dv)"
        )
    if num_key_heads == 0 or num_heads % num_key_heads:
        raise ValueError(
            f"{num_heads} query heads and {num_key_heads} key heads: the number of query heads must be a multiple of the "
            "number of key heads"
        )


def check_scale(scale: float) -> None:
    """Raise ValueError unless the softmax scale is positive and finite."""
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale}: must be positive and finite; for a negative scale, negate q")


def check_dropout(dropout_p: float, seed: int) -> None:
    """Raise ValueError unless 0 <= dropout_p < 1 and `seed` is an integer with 0 <= seed < 2**63.

    The custom operators take the seed as a signed 64-bit integer.
    """
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p={dropout_p}: must be at least 0 and less than 1")
    if isinstance(seed, float | None) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed}: must be an integer of at least 0 and less than 2**63")


def check_precision(precision: str) -> None:
    """Raise ValueError unless `precision` is one of PRECISIONS."""
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: choose one of {', '.join(PRECISIONS)}")


def _require(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, but q, k and v imply {tuple(shape)}")
    if x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype}, but must be {dtype}: k, v, dout as q, positions int32, partial results fp32")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, but q is on {device}: move all arguments to one device")


def _require_updatable(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{name} is updated in place and must be contiguous: pass {name}.contiguous() and keep it")


def check_inputs(q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float) -> None:
    """Raise ValueError unless the shapes, devices and dtypes of `ringattn.kernels.reference` hold; any float dtype passes."""
    if not q.dim() == k.dim() == v.dim() == 4:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k and v have shapes {shapes}, but each must be (batch, rows, heads, head dim)")
    (batch, num_queries, num_heads, head_dim), (_, num_keys, num_key_heads, _) = q.shape, k.shape
    dtype, device = q.dtype, q.device
    _require("k", k, (batch, num_keys, num_key_heads, head_dim), dtype, device)
    _require("v", v, (batch, num_keys, num_key_heads, v.shape[3]), dtype, device)
    if num_key_heads == 0 or num_heads % num_key_heads:
        raise ValueError(f"{num_heads} query heads cannot be shared out over {num_key_heads} key heads: Hq % Hkv must be 0")
    if (intervals.num_rows, intervals.num_keys) != (num_queries, num_keys) or intervals.batch not in (1, batch):
        raise ValueError(
            f"{intervals.batch} intervals of {intervals.num_rows} queries and {intervals.num_keys} keys, but q and k have "
            f"{num_queries} and {num_keys} rows in a batch of {batch}: give 1 or {batch}, of these rows"
        )
    if intervals.device != device:
        raise ValueError(f"the intervals are on {intervals.device}, but q is on {device}: make them for q's device")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}, but must be positive and finite: for a negative scale negate q")


def check_supported(q: Tensor, v: Tensor) -> None:
    """Raise ValueError unless the dtype and the head dims are ones that the Triton kernels take."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"{q.dtype} inputs: the Triton kernels take fp16, bf16 and fp32; use ringattn.kernels.reference for fp64"
        )
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        raise ValueError("bf16 on the CPU: Triton's interpreter computes it wrongly; use fp32, or ringattn.kernels.reference")
    for name, head_dim in (("query", q.shape[-1]), ("value", v.shape[-1])):
        if not 1 <= head_dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} head dim {head_dim}: the Triton kernels take 1 to {MAX_HEAD_DIM}; "
                "use more heads of a smaller dim, or ringattn.kernels.reference"
            )


def check_state(state: tuple[Tensor, Tensor, Tensor], q: Tensor, v: Tensor) -> None:
    """Raise ValueError unless `state` is a contiguous fp32 (m, l, o) of the query rows `q`."""
    rows = q.shape[:3]
    for name, x, shape in zip("mlo", state, (rows, rows, (*rows, v.shape[-1])), strict=True):
        _require(name, x, shape, torch.float32, q.device)
        _require_updatable(name, x)


def check_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor | tuple[Tensor, Tensor | None],
    given: tuple[Tensor | None, ...], grad_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """Raise ValueError unless the arguments that `backward` has beyond `forward` fit q, k and v."""
    rows, dtype, device = q.shape[:3], q.dtype, q.device
    _require("dout", dout, (*rows, v.shape[3]), dtype, device)
    _require("lse", lse, rows, torch.float32, device)
    if isinstance(delta, Tensor):
        _require("delta", delta, rows, torch.float32, device)
    else:
        out, dlse = delta
        _require("out", out, dout.shape, dtype, device)
        if dlse is not None:
            _require("dlse", dlse, rows, torch.float32, device)
    if grad_dtype not in (None, dtype, torch.float32):
        raise ValueError(f"grad_dtype is {grad_dtype}, but fresh gradients have q's {dtype} (None) or torch.float32")
    for name, x, like in zip(("dq", "dk", "dv"), given, (q, k, v), strict=True):
        if x is not None:
            _require(name, x, like.shape, torch.float32, device)
            _require_updatable(name, x)


def check_options(q: Tensor, k: Tensor, dropout: Dropout | None, blocks: BlockMask | None, precision: str) -> None:
    """Raise ValueError unless the optional arguments fit q and k."""
    if dropout is not None:
        _require("query_positions", dropout.query_positions, (q.shape[1],), torch.int32, q.device)
        _require("key_positions", dropout.key_positions, (k.shape[1],), torch.int32, q.device)
    if blocks is not None:
        shape = blocks.keep.shape
        batch, num_heads = 1 if shape[0] == 1 else q.shape[0], 1 if shape[1] == 1 else q.shape[2]
        num_blocks = (-(-x.shape[1] // blocks.size) for x in (q, k))
        _require("the block mask", blocks.keep, (batch, num_heads, *num_blocks), torch.bool, q.device)
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: choose one of {', '.join(PRECISIONS)}")
