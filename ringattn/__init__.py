"""Exact attention over sequences that are sharded over a ring of ranks.

layout = Layout.zigzag(seq_len=S, ranks=P)
mask = Mask.causal()
out = ring_attention(q, k, v, layout=layout, mask=mask, group=group)
"""

from ringattn.attention import plan_ahead, ring_attention
from ringattn.checkpointing import keep_attention, save_attention
from ringattn.comm.same_batch import check_same
from ringattn.comm.simulated import simulate
from ringattn.decode import KVCache, decode_attention
from ringattn.explain import explain
from ringattn.flash import flash_attention
from ringattn.kernels.blocks import BlockMask
from ringattn.layout import Layout
from ringattn.load_balance import balanced_layout
from ringattn.mask import Mask
from ringattn.paged_cache import PagedKVCache
from ringattn.state import PartialState
from ringattn.ulysses import ulysses_attention

__version__ = "0.2.0"

__all__ = [
    "BlockMask",
    "KVCache",
    "Layout",
    "Mask",
    "PagedKVCache",
    "PartialState",
    "balanced_layout",
    "check_same",
    "decode_attention",
    "explain",
    "flash_attention",
    "keep_attention",
    "plan_ahead",
    "ring_attention",
    "save_attention",
    "simulate",
    "ulysses_attention",
]
