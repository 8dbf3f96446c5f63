"""One function a direction: picks the kernel by device, dtype and shape, and can say why."""

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import reference
from kernels.blocks import BlockMask
from kernels.dropout import Dropout
from kernels.reference import State

BACKENDS = ("auto", "triton", "tiled", "reference")
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Choice:
    """A kernel family and the reason it was picked."""

    backend: str  # triton | tiled | reference
    why: str


def choose(device: torch.device, dtype: torch.dtype, backend: str = "auto") -> Choice:
    """The kernel family for tensors of `dtype` on `device`; a `backend` other than "auto" is honoured or refused.

    Raises:
        ValueError: an unknown backend, or one that cannot run this dtype.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown kernel backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    if backend == "triton" and dtype not in TRITON_DTYPES:
        raise ValueError(f"the Triton kernels have no {dtype}: use fp16, bf16 or fp32, or backend='tiled'")
    if backend != "auto":
        return Choice(backend, "asked for")
    if device.type == "cuda" and dtype in TRITON_DTYPES:
        return Choice("triton", f"{dtype} on a GPU")
    if device.type == "cuda":
        return Choice("tiled", f"{dtype} has no Triton kernel")
    return Choice("tiled", f"no GPU kernel runs on {device.type}")


def _module(backend: str, direction: str):
    # imported on first use: a CPU rank never loads Triton
    name = f"kernels.{direction}" if backend == "triton" else f"kernels.{backend}"
    return importlib.import_module(name)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor,
    hi: Tensor,
    scale: float,
    state: State | None = None,
    final: bool = False,
    backend: str = "auto",
    *,
    dropout: Dropout | None = None,
    blocks: BlockMask | None = None,
    precision: str = "ieee",
) -> State | tuple[Tensor, Tensor]:
    """`kernels.reference.forward` by the chosen kernel."""
    chosen = choose(q.device, q.dtype, backend).backend
    options = dict(dropout=dropout, blocks=blocks, precision=precision)
    return _module(chosen, "forward").forward(q, k, v, lo, hi, scale, state, final, **options)


def row_delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None, backend: str = "auto") -> Tensor:
    """`kernels.reference.row_delta`, fused where the Triton kernels run."""
    chosen = choose(out.device, out.dtype, backend).backend
    return (_module("triton", "backward") if chosen == "triton" else reference).row_delta(out, dout, dlse)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    lo: Tensor,
    hi: Tensor,
    scale: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    backend: str = "auto",
    *,
    dropout: Dropout | None = None,
    blocks: BlockMask | None = None,
    precision: str = "ieee",
) -> None:
    """`kernels.reference.backward` by the chosen kernel."""
    chosen = choose(q.device, q.dtype, backend).backend
    options = dict(dropout=dropout, blocks=blocks, precision=precision)
    _module(chosen, "backward").backward(q, k, v, dout, lse, delta, lo, hi, scale, dq, dk, dv, **options)
