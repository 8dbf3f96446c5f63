"""Masks in which every query may attend to one interval of key positions. Both ends never decrease from query to query.

Causal masks, sliding windows, packed documents, full attention and their intersections have this form. Two
integers per query therefore describe a mask. Only `intervals_at` applies causality, windows and documents.
"""

from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ringattn.kernels.validation import as_integer, check_flag, shown

UNLIMITED = 2**62  # a window that is longer than every sequence
Lengths = Sequence[int] | Sequence[Sequence[int]] | Tensor | Sequence[Tensor]


def _per_entry(documents: Any) -> tuple[tuple[int, ...], ...] | None:
    """Return one tuple of lengths per batch entry, or a single tuple for all batch entries.

    Empty documents are left out, because collators pad cu_seqlens by repeating its last entry.
    """
    if documents is None:
        return None
    try:
        entries = tuple(x.tolist() if hasattr(x, "tolist") else x for x in documents)  # accepts tensors and arrays as well
        if not entries or not all(isinstance(entry, Sequence) for entry in entries):
            entries = (entries,)
        if isinstance(documents, (Set, Mapping)) or any(bool in map(type, entry) for entry in entries):
            raise TypeError
        lengths = [[index(length) for length in entry] for entry in entries]
    except (TypeError, RuntimeError):
        raise ValueError(
            f"documents={shown(documents)}: it must be a list of integers, or one such list per batch entry"
        ) from None
    if any(length < 0 for entry in lengths for length in entry):
        raise ValueError(f"documents contain the length {min(map(min, filter(None, lengths)))}: lengths must not be negative")
    return tuple(tuple(length for length in entry if length) for entry in lengths)


