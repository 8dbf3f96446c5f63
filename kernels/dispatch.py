"""One function a direction: picks the kernel by device, dtype and shape, and can say why."""

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ringattn.kernels import reference
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.caching import remembered
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import Delta, Gradients, State
from ringattn.kernels.validation import MAX_HEAD_DIM

BACKENDS = ("auto", "hopper", "triton", "tiled", "reference")
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Choice:
    """A kernel family and the reason it was picked."""

    backend: str  # hopper | triton | tiled | reference
    why: str


@remembered(maxsize=256)
def choose_backend(
    device: torch.device,
    dtype: torch.dtype,
    backend: str = "auto",
    dims: tuple[int, int] = (128, 128),
    plain: bool = True,
) -> Choice:
    """The kernel family for tensors of `dtype` on `device`; a `backend` other than "auto" is honoured or refused.

    Args:
        dims: head dims (D, Dv).
        plain: whether there are keys, and neither dropout nor a block mask.

    Raises:
        ValueError: an unknown backend, or one that cannot run this.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown kernel backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    if backend == "triton" and dtype not in TRITON_DTYPES:
        raise ValueError(f"the Triton kernels have no {dtype}: use fp16, bf16 or fp32, or backend='tiled'")
    no_triton = None if 1 <= min(dims) <= max(dims) <= MAX_HEAD_DIM else f"head dims {dims[0]} and {dims[1]}"
    if backend == "triton" and no_triton:
        raise ValueError(f"the Triton kernels take head dims from 1 to {MAX_HEAD_DIM}, not {no_triton}: use backend='tiled'")
    if backend == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"the Triton kernels do not run on {device.type}: use backend='tiled', or 'auto'")
    if backend == "hopper":
        reason = _no_hopper(device, dtype, dims, plain)
        if reason is not None:
            raise ValueError(f"the Hopper kernels cannot run: {reason}; use the portable ones, backend='triton'")
    if backend != "auto":
        return Choice(backend, "asked for")
    if device.type != "cuda":
        return Choice("tiled", f"no GPU kernel runs on {device.type}")
    if dtype not in TRITON_DTYPES:
        return Choice("tiled", f"{dtype} has no Triton kernel")
    if no_triton:
        return Choice("tiled", f"no Triton kernel has {no_triton}")
    reason = _no_hopper(device, dtype, dims, plain)
    return Choice("hopper", "fastest on sm_90") if reason is None else Choice("triton", f"no Hopper kernel: {reason}")


def _no_hopper(device: torch.device, dtype: torch.dtype, dims: tuple[int, int], plain: bool) -> str | None:
    """Why the Hopper kernels cannot run; None if they can."""
    if device.type != "cuda":
        return f"they do not run on {device.type}"
    if not plain:
        return "they have no dropout and no block masks, and want at least one key"
    try:
        hopper = importlib.import_module("ringattn.kernels.hopper.common")
    except ImportError as error:
        return f"this triton has no Gluon that it knows ({error})"
    return hopper.refusal(device, dtype, dims)


def _choose(q: Tensor, v: Tensor, backend: str, dropout: Dropout | None, blocks: BlockMask | None) -> str:
    plain = dropout is None and blocks is None and v.shape[1] > 0
    return choose_backend(q.device, q.dtype, backend, (q.shape[-1], v.shape[-1]), plain).backend


def _choose_backward(q: Tensor, v: Tensor, backend: str, dropout: Dropout | None, blocks: BlockMask | None) -> str:
    chosen = _choose(q, v, backend, dropout, blocks)
    if chosen == "hopper" and torch.are_deterministic_algorithms_enabled():
        if backend == "hopper":
            raise ValueError("the Hopper backward sums dq in no fixed order: deterministic algorithms need backend='triton'")
        return "triton"
    return chosen


_MODULES = {
    "reference": dict.fromkeys(("forward", "backward"), "ringattn.kernels.reference"),
    "tiled": dict.fromkeys(("forward", "backward"), "ringattn.kernels.blockwise"),
    "hopper": {"forward": "ringattn.kernels.hopper.forward", "backward": "ringattn.kernels.hopper.backward"},
    "triton": {
        "forward": "ringattn.kernels.triton.forward",
        "backward": "ringattn.kernels.triton.backward",
        "total": "ringattn.kernels.triton.merge",
    },
}


@cache
def _module(backend: str, direction: str):
    # imported on first use: a CPU rank never loads Triton
    return importlib.import_module(_MODULES[backend][direction])


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Intervals,
    scale: float,
    state: State | None = None,
    final: bool = False,
    backend: str = "auto",
    *,
    dropout: Dropout | None = None,
    blocks: BlockMask | None = None,
    precision: str = "ieee",
    shares_sms: bool = False,
) -> State | tuple[Tensor, Tensor]:
    """`ringattn.kernels.reference.forward` by the chosen kernel.

    `shares_sms` says that other kernels, such as NCCL's, may hold processors meanwhile. Programs of the Hopper kernels, which
    otherwise get shares of the work before they start, then each do one item as they find room.
    """
    chosen = _choose(q, v, backend, dropout, blocks)
    options = {"dropout": dropout, "blocks": blocks, "precision": precision}
    if chosen == "hopper":
        options["shares_sms"] = shares_sms
    return _module(chosen, "forward").forward(q, k, v, intervals, scale, state, final, **options)


def row_delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None, backend: str = "auto") -> Tensor:
    """`ringattn.kernels.reference.row_delta`, fused where the Triton kernels run."""
    chosen = choose_backend(out.device, out.dtype, backend).backend
    return (_module("triton", "backward") if chosen in ("hopper", "triton") else reference).row_delta(out, dout, dlse)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Delta,
    intervals: Intervals,
    scale: float,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    backend: str = "auto",
    *,
    grad_dtype: torch.dtype | None = None,
    dropout: Dropout | None = None,
    blocks: BlockMask | None = None,
    precision: str = "ieee",
    shares_sms: bool = False,
) -> Gradients:
    """`ringattn.kernels.reference.backward` by the chosen kernel. `delta` may also be (out, dlse), of which `row_delta` would make it.

    The Hopper kernels sum dq in no fixed order: its last bits may differ from run to run. All others give the same bits
    always, and are used under `torch.use_deterministic_algorithms(True)`. `shares_sms` as in `forward`.

    Raises:
        ValueError: what `choose_backend` refuses; backend "hopper" under deterministic algorithms.
    """
    chosen = _choose_backward(q, v, backend, dropout, blocks)
    if chosen != "hopper" and isinstance(delta, tuple):
        out, dlse = delta
        delta = row_delta(out, dout, dlse, chosen)
    options = {"grad_dtype": grad_dtype, "dropout": dropout, "blocks": blocks, "precision": precision}
    if chosen == "hopper":
        options["shares_sms"] = shares_sms
    return _module(chosen, "backward").backward(q, k, v, dout, lse, delta, intervals, scale, dq, dk, dv, **options)


def total(base: Tensor, parts: Sequence[tuple[int, Tensor]], dtype: torch.dtype) -> Tensor:
    """`ringattn.kernels.reference.total`, on GPUs fused for fp32 sums of one batch row."""
    if base.is_cuda and base.dtype == torch.float32 and base.shape[0] == 1:
        return _module("triton", "total").total(base, parts, dtype)
    return reference.total(base, parts, dtype)


class BlockwiseBackward:
    """The backward of the same queries over one block of keys after the other, as a ring brings them.

    dq is gathered in the state dtype and rounded once. The Hopper kernels have their own, see `blockwise_backward`.

    Args:
        q, dout, lse, delta, scale, backend, precision: as for `backward`; lse is that over all blocks.
    """

    def __init__(
        self, q: Tensor, dout: Tensor, lse: Tensor, delta: Delta, scale: float, backend: str = "auto", precision: str = "ieee"
    ) -> None:
        self.rows, self.scale, self.backend, self.precision = (q, dout, lse, delta), scale, backend, precision
        self._dq: Tensor | None = None

    def add(
        self,
        k: Tensor,
        v: Tensor,
        intervals: Intervals,
        dk: Tensor | None = None,
        dv: Tensor | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(dk, dv) of one block in the state dtype, added into those that are given."""
        q, dout, lse, delta = self.rows
        self._dq, dk, dv = backward(
            q, k, v, dout, lse, delta, intervals, self.scale, self._dq, dk, dv, self.backend,
            grad_dtype=reference.state_dtype(q.dtype), dropout=dropout, precision=self.precision,
        )  # fmt: skip
        return dk, dv

    def finish(self) -> Tensor:
        """dq over all blocks so far, in q's dtype."""
        q = self.rows[0]
        return torch.zeros_like(q) if self._dq is None else self._dq.to(q.dtype)


def blockwise_backward(
    q: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Delta,
    scale: float,
    backend: str = "auto",
    *,
    plain: bool = True,
    precision: str = "ieee",
    shares_sms: bool = False,
) -> BlockwiseBackward:
    """The `BlockwiseBackward` of the chosen kernels, for values like `v`. `delta` may be (out, dlse); `plain`: no dropout."""
    if plain and _choose_backward(q, v, backend, None, None) == "hopper":
        return _module("hopper", "backward").BlockwiseBackward(q, dout, lse, delta, scale, precision, shares_sms)
    if isinstance(delta, tuple):
        delta = row_delta(delta[0], dout, delta[1], backend)
    return BlockwiseBackward(q, dout, lse, delta, scale, backend, precision)
