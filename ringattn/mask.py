"""Define masks in which every query may attend to one interval of key positions.

From one query to the next, neither end of the interval ever decreases. Examples are causal masks, sliding windows, packed
documents, full attention and their intersections. Two integers per query therefore describe a mask. Only `intervals_at`
interprets windows, documents and `Pieces`.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ringattn.kernels.validation import as_integer, check_flag, shown

UNLIMITED = 2**62  # a window that is longer than every sequence
OF_PIECES = -1  # marks a mask with pieces in `Mask.reach`
Window = int | tuple[int | None, int | None] | None
Lengths = Sequence[int] | Sequence[Sequence[int]] | Tensor | Sequence[Tensor]


def _per_entry(documents: Any) -> tuple[tuple[int, ...], ...] | None:
    if documents is None:
        return None
    try:
        entries = tuple(x.tolist() if hasattr(x, "tolist") else x for x in documents)
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


class Pieces(NamedTuple):
    """A `Pieces` tuple describes the intervals [lo, hi) of S queries. In each piece of positions, lo and hi are constant or
    grow by 1 per position.

    Piece i has the positions start[i] to start[i + 1] - 1. Its first interval is [lo[i], hi[i]). The slopes are 0 or 1.
    """

    start: tuple[int, ...]  # ends with S
    lo: tuple[int, ...]
    lo_slope: tuple[int, ...]
    hi: tuple[int, ...]
    hi_slope: tuple[int, ...]

    @classmethod
    def of(cls, lo: np.ndarray, hi: np.ndarray) -> "Pieces":
        """Divide the int64 bounds lo and hi (S,) into pieces. Neither bound may decrease."""
        steps = np.diff(np.stack((lo, hi)))
        jumps = steps.max(0) > 1
        bends = np.any(steps[:, 1:] != steps[:, :-1], 0) & ~jumps[1:] & ~jumps[:-1]
        start = np.unique(np.concatenate(([0], np.flatnonzero(jumps) + 1, np.flatnonzero(bends) + 1)))
        slopes = np.pad(np.where(jumps, 0, steps), ((0, 0), (0, 1)))[:, start]
        columns = np.append(start, len(lo)), lo[start], slopes[0], hi[start], slopes[1]
        return cls(*(tuple(x.tolist()) for x in columns))

    @classmethod
    def unpack(cls, numbers: Sequence[int]) -> Iterator["Pieces"]:
        """Yield the pieces of each batch entry. The argument is `Mask.numbers.tolist()`."""
        remaining = iter(numbers)
        for count in remaining:
            yield cls(*(tuple(islice(remaining, count + extra)) for extra in (1, 0, 0, 0, 0)))

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the bounds lo and hi of the queries at `positions`, as int64."""
        start, lo, lo_slope, hi, hi_slope = (np.array(x, dtype=np.int64) for x in self)
        i = start[1:-1].searchsorted(positions, side="right")
        offset = positions - start[i]
        return lo[i] + lo_slope[i] * offset, hi[i] + hi_slope[i] * offset


