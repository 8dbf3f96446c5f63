"""Plan the ring passes of one rank under a mask and a layout.

A plan contains schedules and the mask's intervals, expressed in rows of shards instead of positions.
"""

import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn.kernels.caching import SharedTensors, cached_on_device
from ringattn.kernels.interval_mask import Intervals, copy_to
from ringattn.layout import Layout
from ringattn.mask import Mask
from ringattn.planning.cost_model import FLOPS_PER_HBM_BYTE, HopCost, Interconnect, hop_costs
from ringattn.planning.schedule import LocalStep, LocalSteps, Need, Schedule, build_schedule
from ringattn.planning.workload import Work, head_chunks_for_memory
from ringattn.runs import RowsBefore, Runs, all_runs

# While the first messages are in flight, a rank computes FIRST_SHARE of the work on its own block. The remaining work on the
# block hides the last hop.
FIRST_SHARE = 0.4
SPLIT_MULTIPLE = 128  # rows; a long block is split at a multiple of the tile size of the kernels
# The KV ring launches fewer kernels. Therefore "auto" chooses the state ring only for a predicted gain of 3%.
KV_RING_MARGIN = 1.03
# (the tensors that circulate, the tensors that return to their owner)
CIRCULATING = {
    ("forward", "kv"): ("k, v", ""),
    ("forward", "state"): ("q", "m, l, o"),
    ("backward", "kv"): ("k, v", "dk, dv"),
    ("backward", "state"): ("q, dout, lse, delta", "dq"),
}
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class BlockPair:
    """A `BlockPair` describes one kernel call, with query rows of one rank and key rows of one rank."""

    intervals: Intervals  # one interval per query row; the bounds are indices of key rows
    layout: Layout
    sides: tuple[tuple[int, slice], tuple[int, slice]]  # (rank, rows) of the queries, then (rank, rows) of the keys

    @property
    def positions(self) -> tuple[Tensor, Tensor]:
        """Return the positions of the query rows and of the key rows, as two int32 tensors."""
        return self._cached["positions"]

    @cached_property
    def _cached(self) -> SharedTensors:
        cached = SharedTensors()
        positions = (_positions(self.layout, rank, self.intervals.device)[rows] for rank, rows in self.sides)
        cached["positions"] = tuple(positions)
        return cached


