"""Attention in plain PyTorch, scores written out: the specification that every kernel is held to.

Shapes, for every kernel module alike (B batch, Nq and Nk rows, Hq query heads, Hkv key heads dividing Hq, head dims D and Dv):

    q (B, Nq, Hq, D)   k (B, Nk, Hkv, D)   v (B, Nk, Hkv, Dv)       fp16, bf16, fp32 (here also fp64)
    intervals                                                      the mask, see ringattn.kernels.interval_mask
    state = (m, l, o): m, l (B, Nq, Hq), o (B, Nq, Hq, Dv)          fp32 (fp64 for fp64 inputs), contiguous
    lse, delta (B, Nq, Hq)                                         the same dtype as the state

With s = scale * q k^T over the keys seen so far, m is the row maximum, l = sum exp(s - m), o = sum exp(s - m) v. A row that has
seen no key is the empty state (-inf, 0, 0); its output is 0 and its lse -inf. Query head h reads key head h // (Hq / Hkv).
The Hopper kernels take as m another number near the scores: whatever it is, l and o relative to it stand for the same sums.

Both functions take three options. `dropout` drops probabilities: o sums those kept, scaled; m, l and lse do not change.
`blocks` hides blocks of keys from blocks of queries. `precision` is that of products of fp32 inputs: "ieee", or "tf32", which
lets the Triton kernels round their operands to 11 bits; this module and `ringattn.kernels.blockwise` always compute exactly.
"""

from collections.abc import Callable, Sequence
from functools import wraps

import torch
from torch import Tensor

from ringattn.kernels import validation
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout, keep_mask
from ringattn.kernels.interval_mask import Intervals, dense

State = tuple[Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv
Delta = Tensor | tuple[Tensor, Tensor | None]  # or (out, dlse), for those kernels that make it from them


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, lse and gradient accumulators for inputs of `dtype`: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def under_autocast(device: torch.device) -> bool:
    """Whether `torch.autocast` is on for tensors on `device`."""
    return device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)


def _as_it_says(function: Callable) -> Callable:
    """`function` of q and more with products in its own dtypes, which `torch.autocast` would round."""

    @wraps(function)
    def call(q: Tensor, *arguments, **options):
        if not under_autocast(q.device):
            return function(q, *arguments, **options)
        with torch.autocast(q.device.type, enabled=False):
            return function(q, *arguments, **options)

    return call


def empty_state(q: Tensor, value_dim: int) -> State:
    """The state of query rows `q` (B, Nq, Hq, D) that have seen no key: (-inf, 0, 0)."""
    dtype = state_dtype(q.dtype)
    m = torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)
    return m, torch.zeros_like(m), torch.zeros(*q.shape[:3], value_dim, dtype=dtype, device=q.device)


def merge(a: State, b: State) -> State:
    """The state of the union of two disjoint sets of keys. Associative, commutative, with the empty state as identity.

    m = max(m_a, m_b), and each side is rescaled by alpha = exp(m_side - m) (Milakov and Gimelshein 2018, section 3.1).
    """
    m = torch.maximum(a[0], b[0])
    # a row empty on both sides has m = -inf: subtract 0 there, so that exp(-inf - 0) = 0 and never exp(-inf + inf) = NaN
    origin = m.masked_fill(m == float("-inf"), 0.0)
    alpha_a, alpha_b = torch.exp(a[0] - origin), torch.exp(b[0] - origin)
    return m, alpha_a * a[1] + alpha_b * b[1], alpha_a[..., None] * a[2] + alpha_b[..., None] * b[2]


def finalize(state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out, lse) of a state: out = o / l in `dtype`, lse = m + log l in the state's dtype; an empty row gives (0, -inf)."""
    m, l, o = state
    empty = l == 0
    out = o / l.masked_fill(empty, 1.0)[..., None]
    return out.to(dtype), m + torch.log(l)


def _scores(q: Tensor, k: Tensor, intervals: Intervals, scale: float, blocks: BlockMask | None) -> Tensor:
    """Masked scores (B, Hkv, G, Nq, Nk) in the state dtype, -inf where the key is not seen; G = Hq / Hkv."""
    q, k = _by_group(q, k.shape[2]), k.to(state_dtype(k.dtype)).permute(0, 2, 3, 1)[:, :, None]
    mask = dense(intervals.lo, intervals.hi, intervals.num_keys)[:, None, None]
    if blocks is not None:
        seen = blocks.dense(q.shape[3], k.shape[-1])
        mask = mask & (seen.unflatten(1, q.shape[1:3]) if seen.shape[1] > 1 else seen[:, :, None])
    return (scale * (q @ k)).masked_fill(~mask, float("-inf"))


def _drop(x: Tensor, dropout: Dropout | None) -> Tensor:
    """`x` (B, Hkv, G, Nq, Nk) where kept, scaled, and 0 where dropped."""
    if dropout is None:
        return x
    keep = keep_mask(dropout, x.shape[0], x.shape[1] * x.shape[2]).unflatten(1, x.shape[1:3])
    return (x * dropout.factor).masked_fill(~keep, 0.0)


def _by_group(x: Tensor, num_key_heads: int) -> Tensor:
    """(B, N, Hq, D) -> (B, Hkv, G, N, D) in the state dtype."""
    return x.to(state_dtype(x.dtype)).unflatten(2, (num_key_heads, -1)).permute(0, 2, 3, 1, 4)


