"""What a mask and a layout mean for one rank: the intervals of every pair of shards, and the schedules that follow."""

import logging
import threading
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ringattn.layout import Layout
from ringattn.mask import Mask
from ringattn.schedule import Schedule, circulate

SCHEDULES = ("auto", "state", "kv")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowBytes:
    """Bytes of one row of a traveller and of its result, for each schedule."""

    state: tuple[int, int]
    kv: tuple[int, int]


def forward_bytes(q: Tensor, k: Tensor, v: Tensor) -> RowBytes:
    """Per row and batch row: q and (m, l, o) travel in the state ring, k and v in the KV ring."""
    (heads, dim), key_heads, value_dim, size = q.shape[2:], k.shape[2], v.shape[-1], q.element_size()
    state_size = max(size, 4)
    keys = key_heads * (dim + value_dim)
    return RowBytes(state=(heads * dim * size, heads * (value_dim + 2) * state_size), kv=(keys * size, 0))


def backward_bytes(q: Tensor, k: Tensor, v: Tensor) -> RowBytes:
    """Per row and batch row: q, dout, lse, delta and dq travel in the state ring, k, v, dk and dv in the KV ring."""
    (heads, dim), key_heads, value_dim, size = q.shape[2:], k.shape[2], v.shape[-1], q.element_size()
    state_size = max(size, 4)
    keys = key_heads * (dim + value_dim)
    queries = heads * (dim + value_dim) * size + heads * 2 * state_size
    return RowBytes(state=(queries, heads * dim * state_size), kv=(keys * size, keys * state_size))


class Plan:
    """The ring of one mask over one layout, as one rank sees it. Get one from `plan`: it is shared by all layers."""

    def __init__(self, mask: Mask, layout: Layout, rank: int, device: torch.device) -> None:
        ranks = range(layout.ranks)
        self.layout, self.device = layout, device
        self.rows = [layout.rows(r) for r in ranks]
        self.need = needs(mask, layout)
        self._intervals = {(rank, r): _local(mask, layout, rank, r, device) for r in ranks}
        self._intervals |= {(r, rank): _local(mask, layout, r, rank, device) for r in ranks}

    def intervals(self, query_rank: int, key_rank: int) -> tuple[Tensor, Tensor]:
        """(lo, hi), int32 (B or 1, rows of `query_rank`): the rows of `key_rank` that each query sees. One is this rank."""
        return self._intervals[query_rank, key_rank]

    @cached_property
    def positions(self) -> list[Tensor]:
        """positions[rank]: where that rank's rows stand in the whole sequence, int32."""
        return [self.layout.positions(rank).to(self.device, torch.int32) for rank in range(self.layout.ranks)]

    def schedule(self, name: str, results: bool) -> Schedule:
        """The "state" schedule, in which queries travel, or the "kv" schedule; with or without results to bring home."""
        return circulate(self.need if name == "state" else tuple(zip(*self.need, strict=True)), results)

    def choose(self, name: str, row_bytes: RowBytes, direction: str) -> str:
        """`name`, or for "auto" the schedule whose busiest rank sends fewer bytes; the KV ring where both send the same."""
        if name != "auto":
            return name
        busiest = {}
        for candidate, (traveller, result) in (("kv", row_bytes.kv), ("state", row_bytes.state)):
            busiest[candidate] = max(self.schedule(candidate, result > 0).bytes_sent(self.rows, traveller, result))
        chosen = min(busiest, key=busiest.get)
        _log_choice(direction, chosen, busiest)
        return chosen


_logged: set[tuple[str, str]] = set()


def _log_choice(direction: str, chosen: str, busiest: dict[str, int]) -> None:
    """Say it once for each outcome: packed documents change the counts at every step."""
    if (direction, chosen) not in _logged:
        _logged.add((direction, chosen))
        counts = ", ".join(f"{name} {count:,}" for name, count in busiest.items())
        log.info("%s: %s schedule; bytes sent by the busiest rank, a batch row: %s", direction, chosen, counts)


def _local(mask: Mask, layout: Layout, query_rank: int, key_rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The intervals of `query_rank`'s positions, counted in rows of `key_rank`, on `device`."""
    keys, queries = layout.positions(key_rank), layout.positions(query_rank)
    lo, hi = (torch.searchsorted(keys, x[:, queries].contiguous(), out_int32=True) for x in mask.intervals(layout.seq_len))
    return lo.to(device), hi.to(device)


@lru_cache(maxsize=8)
def needs(mask: Mask, layout: Layout) -> tuple[tuple[bool, ...], ...]:
    """needs[query rank][key rank]: whether any query of the one sees a key of the other."""
    lo, hi = mask.intervals(layout.seq_len)
    owner = torch.empty(layout.seq_len, dtype=torch.int64)
    for rank in range(layout.ranks):
        owner[layout.positions(rank)] = rank
    need = torch.zeros(layout.ranks, layout.ranks, dtype=torch.bool)
    for key_rank in range(layout.ranks):
        keys = layout.positions(key_rank)
        sees = (torch.searchsorted(keys, lo) < torch.searchsorted(keys, hi)).any(0)
        need[owner[sees], key_rank] = True
    return tuple(tuple(row) for row in need.tolist())


_planning = threading.Lock()  # autograd and simulated ranks call from several threads: plan once, not once a thread


def plan(mask: Mask, layout: Layout, rank: int, device: torch.device) -> Plan:
    """The plan of `mask` over `layout` for `rank`, made once."""
    with _planning:
        plans = _plans(mask, layout)
        if (rank, device) not in plans:
            plans[rank, device] = Plan(mask, layout, rank, device)
        return plans[rank, device]


@lru_cache(maxsize=4)  # few: each holds intervals on the device, and packed documents make a new mask every step
def _plans(mask: Mask, layout: Layout) -> dict[tuple[int, torch.device], Plan]:
    return {}
