"""The entry points of the kernels check their arguments, choose a backend and call its kernel.

With precision="fp8", only a Hopper kernel on sm_90 reads FP8 inputs. All other backends convert the rounded inputs back to 16
or 32 bits and run their usual forward. No backward computes in FP8.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ringattn.kernels import blockwise, fp8, reference, validation
from ringattn.kernels.backends import TRITON_DTYPES, Choice, choose_backend, record
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.fp8 import QuantizedRows, QuantizedValues
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import Delta, Gradients

if TYPE_CHECKING:
    from ringattn.kernels.hopper.backward import NarrowBackward, WideBackward

Tensors = tuple[Tensor, ...]
_SPLIT_KV = Choice("triton", "split-KV kernel for few queries")
MIN_SPLIT_KEYS = 1024  # estimate: with fewer keys, a second launch costs more time than splitting saves


def _choose(q: Tensor, v: Tensor, backend: str, dropout: Dropout | None, blocks: BlockMask | None) -> Choice:
    plain = dropout is None and blocks is None and v.shape[1] > 0
    return choose_backend(q.device, q.dtype, backend, (q.shape[-1], v.shape[-1]), plain)


# Import a backend's kernels only at its first call, so that a rank on a CPU never loads Triton.


@cache
def _hopper():
    import ringattn.kernels.hopper.backward
    import ringattn.kernels.hopper.forward

    return ringattn.kernels.hopper


@cache
def _triton():
    import ringattn.kernels.triton.backward
    import ringattn.kernels.triton.decode
    import ringattn.kernels.triton.forward
    import ringattn.kernels.triton.merge
    import ringattn.kernels.triton.merge_states
    import ringattn.kernels.triton.quantize
    import ringattn.kernels.triton.sinks

    return ringattn.kernels.triton


@cache
def _kernel(backend: str, name: str) -> Callable[..., Tensors]:
    """Return a backend's function `name`, which is "forward" or "backward"."""
    match backend:
        case "hopper":
            module = getattr(_hopper(), name)
        case "triton":
            module = getattr(_triton(), name)
        case "blockwise":
            module = blockwise
        case _:
            module = reference
    return getattr(module, name)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Intervals,
    scale: float,
    state: Tensors | None = None,
    final: bool = False,
    backend: str = "auto",
    *,
    dropout: Dropout | None = None,
    blocks: BlockMask | None = None,
    precision: str = "ieee",
    shares_sms: bool = False,
) -> Tensors:
    """Compute `reference.forward` with the selected backend.

    Args:
        q, k, v, intervals, scale, state, final, dropout, blocks: as in `reference.forward`.
        backend: one of BACKENDS. For few queries, "auto" selects the split-KV kernel.
        precision: as in `reference.forward`, or "fp8" to round q, k and v to the FP8 format of `ringattn.kernels.fp8`. "fp8"
            allows neither dropout nor block masks.
        shares_sms: whether other kernels, such as NCCL's, run on the SMs at the same time. With `shares_sms`, each program of a
            Hopper kernel computes one work tile, and starts as soon as an SM is free. Other backends ignore this argument.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or the backend cannot run the call.
    """
    validation.check_inputs(q, k, v, intervals, dropout, blocks)
    if state is not None:
        validation.check_state(state, q, v)
    if precision == "fp8":
        validation.check_fp8(dropout is not None, blocks is not None)
        return _forward_rounded(q, k, v, intervals, scale, state, final, backend, shares_sms)
    choice = _choose(q, v, backend, dropout, blocks)
    chosen = choice.backend
    record(choice)
    if backend == "auto" and final and state is None and _splits_keys(q, k, v, chosen, dropout, blocks):
        record(_SPLIT_KV)
        out, lse = _triton().decode.decode(q, k, v, *intervals.bounds, scale, final=True, return_lse=True)
        return out, lse
    options: dict[str, Any] = {"dropout": dropout, "blocks": blocks, "precision": precision}
    if chosen == "hopper":
        options["shares_sms"] = shares_sms
    return _kernel(chosen, "forward")(q, k, v, intervals, scale, state, final, **options)


