"""The exchange of heads: rows of all heads on each rank become all rows of some heads, and back (Jacobs et al. 2023).

Every rank of a group gives each other one a part of its tensors, and what comes finds its place in tensors of the receiver:
what rank a takes for rank b, rank b puts where it belongs for rank a. A `Place` says which part that is.

                 takes for rank b             puts from rank a
    to heads     all its rows of b's heads    where a's rows stand among those of all ranks
    to rows      b's rows of its own heads    where a's heads stand among all heads

A `Swap` is all that a call exchanges. A `Landing` is where one block of tensors comes together, from one message of every rank
or from several, so that attention can work on some heads while others are under way. `Messages` below does it point to point;
`ringattn.comm.nvlink_all_to_all` writes into the memory of peers.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ringattn.comm.transport import Addressed, Block, Messenger, Pending, Transport, completed, watched
from ringattn.planning.schedule import Message

Finish = Callable[[], Block]


class Heads(NamedTuple):
    """Part `part` of `parts` of a rank's share of the heads of x (B, N, H, ...), which `ranks` ranks share."""

    ranks: int
    parts: int
    part: int

    def __call__(self, x: Tensor, rank: int) -> Tensor:
        return x.unflatten(2, (self.ranks, self.parts, -1))[:, :, rank, self.part]


class Rows(NamedTuple):
    """A rank's rows of x (B, sum of rows, ...), where those of all ranks stand in order of rank."""

    counts: tuple[int, ...]  # of every rank

    def __call__(self, x: Tensor, rank: int) -> Tensor:
        return x.narrow(1, sum(self.counts[:rank]), self.counts[rank])


Place = Heads | Rows


class Landing(Protocol):
    """Tensors that come together from all ranks."""

    def send(self, block: Block, take: Place, put: Place) -> None:
        """Every rank gives `take` of `block` to each, which lands as `put` says. Not to be changed until the swap has ended."""

    def wait(self) -> Block:
        """The tensors, once all blocks have been sent and arrived."""


class Swap(Protocol):
    """What one call exchanges, the same on every rank."""

    def land(self, into: Block, lengths: tuple[int, ...], sends: int = 1) -> Landing:
        """A landing of `sends` blocks in the contiguous tensors `into`, (B, n, ...) with n = lengths[rank].

        A call makes all of its landings before it sends.
        """

    def end(self) -> None:
        """All that was sent may be changed."""


def begin(line: Transport) -> Swap:
    """A swap in the transport's own way, or point to point."""
    return Messages(line) if isinstance(line, Messenger) else line.swap()


@lru_cache(maxsize=64)  # asked for at every landing
def incoming(rank: int, lengths: tuple[int, ...]) -> tuple[Message, ...]:
    """What a rank waits for, as messages to people tell it."""
    return tuple(Message("part", peer, peer, rank, range(n)) for peer, n in enumerate(lengths) if peer != rank)


class Messages:
    """A swap by point-to-point messages, one exchange for each block that is sent."""

    def __init__(self, line: Messenger) -> None:
        self.line = line

    def land(self, into: Block, lengths: tuple[int, ...], sends: int = 1) -> "_Exchanges":
        return _Exchanges(self.line, into, lengths)

    def end(self) -> None: ...


class _Exchanges:
    def __init__(self, line: Messenger, into: Block, lengths: tuple[int, ...]) -> None:
        self.line, self.into, self.lengths = line, into, lengths
        self.finishes: list[Finish] = []

    def send(self, block: Block, take: Place, put: Place) -> None:
        rank, peers = self.line.rank, [peer for peer in range(self.line.size) if peer != self.line.rank]
        for x, y in zip(block, self.into, strict=True):
            put(y, rank).copy_(take(x, rank))
        sent = [(take(x, peer).contiguous(), peer) for peer in peers for x in block]
        places = [(put(y, peer), peer) for peer in peers for y in self.into]
        received = [(torch.empty_like(y, memory_format=torch.contiguous_format), peer) for y, peer in places]
        pending = self._begin(_not_empty(sent), _not_empty(received))

        def finish(sent: Addressed = sent) -> Block:  # which keeps what is being sent
            pending.wait()
            for (y, _), (x, _) in zip(places, received, strict=True):
                y.copy_(x)
            return self.into

        self.finishes.append(finish)

    def _begin(self, sent: Addressed, received: Addressed) -> Pending:
        """An exchange; one that cannot begin, for a peer is gone, is told as a hop that failed."""
        t, messages = len(self.finishes), incoming(self.line.rank, self.lengths)
        hop = self.line.watchdog.start("exchange of heads", t, t + 1, messages)
        try:
            return watched(partial(self.line.exchange, sent, received), self.line, hop)
        finally:
            self.line.watchdog.withdraw(hop)

    def wait(self) -> Block:
        for t, finish in enumerate(self.finishes):
            messages = incoming(self.line.rank, self.lengths)
            hop = self.line.watchdog.start("exchange of heads", t, len(self.finishes), messages)
            completed(finish, self.line, hop)
        return self.into


def _not_empty(messages: Addressed) -> Addressed:
    return [(x, peer) for x, peer in messages if x.numel()]
