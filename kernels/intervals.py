"""Interval masks: query row i may see the key rows [lo[i], hi[i]) and no others.

`lo` and `hi` are int32 tensors of shape (B or 1, Nq) that never decrease along a row, 0 <= lo, hi <= Nk; lo >= hi is an
empty row. Causal, window, document and full masks and their intersections, on any sorted shard, all have this form.
"""

import torch
from torch import Tensor


def full(num_queries: int, num_keys: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Intervals of shape (1, num_queries) under which every query sees every key."""
    lo = torch.zeros(1, num_queries, dtype=torch.int32, device=device)
    return lo, torch.full_like(lo, num_keys)


def transpose(lo: Tensor, hi: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """The same mask seen from the keys: key j is seen by the query rows [query_lo[j], query_hi[j]).

    Because lo and hi never decrease, the rows with hi > j are a suffix and the rows with lo <= j a prefix.

    Args:
        lo, hi: int32 (B or 1, Nq), non-decreasing.
        num_keys: Nk.

    Returns:
        query_lo, query_hi: int32 (B or 1, Nk), non-decreasing; query_lo >= query_hi where no query sees the key.
    """
    keys = torch.arange(num_keys, dtype=torch.int32, device=lo.device).expand(lo.shape[0], num_keys).contiguous()
    query_lo = torch.searchsorted(hi.contiguous(), keys, right=True, out_int32=True)
    query_hi = torch.searchsorted(lo.contiguous(), keys, right=True, out_int32=True)
    return query_lo, query_hi


def dense(lo: Tensor, hi: Tensor, num_keys: int) -> Tensor:
    """The mask written out as booleans (B or 1, Nq, Nk): for the reference and for tests, never for training."""
    keys = torch.arange(num_keys, device=lo.device)
    return (lo[..., None] <= keys) & (keys < hi[..., None])
