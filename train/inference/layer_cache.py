"""Cache the keys and values that the layers of a model need in generation.

A layer without a window needs all keys, so its cache is sharded over the ranks. A layer with a short window needs few keys.
Every rank stores the whole window in a local cache. Decoding with a local cache sends no messages.

A local cache with R rows stores the token at position p in row p % R. Keys are rotated before they are stored, so the rows may
have any order. On one rank, all caches are local.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import KVCache, Layout, decode_attention
from ringattn.comm.connect import Group, rank_and_size


class Place(NamedTuple):
    """Holds the row of a token in a local cache, and the rows to which the token attends."""

    rows: Tensor  # int64 (1,)
    bounds: tuple[Tensor, Tensor]  # (lo, hi), as in `decode_attention`


def new_cache(window: int | None, num_tokens: int, rank: int = 0, ranks: int = 1) -> KVCache:
    """Return an empty cache for up to `num_tokens` tokens of a layer. The cache is local if the window fits into a shard."""
    rows = min(window or num_tokens, num_tokens)
    return KVCache(rows) if rows <= -(-num_tokens // ranks) else KVCache(num_tokens, rank, ranks)


def prefill(cache: KVCache, k: Tensor, v: Tensor, layout: Layout, group: dist.ProcessGroup | None) -> None:
    """Store a prompt. `k` and `v` (B, N, Hkv, D) belong to this rank's tokens. All ranks call this function together."""
    if cache.ranks == layout.ranks and layout.seq_len <= cache.capacity:
        cache.prefill(k, v, layout)
        return
    rank, _ = rank_and_size(group)
    positions, size = layout.positions(rank), cache.capacity
    kept = (positions >= layout.seq_len - size).nonzero()[:, 0]
    rows, kept = (positions[kept] % size).to(k.device), kept.to(k.device)
    k, v = (x.new_zeros(x.shape[0], size, *x.shape[2:]).index_copy_(1, rows, x[:, kept]) for x in (k, v))
    if layout.ranks > 1:
        # Each row is nonzero on at most one rank, so the sum is exact.
        for x in (k, v):
            dist.all_reduce(x, group=group)
    cache.prefill(k, v, Layout.contiguous(size, 1))


def places(caches: Iterable[KVCache], position: Tensor) -> dict[int, Place]:
    """Map the capacity of each local cache to the `Place` of the token at `position`, int64 (1,)."""
    found = {}
    for size in {cache.capacity for cache in caches if cache.ranks == 1}:
        hi = (position + 1).clamp(max=size).int()[None]
        found[size] = Place(position % size, (torch.zeros_like(hi), hi))
    return found


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    window: int | None,
    place: Place | None,
    group: Group | None,
    backend: str,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Store the keys and values of one token, and compute its attention. For a sharded cache, `place` is None."""
    if place is None:
        cache.append(k, v)
        return decode_attention(q, cache, window=window, group=group, backend=backend, sink_logits=sink_logits)
    cache.append(k, v, rows=place.rows)
    return decode_attention(q, cache, bounds=place.bounds, backend=backend, sink_logits=sink_logits)