@dataclass(frozen=True)
class Mask:
    """A mask determines which keys each query may attend to. Create masks with `Mask.causal`, `Mask.full` and
    `Mask.from_intervals`.

    With `Mask(window=(left, right))`, a query attends to `left` earlier keys, its own key and `right` later keys. If `left` or
    `right` is None, the query attends to all keys on that side.

    The attribute `reach` is (left, right), with 2**62 for None. The attribute `totals` contains the number of tokens of each
    batch entry. The int64 tensor `numbers` contains all document lengths or all pieces.
    """

    is_causal: bool = False
    window: Window = None
    documents: tuple[tuple[int, ...], ...] | None = None
    pieces: tuple[Pieces, ...] | None = None

    # `reach` must not be a field, because FSDP copies masks by passing all fields to the constructor.
    reach = (UNLIMITED, UNLIMITED)
    totals: tuple[int, ...] = ()  # torch.compile guards on them

    def __post_init__(self) -> None:
        check_flag("is_causal", self.is_causal)
        is_causal, window, reach = _resolve_window(self.is_causal, self.window)
        documents, pieces = _per_entry(self.documents), self.pieces
        if pieces is None:
            entries, totals = documents or (), tuple(sum(entry) for entry in documents or ())
        elif documents is None and window is None:
            entries, totals = tuple((len(x.lo), *chain(*x)) for x in pieces), tuple(x.start[-1] for x in pieces)
            is_causal, reach = False, (OF_PIECES, OF_PIECES)
        else:
            raise ValueError("a mask from intervals has no window and no documents: apply them to the intervals")
        if any(total > UNLIMITED for total in totals):
            raise ValueError(f"documents sum to {max(totals)} tokens: the sum must be at most 2**62")
        numbers = [number for entry in entries for number in entry]
        object.__setattr__(self, "is_causal", is_causal)
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "documents", documents)
        object.__setattr__(self, "reach", reach)
        object.__setattr__(self, "totals", totals)
        real = nullcontext() if torch.compiler.is_compiling() else unset_fake_temporarily()
        with torch.inference_mode(False), real:  # for later use in training
            object.__setattr__(self, "numbers", torch.tensor(numbers, dtype=torch.int64, device="cpu"))

    def __reduce__(self):
        return Mask, (self.is_causal, self.window, self.documents, self.pieces)

    @classmethod
    def causal(cls, window: Window = None, documents: Lengths | None = None) -> "Mask":
        """Return a mask in which a query attends to its own key and to all earlier keys.

        Args:
            window: the number of newest keys per query, including its own; None for all keys.
            documents: the lengths of packed documents, which sum to S. Pass one list or tensor for all batch entries, or one
                per entry. Instead of cu_seqlens, pass `cu_seqlens.diff()`. A query attends only to keys of its own document.

        Raises:
            ValueError: the window is not an integer >= 1, or a length is not an integer >= 0.
        """
        return cls(True, window, _per_entry(documents))

    @classmethod
    def full(cls, window: Window = None, documents: Lengths | None = None) -> "Mask":
        """Return a mask in which a query attends to keys less than `window` positions away, on both sides.

        The arguments are those of `causal`. The window may also be a pair (left, right), as in `Mask`.
        """
        return cls(False, window, _per_entry(documents))

    @classmethod
    def from_intervals(cls, lo: Any, hi: Any) -> "Mask":
        """Return the mask in which query i attends to the keys lo[i] to hi[i] - 1.

        For example, lo[i] = 0 and hi[i] = max(n, i + 1) let all queries attend to the first n keys.

        Args:
            lo, hi: integers on the CPU, (S,) for all batch entries or (B, S), with 0 <= lo <= hi <= S. Neither lo nor hi may
                decrease from one query to the next.

        Raises:
            ValueError: lo or hi is invalid.
        """
        intervals = _as_intervals(lo, hi)
        return cls(pieces=tuple(Pieces.of(*entry) for entry in intervals))

    def check(self, seq_len: int, batch: int | None = None) -> None:
        """Check that the documents describe `batch` sequences of `seq_len` tokens. With batch=None, any number of sequences is
        allowed.

        Raises:
            ValueError: a list of lengths does not sum to `seq_len`, or the number of lists is neither 1 nor `batch`.
        """
        if not self.totals:
            return
        seq_len, batch = as_integer("seq_len", seq_len), None if batch is None else as_integer("batch", batch)
        for total in self.totals:
            if total != seq_len and self.pieces is not None:
                raise ValueError(
                    f"the mask has intervals of {total} queries, but the sequence has {seq_len} tokens: they must be equal"
                )
            if total != seq_len:
                raise ValueError(
                    f"documents sum to {total} tokens but the sequence has {seq_len}: the two must be equal; for cu_seqlens, "
                    "pass cu_seqlens.diff()"
                )
        if batch is not None and len(self.totals) not in (1, batch):
            name = "documents" if self.pieces is None else "intervals"
            raise ValueError(
                f"{name} for {len(self.totals)} batch entries, but the batch has {batch}: pass one list, or {batch}"
            )

    def intervals(self, seq_len: int, num_queries: int | None = None) -> tuple[Tensor, Tensor]:
        """Return (lo, hi), int64 (1 or B, num_queries) on the CPU. Query i attends to positions lo[:, i] to hi[:, i] - 1.

        The queries are at the last `num_queries` positions. None means all positions. If there are more queries than positions,
        the first queries have negative positions.

        Raises:
            ValueError: the lengths of the documents do not sum to `seq_len`, or a query belongs to no document.
        """
        lo, hi = shared_intervals(self, seq_len, seq_len - _first_query(self, seq_len, num_queries))
        return lo.clone(), hi.clone()

    def pairs(self, seq_len: int, num_queries: int | None = None) -> list[int]:
        """Return the number of allowed (query, key) pairs of each batch entry, or one number for all entries.

        Arguments as for `intervals`.
        """
        first = _first_query(self, seq_len, num_queries)
        starts = np.unique(np.clip(np.concatenate(((first, seq_len), *kinks(self, seq_len))), first, seq_len))
        lo, hi = (x + y for x, y in zip(*(intervals_at(self, seq_len, x) for x in (starts[:-1], starts[1:] - 1)), strict=True))
        return ((hi - lo) * np.diff(starts) // 2).sum(1).tolist()

    @classmethod
    def from_numbers(cls, reach: tuple[int, int], numbers: Sequence[int], seq_len: int) -> "Mask":
        if OF_PIECES in reach:
            return cls(pieces=tuple(Pieces.unpack(numbers)))
        ends = [i + 1 for i, total in enumerate(accumulate(numbers)) if total % seq_len == 0]
        entries = tuple(tuple(numbers[begin:end]) for begin, end in pairwise([0, *ends]))
        left, right = (None if x == UNLIMITED else x for x in reach)
        return cls(window=(left, right), documents=entries or None)


def as_window(window: object) -> int | None:
    """Return `window` as an int of at most 2**62, or None. Raise ValueError unless `window` is None or an integer of at least
    1.
    """
    if window is None:
        return None
    return min(as_integer("window", window, 1, None, "; window=None means no window"), UNLIMITED)


def causal_window(window: Window) -> int | None:
    """Return the window of a causal mask as a number of keys. Errors as for `Mask.causal`."""
    _, _, (left, _) = _resolve_window(True, window)
    return None if left == UNLIMITED else left + 1


def _resolve_window(is_causal: bool, window: Window) -> tuple[bool, Window, tuple[int, int]]:
    if not isinstance(window, (tuple, list)):
        size = as_window(window)
        left = UNLIMITED if size is None else size - 1
        return is_causal, size, (left, 0 if is_causal else left)
    if len(window) != 2:
        raise ValueError(
            f"window={shown(window)}: a pair must be (left, right), the numbers of keys before and after the query"
        )
    remedy = "; None means all keys on this side"
    left, right = (UNLIMITED if x is None else min(as_integer("window", x, 0, None, remedy), UNLIMITED) for x in window)
    if is_causal and right:
        raise ValueError(f"window={shown(window)} of a causal mask: the second number must be 0; use Mask(window=...)")
    if right == 0 or left == right:
        return right == 0, None if left == UNLIMITED else left + 1, (left, right)
    return False, (None if left == UNLIMITED else left, None if right == UNLIMITED else right), (left, right)


def _as_intervals(lo: Any, hi: Any) -> np.ndarray:
    values = f"lo={shown(lo)}, hi={shown(hi)}"
    try:
        first, last = (np.atleast_2d(np.asarray(x)) for x in (lo, hi))
        intervals = np.stack(np.broadcast_arrays(first, last), 1)
        if intervals.ndim != 3 or not intervals.size or intervals.dtype.kind not in "iu":
            raise TypeError
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{values}: both must be integers of shape (S,) or (B, S), S > 0, on the CPU") from None
    intervals, seq_len = intervals.astype(np.int64), first.shape[1]
    if intervals.min() < 0 or intervals.max() > seq_len or (intervals[:, 0] > intervals[:, 1]).any():
        raise ValueError(f"{values}: 0 <= lo <= hi <= {seq_len} must hold for every query")
    if (np.diff(intervals) < 0).any():
        raise ValueError(f"{values}: neither may decrease from one query to the next; for other masks use BlockMask")
    return intervals


def check_mask(mask: Mask) -> None:
    if not isinstance(mask, Mask):
        raise ValueError(
            f"mask is a {type(mask).__name__}: it must be a ringattn.Mask, in which every query attends to one interval of "
            "keys; for patterns of blocks use flash_attention(..., blocks=BlockMask(...))"
        )


@lru_cache(maxsize=8)
@unset_fake_temporarily()  # cache real tensors, because later calls need values
def shared_intervals(mask: Mask, seq_len: int, num_queries: int) -> tuple[Tensor, Tensor]:
    """Return `Mask.intervals` as cached tensors, which must not be modified."""
    first = _first_query(mask, seq_len, num_queries)
    lo, hi = intervals_at(mask, seq_len, np.arange(first, seq_len))
    return torch.from_numpy(lo), torch.from_numpy(hi)


def _first_query(mask: Mask, seq_len: int, num_queries: int | None) -> int:
    seq_len = as_integer("seq_len", seq_len)
    num_queries = None if num_queries is None else as_integer("num_queries", num_queries)
    if mask.totals and (num_queries or 0) > seq_len:
        raise ValueError(f"{num_queries} queries, but {seq_len} keys in documents: every query must belong to a document")
    return 0 if num_queries is None else seq_len - num_queries


def intervals_at(mask: Mask, seq_len: int, positions: np.ndarray, transposed: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the intervals (lo, hi) of the queries at `positions`, int64 (1 or B, n).

    Args:
        seq_len: the number of positions of keys.
        positions: int64 (n,), the positions of the queries, which may be negative.
        transposed: whether `positions` are keys. With transposed=True, return the interval of queries that attend to each key.

    Raises:
        ValueError: the documents do not sum to `seq_len`.
    """
    if mask.pieces is not None:
        mask.check(seq_len)
        intervals = [(_transpose(x) if transposed else x).at(positions) for x in mask.pieces]
        return np.stack([lo for lo, _ in intervals]), np.stack([hi for _, hi in intervals])
    before, after = _reach(mask, transposed)
    lo, hi = np.empty((2, len(_edges(mask, seq_len)), len(positions)), dtype=np.int64)
    for i, edges in enumerate(_edges(mask, seq_len)):
        document = edges[1:-1].searchsorted(positions, side="right")
        np.maximum(edges[document], positions - before, out=lo[i])
        np.minimum(edges[document + 1], positions + (after + 1), out=hi[i])
    return lo, np.maximum(hi, 0, out=hi)


def kinks(mask: Mask, seq_len: int, transposed: bool = False) -> list[np.ndarray]:
    """Return the positions at which the slope of lo or hi may change: one int64 array per batch entry.

    The returned positions are unsorted, and may lie outside the sequence. Arguments as for `intervals_at`.
    """
    if mask.pieces is not None:
        return [np.array((_transpose(x) if transposed else x).start) for x in mask.pieces]
    before, after = _reach(mask, transposed)
    return [np.concatenate((edges, edges[:-1] + before, edges[1:] - (after + 1), [-after])) for edges in _edges(mask, seq_len)]


def _reach(mask: Mask, transposed: bool) -> tuple[int, int]:
    before, after = (min(x, UNLIMITED - 1) for x in mask.reach)  # the limit prevents an overflow
    return (after, before) if transposed else (before, after)


@lru_cache(maxsize=8)
def _transpose(pieces: Pieces) -> Pieces:
    positions = np.arange(pieces.start[-1])
    lo, hi = pieces.at(positions)
    return Pieces.of(hi.searchsorted(positions, side="right"), lo.searchsorted(positions, side="right"))


@lru_cache(maxsize=8)
def _edges(mask: Mask, seq_len: int) -> tuple[np.ndarray, ...]:
    mask.check(seq_len)
    return tuple(np.cumsum((0, *entry)) for entry in mask.documents or ((seq_len,),))
