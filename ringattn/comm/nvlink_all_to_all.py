"""The exchange of heads over NVLink: copy engines write parts of tensors straight to their places in the memory of peers.

Every rank has one inbox for it, which all layers and calls share. A landing is the image of its tensors there: a sender copies
rows of some heads from where they stand in its own tensors to where they belong in the image, without packing them, and raises
a flag. Once all flags are up the image is copied out whole, and the kernels read and autograd saves ordinary memory.

Flags are 0 or 1, and who waits for one puts it back, so they say the same whether a call is issued or replayed from a CUDA
graph. A rank begins to write into an inbox when its owner has raised *open*, at the end of the call before.

Nothing can wait in a circle: whatever waits for a peer waits for work that the peer has issued at or before the same send.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ringattn.comm import cuda_driver
from ringattn.comm.all_to_all import Place, incoming
from ringattn.comm.inbox import Inbox, padded_bytes
from ringattn.comm.transport import Block

if TYPE_CHECKING:
    from ringattn.comm.nvlink import PeerCopies

MOST_SENDS = 64  # of a call
OPEN = MOST_SENDS  # the flag after those of the sends


class Move(NamedTuple):
    """`rows` pieces of `width` bytes: where the first stands in the receiver's image and the sender's tensor, how far apart."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    rows: int


@lru_cache(maxsize=1024)
def _moves(
    take: Place,
    put: Place,
    shape: torch.Size,
    strides: tuple[int, ...],
    heads: torch.Size,
    lengths: tuple[int, ...],
    size: int,
    rank: int,
) -> tuple[tuple[Move, ...], ...]:
    """For each peer what it gets of `rank`'s tensor, a move a batch row.

    Args:
        shape, strides: of the tensor, (B, N, H, D); a row's heads stand side by side.
        heads: of the image, (H, D); it is contiguous, (B, n, H, D) with n = lengths[peer].
        size: bytes of an element.
    """
    whole = torch.empty_strided(shape, strides, device="meta")
    moves = []
    for peer, length in enumerate(lengths):
        ends = put(torch.empty(shape[0], length, *heads, device="meta"), rank), take(whole, peer)
        rows, width = ends[1].shape[1], ends[1].shape[2:].numel() * size
        batch = range(shape[0]) if rows and width else ()
        sides = [[((x.storage_offset() + i * x.stride(0)) * size, x.stride(1) * size) for x in ends] for i in batch]
        moves.append(tuple(Move(*target, *source, width, rows) for target, source in sides))
    return tuple(moves)


class PeerMailbox:
    """What the swaps of one group share on one rank: inbox and flags."""

    def __init__(self, line: "PeerCopies") -> None:
        self.line = line
        self.inbox = Inbox(line, "the exchange of heads", "heads have not been exchanged")
        self.flags, self.addresses = line.share(torch.int32, (MOST_SENDS + 1) * line.size)
        self.flags[OPEN * line.size :] = 1
        line.synchronise()

    def flag(self, rank: int, purpose: int, writer: int) -> int:
        """Address of a flag of `rank`."""
        return self.addresses[rank] + 4 * (purpose * self.line.size + writer)


class PeerSwap:
    """See `ringattn.comm.all_to_all.Swap`."""

    def __init__(self, box: PeerMailbox) -> None:
        self.box, self.line = box, box.line
        self.main = torch.cuda.current_stream(self.line.device)
        self.outward, self.inward = (self.line.streams[kind] for kind in ("traveller", "result"))
        self.ready = torch.cuda.Event()  # after it, what is sent next is computed
        self.sends = self.total = 0
        self.sent: list[Block] = []

    def land(self, into: Block, lengths: tuple[int, ...], sends: int = 1) -> "_Image":
        starts = []
        for x in into:
            starts.append(self.total)
            self.total += padded_bytes(x, max(lengths))
        return _Image(self, into, lengths, starts, sends)

    def begin_send(self) -> int:
        """The number of a new send; the side streams wait for what is computed so far."""
        number, self.sends = self.sends, self.sends + 1
        if number == 0:
            capturing = torch.cuda.is_current_stream_capturing()
            self.box.inbox.reserve(self.total, capturing)
            if capturing:
                self.box.inbox.keep()
        assert number < MOST_SENDS, "one call sends few blocks"
        self.ready.record(self.main)
        self.outward.wait_event(self.ready)
        self.inward.wait_event(self.ready)
        return number

    def end(self) -> None:
        for stream in (self.outward, self.inward):
            done = torch.cuda.Event()
            done.record(stream)
            self.main.wait_event(done)
        self.sent.clear()
        flags = [self.box.flag(peer, OPEN, self.line.rank) for peer in self.line.others]
        cuda_driver.raise_flags(flags, self.main.cuda_stream)


