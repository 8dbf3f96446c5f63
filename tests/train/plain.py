"""Attention by PyTorch itself, with which tests compare a run."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ringattn import Mask
from ringattn.kernels import interval_mask


def dense_mask(mask: Mask, tokens: int) -> Tensor:
    """The mask written out for all pairs of tokens: bool (1 or B, 1, S, S)."""
    return interval_mask.dense(*mask.intervals(tokens), tokens)[:, None]


def plain_attention(mask: Mask) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention of whole sequences on one rank, under this mask."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        allowed = dense_mask(mask, q.shape[1])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True).transpose(1, 2)

    return attend
