"""Schedules: what moves on each hop and which rank computes what, as plain data without tensors or communication.

In a ring pass, one block of every rank circulates past the other ranks. A rank computes with a block only if the mask leaves
work to do. The *result* of a block is what the other ranks compute for the block. The result returns to the owner of the block:

                      circulating block      result            stays, and accumulates in place
    state forward     q                      m, l, o           -
    state backward    q, dout, lse, delta    dq                dk, dv
    kv forward        k, v                   none              m, l, o
    kv backward       k, v                   dk, dv            dq

There are two kinds of schedules, and one executor (`ringattn.ring.run_schedule`) for both:

    relay     Neighbours hand blocks on. Results follow one hop behind, and return to the owner from the last rank that computes
              with the block. This suits rings that span several hosts.
    direct    Every pair of ranks is connected. A block comes from its owner, and its result goes straight back. In each round
              every rank receives the block of one rank and computes a result for it, so no link carries two blocks at a time.

In step t, a rank sends the blocks that the next step needs, and the results of the previous step. All these messages are in
flight while step t computes. A rank's own block needs no hop. If the pass has no results, the own block is computed in the
first step and hides the first hop. If the pass has results, a first part of the own block hides the first hop, and the rest
hides the return of the last results.

Only the work that the mask leaves is scheduled. A block is sent only to ranks that need it, and only with the rows that they
need.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

Need = tuple[tuple[range, ...], ...]  # need[owner][rank]: the rows of the owner's block for which the rank has work


class Message(NamedTuple):
    """One message of one hop: a block or a result, or some of its rows."""

    kind: str  # "block" or "result"
    owner: int  # the rank that the block belongs to
    src: int
    dst: int
    rows: range  # the rows of the owner's block that are sent


class LocalStep(NamedTuple):
    """One computation of a rank with some rows of an owner's block."""

    rank: int
    owner: int
    rows: range


class Step(NamedTuple):
    """One step of all ranks. Its messages are in flight while its local steps are computed."""

    local_steps: tuple[LocalStep, ...]
    messages: tuple[Message, ...] = ()


