"""Define the public call `sdpa`, which has the signature of torch's `scaled_dot_product_attention`."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringattn.flash import flash_attention
from ringattn.kernels.validation import check_dense, check_flag
from ringattn.mask import Mask


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` with the kernels of `flash_attention`.

    Args:
        q: (..., Nq, D), k: (..., Nk, D), v: (..., Nk, Dv), usually (B, H, N, D). The leading dims are broadcast.
        attn_mask: (..., Nq, Nk), a bool mask, or a float mask of 0 and -inf. The mask must be the same for all heads. Every
            query must attend to one interval of keys, as with causal masks, windows and packed documents. The ends of the
            interval must not decrease from one query to the next. Unlike `flash_attention(mask=...)`, every call copies the
            intervals to the host.
        dropout_p: the probability of dropping an entry of the softmax. The random numbers differ from torch's.
        is_causal: aligns the first query with the first key, like torch. `flash_attention` aligns the last ones instead.
        scale: positive factor on the scores; None for D ** -0.5.
        enable_gqa: whether k and v may have fewer heads (dim -3) than q. The number of heads of k and v must divide the number
            of heads of q.

    Returns:
        out (..., Nq, Dv) in q's dtype. A query without allowed keys has the output 0.

    Raises:
        ValueError: the arguments contradict each other, or `attn_mask` is unsupported, such as a learned bias.
    """
    check_dense(q, k, v)
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    if is_causal and attn_mask is not None:
        raise ValueError("both attn_mask and is_causal are given: pass only one of them")
    if min(q.ndim, k.ndim, v.ndim) < 2 or k.shape[-2] != v.shape[-2]:
        shapes = ", ".join(f"{tuple(x.shape)}" for x in (q, k, v))
        raise ValueError(f"q, k, v have the shapes {shapes}: give q (..., Nq, D), k (..., Nk, D) and v (..., Nk, Dv)")
    if max(q.ndim, k.ndim, v.ndim) < 4 and not enable_gqa:  # the first dim is the batch, and every entry has one head
        if isinstance(attn_mask, Tensor) and attn_mask.ndim == 3:
            attn_mask = attn_mask.unsqueeze(1)
        q, k, v = (x.unsqueeze(-3) for x in (q, k, v))
        return sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale).squeeze(-3)
    (q, k, v), leading = _with_heads(q, k, v, enable_gqa)
    num_queries, num_keys = q.shape[1], k.shape[1]
    mask: Mask | None = None
    if is_causal:
        mask, k, v = Mask.causal(), k[:, :num_queries], v[:, :num_queries]
    if attn_mask is not None:
        mask = _recognise(attn_mask, leading, num_queries, num_keys)
    if num_queries > k.shape[1] and mask is not None:
        if is_causal:
            mask = Mask.from_intervals([0] * num_queries, [min(i + 1, num_keys) for i in range(num_queries)])
        # Append masked keys, to align the last query with the last key.
        k, v = (pad(x, (0, 0, 0, 0, 0, num_queries - x.shape[1])) for x in (k, v))
    out = flash_attention(q, k, v, mask=mask, dropout_p=dropout_p, scale=scale)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).reshape(*leading, num_queries, v.shape[-1])


def _with_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[list[Tensor], torch.Size]:
    tensors = [x.reshape(*[1] * (4 - x.ndim), *x.shape) for x in (q, k, v)]
    grouped = enable_gqa and tensors[0].shape[-3] != tensors[1].shape[-3]
    shared = 3 if grouped else 2  # the number of last dims that are not broadcast
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-shared] for x in tensors))
    except RuntimeError:
        shapes = ", ".join(f"{tuple(x.shape)}" for x in (q, k, v))
        hint = "" if enable_gqa else "; for fewer key heads than query heads, pass enable_gqa=True"
        raise ValueError(f"q, k, v have the shapes {shapes}: their leading dims must be equal or 1{hint}") from None
    tensors = [x.expand(*batch, *x.shape[-shared:]) for x in tensors]
    leading = tensors[0].shape[:-2]
    ndim = max(q.ndim, k.ndim, v.ndim)
    return [x.flatten(0, -4).transpose(1, 2) for x in tensors], leading[len(leading) + 2 - ndim :]


def _recognise(attn_mask: Tensor, leading: torch.Size, num_queries: int, num_keys: int) -> Mask:
    """Convert `attn_mask` to a `Mask` in which the last query and the last key have the same position."""
    remedy = "use torch's scaled_dot_product_attention, or flash_attention(mask=..., blocks=...)"
    allowed = _allowed(attn_mask, remedy)
    leading = torch.Size((1,) * (2 - len(leading)) + leading)
    try:
        allowed = allowed.expand(*[1] * (2 + len(leading) - allowed.ndim), *allowed.shape[:-2], num_queries, num_keys)
        if torch.broadcast_shapes(leading, allowed.shape[:-2]) != leading:
            raise RuntimeError
    except RuntimeError:
        shape = (*leading, num_queries, num_keys)
        raise ValueError(f"attn_mask has the shape {tuple(attn_mask.shape)}: it must be broadcastable to {shape}") from None
    if allowed.shape[-3] > 1 and (allowed != allowed[..., :1, :, :]).any():
        raise ValueError(f"attn_mask differs between heads, which these kernels do not support: {remedy}")
    allowed = allowed[..., 0, :, :].expand(*leading[:-1], num_queries, num_keys)
    count = allowed.sum(-1)
    lo = allowed.int().argmax(-1) if num_keys else torch.zeros_like(count)
    # A query without keys gets an empty interval, so that lo and hi do not decrease.
    hi = torch.where(count > 0, lo + count, 0).cummax(-1).values
    lo = torch.where(count > 0, lo, hi)
    keys = torch.arange(num_keys, device=allowed.device)
    is_interval = ((keys >= lo[..., None]) & (keys < hi[..., None])).equal(allowed)
    if not is_interval or (lo.diff() < 0).any() or (hi.diff() < 0).any():
        raise ValueError(
            "attn_mask is not a mask in which every query attends to one interval of keys whose ends never decrease: " + remedy
        )
    surplus = max(num_keys - num_queries, 0)
    lo, hi = (pad(x.flatten(0, -2), (surplus, 0)).cpu() for x in (lo, hi))
    return Mask.from_intervals(lo, hi) if lo.numel() else Mask.full()


def _allowed(attn_mask: Any, remedy: str) -> Tensor:
    if not isinstance(attn_mask, Tensor) or attn_mask.ndim < 2:
        raise ValueError(f"attn_mask is a {type(attn_mask).__name__}: it must be a tensor with at least two dimensions")
    if torch.compiler.is_compiling() or attn_mask.is_meta:
        raise ValueError("attn_mask has no values while torch.compile traces: use flash_attention(mask=...)")
    if attn_mask.dtype == torch.bool:
        return attn_mask
    if attn_mask.requires_grad or not ((attn_mask == 0) | (attn_mask == float("-inf"))).all():
        raise ValueError(f"attn_mask is a bias, and these kernels add no numbers to the scores: {remedy}")
    return attn_mask == 0
