"""What moves on each hop and who computes what, as plain data: no tensors, no communication.

A ring pass carries one block of every rank, its *traveller*, past the other ranks. Where it meets something to do, the rank
computes. What the traveller earns there, its *result*, is sent home:

                      traveller              result            stays, and is added to in place
    state forward     q                      m, l, o           -
    state backward    q, dout, lse, delta    dq                dk, dv
    kv forward        k, v                   none              m, l, o
    kv backward       k, v                   dk, dv            dq

Two schedules do this, and one executor runs both:

    relay     travellers are handed on from neighbour to neighbour, and their results follow one hop behind them, from the last
              rank that they visit straight home. For rings that span several hosts.
    direct    every pair of ranks is linked: a traveller comes from its owner, and its result goes straight home. Each round
              pairs the ranks so that each serves one and is served by one, and no link carries two blocks at a time.

At step t a rank sends what the next step needs, and the results of the step before: all fly while step t computes. The own
block needs no hop. Where there are no results it comes first and hides the first hop; where there are, a first part of it
hides the first hop, and the rest, at the end, the last result's way home.

Only what the mask leaves is scheduled: a traveller goes to ranks that need it, and of its rows only those that are needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

Need = tuple[tuple[range, ...], ...]  # need[owner][rank]: which rows of the owner's traveller have anything to do at a rank


@dataclass(frozen=True)
class Message:
    """One block, or some of its rows, on one hop."""

    kind: str  # traveller | result
    owner: int  # the rank whose block it is
    src: int
    dst: int
    rows: range  # of the owner's block


class Visit(NamedTuple):
    """A rank computes with rows of an owner's traveller."""

    rank: int
    owner: int
    rows: range