def _by_row(x: Tensor) -> Tensor:
    """(B, Hkv, G, N, D) -> (B, N, Hq, D)."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


@_as_it_says
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Intervals,
    scale: float,
    state: State | None = None,
    final: bool = False,
    *,
    dropout: Dropout | None = None,
    blocks: BlockMask | None = None,
    precision: str = "ieee",
) -> State | tuple[Tensor, Tensor]:
    """Attend from `q` to `k`, `v` under the intervals, starting from `state` (None: empty).

    Args:
        q, k, v, intervals: as in the module's docstring; any strides with a contiguous last dimension.
        scale: factor on the scores, usually D ** -0.5.
        state: what the rows have seen before; it is consumed, its memory may be reused for the result.
        final: whether these are the last keys.
        dropout, blocks, precision: see the module's docstring; default: off, off, "ieee".

    Returns:
        The new state, or with `final` the pair (out in q's dtype, lse); contiguous.

    Raises:
        ValueError: shapes, dtypes, devices, intervals or a scale that contradict each other; `dropout` or `blocks` do not fit q
            and k, or an unknown precision.
    """
    validation.check_inputs(q, k, v, intervals, scale)
    validation.check_options(q, k, dropout, blocks, precision)
    scores = _scores(q, k, intervals, scale, blocks)
    if k.shape[1] == 0:
        new = empty_state(q, v.shape[-1])
    else:
        m = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - m.masked_fill(m == float("-inf"), 0.0))
        o = _drop(p, dropout) @ v.to(p.dtype).permute(0, 2, 1, 3)[:, :, None]
        new = (_by_row(m)[..., 0], _by_row(p.sum(-1, keepdim=True))[..., 0], _by_row(o))
    if state is not None:
        new = merge(state, new)
    new = tuple(x.contiguous() for x in new)
    return finalize(new, q.dtype) if final else new


def row_delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """delta = rowsum(dout * out) - dlse, of shape (B, Nq, Hq): all that the backward needs to know of `out`.

    From d lse / d s = p, a gradient dlse of lse enters ds = p * (dp - delta) as a change of delta.
    """
    dtype = state_dtype(out.dtype)
    delta = (out.to(dtype) * dout.to(dtype)).sum(-1)
    return delta if dlse is None else delta - dlse


@_as_it_says
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    intervals: Intervals,
    scale: float,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    *,
    grad_dtype: torch.dtype | None = None,
    dropout: Dropout | None = None,
    blocks: BlockMask | None = None,
    precision: str = "ieee",
) -> Gradients:
    """This block's gradients (dq, dk, dv), with the probabilities recomputed as p = exp(s - lse).

    dv += p^T dout;  ds = p * (dout v^T - delta);  dq += scale * ds k;  dk += scale * ds^T q  (Dao et al. 2022, appendix B.2).
    With dropout p in dv and dout v^T are dropped and scaled, delta and lse are as they are.

    Args:
        q, k, v, intervals, scale, dropout, blocks, precision: as for `forward`. `dout` (B, Nq, Hq, Dv) has q's dtype.
        lse: over all keys of the row, those of other blocks included. delta: from `row_delta`.
        dq, dk, dv: accumulators in the state dtype with the shapes of q, k, v, contiguous; added into and returned. None: a
            fresh tensor is returned, a contiguous one.
        grad_dtype: of fresh gradients: q's dtype (None) or the state dtype.

    Raises:
        ValueError: as for `forward`.
    """
    validation.check_inputs(q, k, v, intervals, scale)
    validation.check_options(q, k, dropout, blocks, precision)
    num_key_heads, dtype = k.shape[2], q.dtype
    lse, delta = (_by_group(x[..., None], num_key_heads) for x in (lse, delta))
    scores = _scores(q, k, intervals, scale, blocks)
    p = torch.exp(scores - lse).masked_fill(scores == float("-inf"), 0.0)
    q, dout = _by_group(q, num_key_heads), _by_group(dout, num_key_heads)
    k, v = (x.to(p.dtype).permute(0, 2, 1, 3)[:, :, None] for x in (k, v))
    ds = p * (_drop(dout @ v.mT, dropout) - delta)
    new_dq = scale * _by_row(ds @ k)
    new_dk = scale * (ds.mT @ q).sum(2).permute(0, 2, 1, 3)
    new_dv = (_drop(p, dropout).mT @ dout).sum(2).permute(0, 2, 1, 3)
    given, new = (dq, dk, dv), (new_dq, new_dk, new_dv)
    fresh = grad_dtype or dtype
    return tuple(x.to(fresh).contiguous() if into is None else into.add_(x) for into, x in zip(given, new, strict=True))


def total(base: Tensor, parts: Sequence[tuple[int, Tensor]], dtype: torch.dtype) -> Tensor:
    """`base` plus all `parts`, rounded once to `dtype`. `base` is used up.

    Args:
        base: (B, N, H, D) in the state dtype, contiguous.
        parts: (first, x): x (B, n, H, D), contiguous, is added to the rows of `base` from `first` on.
    """
    for first, x in parts:
        base[:, first : first + x.shape[1]] += x
    return base.to(dtype)
