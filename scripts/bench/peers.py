"""Several implementations of attention with a common interface, so that a benchmark can compare them.

Each implementation is a function `prepare(case, device)`. This function returns attend(q, k, v) -> out for tensors of (1, N, H,
D). The function `attend` supports autograd. If the implementation cannot express the mask of the case, `prepare` raises
`Unsupported`.
"""

import importlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringattn import flash_attention
from ringattn.kernels import dispatch
from ringattn.kernels.interval_mask import Intervals
from scripts.accuracy import output_of
from scripts.bench.cases import BLOCK, Case

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Prepare = Callable[[Case, torch.device], Attend]
OURS = "ringattn"
PORTABLE = "portable"
DETERMINISTIC = "deterministic"
FP8, FP8_ROUNDED, SINKS = "fp8", "fp8-rounded", "sinks"
ON_REQUEST = (DETERMINISTIC, FP8, FP8_ROUNDED, SINKS)  # implementations that are measured only if the command line names them


class Unsupported(Exception):
    """An implementation does not support the mask of a case."""


def ringattn(backend: str) -> Prepare:

    def prepare(case: Case, device: torch.device) -> Attend:
        blocks = case.blocks(device)
        return lambda q, k, v: output_of(flash_attention(q, k, v, mask=case.mask, blocks=blocks, backend=backend))

    return prepare


def sinks(case: Case, device: torch.device) -> Attend:
    if case.kind == "blocks":
        raise Unsupported(case.kind)
    logits = torch.full((case.heads,), -1e4, device=device, requires_grad=True)
    return lambda q, k, v: output_of(flash_attention(q, k, v, mask=case.mask, sink_logits=logits))


def fp8(case: Case, _device: torch.device) -> Attend:
    """Return ringattn with precision="fp8", which first rounds the inputs."""
    if case.kind == "blocks":
        raise Unsupported(case.kind)
    return lambda q, k, v: output_of(flash_attention(q, k, v, mask=case.mask, precision="fp8"))


def fp8_rounded(case: Case, device: torch.device) -> Attend:
    """There is no backward. The first call rounds its inputs, and later calls must have the same inputs."""
    if case.kind == "blocks":
        raise Unsupported(case.kind)
    intervals = Intervals.of(*case.mask.intervals(case.length), case.length, device)
    rounded: list[Any] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rounded.extend([] if rounded else [dispatch.quantize(q.detach(), k.detach(), v.detach())])
        query, key, value = rounded[0]
        out = dispatch.forward_fp8(query, key, value, intervals, case.head_dim**-0.5, final=True, dtype=q.dtype)[0]
        return _WithoutBackward.apply(q, out)

    return attend


class _WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any, **_: Any) -> Tensor:
        _, _, out = arguments  # the context, q and the output
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> None:
        raise Unsupported("the backward")


@contextmanager
def deterministic() -> Generator[None]:
    """Return a context manager that enables deterministic algorithms. New tensors are not filled with NaN, because filling
    takes time.
    """
    settings: Any = torch.utils.deterministic
    fill, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = fill


def context(name: str) -> AbstractContextManager[None]:
    return deterministic() if name == DETERMINISTIC else nullcontext()


def stock_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    # context_parallel replaces the function in the module, so the function must be looked up at every call.
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped).transpose(1, 2)


def sdpa(backend: SDPBackend) -> Prepare:
    def prepare(case: Case, _device: torch.device) -> Attend:
        if case.kind not in ("full", "causal"):
            raise Unsupported(case.kind)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return stock_attention(q, k, v, case.kind == "causal")

        return attend

    return prepare


def _flex_mask(case: Case, device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    if case.keep is not None:
        keep = case.keep.to(device)
        return lambda _b, _h, i, j: keep[i // BLOCK, j // BLOCK]
    if (window := case.window) is not None:
        return lambda _b, _h, i, j: (i >= j) & (i - j < window)
    if case.documents:
        lengths = torch.tensor(case.documents)
        document = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)
        return lambda _b, _h, i, j: (i >= j) & (document[i] == document[j])
    return lambda _b, _h, i, j: i >= j


def flex(case: Case, device: torch.device) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # The caches are reset, because many cases would otherwise reach PyTorch's limit of recompilations.
    torch._dynamo.reset()
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
    """Prepare flash-attn-4 (CuTe). For packed documents, use the variable-length function of flash-attn-4."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if case.kind == "blocks":
        raise Unsupported(case.kind)
    options: dict[str, Any] = {"causal": case.kind != "full"}
    if case.window is not None:
        options["window_size"] = (case.window - 1, 0)
    if case.documents:
        ends = torch.tensor([0, *case.documents]).cumsum(0).to(device, torch.int32)
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        options |= {"max_seqlen_q": max(case.documents), "max_seqlen_k": max(case.documents)}
        return lambda q, k, v: output_of(flash_attn_varlen_func(q[0], k[0], v[0], **options))[None]
    return lambda q, k, v: output_of(flash_attn_func(q, k, v, **options))


IMPLEMENTATIONS: dict[str, Prepare] = {
    OURS: ringattn("auto"),
    DETERMINISTIC: ringattn("auto"),
    PORTABLE: ringattn("triton"),
    FP8: fp8,
    FP8_ROUNDED: fp8_rounded,
    SINKS: sinks,
    "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": sdpa(SDPBackend.FLASH_ATTENTION),
    "flex": flex,
    "fa4": flash_attn_4,
}


def available() -> dict[str, Prepare]:
    found = dict(IMPLEMENTATIONS)
    if "fa4" in found:
        try:
            importlib.import_module("flash_attn.cute")
        except Exception as error:  # the dependencies of flash-attn-4 may raise exceptions of any type
            print(f"fa4 is left out: {type(error).__name__}: {str(error)[:200]}", flush=True)
            del found["fa4"]
    return found
