"""The all-to-all of Ulysses (heads <-> sequence; Jacobs et al. 2023, https://arxiv.org/abs/2309.14509).

Every rank sends a slice of its tensors to each other rank. The receivers write the slices into their own tensors:

                      rank a sends to rank b            rank b writes the slice of rank a
    to heads          a's tokens of b's heads           to the rows of a's tokens
    to tokens         b's tokens of a's heads           to the columns of a's heads

Each attention call has one `AllToAll` object, and one `Exchange` per set of receive tensors.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ringattn.comm.transport import Addressed, MessageTransport, Tensors, Wait, complete_hop, report_faults
from ringattn.planning.schedule import Message

LABEL = "all-to-all"  # the name of an all-to-all in the watchdog's messages


class HeadSlice(NamedTuple):
    """A `HeadSlice` selects one chunk of one rank's heads from x (B, N, H, ...). The heads of each rank are divided into
    `chunks` chunks.
    """

    ranks: int
    chunks: int
    chunk: int

    def __call__(self, x: Tensor, rank: int) -> Tensor:
        return x.unflatten(2, (self.ranks, self.chunks, -1))[:, :, rank, self.chunk]


class TokenSlice(NamedTuple):
    """A `TokenSlice` selects the tokens of one rank from x (B, tokens of all ranks, ...). The tokens of x are in rank order."""

    counts: tuple[int, ...]  # number of tokens on each rank

    def __call__(self, x: Tensor, rank: int) -> Tensor:
        return x.narrow(1, sum(self.counts[:rank]), self.counts[rank])


Slice = HeadSlice | TokenSlice


class Exchange(Protocol):
    """An `Exchange` fills a set of tensors with slices that all ranks send."""

    def send(self, block: Tensors, take: Slice, put: Slice) -> None:
        """Send the slice `take(x, r)` of each tensor x in `block` to every rank r. The receiver's `into` (see `start`) contains
        a tensor y for each x, and the slice is copied to `put(y, sender)`.

        The tensors of `block` must not be modified before `AllToAll.finish`.
        """

    def wait(self) -> Tensors:
        """Wait until all messages have arrived, and return the filled tensors. Call this method after all sends."""


class AllToAll(Protocol):
    """The exchanges of one attention call. All ranks must create the exchanges in the same order."""

    def start(self, into: Tensors, lengths: tuple[int, ...], sends: int = 1) -> Exchange:
        """Create an exchange. All exchanges of a call must be created before the first send.

        Args:
            into: the contiguous tensors to fill, each (B, lengths[rank], ...).
            lengths: tokens per rank.
            sends: the calls of `Exchange.send` per rank.
        """

    def finish(self) -> None:
        """Wait, on the host or on the current CUDA stream, until all sent tensors may be modified."""


@lru_cache(maxsize=64)
def expected_messages(rank: int, lengths: tuple[int, ...]) -> tuple[Message, ...]:
    return tuple(Message("part", peer, peer, rank, range(n)) for peer, n in enumerate(lengths) if peer != rank)


class PointToPointAllToAll:
    def __init__(self, transport: MessageTransport) -> None:
        self.transport = transport

    def start(self, into: Tensors, lengths: tuple[int, ...], sends: int = 1) -> "_PointToPointExchange":
        return _PointToPointExchange(self.transport, into, lengths)

    def finish(self) -> None:
        """Do nothing, because `Exchange.wait` has already waited for the sends."""


class _PointToPointExchange:
    def __init__(self, transport: MessageTransport, into: Tensors, lengths: tuple[int, ...]) -> None:
        self.transport, self.into, self.lengths = transport, into, lengths
        self.completions: list[Callable[[], Tensors]] = []

    def send(self, block: Tensors, take: Slice, put: Slice) -> None:
        rank = self.transport.rank
        peers = [peer for peer in range(self.transport.size) if peer != rank]
        for x, y in zip(block, self.into, strict=True):
            put(y, rank).copy_(take(x, rank))
        sent = [(take(x, peer).contiguous(), peer) for peer in peers for x in block]
        targets = [(put(y, peer), peer) for peer in peers for y in self.into]
        # Messages must be contiguous.
        received = [(torch.empty_like(y, memory_format=torch.contiguous_format), peer) for y, peer in targets]
        wait = self._start(sent, received)

        def complete(sent: Addressed = sent) -> Tensors:  # the default argument keeps the sent tensors alive
            wait()
            for (y, _), (x, _) in zip(targets, received, strict=True):
                y.copy_(x)
            return self.into

        self.completions.append(complete)

    def _start(self, sent: Addressed, received: Addressed) -> Wait:
        number, messages = len(self.completions), expected_messages(self.transport.rank, self.lengths)
        hop = self.transport.watchdog.start(LABEL, number, number + 1, messages)
        try:
            return report_faults(partial(self.transport.exchange, sent, received), self.transport, hop)
        finally:
            self.transport.watchdog.cancel(hop)

    def wait(self) -> Tensors:
        messages = expected_messages(self.transport.rank, self.lengths)
        for number, complete in enumerate(self.completions):
            hop = self.transport.watchdog.start(LABEL, number, len(self.completions), messages)
            complete_hop(complete, self.transport, hop)
        return self.into
