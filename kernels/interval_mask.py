"""In an interval mask, query i attends to the keys [lo[i], hi[i]) and to no others.

`lo` and `hi` are int32 tensors (B or 1, Nq) that never decrease from one query to the next, with 0 <= lo, hi <= Nk. If lo >=
hi, the interval is empty. Causal, sliding-window, document and full masks and their intersections are interval masks on every
shard with sorted positions. Rows are queries and columns are keys, except in a transposed mask.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn.kernels import tile_order, tile_scheduler
from ringattn.kernels.caching import SharedTensors, check_not_capturing

# A tile also ends where a bound increases by at least DOCUMENT_JUMP tiles, as at the end of a long document.
DOCUMENT_JUMP = 4
ALIGNMENT = 64  # int32 elements; 256 bytes, like an allocation of PyTorch


@dataclass(frozen=True, eq=False)
class Intervals:
    """An `Intervals` object contains an interval mask and the tables of tiles that kernels need for it.

    Create one object per mask with `Intervals.of`, and pass it to every call, because it caches the tables.

    Attributes:
        lo, hi: int32 (B or 1, rows), on the device. Kernels that use no table must read the property `bounds` instead.
        num_keys: the number of columns.
        host: lo and hi on the CPU, or empty for a mask of `mask_slots`.
        wait: whether the host waits until copies to the device have arrived.
        of_keys: whether the rows are keys.
        is_replaced: whether `mask_slots` will write another mask to the same memory, so that the kernels must be correct for
            every mask of the same shape.
    """

    lo: Tensor
    hi: Tensor
    num_keys: int
    host: tuple[Tensor, ...] = field(repr=False)
    wait: bool
    of_keys: bool = False
    is_replaced: bool = False
    _tables: SharedTensors = field(default_factory=SharedTensors, init=False, repr=False)

    def __post_init__(self) -> None:
        self._tables.add(self.lo, self.hi)

    @classmethod
    def of(
        cls,
        lo: Tensor,
        hi: Tensor,
        num_keys: int,
        device: torch.device | str = "cpu",
        wait: bool = True,
        is_replaced: bool = False,
    ) -> "Intervals":
        """Create a mask for kernels on `device` from integer bounds (1 or B, Nq) on the CPU."""
        if lo.dim() != 2 or lo.shape != hi.shape:
            raise ValueError(f"lo has shape {tuple(lo.shape)}, hi {tuple(hi.shape)}: both must be (1 or batch, queries)")
        for name, x in (("lo", lo), ("hi", hi)):
            if x.device.type != "cpu" or x.is_floating_point():
                raise ValueError(f"{name} is {x.dtype} on {x.device}: must be integers on the CPU")
            bounds = x.numpy()
            decreases = (bounds[:, 1:] < bounds[:, :-1]).any()
            if x.numel() and (decreases or bounds[:, 0].min() < 0 or bounds[:, -1].max() > num_keys):
                raise ValueError(f"{name} must never decrease from one query to the next and must stay within [0, {num_keys}]")
        return cls._create((lo, hi), num_keys, device, wait, is_replaced=is_replaced)

    @classmethod
    def _create(
        cls,
        host: tuple[Tensor, ...],
        num_keys: int,
        device: torch.device | str,
        wait: bool,
        of_keys: bool = False,
        is_replaced: bool = False,
    ) -> "Intervals":
        lo, hi = host = tuple(x.to(torch.int32).contiguous() for x in host)
        return cls(_to_device(lo, device, wait), _to_device(hi, device, wait), num_keys, host, wait, of_keys, is_replaced)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        self._tables.use()
        return self.lo, self.hi

    @property
    def batch(self) -> int:
        return self.lo.shape[0]

    @property
    def num_rows(self) -> int:
        return self.lo.shape[1]

    @property
    def device(self) -> torch.device:
        return self.lo.device

    @cached_property
    def transposed(self) -> "Intervals":
        lo, hi = self.host
        bounds = transpose(lo, hi, self.num_keys)
        return self._create(bounds, self.num_rows, self.device, self.wait, not self.of_keys, self.is_replaced)

    def restrict(self, rows: slice, keys: slice) -> "Intervals":
        num_keys = keys.stop - keys.start
        bounds = tuple((x[:, rows] - keys.start).clamp(0, num_keys) for x in self.host)
        return self._create(bounds, num_keys, self.device, self.wait, self.of_keys)

    def tiles(self, rows: int, step: int, split_documents: bool = True, aligned: bool = False) -> Tensor:
        """Split the rows into tiles, and sort the tiles in processing order.

        For each tile of rows, a program loops over tiles of columns. Step i of this loop starts at column begin + i * step.
        After num_masked_prefix masked steps, num_unmasked steps need no mask, and all later steps are masked. Tiles end where
        long documents end, because a tile with two documents would loop over the columns of both.

        Args:
            rows: the maximum number of rows per tile.
            step: the number of columns per step.
            split_documents: whether tiles end where long documents end.
            aligned: whether begin is a multiple of `step`.

        Returns:
            int32 (batch, T, 6), on the device: first, end, begin, num_masked_prefix, num_unmasked and num_masked (the number of
                all masked steps). Tiles with longer loops come first. Batch entries with fewer tiles are padded with zeros.
        """
        key = "tiles", rows, step, split_documents, aligned
        if key not in self._tables:
            table = self._tiles_on_host(rows, step, split_documents, aligned)
            self._tables[key] = _to_device(torch.from_numpy(table), self.device, self.wait)
        return self._tables[key]

    def _tiles_on_host(self, rows: int, step: int, split_documents: bool = True, aligned: bool = False) -> np.ndarray:
        lo, hi = (x.numpy() for x in self.host)
        bound = hi if self.of_keys else lo
        pieces = tile_scheduler.split_at_jumps(bound, DOCUMENT_JUMP * rows if split_documents else self.num_keys + 1)
        first, end = tile_scheduler.split_into_tiles(*pieces, rows, from_end=split_documents and not self.of_keys)
        loops = tile_scheduler.tile_loops(lo, hi, first, end, step, step if aligned else 1)
        return tile_scheduler.tile_table(first, end, loops, *self.lo.shape)

    @cached_property
    def num_nonempty_rows(self) -> int:
        if self.is_replaced:
            return self.lo.numel() - 1
        lo, hi = self.host
        return int((lo < hi).sum())

    @cached_property
    def longest_tile(self) -> int:
        """Return the largest number of columns that 64 consecutive rows span, max(hi[i + 63] - lo[i])."""
        return self._longest_tile(tile_scheduler.CONSUMER_ROWS)

    @cached_property
    def longest_small_tiles(self) -> tuple[int, int]:
        return self._longest_tile(8), self._longest_tile(16)

    def _longest_tile(self, rows: int) -> int:
        if self.is_replaced:
            return self.num_keys
        lo, hi = (x.numpy() for x in self.host)
        distance = min(rows, self.num_rows) - 1
        return int((hi[:, distance:] - lo[:, : self.num_rows - distance]).max(initial=0))

    def requests(self) -> "TableRequests":
        transposed = self.transposed.requests() if "transposed" in vars(self) else None
        return TableRequests(tuple(self._tables), transposed)

    def prepare(self, requests: "TableRequests") -> None:
        for method, *arguments in requests.tables:
            getattr(self, method)(*arguments)
        if requests.transposed is not None:
            self.transposed.prepare(requests.transposed)

    def __reduce__(self):
        # Data workers pickle masks, and NumPy arrays pickle much faster than tensors.
        tables = {key: table.numpy(force=True) for key, table in self._tables.items()}
        host = tuple(x.numpy() for x in self.host)
        options = self.num_keys, self.wait, self.of_keys, self.is_replaced
        return _restore, (host, *options, tables, vars(self).get("transposed"))

    def work_tiles(
        self, rows: int, step: int, batch: int, heads: int, num_head_groups: int, programs: int,
        skip_empty: bool = False, group: int | None = None, aligned: bool = False,
    ) -> Tensor:  # fmt: skip
        """Assign the tiles of all heads to programs with `tile_scheduler.assign_work_tiles`.

        Args:
            rows, step, aligned: as for `tiles`, except that loops of the backward are always aligned.
            batch: the number of batch entries.
            heads: the number of heads per batch entry.
            num_head_groups: the number of groups of heads, which are processed one after another, so that the operands of a
                group stay in the L2 cache.
            skip_empty: whether to leave out tiles in which all intervals are empty.
            group: the number of query heads per key head in the backward, or None in the forward.

        Returns:
            int32 (n, programs, 8), on the device: the six numbers of `tiles`, the head and the batch entry.
        """
        key = "work_tiles", rows, step, batch, heads, num_head_groups, programs, skip_empty, group, aligned
        if key not in self._tables:
            tiles = self._tiles_on_host(rows, step, aligned=aligned or group is not None)
            if skip_empty:
                tiles = tiles * (tiles[..., 4:].sum(-1, keepdims=True) > 0)  # Tiles of zeros are missing tiles.
            tiles = np.broadcast_to(tiles, (batch, *tiles.shape[1:]))
            work_tiles = tile_scheduler.order_by_head_group(tiles, heads, num_head_groups)
            if group is None:
                work_tiles = tile_scheduler.split_last_wave(work_tiles, programs, rows)
                times = tile_scheduler.forward_times(work_tiles)
            else:
                times = tile_scheduler.backward_times(work_tiles, group)
            table = tile_scheduler.assign_work_tiles(work_tiles, times, programs, limit=self._most_per_program(key))
            self._tables[key] = _to_device(torch.from_numpy(table), self.device, self.wait)
        return self._tables[key]

    def ordered_work_tiles(
        self, rows: int, step: int, batch: int, heads: int, heads_per_group: int, programs: int, group: int
    ) -> Tensor:
        """Assign work tiles for a backward that sums dq in a fixed order. Return int32 (n, programs, 12) with the columns of
        `tile_order.order_work_tiles`.
        """
        key = "ordered_work_tiles", rows, step, batch, heads, heads_per_group, programs, group
        if key not in self._tables:
            tiles = self._tiles_on_host(rows, step, aligned=True)
            sizes = batch, heads, heads_per_group, programs, group, step
            work_tiles = tile_order.order_work_tiles(torch.from_numpy(tiles), self.host, *sizes)
            predecessors = tile_order.predecessors(work_tiles).numpy()
            work_tiles = work_tiles.numpy()
            times = tile_scheduler.backward_times(work_tiles, group)
            limit = self._most_per_program(key)
            table = tile_scheduler.assign_work_tiles(work_tiles, times, programs, predecessors, limit)
            self._tables[key] = _to_device(torch.from_numpy(table), self.device, self.wait)
        return self._tables[key]

    def largest_table(self, key: tuple[Any, ...]) -> tuple[int, int, int]:
        """Return a shape that is large enough for the table `key` of any mask of this shape."""
        method, rows, _step, *arguments = key
        tiles = tile_scheduler.most_tiles(self.num_rows, self.num_keys, rows, DOCUMENT_JUMP * rows)
        if method == "tiles":
            return self.batch, tiles, 6
        batch, heads, _, programs, *_ = arguments
        # The table needs room for uneven assignment, split work tiles and a final row of zeros.
        work_tiles = batch * heads * tiles
        programs = min(programs, work_tiles)
        return 2 * -(-work_tiles // programs) + 3, programs, 12 if method == "ordered_work_tiles" else 8

    def _most_per_program(self, key: tuple[Any, ...]) -> int | None:
        return self.largest_table(key)[0] - 1 if self.is_replaced else None


class TableRequests(NamedTuple):
    tables: tuple[tuple[Any, ...], ...]
    transposed: "TableRequests | None"  # for the transposed mask; None if no kernel used it


def _restore(
    host: tuple[np.ndarray, np.ndarray],
    num_keys: int,
    wait: bool,
    of_keys: bool,
    is_replaced: bool,
    tables: dict[tuple[Any, ...], np.ndarray],
    transposed: Intervals | None,
) -> Intervals:
    intervals = Intervals._create(tuple(map(torch.from_numpy, host)), num_keys, "cpu", wait, of_keys, is_replaced)
    intervals._tables.update({key: torch.from_numpy(table) for key, table in tables.items()})
    if transposed is not None:
        vars(intervals)["transposed"] = transposed
    return intervals


def copy_to(masks: Sequence[Intervals], device: torch.device) -> list[Intervals]:
    tensors = [x for side in sides(masks) for x in (*side.host, *side._tables.values())]
    flat = torch.empty(packed_size(x.shape for x in tensors), dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    for part, x in zip(unpack(flat, [x.shape for x in tensors]), tensors, strict=True):
        part.copy_(x)
    return with_memory(masks, unpack(flat.to(device, non_blocking=True), [x.shape for x in tensors]))


def sides(masks: Sequence[Intervals]) -> list[Intervals]:
    return [side for mask in masks for side in (mask, vars(mask).get("transposed")) if side is not None]


def packed_size(shapes: Iterable[Sequence[int]]) -> int:
    return sum(-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes)


def unpack(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    parts = flat.split([packed_size([shape]) for shape in shapes])
    return [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)]


def with_memory(masks: Sequence[Intervals], tensors: Iterable[Tensor], with_host: bool = True) -> list[Intervals]:
    """Copy the masks, but use the given tensors as bounds and tables. The iterable `tensors` yields lo, hi and all tables of
    each mask in `sides(masks)`.
    """
    remaining = iter(tensors)

    def move(side: Intervals) -> Intervals:
        bounds = next(remaining), next(remaining)
        host = side.host if with_host else ()
        copy = Intervals(*bounds, side.num_keys, host, False, side.of_keys, side.is_replaced)
        copy._tables.update({key: next(remaining) for key in side._tables})
        return copy

    copies = []
    for mask in masks:
        copies.append(move(mask))
        if "transposed" in vars(mask):
            vars(copies[-1])["transposed"] = move(mask.transposed)
    return copies


def transpose(lo: Tensor, hi: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Return the bounds (lo, hi) of the queries that may attend to each key, int32 (B or 1, Nk)."""
    return _count_up_to(hi, num_keys), _count_up_to(lo, num_keys)


def _count_up_to(bound: Tensor, num_keys: int) -> Tensor:
    counts = [np.bincount(x, minlength=num_keys + 1)[:num_keys] for x in bound.numpy()]
    return torch.from_numpy(np.array(counts).reshape(len(bound), num_keys).cumsum(1, dtype=np.int32))


def dense(lo: Tensor, hi: Tensor, num_keys: int) -> Tensor:
    keys = torch.arange(num_keys, device=lo.device)
    return (lo[..., None] <= keys) & (keys < hi[..., None])


def _to_device(x: Tensor, device: torch.device | str, wait: bool) -> Tensor:
    """Copy a CPU tensor to `device`. Raise RuntimeError if a CUDA graph is being captured, because replays would copy from
    freed memory.
    """
    device = torch.device(device)
    check_not_capturing(device)
    if device.type == "cuda" and not wait:
        # Without pinned memory, a copy to a GPU would wait for all earlier work of the stream.
        x = x.pin_memory()
    return x.to(device, non_blocking=not wait)
