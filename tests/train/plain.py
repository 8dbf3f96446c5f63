"""Attention by PyTorch itself, and a plain GPT, with which tests compare a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
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


class PlainLayer(NamedTuple):
    """How a layer attends. Without `theta`, it has no rotary embedding."""

    window: int | None
    theta: float | None
    rotated: int = 0  # dimensions of each head
    factor: float = 1.0  # positions are divided by this number


def plain_logits(
    weights: Mapping[str, Tensor], layers: Sequence[PlainLayer], head_dim: int, tokens: Tensor, documents
) -> Tensor:
    """The logits (S, vocabulary) of our GPT for one sequence (S,) of packed documents, in the dtype of the weights."""
    x, at = weights["embedding"][tokens], torch.arange(len(tokens))
    document = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    for i, layer in enumerate(layers):
        block = {name.removeprefix(f"blocks.{i}."): weight for name, weight in weights.items()}
        h = _norm(x, block["attention_norm"])
        q, k, v = (
            (h @ block[f"{name}.weight"].T).unflatten(-1, (-1, head_dim)).transpose(0, 1) for name in ("query", "key", "value")
        )
        q, k = _rotate(q, layer), _rotate(k, layer)
        k, v = (y.repeat_interleave(len(q) // len(k), 0) for y in (k, v))
        distance = at[:, None] - at
        allowed = (distance >= 0) & (distance < (layer.window or len(at))) & (document[:, None] == document)
        p = (q @ k.mT / head_dim**0.5).masked_fill(~allowed, float("-inf")).softmax(-1)
        x = x + (p @ v).transpose(0, 1).flatten(1) @ block["output.weight"].T
        h = _norm(x, block["ffn_norm"])
        x = x + (F.silu(h @ block["gate.weight"].T) * (h @ block["up.weight"].T)) @ block["down.weight"].T
    return _norm(x, weights["norm"]) @ weights["embedding"].T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _rotate(x: Tensor, layer: PlainLayer) -> Tensor:
    """Rotate (H, S, D) as complex numbers."""
    if layer.theta is None:
        return x
    half = layer.rotated // 2
    frequency = layer.theta ** -(torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[1])[:, None] / layer.factor * frequency
    rotated = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((rotated.real, rotated.imag, x[..., 2 * half :]), -1)