class _Image:
    """A landing: tensors, and their image in the inbox."""

    def __init__(self, swap: PeerSwap, into: Block, lengths: tuple[int, ...], starts: list[int], sends: int) -> None:
        self.swap, self.into, self.lengths, self.starts, self.left = swap, into, lengths, starts, sends
        self.awaited: list[int] = []
        self.complete = torch.cuda.Event()
        self.hop = None

    def send(self, block: Block, take: Place, put: Place) -> None:
        swap, box, line = self.swap, self.swap.box, self.swap.line
        others = line.others
        block = tuple(x if _in_rows(x) else x.contiguous() for x in block)
        number, out = swap.begin_send(), swap.outward.cuda_stream
        if number == 0:
            cuda_driver.take_flags([box.flag(line.rank, OPEN, peer) for peer in others], out)
        places = [
            (
                _moves(take, put, x.shape, x.stride(), y.shape[2:], self.lengths, x.element_size(), line.rank),
                x.data_ptr(),
                start,
            )
            for x, y, start in zip(block, self.into, self.starts, strict=True)
        ]
        # every rank begins with the one after it, so that no two write to the same at the same time
        for peer in (*others[line.rank :], *others[: line.rank]):
            _start(places, peer, box.inbox.addresses[peer], out)
        cuda_driver.raise_flags([box.flag(peer, number, line.rank) for peer in others], out)
        _start(places, line.rank, box.inbox.addresses[line.rank], swap.inward.cuda_stream)
        self.awaited.append(number)
        swap.sent.append(block)
        self.left -= 1
        if not self.left:
            self._settle()

    def _settle(self) -> None:
        """Copy the image out when all of it is there."""
        box, rank, stream, last = self.swap.box, self.swap.line.rank, self.swap.inward, self.awaited[-1]
        # hops end in the order in which they start: that of their last sends, and of `wait`
        self.hop = self.swap.line.watchdog.start("exchange of heads", last, last + 1, incoming(rank, self.lengths))
        flags = [box.flag(rank, number, peer) for number in self.awaited for peer in self.swap.line.others]
        cuda_driver.take_flags(flags, stream.cuda_stream)
        for y, start in zip(self.into, self.starts, strict=True):
            if y.numel():
                cuda_driver.copy(y.data_ptr(), box.inbox.addresses[rank] + start, y.nbytes, stream.cuda_stream)
        self.complete.record(stream)

    def wait(self) -> Block:
        assert not self.left, "a block is still to be sent"
        self.swap.main.wait_event(self.complete)
        self.swap.line.watchdog.passed(self.hop)
        return self.into


def _start(places: list[tuple[tuple[tuple[Move, ...], ...], int, int]], peer: int, inbox: int, stream: int) -> None:
    """Copy what `peer` gets of each tensor, (moves by peer, address, start of the image), into its inbox."""
    for moves, address, start in places:
        for target, target_pitch, source, source_pitch, width, rows in moves[peer]:
            cuda_driver.copy_rows(inbox + start + target, target_pitch, address + source, source_pitch, width, rows, stream)


def _in_rows(x: Tensor) -> bool:
    """Whether all heads of a row of x (B, N, H, D) stand side by side."""
    return x.stride(3) == 1 and x.stride(2) == x.shape[3]
