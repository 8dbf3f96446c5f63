"""Check the arguments of attention calls.

Public functions of `ringattn` check the user's arguments. The functions of `ringattn.kernels.dispatch` check every kernel call,
and the kernels themselves check nothing.

Functions whose names begin with `check` return None or raise ValueError.
"""

import math
from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.fp8 import BLOCK, DTYPE, QuantizedRows, QuantizedValues, num_blocks
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import Accumulators, Delta, State, state_dtype

PRECISIONS = ("ieee", "tf32", "fp8")

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def shown(value: object) -> str:
    """Return the value as text for an error message, or only its type if the text would be long."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"<{type(value).__name__}>"


def as_integer(name: str, value: Any, low: int = 0, high: int | None = 2**63 - 1, remedy: str = "") -> int:
    """Return `value` as an int with low <= value <= high, or raise ValueError. NumPy and torch integers are accepted. With
    high=None, there is no upper limit.
    """
    number = value
    if type(value) is not int and not isinstance(value, torch.SymInt):
        try:
            number = None if _is_bool(value) else index(value)
        except (TypeError, RuntimeError):
            number = None
    if number is None or number < low or (high is not None and number > high):
        limit = {None: f"of at least {low}", 2**63 - 1: f"of at least {low} and less than 2**63"}
        raise ValueError(f"{name}={shown(value)}: it must be an integer {limit.get(high, f'from {low} to {high}')}{remedy}")
    return number


def as_number(name: str, value: Any) -> float:
    """Return `value` as a float, or raise ValueError. NumPy numbers and tensors with one element are converted to float."""
    if type(value) is float:
        return value
    try:
        return float("" if _is_bool(value) or isinstance(value, str | bytes) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ValueError(f"{name}={shown(value)}: it must be a number") from None


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def check_flag(name: str, value: object) -> None:
    if value is not True and value is not False:
        raise ValueError(f"{name}={shown(value)}: it must be True or False")


def check_name(name: str, value: object, known: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"unknown {name} {shown(value)}: it must be one of {', '.join(known)}")


def check_dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not torch.compiler.is_compiling() and (torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()):
        raise ValueError(
            "attention supports neither torch.func nor torch.jit.trace: use autograd, torch.compile or torch.export"
        )
    if not type(q) is type(k) is type(v) is Tensor:
        if any(hasattr(x, "to_local") for x in (q, k, v)):
            raise ValueError("q, k, v are DTensors: give each rank's own rows as plain tensors, x.to_local()")
        if not all(isinstance(x, Tensor) for x in (q, k, v)):
            kinds = ", ".join(type(x).__name__ for x in (q, k, v))
            raise ValueError(f"q, k, v are {kinds}: give three tensors (batch, tokens, heads, head dim)")
    # Some nested tensors have the strided layout, so also test `is_nested`.
    if not q.layout is k.layout is v.layout is torch.strided or q.is_nested or k.is_nested or v.is_nested:
        raise ValueError(
            f"q, k, v are {q.layout}, {k.layout}, {v.layout} or nested: give dense tensors; for packed documents, "
            "pass their lengths in the mask"
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_dense(q, k, v)
    check_fit(q, k, v)


def check_fit(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_shapes(q, k, v)
    dtype, device = q.dtype, q.device
    if not dtype == k.dtype == v.dtype or not device == k.device == v.device:
        raise ValueError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype} on {q.device}, {k.device}, {v.device}: give one dtype and device"
        )
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"q, k, v are {dtype}: give fp16, bf16, fp32 or fp64")


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    queries, keys, values = q.shape, k.shape, v.shape
    if not len(queries) == len(keys) == len(values) == 4:
        raise ValueError(f"q, k, v have {q.ndim}, {k.ndim}, {v.ndim} dimensions: give four, (batch, tokens, heads, head dim)")
    batch, _, num_heads, head_dim = queries
    key_batch, _, num_key_heads, key_dim = keys
    if key_batch != batch or key_dim != head_dim or values[:3] != keys[:3]:
        raise ValueError(
            f"q {tuple(queries)}, k {tuple(keys)}, v {tuple(values)}: give q (B, N, Hq, D), k (B, N, Hkv, D), v (B, N, Hkv, Dv)"
        )
    if num_key_heads == 0 or num_heads % num_key_heads:
        raise ValueError(
            f"{num_heads} query heads and {num_key_heads} key heads: the first must be a multiple of the second; for tensors "
            "of shape (batch, heads, tokens, head dim), pass x.transpose(1, 2)"
        )


def check_scale(scale: float) -> None:
    # The comparison also rejects NaN.
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale}: must be positive and finite; for a negative scale, negate q")


def check_dropout(dropout_p: float, seed: int) -> None:
    """Raise ValueError unless 0 <= dropout_p < 1 and 0 <= seed < 2**63. Custom operators take a signed 64-bit seed."""
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p={dropout_p}: must be at least 0 and less than 1")
    as_integer("seed", seed)


def check_precision(precision: str) -> None:
    check_name("precision", precision, PRECISIONS)


def check_fp8(has_dropout: bool, has_blocks: bool = False) -> None:
    for name, is_given in (("dropout", has_dropout), ("a block mask", has_blocks)):
        if is_given:
            raise ValueError(f"precision='fp8' with {name}: FP8 attention does not support it; use precision='ieee'")


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, dropout: Dropout | None = None, blocks: BlockMask | None = None
) -> None:
    check_shapes(q, k, v)
    (batch, num_queries, num_heads), num_keys, device = q.shape[:3], k.shape[1], q.device
    if (intervals.num_rows, intervals.num_keys) != (num_queries, num_keys) or intervals.batch not in (1, batch):
        raise ValueError(
            f"the intervals are for {intervals.num_rows} queries, {intervals.num_keys} keys and {intervals.batch} batch "
            f"entries, but q and k have {num_queries} queries and {num_keys} keys in a batch of {batch}: give intervals for "
            f"these queries and keys, and for 1 or {batch} batch entries"
        )
    if intervals.device != device:
        raise ValueError(f"the intervals are on {intervals.device}, but q is on {device}: create them for q's device")
    if dropout is not None:
        _require("query_positions", dropout.query_positions, (num_queries,), torch.int32, device)
        _require("key_positions", dropout.key_positions, (num_keys,), torch.int32, device)
    if blocks is not None:
        masks = (1 if blocks.keep.shape[0] == 1 else batch), (1 if blocks.keep.shape[1] == 1 else num_heads)
        num_blocks = (-(-n // blocks.size) for n in (num_queries, num_keys))
        _require("the block mask", blocks.keep, (*masks, *num_blocks), torch.bool, device)


def check_quantized(q: QuantizedRows, k: QuantizedRows, v: QuantizedValues, intervals: Intervals) -> None:
    (batch, num_keys, num_key_heads), device = k.data.shape[:3], q.data.device
    tiles = batch, num_key_heads, num_blocks(num_keys), v.data.shape[3], BLOCK
    _require("v.data", v.data, tiles, DTYPE, device)
    for name, rows in (("q", q), ("k", k)):
        _require(f"{name}.data", rows.data, rows.data.shape, DTYPE, device)
    for name, x, (entries, tokens, heads) in (
        ("q", q, q.data.shape[:3]),
        ("k", k, k.data.shape[:3]),
        ("v", v, k.data.shape[:3]),
    ):
        _require(f"{name}.scales", x.scales, (entries, num_blocks(tokens), heads), torch.float32, device)
    # `v.data` is stored in tiles, so `check_inputs` receives a view of k with the shape of v.
    check_inputs(q.data, k.data, k.data[..., :1].expand(-1, -1, -1, v.data.shape[3]), intervals)


def check_new_tokens(new: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor], batch: int) -> None:
    for x, y in zip(new, stored, strict=True):
        if (x.shape[0], *x.shape[2:], x.dtype, x.device) != (batch, *y.shape[2:], y.dtype, y.device):
            raise ValueError(
                f"new keys or values have shape {tuple(x.shape)} and dtype {x.dtype} on {x.device}, but the cache has {batch} "
                f"batch entries, heads {tuple(y.shape[2:])} and {y.dtype} on {y.device}: all must be the same"
            )


def check_rows(rows: Tensor, k: Tensor, capacity: int) -> None:
    """Check that `rows` is int64 (N,) or (B, N), with a cache row below `capacity` for each token of `k` (B, N, Hkv, D).

    On a GPU, the values of `rows` are not checked, because the host would have to wait for the GPU.
    """
    if not isinstance(rows, Tensor):
        raise ValueError(f"rows is a {type(rows).__name__}: it must be a tensor of int64, or None")
    if rows.dtype != torch.int64 or rows.shape not in (k.shape[1:2], k.shape[:2]) or rows.device != k.device:
        raise ValueError(
            f"rows is {rows.dtype} {tuple(rows.shape)} on {rows.device}: it must be int64, ({k.shape[1]},) or "
            f"{tuple(k.shape[:2])}, and on {k.device}"
        )
    if rows.device.type == "cpu" and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < capacity:
        raise ValueError(
            f"rows contains {int(rows.min())} to {int(rows.max())}: all rows must be at least 0 and below {capacity}"
        )


def check_bounds(q: Tensor, lo: Tensor, hi: Tensor, sinks: Tensor | None) -> None:
    batch, num_queries, *_ = q.shape
    shape = (1 if lo.shape[:1] == (1,) else batch), num_queries
    _check_int32("lo", lo, shape, q.device)
    _check_int32("hi", hi, shape, q.device)
    if sinks is not None:
        _check_int32("sinks", sinks, (1 if sinks.shape == (1,) else batch,), q.device)


def _check_int32(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if x.shape != shape or x.dtype != torch.int32 or x.device != device or not x.is_contiguous():
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}: it must be contiguous, int32 {shape} and on {device}"
        )


def check_state(state: State, q: Tensor, v: Tensor) -> None:
    rows, dtype = q.shape[:3], state_dtype(q.dtype)
    for name, x, shape in zip("mlo", state, (rows, rows, (*rows, v.shape[3])), strict=True):
        _require_accumulator(name, x, shape, dtype, q.device)


def check_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Delta,
    given: Accumulators,
    grad_dtype: torch.dtype | None,
) -> None:
    rows, dtype, exact, device = q.shape[:3], q.dtype, state_dtype(q.dtype), q.device
    outputs = {"dout": dout}
    scalars: dict[str, Tensor | None] = {"lse": lse}
    if isinstance(delta, tuple):
        outputs["out"], scalars["dlse"] = delta
    else:
        scalars["delta"] = delta
    for name, x in outputs.items():
        _require(name, x, (*rows, v.shape[3]), dtype, device)
    for name, x in scalars.items():
        if x is not None:
            _require(name, x, rows, exact, device)
    if grad_dtype not in (None, dtype, exact):
        raise ValueError(f"grad_dtype={grad_dtype}: must be None, q's dtype {dtype} or {exact}")
    for name, x, like in zip(("dq", "dk", "dv"), given, (q, k, v), strict=True):
        if x is not None:
            _require_accumulator(name, x, like.shape, exact, device)


def _require(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, but q, k and v require {tuple(shape)}")
    if x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype}, but must be {dtype}: convert it with {name}.to({dtype})")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, but q is on {device}: move all arguments to one device")


def _require_accumulator(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    _require(name, x, shape, dtype, device)
    if not x.is_contiguous():
        raise ValueError(f"{name} is updated in place and must be contiguous: pass {name}.contiguous() and keep that tensor")
