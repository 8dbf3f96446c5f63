"""Implementations of attention behind one interface: `prepare(case, device)` returns attend(q, k, v) -> out.

Tensors are (1, N, H, D), differentiable; `prepare` raises `Unsupported` where a mask cannot be expressed.
"""

import importlib
import importlib.metadata
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringattn import flash_attention
from scripts.bench.cases import BLOCK, Case

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Prepare = Callable[[Case, torch.device], Attend]
OURS = "ringattn"
PORTABLE = "portable"


class Unsupported(Exception):
    """The implementation has no way to express the mask of a case."""


def ringattn(backend: str) -> Prepare:
    """This project's kernels: those it picks by itself, or the portable ones ("triton")."""

    def prepare(case: Case, device: torch.device) -> Attend:
        blocks = case.blocks(device)
        return lambda q, k, v: flash_attention(q, k, v, mask=case.mask, blocks=blocks, backend=backend)

    return prepare


def stock_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """PyTorch's attention on tensors of (B, N, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    # by its module: context_parallel replaces this attribute
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped).transpose(1, 2)


def sdpa(backend: SDPBackend) -> Prepare:
    """`scaled_dot_product_attention` by one of its backends."""

    def prepare(case: Case, device: torch.device) -> Attend:
        if case.kind not in ("full", "causal"):
            raise Unsupported(case.kind)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return stock_attention(q, k, v, case.kind == "causal")

        return attend

    return prepare


def _flex_mask(case: Case, device: torch.device) -> Callable:
    """The mask of a case as FlexAttention's function of (batch, head, query, key)."""
    if case.kind == "blocks":
        keep = case.keep.to(device)
        return lambda b, h, i, j: keep[i // BLOCK, j // BLOCK]
    if case.kind == "window":
        window = case.window
        return lambda b, h, i, j: (i >= j) & (i - j < window)
    if case.documents:
        lengths = torch.tensor(case.documents)
        document = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)
        return lambda b, h, i, j: (i >= j) & (document[i] == document[j])
    return lambda b, h, i, j: i >= j


def flex(case: Case, device: torch.device) -> Attend:
    """FlexAttention, compiled for this one case."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # else the cases reach the limit of recompilations and run uncompiled
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = None
    if case.kind != "full":
        length = case.length
        block_mask = create_block_mask(_flex_mask(case, device), None, None, length, length, device=device, _compile=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return attend


def flash_attn_4(case: Case, device: torch.device) -> Attend:
    """flash-attn-4 (CuTe); packed documents through its call for sequences of various lengths."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if case.kind == "blocks":
        raise Unsupported(case.kind)
    options = {"causal": case.kind != "full"}
    if case.kind == "window":
        options["window_size"] = (case.window - 1, 0)
    if case.documents:
        ends = torch.tensor([0, *case.documents]).cumsum(0).to(device, torch.int32)
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        options |= {"max_seqlen_q": max(case.documents), "max_seqlen_k": max(case.documents)}
        return lambda q, k, v: _first(flash_attn_varlen_func(q[0], k[0], v[0], **options))[None]
    return lambda q, k, v: _first(flash_attn_func(q, k, v, **options))


def _first(result: Tensor | tuple) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


IMPLEMENTATIONS: dict[str, Prepare] = {
    OURS: ringattn("auto"),
    PORTABLE: ringattn("triton"),
    "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": sdpa(SDPBackend.FLASH_ATTENTION),
    "flex": flex,
    "fa4": flash_attn_4,
}
NEED_CUDA = {PORTABLE, "cudnn", "fa2", "flex", "fa4"}


def available(device: torch.device) -> dict[str, Prepare]:
    """The implementations that can run on `device`; says why flash-attn-4 is left out where it is."""
    chosen = {name: prepare for name, prepare in IMPLEMENTATIONS.items() if device.type == "cuda" or name not in NEED_CUDA}
    if "fa4" in chosen:
        try:
            importlib.import_module("flash_attn.cute")
        except Exception as error:  # not only ImportError: its own dependencies may fail in any way
            print(f"fa4 is left out: {type(error).__name__}: {str(error)[:200]}", flush=True)
            del chosen["fa4"]
    return chosen


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"
