"""Attention on one device, with no group: the call that takes the place of `scaled_dot_product_attention` in a model."""

from functools import lru_cache

import torch
from torch import Tensor

from ringattn import custom_op
from ringattn.attention import autocast, check_inputs, pairs_of_batch, scale_of
from ringattn.graphs import keep_if_captured
from ringattn.kernels import dispatch
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.interval_mask import Intervals
from ringattn.mask import Mask, shared_intervals

# once: a mask holds a tensor
_CAUSAL, _FULL = Mask.causal(), Mask.full()


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    blocks: BlockMask | None = None,
    backend: str = "auto",
    precision: str = "ieee",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v, computed by tiles; memory is linear in the number of rows.

    Differentiable in q, k and v from gradients of out and lse. On a Hopper GPU the last bits of dq may differ from run to run,
    unless `torch.use_deterministic_algorithms(True)` asks for the slower kernels; all else is always the same.

    Args:
        q: (B, Nq, Hq, D), k: (B, Nk, Hkv, D), v: (B, Nk, Hkv, Dv); Hkv divides Hq. One dtype (fp16, bf16, fp32, fp64) and
            device; under `torch.autocast` they are cast to its dtype. `scaled_dot_product_attention` has rows and heads the
            other way round: (B, H, N, D). They are finite: a NaN in v may reach rows that do not see it, in the same tile.
        mask: over the Nk positions of the keys; the last query stands at the last of them, as in FlashAttention:

                Nq = 2, Nk = 4, causal:  1 1 1 0
                                         1 1 1 1

        is_causal: short for mask=Mask.causal(). Neither: every query sees every key.
        scale: positive factor on the scores; None: D ** -0.5.
        dropout_p: probability of dropping a probability of the softmax, 0 <= p < 1.
        seed: of the dropout; another one for every layer and step.
        blocks: pairs of (query block, key block) that are computed at all, on top of `mask`. None: all.
        backend: the kernels, see `ringattn.kernels.dispatch`.
        precision: of products of fp32 inputs in the Triton kernels, "ieee" or "tf32".
        return_lse: also return the log of the softmax's denominator.

    Returns:
        out (B, Nq, Hq, Dv) in q's dtype; with `return_lse` (out, lse), lse (B, Nq, Hq) in fp32 (fp64 for fp64 inputs). A row
        that may see no key gives 0 and -inf.

    Raises:
        ValueError: arguments that contradict each other, before any work starts.
    """
    if mask is not None and is_causal:
        raise ValueError("both mask and is_causal are given: give one, Mask.causal(...) is causal already")
    if blocks is not None and not isinstance(blocks, BlockMask):
        raise ValueError(f"blocks is a {type(blocks).__name__}: give a ringattn.BlockMask")
    if mask is None:
        mask = _CAUSAL if is_causal else _FULL
    q, k, v = autocast(q, k, v)
    scale = scale_of(q, scale)
    check_inputs(q, k, v, mask, k.shape[1] if k.ndim == 4 else 0, scale, dropout_p, seed, backend, precision)
    keep, size = (None, 0) if blocks is None else (blocks.keep, blocks.size)
    settings = mask.lengths, keep, mask.is_causal, mask.window or 0, size
    out, lse = _attention(q, k, v, *settings, scale, float(dropout_p), seed, backend, precision)
    return (out, lse) if return_lse else out


@lru_cache(maxsize=8)
def _intervals(
    documents: tuple[int, ...], is_causal: bool, window: int, num_queries: int, num_keys: int, device: torch.device
) -> Intervals:
    mask = Mask.from_lengths(is_causal, window or None, documents, num_keys)
    return Intervals.of(*shared_intervals(mask, num_keys, num_queries), num_keys, device)


@lru_cache(maxsize=8)
def _positions(num_rows: int, seq_len: int, device: torch.device) -> Tensor:
    return torch.arange(seq_len - num_rows, seq_len, dtype=torch.int32, device=device)


_block_masks: dict[tuple[int, int, int], BlockMask] = {}  # the last few; each holds its tensor, whose id is then no other's


def _blocks(keep: Tensor, size: int) -> BlockMask:
    """The block mask of `keep`, whose lists are made once."""
    if keep.is_inference():  # which does not tell when it is changed
        return BlockMask(keep, size)
    key = id(keep), keep._version, size
    mask = _block_masks.get(key)
    if mask is None:
        mask = _block_masks[key] = BlockMask(keep, size)
        if len(_block_masks) > 8:
            _block_masks.pop(next(iter(_block_masks)), None)
    return mask


# The operators take the masks as values, so that a compiler may trace them.
_SETTINGS = (
    "Tensor documents, Tensor? keep, bool is_causal, SymInt window, SymInt block_size, float scale, float dropout_p, "
    "SymInt seed, str backend, str precision"
)


def _block(
    q: Tensor,
    k: Tensor,
    documents: Tensor,
    keep: Tensor | None,
    is_causal: bool,
    window: int,
    block_size: int,
    scale: float,
    dropout_p: float,
    seed: int,
    backend: str,
    precision: str,
) -> tuple[tuple, dict]:
    """What the kernels are told about this one block: (intervals, scale), and their options."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    intervals = _intervals(tuple(documents.tolist()), is_causal, window, num_queries, num_keys, q.device)
    dropout = None
    if dropout_p:
        positions = (_positions(rows, num_keys, q.device) for rows in (num_queries, num_keys))
        dropout = Dropout(dropout_p, seed, *positions)
    blocks = None if keep is None else _blocks(keep, block_size)
    keep_if_captured((intervals, dropout, blocks), q.device)
    options = {"dropout": dropout, "blocks": blocks, "backend": backend, "precision": precision}
    return (intervals, scale), options


def _forward(q, k, v, *settings):
    mask, options = _block(q, k, *settings)
    return dispatch.forward(q, k, v, *mask, final=True, **options)


def _backward(q, k, v, out, lse, dout, dlse, *settings):
    mask, options = _block(q, k, *settings)
    return dispatch.backward(q, k, v, dout, lse, (out, dlse), *mask, **options)


def _pairs(batch, num_queries, num_keys, documents, keep, is_causal, window, *_):
    kept = 1 if keep is None else keep.float().mean().item()
    return kept * pairs_of_batch(batch, num_keys, documents, is_causal, window, num_queries)


_attention = custom_op.register("flash_attention", _SETTINGS, _forward, _backward, _pairs)