def _forward_rounded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Intervals,
    scale: float,
    state: Tensors | None,
    final: bool,
    backend: str,
    shares_sms: bool,
) -> Tensors:
    """The caller has checked the arguments."""
    choose_backend(q.device, q.dtype, backend, (q.shape[3], v.shape[3]), v.shape[1] > 0, "fp8")
    # The split-KV kernel for few queries reads 16-bit inputs.
    few_queries = backend == "auto" and final and state is None and _splits_keys(q, k, v, "triton", None, None)
    options = {"dtype": q.dtype, "reads_fp8": not few_queries, "shares_sms": shares_sms}
    return forward_fp8(*quantize(q, k, v), intervals, scale, state, final, backend, **options)


def quantize(q: Tensor, k: Tensor, v: Tensor) -> tuple[QuantizedRows, QuantizedRows, QuantizedValues]:
    """Round q (B, Nq, Hq, D), k (B, Nk, Hkv, D) and v (B, Nk, Hkv, Dv) to the format of `ringattn.kernels.fp8`."""
    is_supported = q.is_cuda and q.dtype in TRITON_DTYPES and q.shape[3] == v.shape[3] in fp8.HEAD_DIMS
    # On a ring, some ranks may hold no tokens.
    if is_supported and 0 not in (*q.shape, *k.shape):
        return _triton().quantize.quantize(q, k, v)
    return fp8.quantize(q, k, v)


