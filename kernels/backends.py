"""Choose the backend that computes an attention call, depending on its device, dtype and shapes.

    backend      runs on                      computes
    hopper       sm_90                        fp16 and bf16, head dims that are multiples of 8 up to 256
    triton       any GPU that Triton supports fp16, bf16 and fp32, head dims up to 256, dropout, block masks
    blockwise    anything                     everything, tile by tile in PyTorch
    reference    anything                     everything, but stores all scores; for tests

With backend="auto", a call uses the first backend that can run it, in the order hopper, triton, blockwise. The backend
"reference" must be requested by name.
"""

import os
from dataclasses import dataclass

import torch

from ringattn.kernels import fp8, validation
from ringattn.kernels.caching import cached
from ringattn.kernels.choices import BACKENDS, MAX_HEAD_DIM

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Choice:
    backend: str  # hopper | triton | blockwise | reference
    reason: str
    reads_fp8: bool = False  # whether the kernel reads FP8 inputs


_last: Choice | None = None


def record(choice: Choice) -> None:
    global _last
    _last = choice


def last_backend() -> Choice | None:
    """Return the backend of this process's latest forward or decoding call, or None before the first call.

    The `reason` explains, for example, why a call on a GPU did not use the Hopper kernels.
    """
    return _last


def check_backend(backend: object) -> None:
    """`choose_backend` is cached, so its arguments must be hashable."""
    if not isinstance(backend, str):
        raise ValueError(f"backend={validation.shown(backend)}: it must be one of {', '.join(BACKENDS)}")


@cached(maxsize=256)
def choose_backend(
    device: torch.device,
    dtype: torch.dtype,
    backend: str = "auto",
    dims: tuple[int, int] = (128, 128),
    plain: bool = True,
    precision: str = "ieee",
) -> Choice:
    """Select the backend for tensors with this `dtype` on this `device`.

    Args:
        dims: head dims (D, Dv).
        plain: whether the call has keys, no dropout and no block mask, as the Hopper kernels require.
        precision: as for `forward`. If the FP8 kernel cannot run, "auto" selects a backend that computes with the rounded
            inputs in a wider dtype.

    Raises:
        ValueError: the backend is unknown or cannot run the call.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown kernel backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    note = ""
    if precision == "fp8" and backend in ("auto", "hopper"):
        obstacle = _fp8_obstacle(device, dtype, dims, plain)
        if obstacle is None:
            return Choice("hopper", "FP8 kernel on sm_90", reads_fp8=True)
        if backend == "hopper":
            raise ValueError(f"backend='hopper' with precision='fp8' is unavailable: {obstacle}; use backend='auto'")
        note = f"no kernel that reads FP8 inputs can run ({obstacle}), so the inputs are rounded to FP8 and converted back; "
    if backend == "triton" and (obstacle := _triton_obstacle(device, dtype, dims)):
        raise ValueError(f"backend='triton' is unavailable: {obstacle}; use backend='blockwise' or 'auto'")
    if backend == "hopper" and (obstacle := _hopper_obstacle(device, dtype, dims, plain)):
        raise ValueError(f"backend='hopper' is unavailable: {obstacle}; use backend='triton' or 'auto'")
    if backend != "auto":
        return Choice(backend, "requested")
    # "auto" never selects Triton's interpreter, even if it is enabled, because the interpreter is far slower than PyTorch.
    if device.type != "cuda":
        return Choice("blockwise", f"{note}no GPU kernel runs on {device.type}")
    if obstacle := _triton_obstacle(device, dtype, dims):
        return Choice("blockwise", note + obstacle)
    if obstacle := _hopper_obstacle(device, dtype, dims, plain):
        return Choice("triton", f"{note}the Hopper kernels are unavailable: {obstacle}")
    return Choice("hopper", f"{note}fastest on sm_90")


def _triton_obstacle(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> str | None:
    if dtype not in TRITON_DTYPES:
        return f"the Triton kernels do not support {dtype}, only fp16, bf16 and fp32"
    if not 1 <= min(dims) <= max(dims) <= MAX_HEAD_DIM:
        return f"the Triton kernels take head dims from 1 to {MAX_HEAD_DIM}, not head dims {dims[0]} and {dims[1]}"
    if device.type == "cuda":
        return None
    if os.environ.get("TRITON_INTERPRET") != "1":
        return f"the Triton kernels do not run on {device.type}"
    return "Triton's interpreter computes bf16 incorrectly" if dtype == torch.bfloat16 else None


def _hopper_obstacle(device: torch.device, dtype: torch.dtype, dims: tuple[int, int], plain: bool) -> str | None:
    if device.type != "cuda":
        return f"the Hopper kernels do not run on {device.type}"
    if not plain:
        return "the Hopper kernels have no dropout and no block masks, and they require at least one key"
    # Importing the Hopper kernels may fail, because Gluon is experimental and changes between Triton releases.
    try:
        from ringattn.kernels.hopper.common import unsupported_reason
    except ImportError as error:
        return f"this release of Triton lacks functions of Gluon that the Hopper kernels need ({error})"
    return unsupported_reason(device, dtype, dims)


def _fp8_obstacle(device: torch.device, dtype: torch.dtype, dims: tuple[int, int], plain: bool) -> str | None:
    if obstacle := _hopper_obstacle(device, dtype, dims, plain):
        return obstacle
    if dims[0] != dims[1] or dims[0] not in fp8.HEAD_DIMS:
        supported = ", ".join(map(str, fp8.HEAD_DIMS))
        return f"it requires equal head dims of queries and values, one of {supported}, not head dims {dims[0]} and {dims[1]}"
    return None
