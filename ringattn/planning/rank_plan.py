"""What a mask and a layout mean for one rank: the intervals of every pair of shards, and the schedules that follow."""

import logging
import threading
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.kernels.interval_mask import Intervals, transpose
from ringattn.layout import Layout
from ringattn.mask import Mask, shared_intervals
from ringattn.planning.cost_model import FLOPS_A_BYTE, Fabric, hop_costs
from ringattn.planning.schedule import Need, Schedule, Visit, circulate

SCHEDULES = ("auto", "state", "kv")
PASS_FLOPS = 5e13  # of a forward: a tenth of a second, beside which it does not count that a pass has a beginning and an end
FIRST_PART = 0.4  # of the own block's work, to hide the first hop where the rest is left to hide the last
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowBytes:
    """Bytes of one row of a traveller and of its result, for each schedule."""

    state: tuple[float, float]
    kv: tuple[float, float]


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


class Work(NamedTuple):
    """What one direction of one call is made of, whoever moves."""

    direction: str  # forward | backward
    batch: int
    row_bytes: RowBytes  # a batch row
    pair_flops: float  # of one (query, key) pair of a batch row

    @property
    def query_bytes(self) -> float:
        """Of memory, that kernels move for a row of queries that come to visit, besides its pairs.

        A state is written, and read and merged with another; sums of dq are cleared, read, and written or added.
        """
        return 4 * self.row_bytes.state[1]

    def scaled(self, scale: float) -> "Work":
        """With rows that each stand for `scale`."""
        state, kv = ((scale * traveller, scale * result) for traveller, result in (self.row_bytes.state, self.row_bytes.kv))
        return self._replace(row_bytes=RowBytes(state, kv), pair_flops=scale**2 * self.pair_flops)


def _forward_flops(q: Tensor, v: Tensor) -> int:
    """Of one (query, key) pair of a batch row: two products of every head."""
    return 2 * q.shape[2] * (q.shape[3] + v.shape[3])


def forward_work(q: Tensor, k: Tensor, v: Tensor) -> Work:
    """The work of the forward: two products of every pair and head."""
    return Work("forward", q.shape[0], forward_bytes(q, k, v), _forward_flops(q, v))


def backward_work(q: Tensor, k: Tensor, v: Tensor) -> Work:
    """The work of the backward: five products of every pair and head.

    Where keys travel a rank's own queries are prepared, and their dq is finished, once for all of them.
    """
    heads, dim, value_dim = q.shape[2], q.shape[3], v.shape[3]
    return Work("backward", q.shape[0], backward_bytes(q, k, v), heads * (6 * dim + 4 * value_dim))


def passes(q: Tensor, k: Tensor, v: Tensor, pairs: float) -> int:
    """In how many passes, of as many heads each, a call is worked off. The memory of a pass is that of its heads.

    Args:
        pairs: (query, key) pairs of a batch row and head, the mean over ranks.
    """
    key_heads, most = k.shape[2], max(1, q.shape[0] * _forward_flops(q, v) * pairs / PASS_FLOPS)
    return max(count for count in range(1, key_heads + 1) if key_heads % count == 0 and count <= most)


def part_of_heads(x: Tensor, count: int, i: int = 0) -> Tensor:
    """Part i of `count` of the heads of x (B, N, H, ...), without a copy."""
    size = x.shape[2] // count
    return x[:, :, i * size : (i + 1) * size]


@dataclass(frozen=True, eq=False)
class Block:
    """What the kernels are told about rows of one rank's queries and of another's keys."""

    intervals: Intervals  # of the query rows, counted in the key rows
    layout: Layout
    sides: tuple[tuple[int, slice], tuple[int, slice]]  # (rank, rows) of the queries and of the keys

    @cached_property
    def positions(self) -> tuple[Tensor, ...]:
        """Where the query rows and the key rows stand in the whole sequence, int32."""
        return tuple(_places(self.layout, rank, self.intervals.device)[rows] for rank, rows in self.sides)