@dataclass(frozen=True)
class Step:
    """What happens at the same time: messages in flight while the visits are computed."""

    visits: tuple[Visit, ...]
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class RankStep:
    """One rank's part of a step."""

    visits: tuple[Visit, ...]
    outgoing: tuple[Message, ...]
    incoming: tuple[Message, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """One ring pass of all ranks, step by step."""

    ranks: int
    steps: tuple[Step, ...]

    @cached_property
    def by_rank(self) -> tuple[tuple[RankStep, ...], ...]:
        """by_rank[rank]: that rank's part of every step."""
        return tuple(zip(*(_parts(step, self.ranks) for step in self.steps), strict=True)) or ((),) * self.ranks

    def last_owner(self, rank: int) -> int | None:
        """Whose traveller `rank` computes with last; None if it computes nothing."""
        visits = [visit for step in self.by_rank[rank] for visit in step.visits]
        return visits[-1].owner if visits else None

    def bytes_sent(self, traveller_row: int, result_row: int) -> list[int]:
        """Bytes each rank sends, where a row of a traveller has `traveller_row` bytes and one of a result `result_row`."""
        size = {"traveller": traveller_row, "result": result_row}
        sent = [0] * self.ranks
        for step in self.steps:
            for message in step.messages:
                sent[message.src] += len(message.rows) * size[message.kind]
        return sent


def _parts(step: Step, ranks: int) -> list[RankStep]:
    visits, outgoing, incoming = ([[] for _ in range(ranks)] for _ in range(3))
    for visit in step.visits:
        visits[visit.rank].append(visit)
    for message in step.messages:
        outgoing[message.src].append(message)
        incoming[message.dst].append(message)
    return [RankStep(*map(tuple, part)) for part in zip(visits, outgoing, incoming, strict=True)]


def hull(spans: Sequence[range]) -> range:
    """The shortest range that covers all of `spans`."""
    spans = [span for span in spans if span]
    return range(min(span.start for span in spans), max(span.stop for span in spans)) if spans else range(0)


@lru_cache(maxsize=64)
def direct(need: Need, results: bool, cuts: tuple[int, ...] | None = None) -> Schedule:
    """A ring pass in which every traveller comes from its owner and every result goes straight home.

    Args:
        need: who needs whom.
        results: whether travellers have results to bring home.
        cuts: with results, the row of each own block from which on it is left to the end. None: all of it.
    """
    rounds = min(_meetings(need), key=len)
    first, rest = _own_visits(need, bool(rounds), results, cuts)
    steps = []
    for t in range(len(rounds) + 1 + (results and bool(rounds))):
        visits, messages = list(first) if t == 0 else [], []
        if t < len(rounds):
            messages += [Message("traveller", x.owner, x.owner, x.rank, x.rows) for x in rounds[t]]
        if results and t >= 2:
            messages += [Message("result", x.owner, x.rank, x.owner, x.rows) for x in rounds[t - 2]]
        visits += rounds[t - 1] if 1 <= t <= len(rounds) else rest if t else []
        steps.append(Step(tuple(visits), tuple(messages)))
    return Schedule(len(need), tuple(steps))


def _meetings(need: Need) -> list[list[list[Visit]]]:
    """Two orders of meeting in pairs, as lists of rounds: by rank XOR s where P is a power of two, and by rotation."""
    ranks = range(len(need))
    orders = [lambda rank, s: (rank - s) % len(need)]
    if len(need) & (len(need) - 1) == 0:
        orders.insert(0, lambda rank, s: rank ^ s)
    rounds = [
        [[Visit(rank, order(rank, s), need[order(rank, s)][rank]) for rank in ranks] for s in ranks[1:]] for order in orders
    ]
    return [[kept for visits in order if (kept := [visit for visit in visits if visit.rows])] for order in rounds]


def _own_visits(need: Need, travels: bool, results: bool, cuts: tuple[int, ...] | None) -> tuple[list[Visit], list[Visit]]:
    """The visits of every rank to its own block: at the first step, and at the last."""
    first, rest = [], []
    for rank in range(len(need)):
        rows = need[rank][rank]
        cut = rows.stop if not (travels and results) else rows.start if cuts is None else cuts[rank]
        cut = min(max(cut, rows.start), rows.stop)
        first.append(Visit(rank, rank, range(rows.start, cut)))
        rest.append(Visit(rank, rank, range(cut, rows.stop)))
    return [visit for visit in first if visit.rows], [visit for visit in rest if visit.rows]


@lru_cache(maxsize=64)
def relay(need: Need, results: bool, cuts: tuple[int, ...] | None = None) -> Schedule:
    """The shortest ring pass, handed on by neighbours, that lets every traveller meet the ranks that need it.

    A traveller goes as far as the last rank that needs it, with the rows that any of them need, and the ring turns the way
    that takes fewer hops. Arguments as for `direct`.
    """
    forward, backward = (_one_way(need, results, cuts, direction) for direction in (1, -1))
    hops = [sum(len(step.messages) for step in schedule.steps) for schedule in (forward, backward)]
    return forward if hops[0] <= hops[1] else backward


def _one_way(need: Need, results: bool, cuts: tuple[int, ...] | None, direction: int) -> Schedule:
    ranks = len(need)
    # how many hops an owner's traveller makes before it first and last finds work; 0 hops: none away from home
    distances = [[t for t in range(1, ranks) if need[r][(r + direction * t) % ranks]] for r in range(ranks)]
    first, extent = ([pick(ts, default=0) for ts in distances] for pick in (min, max))
    carried = [hull([rows for rank, rows in enumerate(need[owner]) if rank != owner]) for owner in range(ranks)]
    final = max(extent)
    own_first, own_rest = _own_visits(need, final > 0, results, cuts)
    last = final + 1 if results and final else final
    steps = []
    for t in range(last + 1):
        visits, messages = [], []
        for owner in range(ranks):
            before, here, after = ((owner + direction * (t + i)) % ranks for i in (-1, 0, 1))
            rows = carried[owner]
            if t < extent[owner]:
                messages.append(Message("traveller", owner, here, after, rows))
            if results and extent[owner] and first[owner] < t <= extent[owner] + 1:
                messages.append(Message("result", owner, before, here if t <= extent[owner] else owner, rows))
            if 1 <= t <= extent[owner] and need[owner][here]:
                visits.append(Visit(here, owner, rows))
        visits = (own_first if t == 0 else []) + visits + (own_rest if t == last else [])
        if visits or messages:
            steps.append(Step(tuple(visits), tuple(messages)))
    return Schedule(ranks, tuple(steps))


def circulate(need: Need, results: bool, all_pairs: bool = False, cuts: tuple[int, ...] | None = None) -> Schedule:
    """The direct schedule where `all_pairs` of ranks are linked, else the relay."""
    return (direct if all_pairs else relay)(need, results, cuts)
