"""Build the schedules of ring passes. A schedule is plain data, and lists the messages and computations of each step.

Every rank owns one block, which circulates. Every other rank computes a *result* from a circulating block. The result returns
to the owner:

                      circulating block      result            stays, and accumulates in place
    state forward     q                      m, l, o           -
    state backward    q, dout, lse, delta    dq                dk, dv
    kv forward        k, v                   none              m, l, o
    kv backward       k, v                   dk, dv            dq

In a *relay* schedule, which suits several hosts, ranks pass each block on to their neighbours. The result for a block
circulates one hop behind the block. In a *direct* schedule, each rank receives a block from its owner and sends the result
straight back. A direct schedule consists of rounds. In each round, a link carries at most one block.

During step t, a rank sends the blocks for step t + 1 and the results of step t - 1. Each rank splits its own block in two
parts. The rank computes the first part during the first hop, and the second part while the last results return. Schedules leave
out blocks, rows and computations that the mask does not need.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

Need = tuple[tuple[range, ...], ...]  # need[owner][rank] is the range of rows of the owner's block that the rank needs


class Message(NamedTuple):
    """A `Message` describes the rows of a block or result that one rank sends to another in a hop."""

    kind: str  # "block" or "result"
    owner: int  # the rank that the block belongs to
    src: int
    dst: int
    rows: range


class LocalStep(NamedTuple):
    rank: int
    owner: int
    rows: range


class Step(NamedTuple):
    """One step of all ranks. The messages are in flight while the ranks compute the local steps."""

    local_steps: tuple[LocalStep, ...]
    messages: tuple[Message, ...] = ()


class RankStep(NamedTuple):
    local_steps: tuple[LocalStep, ...]
    outgoing: tuple[Message, ...]
    incoming: tuple[Message, ...]


class LocalSteps(NamedTuple):
    """A `LocalSteps` tuple holds all local steps of a schedule as integer arrays. Each array has one element per local step."""

    step: np.ndarray  # the step of the schedule
    rank: np.ndarray
    owner: np.ndarray
    start: np.ndarray  # the rows are range(start, stop)
    stop: np.ndarray


class Messages(NamedTuple):
    """A `Messages` tuple holds all messages of a schedule as integer arrays. Each array has one element per message."""

    step: np.ndarray  # the step of the schedule
    is_result: np.ndarray  # 1 for a result, and 0 for a block
    owner: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    start: np.ndarray  # the rows are range(start, stop)
    stop: np.ndarray


@dataclass(frozen=True, eq=False)
class Schedule:
    """The schedule of one ring pass. The arrays are sorted by step."""

    ranks: int
    num_steps: int
    local_steps: LocalSteps
    messages: Messages

    def __reduce__(self):
        return Schedule, (self.ranks, self.num_steps, self.local_steps, self.messages)  # without the cached properties

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return tuple(map(Step, self._local_steps(), self._messages()))

    @cached_property
    def by_rank(self) -> "_StepsByRank":
        """The steps of each rank: `by_rank[rank][t]`."""
        return _StepsByRank(self)

    def steps_of(self, rank: int) -> tuple[RankStep, ...]:
        messages = self.messages
        sides = (self._messages(end == rank) for end in (messages.src, messages.dst))
        return tuple(map(RankStep, self._local_steps(self.local_steps.rank == rank), *sides))

    def last_owner(self, rank: int) -> int | None:
        """Return the owner of the block that `rank` uses last."""
        local_steps = [local_step for step in self.by_rank[rank] for local_step in step.local_steps]
        return local_steps[-1].owner if local_steps else None

    def _local_steps(self, chosen: Any = slice(None)) -> list[tuple[LocalStep, ...]]:
        found: list[list[LocalStep]] = [[] for _ in range(self.num_steps)]
        for t, rank, owner, start, stop in zip(*(x[chosen].tolist() for x in self.local_steps), strict=True):
            found[t].append(LocalStep(rank, owner, range(start, stop)))
        return list(map(tuple, found))

    def _messages(self, chosen: Any = slice(None)) -> list[tuple[Message, ...]]:
        found: list[list[Message]] = [[] for _ in range(self.num_steps)]
        for t, is_result, owner, src, dst, start, stop in zip(*(x[chosen].tolist() for x in self.messages), strict=True):
            found[t].append(Message("result" if is_result else "block", owner, src, dst, range(start, stop)))
        return list(map(tuple, found))


class _StepsByRank(dict[int, "tuple[RankStep, ...]"]):
    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.schedule = schedule

    def __missing__(self, rank: int) -> tuple[RankStep, ...]:
        self[rank] = self.schedule.steps_of(rank)
        return self[rank]


def hull(ranges: Sequence[range]) -> range:
    ranges = [x for x in ranges if x]
    return range(min(x.start for x in ranges), max(x.stop for x in ranges)) if ranges else range(0)


@lru_cache(maxsize=64)
def direct(need: Need, results: bool, split_points: tuple[int, ...] | None = None) -> Schedule:
    """Return the direct schedule.

    Args:
        need: need[owner][rank] contains the rows of the owner's block that the rank needs.
        results: whether results return to the owners of the blocks.
        split_points: the row at which each rank's own block is split; None for the first row.
    """
    start, stop = (np.array([[getattr(x, end) for x in row] for row in need]) for end in ("start", "stop"))
    number, rank, owner = _rounds(stop > start)
    returns = results and len(number) > 0
    num_rounds = int(number.max(initial=-1)) + 1
    first, rest = _own_rows(need, split_points, returns)
    rows, is_result = (start[owner, rank], stop[owner, rank]), np.zeros_like(number)
    # A block is sent in step t and used in step t + 1. The result of the block returns in step t + 2.
    own = _table(5, [(0, *x) for x in first]), _table(5, [(num_rounds + 1, *x) for x in rest])
    local_steps = np.concatenate((own[0], np.stack((number + 1, rank, owner, *rows), 1), own[1]))
    messages = np.stack((number, is_result, owner, owner, rank, *rows), 1)
    if results:
        messages = np.concatenate((messages, np.stack((number + 2, is_result + 1, owner, rank, owner, *rows), 1)))
    messages = messages[messages[:, 0].argsort(kind="stable")]
    return Schedule(len(need), num_rounds + 1 + returns, LocalSteps(*local_steps.T), Messages(*messages.T))


def _table(columns: int, rows: Sequence[tuple[int, ...]]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, columns)


def _rounds(needed: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the rounds of a direct schedule. In each round, a rank computes with the block of at most one other rank.

    In round s, rank r computes with the block of rank r XOR s, or with the block of rank (r - s) modulo P. The rule with fewer
    rounds is used.

    Args:
        needed: needed[owner][rank] says whether the rank needs rows of the owner's block.

    Returns:
        (round, rank, owner): arrays with one element per computation with an owner's block, in the order of the rounds.
    """
    ranks = np.arange(len(needed))
    owners = [(ranks - ranks[1:, None]) % len(needed)]
    if len(needed) & (len(needed) - 1) == 0:
        # In a tie, min() prefers XOR, because two ranks then exchange their blocks in the same round.
        owners.insert(0, ranks ^ ranks[1:, None])
    with_work = min((each[needed[each, ranks].any(1)] for each in owners), key=len)
    number, rank = needed[with_work, ranks].nonzero()
    return number, rank, with_work[number, rank]


