"""Count the work of attention between shards without looking at every token.

A run is a range of rows of one shard. Within a run, each bound (lo or hi) is constant, or grows linearly with the position of
the row. A sum over the rows of a run therefore needs only the first and the last row.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from ringattn.layout import Layout
from ringattn.mask import Mask, intervals_at, kinks


@dataclass(frozen=True, eq=False)
class Runs:
    """The R runs of all ranks, sorted by rank and row."""

    layout: Layout
    rank: np.ndarray  # (R,), the rank that holds the rows
    row: np.ndarray  # (R,), the first row
    count: np.ndarray  # (R,), the number of rows
    lo: np.ndarray  # (2, B, R), the bounds of the first row and of the last row
    hi: np.ndarray  # (2, B, R)

    @cached_property
    def before(self) -> tuple["RowsBefore", "RowsBefore"]:
        return RowsBefore(self.layout, self.lo), RowsBefore(self.layout, self.hi)

    def bounds(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (lo, hi) of all rows of `rank`: int32 (B, rows)."""
        end = int(self.num_runs[: rank + 1].sum())
        own = self.select(slice(end - int(self.num_runs[rank]), end))
        rows = np.arange(own.count.sum(), dtype=np.int32)
        bounds = []
        for first, last in (own.lo, own.hi):
            step = self.layout.stride * (last > first).astype(np.int32)
            offset = first.astype(np.int32) - step * own.row.astype(np.int32)
            bounds.append(np.repeat(step, own.count, axis=1))
            bounds[-1] *= rows
            bounds[-1] += np.repeat(offset, own.count, axis=1)
        return bounds[0], bounds[1]

    def pairs(self, rank: int | np.ndarray) -> np.ndarray:
        """For each run, count the allowed (row, column) pairs whose column belongs to `rank`, over all batch entries: int64
        (R,).
        """
        lo, hi = (x.run_sums(rank, self.count) for x in self.before)
        return (hi - lo).sum(0)

    def reduce(self, operation: np.ufunc, values: np.ndarray) -> np.ndarray:
        return reduce_by_rank(operation, values, self.num_runs)

    @cached_property
    def num_runs(self) -> np.ndarray:
        """Count the runs of each rank: int64 (ranks,)."""
        return np.bincount(self.rank, minlength=self.layout.ranks)

    def select(self, index: np.ndarray | slice) -> "Runs":
        return Runs(self.layout, *(x[..., index] for x in (self.rank, self.row, self.count, self.lo, self.hi)))

    def shorten(self, count: np.ndarray) -> "Runs":
        """Return the first `count` >= 1 rows of every run."""
        last = self.layout.stride * (count - 1)
        lo, hi = (np.stack((first, first + (end > first) * last)) for first, end in (self.lo, self.hi))
        return replace(self, count=count, lo=lo, hi=hi)


@lru_cache(maxsize=8)
def all_runs(mask: Mask, layout: Layout, transposed: bool = False) -> Runs:
    """Return the runs of all ranks. The rows are queries. With `transposed`, the rows are keys, as in `mask.intervals_at`."""
    stride, seq_len = layout.stride, layout.seq_len
    before = RowsBefore(layout, np.unique(np.concatenate(kinks(mask, seq_len, transposed)).clip(0, seq_len)))
    columns: list[list[np.ndarray]] = [[], [], [], []]
    ranks, rows, ends, positions = columns
    for rank in range(layout.ranks):
        _, count = layout.pieces(rank)
        first, end = count.cumsum() - count, int(count.sum())
        starts = np.arange(end) if stride > 1 and layout.parts > 1 else np.concatenate((first, before.rows(rank)))
        starts = np.unique(starts[starts < end])
        ranks.append(np.full(len(starts), rank))
        rows.append(starts)
        ends.append(np.append(starts[1:], end)[: len(starts)])
        positions.append(positions_of_rows(layout, rank, starts))
    rank, row, end, position = map(np.concatenate, (ranks, rows, ends, positions))
    first, last = (intervals_at(mask, seq_len, x, transposed) for x in (position, position + stride * (end - row - 1)))
    return Runs(layout, rank, row, end - row, *map(np.stack, zip(first, last, strict=True)))


