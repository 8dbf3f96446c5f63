"""Run the all-to-all over NVLink. Copy engines write slices of tensors directly into the memory of other GPUs.

Every rank has one receive buffer for all-to-alls. Each exchange uses a region of the receive buffer. A region has the layout of
the receive tensors. A sender therefore copies its slice straight to the final position. Then the sender sets a flag. When all
flags of an exchange are set, the region is copied into ordinary tensors, for kernels and autograd.

Flags work as in `ringattn.comm.nvlink`. A rank sets *ready* flags at the end of each call. Other ranks wait for a ready flag
before they write into the rank's receive buffer. No deadlock is possible, because send i never waits for send i + 1 or later
work of another rank.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.comm import cuda_driver
from ringattn.comm.all_to_all import LABEL, Slice, expected_messages
from ringattn.comm.nvlink import MAX_SENDS, NvlinkTransport, padded_bytes
from ringattn.comm.transport import Tensors
from ringattn.comm.watchdog import Hop

READY = MAX_SENDS  # row of the ready flags in the table of flags


class StridedCopy(NamedTuple):
    """A `StridedCopy` copies `count` rows of `width` bytes from a tensor into a region.

    `target` is an offset in the region and `source` an offset in the tensor, in bytes. A pitch is the distance in bytes between
    the starts of consecutive rows.
    """

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    count: int


Sizes = tuple[int, ...]


@lru_cache(maxsize=1024)
def _strided_copies(
    take: Slice, put: Slice, shape: Sizes, strides: Sizes, heads: Sizes, lengths: Sizes, element_size: int, rank: int
) -> list[list[StridedCopy]]:
    """Return the strided copies that send one slice of a tensor to each rank, grouped by receiver.

    Args:
        take, put: as for `Exchange.send`.
        shape, strides: describe the tensor (B, N, H, D) to send. The heads of a token must be contiguous. Tokens must not
            overlap.
        heads, lengths: the tensors to fill have the shape (B, lengths[receiver], *heads).
        rank: the sender.
    """

    def offset_and_pitch(x: Tensor, entry: int) -> tuple[int, int]:
        return int(x[entry].storage_offset()) * element_size, x.stride(1) * element_size

    # Meta tensors have offsets and strides, but no memory.
    source_tensor = torch.empty_strided(shape, strides, device="meta")
    copies = []
    for peer, length in enumerate(lengths):
        target = put(torch.empty(shape[0], length, *heads, device="meta"), rank)
        source = take(source_tensor, peer)
        count, width = source.shape[1], source.shape[2:].numel() * element_size
        batch = range(shape[0]) if count and width else ()
        copies.append([StridedCopy(*offset_and_pitch(target, i), *offset_and_pitch(source, i), width, count) for i in batch])
    return copies


class NvlinkAllToAll:
    def __init__(self, transport: NvlinkTransport) -> None:
        self.transport, self.receive_buffer = transport, transport.all_to_all_buffer
        self.main = torch.cuda.current_stream(transport.device)
        # `local_stream` copies data within the GPU.
        self.send_stream, self.local_stream = (transport.streams[kind] for kind in ("block", "result"))
        self.computed = torch.cuda.Event()
        self.num_sends = self.total_bytes = 0
        self.sent: list[Tensors] = []  # keeps the tensors alive until `finish`

    def start(self, into: Tensors, lengths: tuple[int, ...], sends: int = 1) -> "_NvlinkExchange":
        offsets = []
        for x in into:
            offsets.append(self.total_bytes)
            # All ranks use the same offsets, so every region has room for the longest shard.
            self.total_bytes += padded_bytes(x, max(lengths))
        return _NvlinkExchange(self, into, lengths, offsets, sends)

    def begin_send(self) -> int:
        """Make `send_stream` and `local_stream` wait for the main stream. Return the number of this send, counted from 0."""
        number, self.num_sends = self.num_sends, self.num_sends + 1
        if number == 0:
            self.receive_buffer.reserve(self.total_bytes)
            self.receive_buffer.keep_for_graph()
        assert number < MAX_SENDS, "a call sends at most two messages per chunk of heads"
        computed = self.transport.start_event() if number == 0 else self.computed
        computed.record(self.main)
        self.send_stream.wait_event(computed)
        self.local_stream.wait_event(computed)
        return number

    def finish(self) -> None:
        """Allow other ranks to write into the receive buffer of this rank for the next call. See `AllToAll.finish`."""
        self.main.wait_stream(self.send_stream)
        self.main.wait_stream(self.local_stream)
        self.sent.clear()
        self.transport.filled.clear()
        flags = [self.transport.all_to_all_flag(peer, READY, self.transport.rank) for peer in self.transport.others]
        cuda_driver.set_flags(flags, self.main.cuda_stream)


class _NvlinkExchange:
    def __init__(
        self, all_to_all: NvlinkAllToAll, into: Tensors, lengths: tuple[int, ...], offsets: list[int], sends: int
    ) -> None:
        self.all_to_all, self.into, self.lengths, self.offsets = all_to_all, into, lengths, offsets
        self.num_sends = sends
        self.awaited: list[int] = []  # numbers of the started sends
        self.complete = torch.cuda.Event()
        self.hop: Hop | None = None

    def send(self, block: Tensors, take: Slice, put: Slice) -> None:
        all_to_all, transport = self.all_to_all, self.all_to_all.transport
        others = transport.others
        # Strided copies require contiguous heads, and tokens that do not overlap. In an expanded tensor, tokens overlap.
        block = tuple(
            x if x.stride()[2:] == (x.shape[3], 1) and x.stride(1) >= x.shape[2] * x.shape[3] else x.contiguous() for x in block
        )
        number, stream = all_to_all.begin_send(), all_to_all.send_stream.cuda_stream
        if number == 0:
            ready = [transport.all_to_all_flag(transport.rank, READY, peer) for peer in others]
            cuda_driver.wait_and_clear_flags(ready, stream)
        addresses = all_to_all.receive_buffer.addresses  # read after begin_send, which may have allocated a larger buffer
        copies = [
            _strided_copies(take, put, x.shape, x.stride(), y.shape[2:], self.lengths, x.element_size(), transport.rank)
            for x, y in zip(block, self.into, strict=True)
        ]

        def copy_to(peer: int, stream: int) -> None:
            for x, offset, of_tensor in zip(block, self.offsets, copies, strict=True):
                region, tensor = addresses[peer] + offset, x.data_ptr()
                for target, target_pitch, source, source_pitch, width, count in of_tensor[peer]:
                    cuda_driver.copy_rows(region + target, target_pitch, tensor + source, source_pitch, width, count, stream)

        # Start with the next rank, so that no two ranks write to the same GPU at the same time.
        for peer in (*others[transport.rank :], *others[: transport.rank]):
            copy_to(peer, stream)
        cuda_driver.set_flags([transport.all_to_all_flag(peer, number, transport.rank) for peer in others], stream)
        copy_to(transport.rank, all_to_all.local_stream.cuda_stream)
        self.awaited.append(number)
        all_to_all.sent.append(block)
        if len(self.awaited) == self.num_sends:
            self._copy_out()

    def _copy_out(self) -> None:
        all_to_all, transport = self.all_to_all, self.all_to_all.transport
        rank, stream, last = transport.rank, all_to_all.local_stream, self.awaited[-1]
        # Hops must finish in the order of their starts. Exchanges finish in the order of their last sends.
        self.hop = transport.watchdog.start(LABEL, last, last + 1, expected_messages(rank, self.lengths))
        flags = [transport.all_to_all_flag(rank, number, peer) for number in self.awaited for peer in transport.others]
        cuda_driver.wait_and_clear_flags(flags, stream.cuda_stream)
        transport.filled.append(self.into)
        for y, offset in zip(self.into, self.offsets, strict=True):
            if y.numel():
                cuda_driver.copy(y.data_ptr(), all_to_all.receive_buffer.addresses[rank] + offset, y.nbytes, stream.cuda_stream)
        self.complete.record(stream)

    def wait(self) -> Tensors:
        assert len(self.awaited) == self.num_sends, "all blocks must be sent before they are waited for"
        self.all_to_all.main.wait_event(self.complete)
        self.all_to_all.transport.watchdog.finished(self.hop)
        return self.into