def round_to_fp8(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    """Round q, k and v to FP8 as `forward` does, and return the rounded numbers in bf16, fp32 or fp64.

    The returned queries and keys are rotated. Apply `fp8.rotate_back` to their gradients.
    """
    dtype = _exact_dtype(q.dtype)
    return tuple(fp8.dequantize(x, dtype, y.shape[1]) for x, y in zip(quantize(q, k, v), (q, k, v), strict=True))


def _exact_dtype(dtype: torch.dtype) -> torch.dtype:
    # FP8 scales need more exponent bits than fp16 has. The rotation of fp16 queries may also produce numbers that are too large
    # for fp16.
    return torch.bfloat16 if dtype == torch.float16 else dtype


def backward_fp8(
    backward: Callable[..., Tensors],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    """Compute the gradients of a forward with precision="fp8", in the dtypes of q, k and v.

    With unrounded inputs, the recomputed scores s would not match lse, and exp(s - lse) could be far above 1.

    Args:
        backward: backward(q, k, v, out, lse, dout, dlse) -> (dq, dk, dv), which is called with the rounded inputs. If q is
            fp16, q, k, v, out and dout are converted to bf16.
    """
    dtype, exact = q.dtype, _exact_dtype(q.dtype)
    dq, dk, dv = backward(*round_to_fp8(q, k, v), out.to(exact), lse, dout.to(exact), dlse)
    return fp8.rotate_back(dq, dtype), fp8.rotate_back(dk, dtype), dv.to(dtype)


def forward_fp8(
    q: QuantizedRows,
    k: QuantizedRows,
    v: QuantizedValues,
    intervals: Intervals,
    scale: float,
    state: Tensors | None = None,
    final: bool = False,
    backend: str = "auto",
    *,
    dtype: torch.dtype,
    reads_fp8: bool = True,
    shares_sms: bool = False,
) -> Tensors:
    """Compute `forward` of FP8 queries, keys and values, in the format of `ringattn.kernels.fp8`.

    Args:
        q, k, v: the queries and keys must be rotated with the same matrix.
        intervals, scale, state, final, backend, shares_sms: as for `forward`, except that "hopper" requires the kernel that
            reads FP8 inputs.
        dtype: the dtype of `out`, and of the inputs before they were rounded.
        reads_fp8: whether to use the kernel that reads FP8 inputs if it is available, instead of converting the inputs to bf16,
            fp32 or fp64.

    Raises:
        ValueError: as for `forward`.
    """
    validation.check_quantized(q, k, v, intervals)
    num_keys, dims = k.data.shape[1], (q.data.shape[3], v.data.shape[3])
    choice = choose_backend(q.data.device, dtype, backend, dims, num_keys > 0, "fp8")
    if reads_fp8 and choice.reads_fp8:
        record(choice)
        kernel = _hopper().forward.forward_quantized
        return kernel(q, k, v, intervals, scale, state, final, dtype=dtype, shares_sms=shares_sms)
    a, b, c = (fp8.dequantize(x, _exact_dtype(dtype), num_keys) for x in (q, k, v))
    results = forward(a, b, c, intervals, scale, state, final, backend, shares_sms=shares_sms)
    if choice.backend != "hopper":
        record(choice)
    return (results[0].to(dtype), results[1]) if final else results


def _splits_keys(q: Tensor, k: Tensor, v: Tensor, chosen: str, dropout: Dropout | None, blocks: BlockMask | None) -> bool:
    if chosen not in ("hopper", "triton") or q.dtype == torch.float32 or dropout is not None or blocks is not None:
        return False
    # If all queries of a key head fit into one tile, the decoding kernel reads each key only once.
    rows = q.shape[1] * (q.shape[2] // k.shape[2])
    return k.shape[1] >= MIN_SPLIT_KEYS and rows <= (64 if max(q.shape[3], v.shape[3]) <= 128 else 32)


def prepare_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor,
    scale: float,
    final: bool = False,
    backend: str = "auto",
    sinks: Tensor | None = None,
    page_table: Tensor | None = None,
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Any]:
    """Prepare repeated calls of `reference.decode` with the same tensors k, v and page_table.

    The tensors `lo`, `hi`, `sinks` and `page_table`, and the last dimension of k and v, must be contiguous.

    On a GPU, split-KV decoding takes one or two launches, which can be captured in a CUDA graph. With fp64 inputs or head dims
    above 256, the call runs in PyTorch, and the host waits for the GPU. No Hopper kernel decodes, so the backend "hopper"
    selects the Triton kernel.

    Return a function of (q, lo, hi, sinks), which takes tensors of the shapes, dtypes and devices given here. The returned
    function does not check its arguments, which saves several microseconds per token.

    Raises:
        ValueError: the backend cannot run the call.
    """
    choice = _choose_decode(q, v, backend)
    if choice.backend == "triton":
        compute = _triton().decode.Decoder(q, k, v, lo, scale, final, sinks, page_table)
    else:
        forward = _kernel(choice.backend, "forward")

        def compute(q: Tensor, lo: Tensor, hi: Tensor, sinks: Tensor | None) -> Any:
            return reference.decode(q, k, v, lo, hi, scale, final, sinks, page_table, forward)

    def record_and_compute(q: Tensor, lo: Tensor, hi: Tensor, sinks: Tensor | None) -> Any:
        record(choice)
        return compute(q, lo, hi, sinks)

    return record_and_compute


def _choose_decode(q: Tensor, v: Tensor, backend: str) -> Choice:
    choice = choose_backend(q.device, q.dtype, "triton" if backend == "hopper" else backend, (q.shape[3], v.shape[3]))
    return _SPLIT_KV if choice.backend == "hopper" else choice


def row_delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Compute `reference.row_delta`."""
    # This choice ignores head dims, because the kernel for delta supports all of them.
    chosen = choose_backend(out.device, out.dtype, backend).backend
    kernel = _triton().backward.row_delta if chosen in ("hopper", "triton") else reference.row_delta
    return kernel(out, dout, dlse)


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
    """Compute `reference.backward` with the selected backend.

    For head dims up to 128, the Hopper kernels sum dq in no fixed order. The last bits of dq therefore vary. All other results
    are bitwise reproducible. Under `torch.use_deterministic_algorithms(True)`, the Hopper kernels sum dq in a fixed order,
    which is slower.

    Args:
        q to dv, grad_dtype: as in `reference.backward`. If `delta` is (out, dlse), the function computes delta from both
            tensors.
        backend, dropout, blocks, shares_sms: as for `forward`.
        precision: as for `forward`, except that "fp8" is treated like "ieee". After a forward with "fp8", use `backward_fp8`.

    Raises:
        ValueError: as for `forward`.
    """
    validation.check_inputs(q, k, v, intervals, dropout, blocks)
    validation.check_gradients(q, k, v, dout, lse, delta, (dq, dk, dv), grad_dtype)
    precision = "ieee" if precision == "fp8" else precision
    chosen = _choose(q, v, backend, dropout, blocks).backend
    options: dict[str, Any] = {"grad_dtype": grad_dtype, "dropout": dropout, "blocks": blocks, "precision": precision}
    # The Hopper kernels compute delta while they prepare the queries, which saves a launch.
    if chosen == "hopper":
        options["shares_sms"] = shares_sms
    elif isinstance(delta, tuple):
        delta = row_delta(delta[0], dout, delta[1], chosen)
    return _kernel(chosen, "backward")(q, k, v, dout, lse, delta, intervals, scale, dq, dk, dv, **options)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `reference.add_sinks`."""
    return _module_of_sinks(out).add_sinks(out, lse, sinks)


def add_sinks_backward(
    out: Tensor, lse: Tensor, sinks: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `reference.add_sinks_backward`."""
    return _module_of_sinks(out).add_sinks_backward(out, lse, sinks, dout, dlse)


def _module_of_sinks(out: Tensor) -> Any:
    return _triton().sinks if out.is_cuda and out.dtype in TRITON_DTYPES else reference


def sum_partials(base: Tensor, parts: Sequence[tuple[int, Tensor]], dtype: torch.dtype) -> Tensor:
    """Compute `reference.sum_partials`."""
    if base.is_cuda and base.dtype == torch.float32 and base.shape[0] == 1:
        return _triton().merge.sum_partials(base, parts, dtype)
    return reference.sum_partials(base, parts, dtype)


def merge_states(base: Tensors, parts: Sequence[tuple[int, Tensors]], dtype: torch.dtype | None = None) -> Tensors:
    """Compute `reference.merge_states`."""
    tensors = [*base, *(x for _, state in parts for x in state)]
    if base[2].is_cuda and base[2].dtype == torch.float32 and all(x.is_contiguous() for x in tensors):
        return _triton().merge_states.merge_states(base, parts, dtype)
    return reference.merge_states(base, parts, dtype)


def merge_packed(states: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Compute `reference.merge_packed`."""
    on_gpu = states.is_cuda and states.dtype == torch.float32
    return (_triton().merge_states if on_gpu else reference).merge_packed(states, shape, dtype)


def clear_without_keys(lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Replace the gradients `dout` and `dlse` of queries without keys by 0, because they may be NaN."""
    has_no_keys = lse == float("-inf")
    return dout.masked_fill(has_no_keys[..., None], 0.0), None if dlse is None else dlse.masked_fill(has_no_keys, 0.0)


class IncrementalBackward:
    """Compute the backward of one block of queries and several blocks of keys that a ring delivers one after another.

    dq is accumulated in the dtype of states and rounded only once.

    Args:
        v: the values of any block; only the head dim and whether the block is empty matter.
        q, dout, lse, delta, scale, backend, precision, shares_sms: as for `backward`, but with an lse over the keys of all
            blocks.
        plain: whether no block has dropout, as the Hopper kernels require.
    """

    def __init__(
        self,
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
    ) -> None:
        self._hopper: NarrowBackward | WideBackward | None = None
        self._dq: Tensor | None = None
        if plain and _choose(q, v, backend, None, None).backend == "hopper":
            self._hopper = _hopper().backward.incremental(q, dout, lse, delta, scale, shares_sms)
        elif isinstance(delta, tuple):
            delta = row_delta(delta[0], dout, delta[1], backend)
        self._queries, self._scale = (q, dout, lse, delta), scale
        self._options = {"backend": backend, "precision": precision}

    def add(
        self,
        k: Tensor,
        v: Tensor,
        intervals: Intervals,
        dk: Tensor | None = None,
        dv: Tensor | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add the contribution of one block of keys to dq. Return (dk, dv) of this block in the dtype of states."""
        q, dout, lse, delta = self._queries
        exact = reference.state_dtype(q.dtype)
        if self._hopper is not None:
            validation.check_inputs(q, k, v, intervals, dropout)
            validation.check_gradients(q, k, v, dout, lse, delta, (None, dk, dv), exact)
            return self._hopper.add(k, v, intervals, dk, dv, dropout)
        self._dq, dk, dv = backward(
            q, k, v, dout, lse, delta, intervals, self._scale, self._dq, dk, dv,
            grad_dtype=exact, dropout=dropout, **self._options,
        )  # fmt: skip
        return dk, dv

    def finish(self) -> Tensor:
        """Return dq (B, Nq, Hq, D) in q's dtype, summed over all blocks that have been added."""
        if self._hopper is not None:
            return self._hopper.finish()
        q = self._queries[0]
        return torch.zeros_like(q) if self._dq is None else self._dq.to(q.dtype)