class Plan:
    """The ring of one mask over one layout, as one rank sees it. Get one from `plan`: it is shared by all layers."""

    def __init__(self, mask: Mask, layout: Layout, rank: int, device: torch.device) -> None:
        self.mask, self.layout, self.rank, self.device = mask, layout, rank, device
        self.meetings = meetings(mask, layout)
        self._schedules: dict[tuple, Schedule] = {}
        self._blocks: dict[tuple, dict[Visit, Block]] = {}
        self._choices: dict[tuple, str] = {}

    def schedule(self, name: str, results: bool, all_pairs: bool = False) -> Schedule:
        """The "state" schedule, in which queries travel, or the "kv" schedule; with or without results to bring home."""
        key = name, results, all_pairs
        if key not in self._schedules:
            settings = self.mask, self.layout, "queries" if name == "state" else "keys"
            with _planning:
                self._schedules[key] = circulate(needs(*settings), results, all_pairs, cuts(*settings))
        return self._schedules[key]

    def blocks(self, name: str, schedule: Schedule) -> dict[Visit, Block]:
        """What this rank's visits compute with. All of them at once, so that the host does not hold up a pass under way."""
        if (name, schedule) not in self._blocks:
            visits = [visit for step in schedule.by_rank[self.rank] for visit in step.visits]
            self._blocks[name, schedule] = {visit: self._block(name, visit) for visit in visits}
        return self._blocks[name, schedule]

    def prepare_as(self, other: "Plan") -> None:
        """Make what was asked of `other`, so that no pass waits for it: choices, schedules, blocks and the kernels' tables."""
        if other is self:
            return
        for work, fabric in other._choices:
            self.choose("auto", work, fabric)
        for (name, *options), schedule in other._schedules.items():
            if (name, schedule) in other._blocks:
                ours, theirs = self.blocks(name, self.schedule(name, *options)), other.blocks(name, schedule)
                for block, model in zip(ours.values(), theirs.values(), strict=False):
                    block.intervals.lay_as(model.intervals)

    def _block(self, name: str, visit: Visit) -> Block:
        here, there = (visit.rank, range(self.layout.rows(visit.rank))), (visit.owner, visit.rows)
        queries, keys = (there, here) if name == "state" else (here, there)
        return self._cut(*queries, *keys)

    def _cut(self, query_rank: int, query_rows: range, key_rank: int, key_rows: range) -> Block:
        queries, keys = (slice(rows.start, rows.stop) for rows in (query_rows, key_rows))
        bounds = _local(self.mask, self.layout, query_rank, key_rank)
        lo, hi = ((x[:, queries] - keys.start).clamp(0, len(key_rows)) for x in bounds)
        intervals = Intervals.of(lo, hi, len(key_rows), self.device, wait=False)
        return Block(intervals, self.layout, ((query_rank, queries), (key_rank, keys)))

    def passes(self, q: Tensor, k: Tensor, v: Tensor) -> int:
        """`passes` of this rank's tensors; the same on all ranks."""
        return passes(q, k, v, self.pairs / self.layout.ranks)

    @cached_property
    def pairs(self) -> float:
        """(query, key) pairs of the whole sequence, the mean over batch rows."""
        return sum(meeting.pairs for row in self.meetings for meeting in row)

    def flops(self, work: Work, name: str, visit: Visit) -> float:
        """What a visit takes, of any rank, memory included; the parts of an own block are taken at their share of it."""
        query_rank, key_rank = (visit.owner, visit.rank) if name == "state" else (visit.rank, visit.owner)
        meeting = self.meetings[query_rank][key_rank]
        whole = meeting.queries if name == "state" else meeting.keys
        part = 1.0
        if visit.rank == visit.owner and len(visit.rows) < len(whole):
            part = FIRST_PART if visit.rows.start == whole.start else 1 - FIRST_PART
        queries = len(visit.rows) if name == "state" else 0
        return work.batch * (work.pair_flops * meeting.pairs * part + FLOPS_A_BYTE * work.query_bytes * queries)

    def sum_bytes(self, work: Work) -> float:
        """Bytes of partial results, of one rank's queries with another's keys, that the busiest rank adds up in a pass."""
        of_queries, of_keys = work.row_bytes.state[1], work.row_bytes.kv[1]
        sums = [
            sum(of_queries * len(x.queries) + of_keys * len(x.keys) for other, x in enumerate(row) if other != rank)
            for rank, row in enumerate(self.meetings)
        ]
        return work.batch * max(sums)

    def costs(self, name: str, work: Work, fabric: Fabric, rank: int | None = None) -> list:
        """`cost.hop_costs` of a pass of the schedule `name`."""
        traveller, result = (work.batch * size for size in getattr(work.row_bytes, name))
        schedule = self.schedule(name, result > 0, fabric.all_pairs)
        return hop_costs(schedule, (traveller, result), lambda visit: self.flops(work, name, visit), fabric, rank)

    def choose(self, name: str, work: Work, fabric: Fabric) -> str:
        """`name`, or for "auto" the schedule that is expected to take less time, then fewer bytes; the KV ring for equals."""
        if name != "auto":
            return name
        key = work, fabric
        if key not in self._choices:
            costs = {candidate: self.costs(candidate, work, fabric) for candidate in ("kv", "state")}
            sums = {x: (sum(hop.seconds for hop in hops), sum(hop.bytes for hop in hops)) for x, hops in costs.items()}
            best = min(seconds for seconds, _ in sums.values())
            # times within a hundredth are equal: the table of speeds is no better
            close = [candidate for candidate, (seconds, _) in sums.items() if seconds <= 1.01 * best]
            self._choices[key] = min(close, key=lambda candidate: sums[candidate][1])
            _log_choice(work.direction, self._choices[key], sums)
        return self._choices[key]


