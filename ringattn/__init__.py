"""Exact attention over sequences that are spread over a ring of ranks.

layout = Layout.zigzag(seq_len=S, ranks=P)
mask = Mask.causal()
out = ring_attention(q, k, v, layout=layout, mask=mask, group=group)
"""

import kernels

if getattr(kernels, "OWNER", None) != "ringattn":
    raise ImportError(
        f"the name 'kernels' belongs to another package here ({getattr(kernels, '__file__', None)}), and ringattn's own "
        "kernels cannot be loaded beside it: uninstall the package 'kernels', use a separate environment, or put the "
        "root of the ringattn source first on PYTHONPATH"
    )

from kernels.blocks import BlockMask
from ringattn.attention import plan_ahead, ring_attention
from ringattn.balance import balanced_layout
from ringattn.decode import KVCache, decode_attention
from ringattn.explain import explain
from ringattn.flash import flash_attention
from ringattn.layout import Layout
from ringattn.mask import Mask
from ringattn.recompute import keep_attention
from ringattn.simulated import simulate
from ringattn.state import PartialState
from ringattn.ulysses import ulysses_attention

__all__ = [
    "BlockMask",
    "KVCache",
    "Layout",
    "Mask",
    "PartialState",
    "balanced_layout",
    "decode_attention",
    "explain",
    "flash_attention",
    "keep_attention",
    "plan_ahead",
    "ring_attention",
    "simulate",
    "ulysses_attention",
]