class Plan:
    """A `Plan` is one rank's plan of all ring passes with one mask and one layout.

    Args:
        is_fixed: True if the schedules must not depend on the mask, because a CUDA graph captures the plan. In a fixed plan,
            every rank computes with whole blocks, and schedule="auto" selects the KV ring.
    """

    def __init__(self, mask: Mask, layout: Layout, rank: int, device: torch.device, is_fixed: bool = False) -> None:
        self.mask, self.layout, self.rank, self.device, self.is_fixed = mask, layout, rank, device, is_fixed
        # (query, key) pairs per batch entry, on average
        self.pairs = float(overlaps(mask, layout).pairs.sum())
        queries = all_runs(mask, layout)
        self.has_queries_without_keys = bool((queries.lo >= queries.hi).any())
        self._schedules: dict[tuple[Any, ...], Schedule] = {}
        self._block_pairs: dict[tuple[Any, ...], dict[LocalStep, BlockPair]] = {}
        self._choices: dict[tuple[Any, ...], str] = {}

    def schedule(self, name: str, results: bool, all_pairs: bool = False, row_multiple: int = 1) -> Schedule:
        """Return a schedule.

        Args:
            name: "state", in which queries circulate, or "kv", in which keys and values circulate.
            results: whether the circulating blocks accumulate results that return to their owners.
            all_pairs: True for a direct schedule, False for a relay schedule.
            row_multiple: every range of rows starts and ends at a multiple of `row_multiple`, which is 128 for FP8. A range may
                extend beyond the last key, so blocks of keys must be padded.
        """
        key = name, results, all_pairs, row_multiple
        if key not in self._schedules:
            settings = self.mask, self.layout, "queries" if name == "state" else "keys"
            with _planning_lock:
                need, points = _all_rows(self.layout) if self.is_fixed else (needs(*settings), split_points(*settings))
                if row_multiple > 1:
                    need, points = _extend(need, row_multiple), tuple(x // row_multiple * row_multiple for x in points)
                if row_multiple > 1 and name == "state":
                    need = tuple(
                        tuple(range(x.start, min(x.stop, self.layout.rows(owner))) for x in row)
                        for owner, row in enumerate(need)
                    )
                self._schedules[key] = build_schedule(need, results, all_pairs, points)
        return self._schedules[key]

    def block_pairs(self, name: str, schedule: Schedule) -> dict[LocalStep, BlockPair]:
        if (name, schedule) not in self._block_pairs:
            local_steps = [local_step for step in schedule.by_rank[self.rank] for local_step in step.local_steps]
            self._block_pairs[name, schedule] = {x: self._block_pair(name, x) for x in local_steps}
        return self._block_pairs[name, schedule]

    def requests(self) -> "Requests":
        tables = [(key, tuple(x.intervals.requests() for x in pairs.values())) for key, pairs in self._used()]
        return Requests(tuple(self._choices), tuple(tables))

    def _used(self) -> list[tuple[tuple[Any, ...], dict[LocalStep, BlockPair]]]:
        pairs = [(key, self._block_pairs.get((key[0], schedule))) for key, schedule in self._schedules.items()]
        return [(key, each) for key, each in pairs if each is not None]

    def prepare(self, requests: "Requests") -> None:
        for key in requests.choices:
            self.choose_schedule(*key)
        for (name, *options), tables in requests.schedules:
            pairs = self.block_pairs(name, self.schedule(name, *options))
            for pair, requested in zip(pairs.values(), tables, strict=False):
                pair.intervals.prepare(requested)

    def to(self, device: torch.device) -> "Plan":
        """Return a copy of this plan whose intervals and tables are on `device`."""
        return self.with_masks(copy_to(self.masks(), device), device)

    def masks(self) -> list[Intervals]:
        return [pair.intervals for _, pairs in self._used() for pair in pairs.values()]

    def with_masks(self, masks: list[Intervals], device: torch.device) -> "Plan":
        """Return a copy of this plan on `device`, with `masks` in place of the intervals of `self.masks()`."""
        plan, remaining = copy(self), iter(masks)
        plan.device, plan._choices, plan._schedules = device, dict(self._choices), dict(self._schedules)
        plan._block_pairs = {
            (key[0], self._schedules[key]): {x: replace(pair, intervals=next(remaining)) for x, pair in pairs.items()}
            for key, pairs in self._used()
        }
        return plan

    def _block_pair(self, name: str, local_step: LocalStep) -> BlockPair:
        resident = local_step.rank, range(self.layout.rows(local_step.rank))
        circulating = local_step.owner, local_step.rows
        (query_rank, query_rows), (key_rank, key_rows) = (circulating, resident) if name == "state" else (resident, circulating)
        queries, keys = (slice(rows.start, rows.stop) for rows in (query_rows, key_rows))
        bounds = _local_intervals(self.mask, self.layout, query_rank, key_rank)
        lo, hi = ((x[:, queries].int() - keys.start).clamp_(0, len(key_rows)) for x in bounds)
        intervals = Intervals.of(lo, hi, len(key_rows), self.device, wait=False, is_replaced=self.is_fixed)
        return BlockPair(intervals, self.layout, ((query_rank, queries), (key_rank, keys)))

    def head_chunks_for_memory(self, q: Tensor, k: Tensor, v: Tensor) -> int:
        return head_chunks_for_memory(q, k, v, self.pairs / self.layout.ranks)

    def flops(self, work: Work, name: str, local_steps: LocalSteps, relays: bool = False) -> np.ndarray:
        """Return the cost of each local step in FLOPs. In the state ring, the cost includes the memory traffic of merges.

        `relays` says whether neighbours relay the results.
        """
        _, rank, owner, start, stop = local_steps
        # (query rank, key rank)
        ranks = (owner, rank) if name == "state" else (rank, owner)
        table = overlaps(self.mask, self.layout)
        first, last = (x[ranks] for x in (table.queries if name == "state" else table.keys))
        own, rows = rank == owner, stop - start
        share = np.where(start <= first, FIRST_SHARE, 1 - FIRST_SHARE)
        share = np.where(own & (rows < last - first), share, 1.0)
        query_bytes = np.where(own, *(work.query_bytes(x, relays) for x in (True, False)))
        traffic = rows * query_bytes if name == "state" else 0
        return work.batch * (work.pair_flops * table.pairs[ranks] * share + FLOPS_PER_HBM_BYTE * traffic)

    def merge_bytes(self, work: Work) -> float:
        """Estimate the bytes of partial results that the busiest rank merges in a pass."""
        query_bytes, key_bytes = work.row_bytes.state[1], work.row_bytes.kv[1]
        table = overlaps(self.mask, self.layout)
        size = query_bytes * (table.queries[1] - table.queries[0]) + key_bytes * (table.keys[1] - table.keys[0])
        return work.batch * (size.sum(1) - size.diagonal()).max().item()

    def costs(self, name: str, work: Work, interconnect: Interconnect, rank: int | None = None) -> list[HopCost]:
        block, result = (work.batch * size for size in getattr(work.row_bytes, name))
        schedule = self.schedule(name, result > 0, interconnect.all_pairs, work.row_multiple)
        relays = not interconnect.all_pairs
        return hop_costs(schedule, (block, result), lambda steps: self.flops(work, name, steps, relays), interconnect, rank)

    def choose_schedule(self, name: str, work: Work, interconnect: Interconnect) -> str:
        """Return `name`. For "auto", choose "state" or "kv", and log the choice once."""
        key = name, work, interconnect
        if key not in self._choices:
            self._choices[key], _ = self.choose(*key)
            # Log each choice only once, because the predicted times of packed documents change in every training step.
            if self.layout.ranks > 1 and (work.direction, self._choices[key]) not in _logged:
                _logged.add((work.direction, self._choices[key]))
                log.info(self.describe_choice(*key))
        return self._choices[key]

    def choose(self, name: str, work: Work, interconnect: Interconnect) -> tuple[str, str]:
        """Return the schedule that `choose_schedule` returns, and the reason for the choice."""
        if name != "auto":
            return name, "as requested"
        if self.layout.ranks == 1:
            return "kv", "there is only one rank"
        if self.is_fixed:
            return "kv", "CUDA graphs use the KV ring"
        if interconnect.name == "gloo":
            return "state", "rings over gloo use the state ring"
        kv, state = (self.total_cost(name, work, interconnect)[0] for name in ("kv", "state"))
        if state * KV_RING_MARGIN <= kv:
            return "state", "the state ring is predicted to be faster"
        return "kv", "the KV ring is predicted to be faster" if kv < state else "the predicted times are about equal"

    def total_cost(self, name: str, work: Work, interconnect: Interconnect) -> tuple[float, int]:
        hops = self.costs(name, work, interconnect)
        return sum(hop.seconds for hop in hops), sum(hop.bytes for hop in hops)

    def describe_choice(self, name: str, work: Work, interconnect: Interconnect) -> str:
        chosen, reason = self.choose(name, work, interconnect)
        block, result = CIRCULATING[work.direction, chosen]
        moved = f"({block}) and the results ({result})" if result else f"({block})"
        route = "go directly to the ranks that need them" if interconnect.all_pairs else "are relayed by neighbours"
        costs = []
        for schedule in ("state", "kv"):
            seconds, count = self.total_cost(schedule, work, interconnect)
            costs.append(f"{schedule} {1e3 * seconds:.3g} ms and {count / 2**20:,.1f} MiB")
        return (
            f"{work.direction}: {chosen} ring of {self.layout.ranks} ranks over {interconnect.name}; {moved} {route}; "
            f"{reason}; predicted for the busiest rank: {', '.join(costs)}"
        )


class Requests(NamedTuple):
    choices: tuple[tuple[Any, ...], ...]  # the arguments of `Plan.choose_schedule`
    schedules: tuple[tuple[Any, ...], ...]  # the arguments of `Plan.schedule`, and the requested tables of every local step


_logged: set[tuple[str, str]] = set()


def _local_intervals(mask: Mask, layout: Layout, query_rank: int, key_rank: int) -> tuple[Tensor, Tensor]:
    """Return (lo, hi), both (1 or B, query rows), on the CPU. Query row i attends to key rows lo[:, i] to hi[:, i] - 1."""
    lo, hi = _rows_before_bounds(mask, layout, query_rank)
    return torch.from_numpy(lo.rows(key_rank)), torch.from_numpy(hi.rows(key_rank))


@lru_cache(maxsize=4)
def _rows_before_bounds(mask: Mask, layout: Layout, rank: int) -> tuple[RowsBefore, RowsBefore]:
    lo, hi = all_runs(mask, layout).bounds(rank)
    return RowsBefore(layout, lo), RowsBefore(layout, hi)


@cached_on_device(maxsize=128)
def _positions(layout: Layout, rank: int, device: torch.device) -> Tensor:
    return layout.positions(rank).to(device, torch.int32)


class Overlaps(NamedTuple):
    """An `Overlaps` tuple describes which rows of each pair of ranks attend to each other. The last two dimensions of every
    array are (query rank, key rank).

    `queries` and `keys` (2, ranks, ranks) contain a range (first row, end) for each pair.
    """

    queries: np.ndarray  # the query rows that attend to any of the keys
    keys: np.ndarray  # the key rows that any of the queries attends to
    pairs: np.ndarray  # (ranks, ranks), allowed (query, key) pairs per batch entry, on average


@lru_cache(maxsize=8)
def overlaps(mask: Mask, layout: Layout) -> Overlaps:
    """Return the cached overlaps, which callers must not modify."""
    runs = all_runs(mask, layout)
    pairs = np.stack([runs.reduce(np.add, runs.pairs(rank)) for rank in range(layout.ranks)], 1)
    keys, queries = _visible_columns(runs), _visible_columns(all_runs(mask, layout, transposed=True))
    # The axes of `queries` are (key rank, query rank), so swap the axes.
    return Overlaps(queries.transpose(0, 2, 1) * (pairs > 0), keys * (pairs > 0), pairs / runs.lo.shape[1])


def _visible_columns(runs: Runs) -> np.ndarray:
    """For each pair of ranks, return the range (first, end) of the second rank's columns to which the first rank's rows attend:
    int64 (2, row ranks, column ranks).
    """
    by_column_rank = []
    lo, hi = (RowsBefore(runs.layout, x.astype(np.int32)) for x in (runs.lo, runs.hi))
    for rank in range(runs.layout.ranks):
        (first, lo_of_last), (hi_of_first, last) = lo.rows(rank), hi.rows(rank)
        visible = first < last if runs.layout.stride == 1 else (first < hi_of_first) | (lo_of_last < last)
        start = runs.reduce(np.minimum, np.where(visible, first, runs.layout.seq_len).min(0))
        stop = runs.reduce(np.maximum, np.where(visible, last, 0).max(0))
        by_column_rank.append((start, stop))
    return np.array(by_column_rank).transpose(1, 2, 0)


@lru_cache(maxsize=16)
def needs(mask: Mask, layout: Layout, circulating: str = "queries") -> Need:
    """Return need[owner][rank], the rows of the owner's "queries" or "keys" that the rank needs."""
    queries, keys, _ = overlaps(mask, layout)
    first, end = (queries if circulating == "queries" else keys.transpose(0, 2, 1)).tolist()
    return tuple(tuple(map(range, *row)) for row in zip(first, end, strict=True))


def _all_rows(layout: Layout) -> tuple[Need, tuple[int, ...]]:
    rows = [layout.rows(rank) for rank in range(layout.ranks)]
    need = tuple((range(count),) * layout.ranks for count in rows)
    return need, tuple(int(FIRST_SHARE * count) // SPLIT_MULTIPLE * SPLIT_MULTIPLE for count in rows)


def _extend(need: Need, multiple: int) -> Need:
    return tuple(
        tuple(range(x.start // multiple * multiple, -(-x.stop // multiple) * multiple) if x else x for x in row) for row in need
    )


@lru_cache(maxsize=16)
def split_points(mask: Mask, layout: Layout, circulating: str) -> tuple[int, ...]:
    """Return where to split each rank's own block, so that the first rows contain FIRST_SHARE of the work."""
    runs = all_runs(mask, layout, transposed=circulating == "keys")
    pairs, (ranks, first) = runs.pairs(runs.rank), np.unique(runs.rank, return_index=True)
    done = pairs.cumsum() - pairs
    wanted = done[first] + FIRST_SHARE * np.add.reduceat(pairs, first)
    last = (done + pairs).searchsorted(wanted)
    runs, wanted = runs.select(last), wanted - done[last]
    low, high = np.zeros_like(ranks), runs.count
    while (high - low > 1).any():
        middle = ((low + high) // 2).clip(min=1)
        enough = runs.shorten(middle).pairs(runs.rank) >= wanted
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    points = np.zeros(layout.ranks, dtype=np.int64)
    points[ranks] = runs.row + high
    multiples = (SPLIT_MULTIPLE if layout.rows(rank) >= 8 * SPLIT_MULTIPLE else 1 for rank in range(layout.ranks))
    return tuple(x // multiple * multiple for x, multiple in zip(points.tolist(), multiples, strict=True))


_planning_lock = threading.Lock()


def get_plan(mask: Mask, layout: Layout, rank: int, device: torch.device) -> Plan:
    with _planning_lock:
        plans = _plans(mask, layout)
        if (rank, device) not in plans:
            plans[rank, device] = Plan(mask, layout, rank, device)
        return plans[rank, device]


def free_plans() -> None:
    """Free the plans of `get_plan`. Later choices are logged again."""
    with _planning_lock:
        _plans.cache_clear()
    _logged.clear()


def add_plan(plan: Plan) -> None:
    with _planning_lock:
        _plans(plan.mask, plan.layout).setdefault((plan.rank, plan.device), plan)


@contextmanager
def use_plans(plans: Sequence[Plan]) -> Generator[None]:
    """Inside this context, an attention call uses the plan whose mask has the same `reach` as the mask of the call. Documents
    and layouts may differ.
    """
    global _forced
    _forced = {plan.mask.reach: plan for plan in plans}
    try:
        yield
    finally:
        _forced = {}


def forced_plan(reach: tuple[int, int]) -> Plan | None:
    return _forced[reach] if _forced else None


_forced: dict[tuple[int, int], Plan] = {}  # shared by all threads, because autograd runs backward passes in its own thread


@lru_cache(maxsize=4)
def _plans(mask: Mask, layout: Layout) -> dict[tuple[int, torch.device], Plan]:
    return {}