_logged: set[tuple[str, str]] = set()


def _log_choice(direction: str, chosen: str, sums: dict[str, tuple[float, int]]) -> None:
    """Say it once for each outcome: packed documents change the counts at every step."""
    if (direction, chosen) not in _logged:
        _logged.add((direction, chosen))
        texts = [f"{name} {1e3 * seconds:.3g} ms and {count / 2**20:,.1f} MiB" for name, (seconds, count) in sums.items()]
        log.info("%s: %s schedule; expected time, and bytes of the busiest rank: %s", direction, chosen, ", ".join(texts))


def _local(mask: Mask, layout: Layout, query_rank: int, key_rank: int) -> tuple[Tensor, Tensor]:
    """The intervals of `query_rank`'s positions, counted in rows of `key_rank`: int32 (B or 1, query rows), on the CPU."""
    rows_before = _rows_before(layout, key_rank)
    return tuple(rows_before.take(x) for x in _bounds(mask, layout, query_rank))


@lru_cache(maxsize=16)
def _bounds(mask: Mask, layout: Layout, rank: int) -> tuple[Tensor, ...]:
    """The intervals of a rank's positions, counted in positions: int64 (B or 1, rows)."""
    return tuple(x[:, layout.positions(rank)] for x in shared_intervals(mask, layout.seq_len, layout.seq_len))


@lru_cache(maxsize=16)
def _rows_before(layout: Layout, rank: int) -> Tensor:
    """How many of a rank's rows come before each position, and before the end, of the sequence: int32 (seq_len + 1,)."""
    held = torch.zeros(layout.seq_len + 1, dtype=torch.int32, device="cpu")
    held[layout.positions(rank) + 1] = 1
    return held.cumsum(0, dtype=torch.int32)


@lru_cache(maxsize=128)
def _places(layout: Layout, rank: int, device: torch.device) -> Tensor:
    """Where a rank's rows stand in the whole sequence: int32, on `device`."""
    return layout.positions(rank).to(device, torch.int32)


class Meeting(NamedTuple):
    """What one rank's queries have to do with another's keys."""

    queries: range  # rows of the queries from the first to the last that sees a key
    keys: range  # rows of the keys from the first to the last that is seen
    pairs: float  # (query, key), the mean over batch rows


def _meeting(lo: Tensor, hi: Tensor, num_keys: int) -> Meeting:
    """Of queries with the intervals lo, hi (B or 1, query rows) of a rank's `num_keys` rows."""
    seen = (hi - lo).clamp(min=0)
    rows = seen.sum(0).nonzero()
    if not len(rows):
        return Meeting(range(0), range(0), 0.0)
    queries = range(int(rows[0]), int(rows[-1]) + 1)
    blind = seen == 0
    keys = range(int(lo.masked_fill(blind, num_keys).min()), int(hi.masked_fill(blind, 0).max()))
    return Meeting(queries, keys, float(seen.sum()) / len(seen))


@lru_cache(maxsize=8)
def meetings(mask: Mask, layout: Layout) -> tuple[tuple[Meeting, ...], ...]:
    """meetings[query rank][key rank]."""
    ranks = range(layout.ranks)
    bounds = [_bounds(mask, layout, rank) for rank in ranks]
    columns = []
    for rank in ranks:
        before = _rows_before(layout, rank)
        columns.append([_meeting(before.take(lo), before.take(hi), layout.rows(rank)) for lo, hi in bounds])
    return tuple(zip(*columns, strict=True))


@lru_cache(maxsize=16)
def needs(mask: Mask, layout: Layout, travellers: str = "queries") -> Need:
    """needs[owner][rank]: which of the owner's "queries" or "keys" have anything to do at a rank."""
    table = meetings(mask, layout)
    if travellers == "queries":
        return tuple(tuple(meeting.queries for meeting in row) for row in table)
    return tuple(tuple(meeting.keys for meeting in column) for column in zip(*table, strict=True))


@lru_cache(maxsize=16)
def cuts(mask: Mask, layout: Layout, travellers: str) -> tuple[int, ...]:
    """Where each rank's own block is cut by rows of its travellers, so that the first part has FIRST_PART of the work."""
    return tuple(_cut_row(mask, layout, rank, travellers) for rank in range(layout.ranks))


def _cut_row(mask: Mask, layout: Layout, rank: int, travellers: str) -> int:
    lo, hi = _local(mask, layout, rank, rank)
    if travellers == "keys":
        lo, hi = transpose(lo, hi, layout.rows(rank))
    done = (hi - lo).clamp(min=0).sum(0).cumsum(0)
    if not len(done):
        return 0
    row = int(torch.searchsorted(done, FIRST_PART * done[-1])) + 1
    return row // 128 * 128 if len(done) >= 1024 else row  # whole tiles of the kernels


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
