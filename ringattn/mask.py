"""Masks as intervals: every query may see one contiguous range of key positions, and the ranges never move back.

Causal, window, packed documents, full attention and any intersection of them have this form, so one pair of integers a query
row is all that the ring and the kernels ever see of a mask.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from operator import index

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

Lengths = Sequence[int] | Sequence[Sequence[int]] | Tensor | Sequence[Tensor]


def _per_row(documents: Lengths | None) -> tuple[tuple[int, ...], ...] | None:
    """One tuple of lengths a batch row; a flat list is one row that all share."""
    if documents is None:
        return None
    rows = tuple(x.tolist() if hasattr(x, "tolist") else x for x in documents)  # tensors and arrays are as good as lists
    if not rows or not all(isinstance(row, Sequence) for row in rows):
        rows = (rows,)
    try:
        return tuple(tuple(map(index, row)) for row in rows)
    except TypeError:
        raise ValueError(f"documents = {documents}: give lengths, which are integers, or a list of them a batch row") from None


@dataclass(frozen=True)
class Mask:
    """Which keys a query may see. Build one with `Mask.causal` or `Mask.full`.

    Made of its fields are `lengths`, all rows' document lengths in one flat int64 tensor (empty: no documents), which is how an
    operator carries them, and `totals`, the tokens of each row's documents: a compiler guards on what `check` reads, and need
    not on every length. They are no fields, so that who copies a mask field by field, as FSDP does, gets a whole one.
    """

    is_causal: bool
    window: int | None = None
    documents: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (isinstance(self.window, bool | float | tuple | list) or self.window < 1):
            raise ValueError(f"window = {self.window}: a query sees itself and whole keys before; give 1 or more, or None")
        for row in self.documents or ():
            if any(length < 1 for length in row):
                raise ValueError(
                    f"a document of {min(row)} tokens: give lengths, each at least 1; of cu_seqlens they are cu_seqlens.diff()"
                )
        object.__setattr__(self, "totals", tuple(sum(row) for row in self.documents or ()))
        lengths = [length for row in self.documents or () for length in row]
        real = nullcontext() if torch.compiler.is_compiling() else unset_fake_temporarily()
        with torch.inference_mode(False), real:  # a mask that an evaluation made may serve training, too
            object.__setattr__(self, "lengths", torch.tensor(lengths, dtype=torch.int64, device="cpu"))

    @classmethod
    def causal(cls, window: int | None = None, documents: Lengths | None = None) -> "Mask":
        """A query sees the keys at and before its own position.

        Args:
            window: only the last `window` of them, its own included. None: all.
            documents: lengths of packed documents that sum to S; a query sees its own document only. One list or tensor, or
                one a batch row. None: the sequence is one document.

        Raises:
            ValueError: a window or a length that is no integer, or below 1.
        """
        return cls(True, window, _per_row(documents))

    @classmethod
    def full(cls, window: int | None = None, documents: Lengths | None = None) -> "Mask":
        """A query sees keys on both sides; with `window`, those less than `window` positions away. Else as `causal`."""
        return cls(False, window, _per_row(documents))

    def check(self, seq_len: int, batch: int | None = None) -> None:
        """Refuse documents that do not describe `batch` sequences of `seq_len` tokens; None: any number of sequences.

        Raises:
            ValueError: lengths that do not sum to `seq_len`, or neither one row of them nor `batch`.
        """
        if self.documents is None:
            return
        for total in self.totals:
            if total != seq_len:
                raise ValueError(f"documents sum to {total} tokens but the sequence has {seq_len}: they must be equal")
        if batch is not None and len(self.totals) not in (1, batch):
            raise ValueError(f"documents for {len(self.totals)} batch rows but the batch has {batch}: give 1 or {batch}")

    def intervals(self, seq_len: int, num_queries: int | None = None) -> tuple[Tensor, Tensor]:
        """(lo, hi), int64 (1 or B, num_queries) on the CPU: query i sees the positions [lo, hi). Neither ever decreases.

        Args:
            seq_len: positions in all.
            num_queries: the last query stands at the last position, the others before it, where need be before the first.
                None: a query at every position.

        Raises:
            ValueError: documents of another length, or documents, and queries that stand before the first of them.
        """
        lo, hi = shared_intervals(self, seq_len, seq_len if num_queries is None else num_queries)
        return lo.clone(), hi.clone()

    def pairs(self, seq_len: int, num_queries: int | None = None) -> list[int]:
        """How many (query, key) pairs are computed, for each batch row; one entry if all rows share the mask.

        Args, and errors: as those of `intervals`.
        """
        lo, hi = shared_intervals(self, seq_len, seq_len if num_queries is None else num_queries)
        return (hi - lo).sum(-1).tolist()

    @classmethod
    def from_lengths(cls, is_causal: bool, window: int | None, lengths: Sequence[int], seq_len: int) -> "Mask":
        """The mask whose `lengths` these are, as integers: a row ends where its documents sum to `seq_len`."""
        rows, row, total = [], [], 0
        for length in lengths:
            row.append(length)
            total += length
            if total == seq_len:
                rows.append(tuple(row))
                row, total = [], 0
        return cls(is_causal, window, tuple(rows) or None)


def check_mask(mask: Mask) -> None:
    """Refuse what is no mask.

    Raises:
        ValueError: naming what masks are.
    """
    if not isinstance(mask, Mask):
        raise ValueError(
            f"mask is a {type(mask).__name__}: give a ringattn.Mask, of which every row sees one interval of keys; other "
            "patterns, by blocks, are flash_attention's blocks=BlockMask(...)"
        )


@lru_cache(maxsize=8)
@unset_fake_temporarily()  # kept: real tensors may ask for them later
def shared_intervals(mask: Mask, seq_len: int, num_queries: int) -> tuple[Tensor, Tensor]:
    """`mask.intervals` for all who ask: not to be changed."""
    mask.check(seq_len)
    position = torch.arange(seq_len - num_queries, seq_len, device="cpu")
    if mask.documents is None:
        lo = torch.zeros(1, num_queries, dtype=torch.int64, device="cpu")
        hi = lo + seq_len
    elif num_queries > seq_len:
        raise ValueError(f"{num_queries} queries of {seq_len} keys in documents: the first queries belong to none")
    else:
        bounds = [_document_bounds(row) for row in mask.documents]
        lo, hi = (torch.stack(x)[:, seq_len - num_queries :] for x in zip(*bounds, strict=True))
    if mask.is_causal:
        hi = torch.minimum(hi, position + 1)
    if mask.window is not None:
        window = min(mask.window, seq_len + num_queries)  # as good as any wider one, and int64 holds its sums
        lo = torch.maximum(lo, position - window + 1)
        hi = torch.minimum(hi, position + window)
    return lo, hi.clamp(min=0)


def _document_bounds(row: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """First position, and the one after the last, of the document that each position belongs to."""
    lengths = torch.tensor(row, dtype=torch.int64, device="cpu")
    end = torch.repeat_interleave(lengths.cumsum(0), lengths)
    return end - torch.repeat_interleave(lengths, lengths), end
