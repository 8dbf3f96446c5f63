"""Importing this module registers ring attention in transformers as attn_implementation="ring"."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ringattn.attention import ring_attention
from ringattn.transformers.batch import RingBatch

# Keywords that transformers passes to every attention function, without effect on the result
NEUTRAL = {"position_ids", "use_cache", "labels", "shift_labels", "num_items_in_batch", "output_hidden_states", "return_dict"}


class RingMask:
    """A `RingMask` holds the window of a layer. Models pass the `RingMask` to `attend` in place of a mask tensor. The class is
    not a dataclass, because FSDP copies dataclasses.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window

    def __getitem__(self, _: object) -> "RingMask":
        return self  # Gemma 4 indexes the mask

    def __getattr__(self, name: str) -> object:
        raise UnsupportedMaskError(f"the model reads {name} of its attention mask, which attention on a ring does not support")


class UnsupportedMaskError(AttributeError, ValueError):
    """Raised if a model uses the mask of a layer as a tensor. The class derives from AttributeError, because `hasattr` expects
    this exception.
    """


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: RingMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    ring_batch: RingBatch | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Tensors are (B, H, N, D), with this rank's N tokens."""
    name = type(module).__name__
    if not getattr(module, "is_on_ring", False):
        raise ValueError(f"{name} uses attention on a ring, but the model was not checked: call put_on_ring(model, mesh)")
    if ring_batch is None:
        raise ValueError(f"{name} received no ring_batch: call model(**shard_batch(batch, mesh)), or use RingTrainer")
    if unknown := [key for key, argument in others.items() if not _is_neutral(key, argument)]:
        raise ValueError(f"{name} passes {', '.join(unknown)}, which attention on a ring does not support")
    if dropout or not getattr(module, "is_causal", True):
        raise ValueError(
            f"{name} has dropout={dropout} or is not causal: attention on a ring requires dropout = 0 and causality"
        )
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"{name} attends to {key.shape[2]} keys with {query.shape[2]} queries: a ring supports no cache")
    if isinstance(attention_mask, RingMask):
        if sliding_window is not None and sliding_window != attention_mask.window:
            raise ValueError(f"{name} passes sliding_window={sliding_window}, but its mask has {attention_mask.window}")
        sliding_window = attention_mask.window
    elif attention_mask is not None:
        raise ValueError(f"{name} creates a mask of its own, which attention on a ring does not support")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options = dict(layout=ring_batch.layout, group=ring_batch.group, scale=scaling, sink_logits=s_aux)
    out: Any = ring_attention(q, k, v, mask=ring_batch.mask(sliding_window), **options)
    padding = ring_batch.padding
    return out if padding is None else out.masked_fill(padding[:, :, None, None], 0), None


def _is_neutral(name: str, argument: object) -> bool:
    if name == "is_causal":
        return argument is None or argument is True
    return argument is None or argument is False or name in NEUTRAL


def create_mask(*, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: object) -> RingMask:
    """Convert a Hugging Face mask function of token indices to a `RingMask`. The `RingMask` contains neither documents nor
    padding.

    Raises:
        ValueError: the mask is neither causal nor a causal window, or depends on the tokens.
    """
    if any(isinstance(x, Tensor) for x in _captured(mask_function)) or not _is_causal(mask_function, local_size):
        raise ValueError(
            f"the model requires the mask {mask_function.__qualname__}: attention on a ring supports causal masks and windows"
        )
    return RingMask(local_size)


def _captured(function: Callable[..., Any]) -> Iterator[object]:
    for cell in function.__closure__ or ():
        values = cell.cell_contents if isinstance(cell.cell_contents, (tuple, list)) else [cell.cell_contents]
        for value in values:
            yield value
            if hasattr(value, "__closure__"):
                yield from _captured(value)


def _is_causal(mask_function: Callable[..., Tensor], window: int | None) -> bool:
    """Test whether a mask function is causal, at a few points near the ends of the queries' intervals."""
    size = window or 64
    q = torch.tensor([0, 1, size - 1, size, size + 1, 3 * size + size // 2, 2**20], device="cpu")[:, None]
    offsets = torch.tensor([-(2**20), -size - 1, -size, 1 - size, -1, 0, 1, size], device="cpu")
    keys = (q + offsets).clamp(min=0)
    expected = keys <= q
    if window is not None:
        expected &= keys > q - window
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    return bool((mask_function(zero, zero, q, keys) == expected).all())


AttentionInterface.register("ring", attend)
AttentionMaskInterface.register("ring", create_mask)
