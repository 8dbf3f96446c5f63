"""Attention in plain PyTorch, which stores all scores in memory. This module is the specification of every kernel.

B is the batch size. Nq, Nk, Hq and Hkv are the numbers of queries, keys, query heads and key heads. Query head h uses key head
h // (Hq / Hkv). D is the head dim of q and k, and Dv is the head dim of v:

    q (B, Nq, Hq, D)   k (B, Nk, Hkv, D)   v (B, Nk, Hkv, Dv)       fp16, bf16 or fp32; in this module also fp64
    intervals                                                      the mask, see `ringattn.kernels.interval_mask`
    state = (m, l, o): m, l (B, Nq, Hq), o (B, Nq, Hq, Dv)          fp32 (fp64 for fp64 inputs), contiguous
    lse, delta (B, Nq, Hq)                                         in the same dtype as the state

The scores of a query are s = scale * q k^T. In a query's state (m, l, o), m = max s, l = sum exp(s - m) and
o = sum exp(s - m) v. A query without keys has the empty state (-inf, 0, 0), the output 0 and lse = -inf. In the Hopper kernels,
m may differ from the maximum, but l and o always match m.

With `dropout`, o is the sum over the kept probabilities, multiplied by the dropout factor. Dropout does not change m, l and
lse. The argument `blocks` masks pairs of a query block and a key block. With precision="tf32" instead of "ieee", the Triton
kernels may round the operands of fp32 products to 11 mantissa bits.

Call these functions through `ringattn.kernels.dispatch`, which checks all arguments.
"""

from collections.abc import Callable, Sequence
from functools import reduce, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout, keep_mask
from ringattn.kernels.exact_products import exact_products
from ringattn.kernels.interval_mask import Intervals, dense

P = ParamSpec("P")
T = TypeVar("T")
State = tuple[Tensor, ...]  # m, l, o
Gradients = tuple[Tensor, ...]  # dq, dk, dv
Accumulators = tuple[Tensor | None, Tensor | None, Tensor | None]  # dq, dk, dv to add to; None requests a new gradient
# A `Delta` is delta itself, or (out, dlse) for kernels that compute delta.
Delta = Tensor | tuple[Tensor, Tensor | None]


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states, lse and gradient accumulators."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _with_exact_products(function: Callable[P, T]) -> Callable[P, T]:
    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        q: Any = arguments[0]
        with exact_products(q.device):
            return function(*arguments, **options)

    return call


def empty_state(q: Tensor, value_dim: int) -> State:
    dtype = state_dtype(q.dtype)
    m = torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)
    return m, torch.zeros_like(m), torch.zeros(*q.shape[:3], value_dim, dtype=dtype, device=q.device)


def merge(a: State, b: State) -> State:
    """Merge the states of the same queries over two disjoint sets of keys (Milakov and Gimelshein 2018, section 3.1).

    Merging is associative and commutative, and its identity is the empty state.
    """
    m = torch.maximum(a[0], b[0])
    # For two empty states, subtract 0, because exp(-inf + inf) is NaN.
    reference_max = m.masked_fill(m == float("-inf"), 0.0)
    alpha_a, alpha_b = torch.exp(a[0] - reference_max), torch.exp(b[0] - reference_max)
    return m, alpha_a * a[1] + alpha_b * b[1], alpha_a[..., None] * a[2] + alpha_b[..., None] * b[2]


def merge_states(
    base: State, parts: Sequence[tuple[int, State]], dtype: torch.dtype | None = None
) -> State | tuple[Tensor, Tensor]:
    """Merge partial states into `base` (m, l, o), in place. Return `base` if `dtype` is None, or (out, lse) from `finalize`,
    with `out` in `dtype`.

    A pair (first, state) in `parts` contains the state of the tokens [first, first + n) of `base`.
    """
    for first, part in parts:
        rows = tuple(x[:, first : first + part[0].shape[1]] for x in base)
        for x, merged in zip(rows, merge(rows, part), strict=True):
            x.copy_(merged)
    return base if dtype is None else finalize(base, dtype)


