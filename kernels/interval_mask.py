"""Interval masks: query row i may see the key rows [lo[i], hi[i]) and no others.

`lo` and `hi` are int32 tensors of shape (B or 1, Nq) that never decrease along a row, 0 <= lo, hi <= Nk; lo >= hi is an
empty row. Causal, window, document and full masks and their intersections, on any sorted shard, all have this form.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ringattn.kernels import tile_scheduler

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
    _tables: dict[tuple, Tensor] = field(default_factory=dict, init=False, repr=False)  # by the method's name and arguments

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

        bounds = tuple(part(x) for x in self.host)
        return self._placed(bounds, keys.stop - keys.start, self.device, self.wait, self.of_keys)

    def tiles(self, rows: int, step: int, cut: bool = True, aligned: bool = False) -> Tensor:
        """The tiles of at most `rows` rows that cover all rows, in the order in which programs take them.

        Bounds never decrease, so the rows [first, end) of a tile together see the keys [lo of the first, hi of the last),
        and all of them see [lo of the last, hi of the first). The tile walks over steps of `step` keys, step i from key
        begin + i * step on: num_masked_prefix steps to mask, then num_unmasked that all rows see, then the rest to mask.

        Tiles end where a document does: one that reached over its end would walk over the whole history of a long document
        for few of its rows. Between these cuts tiles are laid such that the one with fewer rows is where walks are short under
        a causal mask: rows end with a whole tile, rows of a transposed mask begin with one.

        Args:
            rows: of a tile.
            step: keys of a step.
            cut: whether tiles end where documents do. Else tile i has the rows from i * rows on.
            aligned: whether begin is a multiple of `step`, at or before the first key that is seen.

        Returns:
            int32 (batch, T, 6) on the device: first, end, begin, num_masked_prefix, num_unmasked, num_masked, the latter the number of all
            steps to mask. The longest walks come first; empty tiles, all 0, fill up entries that have fewer.
        """
        key = "tiles", rows, step, cut, aligned
        if key not in self._tables:
            self._tables[key] = _copy(self._lay(rows, step, cut, aligned), self.device, self.wait)
        return self._tables[key]

    def _lay(self, rows: int, step: int, cut: bool = True, aligned: bool = False) -> Tensor:
        """`tiles`, on the CPU."""
        pieces = tile_scheduler.cut_rows(self.host[self.of_keys], CUT * rows if cut else self.num_keys + 1)
        first, end = tile_scheduler.lay(*pieces, rows, from_end=cut and not self.of_keys)
        walks = tile_scheduler.walks(*self.host, first, end, step, step if aligned else 1)
        return tile_scheduler.by_length(first, end, walks, *self.lo.shape)

    @cached_property
    def num_seeing(self) -> int:
        """How many rows, of all masks together, see some key."""
        lo, hi = self.host
        return int((lo < hi).sum())

    @property
    def all_see(self) -> bool:
        """Whether every row sees some key."""
        return self.num_seeing == self.lo.numel()

    def lay_as(self, other: "Intervals") -> None:
        """Make the tables that were asked of `other`, and of its transpose: those of a mask that kernels will use alike."""
        for kind, *options in other._tables:
            getattr(self, kind)(*options)
        if "transposed" in vars(other):
            self.transposed.lay_as(other.transposed)

    def items(
        self,
        rows: int,
        step: int,
        batch: int,
        heads: int,
        sections: int,
        programs: int,
        seeing: bool = False,
        group: int | None = None,
    ) -> Tensor:
        """The tiles of all heads, dealt out to programs: see `ringattn.kernels.tile_scheduler.deal`.

        Args:
            rows, step: as for `tiles`.
            batch: entries; one mask serves all, or each has its own.
            heads: of an entry.
            sections: in which the heads of the whole batch are worked off.
            programs: at most as many take items.
            seeing: whether tiles whose rows see no key are left out.
            group: of the backward, whose walks are aligned: how many query heads in turn walk over the steps of an item.

        Returns:
            int32 (n, programs, 8) on the device.
        """
        key = "items", rows, step, batch, heads, sections, programs, seeing, group
        if key not in self._tables:
            tiles = self._lay(rows, step, aligned=group is not None)
            items = tile_scheduler.in_sections(tiles.expand(batch, -1, -1), heads, sections)
            if seeing:
                items = items[items[:, 4] + items[:, 5] > 0]
            if group is None:
                items = tile_scheduler.split_last(items, programs, rows)
                times = tile_scheduler.forward_times(items)
            else:
                times = tile_scheduler.backward_times(items, group)
            self._tables[key] = _copy(tile_scheduler.deal(items, times, programs), self.device, self.wait)
        return self._tables[key]


def full(num_queries: int, num_keys: int, device: torch.device | str = "cpu") -> Intervals:
    """The mask under which every query sees every key."""
    lo = torch.zeros(1, num_queries, dtype=torch.int32, device="cpu")
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
    """`x` of the CPU on `device`.

    Raises:
        RuntimeError: while a CUDA graph is being captured: it would copy anew from memory that is given back.
    """
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("this mask was not used with these shapes: call it once before it is captured in a CUDA graph")
    if on_gpu and not wait:
        x = x.pin_memory()  # or the host would wait for the stream
    return x.to(device, non_blocking=not wait)