class RowsBefore:
    """A `RowsBefore` object counts the rows of any rank before given positions."""

    def __init__(self, layout: Layout, positions: np.ndarray) -> None:
        """`positions` is int32 or int64 of any shape, from 0 to `layout.seq_len`. The results of `rows` have its dtype."""
        self.layout, self.positions = layout, positions

    @cached_property
    def _pieces(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        begin, owner, _, size = _piece_tables(self.layout, self.positions.dtype)
        piece = self.positions // size if size else begin.searchsorted(self.positions, side="right") - 1
        return piece, self.positions - begin.take(piece), owner.take(piece)

    @cached_property
    def _by_owner(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the flat indices of all positions, sorted by rank. Also return where the indices of each rank start."""
        _, _, owner = self._pieces
        order = owner.ravel().astype(np.int16).argsort(kind="stable")  # a radix sort, which requires 16 bits
        return order, owner.ravel()[order].searchsorted(np.arange(self.layout.ranks + 1))

    def rows(self, rank: int | np.ndarray) -> np.ndarray:
        """Count the rows of `rank` that come before each position."""
        if self.layout.ranks == 1:
            return self.positions
        if self.layout.stride == 1:
            return self._add_own(self._at_piece(0, rank), rank, self._pieces[1])
        begin, count = _strided_pieces(self.layout).astype(self.positions.dtype)
        return (-((begin[rank] - self.positions) // self.layout.stride)).clip(0, count[rank])

    def run_sums(self, rank: int | np.ndarray, count: np.ndarray) -> np.ndarray:
        """For each run, sum the counts of `RowsBefore.rows` over the rows of the run: int64 (B, R).

        `self.positions` must be the bounds `lo` or the bounds `hi` of the runs, (2, B, R). The argument `count` contains the
        number of rows of each run.
        """
        rows = self.rows(rank)
        if self.layout.stride > 1:  # `rows` is an arithmetic progression.
            return rows.sum(0) * count // 2
        # sums of `rows` over all earlier positions
        _, offset, _ = self._pieces
        sums = self._at_piece(1, rank) + self._at_piece(0, rank) * offset
        first, last = self._add_own(sums, rank, offset * (offset - 1) // 2)
        return last - first + rows[1] * np.where(self.positions[1] > self.positions[0], 1, count)

    def _at_piece(self, table: int, rank: int | np.ndarray) -> np.ndarray:
        _, _, tables, _ = _piece_tables(self.layout, self.positions.dtype)
        piece, _, _ = self._pieces
        if isinstance(rank, int):
            return tables[table, rank].take(piece)
        return tables[table].take(piece + rank * tables.shape[2])  # faster than tables[table, rank, piece]

    def _add_own(self, values: np.ndarray, rank: int | np.ndarray, extra: np.ndarray) -> np.ndarray:
        if isinstance(rank, int):
            order, first = self._by_owner
            own = order[first[rank] : first[rank + 1]]
            values.reshape(-1)[own] += extra.reshape(-1)[own]
        else:
            values += extra * (self._pieces[2] == rank)
        return values


@lru_cache(maxsize=16)
def _piece_tables(layout: Layout, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Return tables that describe the pieces (ranges of positions) of all ranks. The pieces are sorted by position. The last
    piece in the tables is empty and starts at `seq_len`.

    Returns:
        (begin, owner, tables, size). Piece i starts at position begin[i] and belongs to rank owner[i]. The entry tables[0, r,
        i] counts the rows of rank r before piece i. The entry tables[1, r, i] sums `RowsBefore.rows(r)` over all positions
        before piece i. With int32, `tables[1]` may overflow. The number `size` is the length of every piece, or 0 if the
        lengths differ.
    """
    if dtype != np.int64:
        begin, owner, tables, size = _piece_tables(layout, np.dtype(np.int64))
        return begin.astype(dtype), owner, tables.astype(dtype), size
    pieces = [layout.pieces(rank) for rank in range(layout.ranks)]
    begin, count = map(np.concatenate, zip(*pieces, strict=True))
    order = begin.argsort()
    owner = np.repeat(np.arange(layout.ranks), [len(x) for x, _ in pieces])[order]
    begin, count = begin[order], count[order]
    rows, sums = tables = np.zeros((2, layout.ranks, len(begin) + 1), dtype=np.int64)
    after = np.arange(1, len(begin) + 1)
    rows[owner, after] = count
    rows.cumsum(1, out=rows)
    sums[:, 1:] = rows[:, :-1] * count
    sums[owner, after] += count * (count - 1) // 2
    sums.cumsum(1, out=sums)
    size = int(count.max())
    size = size if (begin == size * np.arange(len(begin))).all() else 0
    return np.append(begin, layout.seq_len), np.append(owner, -1), tables, size


@lru_cache(maxsize=8)
def _strided_pieces(layout: Layout) -> np.ndarray:
    """Return (begin, count) of each rank's only piece in a striped layout: int64 (2, ranks)."""
    table = np.zeros((2, layout.ranks), dtype=np.int64)
    for rank in range(layout.ranks):
        table[:, rank] = [x.sum() for x in layout.pieces(rank)]
    return table


def positions_of_rows(layout: Layout, rank: int, rows: np.ndarray) -> np.ndarray:
    """Convert the row indices `rows` of a rank to positions in the sequence, int64 with the shape of `rows`."""
    begin, count = layout.pieces(rank)
    first = count.cumsum() - count
    piece = first.searchsorted(rows, side="right") - 1
    return begin[piece] + layout.stride * (rows - first[piece])


def reduce_by_rank(operation: np.ufunc, values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Reduce the `sizes[rank]` consecutive values of each rank: int64 (ranks,). A rank without values gets 0."""
    reduced, first = np.zeros(len(sizes), dtype=np.int64), sizes.cumsum() - sizes
    reduced[sizes > 0] = operation.reduceat(values, first[sizes > 0])
    return reduced