def merge_packed(states: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Merge the states of all ranks in a fixed order. Return the output, with this `shape` (B, N, H, D). Row r of `states`
    contains o, m and l of rank r.
    """
    rows = shape[:3].numel()
    o, m, l = states.split([rows * shape[3], rows, rows], 1)
    parts = [tuple(x[rank].view(size) for x, size in ((m, shape[:3]), (l, shape[:3]), (o, shape))) for rank in range(len(m))]
    return finalize(reduce(merge, parts), dtype)[0]


def finalize(state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    m, l, o = state
    out = o / l.masked_fill(l == 0, 1.0)[..., None]
    return out.to(dtype), m + torch.log(l)


def _scores(q: Tensor, k: Tensor, intervals: Intervals, scale: float, blocks: BlockMask | None) -> Tensor:
    """Return the scores (B, Hkv, Hq / Hkv, Nq, Nk), and -inf for masked pairs."""
    q, k = _to_head_groups(q, k.shape[2]), k.to(state_dtype(k.dtype)).permute(0, 2, 3, 1)[:, :, None]
    mask = dense(*intervals.bounds, intervals.num_keys)[:, None, None]
    if blocks is not None:
        kept = blocks.dense(q.shape[3], k.shape[-1])
        mask = mask & (kept.unflatten(1, q.shape[1:3]) if kept.shape[1] > 1 else kept[:, :, None])
    return (scale * (q @ k)).masked_fill(~mask, float("-inf"))


def _drop(x: Tensor, dropout: Dropout | None) -> Tensor:
    if dropout is None:
        return x
    keep = keep_mask(dropout, x.shape[0], x.shape[1] * x.shape[2]).unflatten(1, x.shape[1:3])
    return (x * dropout.factor).masked_fill(~keep, 0.0)


def _to_head_groups(x: Tensor, num_key_heads: int) -> Tensor:
    return x.to(state_dtype(x.dtype)).unflatten(2, (num_key_heads, -1)).permute(0, 2, 3, 1, 4)


def _from_head_groups(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


@_with_exact_products
def forward(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float, state: State | None = None, final: bool = False,
    *, dropout: Dropout | None = None, blocks: BlockMask | None = None, precision: str = "ieee",
) -> State:  # fmt: skip
    """Compute attention of one block of queries to one block of keys, starting from `state`.

    Args:
        q: (B, Nq, Hq, D), with any strides.
        k, v: (B, Nk, Hkv, D) and (B, Nk, Hkv, Dv) in q's dtype.
        intervals: for every query, the range [lo, hi) of keys that it may attend to.
        scale: a positive factor by which the scores are multiplied before the softmax, usually D ** -0.5.
        state: (m, l, o) of the queries over earlier keys, or None for the empty state; a kernel may overwrite these tensors.
        final: whether these are the last keys, so that (out, lse) is returned instead of the state.
        dropout, blocks, precision: see the docstring of this module.

    Returns:
        The new state (m, l, o). With `final`, (out, lse) instead: out (B, Nq, Hq, Dv) in q's dtype and lse (B, Nq, Hq). All
            tensors are contiguous.
    """
    scores = _scores(q, k, intervals, scale, blocks)
    if k.shape[1] == 0:
        new = empty_state(q, v.shape[-1])
    else:
        m = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - m.masked_fill(m == float("-inf"), 0.0))
        o = _drop(p, dropout) @ v.to(p.dtype).permute(0, 2, 1, 3)[:, :, None]
        new = (_from_head_groups(m)[..., 0], _from_head_groups(p.sum(-1, keepdim=True))[..., 0], _from_head_groups(o))
    if state is not None:
        new = merge(state, new)
    new = tuple(x.contiguous() for x in new)
    return finalize(new, q.dtype) if final else new


def decode(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, scale: float, final: bool = False,
    sinks: Tensor | None = None, page_table: Tensor | None = None, forward: Callable[..., State] = forward,
) -> State | Tensor:  # fmt: skip
    """Compute attention of a few new queries to a cache of keys and values.

    Cached values must be finite, even in rows to which no query attends.

    Args:
        q, scale: as for `forward`.
        k, v: (B, Nk, Hkv, D) and (B, Nk, Hkv, Dv) in q's dtype, the cache.
        lo, hi: int32 (1 or B, Nq), on q's device. Query i of a batch entry attends to the keys [lo[i], hi[i]), limited to [0,
            Nk). Neither bound may decrease from one query to the next.
        final: whether to return the output instead of the state.
        sinks: int32 (1 or B,) or None, the number of first keys that are attention sinks (Xiao et al. 2023). Query i also
            attends to the sinks before hi[i].
        page_table: int32 (B, pages) or None. With a page table, k and v are (pages, page size, Hkv, D) and (pages, page size,
            Hkv, Dv). Row i of entry b is row i % page_size of page page_table[b, i // page_size].
        forward: the function that computes attention under intervals.

    Returns:
        The state (m, l, o), contiguous, or out (B, Nq, Hq, Dv) in q's dtype.
    """
    if page_table is not None:
        k, v = (_gather_pages(x, page_table, hi) for x in (k, v))
    num_keys = k.shape[1]
    lo, hi = (x.cpu().clamp(0, num_keys) for x in (lo, hi))
    state = forward(q, k, v, Intervals.of(lo, hi, num_keys, q.device), scale)
    if sinks is not None:
        end = torch.minimum(torch.minimum(lo, hi), sinks.cpu().clamp(min=0)[:, None])
        state = merge(state, forward(q, k, v, Intervals.of(torch.zeros_like(end), end, num_keys, q.device), scale))
    return finalize(state, q.dtype)[0] if final else state


def _gather_pages(x: Tensor, page_table: Tensor, hi: Tensor) -> Tensor:
    rows = x[page_table.long()].flatten(1, 2)
    # Pages may contain uninitialised rows.
    unused = torch.arange(rows.shape[1], device=x.device) >= hi[:, -1:]
    return rows.masked_fill(unused[..., None, None], 0.0)


def row_delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """Return delta = rowsum(dout * out) - dlse, (B, Nq, Hq) in the dtype of states."""
    dtype = state_dtype(out.dtype)
    delta = (out.to(dtype) * dout.to(dtype)).sum(-1)
    return delta if dlse is None else delta - dlse


@_with_exact_products
def backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, intervals: Intervals, scale: float,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    *, grad_dtype: torch.dtype | None = None, dropout: Dropout | None = None, blocks: BlockMask | None = None,
    precision: str = "ieee",
) -> Gradients:  # fmt: skip
    """Compute the gradients for one block of queries and one block of keys. The probabilities are recomputed as p = exp(s -
    lse).

    dv += p^T dout;  ds = p * (dout v^T - delta);  dq += scale * ds k;  dk += scale * ds^T q  (Dao et al. 2022, appendix B.2).
    With dropout, p (in dv) and dout v^T are masked and scaled.

    Args:
        q, k, v, intervals, scale, dropout, blocks, precision: as for `forward`.
        dout: gradient of the output, (B, Nq, Hq, Dv) in q's dtype.
        lse: (B, Nq, Hq), over all keys of every query, including the keys of other blocks.
        delta: (B, Nq, Hq), computed by `row_delta`.
        dq, dk, dv: contiguous accumulators in the dtype of states, to which the gradients are added, or None for new contiguous
            tensors.
        grad_dtype: the dtype of new gradients: q's dtype (also for None) or the dtype of states.
    """
    num_key_heads, dtype = k.shape[2], q.dtype
    lse, delta = (_to_head_groups(x[..., None], num_key_heads) for x in (lse, delta))
    scores = _scores(q, k, intervals, scale, blocks)
    # A query without keys has lse = -inf, and exp(-inf + inf) would be NaN.
    p = torch.exp(scores - lse).masked_fill(scores == float("-inf"), 0.0)
    q, dout = _to_head_groups(q, num_key_heads), _to_head_groups(dout, num_key_heads)
    k, v = (x.to(p.dtype).permute(0, 2, 1, 3)[:, :, None] for x in (k, v))
    ds = p * (_drop(dout @ v.mT, dropout) - delta)
    new_dq = scale * _from_head_groups(ds @ k)
    # Dimension 2 contains the query heads that share a key head.
    new_dk = scale * (ds.mT @ q).sum(2).permute(0, 2, 1, 3)
    new_dv = (_drop(p, dropout).mT @ dout).sum(2).permute(0, 2, 1, 3)
    return tuple(
        new.to(grad_dtype or dtype).contiguous() if accumulator is None else accumulator.add_(new)
        for accumulator, new in zip((dq, dk, dv), (new_dq, new_dk, new_dv), strict=True)
    )


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add a sink per head (Hq,) to the softmax of attention. Return the new `out` (B, N, Hq, Dv) and `lse` (B, N, Hq).

    A sink adds exp(sink) to the denominator of the softmax, and has no value vector. The tensors `lse` and `sinks` are fp32, or
    fp64 for fp64 inputs. All operations are differentiable.
    """
    return (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype), torch.logaddexp(lse, sinks)


def add_sinks_backward(
    out: Tensor, lse: Tensor, sinks: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the arguments of `add_sinks`."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (out, lse, sinks)]
        new_out, new_lse = add_sinks(*inputs)
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    dout, dlse, dsinks = torch.autograd.grad((new_out, new_lse), inputs, (dout, dlse))
    return dout, dlse, dsinks


def sum_partials(base: Tensor, parts: Sequence[tuple[int, Tensor]], dtype: torch.dtype) -> Tensor:
    """Add the partial gradients of other ranks to this rank's `base` (B, N, H, D). Round the sum once, to `dtype`.

    The tensor `base` has the dtype of states, and the function may overwrite `base`. For each pair (first, x) of `parts`, x (B,
    n, H, D) is added to the tokens [first, first + n) of `base`. All tensors are contiguous.
    """
    for first, x in parts:
        base[:, first : first + x.shape[1]] += x
    return base.to(dtype)
