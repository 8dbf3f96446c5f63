"""Exact attention over sequences that are sharded over a ring of ranks.

layout = Layout.zigzag(seq_len=S, ranks=P)
mask = Mask.causal()
out = ring_attention(q, k, v, layout=layout, mask=mask, group=group)
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringattn.attention import plan_ahead, ring_attention
    from ringattn.checkpointing import save_attention
    from ringattn.comm.same_batch import check_same
    from ringattn.comm.simulated import simulate
    from ringattn.decode import KVCache, decode_attention
    from ringattn.explanation import explain
    from ringattn.flash import flash_attention
    from ringattn.kernels.backends import last_backend
    from ringattn.kernels.blocks import BlockMask
    from ringattn.layout import Layout
    from ringattn.load_balance import balanced_layout
    from ringattn.mask import Mask
    from ringattn.paged_cache import PagedKVCache
    from ringattn.state import PartialState
    from ringattn.torch_attention import sdpa
    from ringattn.ulysses import ulysses_attention

if not os.path.isdir(os.path.join(os.path.dirname(__file__), "kernels")):
    raise ImportError(
        "ringattn/kernels is not a folder, because the symbolic links in ringattn/ were lost in a copy of the repository: use "
        "git clone -c core.symlinks=true, or a .tar.gz archive, because pip and other programs lose the links of a .zip archive"
    )

__version__ = "0.3.0"

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
    "last_backend",
    "plan_ahead",
    "ring_attention",
    "save_attention",
    "sdpa",
    "simulate",
    "ulysses_attention",
]

# Each name is imported at its first use. Therefore `import ringattn.kernels` loads neither the ring nor torch.distributed.
_MODULES = {
    "BlockMask": "kernels.blocks",
    "KVCache": "decode",
    "Layout": "layout",
    "Mask": "mask",
    "PagedKVCache": "paged_cache",
    "PartialState": "state",
    "balanced_layout": "load_balance",
    "check_same": "comm.same_batch",
    "decode_attention": "decode",
    "explain": "explanation",
    "flash_attention": "flash",
    "last_backend": "kernels.backends",
    "plan_ahead": "attention",
    "ring_attention": "attention",
    "save_attention": "checkpointing",
    "sdpa": "torch_attention",
    "simulate": "comm.simulated",
    "ulysses_attention": "ulysses",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'ringattn' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"ringattn.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
