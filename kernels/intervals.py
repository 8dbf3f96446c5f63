"""Interval masks: query row i may see the key rows [lo[i], hi[i]) and no others.

`lo` and `hi` are int32 tensors of shape (B or 1, Nq) that never decrease along a row, 0 <= lo, hi <= Nk; lo >= hi is an
empty row. Causal, window, document and full masks and their intersections, on any sorted shard, all have this form.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

CUT = 4  # tiles of rows that a bound must jump by, from one row to the next, for tiles to end there


@dataclass(frozen=True, eq=False)
class Intervals:
    """One mask, and what follows from it alone, computed once on the host: build it once a mask and pass it to every call.

    Made by `Intervals.of` or `full`. Two are equal only if they are one object.
    """

    lo: Tensor  # int32 (1 or B, rows), on the device of the kernels
    hi: Tensor
    num_keys: int
    host: tuple[Tensor, Tensor] = field(repr=False)  # lo and hi on the CPU
    wait: bool  # for copies to the device
    of_keys: bool = False  # whether the rows are keys, and the "keys" queries: see `transposed`
    _tables: dict[tuple[int, int, bool, bool], Tensor] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, lo: Tensor, hi: Tensor, num_keys: int, device: torch.device | str = "cpu", wait: bool = True) -> "Intervals":
        """The mask of these bounds, for kernels on `device`.

        Args:
            lo, hi: integers (1 or B, Nq) on the CPU.
            num_keys: Nk.
            wait: whether the host waits until copies, those of tables too, have arrived. If not, they are queued in the current
                stream, and the mask may be used in this stream only.

        Raises:
            ValueError: bounds of unlike shapes, elsewhere than on the CPU, that decrease along a row or leave [0, num_keys].
        """
        if lo.dim() != 2 or lo.shape != hi.shape:
            raise ValueError(f"lo has shape {tuple(lo.shape)}, hi {tuple(hi.shape)}: both must be (1 or batch, query rows)")
        for name, x in (("lo", lo), ("hi", hi)):
            if x.device.type != "cpu" or x.is_floating_point():
                raise ValueError(f"{name} is {x.dtype} on {x.device}, but bounds must be integers on the CPU")
            if x.numel() and (x[:, 0].min() < 0 or x[:, -1].max() > num_keys or (x.diff() < 0).any()):
                raise ValueError(f"{name} must never decrease along a row, and stay within [0, {num_keys}]")
        return cls._placed((lo, hi), num_keys, device, wait)

    @classmethod
    def _placed(
        cls, host: tuple[Tensor, Tensor], num_keys: int, device: torch.device | str, wait: bool, of_keys: bool = False
    ) -> "Intervals":
        host = tuple(x.to(torch.int32).contiguous() for x in host)
        return cls(*(_copy(x, device, wait) for x in host), num_keys, host, wait, of_keys)

    @property
    def batch(self) -> int:
        """How many masks there are: one for each batch entry, or 1 for all."""
        return self.lo.shape[0]

    @property
    def num_rows(self) -> int:
        return self.lo.shape[1]

    @property
    def device(self) -> torch.device:
        return self.lo.device

    @cached_property
    def transposed(self) -> "Intervals":
        """The same mask seen from the keys: key j is seen by the query rows [lo[j], hi[j])."""
        bounds = transpose(*self.host, self.num_keys)
        return self._placed(bounds, self.num_rows, self.device, self.wait, not self.of_keys)

    def cut(self, rows: slice, keys: slice) -> "Intervals":
        """The mask of these rows and keys alone, counted from the first of each; both slices have a start and a stop."""

        def part(bound: Tensor) -> Tensor:
            return (bound[:, rows] - keys.start).clamp(0, keys.stop - keys.start)

        host = tuple(part(x) for x in self.host)
        placed = host if self.device.type == "cpu" else (part(self.lo), part(self.hi))
        return Intervals(*placed, keys.stop - keys.start, host, self.wait, self.of_keys)

    def tiles(self, rows: int, step: int, cut: bool = True, aligned: bool = False) -> Tensor:
        """The tiles of at most `rows` rows that cover all rows, in the order in which programs take them.

        Bounds never decrease, so the rows [first, end) of a tile together see the keys [lo of the first, hi of the last),
        and all of them see [lo of the last, hi of the first). The tile walks over steps of `step` keys, step i from key
        begin + i * step on: num_head steps to mask, then num_full that all rows see, then the rest to mask.

        Tiles end where a document does: one that reached over its end would walk over the whole history of a long document
        for few of its rows. Between these cuts tiles are laid such that the one with fewer rows is where walks are short under
        a causal mask: rows end with a whole tile, rows of a transposed mask begin with one.

        Args:
            rows: of a tile.
            step: keys of a step.
            cut: whether tiles end where documents do. Else tile i has the rows from i * rows on.
            aligned: whether begin is a multiple of `step`, at or before the first key that is seen.

        Returns:
            int32 (batch, T, 6) on the device: first, end, begin, num_head, num_full, num_edge, the latter the number of all
            steps to mask. The longest walks come first; empty tiles, all 0, fill up entries that have fewer.
        """
        key = rows, step, cut, aligned
        if key not in self._tables:
            pieces = _pieces(self.host[self.of_keys], CUT * rows if cut else self.num_keys + 1)
            first, end = _lay(*pieces, rows, from_end=cut and not self.of_keys)
            walks = _walks(*self.host, first, end, step, step if aligned else 1)
            table = _by_length(first, end, walks, *self.lo.shape)
            self._tables[key] = _copy(table, self.device, self.wait)
        return self._tables[key]


def full(num_queries: int, num_keys: int, device: torch.device | str = "cpu") -> Intervals:
    """The mask under which every query sees every key."""
    lo = torch.zeros(1, num_queries, dtype=torch.int32)
    return Intervals.of(lo, torch.full_like(lo, num_keys), num_keys, device)


def transpose(lo: Tensor, hi: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """The same mask seen from the keys: key j is seen by the query rows [query_lo[j], query_hi[j]).

    Because lo and hi never decrease, the rows with hi > j are a suffix and the rows with lo <= j a prefix.

    Args:
        lo, hi: int32 (B or 1, Nq), non-decreasing.
        num_keys: Nk.

    Returns:
        query_lo, query_hi: int32 (B or 1, Nk), non-decreasing; query_lo >= query_hi where no query sees the key.
    """
    return _count_up_to(hi, num_keys), _count_up_to(lo, num_keys)


def _count_up_to(bound: Tensor, num_keys: int) -> Tensor:
    """How many of the bounds of each row of (B, N) are at most j, for every key j: int32 (B, Nk)."""
    batch, size = bound.shape[0], num_keys + 1
    entry = torch.arange(batch, device=bound.device)[:, None]
    counts = torch.bincount((bound + entry * size).flatten(), minlength=batch * size)
    return counts.view(batch, size)[:, :num_keys].cumsum(1, dtype=torch.int32)


def dense(lo: Tensor, hi: Tensor, num_keys: int) -> Tensor:
    """The mask written out as booleans (B or 1, Nq, Nk): for the reference and for tests, never for training."""
    keys = torch.arange(num_keys, device=lo.device)
    return (lo[..., None] <= keys) & (keys < hi[..., None])


def _copy(x: Tensor, device: torch.device | str, wait: bool) -> Tensor:
    """`x` of the CPU on `device`."""
    if not wait and torch.device(device).type == "cuda":
        x = x.pin_memory()  # or the host would wait for the stream
    return x.to(device, non_blocking=not wait)


# Below, the rows of all batch entries are counted through: row i of entry b is b * N + i.


def _pieces(bound: Tensor, jump: int) -> tuple[Tensor, Tensor]:
    """(first rows, ends) of the pieces of rows (B, N) inside which `bound` does not jump by `jump` from row to row; int64."""
    starts = torch.ones(bound.shape, dtype=torch.bool)
    starts[:, 1:] = bound.diff() >= jump
    rows = starts.flatten().nonzero()[:, 0]
    return rows, torch.cat((rows[1:], torch.tensor([bound.numel()])))


def _lay(start: Tensor, stop: Tensor, rows: int, from_end: bool) -> tuple[Tensor, Tensor]:
    """(first, end) of the tiles of `rows` rows of pieces; the one with fewer is the first of its piece, or else the last."""
    counts = _ceil_div(stop - start, rows)
    piece, index = _unroll(counts)
    start, stop = start[piece], stop[piece]
    if from_end:
        end = stop - (counts[piece] - 1 - index) * rows
        return torch.maximum(end - rows, start), end
    first = start + index * rows
    return first, torch.minimum(first + rows, stop)


def _walks(lo: Tensor, hi: Tensor, first: Tensor, end: Tensor, step: int, alignment: int) -> tuple[Tensor, ...]:
    """begin, num_head, num_full, num_edge of tiles, see `Intervals.tiles`."""
    lo, hi = lo.flatten(), hi.flatten()
    begin = lo[first] // alignment * alignment
    total = _ceil_div((hi[end - 1] - begin).clamp(min=0), step)
    num_head = torch.minimum(_ceil_div(lo[end - 1] - begin, step), total)
    num_full = ((hi[first] - begin).clamp(min=0) // step - num_head).clamp(min=0)
    return begin, num_head, num_full, total - num_full


def _by_length(first: Tensor, end: Tensor, walks: tuple[Tensor, ...], batch: int, num_rows: int) -> Tensor:
    """The table (batch, T, 6) of these tiles: those of each entry, the longest walk first."""
    entry = first // max(num_rows, 1)
    _, _, num_full, num_edge = walks
    order = (num_full + num_edge).argsort(descending=True, stable=True)
    order = order[entry[order].argsort(stable=True)]
    tiles = torch.stack([x.int() for x in (first - entry * num_rows, end - entry * num_rows, *walks)], 1)[order]
    entry, place = _unroll(torch.bincount(entry, minlength=batch))
    table = torch.zeros(batch, int(place.max()) + 1 if len(place) else 0, 6, dtype=torch.int32)
    table[entry, place] = tiles
    return table


def _unroll(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Of counts[i] elements of every owner i in a row, (their owner, their number among the owner's)."""
    owner = torch.repeat_interleave(counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]


def _ceil_div(x: Tensor, y: int) -> Tensor:
    return (x + y - 1) // y