@dataclass(frozen=True)
class Mask:
    """The keys that each query may attend to. `Mask.causal` and `Mask.full` create masks.

    `lengths` contains the document lengths of all batch entries in one int64 tensor. `totals` contains their sums, on which
    torch.compile guards. Neither is a field, because code that copies a mask, such as FSDP, passes all fields to the
    constructor.
    """

    is_causal: bool
    window: int | None = None
    documents: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        check_flag("is_causal", self.is_causal)
        # A frozen dataclass forbids normal assignment.
        object.__setattr__(self, "window", as_window(self.window))
        object.__setattr__(self, "documents", _per_entry(self.documents))
        object.__setattr__(self, "totals", tuple(sum(entry) for entry in self.documents or ()))
        if any(total > UNLIMITED for total in self.totals):
            raise ValueError(f"documents sum to {max(self.totals)} tokens: the sum must be at most 2**62")
        lengths = [length for entry in self.documents or () for length in entry]
        real = nullcontext() if torch.compiler.is_compiling() else unset_fake_temporarily()
        with torch.inference_mode(False), real:  # for later use in training
            object.__setattr__(self, "lengths", torch.tensor(lengths, dtype=torch.int64, device="cpu"))

    def __reduce__(self):
        return Mask, (self.is_causal, self.window, self.documents)

    @classmethod
    def causal(cls, window: int | None = None, documents: Lengths | None = None) -> "Mask":
        """Return a mask in which a query attends to the key at its own position and to all keys before it.

        Args:
            window: the number of newest keys that a query attends to, including its own. None for all keys.
            documents: the lengths of packed documents, which sum to S: one list or tensor for all batch entries, or one per
                batch entry. Instead of cu_seqlens, pass `cu_seqlens.diff()`. A query attends only to keys of its own document.

        Raises:
            ValueError: the window is not an integer of at least 1, or a length is not an integer of at least 0.
        """
        return cls(True, window, _per_entry(documents))

    @classmethod
    def full(cls, window: int | None = None, documents: Lengths | None = None) -> "Mask":
        """Return a mask in which a query attends to keys on both sides, less than `window` positions away.

        Arguments as for `causal`.
        """
        return cls(False, window, _per_entry(documents))

    def check(self, seq_len: int, batch: int | None = None) -> None:
        """Check that the documents describe `batch` sequences of `seq_len` tokens. None allows any number of sequences.

        Raises:
            ValueError: the lengths of a batch entry do not sum to `seq_len`, or the number of lists is neither 1 nor `batch`.
        """
        if self.documents is None:
            return
        seq_len, batch = as_integer("seq_len", seq_len), None if batch is None else as_integer("batch", batch)
        for total in self.totals:
            if total != seq_len:
                raise ValueError(
                    f"documents sum to {total} tokens but the sequence has {seq_len}: the two must be equal; for cu_seqlens, "
                    "pass cu_seqlens.diff()"
                )
        if batch is not None and len(self.totals) not in (1, batch):
            raise ValueError(
                f"documents for {len(self.totals)} batch entries, but the batch has {batch}: pass one list, or {batch}"
            )

    def intervals(self, seq_len: int, num_queries: int | None = None) -> tuple[Tensor, Tensor]:
        """Return int64 tensors (lo, hi) of shape (1 or B, num_queries) on the CPU: query i attends to positions lo[:, i] to
        hi[:, i] - 1.

        The queries are at the last `num_queries` of `seq_len` positions. None means `seq_len`. Surplus queries have
        negative positions.

        Raises:
            ValueError: the documents do not sum to `seq_len`, or a query would be at a position before the first document.
        """
        lo, hi = shared_intervals(self, seq_len, seq_len - _first_query(self, seq_len, num_queries))
        return lo.clone(), hi.clone()

    def pairs(self, seq_len: int, num_queries: int | None = None) -> list[int]:
        """Return the number of (query, key) pairs of each batch entry, or one number. Arguments as for `intervals`."""
        first = _first_query(self, seq_len, num_queries)
        starts = np.unique(np.clip(np.concatenate(((first, seq_len), *kinks(self, seq_len))), first, seq_len))
        lo, hi = (x + y for x, y in zip(*(intervals_at(self, seq_len, x) for x in (starts[:-1], starts[1:] - 1)), strict=True))
        return ((hi - lo) * np.diff(starts) // 2).sum(1).tolist()

    @classmethod
    def from_lengths(cls, is_causal: bool, window: int | None, lengths: Sequence[int], seq_len: int) -> "Mask":
        """Return the mask with these `Mask.lengths`."""
        ends = [i + 1 for i, total in enumerate(accumulate(lengths)) if total % seq_len == 0]
        entries = tuple(tuple(lengths[begin:end]) for begin, end in pairwise([0, *ends]))
        return cls(is_causal, window, entries or None)


def as_window(window: object) -> int | None:
    """Return `window` as an int of at most 2**62, or None. Raise ValueError unless it is an integer of at least 1."""
    if window is None:
        return None
    return min(as_integer("window", window, 1, None, "; window=None means no window"), UNLIMITED)


def check_mask(mask: Mask) -> None:
    if not isinstance(mask, Mask):
        raise ValueError(
            f"mask is a {type(mask).__name__}: it must be a ringattn.Mask, in which every query attends to one interval of "
            "keys; for patterns of blocks use flash_attention(..., blocks=BlockMask(...))"
        )


@lru_cache(maxsize=8)
@unset_fake_temporarily()  # the cached tensors must be real tensors, because a later call may need their values
def shared_intervals(mask: Mask, seq_len: int, num_queries: int) -> tuple[Tensor, Tensor]:
    """Return `Mask.intervals` as cached tensors, which must not be modified."""
    first = _first_query(mask, seq_len, num_queries)
    lo, hi = intervals_at(mask, seq_len, np.arange(first, seq_len))
    return torch.from_numpy(lo), torch.from_numpy(hi)


def _first_query(mask: Mask, seq_len: int, num_queries: int | None) -> int:
    seq_len = as_integer("seq_len", seq_len)
    num_queries = None if num_queries is None else as_integer("num_queries", num_queries)
    if mask.documents is not None and (num_queries or 0) > seq_len:
        raise ValueError(f"{num_queries} queries, but {seq_len} keys in documents: every query must belong to a document")
    return 0 if num_queries is None else seq_len - num_queries


def intervals_at(mask: Mask, seq_len: int, positions: np.ndarray, transposed: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the intervals (lo, hi) of the queries at some positions: int64 (1 or B, number of positions).

    Args:
        seq_len: the number of positions of keys.
        positions: int64 (n,), the positions of the queries, negative before the sequence.
        transposed: treat `positions` as positions of keys, and return the interval of queries that attend to each key.

    Raises:
        ValueError: the documents do not sum to `seq_len`.
    """
    before, after = _reach(mask, transposed)
    lo, hi = np.empty((2, len(_edges(mask, seq_len)), len(positions)), dtype=np.int64)
    for i, edges in enumerate(_edges(mask, seq_len)):
        document = edges[1:-1].searchsorted(positions, side="right")
        np.maximum(edges[document], positions - before, out=lo[i])
        np.minimum(edges[document + 1], positions + (after + 1), out=hi[i])
    # For causal queries at negative positions, hi would be negative.
    return lo, np.maximum(hi, 0, out=hi)


def kinks(mask: Mask, seq_len: int, transposed: bool = False) -> list[np.ndarray]:
    """Return the positions between which lo and hi are constant or grow by 1 per position.

    The positions are unsorted, and may be outside the sequence. There is one int64 array per batch entry. Arguments as for
    `intervals_at`.
    """
    before, after = _reach(mask, transposed)
    return [np.concatenate((edges, edges[:-1] + before, edges[1:] - (after + 1), [-after])) for edges in _edges(mask, seq_len)]


def _reach(mask: Mask, transposed: bool) -> tuple[int, int]:
    # The limit prevents an overflow.
    reach = min(mask.window or UNLIMITED, UNLIMITED) - 1
    before, after = reach, 0 if mask.is_causal else reach
    return (after, before) if transposed else (before, after)


@lru_cache(maxsize=8)
def _edges(mask: Mask, seq_len: int) -> tuple[np.ndarray, ...]:
    mask.check(seq_len)
    return tuple(np.cumsum((0, *entry)) for entry in mask.documents or ((seq_len,),))