def _own_rows(
    need: Need, split_points: tuple[int, ...] | None, returns: bool
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    first, rest = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for rank in range(len(need)):
        rows = need[rank][rank]
        split = split_points[rank] if split_points else rows.start
        if not returns:
            split = rows.stop
        split = min(max(split, rows.start), rows.stop)
        first.append((rank, rank, rows.start, split))
        rest.append((rank, rank, split, rows.stop))
    return [x for x in first if x[2] < x[3]], [x for x in rest if x[2] < x[3]]


@lru_cache(maxsize=64)
def relay(need: Need, results: bool, split_points: tuple[int, ...] | None = None) -> Schedule:
    """Return the schedule in which ranks relay each block up to the last rank that needs it.

    All blocks move in the direction that needs fewer messages. A block contains every row that at least one other rank needs.
    Arguments as for `direct`.
    """
    schedules = (_one_way(need, results, split_points, direction) for direction in (1, -1))
    return min(schedules, key=lambda schedule: len(schedule.messages.step))


def _one_way(need: Need, results: bool, split_points: tuple[int, ...] | None, direction: int) -> Schedule:
    ranks = len(need)
    # distances[r] lists the numbers of hops from rank r to all ranks that need its block.
    distances = [[t for t in range(1, ranks) if need[r][(r + direction * t) % ranks]] for r in range(ranks)]
    first, extent = ([pick(ts, default=0) for ts in distances] for pick in (min, max))
    carried = [hull([rows for rank, rows in enumerate(need[owner]) if rank != owner]) for owner in range(ranks)]
    final = max(extent)
    returns = results and final > 0
    first_rows, rest = _own_rows(need, split_points, returns)
    last, num_steps = final + returns, 0
    all_local_steps, all_messages = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for t in range(last + 1):
        local_steps: list[tuple[int, ...]] = []
        messages: list[tuple[int, ...]] = []
        for owner in range(ranks):
            before, here, after = ((owner + direction * (t + i)) % ranks for i in (-1, 0, 1))
            rows = carried[owner].start, carried[owner].stop
            if t < extent[owner]:
                messages.append((0, owner, here, after, *rows))
            if results and extent[owner] and first[owner] < t <= extent[owner] + 1:
                messages.append((1, owner, before, here if t <= extent[owner] else owner, *rows))
            if 1 <= t <= extent[owner] and need[owner][here]:
                local_steps.append((here, owner, *rows))
        local_steps = (first_rows if t == 0 else []) + local_steps + (rest if t == last else [])
        if local_steps or messages:
            all_local_steps += [(num_steps, *x) for x in local_steps]
            all_messages += [(num_steps, *x) for x in messages]
            num_steps += 1
    columns = _table(5, all_local_steps).T, _table(7, all_messages).T
    return Schedule(ranks, num_steps, LocalSteps(*columns[0]), Messages(*columns[1]))


def build_schedule(need: Need, results: bool, all_pairs: bool = False, split_points: tuple[int, ...] | None = None) -> Schedule:
    return (direct if all_pairs else relay)(need, results, split_points)
