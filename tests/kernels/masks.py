"""Named interval masks for tests, and random ones."""

import random

import torch
from torch import Tensor

DOCUMENT, WINDOW = 37, 20  # lengths that divide no tile


def causal(num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """Aligned at the last row: the last query sees every key."""
    hi = (torch.arange(num_queries) + 1 + num_keys - num_queries).clamp(0, num_keys)
    return torch.zeros_like(hi), hi


def _window(num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
    hi = causal(num_queries, num_keys)[1]
    return (hi - WINDOW).clamp(min=0), hi


def _documents(num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
    hi = causal(num_queries, num_keys)[1]
    return (hi - 1).clamp(min=0) // DOCUMENT * DOCUMENT, hi


def _windowed_documents(num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
    (lo, hi), (window_lo, _) = _documents(num_queries, num_keys), _window(num_queries, num_keys)
    return torch.maximum(lo, window_lo), hi


def _empty_rows(num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """Rows that see no key in the first quarter (hi = 0) and in the last (lo > hi), a growing interval between."""
    rows = torch.arange(num_queries)
    hi = ((rows - num_queries // 4) * num_keys // max(num_queries, 1)).clamp(min=0)
    return torch.where(rows < 3 * num_queries // 4, hi // 2, num_keys), hi


def _full(num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
    lo = torch.zeros(num_queries, dtype=torch.int64)
    return lo, lo + num_keys


MASKS = {
    "full": _full,
    "causal": causal,
    "window": _window,
    "documents": _documents,
    "windowed-documents": _windowed_documents,
    "empty-rows": _empty_rows,
}


def intervals_of(mask: str, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """lo, hi of a named mask, int32 (1, num_queries)."""
    return tuple(x[None].int() for x in MASKS[mask](num_queries, num_keys))


def packed_intervals(documents: list[list[int]]) -> tuple[Tensor, Tensor]:
    """lo, hi of packed documents under a causal mask, of these lengths in each entry of the batch."""
    starts = [[sum(lengths[:i]) for i, length in enumerate(lengths) for _ in range(length)] for lengths in documents]
    lo = torch.tensor(starts, dtype=torch.int32)
    return lo, torch.arange(1, lo.shape[1] + 1, dtype=torch.int32).expand_as(lo)


def random_intervals(num_queries: int, num_keys: int, seed: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Two independent non-decreasing sequences a row of the batch, so that lo > hi occurs."""
    source = random.Random(seed)
    bounds = [[sorted(source.choices(range(num_keys + 1), k=num_queries)) for _ in range(batch)] for _ in range(2)]
    return tuple(torch.tensor(x, dtype=torch.int32).reshape(batch, num_queries) for x in bounds)
