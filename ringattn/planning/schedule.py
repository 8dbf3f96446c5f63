"""Build the schedules of ring passes: plain data that lists the messages and the computations of each step.

Every rank owns one block, which circulates. The other ranks compute a *result* from the block. The result returns to the owner:

                      circulating block      result            stays, and accumulates in place
    state forward     q                      m, l, o           -
    state backward    q, dout, lse, delta    dq                dk, dv
    kv forward        k, v                   none              m, l, o
    kv backward       k, v                   dk, dv            dq

In a *relay* schedule, which suits several hosts, ranks pass each block on to their neighbours. The result of the block follows
one hop behind. In a *direct* schedule, each rank receives a block from its owner and sends the result straight back. Direct
schedules consist of rounds in which no link carries two blocks at a time.

While a rank computes step t, it sends the blocks for step t + 1 and the results of step t - 1. Each rank splits its own block:
work on the first part hides the first hop, and work on the rest hides the return of the last results. Without results, the
block is not split. Schedules leave out blocks, rows and computations that the mask does not need.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

Need = tuple[tuple[range, ...], ...]  # need[owner][rank] is the range of rows of the owner's block that the rank needs


class Message(NamedTuple):
    """One message of one hop, with rows of a block or of a result."""

    kind: str  # "block" or "result"
    owner: int  # the rank that the block belongs to
    src: int
    dst: int
    rows: range


class LocalStep(NamedTuple):
    """One computation of a rank with some rows of the block of `owner`."""

    rank: int
    owner: int
    rows: range


class Step(NamedTuple):
    """One step of all ranks. The messages are in flight while the ranks compute the local steps."""

    local_steps: tuple[LocalStep, ...]
    messages: tuple[Message, ...] = ()


class RankStep(NamedTuple):
    """The local steps and the messages of one rank in one step."""

    local_steps: tuple[LocalStep, ...]
    outgoing: tuple[Message, ...]
    incoming: tuple[Message, ...]


class LocalSteps(NamedTuple):
    """All local steps of a schedule, as arrays of integers with one element per local step."""

    step: np.ndarray  # the step of the schedule
    rank: np.ndarray
    owner: np.ndarray
    start: np.ndarray  # the rows are range(start, stop)
    stop: np.ndarray


class Messages(NamedTuple):
    """All messages of a schedule, as arrays of integers with one element per message."""

    step: np.ndarray  # the step of the schedule
    src: np.ndarray
    dst: np.ndarray
    is_result: np.ndarray  # 1 for a result, and 0 for a block
    rows: np.ndarray  # the number of rows


@dataclass(frozen=True, eq=False)
class Schedule:
    """The schedule of one ring pass."""

    ranks: int
    steps: tuple[Step, ...]

    def __reduce__(self):
        return Schedule, (self.ranks, self.steps)  # without the cached properties

    @cached_property
    def by_rank(self) -> "_StepsByRank":
        """The steps of each rank: `by_rank[rank][t]`."""
        return _StepsByRank(self.steps)

    @cached_property
    def local_steps(self) -> LocalSteps:
        rows = [(t, *x[:2], x.rows.start, x.rows.stop) for t, step in enumerate(self.steps) for x in step.local_steps]
        return LocalSteps(*np.array(rows, dtype=np.int64).reshape(-1, 5).T)

    @cached_property
    def messages(self) -> Messages:
        rows = [(t, x.src, x.dst, x.kind == "result", len(x.rows)) for t, step in enumerate(self.steps) for x in step.messages]
        return Messages(*np.array(rows, dtype=np.int64).reshape(-1, 5).T)

    def last_owner(self, rank: int) -> int | None:
        """Return the owner of the last block that `rank` computes with."""
        local_steps = [local_step for step in self.by_rank[rank] for local_step in step.local_steps]
        return local_steps[-1].owner if local_steps else None


class _StepsByRank(dict[int, "tuple[RankStep, ...]"]):
    """Computes the steps of a rank at the first access."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        super().__init__()
        self.steps = steps

    def __missing__(self, rank: int) -> tuple[RankStep, ...]:
        self[rank] = tuple(
            RankStep(
                tuple(x for x in step.local_steps if x.rank == rank),
                tuple(x for x in step.messages if x.src == rank),
                tuple(x for x in step.messages if x.dst == rank),
            )
            for step in self.steps
        )
        return self[rank]


def hull(ranges: Sequence[range]) -> range:
    ranges = [x for x in ranges if x]
    return range(min(x.start for x in ranges), max(x.stop for x in ranges)) if ranges else range(0)


