"""Interval masks for tests, by name and at random."""

import random

import torch
from torch import Tensor

from ringattn.kernels.interval_mask import Intervals

# The lengths of a document and of a window. No tile size is a divisor or a multiple of them.
DOCUMENT, WINDOW = 37, 20


def causal(num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """The last query attends to every key."""
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
    """The first quarter of the queries has hi = 0, the last quarter has lo > hi, and the intervals between them grow."""
    queries = torch.arange(num_queries)
    hi = ((queries - num_queries // 4) * num_keys // max(num_queries, 1)).clamp(min=0)
    return torch.where(queries < 3 * num_queries // 4, hi // 2, num_keys), hi


def _full(num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
    lo = torch.zeros(num_queries, dtype=torch.int64)
    return lo, lo + num_keys


def full(num_queries: int, num_keys: int, device: torch.device | str = "cpu") -> Intervals:
    """The intervals of the mask under which every query attends to every key."""
    return Intervals.of(*intervals_of("full", num_queries, num_keys), num_keys, device)


MASKS = {
    "full": _full,
    "causal": causal,
    "window": _window,
    "documents": _documents,
    "windowed-documents": _windowed_documents,
    "empty-rows": _empty_rows,
}


def intervals_of(mask: str, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """Return lo and hi of a named mask, int32 (1, num_queries)."""
    return tuple(x[None].int() for x in MASKS[mask](num_queries, num_keys))


def packed_intervals(documents: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return lo and hi of packed documents under a causal mask, given the lengths of the documents of each batch entry."""
    starts = [[sum(lengths[:i]) for i, length in enumerate(lengths) for _ in range(length)] for lengths in documents]
    lo = torch.tensor(starts, dtype=torch.int32)
    return lo, torch.arange(1, lo.shape[1] + 1, dtype=torch.int32).expand_as(lo)


def random_intervals(num_queries: int, num_keys: int, seed: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Return two independent non-decreasing sequences for each batch entry, so that lo > hi occurs."""
    source = random.Random(seed)
    bounds = [[sorted(source.choices(range(num_keys + 1), k=num_queries)) for _ in range(batch)] for _ in range(2)]
    return tuple(torch.tensor(x, dtype=torch.int32).reshape(batch, num_queries) for x in bounds)