class RankStep(NamedTuple):
    """One rank's part of a step."""

    local_steps: tuple[LocalStep, ...]
    outgoing: tuple[Message, ...]
    incoming: tuple[Message, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """One ring pass, as the list of the steps of all ranks."""

    ranks: int
    steps: tuple[Step, ...]

    @cached_property
    def by_rank(self) -> tuple[tuple[RankStep, ...], ...]:
        """by_rank[rank] contains that rank's part of every step."""
        return tuple(zip(*(_by_rank(step, self.ranks) for step in self.steps), strict=True)) or ((),) * self.ranks

    def last_owner(self, rank: int) -> int | None:
        """Return the owner of the last block that `rank` computes with; None if it computes nothing."""
        local_steps = [local_step for step in self.by_rank[rank] for local_step in step.local_steps]
        return local_steps[-1].owner if local_steps else None


def _by_rank(step: Step, ranks: int) -> list[RankStep]:
    local_steps, outgoing, incoming = ([[] for _ in range(ranks)] for _ in range(3))
    for local_step in step.local_steps:
        local_steps[local_step.rank].append(local_step)
    for message in step.messages:
        outgoing[message.src].append(message)
        incoming[message.dst].append(message)
    return [RankStep(*map(tuple, parts)) for parts in zip(local_steps, outgoing, incoming, strict=True)]


def hull(ranges: Sequence[range]) -> range:
    """Return the shortest range that covers all of `ranges`."""
    ranges = [x for x in ranges if x]
    return range(min(x.start for x in ranges), max(x.stop for x in ranges)) if ranges else range(0)


@lru_cache(maxsize=64)
def direct(need: Need, results: bool, split_points: tuple[int, ...] | None = None) -> Schedule:
    """Return a ring pass in which every block comes from its owner and every result goes straight back.

    Args:
        need: need[owner][rank] contains the rows of the owner's block that the rank needs.
        results: whether blocks have results that return to their owners.
        split_points: for each rank, a row of its own block. If there are results, the rows before the split point are computed
            in the first step, and the other rows in the last step. None to compute the whole own block in the last step.
    """
    # On a tie, min() picks the first pairing, which is XOR if the number of ranks is a power of two.
    rounds = min(_pairings(need), key=len)
    returns = results and bool(rounds)
    first, rest = _own_local_steps(need, split_points, returns)
    computed, steps = [first, *rounds, rest], []
    # A block is sent in step t, is used in step t + 1, and its result is sent in step t
    # + 2. Therefore a pass with results has one more step than a pass without results.
    for t in range(len(rounds) + 1 + returns):
        messages = []
        if t < len(rounds):
            messages += [Message("block", x.owner, x.owner, x.rank, x.rows) for x in rounds[t]]
        if results and t >= 2:
            messages += [Message("result", x.owner, x.rank, x.owner, x.rows) for x in rounds[t - 2]]
        steps.append(Step(tuple(computed[t]), tuple(messages)))
    return Schedule(len(need), tuple(steps))


def _pairings(need: Need) -> list[list[list[LocalStep]]]:
    """Return two ways to pair all ranks in rounds: by rotation and, if P is a power of two, by rank XOR s.

    Rounds without any work are left out, so one of the two pairings may need fewer rounds than the other under a mask.
    """
    ranks = range(len(need))
    owner_of = [lambda rank, s: (rank - s) % len(need)]
    if len(need) & (len(need) - 1) == 0:
        # XOR pairs the ranks mutually: two ranks exchange their blocks
        # in the same round, so every link is used in both directions.
        owner_of.insert(0, lambda rank, s: rank ^ s)
    pairings = []
    for owner in owner_of:
        rounds = [[LocalStep(rank, owner(rank, s), need[owner(rank, s)][rank]) for rank in ranks] for s in ranks[1:]]
        with_work = [[local_step for local_step in one_round if local_step.rows] for one_round in rounds]
        pairings.append([one_round for one_round in with_work if one_round])
    return pairings


def _own_local_steps(need: Need, split_points: tuple[int, ...] | None, returns: bool) -> tuple[list[LocalStep], ...]:
    """Return two lists of local steps of all ranks with their own blocks: one list for the first step and one for the last.

    The blocks are split only if results return to their owners (`returns`).
    """
    first, rest = [], []
    for rank in range(len(need)):
        rows = need[rank][rank]
        split = split_points[rank] if split_points else rows.start
        if not returns:
            split = rows.stop  # there are no results whose return could be hidden
        split = min(max(split, rows.start), rows.stop)
        first.append(LocalStep(rank, rank, range(rows.start, split)))
        rest.append(LocalStep(rank, rank, range(split, rows.stop)))
    return [local_step for local_step in first if local_step.rows], [local_step for local_step in rest if local_step.rows]


@lru_cache(maxsize=64)
def relay(need: Need, results: bool, split_points: tuple[int, ...] | None = None) -> Schedule:
    """Return the shortest ring pass in which neighbours hand blocks on.

    Each block is relayed up to the last rank that needs it. It contains all rows that any of the receiving ranks needs. All
    blocks move in the same direction around the ring, and the direction with fewer messages is chosen. The arguments are the
    same as for `direct`.
    """
    schedules = (_one_way(need, results, split_points, direction) for direction in (1, -1))
    # On a tie, min() picks the first direction.
    return min(schedules, key=lambda schedule: sum(len(step.messages) for step in schedule.steps))


def _one_way(need: Need, results: bool, split_points: tuple[int, ...] | None, direction: int) -> Schedule:
    ranks = len(need)
    # For each owner: the numbers of hops after which its block reaches the first rank and the last rank with work for the
    # block; 0 if no other rank has such work.
    distances = [[t for t in range(1, ranks) if need[r][(r + direction * t) % ranks]] for r in range(ranks)]
    first, extent = ([pick(ts, default=0) for ts in distances] for pick in (min, max))
    # A relayed block is not shortened on the way, so it contains the rows of all ranks that need any of it.
    carried = [hull([rows for rank, rows in enumerate(need[owner]) if rank != owner]) for owner in range(ranks)]
    final = max(extent)
    returns = results and final > 0
    own_first, own_rest = _own_local_steps(need, split_points, returns)
    last = final + returns
    steps = []
    for t in range(last + 1):
        local_steps, messages = [], []
        for owner in range(ranks):
            before, here, after = ((owner + direction * (t + i)) % ranks for i in (-1, 0, 1))
            rows = carried[owner]
            if t < extent[owner]:
                messages.append(Message("block", owner, here, after, rows))
            if results and extent[owner] and first[owner] < t <= extent[owner] + 1:
                # The result follows its block one hop behind. After the last rank with work it returns to the owner directly.
                messages.append(Message("result", owner, before, here if t <= extent[owner] else owner, rows))
            if 1 <= t <= extent[owner] and need[owner][here]:
                local_steps.append(LocalStep(here, owner, rows))
        local_steps = (own_first if t == 0 else []) + local_steps + (own_rest if t == last else [])
        if local_steps or messages:
            steps.append(Step(tuple(local_steps), tuple(messages)))
    return Schedule(ranks, tuple(steps))


def build_schedule(need: Need, results: bool, all_pairs: bool = False, split_points: tuple[int, ...] | None = None) -> Schedule:
    """Return the direct schedule if all pairs of ranks are connected, and the relay schedule otherwise."""
    return (direct if all_pairs else relay)(need, results, split_points)
