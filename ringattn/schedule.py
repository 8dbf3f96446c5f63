"""What moves on each hop and who computes what, as plain data: no tensors, no communication.

A ring pass carries one block of every rank, its *traveller*, past the other ranks. Where it meets something to do, the rank
computes. What the traveller earns on its way, its *result*, follows one hop behind it and goes home from its last stop:

                      traveller              result            stays, and is added to in place
    state forward     q                      m, l, o           -
    state backward    q, dout, lse, delta    dq                dk, dv
    kv forward        k, v                   none              m, l, o
    kv backward       k, v                   dk, dv            dq

At step t a rank sends the traveller it holds, which the next rank needs at step t + 1, and the result of step t - 1, which the
next rank merges after its own step t: both fly while step t computes. A rank meets its own block last where there are
results, to hide the last one's way home, and first where there are none, to hide the first hop.

Only work that the mask leaves is scheduled: a traveller stops at the last rank that needs it, and the ring turns the way that
takes fewer hops.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

Need = tuple[tuple[bool, ...], ...]  # need[owner][rank]: whether the owner's traveller has anything to do at a rank


@dataclass(frozen=True)
class Message:
    """One block on one hop."""

    kind: str  # traveller | result
    owner: int  # the rank whose block it is
    src: int
    dst: int


@dataclass(frozen=True)
class Step:
    """What happens at the same time: messages in flight while the visits are computed."""

    visits: tuple[tuple[int, int], ...]  # (rank, owner of the traveller it computes with)
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class RankStep:
    """One rank's part of a step."""

    owners: tuple[int, ...]  # whose travellers it computes with
    outgoing: tuple[Message, ...]
    incoming: tuple[Message, ...]


@dataclass(frozen=True)
class Schedule:
    """One ring pass of all ranks, step by step."""

    ranks: int
    steps: tuple[Step, ...]

    @cached_property
    def by_rank(self) -> tuple[tuple[RankStep, ...], ...]:
        """by_rank[rank]: that rank's part of every step."""
        return tuple(tuple(_part(step, rank) for step in self.steps) for rank in range(self.ranks))

    def last_owner(self, rank: int) -> int | None:
        """Whose traveller `rank` computes with last; None if it computes nothing."""
        owners = [owner for step in self.by_rank[rank] for owner in step.owners]
        return owners[-1] if owners else None

    def bytes_sent(self, rows: Sequence[int], traveller_row: int, result_row: int) -> list[int]:
        """Bytes each rank sends, for blocks of `rows[owner]` rows of `traveller_row` and `result_row` bytes."""
        size = {"traveller": traveller_row, "result": result_row}
        sent = [0] * self.ranks
        for step in self.steps:
            for message in step.messages:
                sent[message.src] += rows[message.owner] * size[message.kind]
        return sent


def _part(step: Step, rank: int) -> RankStep:
    return RankStep(
        owners=tuple(owner for at, owner in step.visits if at == rank),
        outgoing=tuple(message for message in step.messages if message.src == rank),
        incoming=tuple(message for message in step.messages if message.dst == rank),
    )


@lru_cache(maxsize=32)
def circulate(need: Need, results: bool) -> Schedule:
    """The shortest ring pass that lets every traveller meet the ranks that need it.

    Args:
        need: who needs whom.
        results: whether travellers have results to bring home.
    """
    forward, backward = (_one_way(need, results, direction) for direction in (1, -1))
    hops = [sum(len(step.messages) for step in schedule.steps) for schedule in (forward, backward)]
    return forward if hops[0] <= hops[1] else backward


def _one_way(need: Need, results: bool, direction: int) -> Schedule:
    ranks = len(need)
    # how many hops an owner's traveller makes before it first and last finds work; 0 hops: none away from home
    distances = [[t for t in range(1, ranks) if need[r][(r + direction * t) % ranks]] for r in range(ranks)]
    first, extent = ([pick(ts, default=0) for ts in distances] for pick in (min, max))
    final = max(extent)
    own_step = final + 1 if results and final else 0
    steps = []
    for t in range(max(final, own_step) + 1):
        visits, messages = [], []
        for owner in range(ranks):
            before, here, after = ((owner + direction * (t + i)) % ranks for i in (-1, 0, 1))
            if t < extent[owner]:
                messages.append(Message("traveller", owner, here, after))
            if results and extent[owner] and first[owner] < t <= extent[owner] + 1:
                messages.append(Message("result", owner, before, here if t <= extent[owner] else owner))
            if t == own_step and need[owner][owner]:
                visits.append((owner, owner))
            if 1 <= t <= extent[owner] and need[owner][here]:
                visits.append((here, owner))
        if visits or messages:
            steps.append(Step(tuple(visits), tuple(messages)))
    return Schedule(ranks, tuple(steps))