@lru_cache(maxsize=64)
def direct(need: Need, results: bool, split_points: tuple[int, ...] | None = None) -> Schedule:
    """Return the direct schedule.

    Args:
        need: need[owner][rank] contains the rows of the owner's block that the rank needs.
        results: whether ranks send results back to the owners of the blocks.
        split_points: the row at which each rank's own block is split. If None, ranks compute with their own blocks last.
    """
    rounds = _rounds(need)
    returns = results and bool(rounds)
    first, rest = _own_local_steps(need, split_points, returns)
    computed = [first, *rounds, rest]
    steps: list[Step] = []
    # A block is sent in step t and used in step t + 1. The result returns in step t + 2.
    for t in range(len(rounds) + 1 + returns):
        messages = []
        if t < len(rounds):
            messages += [Message("block", x.owner, x.owner, x.rank, x.rows) for x in rounds[t]]
        if results and t >= 2:
            messages += [Message("result", x.owner, x.rank, x.owner, x.rows) for x in rounds[t - 2]]
        steps.append(Step(tuple(computed[t]), tuple(messages)))
    return Schedule(len(need), tuple(steps))


def _rounds(need: Need) -> list[list[LocalStep]]:
    """Return the rounds of a direct schedule. In each round, a rank computes with the block of at most one other rank.

    In round s, rank r computes either with the block of rank r XOR s, or with the block of rank (r - s) modulo P. The function
    chooses the variant with fewer rounds under this mask.
    """
    ranks = range(len(need))
    pairings = [[[(rank - s) % len(need) for rank in ranks] for s in ranks[1:]]]
    if len(need) & (len(need) - 1) == 0:
        # XOR comes first, so that min() prefers it. With XOR, two ranks exchange their blocks in the same round.
        pairings.insert(0, [[rank ^ s for rank in ranks] for s in ranks[1:]])
    with_work = [[x for x in pairing if any(need[owner][rank] for rank, owner in enumerate(x))] for pairing in pairings]
    return [
        [LocalStep(rank, owner, need[owner][rank]) for rank, owner in enumerate(owners) if need[owner][rank]]
        for owners in min(with_work, key=len)
    ]


def _own_local_steps(need: Need, split_points: tuple[int, ...] | None, returns: bool) -> tuple[list[LocalStep], ...]:
    """Return the local steps in which ranks compute with their own blocks: those of the first step, and those of the last."""
    first: list[LocalStep] = []
    rest: list[LocalStep] = []
    for rank in range(len(need)):
        rows = need[rank][rank]
        split = split_points[rank] if split_points else rows.start
        if not returns:
            split = rows.stop
        split = min(max(split, rows.start), rows.stop)
        first.append(LocalStep(rank, rank, range(rows.start, split)))
        rest.append(LocalStep(rank, rank, range(split, rows.stop)))
    return [local_step for local_step in first if local_step.rows], [local_step for local_step in rest if local_step.rows]


@lru_cache(maxsize=64)
def relay(need: Need, results: bool, split_points: tuple[int, ...] | None = None) -> Schedule:
    """Return the schedule in which ranks relay each block up to the last rank that needs it.

    All blocks move in the direction that needs fewer messages. A block contains every row that at least one other rank needs.
    Arguments as for `direct`.
    """
    schedules = (_one_way(need, results, split_points, direction) for direction in (1, -1))
    return min(schedules, key=lambda schedule: sum(len(step.messages) for step in schedule.steps))


def _one_way(need: Need, results: bool, split_points: tuple[int, ...] | None, direction: int) -> Schedule:
    ranks = len(need)
    # distances[r] lists the numbers of hops after which the block of rank r reaches a rank that needs it. first[r] is the
    # smallest, and extent[r] the largest.
    distances = [[t for t in range(1, ranks) if need[r][(r + direction * t) % ranks]] for r in range(ranks)]
    first, extent = ([pick(ts, default=0) for ts in distances] for pick in (min, max))
    carried = [hull([rows for rank, rows in enumerate(need[owner]) if rank != owner]) for owner in range(ranks)]
    final = max(extent)
    returns = results and final > 0
    own_first, own_rest = _own_local_steps(need, split_points, returns)
    last = final + returns
    steps = []
    for t in range(last + 1):
        local_steps: list[LocalStep] = []
        messages: list[Message] = []
        for owner in range(ranks):
            before, here, after = ((owner + direction * (t + i)) % ranks for i in (-1, 0, 1))
            rows = carried[owner]
            if t < extent[owner]:
                messages.append(Message("block", owner, here, after, rows))
            if results and extent[owner] and first[owner] < t <= extent[owner] + 1:
                # The last rank that computes with the block sends the result directly to the owner.
                messages.append(Message("result", owner, before, here if t <= extent[owner] else owner, rows))
            if 1 <= t <= extent[owner] and need[owner][here]:
                local_steps.append(LocalStep(here, owner, rows))
        local_steps = (own_first if t == 0 else []) + local_steps + (own_rest if t == last else [])
        if local_steps or messages:
            steps.append(Step(tuple(local_steps), tuple(messages)))
    return Schedule(ranks, tuple(steps))


def build_schedule(need: Need, results: bool, all_pairs: bool = False, split_points: tuple[int, ...] | None = None) -> Schedule:
    return (direct if all_pairs else relay)(need, results, split_points)
